"""Configurations from files and from the text of a command line."""

import difflib
import re
import runpy
import traceback
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict, FrozenConfigDict

from headlab.config.options import OPTIONS
from headlab.config.rules import checked, head_options, misplaced, refused, resolve
from headlab.config.tree import place
from headlab.config.values import parse
from headlab.errors import UsageError


def load(path: str | Path, overrides: Sequence[tuple[str, str]] = ()) -> FrozenConfigDict:
    """The resolved configuration of a file, changed by (key, text) pairs.

    The file is Python and defines `get_config()`, which returns a ConfigDict, usually a changed
    `default_config()`. "FILE.py:TEXT" calls `get_config("TEXT")`. The head's name is set before the
    rest, so the order of the overrides matters only where two of them set the same key.

    Raises:
      UsageError: the file cannot be read or fails, an override or the whole is not valid.
    """
    config = _get_config(str(path))
    for key, text in sorted(overrides, key=lambda pair: pair[0] != "head.name"):
        override(config, key, text)
    return resolve(config)


def override(config: ConfigDict, key: str, text: str) -> None:
    """Sets an option, in place, to what the text means in the option's declared type.

    true and false are bools, none is None where the option may be None, (1,2) or 1,2 is a tuple,
    and a string is taken as it is. A head's own options are those of the head `config` names.

    Raises:
      UsageError: no such option, or the text has another type or lies outside the allowed range.
      TypeError: `config` was already resolved.
    """
    if isinstance(config, FrozenConfigDict):
        raise TypeError("a resolved configuration cannot change; override it before resolve()")
    options = OPTIONS
    head = config.get("head", {}).get("name", OPTIONS["head.name"].default)
    if key.startswith("head.") and key not in OPTIONS:
        options = OPTIONS | head_options(head)
    if key not in options:
        raise misplaced(key, head, options)
    option = options[key]
    try:
        value = parse(text, option.type)
    except ValueError as problem:
        raise refused(key, text, option, str(problem)) from None
    place(config, key, checked(key, value, option))


def _get_config(path: str) -> ConfigDict:
    with_argument = re.fullmatch(r"(.*\.py):(.*)", path)
    file, arguments = (
        (Path(with_argument[1]), [with_argument[2]]) if with_argument else (Path(path), [])
    )
    try:
        with file.open("rb"):
            pass
    except OSError as problem:
        raise UsageError(
            f"cannot read the config file {file}: {_why_unread(file, problem)}"
        ) from None
    try:
        # run, not imported: a cached .pyc would miss a file rewritten within its clock's tick
        get_config = runpy.run_path(str(file)).get("get_config")
        if not callable(get_config):
            raise UsageError(
                f"the config file {file} has no function get_config(); define one that returns a "
                "changed headlab.config.default_config()"
            )
        config = get_config(*arguments)
    except UsageError:
        raise
    except Exception as problem:
        raise UsageError(
            f"the config file {file} failed{_line_of(file, problem)}: "
            f"{type(problem).__name__}: {_message(problem)}; correct the file"
        ) from problem
    if not isinstance(config, ConfigDict):
        raise UsageError(
            f"get_config() in {file} returned {type(config).__name__}, not a ConfigDict; return a "
            "changed headlab.config.default_config()"
        )
    if isinstance(config, FrozenConfigDict):
        return ConfigDict(config)
    return config


def _why_unread(file: Path, problem: OSError) -> str:
    siblings = [other.name for other in file.parent.glob("*.py")] if file.parent.is_dir() else []
    close = difflib.get_close_matches(file.name, siblings, 1)
    if not file.exists() and close:
        return f"there is no such file; did you mean {file.parent / close[0]}?"
    return f"{problem.strerror}; give a Python file such as configs/micro.py"


def _line_of(file: Path, problem: Exception) -> str:
    if isinstance(problem, SyntaxError) and problem.filename == str(file):
        return f" at line {problem.lineno}"
    frames = traceback.extract_tb(problem.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    return f" at line {lines[-1]}" if lines else ""


def _message(problem: Exception) -> str:
    if isinstance(problem, SyntaxError):
        return problem.msg
    text = str(problem)
    # ConfigDict lists every field present, a screenful, before it says which name is near
    text = re.sub(r" Other fields present: \".*\"(?=\\n|$|'|\n)", "", text, flags=re.DOTALL)
    return " ".join(text.replace("\\n", " ").split())
