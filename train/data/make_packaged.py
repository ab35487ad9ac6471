"""Makes the small Fashion-MNIST folder that is packaged with the repository.

``python -m train.data.make_packaged --data-dir FULL_COPY`` takes the first 200 training and the
first 50 test images of each class from a full copy in TFDS's array_record form, in the order of
that copy. It writes a folder of the same form, and copies each record byte for byte.
"""

import argparse
import json
import pathlib
import shutil
from typing import Any

import numpy as np

from train.data import tfds
from train.runtime.errors import need

NAME = "fashion_mnist"
PER_CLASS = {"train": 200, "test": 50}


def balanced(labels: np.ndarray, per_class: int) -> np.ndarray:
    """Positions of the first ``per_class`` examples of every class, in ascending order.

    Args:
      labels: ``(examples,)`` integers.
      per_class: how many of each label to keep.

    Returns:
      ``(classes * per_class,)`` indices.

    Raises:
      ValueError: a class has fewer than ``per_class`` examples.
    """
    chosen = []
    for label in np.unique(labels):
        places = np.flatnonzero(labels == label)[:per_class]
        if len(places) < per_class:
            raise ValueError(f"class {label} has {len(places)} examples, {per_class} are needed")
        chosen.append(places)
    return np.sort(np.concatenate(chosen))


def copy_split(source: Any, target: pathlib.Path, per_class: int) -> int:
    """Writes the balanced part of one split as a single shard.

    Args:
      source: the split of the full copy, from ``as_data_source`` of its TFDS builder.
      target: the shard to write.
      per_class: examples of each class.

    Returns:
      The size of the chosen records in bytes.
    """
    labels = np.array([example["label"] for example in source])
    records = source.data_source.__getitems__(balanced(labels, per_class).tolist())
    module = need("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(target), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return sum(len(record) for record in records)


def make(full_copy: str, out: pathlib.Path) -> pathlib.Path:
    """Writes the packaged folder from a full copy; the result does not depend on the machine.

    Args:
      full_copy: data directory that holds ``fashion_mnist``.
      out: data directory to write to; an older packaged copy in it is replaced.

    Returns:
      The folder of the data set's version.

    Raises:
      UserError: there is no full copy in ``full_copy``.
    """
    builder = tfds.builder(NAME, full_copy)
    origin = pathlib.Path(builder.data_path)
    target = out / NAME / str(builder.version)
    shutil.rmtree(out / NAME, ignore_errors=True)
    target.mkdir(parents=True)
    info = json.loads((origin / "dataset_info.json").read_text())
    for split in info["splits"]:
        name = split["name"]
        shard = target / f"{NAME}-{name}.array_record-00000-of-00001"
        size = copy_split(builder.as_data_source(name), shard, PER_CLASS[name])
        split["numBytes"] = str(size)
        split["shardLengths"] = [str(10 * PER_CLASS[name])]
    (target / "dataset_info.json").write_text(json.dumps(info, indent=2) + "\n")
    for name in ("features.json", "label.labels.txt"):
        (target / name).write_text((origin / name).read_text().rstrip("\n") + "\n")
    return target


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m train.data.make_packaged", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--data-dir", required=True, help="TFDS folder with a full copy of fashion_mnist"
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=tfds.PACKAGED,
        help="folder to write to (default: %(default)s)",
    )
    arguments = parser.parse_args()
    target = make(arguments.data_dir, arguments.out)
    size = sum(file.stat().st_size for file in target.iterdir())
    print(f"{target}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
