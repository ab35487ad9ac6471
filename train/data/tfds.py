"""Data sets in TFDS form (array_record files), read without TensorFlow."""

import contextlib
import os
import pathlib
from typing import Any

from train.runtime.errors import UserError, need

PACKAGED = pathlib.Path(__file__).parent / "packaged"
VARIABLE = "TFDS_DATA_DIR"


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


def builder(name: str, data_dir: str | os.PathLike) -> Any:
    """The TFDS builder of a prepared data set.

    Args:
      name: name of the data set in the TFDS catalogue, or of its folder in ``data_dir``.
      data_dir: TFDS folder.

    Raises:
      UserError: TFDS is not installed, or ``data_dir`` does not have the data set in array_record
        form. The message says what to run.
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
    if not ready:
        raise UserError(
            f"no data set {name!r} in array_record form in {data_dir}: name a TFDS folder that has "
            f"it (--data-dir DIR or {VARIABLE}=DIR), or make it with `pip install tensorflow "
            f'importlib_resources && python -c "import tensorflow_datasets as t; '
            f"t.builder('{name}', data_dir='DIR', file_format='array_record')"
            f'.download_and_prepare()"`'
        )
    return result


def read(name: str, split: str, data_dir: str | os.PathLike) -> tuple[list[dict], tuple[str, ...]]:
    """All examples of one split, and the names of the classes.

    Args:
      name: name of the data set in the TFDS catalogue.
      split: a TFDS split, such as ``"train"`` or ``"test[:100]"``.
      data_dir: TFDS folder.

    Raises:
      UserError: the data set or the split does not exist.
    """
    source = builder(name, data_dir)
    split_name = split.split("[")[0]
    if split_name not in source.info.splits:
        raise UserError(
            f"data set {name!r} in {data_dir} has no split {split_name!r}, "
            f"only {', '.join(source.info.splits)}: prepare the whole data set again"
        )
    with _quiet():
        records = source.as_data_source(split)
        examples = [records[index] for index in range(len(records))]
    return examples, tuple(source.info.features["label"].names)


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
