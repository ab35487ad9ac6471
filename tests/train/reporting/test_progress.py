"""Progress of the command line: a bar, lines or nothing, and the time that is left."""

import pytest
import rich.console

from asap_jax.compiler import progress as library
from train.reporting import progress


def shown(capsys, mode, *, log=False):
    """What a loop of three steps prints."""
    with progress.shown_as(mode), progress.bar("work", 3, log=log) as report:
        for done in range(1, 4):
            report(done, f"loss {done}")
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("mode", "log", "lines"),
    [("auto", False, 0), ("auto", True, 3), ("lines", False, 3), ("none", True, 0)],
)
def test_outside_a_terminal_only_logs_and_what_is_asked_for_are_shown(
    capsys, monkeypatch, mode, log, lines
):
    monkeypatch.setattr(progress, "PLAIN_EVERY", 0.0)
    text = shown(capsys, mode, log=log)
    assert len(text.splitlines()) == lines
    if lines:
        assert text.splitlines()[-1].startswith("work: 3/3, 0:00 elapsed, 0:00 left, loss 3")


def test_only_the_last_of_quick_steps_is_a_line(capsys):
    assert shown(capsys, "lines").splitlines() == ["work: 3/3, 0:00 elapsed, 0:00 left, loss 3"]


def test_a_terminal_has_a_bar_with_the_librarys_progress_as_its_note(capsys, monkeypatch):
    screen = rich.console.Console(force_terminal=True, width=150)
    monkeypatch.setattr(progress, "console", lambda: screen)
    with progress.bar("work", 3) as report:
        report(1, "first")
        with library.stage("fit", 2):
            library.begin("layer 'a'")
    text = capsys.readouterr().out
    assert "1/3" in text
    assert "fit 2/2" in text or "fit 1/2" in text
