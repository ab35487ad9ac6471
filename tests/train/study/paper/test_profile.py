"""Memory and time of programs; what does not fit is marked."""

import jax
import jax.numpy as jnp
import pytest

from train.study.paper import profile as profiling
from train.study.paper.profile import Program

DOUBLE = Program(lambda x: 2 * x, (jnp.ones(1024),))


def test_a_program_is_timed_and_its_memory_is_that_of_arguments_and_results():
    one = profiling.profile({"double": DOUBLE})["double"]
    assert one.calls == profiling.ROUNDS
    assert one.milliseconds > 0
    assert one.gib * 2**30 == pytest.approx(2 * 4096, rel=0.1)
    assert "±" in one.time()


def test_a_step_passes_its_state_on_and_leaves_the_caller_its_own():
    state = jnp.zeros(())
    step = Program(lambda state, x: (state + x, x), (state, jnp.ones(())), carries=True)
    assert profiling.profile({"step": step})["step"].calls == profiling.ROUNDS
    assert float(state) == 0


def test_what_does_not_fit_is_a_mark():
    one = profiling.profile({"double": DOUBLE}, limit_gib=1e-9)["double"]
    assert one.time() == "OOM (over 1e-09 GiB)"
    assert one.milliseconds is None

    def fail(x):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying")

    found = profiling.profile({"large": Program(fail, (1.0,)), "double": DOUBLE})
    assert (found["large"].time(), found["large"].memory()) == ("OOM", "OOM")
    assert found["double"].milliseconds > 0


def test_a_slow_program_is_called_once():
    one = profiling.profile({"double": DOUBLE}, at_most=0.0)["double"]
    assert (one.calls, one.std) == (1, 0.0)
    assert one.milliseconds > 0
    assert "±" not in one.time()


def test_other_errors_are_not_hidden():
    def fail(x):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        profiling.profile({"faulty": Program(fail, (1.0,))})
