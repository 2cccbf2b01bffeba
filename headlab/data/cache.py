"""Where built things are kept, and how they get there whole: locked, written aside, renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from headlab.errors import HeadlabError

_logger = logging.getLogger(__name__)


def cache_dir() -> Path:
    """`$HEADLAB_CACHE`, else `$XDG_CACHE_HOME/headlab`, else `~/.cache/headlab`."""
    if own := os.environ.get("HEADLAB_CACHE"):
        return Path(own).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "headlab"
    return Path.home() / ".cache" / "headlab"


def content_key(*parts: object) -> str:
    """32 hex digits that name a thing made from `parts`, which may be whatever JSON can write."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of `path`, a directory to be built: others wait, and a killed holder lets go.

    The lock is an operating-system lock on the file `<path>.lock`, which stays when the lock is
    released.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_name(path.name + ".lock"), "w")  # noqa: SIM115 (closed below)
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _logger.warning("waiting for another process, which is building %s", path)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Give a directory to fill; filled, it becomes `path` in one step, replacing what was there.

    Call it with `path` locked. Files are flushed to the disk before the rename, so that `path` is
    either absent, old or complete, whenever the process or the machine stops. What an earlier,
    killed builder left half-written is removed.
    """
    prefix = f".{path.name}-"
    with writing(path):
        for left_over in path.parent.glob(f"{prefix}*"):
            shutil.rmtree(left_over)
        temporary = path.parent / f"{prefix}{os.getpid()}"
        temporary.mkdir()
    try:
        yield temporary
        with writing(path):
            for file in temporary.rglob("*"):
                _flush(file)
            _flush(temporary)
            if path.exists():
                shutil.rmtree(path)
            os.rename(temporary, path)
            _flush(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the OSError of a write under `path` into a HeadlabError that names it and the fix."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full" if full else (error.strerror or str(error))
        fix = "free some space there, or set" if full else "set"
        raise HeadlabError(
            f"cannot write {path}: {what}. Nothing incomplete was kept; {fix} HEADLAB_CACHE to a "
            "directory on another disk, and start again."
        ) from error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
