"""The study of several teachers: every figure against NumPy, and what is written."""

import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import rich.console
from jax.extend.core import jaxprs_in_params

import asap_jax as aj
from asap_jax.records import Record
from train.cli import parser
from train.evaluation import fidelity, operators
from train.runtime.errors import UserError
from train.study import (
    cache,
    closures_plot,
    entries,
    extra_cost,
    fidelity_study,
    groups,
    results,
)
from train.study.teacher_figures import sample
from train.training import loop
from train.training.splits import load_data
from train.training.teacher import Teacher, accuracy_on, load_teacher

NAMES = [
    *("softmax swap", "Sinkhorn S=2", "Sinkhorn S=3", "ASAP-0", "ASAP"),
    *("Moments, 2 closures", "Auto, 2 closures"),
    "Moments, 2 closures, row ending",
    "Codebook, row mass, 1 closure, row ending",
    "Large codebook, row mass, 1 closure, row ending",
    "Auto, 2 closures, row ending",
]
STEPS = 4
CHEAP = (aj.Candidate("plain"), aj.Candidate("pooled", coefficients="pooled"))


@pytest.fixture(scope="module")
def run(minute, examples, tmp_path_factory):
    """A run folder with a trained teacher of one layer."""
    folder = tmp_path_factory.mktemp("run")
    recipe = dataclasses.replace(minute, spec=aj.SinkhornSpec(num_steps=STEPS))
    loop.train(recipe, examples, folder, seed=3)
    return folder


@pytest.fixture(scope="module")
def done(run, tmp_path_factory):
    """The study of that teacher, as the command line makes it: the study and its folder.

    Eleven operators are fitted to it, for a minute, so what needs it is a slow test.
    """
    out, found = tmp_path_factory.mktemp("study"), []
    make = fidelity_study.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aj, "CANDIDATES", CHEAP)
        patch.setattr(entries, "CLOSURES", (2,))
        patch.setattr(fidelity, "BATCH_SIZE", 20)
        patch.setattr(
            fidelity_study, "run", lambda *a, **k: found.append(make(*a, **k)) or found[-1]
        )
        few = ["--test-examples", "60", "--calibration", "60"]
        assert parser.main(["study", "fidelity", "--out", str(out), *few, str(run)]) == 0
    return found[0][0], out


@pytest.fixture(scope="module")
def values(done):
    """Values by operator."""
    (group,) = done[0].groups
    return {row.name: row.values for row in group.teachers[0].rows}


@pytest.fixture(scope="module")
def cases(run):
    """Scores of every case, three batches of 20 at one layer, in NumPy float64."""
    trained = load_teacher(run)
    test = sample(load_data(trained.recipe).test, 60)
    inputs = trained.recipe.inputs.prepare(test)
    reference = operators.teacher(trained.recipe, trained.variables)
    found = []
    for batch in (inputs[:20], inputs[20:40], inputs[40:]):
        for record in fidelity.capture(reference, batch).values():
            q, k = (np.asarray(x, np.float64) for x in (record.query, record.key))
            found.append(np.einsum("bnhd,bmhd->bhnm", q, k) / np.sqrt(q.shape[-1]))
    return found


def sinkhorn(scores, steps):
    plan = np.exp(scores)
    for half in range(steps):
        plan = plan / plan.sum(-1 - half % 2, keepdims=True)
    return plan


@pytest.mark.slow
def test_all_operators_are_there_with_their_closures_and_endings(done):
    (group,) = done[0].groups
    assert group.label == "demo (small), S=4, learning rate 0.001"
    assert [line.name for line in group.lines] == NAMES
    assert [line.closures for line in group.lines] == [1, 2, 3, 1, 3, 2, 2, 2, 1, 1, 2]
    other = [line.name for line in group.lines if not line.same_ending]
    assert other == ["softmax swap", "Sinkhorn S=3", *NAMES[-4:]]
    assert [line.values["calls"].median for line in group.lines] == [
        1,
        3,
        3,
        2,
        4,
        3,
        3,
        2,
        1,
        1,
        2,
    ]


