"""Fuzzing: ``python -m tests.fuzz --cases 10000 --seed 0``, or one case with ``--only``."""

import argparse
import collections
import pathlib
import sys
import time

import jax

TESTS = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]


def main(argv=None):
    """Runs the cases and returns the exit status: 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this case of the seed alone")
    parser.add_argument("--kind", help="run cases of one kind alone")
    parser.add_argument("--programs", type=int, default=72, help="compiled programs to draw from")
    options = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_disable_most_optimizations", True)
    from fuzz import cases

    numbers = range(options.cases) if options.only is None else [options.only]
    counts, failures, begin = collections.Counter(), 0, time.process_time()
    for done, number in enumerate(numbers, 1):
        kind = cases.kind_of(options.seed, number)
        if options.kind in (None, kind):
            counts[kind] += 1
            failures += not _passes(cases, options, number, kind)
        if done % 500 == 0 or done == len(numbers):
            seconds = time.process_time() - begin
            print(f"{done} cases, {failures} failed, {seconds:.0f} s: {dict(counts)}", flush=True)
    return 1 if failures else 0


def _passes(cases, options, number, kind):
    try:
        cases.run(options.seed, number, options.programs)
        return True
    except Exception as error:  # any error is a failure of the case
        again = f"python -m tests.fuzz --seed {options.seed} --only {number}"
        again += f" --programs {options.programs}"
        print(f"FAILED {kind}: {again}\n  {type(error).__name__}: {error}", flush=True)
        return False


if __name__ == "__main__":
    sys.exit(main())
