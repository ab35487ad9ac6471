"""Compiling a linen model: its records, and the states written back."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from flax.core.scope import Scope, union_filters
from flax.errors import (
    ApplyScopeInvalidVariablesStructureError,
    ApplyScopeInvalidVariablesTypeError,
    ScopeCollectionNotFound,
    ScopeParamNotFoundError,
)
from flax.linen.module import TestScope

from asap_jax import checks, records
from asap_jax.compiler import calibration as compiling
from asap_jax.compiler import diagnosis, programs
from asap_jax.compiler.diagnosis import Diagnosis
from asap_jax.compiler.fit import Fit
from asap_jax.compiler.options import Options, explain_fit_settings
from asap_jax.linen.attention import CAPTURE, SCAN_HINT, STATE
from asap_jax.records import CompiledState, Passed, Record

_NO_PARAMS = (
    ApplyScopeInvalidVariablesStructureError,
    ApplyScopeInvalidVariablesTypeError,
    ScopeCollectionNotFound,
    ScopeParamNotFoundError,
)


class Calibration(compiling.Calibration):
    """Calibration of a linen model, also while it still trains.

    Call ``add(variables, batch)`` for each batch, then ``finish(variables, report_batches)``.
    ``compile`` does both with frozen variables.
    """

    hint = SCAN_HINT

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
            hint = "; call asap_jax.nnx.compile" if isinstance(model, nnx.Module) else ""
            raise TypeError(f"model must be a linen Module, got {checks.describe(model)}{hint}")
        self._run = forward or _Apply(model, tuple(sorted(self.apply_kwargs.items())))
        # A forward may read other values in every compile, so it shares no program.
        self._recorded = programs.bind(_record, self._run, share=forward is None)

    def teacher(self, model: Mapping) -> dict:
        """The variables without compiled states."""
        return _plain(model)

    def passed(self, model: Mapping, batch: Any) -> Passed:
        """One forward pass at the variables ``model``, whose compiled layers run compiled."""
        variables = {name: tree for name, tree in model.items() if name != CAPTURE}
        with _axis_errors(CAPTURE):
            try:
                return self._recorded(variables, batch)
            except _NO_PARAMS as error:
                if "params" in variables:
                    raise
                raise ValueError(
                    f"variables has no collection 'params', only {sorted(variables)}: give what "
                    "model.init returned, or {'params': params}"
                ) from error
            except jax.errors.UnexpectedTracerError as error:
                raise ValueError(
                    f"forward runs the whole model inside a transform (jax.jit, nn.remat): "
                    f"it must then pass mutable=[{CAPTURE!r}] and return (output, state)"
                ) from error

    def _trace(self, teacher: Mapping, states: Mapping[str, CompiledState], batch: Any) -> None:
        variables = self.compiled(teacher, states)["variables"]
        with _axis_errors(STATE):
            jax.eval_shape(lambda v, b: _quiet(self._run, v, b), variables, batch)

    def compiled(self, teacher: Mapping, states: Mapping[str, CompiledState]) -> dict[str, Any]:
        """The teacher's variables with these states, as ``variables``."""
        return {"variables": {**_plain(teacher), STATE: state_tree(states)}}


@contextlib.contextmanager
def _axis_errors(collection: str):
    """Adds a hint to the error of JAX or Flax when a scan's axis for a 0-d mark is not 0."""
    try:
        yield
    except (AssertionError, IndexError, ValueError) as error:  # Flax asserts, JAX raises
        ours = collection in str(error)
        if ours or not (isinstance(error, AssertionError) or "axis" in str(error)):
            raise
        raise ValueError(
            f"the collection {collection!r} could not be scanned: its axis must be 0 ({error}). "
            f"{SCAN_HINT}"
        ) from error


@explain_fit_settings
def compile(
    model: nn.Module,
    variables: Mapping[str, Any],
    batches: Iterable[Any],
    *,
    fit: str | Fit = "moments",
    closures: str | int | None = None,
    ending: str = "teacher",
    layers: Sequence[str] | None = None,
    holdout: float = 0.2,
    seed: int = 0,
    apply_kwargs: Mapping[str, Any] | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
) -> compiling.CompileResult:
    """Compiles the SinkhornAttention layers of a trained linen model (paper, algorithm 1).

    Args:
      model: any linen module that uses ``SinkhornAttention`` as ``attention_fn``.
      variables: its trained variables; left unchanged.
      batches: an iterable of unlabeled calibration batches. An array is passed as one argument, a
        tuple as ``*batch``, a dict as ``**batch``.
      fit, closures, ending, layers, holdout, seed: see ``asap_jax.Options``.
      apply_kwargs: further keywords of ``model.apply``, such as ``{"train": False}``. Dropout is
        always off during calibration.
      forward: ``forward(variables, batch)``, called instead of ``model.apply``; it must call
        ``model.apply`` exactly once. If it does so under ``jax.jit``, it must pass
        ``mutable=["asap_capture"]`` and return ``(output, state)``.

    Returns:
      CompileResult with ``.variables`` (of the compiled model) and ``.report``.

    Raises:
      ValueError, TypeError: no such layer, num_steps = 1, no data, data that are not finite, a
        transform that drops the collections, settings out of range; the message has the reason.
    """
    options = Options(fit, closures, ending, layers, holdout, seed)
    calibration = Calibration(model, options, apply_kwargs=apply_kwargs, forward=forward)
    return calibration.run(variables, batches)