@pytest.mark.slow
def test_attention_columns_are_mean_and_median_over_cases(values, cases):
    for name, steps in (("softmax swap", 1), ("Sinkhorn S=2", 2), ("Sinkhorn S=3", 3)):
        errors, divergences = [], []
        for scores in cases:
            plan, true = sinkhorn(scores, steps), sinkhorn(scores, STEPS)
            norm = lambda x: np.sqrt((x**2).sum((0, 2, 3)))
            errors.append((norm(plan - true) / norm(true)).mean())
            divergence = (true * np.log(true / plan) - true + plan).sum((-2, -1)) / 17
            divergences.append(divergence.mean())
        np.testing.assert_allclose(values[name]["rel_l2"], np.mean(errors), rtol=1e-4)
        np.testing.assert_allclose(values[name]["rel_l2_median"], np.median(errors), rtol=1e-4)
        np.testing.assert_allclose(values[name]["plan_kl"], np.mean(divergences), rtol=1e-3)


@pytest.mark.slow
def test_score_spread_is_the_standard_deviation_of_active_scores(done, cases):
    (group,) = done[0].groups
    expected = np.mean([np.std(s, axis=(0, 2, 3)) for s in cases])
    np.testing.assert_allclose(group.teachers[0].score_std, expected, rtol=1e-4)
    rng, spec = np.random.default_rng(0), aj.SinkhornSpec()
    q, k = rng.normal(size=(2, 2, 5, 3, 4)).astype(np.float32)
    mask = np.arange(5) < np.array([3, 5])[:, None]
    wide = problems.array(mask[:, None, None], jnp.float32)
    record = Record.of(problems.array(q), problems.array(k), problems.array(k), None, wide, spec)
    scores = np.einsum("bnhd,bmhd->hnbm", q, k) / 2
    expected = np.mean([np.std(head[:, mask]) for head in scores])
    found = fidelity.score_spread(record, spec=spec)
    np.testing.assert_allclose(float(found), expected, rtol=1e-5)


@pytest.mark.slow
def test_compiled_layers_are_closer_to_the_teacher_than_baselines(values):
    rel_l2 = {name: values[name]["rel_l2"] for name in NAMES}
    for kind in ("Moments", "Auto"):
        assert rel_l2[f"{kind}, 2 closures"] < rel_l2["Sinkhorn S=2"]
    assert rel_l2["ASAP"] < rel_l2["ASAP-0"] < rel_l2["softmax swap"]


@pytest.mark.slow
def test_the_automatic_fit_says_what_it_chose(done):
    (group,) = done[0].groups
    rows = {row.name: row for row in group.teachers[0].rows}
    for row in rows.values():
        assert len(row.chosen) == (1 if row.family.startswith("Auto") else 0)
        assert set(row.chosen.values()) <= {"plain", "pooled"}
    (chosen,) = rows["Auto, 2 closures"].chosen.values()
    assert group.facts["Auto, 2 closures: chosen"] == f"{chosen!r} in 1 of 1 layers"


@pytest.mark.slow
def test_only_predictions_cost_extra(values):
    n, d = 17, 8
    assert all(values[name]["extra_cost"] == 0 for name in NAMES[:3])
    # Projections of both sides on 32 slices, and the sum over slices.
    slices = (2 * n * 32 * d + n * 32) / (n * n * d)
    # Two covariances, one quadratic form, and in it one product of matrices and one with a vector.
    moments = (3 * n * d * d + d**3 + d**2) / (n * n * d)
    assert values["ASAP"]["extra_cost"] == values["ASAP-0"]["extra_cost"] == slices
    for name in NAMES[5:]:
        if "odebook" in name:  # codebooks come after a prediction from moments, as do row masses
            assert values[name]["extra_cost"] > 2 * moments
        else:
            assert values[name]["extra_cost"] == moments


