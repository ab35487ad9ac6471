"""Several devices and hosts: one pure training step, its batch shared out among them.

Three ways with one interface: ``Sharded`` (``jax.jit`` over a mesh, the default), ``Mapped``
(``jax.pmap``) and ``Alone`` (one device).  Parameters and optimiser state are whole on every
device; each takes an equal share of the batch.  Losses and gradients are those of one device up to
rounding; dropout is the same under ``Sharded`` and drawn separately on every device under
``Mapped``.

Hosts are JAX processes (``connect``).  Each feeds its own devices with its own rows of the batch.
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
    """The first device and plain ``jax.jit``: what the other ways are compared with."""

    name = "alone"

    def __init__(self, batch_size: int):
        """Raises UserError where this way cannot share out ``batch_size``."""
        if jax.process_count() > 1:
            raise UserError("--parallel alone is for one process: leave --coordinator out")
        self._device = jax.local_devices()[0]

    def compile(self, step: Callable) -> Callable:
        """The step, jitted; the old state's buffers are reused."""
        return jax.jit(step, donate_argnums=0)

    def place(self, state: Any) -> Any:
        """A state of host arrays, whole on every device."""
        return jax.device_put(state, self._device)

    def feed(self, rows: np.ndarray) -> jax.Array:
        """This host's rows of the batch, shared out among its devices."""
        return jax.device_put(rows, self._device)

    def read(self, tree: Any) -> Any:
        """The step's results as host arrays."""
        return jax.tree.map(np.asarray, tree)


class Sharded(Alone):
    """``jax.jit`` over a mesh of all devices; the compiler adds the sums across them."""

    name = "jit"

    def __init__(self, batch_size: int):
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
    """``jax.pmap``: every device runs the step on its rows and averages over the axis.

    A state has a leading axis of devices, and rows become ``(devices, rows a device, ...)``.
    """

    name = "pmap"

    def __init__(self, batch_size: int):
        _check_divides(batch_size)
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
        """The step's results on this host's first device, which are those of all."""
        return jax.tree.map(lambda x: np.asarray(x.addressable_shards[0].data)[0], tree)


WAYS = {way.name: way for way in (Sharded, Mapped, Alone)}


def _check_divides(batch_size: int) -> None:
    if batch_size % jax.device_count():
        raise UserError(
            f"batch_size {batch_size} does not share out evenly among {jax.device_count()} "
            f"devices: give a multiple with --batch-size"
        )


def connect(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Joins the processes of a run on several hosts; to be called before any computation.

    Args:
      coordinator: ``HOST:PORT`` of process 0, ``"auto"`` where the cluster tells JAX (Slurm, TPU
        pods), or None for a run of one process.
      num_processes, process_id: as ``jax.distributed.initialize``.

    Raises:
      UserError: a setting is missing, or the others did not come.
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
    """``(index, count)`` of this process, which takes that part of every batch."""
    return jax.process_index(), jax.process_count()


def fakes_devices() -> bool:
    """Whether the devices are shares of one CPU, where a loop that runs ahead can deadlock."""
    return jax.local_device_count() > 1 and jax.local_devices()[0].platform == "cpu"


def is_first() -> bool:
    """Whether this process prints and writes for all."""
    return jax.process_index() == 0


def wait(what: str) -> None:
    """Waits until every process got here; ``what`` names the place."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def any_process(flag: bool) -> bool:
    """Whether ``flag`` is true in any process; all of them must call it."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def total(tree: Any) -> Any:
    """Leaf-wise sums over all processes, as host arrays; all of them must call it."""
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(lambda x: x.sum(0), multihost_utils.process_allgather(tree))
