"""The demo: trains a teacher on real images, compiles it, and makes one table and one picture."""

import pathlib
import shutil
import time

import asap_jax as aj
from train.evaluation import compile_teacher, fidelity, picture
from train.evaluation.fidelity_table import FidelityTable
from train.recipes import catalogue
from train.recipes.schema import Recipe
from train.reporting import progress
from train.training import loop, run_folder
from train.training.splits import announce, load_data


def run(seed: int, out: pathlib.Path, recipe: Recipe = catalogue.DEMO) -> FidelityTable:
    """Trains, compiles, measures and draws.

    Args:
      seed: seed of the run.
      out: folder for all files; those of an earlier demo are replaced.
      recipe: what to train.

    Returns:
      The table that was printed.

    Raises:
      UserError: a package of the ``train`` extra is not installed.
    """
    screen = progress.console()
    began = time.perf_counter()
    split = load_data(recipe)
    announce(split)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    trained = loop.train(recipe, split.train, out, seed=seed)
    paper = aj.Options(fit="paper", seed=trained.seed)
    result = compile_teacher.compile_teacher(trained, split.train, paper)
    screen.print(str(result.report), markup=False)
    aj.save(out / run_folder.ARTEFACT, result)
    table = fidelity.measure(
        recipe,
        trained.variables,
        split.test,
        compiled=result.variables,
        more=[
            *compile_teacher.moment_rows(trained, split.train),
            *compile_teacher.moment_rows(trained, split.train, ending="row"),
        ],
    )
    report = table.report()
    report.print(screen)
    written = [*report.write(out, "fidelity")]
    written.append(picture.draw(recipe, result.variables, split.test, out / "plans.png"))
    for path in written:
        screen.print(f"wrote {path}", markup=False)
    screen.print(f"demo took {time.perf_counter() - began:.0f} s")
    return table