def _plain(variables: Mapping) -> dict:
    """The teacher's own collections."""
    checks.instance("variables", variables, Mapping, "the variables of a linen model")
    return {name: tree for name, tree in variables.items() if name not in (STATE, CAPTURE)}


@dataclasses.dataclass(frozen=True)
class _Apply:
    """The default forward: ``model.apply`` on a batch, with the capture collection mutable.

    Equal for equal models and keywords, so that compiling a model again compiles no program again.
    """

    model: nn.Module
    keywords: tuple[tuple[str, Any], ...]

    def __call__(self, variables: Mapping, batch: Any) -> Any:
        args, kwargs = records.split_batch(batch)
        keywords = dict(self.keywords)
        rngs = {"dropout": jax.random.key(0), **(keywords.pop("rngs", None) or {})}
        mutable = union_filters(keywords.pop("mutable", False), CAPTURE)
        settings = {**kwargs, **keywords}
        return self.model.apply(variables, *args, rngs=rngs, mutable=mutable, **settings)


def _record(run: Callable[[Any, Any], Any], variables: dict, batch: Any) -> Passed:
    """Runs one forward pass."""
    passes: dict[int, tuple[Any, Mapping]] = {}
    # A trace that fails is not kept, so the next call checks again.
    with records.observe() as observer, nn.intercept_methods(_capture_into(passes)):
        result = _quiet(run, variables, batch)
    if observer.unrecorded:
        raise ValueError(
            f"layers {list(observer.unrecorded)} ran but could not record: a transform around "
            f"them drops the collection {CAPTURE!r}. {SCAN_HINT}"
        )
    collections = [collection for _, collection in passes.values()]
    # If forward is jitted, the intercepted records are leaked tracers: use its own result.
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        collections = [result[1][CAPTURE]] if CAPTURE in result[1] else collections
        result = result[0] if CAPTURE in result[1] else result
    if len(collections) != 1:
        raise ValueError(
            f"forward must call model.apply exactly once, it did {len(collections)} times; under "
            f"jax.jit it must pass mutable=[{CAPTURE!r}] and return (output, state)"
        )
    by_path = records.group_by_path(collections[0], Record)
    return Passed(by_path, records.array_leaves(result))


def diagnose(
    model: nn.Module,
    variables: Mapping[str, Any],
    batch: Any,
    *,
    teacher: bool = False,
    apply_kwargs: Mapping[str, Any] | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
) -> Diagnosis:
    """Whether the compiled layers of a linen model still fit the data that they run on.

    Runs the compiled model on a batch, with dropout off, and compares what its layers receive with
    their calibration statistics. Pure; works under ``jax.jit``.

    Args:
      model: the linen module.
      variables: those that ``compile`` or ``load`` returned.
      batch: an unlabeled batch, as for ``compile``.
      teacher: also measure the distance of every layer from its teacher on this batch.
      apply_kwargs, forward: see ``compile``.

    Returns:
      Diagnosis, one LayerDiagnosis for each compiled layer that ran; prints as a table. It also
      names states that no layer used, and layers without a state.

    Raises:
      ValueError: no layer of the model is compiled, or none of them ran.
      TypeError: a batch with a leaf that is not an array.
    """
    calibration = Calibration(model, apply_kwargs=apply_kwargs, forward=forward)
    checks.instance("variables", variables, Mapping, "the variables of a linen model")
    states = records.group_by_path(dict(variables.get(STATE, {})), CompiledState)
    recorded = calibration.passed(variables, diagnosis.checked_batch(batch)).records
    return diagnosis.diagnose(recorded, states, teacher=teacher)


def _capture_into(passes: dict[int, tuple[Any, Mapping]]) -> Callable[..., Any]:
    """An interceptor that makes the layers record in the forward passes of this thread.

    It makes the collection mutable while an outermost method runs: ``setup``, then ``__call__``, or
    several under ``method=``. Each ``apply`` has its own variables, so their id tells which
    outermost methods belong to one pass. ``passes`` holds the variables, so no id is used twice.
    """
    running = False

    def capture(next_function, args, kwargs, context):
        nonlocal running
        scope = context.module.scope
        if scope is None or isinstance(scope.root, TestScope):  # Flax's trial of setup
            return next_function(*args, **kwargs)
        if running:
            with _mutable([scope] if _bound_before(scope) else []):
                return next_function(*args, **kwargs)
        scopes = [scope]
        while scopes[-1].parent is not None:
            scopes.append(scopes[-1].parent)
        running = True
        try:
            with _mutable(scopes):
                return next_function(*args, **kwargs)
        finally:
            running = False
            root = scopes[-1]
            passes[id(root._variables)] = (root._variables, root.variables().get(CAPTURE, {}))

    return capture


def _bound_before(scope: Scope) -> bool:
    """Whether a scope was made before the collection became mutable in its parent.

    So are the scopes of modules that an outermost module has as attributes. Scopes in a transform
    that drops the collection have no mutable parent.
    """
    parent = scope.parent
    return (
        parent is not None
        and parent.is_mutable_collection(CAPTURE)
        and not scope.is_mutable_collection(CAPTURE)
    )


@contextlib.contextmanager
def _mutable(scopes: Sequence[Scope]):
    """Makes the capture collection mutable in these scopes."""
    before = [scope.mutable for scope in scopes]
    for scope in scopes:
        scope.mutable = union_filters(scope.mutable, CAPTURE)
    try:
        yield
    finally:
        for scope, mutable in zip(scopes, before, strict=True):
            scope.mutable = mutable


def _quiet(run, variables, batch):
    """``run`` with every ``nn.Dropout`` off."""

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
