"""The sizes of a table's runs: ``small`` for two CPU cores, ``paper`` for the paper's own."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Preset:
    """Sizes of the tables.

    Attributes:
      name: ``"small"`` or ``"paper"``.
      num_fit: M, the number of calibration examples of a fit.
      sizes: further M, in the table of calibration sizes.
      token_bias_fit: M of the fit with a bias per token (paper: 8192).
      stored_fit: M of fits that keep the activations in memory.
      test_examples: examples for accuracy and agreement; None for the whole test split.
      baseline_seeds: most seeds of the differential and the ESP baseline.
      patches: patch sizes of the MNIST table.
      refreshed: patch size and most seeds of the supervised refresh.
      lengths: token counts of the runtime sweep.
      flash_lengths: token counts of the control with unit-norm inputs.
      esp_lengths: token counts of the train-step sweep.
      esp_slices: slice counts of the slice-count profile.
      esp_slices_trained: slices of the ESP baselines; None for the recipe's own.
      text_batch, image_batch: examples of a whole-model step.
    """

    name: str
    num_fit: int
    sizes: tuple[int, ...]
    token_bias_fit: int
    stored_fit: int
    test_examples: int | None
    baseline_seeds: int
    patches: tuple[int, ...]
    refreshed: tuple[int, int]
    lengths: tuple[int, ...]
    flash_lengths: tuple[int, ...]
    esp_lengths: tuple[int, ...]
    esp_slices: tuple[int, ...]
    esp_slices_trained: int | None
    text_batch: int
    image_batch: int


SEEDS = (0, 1, 2)
CASE_BATCHES = 8
CASE_EXAMPLES = 32
"""A case is one of ``CASE_BATCHES`` test batches of ``CASE_EXAMPLES`` examples, at one layer."""
WARMUPS, ROUNDS = 3, 10
"""Calls before and in a timing (paper, "Timing and Evaluation Protocol")."""

PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            name="small",
            num_fit=1024,
            sizes=(512, 4096),
            token_bias_fit=8192,
            stored_fit=512,
            test_examples=2000,
            baseline_seeds=1,
            patches=(4, 7, 14),
            refreshed=(7, 1),
            lengths=(500, 1000, 2000),
            flash_lengths=(512, 2048),
            esp_lengths=(197, 512),
            esp_slices=(4, 8, 16),
            esp_slices_trained=4,
            text_batch=8,
            image_batch=4,
        ),
        Preset(
            name="paper",
            num_fit=4096,
            sizes=(512, 1024),
            token_bias_fit=8192,
            stored_fit=512,
            test_examples=None,
            baseline_seeds=3,
            patches=(2, 4, 7, 14),
            refreshed=(2, 3),
            lengths=(500, 1000, 2000, 4000, 8000),
            flash_lengths=(512, 2048, 4096),
            esp_lengths=(197, 512, 1000, 2000),
            esp_slices=(8, 16, 32, 64),
            esp_slices_trained=None,
            text_batch=32,
            image_batch=64,
        ),
    )
}
