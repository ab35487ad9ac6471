"""Progress of a compile: what is reported, to whom, and how the time left is estimated."""

import io

import numpy as np
import pytest
import small_models as small

import asap_jax as aj
from asap_jax.compiler import progress as progress_module
from asap_jax.compiler.progress import Pace

BATCHES = small.data(np.random.default_rng(0), 4)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture(scope="module")
def reports():
    """The progress of an automatic compile of two layers."""
    seen = []
    fit = aj.AutoFit(candidates=small.SMALL[:1], ladder=(1,), time_limit=None)
    with aj.progress(seen.append):
        small.compile_fit(BATCHES, fit, holdout=0.5)
    return seen


def test_every_batch_layer_and_candidate_is_reported_in_order(reports):
    stages = list(dict.fromkeys(p.stage for p in reports))
    assert stages == ["calibrate", "fit", "report"]
    for stage in stages:
        own = [p for p in reports if p.stage == stage]
        assert [p.done for p in own] == list(range(own[0].total + 1))
        assert all(p.note for p in own[:-1])
        assert own[-1].note == ""
    notes = [p.note for p in reports if p.stage == "fit"]
    steps = ("moments, 1 closure", "moments, 2 closures", "choose among 1 candidates")
    places = [
        notes.index(f"layer '{layer}', {step}")
        for layer in (small.FIRST, small.SECOND)
        for step in steps
    ]
    assert places == sorted(places)


def test_a_report_is_one_line(reports):
    text = str(reports[0])
    assert text == "calibrate 0/4: batch 0"
    p = aj.Progress("fit", "layer 'a', moments", 3, 24, 10.0, 41.2)
    assert str(p) == "fit 3/24, 0:41 left: layer 'a', moments"


def test_batches_of_unknown_number_are_counted():
    seen = []
    with aj.progress(seen.append):
        small.compile_model(iter(BATCHES))
    assert [str(p) for p in seen[:2]] == ["calibrate 0: batch 0", "calibrate 1: batch 1"]


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_only_a_terminal_gets_a_line_which_is_removed(monkeypatch, stream):
    written = stream()
    monkeypatch.setattr(progress_module, "PATIENCE", 0.0)
    monkeypatch.setattr("sys.stderr", written)
    small.compile_model(BATCHES)
    with aj.progress(None):
        before = written.getvalue()
        small.compile_model(BATCHES)
    assert written.getvalue() == before
    if stream is io.StringIO:
        assert before == ""
    else:
        assert "fit 1/2" in before
        assert "\n" not in before
        assert before.rpartition("\r")[0].rpartition("\r")[2].strip() == ""


def test_a_quick_stage_shows_nothing(monkeypatch):
    written = Terminal()
    monkeypatch.setattr("sys.stderr", written)
    monkeypatch.setattr(progress_module, "PATIENCE", 1e9)
    small.compile_model(BATCHES)
    assert written.getvalue() == ""


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="report must be a function or None, got str"):
        aj.progress("quiet").__enter__()


def test_the_time_left_leaves_out_compilation_and_skipped_steps():
    pace = Pace()
    assert pace.left(10) is None
    pace.add(60.0, 1)  # the first step took a minute, most of it for compiling
    assert pace.left(10) is None
    pace.add(62.0, 2)
    assert pace.left(10) == pytest.approx(8 * 2.0)
    assert pace.left(None) is None

    pace = Pace()
    pace.add(0.0, 0)
    pace.add(0.1, 500)  # steps whose results were stored
    for step in range(1, 41):
        pace.add(step, 500 + step)
    assert pace.left(560) == pytest.approx(20.0, rel=0.1)
