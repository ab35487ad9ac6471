"""Settings of the test session: two devices, strict numerics, repeatable random cases."""

import gc
import os
import pathlib

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

TESTS = pathlib.Path(__file__).parent

# Before the first computation, or the number of devices is settled already.
jax.config.update("jax_num_cpu_devices", 2)

# Most of the suite's time is compilation. The older of XLA's two code generators for CPUs takes
# 40 % less of it, and one piece of code per program 6 % less again; JAX 0.11 and later have the
# newer generator alone.
if jax.__version_info__ < (0, 11):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"
        " --xla_cpu_parallel_codegen_split_count=1"
    )
else:
    # Programs of two devices wait for each other in the threads of one pool, by default a thread a
    # core. Newer versions run more of a program at once, and on two cores all threads came to wait.
    os.environ.setdefault("NPROC", "8")

# A lowered program says for every operation which lines of Python it came from. No test reads
# that, and lowering without it takes less time.
jax.config.update("jax_traceback_in_locations_limit", 0)

# XLA's optimisations cost more time here than they save. Bounds at the edge of float32 are for the
# optimised programs that users run, and notebooks train for longer than they compile: these modules
# keep them.
jax.config.update("jax_disable_most_optimizations", True)
OPTIMISED = ("test_moments", "test_notebooks")

# Linux allows 65,530 by default. A small program takes about 4, and 1.8 MB.
MOST_MAPS = 5000

# Many programs are small and compiled more than once: by both processes, by module after module, by
# the next run. They are kept in .pytest_cache.
COMPILED = {
    "JAX_COMPILATION_CACHE_DIR": str(TESTS.parent / ".pytest_cache" / "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
os.environ.update(COMPILED)  # for processes that tests start
jax.config.update("jax_compilation_cache_dir", COMPILED["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# Tracing makes many objects that live long, and looking through all of them for cycles again and
# again costs 7 % of the suite: what the imports made is left out, and a search waits for more.
gc.freeze()
gc.set_threshold(100_000, 20, 20)

# Deadlines measure compilation, and a suite that draws new cases on every run cannot be compared
# with the run before: the draws are fixed.
hypothesis.settings.register_profile(
    "suite", deadline=None, derandomize=True, database=None, max_examples=25
)
hypothesis.settings.load_profile("suite")


@pytest.fixture(autouse=True, scope="module")
def numerics(request):
    """Strict promotion for the library, the usual one for training (optax.adam needs it)."""
    jax.config.update("jax_disable_most_optimizations", request.path.stem not in OPTIMISED)
    if TESTS / "train" in request.path.parents:
        yield
    else:
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            yield


@pytest.fixture(autouse=True, scope="module")
def executables(request):
    """Lets go of compiled programs: a process may map only so many pieces of memory."""
    optimised = request.path.stem in OPTIMISED
    if optimised:
        jax.clear_caches()
    yield
    if optimised or num_maps() > MOST_MAPS:
        jax.clear_caches()


def num_maps():
    """Pieces of memory that this process maps; too many where the system does not say."""
    maps = pathlib.Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else MOST_MAPS + 1


@pytest.fixture
def x64():
    """Runs one test with 64-bit types enabled."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    """Runs one test in both precisions the library computes in."""
    with jax.enable_x64(request.param == "float64"):
        yield jnp.dtype(request.param)


@pytest.fixture
def unmeasured(monkeypatch):
    """Leaves the report out of every compile, for tests of the states that a fit gives.

    The programs that measure take longer to compile than those that fit.
    """
    measured = "asap_jax.compiler.calibration.Calibration._measured"
    monkeypatch.setattr(measured, lambda *args: ({}, None))


@pytest.fixture
def rng():
    """A NumPy generator, seeded alike for every test."""
    return np.random.default_rng(0)


def pytest_report_header():
    """Names the versions and devices a run used."""
    devices = f"{jax.device_count()} {jax.devices()[0].platform}"
    return f"jax {jax.__version__}, {devices} devices, {os.cpu_count()} cores"
