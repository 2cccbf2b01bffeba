"""Configurations from files and from the text of a command line."""

import re
import runpy
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, FrozenConfigDict

from headlab import files
from headlab.config.options import OPTIONS, Option
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
    return resolve(read(path, overrides))


def read(path: str | Path, overrides: Sequence[tuple[str, str]] = ()) -> ConfigDict:
    """As `load`, but not resolved yet: a configuration of one's own to change further.

    Raises:
      UsageError: the file cannot be read or fails, or an override is not valid.
    """
    config = call_in_file(
        str(path),
        "get_config",
        returns=ConfigDict,
        what="config file",
        example="configs/micro.py",
        fix="a changed headlab.config.default_config()",
    )
    if isinstance(config, FrozenConfigDict):
        config = ConfigDict(config)
    for key, text in sorted(overrides, key=lambda pair: pair[0] != "head.name"):
        override(config, key, text)
    return config


def override(config: ConfigDict, key: str, text: str) -> None:
    """Sets an option, in place, to what the text means in the option's declared type.

    true and false are bools, none is None where the option may be None, (1,2) or 1,2 is a tuple,
    and a string is taken as it is. A head's own options are those of the head `config` names.

    Raises:
      UsageError: no such option, or the text has another type or lies outside the allowed range.
      TypeError: `config` was already resolved.
    """
    option = _option(config, key)
    try:
        value = parse(text, option.type)
    except ValueError as problem:
        raise refused(key, text, option, str(problem)) from None
    place(config, key, checked(key, value, option))


def put(config: ConfigDict, values: Mapping[str, Any]) -> None:
    """Sets options, in place, to values by dotted key, the head's name before the rest.

    Raises:
      UsageError: no such option, or a value has another type or lies outside the allowed range.
      TypeError: `config` was already resolved.
    """
    for key in sorted(values, key=lambda key: key != "head.name"):
        option = _option(config, key)
        place(config, key, checked(key, values[key], option))


def _option(config: ConfigDict, key: str) -> Option:
    """What is declared of the option that a dotted key names."""
    if isinstance(config, FrozenConfigDict):
        raise TypeError("a resolved configuration cannot change; override it before resolve()")
    options = OPTIONS
    head = config.get("head", {}).get("name", OPTIONS["head.name"].default)
    if key.startswith("head.") and key not in OPTIONS:
        options = OPTIONS | head_options(head)
    if key not in options:
        raise misplaced(key, head, options)
    return options[key]


def call_in_file(
    path: str, function: str, *, returns: type, what: str, example: str, fix: str
) -> Any:
    """What a function of a Python file returns; "FILE.py:TEXT" calls it with the argument "TEXT".

    Args:
      path, function: the file and the name of the function in it.
      returns: the type that it must return.
      what, example, fix: how messages name such a file, one that exists, and what it should return.

    Raises:
      UsageError: the file cannot be read, has no such function, fails, or returns another type.
    """
    with_argument = re.fullmatch(r"(.*\.py):(.*)", path)
    file, arguments = (
        (Path(with_argument[1]), [with_argument[2]]) if with_argument else (Path(path), [])
    )
    try:
        with file.open("rb"):
            pass
    except OSError as problem:
        raise UsageError(
            f"cannot read the {what} {file}: {_why_unread(file, problem, example)}"
        ) from None
    try:
        # run, not imported: a cached .pyc would miss a file rewritten within its clock's tick
        called = runpy.run_path(str(file)).get(function)
        if not callable(called):
            raise UsageError(
                f"the {what} {file} has no function {function}(); define one that returns {fix}"
            )
        value = called(*arguments)
    except UsageError:
        raise
    except Exception as problem:
        raise UsageError(
            f"the {what} {file} failed{_line_of(file, problem)}: "
            f"{type(problem).__name__}: {_message(problem)}; correct the file"
        ) from problem
    if not isinstance(value, returns):
        raise UsageError(
            f"{function}() in {file} returned {type(value).__name__}, not a {returns.__name__}; "
            f"return {fix}"
        )
    return value


def _why_unread(file: Path, problem: OSError, example: str) -> str:
    near = files.similar(file, lambda other: other.suffix == ".py")
    if not file.exists() and near is not None:
        return f"there is no such file; did you mean {near}?"
    return f"{problem.strerror}; give a Python file such as {example}"


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
