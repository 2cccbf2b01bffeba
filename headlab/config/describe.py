"""The table of options in words, for a listing."""

from typing import NamedTuple

from headlab.config.options import OPTIONS, REQUIRED, Option, interval_in_words
from headlab.config.rules import head_options
from headlab.config.values import as_text, type_in_words


class Description(NamedTuple):
    """One option in words: `default` is as an override writes it, `allowed` its type and range."""

    key: str
    default: str
    allowed: str
    help: str


def describe(head: str | None = None) -> list[Description]:
    """Every option, in the order of the table; with a head's name, its own options come last.

    Raises:
      UsageError: no head has this name.

    >>> describe()[4].key, describe()[4].default, describe()[4].allowed
    ('data.seq_len', '128', 'an integer at least 1')
    """
    options = OPTIONS if head is None else OPTIONS | head_options(head)
    return [
        Description(
            key,
            "REQUIRED" if option.default is REQUIRED else as_text(option.default),
            _allowed(option),
            option.help,
        )
        for key, option in options.items()
    ]


def _allowed(option: Option) -> str:
    if not option.allowed:
        return type_in_words(option.type)
    kind, none, _ = type_in_words(option.type).partition(" or none")
    return f"{kind} {interval_in_words(option.allowed)}" + (", or none" if none else "")
