"""Platforms that the machine of the tests does not have."""

import pytest
from jax._src.cudnn import fused_attention_stablehlo

from asap_jax.solvers import plan
from asap_jax.solvers.flash import platform


@pytest.fixture
def pretend(monkeypatch):
    """A function after which the default device seems to be of a platform, for lowering."""

    def on(name, capability=None):
        plan._mix.clear_cache()
        monkeypatch.setattr(platform, "name", lambda: name)
        monkeypatch.setattr(platform, "cuda_capability", lambda: capability)
        monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)

    yield on
    plan._mix.clear_cache()
