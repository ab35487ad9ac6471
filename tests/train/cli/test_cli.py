"""The command line: help for every sub-command, and train, compile, evaluate in a row."""

import dataclasses
import json
import subprocess
import sys

import pytest

import asap_jax as aj
from train.cli import fit_options, parser
from train.data import tfds
from train.recipes import catalogue
from train.runtime.errors import UserError
from train.training import linear_baseline

COMMANDS = ("demo", "recipes", "train", "baseline", "compile", "evaluate", "esp", "refresh")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_sub_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as end:
        parser.main([command, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m train {command}")
    assert len(text.splitlines()) >= 5


def test_the_module_runs_from_the_repository_root():
    root = tfds.PACKAGED.parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "train", "--help"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(command in done.stdout for command in COMMANDS)


def test_no_command_is_an_error_that_lists_them(capsys):
    with pytest.raises(SystemExit) as end:
        parser.main([])
    assert end.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_recipes_are_listed_with_cost_and_expected_accuracy(capsys):
    assert parser.main(["recipes"]) == 0
    text = capsys.readouterr().out
    for recipe in catalogue.listed():
        assert f"{recipe.name} ({recipe.preset}): {recipe.summary}" in text
        assert recipe.cost in text
        assert recipe.expected in text


def test_a_user_error_is_one_line_and_exit_status_1(tmp_path, capsys):
    assert parser.main(["compile", str(tmp_path / "nothing")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: no checkpoint in ")
    assert error.count("\n") == 1


def test_a_missing_data_set_says_what_to_do(tmp_path, capsys):
    given = ["train", "demo", "--data-dir", str(tmp_path), "--run", str(tmp_path / "run")]
    assert parser.main(given) == 1
    assert "--data-dir DIR" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["demo", "--num-steps", "0"], "num_steps"),
        (["demo", "--batch-size", "-3"], "batch_size -3 must be at least 1"),
        (
            ["demo", "--batch-size", "5000"],
            "batch_size 5000 must be in 1..2000, the number of training images",
        ),
        (["demo", "--batch-size", "51"], "cannot be divided evenly among 2 devices"),
        (["demo", "--patch-size", "5"], "patch_size 5 must divide the 28x28 pixels"),
        (["demo", "--epochs", "0"], "epochs 0 must be at least 1"),
        (["demo", "--learning-rate", "nan"], "learning_rate nan must be above 0"),
        (["demo", "--train-share", "0"], "train_share 0.0 must be in (0, 1]"),
        (["mnist", "--attention", "diff"], "num_heads 1 must be even"),
        (["demo", "--accumulate", "3"], "accumulate 3 must divide batch_size 50"),
        (["ag_news", "--patch-size", "4"], "--patch-size is for image recipes"),
        (["demo", "--length", "64"], "--length is for text recipes"),
        (["ag_news", "--length", "0"], "length 0 must be at least 1"),
        (["demo", "--amortize", "0"], "amortize: every=0 must be at least 1"),
        (["demo", "--amortize-decay", "0.5"], "--amortize-decay needs --amortize K"),
        (["demo", "--amortize", "5", "--amortize-closures", "10"], "closures=10 needs a teacher"),
        (["demo", "--amortize", "5", "--attention", "softmax"], "amortize is for sinkhorn"),
        (["demo", "--esp-slices", "8"], "--esp-slices is for --attention esp or esp_annealed"),
        (["demo", "--attention", "esp", "--esp-slices", "0"], "esp_slices 0 must be at least 1"),
        (["demo", "--detach-key-dual", "--attention", "softmax"], "is for sinkhorn attention"),
        (["demo", "--keep", "best"], "--keep needs --held-out SHARE"),
        (["demo", "--held-out", "1"], "held_out 1.0 must be in (0, 1)"),
        (["ag_news", "--held-out", "0", "--evaluate-every", "2"], "--evaluate-every needs"),
        (["nothing"], "no recipe 'nothing': choose one of"),
        (["imdb", "--process-id", "1"], "need --coordinator"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_setting_out_of_range_gives_one_line_that_names_it(tmp_path, capsys, given, message):
    assert parser.main(["train", *given, "--run", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_linear_baseline_is_printed(tiny, monkeypatch, capsys):
    monkeypatch.setitem(catalogue.RECIPES, "tiny", tiny)
    monkeypatch.setattr(linear_baseline, "run", lambda recipe, split: (0.5, 0.01))
    assert parser.main(["baseline", "tiny"]) == 0
    assert "test accuracy 0.500 on 500 images: logistic regression on pixels" in (
        capsys.readouterr().out
    )


def test_train_compile_and_evaluate_work_together(minute, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(catalogue.RECIPES, "minute", minute)
    monkeypatch.setenv(tfds.VARIABLE, str(tfds.PACKAGED))
    run = str(tmp_path / "run")
    settings = ["--epochs", "1", "--batch-size", "500", "--num-steps", "4", "--seed", "1"]
    assert parser.main(["train", "minute", "--run", run, *settings]) == 0
    assert "read 2,000 training and 500 test images" in capsys.readouterr().out
    assert parser.main(["train", "minute", "--run", run, *settings]) == 1
    assert "--resume" in capsys.readouterr().err
    assert parser.main(["train", "minute", "--run", run, "--resume", *settings]) == 0
    paper = ["--fit", "paper", "--num-slices", "4"]
    assert parser.main(["compile", run, "--images", "60", *paper]) == 0
    assert "dual R2" in capsys.readouterr().out
    assert parser.main(["evaluate", run, "--rounds", "1"]) == 0
    assert "ASAP-0" in capsys.readouterr().out
    stored = json.loads((tmp_path / "run" / "fidelity.json").read_text())
    assert stored["title"] == "demo: Sinkhorn teacher S=4 and its replacements"
    assert parser.main(["compile", run, "--images", "60", "--ridge-scale", "trace"]) == 0
    assert parser.main(["evaluate", run, "--rounds", "1"]) == 0
    assert "compiled" in capsys.readouterr().out
    for settings, message in (
        (["--closures", "three"], "'three'"),
        (["--closures", "two_sided"], "two_sided"),
        (["--objective", "kl"], "--objective is not a setting of --fit moments"),
        (["--features", "moments"], "--features is not a setting of --fit moments"),
        (["--fit", "auto", "--ridge", "1"], "--ridge is not a setting of --fit auto"),
        (["--fit", "paper", "--ridge", "-1"], "ridge"),
    ):
        assert parser.main(["compile", run, *settings]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert parser.main(["evaluate", run, "--artefact", str(tmp_path / "none.npz")]) == 1
    assert "run python -m train compile" in capsys.readouterr().err


def test_a_run_that_amortizes_is_tested_both_ways(minute, tmp_path, monkeypatch, capsys):
    spec = aj.SinkhornSpec(num_steps=4)
    monkeypatch.setitem(catalogue.RECIPES, "minute", dataclasses.replace(minute, spec=spec))
    monkeypatch.setenv(tfds.VARIABLE, str(tfds.PACKAGED))
    run = str(tmp_path / "run")
    settings = ["--epochs", "1", "--batch-size", "500", "--amortize", "2"]
    row = ["--amortize-ending", "row", "--amortize-decay", "0.5"]
    assert parser.main(["train", "minute", "--run", run, *settings, *row]) == 0
    printed = capsys.readouterr().out
    assert "rel-l2 to Sinkhorn" in printed
    assert "with the compiled layers that it trained through" in printed
    assert "agreement" in printed
    assert parser.main(["train", "minute", "--run", run, "--resume", *settings]) == 1
    assert "ending='row', decay=0.5" in capsys.readouterr().err
    assert parser.main(["evaluate", run, "--rounds", "1"]) == 0
    assert "trained through" in capsys.readouterr().out


def test_the_fits_and_their_settings_are_those_of_the_library(capsys):
    arguments = parser.parser().parse_args(["compile", "run"])
    assert fit_options.read(arguments, 3) == aj.Options(seed=3)
    arguments = parser.parser().parse_args(["compile", "run", "--fit", "paper", "--token-bias"])
    assert fit_options.read(arguments, 0) == aj.Options(fit=aj.PaperFit(token_bias=True))
    with pytest.raises(SystemExit):
        parser.parser().parse_args(["compile", "run", "--fit", "nothing"])
    error = capsys.readouterr().err
    assert all(name in error for name in ("moments", "paper", "auto", "large codebook, weighted"))


def test_every_candidate_of_the_library_can_be_chosen_by_name():
    for candidate in aj.THOROUGH:
        arguments = parser.parser().parse_args(
            ["compile", "run", "--fit", candidate.name, "--closures", "1"]
        )
        if candidate.chain:
            with pytest.raises(UserError, match="chain"):
                fit_options.read(arguments, 0)
        else:
            assert fit_options.read(arguments, 0).fit == candidate
