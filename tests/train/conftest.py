"""The demo recipe shrunk to a size at which every test is quick."""

import dataclasses

import pytest

import asap_jax as aj
from train.data import tfds
from train.models.vit import ViTSizes
from train.recipes import catalogue
from train.training import loop, splits


@pytest.fixture(scope="session")
def tiny():
    """The demo recipe with fewer, smaller everything; still 2 layers and a real Sinkhorn loop."""
    return dataclasses.replace(
        catalogue.DEMO,
        model=ViTSizes(patch_size=7, width=16, depth=2, num_heads=2, head_dim=8, mlp_dim=16),
        spec=aj.SinkhornSpec(num_steps=6),
        epochs=2,
        batch_size=20,
        learning_rate=1e-3,
        drops=(1,),
    )


@pytest.fixture(scope="session")
def shallow(tiny):
    """``tiny`` with one layer, for tests that compile it many times."""
    return dataclasses.replace(tiny, model=dataclasses.replace(tiny.model, depth=1))


@pytest.fixture(scope="session")
def minute(shallow):
    """``shallow`` with two Sinkhorn steps: just something to train."""
    return dataclasses.replace(shallow, spec=aj.SinkhornSpec(num_steps=2))


@pytest.fixture(scope="session")
def split():
    """All packaged images."""
    return splits.load_data(catalogue.DEMO, tfds.PACKAGED)


@pytest.fixture(scope="session")
def examples(split):
    """200 packaged training images."""
    return split.train.take(slice(200))


@pytest.fixture(scope="session")
def test_examples(split):
    """60 packaged test images."""
    return split.test.take(slice(60))


@pytest.fixture(scope="session")
def trained(tiny, examples, tmp_path_factory):
    """A teacher of the recipe ``tiny``, trained once for all tests that only read it."""
    return loop.train(tiny, examples, tmp_path_factory.mktemp("run"))
