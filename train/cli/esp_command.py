"""The sub-command ``python -m train esp``."""

import argparse

from train.evaluation import esp_modes
from train.reporting import progress
from train.training import held_out
from train.training.splits import announce, load_data
from train.training.teacher import load_teacher


def run_esp(options: argparse.Namespace) -> None:
    """Evaluates one ESP checkpoint under its three operators, and writes the table."""
    trained = load_teacher(options.folder)
    recipe = trained.recipe
    split = load_data(recipe, options.data_dir, options.folder)
    announce(split)
    kept, _ = held_out.divide(recipe, split.train)
    num_steps = recipe.epochs * (len(kept) // recipe.batch_size)
    rows = esp_modes.measure(trained, split.test, num_steps, rounds=options.rounds)
    report = esp_modes.report(trained, split.test, rows)
    report.print(progress.console())
    for path in report.write(options.out or options.folder, "esp"):
        print(f"wrote {path}")
