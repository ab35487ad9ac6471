"""The training loop around the pure step: devices, batches, checkpoints, metrics, progress."""

import contextlib
import functools
import math
import pathlib
import signal
import threading
import time
from collections.abc import Callable

import jax
import numpy as np

from train.data.examples import Batches, Examples
from train.recipes.schema import Recipe, differences
from train.reporting import progress
from train.runtime import devices
from train.runtime.errors import UserError
from train.training import factory, run_folder, step
from train.training.checkpoints import About, Checkpoints
from train.training.prefetch import Prefetch
from train.training.teacher import Teacher

LOG_EVERY = 20
SAVES = 20  # checkpoints of a run, unless `save_every` says otherwise
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def train(
    recipe: Recipe,
    examples: Examples,
    run: pathlib.Path,
    *,
    seed: int = 0,
    resume: bool = False,
    stop_after: int | None = None,
    save_every: int | None = None,
    way: str = devices.Sharded.name,
) -> Teacher:
    """Trains by a recipe; with ``resume`` from the newest checkpoint in the run folder.

    On one machine a resumed run ends in the same parameters, bit for bit, as one that was never
    stopped: parameters, optimiser state, random key and step are stored, and batches depend on
    nothing else.

    Args:
      recipe: what to train.
      examples: the training split.
      run: folder for checkpoints and metrics; shared by all hosts.
      seed: fixes initial parameters, order of the data, augmentation and dropout.
      resume: continue from the newest good checkpoint in ``run``; start afresh if there is none.
      stop_after: stop and save after this many steps in all (the schedule is unchanged).
      save_every: epochs between checkpoints; by default one, or a twentieth of the run.
      way: ``"jit"`` or ``"pmap"``, see ``train.runtime.devices``.

    Raises:
      UserError: there is a checkpoint and ``resume`` is False; it was made by another recipe or
        seed; the devices do not divide the batch; the loss is not finite; the disk is full; the
        run was interrupted (Ctrl-C or SIGTERM; it is saved first).
    """
    batches = Batches(examples, recipe.inputs, recipe.batch_size, seed)
    epoch_steps = batches.steps_per_epoch
    total = recipe.epochs * epoch_steps
    save_every = save_every or max(1, recipe.epochs // SAVES)
    last = total if stop_after is None else min(stop_after, total)
    layout, create, take_step = programs(recipe, epoch_steps, way)
    share = devices.share()
    make = lambda index: tuple(map(layout.feed, batches.at(index, share)))
    with Checkpoints(run) as checkpoints, _stop_on_signal() as interrupted:
        state, start = _start(checkpoints, create(jax.random.key(seed)), recipe, seed, resume)
        state = layout.place(state)
        coming = Prefetch(make, start, last)
        with (
            run_folder.MetricsLog(run, resumed_at=start) as log,
            progress.bar(f"train {recipe.name}", last, start) as report,
        ):
            began = time.perf_counter()
            for count, batch in enumerate(coming, start + 1):
                state, metrics = take_step(state, *batch)
                if devices.fakes_devices():
                    jax.block_until_ready(state)
                due = count == last or count % LOG_EVERY == 0 or count % epoch_steps == 0
                stop = (due or jax.process_count() == 1) and devices.any_process(interrupted())
                if due or stop:
                    values = {name: float(x) for name, x in layout.read(metrics).items()}
                    _check_finite(values["loss"], count, checkpoints)
                    seconds = time.perf_counter() - began
                    log.write(
                        count,
                        **values,
                        seconds=round(seconds, 3),
                        input_share=round(coming.waited / seconds, 4),
                    )
                    epoch = (count - 1) // epoch_steps + 1
                    note = f"epoch {epoch}/{recipe.epochs}, loss {values['loss']:.3f}"
                    report(count, f"{note}, accuracy {values['accuracy']:.2f}")
                if stop or count == last or count % (save_every * epoch_steps) == 0:
                    checkpoints.save(layout.read(state), recipe, seed)
                if stop:
                    raise UserError(
                        f"stopped and saved at step {count} of {total}: resume with the same "
                        f"command and --run {run} --resume"
                    )
    state = layout.read(state)
    return Teacher(recipe, seed, int(state.step), {"params": state.params})


@functools.lru_cache(maxsize=4)
def programs(
    recipe: Recipe, epoch_steps: int, way: str
) -> tuple[devices.Alone, Callable, Callable]:
    """What a run computes with; cached, so that a run resumed in one process compiles once.

    Args:
      recipe: what to train.
      epoch_steps: steps an epoch.
      way: a key of ``devices.WAYS``.

    Returns:
      The way's layout of devices, ``create(key)`` and ``step(state, inputs, labels)``.
    """
    layout = devices.WAYS[way](recipe.batch_size)
    tx = step.optimizer(recipe, epoch_steps)
    inputs = recipe.example_inputs()
    create = jax.jit(lambda key: step.create(factory.build(recipe), tx, inputs, key))
    take_step = functools.partial(
        step.train_step,
        model_at=factory.training(recipe, recipe.epochs * epoch_steps),
        tx=tx,
        accumulate=recipe.accumulate,
    )
    return layout, create, layout.compile(take_step)


def _start(checkpoints, fresh, recipe, seed, resume) -> tuple[step.TrainState, int]:
    """State and step to start from; refuses to mix two runs in one folder."""
    fresh = jax.tree.map(np.asarray, fresh)
    if checkpoints.latest() is None:
        return fresh, 0
    run = checkpoints.run
    if not resume:
        raise UserError(
            f"{run} holds a run that got to step {checkpoints.latest()}: continue with --resume, "
            f"or name another folder with --run"
        )

    def like(about: About) -> step.TrainState:
        lines = differences(about.recipe, recipe)
        if about.seed != seed:
            lines.append(f"seed was {about.seed} and is now {seed}")
        if lines:
            raise UserError(f"cannot resume {run}: {'; '.join(lines)}")
        return fresh

    state, about = checkpoints.restore(like, set_aside=True)
    return state, about.step


def _check_finite(loss, count, checkpoints) -> None:
    if not math.isfinite(loss):
        raise UserError(f"the loss is {loss} at step {count}; {checkpoints.last_good()}")


@contextlib.contextmanager
def _stop_on_signal():
    """Turns Ctrl-C and SIGTERM into a request to stop after the step; a second one acts at once.

    Yields a function that says whether a stop was requested.  Outside the main thread, where
    Python cannot catch signals, nothing is changed.
    """
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set
        return

    def restore():
        for number, handler in before.items():
            signal.signal(number, handler)

    def request(number, frame):
        requested.set()
        restore()

    before = {number: signal.signal(number, request) for number in SIGNALS}
    try:
        yield requested.is_set
    finally:
        restore()
