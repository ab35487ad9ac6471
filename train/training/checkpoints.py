"""Atomic checkpoints: training state, recipe and seed, written by orbax.

A checkpoint appears under its final name only when it is whole, so a run that is killed leaves
the one before.  Each carries a digest of its arrays; one whose arrays do not match it is skipped
for the one before.  Arrays are stored as host arrays, so a run may resume on other devices.
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

KEPT = 2
FULL_DISK = os.strerror(errno.ENOSPC)


@dataclasses.dataclass(frozen=True)
class About:
    """What a checkpoint was made with.

    Attributes:
      recipe: the recipe of the run.
      seed: the seed of the run.
      step: steps taken.
    """

    recipe: Recipe
    seed: int
    step: int


class Checkpoints:
    """The checkpoints of one run folder; the newest two stay. A context manager."""

    def __init__(self, run: str | os.PathLike):
        self._orbax = need("orbax.checkpoint")
        self.run = pathlib.Path(run).absolute()
        self.folder = self.run / "checkpoints"
        self._manager = self._orbax.CheckpointManager(
            self.folder,
            options=self._orbax.CheckpointManagerOptions(
                max_to_keep=KEPT, create=False, enable_async_checkpointing=False
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
        """Where the newest checkpoint is, for messages."""
        last = self.latest()
        if last is None:
            return f"there is no checkpoint in {self.folder} yet"
        return f"the last good checkpoint in {self.folder} is of step {last}"

    def save(self, state: TrainState, recipe: Recipe, seed: int) -> None:
        """Writes a checkpoint, unless there is one of this step.

        Args:
          state: host arrays.
          recipe, seed: of the run.

        Raises:
          UserError: a value is not finite, or the disk is full; the ones before are left.
        """
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state)):
            raise UserError(
                f"a parameter is not finite after step {step}: it is not saved; {self.last_good()}"
            )
        args = self._orbax.args
        about = {"recipe": recipe.to_json(), "seed": seed, "digest": digest(state)}
        try:
            self._manager.save(
                step,
                args=args.Composite(state=args.StandardSave(state), about=args.JsonSave(about)),
            )
        except Exception as fault:  # full disks reach us as OSError and as ValueError
            if FULL_DISK not in str(fault):
                raise
            raise UserError(
                f"the disk is full: step {step} could not be saved in {self.folder}; make room "
                f"and continue with --resume; {self.last_good()}"
            ) from fault

    def restore(
        self, like: Callable[[About], TrainState], *, set_aside: bool = False
    ) -> tuple[TrainState, About]:
        """The newest checkpoint that is not damaged; those skipped are named on the console.

        Args:
          like: gives a state of the shapes that the checkpoint must have; values do not matter.
          set_aside: move damaged ones out of the way, so that their steps can be saved again.

        Returns:
          The state as host arrays, and what it was made with.

        Raises:
          UserError: there is none, or all are damaged.
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
            except Exception as fault:  # whatever the readers of a damaged file raise
                self._report_damaged(step, fault)
                if set_aside:
                    self._set_aside(step)
        raise UserError(
            f"every checkpoint in {self.folder} is damaged: put one back, or train again in "
            f"another folder"
        )

    def _restore(self, step, like):
        args = self._orbax.args
        stored = self._manager.restore(step, args=args.Composite(about=args.JsonRestore())).about
        if "digest" not in stored or "inputs" not in stored["recipe"]:
            raise UserError(
                f"the checkpoint of step {step} in {self.folder} was written by an older version: "
                f"train again in another folder"
            )
        about = About(Recipe.from_json(stored["recipe"]), stored["seed"], step)
        blank = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like(about))
        restored = self._manager.restore(
            step, args=args.Composite(state=args.StandardRestore(blank))
        ).state
        state = jax.tree.map(np.asarray, restored)
        if digest(state) != stored["digest"]:
            raise ValueError("its arrays are not those that were written")
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


def digest(tree: Any) -> str:
    """SHA-256 of the names, types, shapes and bytes of a pytree of host arrays."""
    result = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.ascontiguousarray(leaf)
        result.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape} ".encode())
        result.update(array.tobytes())
    return result.hexdigest()
