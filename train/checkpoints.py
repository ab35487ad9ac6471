"""Atomic checkpoints: training state, recipe and seed, written by orbax.

A checkpoint appears under its final name only when it is whole, so a run that is killed leaves the
one before.
"""

import dataclasses
import os
import pathlib

import jax

from train.extras import UserError, need
from train.recipe import Recipe
from train.step import TrainState

KEPT = 2


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
    """The checkpoints of one run folder; the newest two are kept. A context manager."""

    def __init__(self, run: str | os.PathLike):
        self._orbax = need("orbax.checkpoint")
        self.folder = pathlib.Path(run).absolute() / "checkpoints"
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

    def save(self, state: TrainState, recipe: Recipe, seed: int) -> None:
        """Writes a checkpoint of ``state``, unless there is one of this step."""
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        args = self._orbax.args
        about = {"recipe": recipe.to_json(), "seed": seed}
        self._manager.save(
            step,
            args=args.Composite(state=args.StandardSave(state), about=args.JsonSave(about)),
        )

    def about(self) -> About:
        """Recipe, seed and step of the newest checkpoint.

        Raises:
          UserError: there is none.
        """
        step = self._newest()
        args = self._orbax.args
        stored = self._manager.restore(step, args=args.Composite(about=args.JsonRestore())).about
        return About(Recipe.from_json(stored["recipe"]), stored["seed"], step)

    def restore(self, like: TrainState) -> TrainState:
        """State of the newest checkpoint.

        Args:
          like: a state of the same shapes; its values do not matter.

        Raises:
          UserError: there is none.
        """
        step = self._newest()
        args = self._orbax.args
        shapes = jax.eval_shape(lambda: like)
        restored = self._manager.restore(
            step, args=args.Composite(state=args.StandardRestore(shapes))
        )
        return restored.state

    def _newest(self) -> int:
        step = self.latest()
        if step is None:
            raise UserError(
                f"no checkpoint in {self.folder}: train one with `python -m train train RECIPE "
                f"--run {self.folder.parent}`"
            )
        return step
