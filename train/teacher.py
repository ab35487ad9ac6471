"""Training a teacher: the loop around the pure step, its checkpoints, metrics and progress."""

import contextlib
import dataclasses
import math
import os
import pathlib
import signal
import threading
import time

import jax
import numpy as np

from train import data, models, progress, runs, text
from train import step as steps
from train.checkpoints import Checkpoints
from train.data import Batches, Examples
from train.extras import UserError
from train.recipe import Recipe, differences

LOG_EVERY = 20


@dataclasses.dataclass(frozen=True)
class Split:
    """The two splits of a recipe's data set and where they were read.

    Attributes:
      train, test: the examples.
      data_dir: TFDS folder.
    """

    train: Examples | text.Texts
    test: Examples | text.Texts
    data_dir: pathlib.Path


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A trained model.

    Attributes:
      recipe: what it was trained by.
      seed: seed of the run.
      step: steps taken.
      variables: the linen variables, ``{"params": ...}``.
    """

    recipe: Recipe
    seed: int
    step: int
    variables: dict


def load_data(
    recipe: Recipe,
    data_dir: str | os.PathLike | None = None,
    run: str | os.PathLike | None = None,
) -> Split:
    """Reads both splits of the recipe's data set.

    Args:
      recipe: says which set.
      data_dir: TFDS folder.
      run: run folder, which keeps the tokenizer of a text recipe; None keeps it nowhere.

    Raises:
      UserError: the set is not there; the stored tokenizer does not fit.
    """
    found = data.resolve(data_dir, packaged=recipe.packaged)
    names = dict(zip(("train", "test"), recipe.splits, strict=True))
    if recipe.tokens is None:
        size = recipe.pixels.size
        splits = {key: data.load(recipe.dataset, name, found, size) for key, name in names.items()}
    else:
        sources = {key: data.read(recipe.dataset, name, found) for key, name in names.items()}
        splits = text.load(recipe.tokens, sources, run)
    return Split(**splits, data_dir=found)


def announce(split: Split) -> None:
    """Prints what was read and from where, so that nobody takes a small copy for the whole."""
    progress.console().print(
        f"read {len(split.train):,} training and {len(split.test):,} test "
        f"{split.test.unit} from {split.data_dir}",
        markup=False,
    )


def train(
    recipe: Recipe,
    examples: Examples,
    run: pathlib.Path,
    *,
    seed: int = 0,
    resume: bool = False,
    stop_after: int | None = None,
    save_every: int = 5,
) -> Teacher:
    """Trains by a recipe, or goes on with what the run folder holds.

    On one machine a resumed run ends in the same parameters, bit for bit, as one that was never
    stopped: parameters, optimiser state and step are stored, and batches depend on nothing else.

    Args:
      recipe: what to train.
      examples: the training split.
      run: folder for checkpoints and metrics.
      seed: fixes initial parameters, order of the data and augmentation.
      resume: go on from the newest checkpoint in ``run``; with none, start afresh.
      stop_after: stop and save after this many steps in all (the schedule is unchanged).
      save_every: epochs between checkpoints.

    Raises:
      UserError: there is a checkpoint and ``resume`` is False; it was made by another recipe or
        seed; the loss is not finite; the run was interrupted (Ctrl-C; it is saved first).
    """
    model = models.build(recipe)
    batches = Batches(examples, recipe.inputs, recipe.batch_size, seed)
    epoch_steps = batches.steps_per_epoch
    tx = steps.optimizer(recipe, epoch_steps)
    state = steps.create(model, tx, recipe.example_inputs(), seed)
    total = recipe.epochs * epoch_steps
    take_step = steps.jitted_step(models.training(recipe, total), tx, accumulate=recipe.accumulate)
    last = total if stop_after is None else min(stop_after, total)
    with Checkpoints(run) as checkpoints, _stop_on_interrupt() as interrupted:
        start = _start(checkpoints, recipe, seed, run, resume)
        if start:
            state = checkpoints.restore(state)
        with (
            runs.MetricsLog(run, resumed_at=start) as log,
            progress.bar(f"train {recipe.name}", last, start) as report,
        ):
            began = time.perf_counter()
            for count in range(start + 1, last + 1):
                state, metrics = take_step(state, *batches.at(count - 1))
                asked = interrupted()
                stop = asked or count == last
                if stop or count % LOG_EVERY == 0 or count % epoch_steps == 0:
                    values = {name: float(value) for name, value in metrics.items()}
                    _check_finite(values["loss"], count, checkpoints, run)
                    log.write(count, **values, seconds=round(time.perf_counter() - began, 3))
                    epoch = (count - 1) // epoch_steps + 1
                    note = f"epoch {epoch}/{recipe.epochs}, loss {values['loss']:.3f}"
                    report(count, f"{note}, accuracy {values['accuracy']:.2f}")
                if stop or count % (save_every * epoch_steps) == 0:
                    checkpoints.save(state, recipe, seed)
                if asked:
                    raise UserError(
                        f"stopped and saved at step {count} of {total}: go on with the same "
                        f"command and --run {run} --resume"
                    )
    return Teacher(recipe, seed, int(state.step), {"params": state.params})


def load(run: str | os.PathLike) -> Teacher:
    """The newest checkpoint of a run folder.

    Raises:
      UserError: there is none.
    """
    with Checkpoints(run) as checkpoints:
        about = checkpoints.about()
        recipe = about.recipe
        model, tx = models.build(recipe), steps.optimizer(recipe, 1)
        inputs = recipe.example_inputs()
        shapes = jax.eval_shape(lambda: steps.create(model, tx, inputs, 0))
        state = checkpoints.restore(shapes)
    return Teacher(recipe, about.seed, about.step, {"params": state.params})


def predict(apply, variables: dict, images: np.ndarray, *, batch_size: int = 100) -> np.ndarray:
    """Logits of a model's inputs, batch by batch.

    Args:
      apply: ``apply(variables, images)``, the jitted ``apply`` of a linen module.
      variables: the module's; with the ``"asap"`` collection the compiled operator runs.
      images: inputs of the model, ``(examples, ...)``.
      batch_size: images a call.

    Returns:
      ``(examples, classes)``.
    """
    parts = [
        np.asarray(apply(variables, images[start : start + batch_size]))
        for start in range(0, len(images), batch_size)
    ]
    return np.concatenate(parts)


def test_accuracy(teacher: Teacher, examples: Examples) -> float:
    """Share of the examples that the teacher classifies rightly."""
    images = teacher.recipe.inputs.prepare(examples)
    apply = jax.jit(models.build(teacher.recipe).apply)
    return accuracy(predict(apply, teacher.variables, images), examples.labels)


def accuracy(logits: np.ndarray, labels: np.ndarray) -> float:
    """Share of rows of ``(examples, classes)`` logits whose largest entry is at the label."""
    return float(np.mean(logits.argmax(-1) == labels))


def _start(checkpoints, recipe, seed, run, resume) -> int:
    """Step to start from; refuses to mix two runs in one folder."""
    if checkpoints.latest() is None:
        return 0
    about = checkpoints.about()
    if not resume:
        raise UserError(
            f"{run} holds a run that got to step {about.step}: go on with --resume, or name "
            f"another folder with --run"
        )
    lines = differences(about.recipe, recipe)
    if about.seed != seed:
        lines.append(f"seed was {about.seed} and is now {seed}")
    if lines:
        raise UserError(f"cannot resume {run}: {'; '.join(lines)}")
    return about.step


def _check_finite(loss, count, checkpoints, run) -> None:
    if not math.isfinite(loss):
        raise UserError(
            f"the loss is {loss} at step {count}; the last good checkpoint in {run} is of step "
            f"{checkpoints.latest()}"
        )


@contextlib.contextmanager
def _stop_on_interrupt():
    """Turns the first Ctrl-C into a request to stop after the step; a second one stops at once.

    Yields a function that tells whether a stop was asked for.  Outside the main thread, where
    Python cannot catch signals, nothing is changed.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def ask(number, frame):
        asked.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
