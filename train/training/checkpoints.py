"""Atomic checkpoints: training state, recipe and seed, written by orbax.

A checkpoint gets its final name only when it is complete, so a run that is killed still has the
previous checkpoint.  Every checkpoint stores a digest of its arrays.  If the arrays do not match
the digest, the checkpoint is skipped and the previous one is used.  Arrays are stored as host
arrays, so a run may resume on other devices.
"""

import dataclasses
import errno
import hashlib
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from train.recipes.schema import Recipe
from train.reporting import progress
from train.runtime import devices
from train.runtime.errors import UserError, need
from train.training.step import TrainState

NUM_KEPT = 2  # by default; older checkpoints are deleted
FIRST_GENERATOR = "threefry2x32"  # of checkpoints that do not name theirs
FULL_DISK = os.strerror(errno.ENOSPC)


@dataclasses.dataclass(frozen=True)
class About:
    """The recipe, seed, step and random generator of a checkpoint.

    Attributes:
      recipe: the recipe of the run.
      seed: the seed of the run.
      step: number of steps taken.
      generator: JAX's random generator in the run, see ``random_generator``.
    """

    recipe: Recipe
    seed: int
    step: int
    generator: str


def random_generator() -> str:
    """The name of JAX's default random generator, which fixes the size of a random key."""
    return jax.config.jax_default_prng_impl


class Checkpoints:
    """A context manager for the checkpoints of one run folder; only the newest are kept."""

    def __init__(self, run: str | os.PathLike, num_kept: int = NUM_KEPT):
        self._orbax = need("orbax.checkpoint")
        self.run = pathlib.Path(run).absolute()
        self.folder = self.run / "checkpoints"
        self._manager = self._orbax.CheckpointManager(
            self.folder,
            options=self._orbax.CheckpointManagerOptions(
                max_to_keep=num_kept, create=False, enable_async_checkpointing=False
            ),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_):
        self._manager.close()

    def latest(self) -> int | None:
        """Step of the newest checkpoint, or None."""
        return self._manager.latest_step()

    def last_good(self) -> str:
        """Says which checkpoint is the newest, for messages."""
        last = self.latest()
        if last is None:
            return f"there is no checkpoint in {self.folder} yet"
        return f"the last good checkpoint in {self.folder} is of step {last}"

    def save(self, state: TrainState, recipe: Recipe, seed: int) -> None:
        """Writes a checkpoint, unless there is already one of this step.

        Args:
          state: host arrays.
          recipe, seed: recipe and seed of the run.

        Raises:
          UserError: a value is not finite, or the disk is full. Earlier checkpoints are kept.
        """
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state)):
            raise UserError(
                f"a value is not finite after step {step}: this step is not saved; "
                f"{self.last_good()}"
            )
        args = self._orbax.args
        about = {
            "recipe": recipe.to_json(),
            "seed": seed,
            "generator": random_generator(),
            "digest": digest(state),
        }
        try:
            self._manager.save(
                step,
                args=args.Composite(
                    state=args.StandardSave(_parts(state)), about=args.JsonSave(about)
                ),
            )
        except Exception as fault:  # orbax reports a full disk as OSError or as ValueError
            if FULL_DISK not in str(fault):
                raise
            raise UserError(
                f"the disk is full: step {step} could not be saved in {self.folder}; make room "
                f"and continue with --resume; {self.last_good()}"
            ) from fault

    def restore(
        self, like: Callable[[About], TrainState], *, set_aside: bool = False
    ) -> tuple[TrainState, About]:
        """Restores the newest checkpoint that is not damaged, and prints which ones it skips.

        Args:
          like: gives a state with the shapes that the checkpoint must have; values do not matter.
          set_aside: move damaged checkpoints to another folder, so that their steps can be saved
            again.

        Returns:
          The state as host arrays, and the recipe, seed and step of the checkpoint.

        Raises:
          UserError: there is no checkpoint, all are damaged, or an older version wrote it.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        if not steps:
            raise UserError(
                f"no checkpoint in {self.folder}: train one with `python -m train train RECIPE "
                f"--run {self.run}`"
            )
        for step in steps:
            try:
                return self._restore(step, like)
            except UserError:
                raise
            except Exception as fault:  # reading a damaged file may raise anything
                self._report_damaged(step, fault)
                if set_aside:
                    self._set_aside(step)
        raise UserError(
            f"every checkpoint in {self.folder} is damaged: put one back, or train again in "
            f"another folder"
        )

    def restore_newest(
        self, like: Callable[[About], TrainState], count: int
    ) -> list[tuple[TrainState, About]]:
        """Restores the newest ``count`` checkpoints, the oldest of them first.

        Raises:
          UserError: there are fewer, or one of them is damaged.
        """
        steps = sorted(self._manager.all_steps())[-count:]
        if len(steps) < count:
            raise UserError(
                f"{self.folder} has {len(steps)} checkpoints, {count} are needed: train with "
                f"--keep-checkpoints {count}"
            )
        restored = []
        for step in steps:
            try:
                restored.append(self._restore(step, like))
            except UserError:
                raise
            except Exception as fault:  # reading a damaged file may raise anything
                raise UserError(
                    f"the checkpoint of step {step} in {self.folder} is damaged"
                ) from fault
        return restored

    def _restore(self, step, like):
        args = self._orbax.args
        stored = self._manager.restore(step, args=args.Composite(about=args.JsonRestore())).about
        if "digest" not in stored or "inputs" not in stored["recipe"]:
            raise UserError(
                f"the checkpoint of step {step} in {self.folder} was written by an older version: "
                f"train again in another folder"
            )
        generator = stored.get("generator", FIRST_GENERATOR)
        about = About(Recipe.from_json(stored["recipe"]), stored["seed"], step, generator)
        blank = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like(about))
        restored = self._manager.restore(
            step, args=args.Composite(state=args.StandardRestore(_parts(blank)))
        ).state
        state = blank.replace(**jax.tree.map(np.asarray, restored))
        if digest(state) != stored["digest"]:
            raise ValueError("its arrays do not match their digest")
        return state, about

    def _report_damaged(self, step, fault) -> None:
        if devices.is_first():
            reason = (str(fault).splitlines() or [type(fault).__name__])[0][:100]
            progress.console().print(
                f"the checkpoint of step {step} in {self.folder} is damaged and skipped: {reason}",
                markup=False,
            )

    def _set_aside(self, step) -> None:
        devices.wait("damaged checkpoint read")
        if devices.is_first():
            place = self.run / "damaged"
            place.mkdir(exist_ok=True)
            (self.folder / str(step)).replace(place / f"{step}-{os.urandom(3).hex()}")
        devices.wait("damaged checkpoint moved")
        self._manager.reload()


def _parts(state: TrainState) -> dict[str, Any]:
    """The fields of a state that are not None, so that a new optional field changes no old run."""
    return {name: value for name, value in vars(state).items() if value is not None}


def digest(tree: Any) -> str:
    """SHA-256 of the names, types, shapes and bytes of a pytree of host arrays."""
    result = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.ascontiguousarray(leaf)
        result.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape} ".encode())
        result.update(array.tobytes())
    return result.hexdigest()
