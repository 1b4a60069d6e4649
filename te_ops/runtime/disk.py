"""Files that outlive a process: a folder that only its user may write, locks, and files that appear in one step."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from te_ops import config
from te_ops.errors import PlanError


def own_folder(variable: str, name: str, *, make: bool = True) -> Path | None:
    """The folder that `TE_OPS_<variable>` names, else `name` in the user's cache.

    None if the variable is "off", or the folder is not there and `make` is False.

    Raises:
        PlanError: the folder cannot be made, is none, belongs to somebody else, or others may write to it.
    """
    text = config.text(variable, "")
    if text.lower() == "off":
        return None
    folder = Path(text).expanduser() if text else _default(name)
    try:
        if make:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not make:
            return None
        raise _unusable(folder, variable, str(error.strerror)) from error
    if not stat.S_ISDIR(found.st_mode):
        raise _unusable(folder, variable, "it is a file")
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PlanError(
            f"the folder {folder} can be written by others (mode {stat.S_IMODE(found.st_mode):o}, "
            f"owner {found.st_uid}); chmod 700 it, or set TE_OPS_{variable} to a folder of your "
            "own, or to off"
        )
    return folder


def _unusable(folder: Path, variable: str, why: str) -> PlanError:
    return PlanError(
        f"the folder {folder} cannot be used: {why}; set TE_OPS_{variable} to a folder of your own, or to off"
    )


def _default(name: str) -> Path:
    try:
        home = Path.home()
        # The nearest folder that is there already decides: one of them may be another user's.
        caches = home / ".cache" / "te_ops"
        there = next((p for p in (caches, caches.parent) if p.exists()), home)
        if there.is_dir() and os.access(there, os.W_OK):
            return caches / name
    except (RuntimeError, OSError):  # no home folder, or one that cannot be looked into
        pass
    return Path(tempfile.gettempdir()) / f"te_ops-{os.getuid()}" / name


def put(path: Path, data: bytes) -> None:
    """Put a file in place in one step, so that no reader ever sees a part of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Within, no other process holds the lock of this file."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock
