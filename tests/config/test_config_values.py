"""Text and values of options: read in the declared type, never converted to fit."""

import re
from typing import Literal

import pytest

from headlab.config.values import as_text, conform, parse


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("true", bool, True),
        ("False", bool, False),
        ("-3", int, -3),
        ("2", float, 2.0),
        ("1e-3", float, 1e-3),
        ("none", float | None, None),
        ("None", int | None, None),
        ("5", int | None, 5),
        ("none", str, "none"),
        ("none", str | None, None),
        ("text:/a b/*.txt", str | None, "text:/a b/*.txt"),
        ("", str, ""),
        ("(1,2)", tuple[int, ...], (1, 2)),
        ("1, 2", tuple[int, ...], (1, 2)),
        ("7", tuple[int, ...], (7,)),
        ("(7,)", tuple[int, ...], (7,)),
        ("()", tuple[int, ...], ()),
        ("1,2", tuple[float, int], (1.0, 2)),
        ("auto", tuple[int, ...] | str, "auto"),
        ("4,5", tuple[int, ...] | str, (4, 5)),
        ("rms", Literal["rms", "layer"], "rms"),
    ],
)
def test_text_is_read_in_the_declared_type(text, kind, value):
    read = parse(text, kind)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("1", bool, "true or false"),
        ("yes", bool, "true or false"),
        ("3.0", int, "an integer"),
        ("1e3", int, "an integer"),
        ("none", int, "an integer"),
        ("", int | None, "an integer or none"),
        ("nan", float, "a finite number"),
        ("inf", float | None, "a finite number or none"),
        ("1,x", tuple[int, ...], "a tuple (an integer, ...)"),
        ("1,2,3", tuple[int, int], "a tuple (an integer, an integer)"),
        ("RMS", Literal["rms", "layer"], "rms or layer"),
    ],
)
def test_text_of_another_type_is_refused_with_the_type_expected(text, kind, expected):
    with pytest.raises(ValueError, match=re.escape(expected) + "$"):
        parse(text, kind)


@pytest.mark.parametrize("value", [None, True, 3, 2.5, 1e-8, "auto", (), (1,), (1, 2)])
def test_the_text_of_a_value_is_read_back_as_the_value(value):
    assert parse(as_text(value), bool | int | float | tuple[int, ...] | str | None) == value


@pytest.mark.parametrize(
    ("value", "kind"),
    [(True, int), (True, float), (1, bool), (2.0, int), (1, str), ([1.5], tuple[int, ...])],
)
def test_a_value_of_another_type_is_never_converted_to_fit(value, kind):
    with pytest.raises(ValueError):
        conform(value, kind)


def test_an_annotation_that_no_option_can_have_is_named():
    with pytest.raises(TypeError, match="'float'"):
        parse("1", "float")
