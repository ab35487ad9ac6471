"""The demo: real images in, a trained teacher, its compiled twin, one table and one picture out."""

import pathlib
import shutil
import time
from collections.abc import Sequence

import asap_jax as aj
from train import compiling, fidelity, loop, operators, picture, progress, recipes, runs, teacher
from train.data import Examples
from train.operators import Operator
from train.table import Table


def moment_rows(
    trained: teacher.Teacher,
    examples: Examples,
    counts: Sequence[int] = (1, 2, 3),
    num_images: int = compiling.NUM_IMAGES,
) -> list[Operator]:
    """Rows past the paper: moment features per head, one fit for each number of closures.

    Args:
      trained: a Sinkhorn teacher of more steps than any of ``counts``.
      examples: the training split.
      counts: numbers of closures.
      num_images: calibration examples.
    """
    rows = []
    for count in counts:
        options = aj.Options(
            seed=trained.seed,
            features="moments",
            coefficients="per_head",
            closures=count,
            ridge=1e-5,
            ridge_scale="trace",
        )
        variables = compiling.compile_teacher(
            trained, examples, options, num_images=num_images
        ).variables
        name = f"Moments, {count} closure{'s' if count > 1 else ''}"
        rows.append(operators.compiled_row(name, trained.recipe, variables, count))
    return rows


def run(seed: int, out: pathlib.Path, recipe: recipes.Recipe = recipes.DEMO) -> Table:
    """Trains, compiles, measures and draws.

    Args:
      seed: seed of the run.
      out: folder for everything that is written; an older demo in it is replaced.
      recipe: what to train.

    Returns:
      The table that was printed.

    Raises:
      UserError: an extra is missing.
    """
    screen = progress.console()
    began = time.perf_counter()
    split = teacher.load_data(recipe)
    teacher.announce(split)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    trained = loop.train(recipe, split.train, out, seed=seed)
    result = compiling.compile_teacher(trained, split.train)
    screen.print(str(result.report), markup=False)
    aj.save(out / runs.ARTEFACT, result)
    table = fidelity.measure(
        recipe,
        trained.variables,
        split.test,
        compiled=result.variables,
        more=moment_rows(trained, split.train),
    )
    table.print(screen)
    written = [*table.write(out)]
    written.append(picture.draw(recipe, result.variables, split.test, out / "plans.png"))
    for path in written:
        screen.print(f"wrote {path}", markup=False)
    screen.print(f"demo took {time.perf_counter() - began:.0f} s")
    return table
