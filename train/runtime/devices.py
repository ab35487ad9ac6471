"""Divides the batch of a training step among devices and hosts.

There are three ways with one interface: ``Sharded`` (``jax.jit`` over a mesh, the default),
``Mapped`` (``jax.pmap``) and ``Alone`` (one device).  Every device has all parameters and the whole
optimiser state, and gets an equal share of the batch.  Losses and gradients equal those of one
device up to rounding.  Dropout under ``Sharded`` is that of one device; under ``Mapped`` every
device draws its own.

A host is a JAX process, see ``connect``.  Each host feeds its own rows of the batch to its devices.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.runtime.errors import UserError

AXIS = "batch"


class Alone:
    """One device with plain ``jax.jit``, the reference for the other ways."""

    name = "alone"

    def __init__(self, batch_size: int, parts: int = 1):
        """Raises UserError if there are several processes.

        The other ways raise it if ``batch_size`` cannot be divided among the devices; ``Mapped``
        also if the rows of a device cannot be divided into ``parts``, see ``train_step``.
        """
        if jax.process_count() > 1:
            raise UserError("--parallel alone is for one process: leave --coordinator out")
        self._device = jax.local_devices()[0]

    def compile(self, step: Callable) -> Callable:
        """Compiles the step; it reuses the buffers of the old state."""
        return jax.jit(step, donate_argnums=0)

    def place(self, state: Any) -> Any:
        """Copies a state of host arrays to every device."""
        return jax.device_put(state, self._device)

    def feed(self, rows: np.ndarray) -> jax.Array:
        """Divides this host's rows of the batch among its devices."""
        return jax.device_put(rows, self._device)

    def read(self, tree: Any) -> Any:
        """The step's results as host arrays."""
        return jax.tree.map(np.asarray, tree)


class Sharded(Alone):
    """``jax.jit`` over a mesh of all devices; the compiler inserts the sums across them."""

    name = "jit"

    def __init__(self, batch_size: int, parts: int = 1):
        _check_divides(batch_size)
        mesh = Mesh(np.array(jax.devices()), (AXIS,))
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._rows = NamedSharding(mesh, PartitionSpec(AXIS))

    def compile(self, step: Callable) -> Callable:  # noqa: D102
        return jax.jit(step, donate_argnums=0, out_shardings=self._whole)

    def place(self, state: Any) -> Any:  # noqa: D102
        put = lambda x: jax.make_array_from_process_local_data(self._whole, np.asarray(x))
        return jax.tree.map(put, state)

    def feed(self, rows: np.ndarray) -> jax.Array:  # noqa: D102
        return jax.make_array_from_process_local_data(self._rows, rows)


class Mapped(Alone):
    """``jax.pmap``: every device runs the step on its rows; gradients are averaged.

    A state has a leading axis of devices, and rows become ``(devices, rows per device, ...)``.
    """

    name = "pmap"

    def __init__(self, batch_size: int, parts: int = 1):
        _check_divides(batch_size)
        devices = jax.device_count()
        rows = batch_size // devices
        if rows % parts:
            raise UserError(
                f"--parallel pmap gives {rows} of {batch_size} examples to each of {devices} "
                f"devices, which --accumulate {parts} does not divide: choose a multiple of "
                f"{devices * parts} with --batch-size, or --parallel jit"
            )
        self._count = jax.local_device_count()

    def compile(self, step: Callable) -> Callable:  # noqa: D102
        mapped = functools.partial(step, axis_name=AXIS)
        return jax.pmap(mapped, axis_name=AXIS, donate_argnums=0)

    def place(self, state: Any) -> Any:  # noqa: D102
        repeat = lambda x: np.broadcast_to(np.asarray(x), (self._count, *np.shape(x)))
        return jax.pmap(lambda x: x, axis_name=AXIS)(jax.tree.map(repeat, state))

    def feed(self, rows: np.ndarray) -> np.ndarray:  # noqa: D102
        return rows.reshape(self._count, -1, *rows.shape[1:])

    def read(self, tree: Any) -> Any:
        """The step's results on this host's first device, which all devices have in common."""
        return jax.tree.map(lambda x: np.asarray(x.addressable_shards[0].data)[0], tree)


WAYS = {way.name: way for way in (Sharded, Mapped, Alone)}


def _check_divides(batch_size: int) -> None:
    if batch_size % jax.device_count():
        raise UserError(
            f"batch_size {batch_size} cannot be divided evenly among {jax.device_count()} devices: "
            f"choose a multiple of {jax.device_count()} with --batch-size"
        )


def connect(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Joins the processes of a run on several hosts; call it before any computation.

    Args:
      coordinator: ``HOST:PORT`` of process 0, ``"auto"`` on clusters where JAX finds it by itself
        (Slurm, TPU pods), or None for a run of one process.
      num_processes, process_id: as for ``jax.distributed.initialize``.

    Raises:
      UserError: a setting is missing, or the processes could not be joined.
    """
    if coordinator is None:
        if num_processes is not None or process_id is not None:
            raise UserError("--num-processes and --process-id need --coordinator HOST:PORT")
        return
    if coordinator != "auto" and (num_processes is None or process_id is None):
        raise UserError(f"--coordinator {coordinator} needs --num-processes and --process-id")
    try:
        jax.distributed.initialize(
            coordinator_address=None if coordinator == "auto" else coordinator,
            num_processes=num_processes,
            process_id=process_id,
        )
    except (RuntimeError, ValueError) as fault:
        raise UserError(
            f"cannot join the run at --coordinator {coordinator}: {str(fault).splitlines()[0]}"
        ) from fault


def share() -> tuple[int, int]:
    """``(index, count)``: this process gets part ``index`` of ``count`` of every batch."""
    return jax.process_index(), jax.process_count()


def fakes_devices() -> bool:
    """Whether one CPU acts as several devices.

    A training loop that does not wait for each step can deadlock there.
    """
    return jax.local_device_count() > 1 and jax.local_devices()[0].platform == "cpu"


def is_first() -> bool:
    """Whether this is the first process, the one that prints and writes files."""
    return jax.process_index() == 0


def wait(what: str) -> None:
    """Waits until every process has reached this call; ``what`` is a name for it."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def any_process(flag: bool) -> bool:
    """Whether ``flag`` is true in any process; every process must call this function."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def total(tree: Any) -> Any:
    """Sums of each leaf over all processes; every process must call this function."""
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(lambda x: x.sum(0), multihost_utils.process_allgather(tree))
