"""Data sets in TFDS form (array_record files), read without TensorFlow."""

import contextlib
import json
import os
import pathlib
from typing import Any

from train.runtime.errors import UserError, need

PACKAGED = pathlib.Path(__file__).parent / "packaged"
VARIABLE = "TFDS_DATA_DIR"
DESCRIPTIONS = ("dataset_info.json", "features.json")


def resolve(data_dir: str | os.PathLike | None, *, packaged: bool = False) -> pathlib.Path:
    """The TFDS folder to read.

    It is ``data_dir``, else the environment variable ``TFDS_DATA_DIR``, else the packaged folder.

    Args:
      data_dir: the value of ``--data-dir``, or None.
      packaged: ignore the environment variable; for recipes made for the packaged images.
    """
    if data_dir is not None:
        return pathlib.Path(data_dir).expanduser()
    if not packaged and os.environ.get(VARIABLE):
        return pathlib.Path(os.environ[VARIABLE]).expanduser()
    return PACKAGED


def builder(name: str, data_dir: str | os.PathLike, split: str | None = None) -> Any:
    """The TFDS builder of a prepared data set.

    Args:
      name: name of the data set in the TFDS catalogue, or of its folder in ``data_dir``.
      data_dir: TFDS folder.
      split: the split to read, for messages.

    Raises:
      UserError: TFDS is not installed, ``data_dir`` does not have the data set in array_record
        form, or a file that describes the data set is damaged. The message says what to do.
    """
    tfds = need("tensorflow_datasets")
    need("array_record.python.array_record_module")
    need("PIL.Image")
    try:
        with _quiet():
            result = tfds.builder(name, data_dir=os.fspath(data_dir), file_format="array_record")
            ready = result.is_prepared()
    except tfds.core.registered.DatasetNotFoundError:
        ready = False
    except Exception as fault:  # reading a damaged description may raise anything
        broken = _broken_description(pathlib.Path(data_dir) / name)
        raise _damaged(name, split, broken, _json_fault(broken) or fault) from fault
    if not ready:
        raise UserError(
            f"no data set {name!r} in array_record form in {data_dir}: name a TFDS folder that has "
            f"it, with --data-dir DIR or {VARIABLE}=DIR (reading it needs no TensorFlow; preparing "
            f"a new copy does, see https://www.tensorflow.org/datasets)"
        )
    for file in (pathlib.Path(result.data_path) / file for file in DESCRIPTIONS):
        if file.exists() and (fault := _json_fault(file)) is not None:
            raise _damaged(name, split, file, fault) from fault
    return result


def read(name: str, split: str, data_dir: str | os.PathLike) -> tuple[list[dict], tuple[str, ...]]:
    """All examples of one split, and the names of the classes.

    Args:
      name: name of the data set in the TFDS catalogue.
      split: a TFDS split, such as ``"train"`` or ``"test[:100]"``.
      data_dir: TFDS folder.

    Raises:
      UserError: the data set or the split does not exist, the split has no example, or a file is
        missing or damaged.
    """
    source = builder(name, data_dir, split)
    split_name = split.split("[")[0]
    if split_name not in source.info.splits:
        raise UserError(
            f"data set {name!r} in {data_dir} has no split {split_name!r}, "
            f"only {', '.join(source.info.splits)}: prepare the whole data set again"
        )
    examples: list[dict] = []
    with _quiet():
        shards = _shards(source, name, split)
        records = source.as_data_source(split)
        for shard in shards:
            try:
                start = len(examples)
                examples += [records[start + index] for index in range(shard.take)]
            except Exception as fault:  # array_record, TFDS and PIL raise different errors
                raise _damaged(name, split, shard.filename, fault) from fault
    return examples, tuple(source.info.features["label"].names)


def _shards(source: Any, name: str, split: str) -> list[Any]:
    """TFDS's instructions for the files of a split, whose numbers of records are checked.

    Raises:
      UserError: the split is malformed or has no example, or a file is missing or damaged, or has
        another number of records than the data set's description says.
    """
    module = need("array_record.python.array_record_module")
    try:
        shards = source.info.splits[split].file_instructions
    except Exception as fault:  # TFDS raises different errors
        raise UserError(
            f"split {split!r} of data set {name!r} cannot be read ({_reason(fault)}): name a split "
            f"of {', '.join(source.info.splits)}, or a part of one, such as 'train[:100]'"
        ) from fault
    if not shards or any(shard.take <= 0 for shard in shards):
        raise UserError(f"split {split!r} of data set {name!r} has no example: name another part")
    for shard in shards:
        try:
            reader = module.ArrayRecordReader(os.fspath(shard.filename))
            count = reader.num_records()
            reader.close()
        except Exception as fault:
            raise _damaged(name, split, shard.filename, fault) from fault
        if count != shard.examples_in_shard:
            wrong = f"it has {count} records, dataset_info.json says {shard.examples_in_shard}"
            raise _damaged(name, split, shard.filename, ValueError(wrong))
    return shards


def _damaged(name: str, split: str | None, file: str | os.PathLike, fault: Exception) -> UserError:
    part = "" if split is None else f"split {split!r} of "
    return UserError(
        f"{part}data set {name!r} cannot be read: {os.fspath(file)} is missing or damaged "
        f"({_reason(fault)}): put the file back, or prepare the data set again"
    )


def _broken_description(folder: pathlib.Path) -> pathlib.Path:
    """The description below ``folder`` that is no JSON, else one that TFDS may not understand."""
    files = [file for name in DESCRIPTIONS for file in sorted(folder.rglob(name))]
    broken = [file for file in files if _json_fault(file) is not None]
    return (broken or files or [folder])[0]


def _json_fault(file: pathlib.Path) -> Exception | None:
    """What is wrong with a file that must hold a JSON object, or None."""
    try:
        if not json.loads(file.read_text()):
            raise ValueError("it is empty")
    except (OSError, ValueError) as fault:
        return fault
    return None


def _reason(fault: Exception) -> str:
    """The end of a message in one line: TFDS puts its own context before it."""
    return " ".join(str(fault).split())[-150:] or type(fault).__name__


@contextlib.contextmanager
def _quiet():
    """Silences TFDS's messages about optional packages and the folders it tried."""
    logging = need("absl.logging")
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)
