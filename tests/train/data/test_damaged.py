"""Damaged data sets, and splits that do not exist: one line that names set, split and file."""

import json
import shutil

import pytest

from train.data import make_packaged, tfds
from train.runtime.errors import UserError

NAME, SIZE = "fashion_mnist", 20


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A data set of 20 test images."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_packaged, "PER_CLASS", {"train": 1, "test": SIZE // 10})
        make_packaged.make(tfds.PACKAGED, folder)
    return folder


@pytest.fixture
def copied(whole, tmp_path):
    """A copy of it: its TFDS folder, and the folder of its files."""
    shutil.copytree(whole, tmp_path / "data")
    return tmp_path / "data", next((tmp_path / "data" / NAME).iterdir())


def cut(share):
    return lambda content: content[: int(share * len(content))]


def over(start, replacement):
    """Other bytes from `start` on."""
    return lambda content: content[:start] + replacement + content[start + len(replacement) :]


def flipped(content):
    """Every tenth byte of the first records is another one."""
    return bytes(x ^ 0xFF if i % 10 == 0 and i < 9000 else x for i, x in enumerate(content))


SHARD = f"{NAME}-test.array_record-00000-of-00001"
DAMAGE = {
    **{f"a shard cut to {share}": (SHARD, cut(share)) for share in (0, 0.1, 0.5, 0.9, 0.999)},
    "64 zeroed bytes in the records": (SHARD, over(6528, bytes(64))),
    "64 zeroed bytes in the footer": (SHARD, over(65536, bytes(64))),
    "flipped bytes": (SHARD, flipped),
    "a missing shard": (SHARD, None),
    **{
        f"{file} {name}": (file, change)
        for file in ("dataset_info.json", "features.json")
        for name, change in {
            "empty": cut(0),
            "cut": cut(0.3),
            "of nothing": lambda content: b"{}",
            "of other bytes": lambda content: bytes(range(256)),
        }.items()
    },
}


@pytest.mark.parametrize(("file", "change"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_named_in_one_line(copied, file, change):
    folder, files = copied
    place = files / file
    if change is None:
        place.unlink()
    else:
        place.write_bytes(change(place.read_bytes()))
    with pytest.raises(UserError) as error:
        tfds.read(NAME, "test", folder)
    message = str(error.value)
    assert message.startswith(f"split 'test' of data set {NAME!r} cannot be read: {place} is ")
    assert "\n" not in message
    if file == SHARD:  # the other split has a file of its own
        assert len(tfds.read(NAME, "train", folder)[0]) == 10


@pytest.mark.parametrize("counts", [["10"], ["21"], ["99999999999"], ["20", "20"], ["x"]], ids=str)
def test_a_wrong_count_is_refused_and_does_not_hang(copied, counts):
    folder, files = copied
    place = files / "dataset_info.json"
    info = json.loads(place.read_text())
    for split in info["splits"]:
        split["shardLengths"] = counts if split["name"] == "test" else split["shardLengths"]
    place.write_text(json.dumps(info))
    message = f"split 'test' of data set {NAME!r} cannot be read: {files}"
    with pytest.raises(UserError, match=message):
        tfds.read(NAME, "test", folder)


SPLITS = {
    "test[5:5]": "has no example",
    "test[7:5]": "has no example",
    "test[oops]": "Unrecognized split format",
    "test[": "Unrecognized split format",
    "test[3]": "only support slice syntax",
    "test[:21]": "incompatible with 20 examples",
    "nothing[:2]": "only train, test",
}


@pytest.mark.parametrize(("split", "reason"), SPLITS.items(), ids=SPLITS)
def test_a_part_of_a_split_that_cannot_be_read_is_named(whole, split, reason):
    with pytest.raises(UserError, match=reason) as error:
        tfds.read(NAME, split, whole)
    assert NAME in str(error.value)
    assert split.split("[")[0] in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("split", "size"), [("test[:5]", 5), ("test[-3:]", 3), ("test[50%:]", 10)])
def test_a_part_of_a_split_has_its_own_examples(whole, split, size):
    examples, names = tfds.read(NAME, split, whole)
    assert len(examples) == size
    assert len(names) == 10
