"""Reading data sets, batches that depend on seed and step alone, and messages on faults."""

import dataclasses
import json
import pathlib
import sys

import numpy as np
import pytest

from train.data import make_packaged, tfds
from train.data.examples import Batches, first_share
from train.data.images import Pixels
from train.recipes import catalogue
from train.runtime import errors
from train.training import splits


def load(split, folder=tfds.PACKAGED):
    """One split of Fashion-MNIST in memory."""
    recipe = dataclasses.replace(catalogue.DEMO, splits=(split, split))
    return splits.load_data(recipe, folder).train


@pytest.mark.parametrize(("split", "per_class"), [("train", 200), ("test", 50)])
def test_packaged_images_read_back_balanced(split, per_class):
    examples = load(split)
    assert examples.values.shape == (10 * per_class, 28, 28, 1)
    assert examples.values.dtype == np.uint8
    np.testing.assert_array_equal(np.bincount(examples.labels), np.full(10, per_class))
    assert examples.class_names[9] == "Ankle boot"
    assert 0.28 < examples.values.mean() / 255 < 0.30


def test_a_share_of_the_training_split_has_the_first_images_of_every_class():
    recipe = dataclasses.replace(catalogue.DEMO, train_share=0.1)
    data = splits.load_data(recipe, tfds.PACKAGED)
    whole = load("train")
    expected = [np.flatnonzero(whole.labels == label)[:20] for label in range(10)]
    chosen = np.sort(np.concatenate(expected))
    np.testing.assert_array_equal(data.train.labels, whole.labels[chosen])
    np.testing.assert_array_equal(data.train.values, whole.values[chosen])
    assert len(data.test) == 500


def test_a_share_has_at_least_one_example_of_every_class():
    labels = np.array([2, 0, 0, 2, 0, 1, 0])
    np.testing.assert_array_equal(first_share(labels, 0.5), [0, 1, 2, 5])
    np.testing.assert_array_equal(first_share(labels, 0.01), [0, 1, 5])


def test_packaged_images_do_not_repeat():
    train = load("train").values
    test = load("test").values
    everything = {image.tobytes() for image in np.concatenate([train, test])}
    assert len(everything) == 2500


def test_packaged_data_have_their_licence():
    notice = (tfds.PACKAGED / "LICENSE-fashion_mnist.txt").read_text()
    assert "Copyright © 2017 Zalando SE, https://tech.zalando.com" in notice
    assert "Permission is hereby granted" in notice


def test_packaged_data_are_small():
    files = [file for file in tfds.PACKAGED.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 2.5e6


def test_the_script_remakes_a_readable_balanced_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(make_packaged, "PER_CLASS", {"train": 3, "test": 2})
    target = make_packaged.make(tfds.PACKAGED, tmp_path)
    again = make_packaged.make(tfds.PACKAGED, tmp_path / "again")
    for file in target.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes()
    info = json.loads((target / "dataset_info.json").read_text())
    assert [split["shardLengths"] for split in info["splits"]] == [["30"], ["20"]]
    small = load("train", tmp_path)
    np.testing.assert_array_equal(np.bincount(small.labels), np.full(10, 3))
    whole = load("train")
    first = {image.tobytes() for image in whole.values[whole.labels == 4][:3]}
    assert {image.tobytes() for image in small.values[small.labels == 4]} == first


def test_the_script_refuses_a_class_with_too_few_examples():
    with pytest.raises(ValueError, match="class 1 has 1 examples, 2 are needed"):
        make_packaged.balanced(np.array([0, 0, 1]), 2)


def test_nothing_imports_tensorflow():
    load("test[:1]")
    assert "tensorflow" not in sys.modules


@pytest.mark.parametrize("name", ["mnist", "no_such_set"])
def test_a_missing_data_set_is_a_one_line_error_that_says_what_to_do(name, tmp_path):
    with pytest.raises(errors.UserError) as fault:
        tfds.read(name, "train", tmp_path)
    message = str(fault.value)
    assert "\n" not in message
    assert repr(name) in message
    assert str(tmp_path) in message
    assert "--data-dir DIR" in message
    assert "reading it needs no TensorFlow" in message


def test_a_missing_split_is_named():
    with pytest.raises(errors.UserError, match="no split 'validation', only train, test"):
        load("validation")


def test_a_missing_extra_is_an_error_that_says_what_to_install():
    with pytest.raises(
        errors.UserError, match=r"no_such_module .* pip install 'asap_jax\[train\]'"
    ):
        errors.need("no_such_module.inside")


def test_the_data_folder_is_the_argument_else_the_environment_else_the_packaged_one(monkeypatch):
    monkeypatch.delenv(tfds.VARIABLE, raising=False)
    assert tfds.resolve(None) == tfds.PACKAGED
    monkeypatch.setenv(tfds.VARIABLE, "elsewhere")
    assert tfds.resolve(None) == pathlib.Path("elsewhere")
    assert tfds.resolve("given") == pathlib.Path("given")
    assert tfds.resolve(None, packaged=True) == tfds.PACKAGED


def test_batches_depend_only_on_seed_and_step(examples, tiny):
    one = Batches(examples, tiny.inputs, 20, seed=3)
    two = Batches(examples, tiny.inputs, 20, seed=3)
    for step in (0, 1, 10, 25):
        one.at(step)
    for a, b in zip(one.at(13), two.at(13), strict=True):
        np.testing.assert_array_equal(a, b)
    other = Batches(examples, tiny.inputs, 20, seed=4)
    assert not np.array_equal(one.at(13)[1], other.at(13)[1])


def test_an_epoch_shows_every_image_once_and_the_next_another_order(examples):
    plain = Pixels((28, 28, 1), mean=(0.0,), std=(1.0,))
    batches = Batches(examples, plain, 20, seed=0)
    assert batches.steps_per_epoch == 10
    epochs = [
        [image.tobytes() for step in range(start, start + 10) for image in batches.at(step)[0]]
        for start in (0, 10)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert len(set(epochs[0])) == 200
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("size", [0, 201])
def test_a_batch_size_out_of_range_is_refused(size, examples, tiny):
    with pytest.raises(errors.UserError, match=f"batch_size {size} must be in 1..200"):
        Batches(examples, tiny.inputs, size, seed=0)


def test_normalised_images_have_mean_zero_and_spread_one(examples, tiny):
    images = tiny.inputs.normalise(examples.values)
    assert images.dtype == np.float32
    assert abs(images.mean()) < 0.1
    assert abs(images.std() - 1) < 0.1


def test_augmentation_moves_by_whole_pixels_and_mirrors(examples):
    image = examples.values[:1]
    pixels = Pixels((28, 28, 1), (0.0,), (1.0,), shift=1, flip=True)
    many = pixels.augment(np.repeat(image, 400, axis=0), np.random.default_rng(0))
    padded = np.pad(image[0], ((1, 1), (1, 1), (0, 0)), mode="edge")
    allowed = set()
    for top in range(3):
        for left in range(3):
            window = padded[top : top + 28, left : left + 28]
            allowed |= {window.tobytes()}
    mirrored = np.pad(image[0, :, ::-1], ((1, 1), (1, 1), (0, 0)), mode="edge")
    for top in range(3):
        for left in range(3):
            allowed |= {mirrored[top : top + 28, left : left + 28].tobytes()}
    assert {one.tobytes() for one in many} == allowed


def test_examples_can_be_taken(examples):
    taken = examples.take(slice(5))
    assert len(taken) == 5
    assert dataclasses.replace(taken).class_names == examples.class_names
