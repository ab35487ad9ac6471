"""Training through compiled layers, which are fitted again while the teacher trains.

A training step runs the compiled layers. Once in a while ``refresh`` runs the Sinkhorn layers on
one batch, adds its normal equations to running sums, and solves for the predictors again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from asap_jax import checks, metrics
from asap_jax.attention import functions
from asap_jax.compiler.batches import check_batch
from asap_jax.compiler.calibration import Calibration, select
from asap_jax.compiler.fit import Fit
from asap_jax.compiler.single_fit import Candidate, SumsFit
from asap_jax.fitting.least_squares import NormalEquations
from asap_jax.records import CompiledState, Record, call, over_stack

WHERE = "the batch of this refresh"


@flax.struct.dataclass
class AmortizedState:
    """What ``AmortizedTraining`` carries from one refresh to the next: a pytree of arrays.

    Attributes:
      sums: layer path to the running normal equations, those of the dual first; those of the row
        masses follow if the fit has them. A stack of layers (from a scan) has a leading axis.
      layers: layer path to the compiled state.
      rel_l2: layer path to the distance of ``layers`` from true Sinkhorn, on the batch of the
        latest refresh: that of the attention weights, relative, in the Frobenius norm; 0-d, or the
        shape of a stack.
      rel_l2_before: the same distance on the same batch, of the layers that this refresh replaced.
        Their fit had not seen the batch. After ``init`` the replaced layers predict 0.
    """

    sums: dict[str, tuple[NormalEquations, ...]]
    layers: dict[str, CompiledState]
    rel_l2: dict[str, jax.Array]
    rel_l2_before: dict[str, jax.Array]


class AmortizedTraining:
    """Fits the layers that a teacher trains through; see the subclasses for linen and nnx.

    In all methods ``teacher`` is what trains: the variables of a linen model, or an nnx model;
    compiled layers in it are not used. ``batch`` is unlabeled, as for ``compile``. The methods are
    pure and work under ``jax.jit`` and ``nnx.jit``. Dropout is off in them.
    """

    def __init__(self, calibration: Calibration, decay: float):
        self.fit = check_sums(calibration.fit)
        self.decay = checks.non_negative_float("decay", decay)
        if self.decay > 1:
            raise ValueError(f"decay must be in [0, 1], got {self.decay}")
        self.calibration = calibration

    def empty(self, teacher: Any, batch: Any) -> AmortizedState:
        """The state before the first refresh: sums without data, and layers that predict 0.

        Only the shapes of ``batch`` are used. ``init`` is a refresh of this state.
        """
        sums, layers, rel_l2 = {}, {}, {}
        for path, record in self._recorded(teacher, batch).items():
            layer = self._layer(path, record)
            shapes = jax.eval_shape(lambda record, layer=layer: _sums(layer, record), record)
            sums[path] = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            # Under jit, sums without data give coefficients of 0 and no error.
            layers[path] = jax.jit(lambda sums, layer=layer: _solved(layer, sums))(sums[path])
            rel_l2[path] = jnp.zeros(record.stack, sums[path][0].gram.dtype)
        self.calibration.check_switched(teacher, layers, batch)
        return AmortizedState(sums, layers, rel_l2, dict(rel_l2))

    def init(self, teacher: Any, batch: Any) -> AmortizedState:
        """The state fitted to one batch.

        Raises:
          ValueError, TypeError: as ``compile``; values are not checked under a trace.
        """
        return self.refresh(self.empty(teacher, batch), teacher, batch)

    def refresh(
        self, state: AmortizedState, teacher: Any, batch: Any, *, axis_name: str | None = None
    ) -> AmortizedState:
        """Runs the Sinkhorn layers on one batch, adds its sums, and solves again.

        Args:
          state: the state of ``init``, or of an earlier refresh of the same model and fit.
          teacher: the present variables or model.
          batch: one batch.
          axis_name: add up the sums over this mapped axis, on whose devices parts of the batch are.

        Raises:
          ValueError, TypeError: as ``compile``, and a state that does not fit. Values are not
            checked under a trace; a batch whose sums are not finite is then left out of the fit.
        """
        check_state(state)
        recorded = self._recorded(teacher, batch)
        if set(recorded) != set(state.layers):
            raise ValueError(
                f"state has the layers {sorted(state.layers)}, but {WHERE} runs "
                f"{sorted(recorded)}: every refresh must run the same layers"
            )
        result = AmortizedState({}, {}, {}, {})
        for path, record in recorded.items():
            layer = self._layer(path, record)
            _check_settings(path, state.layers[path], layer)
            new = _sums(layer, record, axis_name)
            _check_fits(path, state.sums[path], new)
            result.sums[path] = _decayed(state.sums[path], new, self.decay)
            result.layers[path] = _solved(layer, result.sums[path])
            both = distances(record, result.layers[path], state.layers[path])
            if axis_name is not None:
                both = jax.lax.pmean(both, axis_name)
            result.rel_l2[path], result.rel_l2_before[path] = both
        return result

    def distance(self, state: AmortizedState, teacher: Any, batch: Any) -> dict[str, jax.Array]:
        """Distance of the compiled layers from true Sinkhorn on a batch, by layer path.

        See ``AmortizedState.rel_l2``. Layers that the batch does not run are left out.
        """
        layers = check_state(state).layers
        recorded = self._recorded(teacher, batch)
        return {
            path: distances(recorded[path], layers[path])[0] for path in layers if path in recorded
        }

    def compiled(self, state: AmortizedState, teacher: Any) -> dict[str, Any]:
        """The compiled teacher as in ``Calibration.compiled``; its states pass no gradient."""
        layers = jax.lax.stop_gradient(check_state(state).layers)
        return self.calibration.compiled(teacher, layers)

    def _recorded(self, teacher: Any, batch: Any) -> Mapping[str, Record]:
        check_batch(batch, WHERE)
        return select(self.calibration.records(teacher, batch), self.calibration.options.layers)

    def _layer(self, path: str, record: Record) -> SumsFit:
        options = self.calibration.options
        return SumsFit(path, record, self.fit, options.closures, ending=options.ending)


def check_state(state: Any) -> AmortizedState:
    """``state``; TypeError if it is not an AmortizedState."""
    return checks.instance("state", state, AmortizedState, "the AmortizedState of init")


def check_sums(fit: Fit) -> Candidate:
    """``fit`` if it is a Candidate that needs sums only and has no guard; ValueError otherwise."""
    if fit.guard:
        raise ValueError(
            "guard=True needs the statistics of a calibration, which layers that are fitted while "
            "the model trains do not have: leave it out"
        )
    if isinstance(fit, Candidate) and fit.layer_kind() is SumsFit:
        return fit
    name = repr(fit.name) if isinstance(fit, Candidate) else type(fit).__name__
    raise ValueError(
        f"fit must be a Candidate that needs nothing but sums over the batches, such as 'moments' "
        f"or 'moments, row mass': rounds=0, chain=False, tuned=0; got {name}"
    )


def _sums(
    layer: SumsFit, record: Record, axis_name: str | None = None
) -> tuple[NormalEquations, ...]:
    """The normal equations of one batch, added up over a mapped axis if one is given."""
    layer.sums = None
    layer.add(record, WHERE)
    if axis_name is not None:
        layer.reduce(lambda sums: jax.lax.psum(sums, axis_name))
    assert layer.sums is not None
    return tuple(layer.sums)


def _decayed(
    old: tuple[NormalEquations, ...], new: tuple[NormalEquations, ...], decay: float
) -> tuple[NormalEquations, ...]:
    """``decay * old + new``, or ``old`` if a value of ``new`` is not finite."""
    finite = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(new)]).all()
    return jax.tree.map(lambda a, b: jnp.where(finite, decay * a + b, a), old, new)


def _solved(layer: SumsFit, sums: tuple[NormalEquations, ...]) -> CompiledState:
    """The compiled state of the layer from these sums."""
    layer.sums, layer.observed = list(sums), None  # statistics of one batch would say little
    state, _ = layer.solve()
    return state


def _check_settings(path: str, old: CompiledState, layer: SumsFit) -> None:
    """Raises ValueError unless the sums of the old state are those of the same dual."""
    settings = lambda x: dict(closures=x.closures, ending=x.ending, spec=x.spec)
    if settings(old) != settings(layer):
        raise ValueError(
            f"state does not fit layer {path!r}: it was fitted with {settings(old)}, but this "
            f"training has {settings(layer)}"
        )


def _check_fits(path: str, old: Any, new: Any) -> None:
    shapes = lambda sums: jax.tree.map(jnp.shape, jax.tree.leaves(sums))
    if shapes(old) != shapes(new):
        raise ValueError(
            f"state does not fit layer {path!r}: its sums have the shapes {shapes(old)}, those of "
            f"{WHERE} {shapes(new)}; the state is of another model or fit"
        )


@jax.jit
def distances(record: Record, *states: CompiledState) -> tuple[jax.Array, ...]:
    """Relative Frobenius distances of the weights of compiled states from those of the teacher.

    Args:
      record: one batch of a layer.
      states: compiled states of this layer.

    Returns:
      A number for each state; an array over the layers for a stacked record.
    """

    def measure(record: Record, *states: CompiledState) -> tuple[jax.Array, ...]:
        _, reference = call(record, functions.sinkhorn_attention, spec=record.spec)
        found = []
        for state in states:
            _, weights = call(
                record,
                functions.asap_attention,
                predictor=state.predictor,
                spec=record.spec,
                closures=state.closures,
                ending=state.ending,
            )
            found.append(metrics.attention_rel_l2(weights, reference))
        return tuple(found)

    return over_stack(measure, record, *states)
