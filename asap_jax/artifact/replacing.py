"""Replacing a file in one step, so that it is never half written."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import stat
import time
import uuid

try:
    import fcntl
except ImportError:  # Windows: drafts of killed processes are then left
    fcntl = None  # type: ignore[assignment]

YOUNG = 60.0  # seconds, in which an empty draft may be one that is not locked yet


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
    draft = target.with_name(f"{target.name}.{uuid.uuid4().hex}.draft")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(draft, flags, 0o666 if mode is None else mode), "wb") as file:
            _lock(file.fileno())
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


def _lock(descriptor: int) -> bool:
    """Locks a file until it is closed or its process ends; False if another process has it."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # locked, or a file system without locks
        return False
    return True


def _delete_stale_drafts(target: pathlib.Path) -> None:
    """Deletes the drafts of ``target`` that no process is writing."""
    draft = re.compile(re.escape(target.name) + r"\.[0-9a-f]{32}\.draft")
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for path in (entry.path for entry in entries if draft.fullmatch(entry.name)):
            with contextlib.suppress(OSError), open(path, "rb") as file:
                state = os.fstat(file.fileno())
                locked_soon = not state.st_size and time.time() - state.st_mtime < YOUNG
                if not locked_soon and _lock(file.fileno()):
                    os.unlink(path)