def matrix_multiply_adds(jaxpr) -> int:
    """Multiply-adds of all matrix products of a traced program; dots row by row are none."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            ((contracted, _), (batch, _)) = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            if len(contracted) + len(batch) == len(shape) == eqn.invars[1].aval.ndim:
                continue
            total += eqn.outvars[0].aval.size * int(np.prod([shape[i] for i in contracted]))
        for inner in jaxprs_in_params(eqn.params):
            total += matrix_multiply_adds(inner)
    return total


def predictors(d):
    head = lambda width: aj.LinearHead(jnp.ones((1, width)))
    moments = (aj.Moments(),)
    plain = aj.Predictor(features=moments, head=head(d + 8), side="key")
    book = aj.Codebook(jnp.ones((1, 3, d)), jnp.ones((1, 2, d)), plain)
    hidden = aj.MLPHead(
        jnp.ones((1, d + 8)), jnp.ones((1, d + 8, 4)), jnp.ones((1, 4)), jnp.ones((1, 4))
    )
    return {
        "slices": aj.Predictor(directions=jnp.ones((6, d)), coefficients=jnp.ones(6)),
        "moments": aj.Predictor(features=moments, head=head(d + 8), side="query"),
        "codebook": aj.Predictor(features=(*moments, book), head=head(d + 19), side="query"),
        "hidden": aj.Predictor(features=moments, head=hidden, side="key"),
    }


@pytest.mark.parametrize("name", ["slices", "moments", "codebook", "hidden"])
def test_the_cost_equals_the_count_of_the_traced_program(name):
    n, m, d = 7, 5, 4
    predictor = predictors(d)[name]
    q, k = jnp.ones((1, n, d)), jnp.ones((1, m, d))
    traced = jax.make_jaxpr(lambda q, k: aj.predict(predictor, q, k))(q, k)
    counted = extra_cost.score_products(predictor, n, m, d) * n * m * d
    assert round(counted) == matrix_multiply_adds(traced.jaxpr)


def test_the_cost_includes_every_correction():
    n, m, d = 7, 5, 4
    plain = predictors(d)["moments"]
    correction = aj.Correction((aj.Moments(),), aj.LinearHead(jnp.ones((1, d + 9))))
    chain = plain.replace(corrections=(correction,))
    more = [extra_cost.score_products(p, n, m, d) * n * m * d for p in (chain, plain)]
    # On the key side: both covariances, the quadratic form of M keys, and one factor a key.
    assert round(more[0] - more[1]) == (n + 2 * m) * d**2 + d**3 + d**2 + m


def test_logit_kl_is_the_mean_divergence_of_the_answers():
    rng = np.random.default_rng(0)
    ours, theirs = 5 * rng.normal(size=(2, 40, 3))
    softmax = lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    p, p_hat = softmax(theirs), softmax(ours)
    expected = np.mean([sum(a * np.log(a / b)) for a, b in zip(p, p_hat, strict=True)])
    np.testing.assert_allclose(fidelity.logit_kl(ours, theirs), expected, rtol=1e-10)
    assert fidelity.logit_kl(theirs + 7, theirs) < 1e-12
    assert np.isfinite(fidelity.logit_kl(1e3 * ours, 1e3 * theirs))


@pytest.mark.slow
def test_predictions_are_compared_with_the_teachers(done, run, values):
    (group,) = done[0].groups
    trained = load_teacher(run)
    split = load_data(trained.recipe)
    assert group.teachers[0].accuracy == accuracy_on(trained, split.test)
    test = sample(split.test, 60)
    inputs = trained.recipe.inputs.prepare(test)
    row = operators.swaps(trained.recipe, trained.variables, (2,))[1]
    reference = operators.teacher(trained.recipe, trained.variables)
    ours, theirs = (np.asarray(one.model.apply(one.variables, inputs)) for one in (row, reference))
    found = values["Sinkhorn S=2"]
    assert found["accuracy"] == np.mean(ours.argmax(-1) == test.labels)
    np.testing.assert_allclose(found["agreement"], np.mean(ours.argmax(-1) == theirs.argmax(-1)))
    np.testing.assert_allclose(found["logit_kl"], fidelity.logit_kl(ours, theirs), rtol=1e-3)


def test_a_sample_has_every_example_once(tiny):
    test = load_data(tiny).test
    some = sample(test, 100)
    assert len({image.tobytes() for image in some.values}) == 100
    assert np.array_equal(sample(test, 10_000).values, test.values)


@pytest.fixture
def seeds(done):
    """The teacher's figures under three seeds, two of them moved."""
    (group,) = done[0].groups
    first = group.teachers[0]
    found = []
    for seed, factor in enumerate((1.0, 4.0, 0.5)):
        rows = tuple(
            dataclasses.replace(row, values={k: factor * v for k, v in row.values.items()})
            for row in first.rows
        )
        found.append(dataclasses.replace(first, seed=seed, rows=rows))
    return found


def test_a_group_has_median_and_range_over_seeds():
    values = dict(zip(results.COLUMNS, np.random.default_rng(0).uniform(size=(9, 3)), strict=True))
    row = lambda seed: results.Measured(
        "ASAP", "ASAP (paper)", 3, True, {name: three[seed] for name, three in values.items()}
    )
    seeds = [
        results.TeacherFigures(f"run-{seed}", seed, 0.9, 1.0, 3, 60.0, (row(seed),))
        for seed in range(3)
    ]
    (line,) = results.lines_of(seeds)
    assert line.values.keys() == values.keys()
    for name, three in values.items():
        low, median, high = sorted(three)
        spread = line.values[name]
        assert (spread.low, spread.median, spread.high) == (low, median, high)


