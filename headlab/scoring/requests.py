"""What an evaluation harness asks of a model, in headlab's terms: what fits the model, windows, generation arguments.

The rules are those of lm-evaluation-harness (Gao et al. 2021), so that figures compare with those of other models.
"""

import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from headlab.errors import UsageError
from headlab.scoring.rules import Rules

_logger = logging.getLogger(__name__)
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_RULES = ("top_k", "top_p", "min_p")
_KNOWN = ("until", "do_sample", "temperature", *_LENGTHS, *_RULES)


class Generation(NamedTuple):
    """How a request's text is to go on."""

    rules: Rules
    stop: tuple[str, ...]
    max_new_tokens: int


def fitted(
    context: Sequence[int], continuation: Sequence[int], longest: int
) -> tuple[Sequence[int], Sequence[int]]:
    """(what of the context a model of `longest` tokens can read before the continuation, the continuation).

    The model reads both without their last token. Tokens are cut from the left; one of the context is left at least.

    >>> fitted([1, 2, 3], [4, 5], 3)
    ([2, 3], [4, 5])

    Raises UsageError for a continuation that is longer than the model.
    """
    if len(continuation) > longest:
        raise UsageError(
            f"a continuation has {len(continuation)} tokens; the model reads {longest} at most, so that its first one "
            "has no context left: give shorter ones"
        )
    return context[-(longest + 1 - len(continuation)) :], continuation


def rolling(
    ids: Sequence[int], prefix: int, longest: int
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """(context, continuation) windows that together score each of `ids` once, the first one after `prefix`.

    Each window reads `longest` tokens, the first only where there are so many, and scores as many of its last tokens as
    no window before it did; so that only the last one has more context than one token before those.

    >>> list(rolling([1, 2, 3, 4, 5], 0, 3))
    [([0], [1, 2, 3]), ([2, 3], [4, 5])]
    """
    whole = [prefix, *ids]
    for start in range(0, len(ids), longest):
        stop = min(start + longest, len(ids)) + 1
        yield whole[max(stop - longest - 1, 0) : start + 1], whole[start + 1 : stop]


def generation(arguments: Mapping[str, Any], max_new_tokens: int) -> Generation:
    """The arguments of a `generate_until` request; `max_new_tokens` where they name none.

    `until` is a text or a list of them. Without `do_sample`, a temperature above 0 samples; `do_sample` false is greedy
    whatever the temperature, with a warning. Rules as in `headlab.scoring.rules`; the repetition penalty is not among
    them, for headlab's is one of log-probabilities and those of others are of logits.

    Raises:
      UsageError: an argument that is not known, or is outside its range, or contradicts another.
    """
    for name in arguments:
        if name not in _KNOWN:
            near = difflib.get_close_matches(name, _KNOWN, n=1)
            raise UsageError(
                f"the generation argument {name}={arguments[name]!r} is unknown to headlab"
                + (f"; did you mean {near[0]}?" if near else "")
                + f" (it has {', '.join(_KNOWN)})"
            )
    given = {name: arguments[name] for name in _KNOWN if arguments.get(name) is not None}
    lengths = {name: given[name] for name in _LENGTHS if name in given}
    if len(set(lengths.values())) > 1:
        raise UsageError(
            f"{' and '.join(f'{name}={n}' for name, n in lengths.items())} contradict each other; give max_gen_toks"
        )
    [length] = set(lengths.values()) or {max_new_tokens}
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise UsageError(f"max_gen_toks is {length!r}; it must be an integer of at least 1")
    rules = Rules(_temperature(given), *(given.get(name) for name in _RULES))
    return Generation(rules, _stops(given.get("until", ())), length)


def _temperature(given: Mapping[str, Any]) -> float:
    temperature, sampled = given.get("temperature"), given.get("do_sample")
    if temperature is not None and (
        isinstance(temperature, bool) or not isinstance(temperature, int | float)
    ):
        raise UsageError(f"temperature is {temperature!r}; it must be a number of at least 0")
    if sampled is None:
        return temperature or 0.0
    if not isinstance(sampled, bool):
        raise UsageError(f"do_sample is {sampled!r}; it must be true or false")
    if sampled and not temperature:
        raise UsageError(
            "do_sample is true without a temperature above 0; give one, such as temperature=1.0, or do_sample=false"
        )
    if not sampled and temperature:
        _logger.warning(
            "do_sample is false: decoding is greedy, and temperature=%s not used", temperature
        )
    return temperature if sampled and temperature else 0.0


def _stops(until: Any) -> tuple[str, ...]:
    stops = (until,) if isinstance(until, str) else tuple(until)
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise UsageError(
                f"until has {stop!r}; it must be a text of at least one character, or a list of them"
            )
    return stops
