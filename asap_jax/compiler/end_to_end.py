"""What compiling changed at the output of the whole model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

Outputs = Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class ModelReport:
    """The compiled model's output beside the teacher's, on the batches of a report.

    An example is one entry of the output's first axis; its change is the relative distance
    ``|y_hat - y| / |y|`` over its other axes. Numbers that are not finite in the teacher's output,
    such as those of padded tokens with rubbish in them, are left out.

    Attributes:
      num_examples: examples of all batches.
      agreement: share of the examples with the same argmax; None unless the output is one array
        ``(examples, classes)``.
      mean_change, worst_change: mean and largest change of an example.
      largest_difference: largest absolute difference of one number of the output.
    """

    num_examples: int
    agreement: float | None
    mean_change: float
    worst_change: float
    largest_difference: float

    def __str__(self) -> str:
        text = (
            f"model output on {self.num_examples} example(s): change {self.mean_change:.3g} on "
            f"average, {self.worst_change:.3g} at the worst example; largest difference "
            f"{self.largest_difference:.3g}"
        )
        if self.agreement is None:
            return text
        return f"{text}; same class for {100 * self.agreement:.1f} %"


def compare(pairs: Sequence[tuple[Outputs, Outputs]]) -> ModelReport | None:
    """The report on the outputs of the compiled model and of the teacher, batch by batch.

    None if the output has no floating array, or its arrays differ in their number of examples.
    """
    changes, same, largest = [], [], 0.0
    logits = True
    for ours, theirs in pairs:
        arrays = list(zip(_numbers(ours), _numbers(theirs), strict=True))
        arrays = [(a, b) for a, b in arrays if a.ndim and len(a)]
        if not arrays or len({len(b) for _, b in arrays}) > 1:
            return None
        flat = [[x.reshape(len(x), -1) for x in side] for side in zip(*arrays, strict=True)]
        a, b = (np.concatenate(side, 1) for side in flat)
        judged = np.isfinite(b)
        a, b = np.where(judged, a, 0), np.where(judged, b, 0)
        norm = np.linalg.norm(b, axis=1)
        changes.append(np.linalg.norm(a - b, axis=1) / np.where(norm > 0, norm, 1))
        largest = float(np.maximum(largest, np.abs(a - b).max(initial=0)))
        logits &= len(arrays) == 1 and arrays[0][1].ndim == 2 and b.shape[1] > 1
        same.append(a.argmax(1) == b.argmax(1) if b.shape[1] else np.ones(len(b), bool))
    if not changes:
        return None
    every = np.concatenate(changes)
    agreement = float(np.concatenate(same).mean()) if logits else None
    return ModelReport(len(every), agreement, float(every.mean()), float(every.max()), largest)


def _numbers(outputs: Outputs) -> list[np.ndarray]:
    """The floating arrays, in float64."""
    return [
        np.asarray(x, np.float64) for x in outputs if jax.numpy.issubdtype(x.dtype, np.floating)
    ]
