"""Sinkhorn attention for Flax linen: the module, compiling, saving."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
from flax import nnx
from flax.core.scope import union_filters

from asap_jax import checks, records
from asap_jax.attention import functions
from asap_jax.attention.flax_call import Call, Result, attention_method
from asap_jax.compiler import calibration as compiling
from asap_jax.compiler.options import Options
from asap_jax.fitting.candidates import Candidate
from asap_jax.linen.baselines import DiffAttention, EspAttention
from asap_jax.records import CompiledState, Record
from asap_jax.spec import SinkhornSpec

__all__ = ["Calibration", "DiffAttention", "EspAttention", "SinkhornAttention", "compile"]

STATE = "asap"
CAPTURE = "asap_capture"
SCAN_CURE = (
    f"inside nn.scan / nn.vmap add the two collections, for instance "
    f"nn.scan(..., variable_axes={{'params': 0, '{STATE}': 0, '{CAPTURE}': 0}}); inside "
    f"another lifted transform let it pass them too"
)


class SinkhornAttention(nn.Module):
    """Sinkhorn attention as ``attention_fn`` of stock linen attention.

    ``nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=SinkhornAttention(spec))``: one
    instance per layer; it has no parameters, so the parameter tree is that of stock attention.

    It runs the teacher, ``sinkhorn_attention``. When the collection ``"asap"`` holds its state
    it runs ``asap_attention`` instead. When the collection ``"asap_capture"`` is mutable it
    records its inputs there, with dropout off where that collection was asked for by name.

    Attributes:
      spec: the teacher's finite-budget convention.
      implementation: see ``sinkhorn_attention``; not part of any saved state.
    """

    spec: SinkhornSpec
    implementation: str = "auto"

    @nn.compact
    @attention_method
    def __call__(self, call: Call) -> Result:
        """Arguments and result as ``sinkhorn_attention``."""
        path = "/".join(self.path)
        if getattr(self.parent, "decode", False):
            raise ValueError(
                f"decode=True is refused at {path!r}: a column-ending layer over one query is "
                f"uniform, and column sums need all queries at once"
            )
        if not self.is_initializing():
            recording = self.is_mutable_collection(CAPTURE)
            if recording:
                if self.has_variable(CAPTURE, "record"):
                    raise ValueError(
                        records.SHARED_INSTANCE.format(path=path, old=f"collection {CAPTURE!r}")
                    )
                self.put_variable(CAPTURE, "record", Record.of(*call.arrays, self.spec))
                # Under mutable=True nobody asked to record: a training step keeps its dropout.
                off = call.deterministic or self.scope.mutable is not True
                call = call.replace(deterministic=off)
            records.note("recorded" if recording else "unrecorded", path)
        options = dict(spec=self.spec, implementation=self.implementation)
        if not self.has_variable(STATE, "state"):
            return functions.sinkhorn_attention.core(call, **options)
        state = self.get_variable(STATE, "state")
        state.check(self.spec, path, SCAN_CURE)
        records.note("compiled", path)
        return functions.asap_attention.core(
            call, predictor=state.predictor, closures=state.closures, **options
        )


class Calibration(compiling.Calibration):
    """Calibration of a linen model, also while it still trains.

    ``add(variables, batch)`` as often as wanted, then ``finish(variables, report_batches)``;
    ``compile`` does both. Layers accumulated while the teacher trains are fitted to the sequence
    of its states.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options | None = None,
        *,
        apply_kwargs: Mapping[str, Any] | None = None,
        forward: Callable[[Any, Any], Any] | None = None,
    ):
        """Arguments as ``compile``."""
        super().__init__(options, apply_kwargs, forward)
        if not isinstance(model, nn.Module):
            cure = "; call asap_jax.nnx.compile" if isinstance(model, nnx.Module) else ""
            raise TypeError(f"model must be a linen Module, got {checks.told(model)}{cure}")
        self._run = forward or _apply(model, self.apply_kwargs)
        self._recorded = jax.jit(lambda variables, batch: _record(self._run, variables, batch))

    def records(self, teacher: Mapping, batch: Any) -> Mapping[str, Record]:
        """The records of every layer at the variables ``teacher``."""
        with records.observe() as observer, _axis_errors(CAPTURE):
            try:
                found = self._recorded(_plain(teacher), batch)
            except jax.errors.UnexpectedTracerError as error:
                raise ValueError(
                    f"forward is jitted inside: it must then pass mutable=[{CAPTURE!r}] and "
                    f"return (output, state)"
                ) from error
        if observer.unrecorded:
            raise ValueError(
                f"layers {list(observer.unrecorded)} ran but could not record: a "
                f"transform around them drops the collection {CAPTURE!r}. " + SCAN_CURE
            )
        return found

    def attach(self, teacher: Mapping, states: Mapping[str, CompiledState], batch: Any) -> dict:
        """``variables`` with the ``"asap"`` collection; fails if any layer did not switch."""
        probe = records.fresh_probe()
        probed = {path: state.replace(probe=probe) for path, state in states.items()}
        ran = self.records(teacher, batch)
        with records.observe() as observer, _axis_errors(STATE):
            jax.eval_shape(
                lambda v, b: _quiet(self._run, v, b),
                {**_plain(teacher), STATE: state_tree(probed)},
                batch,
            )
        missing = [path for path in states if path in ran and path not in observer.compiled]
        if missing:
            raise ValueError(
                f"layers {missing} did not switch to the compiled operator: a transform "
                f"around them drops the collection {STATE!r}. " + SCAN_CURE
            )
        return {"variables": {**_plain(teacher), STATE: state_tree(states)}}


