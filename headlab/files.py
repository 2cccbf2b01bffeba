"""Files that are written at once or not at all, and locks that the operating system lets go of."""

import contextlib
import difflib
import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headlab.errors import HeadlabError


def similar(path: Path, keep: Callable[[Path], bool] = Path.exists) -> Path | None:
    """What stands beside `path` under the name most like it, of what `keep` accepts; None where nothing is like it.

    For messages about a path that was misspelt.
    """
    try:
        names = [entry.name for entry in path.parent.iterdir() if keep(entry)]
    except OSError:
        return None
    near = difflib.get_close_matches(path.name, names, 1)
    return path.parent / near[0] if near else None


def temporary(path: Path) -> Path:
    """Where `replace` writes before the file is whole; what a kill may leave."""
    return path.with_name(f".{path.name}.new")


def replace(path: Path, content: bytes) -> None:
    """Writes a file at once or not at all, so that no kill leaves half of it.

    Raises HeadlabError where it cannot be written.
    """
    new = temporary(path)
    try:
        with open(new, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as problem:
        new.unlink(missing_ok=True)
        raise HeadlabError(
            f"{path} could not be written ({problem.strerror}); what was there is intact. Free "
            "some space or correct the permissions, and run the same command again to resume."
        ) from problem


def write_json(path: Path, content: Any) -> None:
    """Writes JSON with `replace`, and the directory where it is missing.

    Raises ValueError for a number that is not finite, which JSON has no word for, and what `replace` raises.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    replace(path, text.encode())


@contextlib.contextmanager
def held(path: Path, refusal: Callable[[str], Exception]) -> Iterator[None]:
    """Holds a lock file, which names this process; the operating system lets go of it when the process dies.

    Raises `refusal(holder)` where another process, "process N on HOST", holds it.
    """
    # "a" neither truncates the holder's name nor needs the file to exist
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise refusal(file.read().strip() or "another process") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