@pytest.mark.slow
def test_the_tables_print_whole_and_hold_what_is_stored(done, seeds, tmp_path):
    (group,) = done[0].groups
    three = dataclasses.replace(group, lines=results.lines_of(seeds), teachers=tuple(seeds))
    whole = dataclasses.replace(done[0], groups=(three,))
    out = io.StringIO()
    whole.print(rich.console.Console(file=out, width=100, soft_wrap=True))
    printed = out.getvalue()
    assert "…" not in printed
    text, stored = whole.write(tmp_path)
    (found,) = json.loads(stored.read_text())["groups"]
    rows = {
        line.split("|")[1].strip(): line for line in text.read_text().splitlines() if "|" in line
    }
    for line in found["lines"]:
        mark = "" if line["same_ending"] else r" \*"
        row = rows[line["name"] + mark]
        shown = next(one for one in printed.splitlines() if one.startswith(f" {line['name']} "))
        for name, (_, form) in results.COLUMNS.items():
            spread = line["values"][name]
            median, low, high = (form.format(spread[key]) for key in ("median", "low", "high"))
            assert f" {median}" in shown
            assert (f"| {median} ({low}..{high}) |" if low != high else f"| {median} |") in row
        low, high = (line["values"]["rel_l2"][key] for key in ("low", "high"))
        assert f"{low:.4f}..{high:.4f}" in shown
    assert [one["seed"] for one in found["teachers"]] == [0, 1, 2]


@pytest.mark.slow
def test_infinities_are_stored_in_json_as_text(done, tmp_path):
    (group,) = done[0].groups
    row = dataclasses.replace(group.teachers[0], score_std=float("inf"))
    group = dataclasses.replace(group, teachers=(row,))
    _, path = dataclasses.replace(done[0], groups=(group,)).write(tmp_path)
    assert json.loads(path.read_text())["groups"][0]["teachers"][0]["score_std"] == "inf"


@pytest.mark.slow
def test_facts_say_what_the_figures_were_measured_on(done):
    found, out = done
    (group,) = found.groups
    assert "60 test images" in group.facts["data"]
    assert "3 cases" in group.facts["data"]
    assert group.facts["teacher accuracy"].endswith("on all 500 test images")
    lowest = group.lines[1].values["rel_l2"].median
    assert group.facts["rel-l2 of Sinkhorn S=2"].startswith(f"{lowest:.4f}")
    assert {"command", "date", "machine", "versions"} <= set(found.facts)
    assert f"- date: {found.facts['date']}" in (out / "study.md").read_text()
    assert json.loads((out / "study.json").read_text())["facts"] == found.facts


@pytest.mark.slow
def test_the_plot_has_one_panel_per_group_with_medians_and_ranges(done, seeds):
    (group,) = done[0].groups
    three = dataclasses.replace(group, lines=results.lines_of(seeds))
    drawn = closures_plot.figure(dataclasses.replace(done[0], groups=(three, group)))
    shown = [panel for panel in drawn.axes if panel.axison]
    assert len(shown) == 2
    assert all(panel.get_yscale() == "log" for panel in shown)
    families = closures_plot.families(three)
    assert list(families) == list(closures_plot.STYLES)
    assert [line.name for line in families["Sinkhorn, other ending"]] == ["Sinkhorn S=3"]
    for bars, lines in zip(shown[0].containers, families.values(), strict=True):
        medians = [line.values["rel_l2"].median for line in lines]
        np.testing.assert_allclose(bars[0].get_ydata(orig=False), medians)
        ends = [segment[:, 1] for segment in bars[2][0].get_segments()]
        ranges = [line.values["rel_l2"] for line in lines]
        np.testing.assert_allclose(ends, [(spread.low, spread.high) for spread in ranges])


@pytest.mark.slow
def test_the_three_files_are_written(done):
    assert {path.name for path in done[1].iterdir()} == {"study.md", "study.json", "study.png"}
    assert (done[1] / "study.png").read_bytes().startswith(b"\x89PNG")


def untrained(recipe, seed=0, **changes):
    return Teacher(dataclasses.replace(recipe, **changes), seed, 1, {})


