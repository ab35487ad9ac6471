"""The settings of ESP attention in a recipe."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Esp:
    """The slices of ESP attention, and how they are averaged; see ``aj.esp_attention``.

    Attributes:
      slices: number of random directions, the same in every layer; None for the coordinate axes of
        a head, as in the released code.
      inverse_temperature: T >= 0 of the average over the slices. The released code has 0.1 for
        images and 10 for masked texts.
    """

    slices: int | None = None
    inverse_temperature: float = 0.1

    def __post_init__(self):
        if self.slices is not None and self.slices < 1:
            raise ValueError(f"esp_slices {self.slices} must be at least 1")
        if not (math.isfinite(self.inverse_temperature) and self.inverse_temperature >= 0):
            raise ValueError(
                f"inverse_temperature {self.inverse_temperature} must be finite and at least 0"
            )


AS_RELEASED = Esp()
"""The settings of the released code for images."""
