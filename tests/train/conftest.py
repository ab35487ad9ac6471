"""The demo recipe shrunk to a size at which every test is quick."""

import dataclasses

import pytest

import asap_jax as aj
from train.data import images
from train.recipes import catalogue


@pytest.fixture(scope="session")
def tiny():
    """The demo recipe with fewer, smaller everything; still 2 layers and a real Sinkhorn loop."""
    return dataclasses.replace(
        catalogue.DEMO,
        model=catalogue.ViT(patch_size=7, width=16, depth=2, num_heads=2, head_dim=8, mlp_dim=16),
        spec=aj.SinkhornSpec(num_steps=6),
        epochs=2,
        batch_size=20,
        learning_rate=1e-3,
        drops=(1,),
    )


@pytest.fixture(scope="session")
def minute(tiny):
    """``tiny`` with one layer and two Sinkhorn steps: just something to train."""
    return dataclasses.replace(
        tiny, model=dataclasses.replace(tiny.model, depth=1), spec=aj.SinkhornSpec(num_steps=2)
    )


@pytest.fixture(scope="session")
def examples():
    """200 packaged training images."""
    return images.load("fashion_mnist", "train[:200]", images.PACKAGED)


@pytest.fixture(scope="session")
def test_examples():
    """60 packaged test images."""
    return images.load("fashion_mnist", "test[:60]", images.PACKAGED)
