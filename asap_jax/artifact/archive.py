"""The archive: a header and named arrays in one ``.npz`` file, under one digest.

Entries are stored, never compressed, so reading needs no more memory than the file is large.
"""

from __future__ import annotations

import hashlib
import io
import math
import zipfile
from collections.abc import Mapping

import numpy as np

HEADER, DIGEST = "header", "digest"


def pack(header: bytes, arrays: Mapping[str, np.ndarray]) -> memoryview:
    """The bytes of an archive, always the same for the same contents."""
    entries = {HEADER: np.frombuffer(header, np.uint8), **arrays}
    raw = {name: _npy(array) for name, array in entries.items()}
    raw[DIGEST] = _npy(np.frombuffer(_digest(raw), np.uint8))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        for name, content in raw.items():
            # ZipInfo has a constant date, unlike an entry that is written by its name.
            file.writestr(zipfile.ZipInfo(f"{name}.npy"), content)
    return buffer.getbuffer()


def entries(data: bytes) -> dict[str, bytes]:
    """The raw entries of an archive by name, each in NumPy's ``.npy`` format.

    Raises:
      ValueError: an entry is compressed, occurs twice or overlaps another one. Damaged archives
        may also raise other errors of the modules ``zipfile``, ``zlib`` and ``struct``.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        listed = file.infolist()
        packed = [info.filename for info in listed if info.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise ValueError(f"entry {packed[0]!r} is compressed, which save never does")
        names = [info.filename.removesuffix(".npy") for info in listed]
        if len(set(names)) < len(names) or sum(info.file_size for info in listed) > len(data):
            raise ValueError("its entries overlap")
        return {name: file.read(info) for name, info in zip(names, listed, strict=True)}


def has_digest(raw: Mapping[str, bytes]) -> bool:
    """Whether the entries other than the digest are those that it was made of."""
    others = {name: content for name, content in raw.items() if name != DIGEST}
    return raw.get(DIGEST) == _npy(np.frombuffer(_digest(others), np.uint8))


def header(raw: Mapping[str, bytes]) -> bytes:
    """The contents of the header; KeyError if there is none."""
    _, dtype, numbers = _parsed(raw[HEADER])
    if dtype != np.uint8:
        raise ValueError(f"its header is an array of {dtype}")
    return numbers


def array(content: bytes, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The array of one raw entry.

    Raises:
      ValueError: it has another dtype, shape or size. Damaged entries may raise other errors.
    """
    held_shape, held_dtype, numbers = _parsed(content)
    if held_dtype != dtype:
        raise ValueError(f"header says {dtype}, the file holds {held_dtype}")
    if held_shape != shape:
        raise ValueError(f"header says shape {list(shape)}, the file holds {list(held_shape)}")
    if len(numbers) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(numbers)} bytes are no {dtype} of shape {list(shape)}")
    return np.frombuffer(numbers, dtype).reshape(shape)


def _parsed(content: bytes) -> tuple[tuple[int, ...], np.dtype, bytes]:
    """Shape, dtype and bytes of an entry in NumPy's format."""
    file = io.BytesIO(content)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("an entry is not in version 1.0 of NumPy's format")
    shape, by_column, dtype = np.lib.format.read_array_header_1_0(file)
    if by_column:
        raise ValueError("an entry is stored by columns, which save never does")
    return shape, dtype, content[file.tell() :]


def _npy(value: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.asarray(value, order="C"), (1, 0), allow_pickle=False)
    return buffer.getvalue()


def _digest(raw: Mapping[str, bytes]) -> bytes:
    """SHA-256 of names, sizes and contents, independent of their order."""
    result = hashlib.sha256()
    for name in sorted(raw):
        result.update(f"{len(name)} {name} {len(raw[name])} ".encode())
        result.update(raw[name])
    return result.digest()