@contextlib.contextmanager
def _axis_errors(collection: str):
    """JAX's complaint that a 0-d mark cannot be put on another axis, with the cure."""
    try:
        yield
    except (AssertionError, IndexError, ValueError) as error:  # Flax asserts, JAX raises
        ours = collection in str(error)
        if ours or not (isinstance(error, AssertionError) or "axis" in str(error)):
            raise
        raise ValueError(
            f"the collection {collection!r} could not be scanned: it must go along axis 0 "
            f"({error}). {SCAN_CURE}"
        ) from error


def compile(
    model: nn.Module,
    variables: Mapping,
    batches: Iterable[Any],
    *,
    apply_kwargs: Mapping[str, Any] | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
    holdout: float = 0.2,
    seed: int = 0,
    layers: Sequence[str] | None = None,
    recipe: str = "paper",
    objective: str = "ls",
    num_slices: int = 32,
    closures: str | int | None = None,
    ridge: float = 1e-3,
    ridge_scale: str = "absolute",
    rows: str = "active",
    padding: str | None = None,
    weighting: str = "none",
    damping: float = 0.1,
    coefficients: str = "pooled",
    in_memory: bool = True,
    features: str | tuple[Any, ...] = "sliced_potentials",
    slice_kind: str = "gaussian",
    baseline: str = "none",
    token_bias: bool = False,
    candidates: Sequence[Candidate] | None = None,
    time_limit: float | None = 1.0,
    ladder: Sequence[int] | None = None,
) -> compiling.CompileResult:
    """Compiles the SinkhornAttention layers of a trained linen model (paper, algorithm 1).

    Args:
      model: any linen module that uses ``SinkhornAttention`` as ``attention_fn``.
      variables: its trained variables; left unchanged.
      batches: an iterable of unlabeled calibration batches, read once. An array is passed as it
        is, a tuple as ``*batch``, a dict as ``**batch``.
      apply_kwargs: further keywords of ``model.apply``, such as ``{"train": False}``. Dropout is
        always off while calibrating.
      forward: ``forward(variables, batch)`` instead, any function that calls ``model.apply``
        once; jitted inside it, it must itself pass ``mutable=["asap_capture"]`` and return
        ``(output, state)``.
      holdout, seed, layers, recipe, objective, num_slices, closures, ridge,
        ridge_scale, rows, padding, weighting, damping, coefficients, in_memory, features,
        slice_kind, baseline, token_bias, candidates, time_limit, ladder: see ``asap_jax.Options``.

    Returns:
      CompileResult with ``.variables`` (the compiled model's) and ``.report``.

    Raises:
      ValueError, TypeError: with the reason: no such layer, num_steps = 1, no data, data that
        are not finite, a layer inside a transform that drops the collections, settings out of
        range.
    """
    options = Options(
        holdout=holdout,
        seed=seed,
        layers=layers,
        recipe=recipe,
        objective=objective,
        num_slices=num_slices,
        closures=closures,
        ridge=ridge,
        ridge_scale=ridge_scale,
        rows=rows,
        padding=padding,
        weighting=weighting,
        damping=damping,
        coefficients=coefficients,
        in_memory=in_memory,
        features=features,
        slice_kind=slice_kind,
        baseline=baseline,
        token_bias=token_bias,
        candidates=candidates,
        time_limit=time_limit,
        ladder=ladder,
    )
    calibration = Calibration(model, options, apply_kwargs=apply_kwargs, forward=forward)
    return calibration.run(variables, batches)


