"""Values of options: read from text, checked against an annotation, and named in messages.

An annotation is bool, int, float, str, None, Literal[...], tuple[...] or a union of these. Types
are kept: an int option never becomes a float, and only a float option accepts both kinds.
"""

import math
import numbers
import types
import typing
from collections.abc import Callable
from typing import Any, Literal


def conform(value: Any, annotation: Any) -> Any:
    """The value in the type that the annotation declares: ints become floats, lists tuples.

    Raises:
      ValueError: the value has none of the declared types; the message says which it must have.

    >>> conform(3, float | None), conform([1, 2], tuple[int, ...] | str)
    (3.0, (1, 2))
    """
    return _first_match(value, annotation, _conform_one)


def parse(text: str, annotation: Any) -> Any:
    """The value that a piece of text means where the annotation is declared; "none" is None.

    Raises:
      ValueError: the text means nothing of the declared types; the message says what it must be.

    >>> parse("1e-3", float | None), parse("none", float | None), parse("(1,2)", tuple[int, ...])
    (0.001, None, (1, 2))
    """
    return _first_match(text, annotation, _parse_one)


def type_in_words(annotation: Any) -> str:
    """The annotation as an error message says it.

    >>> type_in_words(int | None), type_in_words(Literal["rms", "layer"])
    ('an integer or none', 'rms or layer')
    """
    return " or ".join(_member_in_words(member) for member in _members(annotation))


def as_text(value: Any) -> str:
    """The text that `parse` reads back as this value.

    >>> as_text(None), as_text(True), as_text((1, 2)), as_text(0.002)
    ('none', 'true', '(1,2)', '0.002')
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"({','.join(as_text(item) for item in value)})"
    return str(value)


def _first_match(value: Any, annotation: Any, match: Callable[[Any, Any], Any]) -> Any:
    members = _members(annotation)
    # str reads any text, so it is the last resort: "none" and "(1,2)" mean more than their letters
    for member in sorted(members, key=lambda member: member is str):
        try:
            return match(value, member)
        except ValueError:
            continue
    raise ValueError(f"it must be {type_in_words(annotation)}")


def _conform_one(value: Any, member: Any) -> Any:
    if typing.get_origin(member) is tuple:
        if isinstance(value, list | tuple):
            return tuple(
                conform(item, kind)
                for item, kind in zip(value, _item_types(member, len(value)), strict=True)
            )
    elif typing.get_origin(member) is Literal:
        for choice in typing.get_args(member):
            if type(value) is type(choice) and value == choice:
                return choice
    elif member is int:
        if isinstance(value, numbers.Integral) and not isinstance(value, bool):
            return int(value)
    elif member is float:
        if isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif isinstance(value, member):
        return value
    raise ValueError


def _parse_one(text: str, member: Any) -> Any:
    if typing.get_origin(member) is tuple:
        inner = text.strip().removeprefix("(").removesuffix(")").removesuffix(",")
        items = [item.strip() for item in inner.split(",")] if inner.strip() else []
        return tuple(
            parse(item, kind)
            for item, kind in zip(items, _item_types(member, len(items)), strict=True)
        )
    if typing.get_origin(member) is Literal:
        for choice in typing.get_args(member):
            if text == as_text(choice):
                return choice
        raise ValueError
    if member in (bool, types.NoneType):
        words = {"true": True, "false": False, "none": None}
        return _conform_one(words.get(text.strip().lower(), text), member)
    return _conform_one(member(text), member)


def _item_types(member: Any, count: int) -> tuple[Any, ...]:
    items = typing.get_args(member)
    if items[-1] is Ellipsis:
        return items[:1] * count
    if len(items) != count:
        raise ValueError
    return items


def _members(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = typing.get_args(annotation)
    else:
        members = (types.NoneType if annotation is None else annotation,)
    for member in members:
        simple = member in (bool, int, float, str, types.NoneType)
        if not simple and typing.get_origin(member) not in (tuple, Literal):
            raise TypeError(
                f"no option can have the type {member!r}; use bool, int, float, str, None, "
                "Literal[...], tuple[int, ...] or a union of these, not written as a string"
            )
    return members


def _member_in_words(member: Any) -> str:
    if typing.get_origin(member) is Literal:
        return " or ".join(as_text(choice) for choice in typing.get_args(member))
    if typing.get_origin(member) is tuple:
        items = ["..." if item is ... else type_in_words(item) for item in typing.get_args(member)]
        return f"a tuple ({', '.join(items)})"
    return {
        bool: "true or false",
        int: "an integer",
        float: "a finite number",
        str: "text",
        types.NoneType: "none",
    }[member]
