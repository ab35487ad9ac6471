"""Importing the library is light: no further packages, no network, no warnings."""

import json
import subprocess
import sys

NEIGHBOURS = "chex, flax.linen, flax.nnx, jax, jax.numpy, numpy, optax"

PROBE = """
import json, socket, sys

class Refused(socket.socket):
    def __init__(self, *args, **kwargs):
        raise AssertionError("a socket was opened")

socket.socket = Refused
import {neighbours}
before = set(sys.modules)
import asap_jax
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def run(code):
    """Runs code in a fresh interpreter that turns warnings into errors; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_only_asap_jax_in_addition_to_its_dependencies():
    loaded = json.loads(run(PROBE.format(neighbours=NEIGHBOURS)))
    assert "asap_jax" in loaded
    foreign = [name for name in loaded if name.split(".")[0] not in {"asap_jax", *STANDARD}]
    assert not foreign


STANDARD = sys.stdlib_module_names


def test_import_loads_no_data_or_plotting_package():
    code = "import asap_jax, sys; print(sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = run(code)
    neighbours = run(
        f"import {NEIGHBOURS}, sys; print(sorted({{name.split('.')[0] for name in sys.modules}}))"
    )
    for package in (
        "tensorflow",
        "tensorflow_datasets",
        "array_record",
        "matplotlib",
        "PIL",
        "scipy",
        "orbax",
    ):
        assert f"'{package}'" not in loaded or f"'{package}'" in neighbours


def test_import_does_not_initialise_devices():
    code = (
        "import jax, asap_jax; jax.config.update('jax_num_cpu_devices', 3); "
        "print(jax.device_count())"
    )
    assert run(code).strip().endswith("3")


def test_public_names_are_documented():
    code = (
        "import asap_jax as aj; print([n for n in dir(aj) if n[0] != '_' "
        "and callable(getattr(aj, n)) and not getattr(aj, n).__doc__])"
    )
    assert run(code).strip() == "[]"
