"""The command line: help for every sub-command, and train, compile, evaluate in a row."""

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import asap_jax as aj
from train.cli import fit_options, parser, train_commands
from train.data import tfds
from train.evaluation import exported
from train.recipes import catalogue
from train.runtime.errors import UserError
from train.training import factory, linear_baseline
from train.training.teacher import load_teacher


def sub_parsers(top):
    """Name to parser of every sub-command."""
    (action,) = (a for a in top._actions if isinstance(a, argparse._SubParsersAction))
    return action.choices


COMMANDS = sub_parsers(parser.parser())
STUDIES = sub_parsers(COMMANDS["study"])


@pytest.mark.parametrize(
    "words", [[name] for name in COMMANDS] + [["study", name] for name in STUDIES], ids=" ".join
)
def test_the_help_of_every_sub_command_says_what_it_prints_and_how_long_it_takes(words, capsys):
    with pytest.raises(SystemExit) as end:
        parser.main([*words, "--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(f"usage: python -m train {' '.join(words)}")
    assert "Prints " in text
    assert "Takes " in text


def test_an_unknown_argument_gives_the_usage_of_its_sub_command(capsys):
    for words in (["recipes", "mnist"], ["study", "ideas", "run"], ["bench", "layer"]):
        with pytest.raises(SystemExit) as end:
            parser.main([*words, "--nothing"])
        assert end.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith(f"usage: python -m train {words[0]}")
        assert "unrecognized arguments: --nothing" in error


def test_ctrl_c_is_no_error_and_says_how_to_continue(tmp_path, monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_commands, "run_train", interrupted)
    monkeypatch.setattr(train_commands, "run_baseline", interrupted)
    command = ["train", "mnist", "--run", "a b"]
    assert parser.main(command) == 130
    line = "stopped; continue with: python -m train train mnist --run 'a b' --resume\n"
    assert capsys.readouterr().err == line
    assert parser.main([*command, "--resume"]) == 130
    assert capsys.readouterr().err == line
    assert parser.main(["baseline", "mnist"]) == 130
    again = "stopped; the same command starts again: python -m train baseline mnist\n"
    assert capsys.readouterr().err == again


def test_a_file_that_cannot_be_written_is_one_line_without_a_temporary_name(tmp_path, capsys):
    (tmp_path / "file").touch()
    run = tmp_path / "file" / "run"
    assert parser.main(["train", "demo", "--epochs", "1", "--run", str(run)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: Not a directory: ")
    assert error.count("\n") == 1
    assert "tmp" not in error.replace(str(tmp_path), "")


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
    error = capsys.readouterr().err
    assert "--data-dir DIR" in error
    assert "pip install tensorflow" not in error


def test_training_says_which_preset_it_takes_and_what_it_and_the_small_one_cost():
    paper, small = catalogue.find("mnist"), catalogue.find("mnist", "small")
    line = train_commands.announced(paper)
    assert line == f"training mnist, preset paper: {paper.cost}; --preset small: {small.cost}"
    assert train_commands.announced(small) == f"training mnist, preset small: {small.cost}"


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
    assert "% of the variance of the" in capsys.readouterr().out
    assert parser.main(["evaluate", run, "--rounds", "1"]) == 0
    assert "ASAP-0" in capsys.readouterr().out
    stored = json.loads((tmp_path / "run" / "fidelity.json").read_text())
    assert stored["title"] == "demo: Sinkhorn teacher S=4 and its replacements"
    assert parser.main(["compile", run, "--images", "60", "--ridge-scale", "trace"]) == 0
    assert parser.main(["evaluate", run, "--rounds", "1"]) == 0
    assert "compiled" in capsys.readouterr().out
    check_export(run, capsys)
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
    missing = ["--artefact", str(tmp_path / "none.npz"), "--data-dir", str(tfds.PACKAGED)]
    assert parser.main(["evaluate", run, *missing]) == 1
    hint = f"run python -m train compile {run} --data-dir {tfds.PACKAGED}"
    assert hint in capsys.readouterr().err


def check_export(run, capsys):
    """The compiled run as a program: its outputs are those of the model, and it is timed."""
    assert parser.main(["export", run, "--platforms", "cpu"]) == 0
    file = pathlib.Path(run) / "compiled.export"
    printed = capsys.readouterr().out
    assert "inputs float32[batch, 28, 28, 1]; outputs float32[batch, 10]; platforms cpu" in printed
    assert f"next: python -m train time {file}" in printed
    trained = load_teacher(run)
    variables = aj.load(pathlib.Path(run) / "compiled.npz", like=trained.variables)
    (images,) = exported.inputs(exported.read(file), {"batch": 3})[0]
    expected = jax.jit(factory.build(trained.recipe).apply)(variables, images)
    np.testing.assert_allclose(exported.read(file).call(images), expected, atol=1e-5)
    assert parser.main(["time", str(file), "--rounds", "1", "--size", "batch=3"]) == 0
    assert "ms a call at batch=3 (median of 1), compiled in" in capsys.readouterr().out
    assert parser.main(["time", str(file), "--size", "length=3"]) == 1
    assert "no size 'length': its symbolic sizes are batch" in capsys.readouterr().err
    assert parser.main(["time", str(pathlib.Path(run) / "compiled.npz")]) == 1
    assert "is not a program that `jax.export` wrote" in capsys.readouterr().err


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