def test_teachers_of_one_recipe_form_a_group_and_groups_have_different_labels(tiny):
    found = groups.groups_of(
        [
            ("a", untrained(tiny)),
            ("b", untrained(tiny, 1, summary="another text")),
            ("c", untrained(tiny, learning_rate=0.01)),
            ("d", untrained(tiny, epochs=7)),
        ]
    )
    runs = {label: [folder for folder, _ in members] for label, members in found.items()}
    assert runs == {
        "demo (small), S=6, learning rate 0.001, epochs 2": ["a", "b"],
        "demo (small), S=6, learning rate 0.01": ["c"],
        "demo (small), S=6, learning rate 0.001, epochs 7": ["d"],
    }


def test_the_same_teacher_twice_is_refused(tiny):
    with pytest.raises(UserError, match="a and b have the same recipe and seed 0: leave one out"):
        groups.groups_of([("a", untrained(tiny)), ("b", untrained(tiny))])


@pytest.mark.slow
def test_unusable_runs_are_errors_that_say_what_to_do(minute, run, tmp_path, capsys, monkeypatch):
    assert parser.main(["study", "fidelity"]) == 1
    assert "there is no run folder: train teachers with" in capsys.readouterr().err
    missing = str(tmp_path / "missing")
    assert parser.main(["study", "fidelity", "--out", str(tmp_path), str(run), missing]) == 1
    assert "no checkpoint in " in capsys.readouterr().err
    for changes, remedy in (
        ({"attention": "softmax"}, "softmax attention: leave it out, or train it with --attention"),
        ({"spec": aj.SinkhornSpec(num_steps=1)}, "leave it out, or train it with --num-steps 2"),
    ):
        other = untrained(minute, **changes)
        monkeypatch.setattr(groups, "load_teacher", lambda folder, other=other: other)
        assert parser.main(["study", "fidelity", "--out", str(tmp_path), missing]) == 1
        assert remedy in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_short_teacher_is_compiled_for_fewer_closures_than_it_has_steps():
    counts = {s: entries.closure_counts(aj.SinkhornSpec(num_steps=s)) for s in (2, 3, 4, 20)}
    assert counts == {2: [1], 3: [1, 2], 4: [1, 2, 3], 20: [1, 2, 3]}


@pytest.mark.parametrize(
    ("steps", "side", "closures", "expected"),
    [
        (5, "query", "one_sided", (1, "column")),
        (5, "query", "two_sided", (2, "row")),
        (6, "query", "two_sided", (3, "column")),
        (5, "key", 1, (1, "row")),
        (6, "key", 2, (2, "column")),
    ],
)
def test_an_entry_has_its_closures_and_their_last_side(steps, side, closures, expected):
    spec = aj.SinkhornSpec(num_steps=steps)
    predictor = aj.Predictor(features=(aj.Moments(),), head=None, side=side)
    states = {("block",): aj.CompiledState(predictor, spec, closures)}
    row = operators.Operator("row", None, {}, None, 1, states)
    entry = entries.compiled_entry(row, "Moments", spec)
    assert (entry.closures, entry.ends) == expected


@pytest.mark.slow
def test_figures_are_stored_in_the_run_folder_and_read_again_for_the_same_settings(
    done, run, tmp_path, monkeypatch
):
    """A NaN goes through the file; other settings, a damaged file or --again measure again."""
    monkeypatch.setattr(aj, "CANDIDATES", CHEAP)
    monkeypatch.setattr(fidelity_study, "measure", lambda *a, **k: pytest.fail("measured again"))
    settings = dict(test_examples=60, num_images=60)
    found, _ = fidelity_study.run([run], None, tmp_path, **settings)
    assert found.groups[0].teachers == done[0].groups[0].teachers
    stored = json.loads((run / cache.FIDELITY).read_text())["settings"]
    (figures,) = found.groups[0].teachers
    rows = (dataclasses.replace(figures.rows[0], values={"rel_l2": np.nan, "accuracy": np.inf}),)
    odd = dataclasses.replace(figures, rows=rows)
    cache.write(run / cache.FIDELITY, stored, odd)
    again = cache.read(run / cache.FIDELITY, stored, results.TeacherFigures.read)
    np.testing.assert_equal(again.rows[0].values, rows[0].values)
    calls = []
    monkeypatch.setattr(fidelity_study, "measure", lambda *a, **k: calls.append(k) or figures)
    fidelity_study.run([run], None, tmp_path, **settings, again=True)
    fidelity_study.run([run], None, tmp_path, **{**settings, "test_examples": 59})
    (run / cache.FIDELITY).write_text("{")
    fidelity_study.run([run], None, tmp_path, **settings)
    fidelity_study.run([run], None, tmp_path, **settings)
    assert [call["test_examples"] for call in calls] == [60, 59, 60]
