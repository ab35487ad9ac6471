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
from train.runtime.errors import Stopped, UserError
from train.training import amortized, factory, held_out, run_folder, step
from train.training.checkpoints import NUM_KEPT, About, Checkpoints, random_generator
from train.training.prefetch import Prefetch
from train.training.teacher import Teacher, of_state

LOG_EVERY = 20  # steps
SAVES = 20  # about this many checkpoints in a long run; a short run saves after every epoch
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
    keep_checkpoints: int = NUM_KEPT,
    way: str = devices.Sharded.name,
) -> Teacher:
    """Trains the model of a recipe, or resumes from the newest checkpoint in the run folder.

    On one machine a resumed run ends with the same parameters, bit for bit, as an uninterrupted
    one. A checkpoint stores parameters, optimiser state, random key and step, and a batch depends
    only on the seed and the step. If the recipe trains through compiled layers, it also stores
    these and their running sums; if it keeps the best parameters, these too.

    Args:
      recipe: what to train.
      examples: the training split; a held-out part is taken from it if the recipe evaluates.
      run: folder for checkpoints and metrics; shared by all hosts.
      seed: fixes initial parameters, order of the data, augmentation and dropout.
      resume: continue from the newest good checkpoint in ``run``, or start if there is none.
      stop_after: stop and save when the run has this many steps (the schedule is unchanged).
      save_every: epochs between checkpoints; by default one, or a twentieth of a long run.
      keep_checkpoints: number of the newest checkpoints to keep.
      way: ``"jit"``, ``"pmap"`` or ``"alone"``, see ``train.runtime.devices``.

    Raises:
      UserError: another process trains in ``run``; there is a checkpoint but ``resume`` is False;
        the checkpoint has another recipe, seed or random generator; the batch cannot be divided
        among the devices; the loss is not finite; the disk is full; or the run was interrupted by
        Ctrl-C or SIGTERM, after it was saved.
    """
    examples, rest = held_out.divide(recipe, examples)
    batches = Batches(examples, recipe.inputs, recipe.batch_size, seed)
    epoch_steps = batches.steps_per_epoch
    total = recipe.epochs * epoch_steps
    save_every = save_every or max(1, recipe.epochs // SAVES)
    last_step = total if stop_after is None else min(stop_after, total)
    layout, create, take_step = programs(recipe, epoch_steps, way)
    refresh = refresh_program(recipe, way)
    share = devices.share()
    make_batch = lambda index: tuple(map(layout.feed, batches.at(index, share)))
    with (
        run_folder.locked(run),
        Checkpoints(run, keep_checkpoints) as checkpoints,
        _stop_on_signal() as interrupted,
    ):
        state, start = _start(checkpoints, create(jax.random.key(seed)), recipe, seed, resume)
        evaluator = _evaluator(recipe, rest, epoch_steps, state.best)
        whole = lambda state: _with_best(layout.read(state), evaluator)
        state = layout.place(state.replace(best=None))
        prefetched = Prefetch(make_batch, start, last_step)
        with (
            run_folder.MetricsLog(run, resumed_at=start) as log,
            progress.bar(f"train {recipe.name}", last_step, start, log=True) as report,
        ):
            began = time.perf_counter()
            for count, batch in enumerate(prefetched, start + 1):
                if refresh is not None and (count - 1) % recipe.amortize.every == 0:
                    state = refresh(state, batch[0])
                state, metrics = take_step(state, *batch)
                if devices.fakes_devices():
                    jax.block_until_ready(state)
                log_now = count == last_step or count % LOG_EVERY == 0 or count % epoch_steps == 0
                stop = (log_now or jax.process_count() == 1) and devices.any_process(interrupted())
                if log_now or stop:
                    values = {name: float(x) for name, x in layout.read(metrics).items()}
                    _check_finite(values["loss"], count, checkpoints)
                    if refresh is not None:
                        values |= amortized.distances(layout.read(state.amortized))
                    if evaluator is not None and evaluator.due(count):
                        host = layout.read((state.params, state.amortized))
                        values |= evaluator.run(count, *host)
                        _check_finite(values["held_out_loss"], count, checkpoints)
                    seconds = time.perf_counter() - began
                    log.write(
                        count,
                        **values,
                        seconds=round(seconds, 3),
                        input_share=round(prefetched.waited / seconds, 4),
                    )
                    epoch = (count - 1) // epoch_steps + 1
                    note = f"epoch {epoch}/{recipe.epochs}, loss {values['loss']:.3f}"
                    note += f", accuracy {values['accuracy']:.2f}"
                    if refresh is not None:
                        note += f", rel-l2 to Sinkhorn {values['rel_l2']:.3f}"
                    report(count, note + (evaluator.note if evaluator is not None else ""))
                if stop or count == last_step or count % (save_every * epoch_steps) == 0:
                    checkpoints.save(whole(state), recipe, seed)
                if stop:
                    raise Stopped(f"stopped and saved at step {count} of {total} in {run}")
    return of_state(recipe, seed, whole(state))


@functools.lru_cache(maxsize=4)
def programs(
    recipe: Recipe, epoch_steps: int, way: str
) -> tuple[devices.Alone, Callable, Callable]:
    """The device layout and the compiled functions of a run.

    They are cached, so that a run resumed in the same process does not compile again.

    Args:
      recipe: what to train.
      epoch_steps: steps per epoch.
      way: a key of ``devices.WAYS``.

    Returns:
      The layout, ``create(key)`` and ``step(state, inputs, labels)``.
    """
    layout = devices.WAYS[way](recipe.batch_size, recipe.accumulate)
    tx = step.optimizer(recipe, epoch_steps)
    inputs = recipe.example_inputs()
    layers = amortized.training(recipe)
    model, best = factory.build(recipe), recipe.keeps_best
    create = jax.jit(lambda key: step.create(model, tx, inputs, key, layers, keep_best=best))
    take_step = functools.partial(
        step.train_step,
        model_at=factory.training(recipe, recipe.epochs * epoch_steps),
        tx=tx,
        accumulate=recipe.accumulate,
        amortized=layers,
    )
    return layout, create, layout.compile(take_step)


@functools.lru_cache(maxsize=4)
def refresh_program(recipe: Recipe, way: str) -> Callable | None:
    """The compiled refresh ``refresh(state, inputs)`` of a run, see ``amortized.refresh``.

    None if the recipe does not train through compiled layers. Arguments and cache as ``programs``.
    """
    layers = amortized.training(recipe)
    if layers is None:
        return None
    settings = dict(amortized=layers, accumulate=recipe.accumulate)
    layout = devices.WAYS[way](recipe.batch_size, recipe.accumulate)
    return layout.compile(functools.partial(amortized.refresh, **settings))


def _start(checkpoints, fresh, recipe, seed, resume) -> tuple[step.TrainState, int]:
    """The state and the step to start from. Raises UserError if the folder holds another run."""
    fresh = jax.tree.map(np.asarray, fresh)
    if checkpoints.latest() is None:
        return fresh, 0
    run = checkpoints.run
    if not resume:
        raise UserError(
            f"{run} holds a run that is at step {checkpoints.latest()}: continue with --resume, "
            f"or name another folder with --run"
        )

    def like(about: About) -> step.TrainState:
        lines = differences(about.recipe, recipe)
        if about.seed != seed:
            lines.append(f"seed was {about.seed} and is now {seed}")
        if about.generator != random_generator():
            lines.append(
                f"jax_default_prng_impl was {about.generator!r} and is now {random_generator()!r}"
            )
        if lines:
            raise UserError(f"cannot resume {run}: {'; '.join(lines)}")
        return fresh

    state, about = checkpoints.restore(like, set_aside=True)
    return state, about.step


def _evaluator(recipe, examples, epoch_steps, best) -> held_out.Evaluator | None:
    """The evaluator of the held-out examples; None without any."""
    if examples is None:
        return None
    return held_out.Evaluator(recipe, examples, epoch_steps, best)


def _with_best(state, evaluator) -> step.TrainState:
    """A state of host arrays, with the best parameters of the evaluator."""
    return state if evaluator is None else state.replace(best=evaluator.best)


def _check_finite(loss, count, checkpoints) -> None:
    if not math.isfinite(loss):
        raise UserError(f"the loss is {loss} at step {count}; {checkpoints.last_good()}")


@contextlib.contextmanager
def _stop_on_signal():
    """Turns Ctrl-C and SIGTERM into a request to stop after the current step.

    A second signal acts at once.  Yields a function that says whether a stop was requested.
    Outside the main thread, where Python cannot catch signals, nothing is changed.
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