def _plain(variables: Mapping) -> dict:
    """The teacher's own collections."""
    checks.instance("variables", variables, Mapping, "the variables of a linen model")
    return {name: tree for name, tree in variables.items() if name not in (STATE, CAPTURE)}


def _apply(model, apply_kwargs):
    """The default forward: ``model.apply`` on a batch, with a dropout rng in case it is asked."""
    rngs = {"dropout": jax.random.key(0), **(apply_kwargs.pop("rngs", None) or {})}

    def run(variables, batch):
        args, kwargs = split_batch(batch)
        return model.apply(variables, *args, rngs=rngs, **{**kwargs, **apply_kwargs})

    return run


def split_batch(batch) -> tuple[tuple, dict]:
    """A batch as call arguments: a tuple as ``*batch``, a dict as ``**batch``, else one array."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


def _record(run, variables, batch) -> dict[str, Record]:
    """Runs one forward pass and returns the records of its layers, by path."""
    stash: list[Mapping] = []
    original = nn.Module.apply

    def apply(self, variables, *args, mutable=False, **kwargs):
        wanted = union_filters(mutable, CAPTURE)
        out, state = original(self, variables, *args, mutable=wanted, **kwargs)
        stash.append(state.get(CAPTURE, {}))
        return out if mutable is False else (out, state)

    with mock.patch.object(nn.Module, "apply", apply):
        result = _quiet(run, variables, batch)
    # What forward returns itself is good under any jit inside it.
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        stash = [result[1][CAPTURE]] if CAPTURE in result[1] else stash
    if len(stash) != 1:
        raise ValueError(
            f"forward must call model.apply exactly once, it did {len(stash)} times; a forward "
            f"that is jitted inside must pass mutable=[{CAPTURE!r}] and return (output, state)"
        )
    return compiling.group_by_path(stash[0], Record)


def _quiet(run, variables, batch):
    """``run`` with every ``nn.Dropout`` switched off."""

    def no_dropout(next_function, args, kwargs, context):
        if isinstance(context.module, nn.Dropout) and context.method_name == "__call__":
            return args[0]
        return next_function(*args, **kwargs)

    with nn.intercept_methods(no_dropout):
        return run(variables, batch)


def state_tree(states: Mapping[str, CompiledState]) -> dict:
    """The ``"asap"`` collection: nested dicts from layer path to ``{"state": CompiledState}``."""
    tree: dict = {}
    for path, state in states.items():
        node = tree
        for part in filter(None, path.split("/")):
            node = node.setdefault(part, {})
        node["state"] = state
    return tree
