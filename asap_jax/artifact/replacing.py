"""Replacing a file in one step, so that it is never half written."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import stat
import uuid
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows: drafts of killed processes are then left
    fcntl = None  # type: ignore[assignment]


def write(path: str, data: memoryview) -> None:
    """Writes ``data`` to a draft beside ``path`` and renames it to ``path``.

    The target of a symbolic link is replaced, not the link. The mode of an existing file is kept.
    Drafts of killed processes are deleted: a live process holds a lock on its draft.

    Raises:
      OSError: the file cannot be written; an existing file is then unchanged.
    """
    target = pathlib.Path(os.path.realpath(path))
    try:
        mode = stat.S_IMODE(os.stat(target).st_mode)
    except FileNotFoundError:
        mode = None
    _delete_stale_drafts(target)
    try:
        _replace(target, data, mode)
    except OSError as error:  # its own message would name the draft
        raise OSError(error.errno, error.strerror or str(error), path) from error


def _replace(target: pathlib.Path, data: memoryview, mode: int | None) -> None:
    """As ``write``; errors name the draft."""
    draft, file = _open_draft(target, 0o666 if mode is None else mode)
    try:
        with file:
            if mode is not None:
                os.chmod(draft, mode)  # os.open takes the umask off
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if fcntl is None:
                file.close()  # Windows renames no open file
            os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _open_draft(target: pathlib.Path, mode: int) -> tuple[pathlib.Path, BinaryIO]:
    """A new draft of ``target``, locked."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0)
    while True:
        draft = target.with_name(f"{target.name}.{uuid.uuid4().hex}.draft")
        file = open(os.open(draft, flags, mode), "wb")  # noqa: SIM115
        _lock(file.fileno(), wait=True)
        if draft.exists():  # else another process took it for a stale one before it was locked
            return draft, file
        file.close()


def _lock(descriptor: int, *, wait: bool = False) -> bool:
    """Locks a file until it is closed or its process ends; False if it cannot be locked."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # another process has the lock, or the file system has none
        return False
    return True


def _delete_stale_drafts(target: pathlib.Path) -> None:
    """Deletes the drafts of ``target`` that no process is writing."""
    draft = re.compile(re.escape(target.name) + r"\.[0-9a-f]{32}\.draft")
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for path in (entry.path for entry in entries if draft.fullmatch(entry.name)):
            with contextlib.suppress(OSError), open(path, "rb") as file:
                if _lock(file.fileno()):
                    os.unlink(path)
