"""Text that goes on from a prompt: stop strings, samples, and pieces of text as soon as they are certain."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from headlab.data import Tokenizer
from headlab.errors import HeadlabError, UsageError
from headlab.scoring.decoding import tokens_after
from headlab.scoring.rules import Rules

_INCOMPLETE = (
    "\N{REPLACEMENT CHARACTER}"  # what decodes to it may be part of a character that is to come
)


class Continuation(NamedTuple):
    """What a model put after one prompt."""

    text: str  # up to the stop string, or the end of the document
    ids: tuple[int, ...]  # all tokens made, those of the stop string or the separator included
    finish: Literal["length", "stop", "separator"]  # what ended it


class Piece(NamedTuple):
    """Some text of one continuation, and with its last piece what ended it."""

    row: int  # which continuation it belongs to
    text: str
    finish: Literal["length", "stop", "separator"] | None = None


def generate_text(
    model: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    *,
    rules: Rules | None = None,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    samples: int = 1,
    seed: int = 0,
) -> list[list[Continuation]]:
    """`samples` continuations of each prompt: a text, which begins a document after `tokenizer.start_id`, or ids.

    A continuation ends after `max_new_tokens` tokens, where the model ends the document with the separator, or where
    its text has one of the strings `stop`, of which the first in the text counts: it is cut before that. A stop string
    may lie across tokens. Rows differ in what is drawn; see `generate` for what a token depends on.

    Raises:
      UsageError: no prompt, `samples` below 1, an empty stop string, a prompt that does not fit the model together with
        what is to follow, or a rule out of its range.
      HeadlabError: the model's log-probabilities are NaN.
    """
    writers = _writers(tokenizer, prompts, stop, samples)
    for _ in _written(model, writers, rules, max_new_tokens, seed):
        pass
    found = [writer.continuation() for writer in writers]
    return [found[i : i + samples] for i in range(0, len(found), samples)]


def stream_text(
    model: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    *,
    rules: Rules | None = None,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    samples: int = 1,
    seed: int = 0,
) -> Iterator[Piece]:
    """The texts of `generate_text` in pieces, as they come: a row's pieces joined are its text.

    A piece holds whole characters only, and nothing that may turn out to be the beginning of a stop string; so that it
    may come some tokens late. Rows are numbered prompt by prompt, sample by sample. Raises as `generate_text`, at once.
    """
    writers = _writers(tokenizer, prompts, stop, samples)
    return _written(model, writers, rules, max_new_tokens, seed)


def _writers(tokenizer, prompts, stop, samples) -> list["_Writer"]:
    if not prompts:
        raise UsageError("there is no prompt; give at least one text, which may be empty")
    if samples < 1:
        raise UsageError(f"samples is {samples}; it must be at least 1")
    if isinstance(stop, str):
        raise UsageError(
            f"stop is the text {stop!r}; it must be a list of texts, such as [{stop!r}]"
        )
    for text in stop:
        if not text:
            raise UsageError("a stop string is empty, and would stop everything; leave it out")
        if _INCOMPLETE in text:
            raise UsageError(
                f"the stop string {text!r} has the character U+FFFD, which stands for what is not text"
            )
    return [_Writer(tokenizer, prompt, tuple(stop)) for prompt in prompts for _ in range(samples)]


def _written(model, writers, rules, max_new_tokens, seed) -> Iterator[Piece]:
    """Checks at once; then the pieces."""
    steps = tokens_after(
        model,
        [writer.prompt for writer in writers],
        Rules() if rules is None else rules,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )

    def pieces():
        for column in steps:
            for row, (writer, id_) in enumerate(zip(writers, column.tolist(), strict=True)):
                if writer.finish is None:
                    text = writer.add(id_)
                    if text or writer.finish:
                        yield Piece(row, text, writer.finish)
            if all(writer.finish for writer in writers):
                return
        for row, writer in enumerate(writers):
            if writer.finish is None:
                yield Piece(row, writer.end("length"), "length")

    return pieces()


class _Writer:
    """Turns the tokens of one row into text that is never taken back."""

    def __init__(self, tokenizer: Tokenizer, prompt: str | Sequence[int], stop: tuple[str, ...]):
        if isinstance(prompt, str):
            prompt = [tokenizer.start_id, *tokenizer.encode(prompt)]
        self.prompt = list(prompt)
        self.finish: Literal["length", "stop", "separator"] | None = None
        self._tokenizer, self._stop = tokenizer, stop
        self._before = len(tokenizer.decode(self.prompt))
        self._ids: list[int] = []
        self._text = ""  # of all tokens so far, certain or not
        self._given = 0  # characters of it that were given out

    def add(self, id_: int) -> str:
        """Takes one token and returns the text that is certain by it."""
        self._ids.append(id_)
        if id_ == self._tokenizer.separator_id:
            return self.end("separator")
        # with the prompt, for some tokenizers write a token otherwise at the beginning of a text
        text = self._tokenizer.decode([*self.prompt, *self._ids])[self._before :]
        if not text.startswith(self._text[: self._given]):
            raise HeadlabError(
                f"the tokenizer's decoder changes text that came before: {self._text[: self._given][-20:]!r} became "
                f"other text with the token {id_}. Text cannot be written token by token with it; use `generate`."
            )
        self._text = text
        # what was given out holds not even the beginning of a stop string
        found = [place for stop in self._stop if (place := text.find(stop, self._given)) >= 0]
        if found:
            self._text = text[: min(found)]
            return self.end("stop")
        return self._give(self._certain())

    def end(self, finish: Literal["length", "stop", "separator"]) -> str:
        """Nothing follows: the text that was held back."""
        self.finish = finish
        return self._give(len(self._text))

    def continuation(self) -> Continuation:
        assert self.finish is not None
        return Continuation(self._text, tuple(self._ids), self.finish)

    def _certain(self) -> int:
        """How many characters no later token can change or make part of a stop string."""
        whole = self._text.rstrip(_INCOMPLETE)
        return len(whole) - max((_overlap(whole, text) for text in self._stop), default=0)

    def _give(self, until: int) -> str:
        piece = self._text[self._given : until]
        self._given = max(self._given, until)
        return piece


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins, without being complete."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
