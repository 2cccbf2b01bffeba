"""Generated text ends where it should, and what is streamed is never taken back."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from headlab.errors import HeadlabError, UsageError
from headlab.scoring import Rules, generate, generate_text, stream_text

GREEDY = Rules(temperature=0.0)


class Echo:
    """A head whose states are log-probabilities already."""

    vocab_size = 259

    def log_probs(self, h, *, embedding=None):
        return h


class Scripted(nnx.Module):
    """A model that after a prompt of `n` tokens writes the given ids, whatever it reads."""

    max_length = 64

    def __init__(self, ids, n):
        table = np.full((self.max_length, Echo.vocab_size), -np.inf, np.float32)
        table[np.arange(len(ids)) + n - 1, ids] = 0
        table[len(ids) + n - 1 :, 0] = 0
        self.table = nnx.Param(jnp.asarray(table))
        self.head, self.embedding = Echo(), None

    def empty_cache(self, batch, slots):
        return jnp.zeros(())

    def cached(self, tokens, cache, positions):
        return self.table[...][positions], cache


def written(tokenizer, text, *, end=True, prompt="x", **options):
    """(the continuation, its pieces) of a model that writes `text`, and then the separator."""
    ids = tokenizer.encode(text) + [tokenizer.separator_id] * end
    model = Scripted(ids, 1 + len(tokenizer.encode(prompt)))
    asked = {"rules": GREEDY, "max_new_tokens": len(ids)} | options
    [[whole]] = generate_text(model, tokenizer, [prompt], **asked)
    return whole, list(stream_text(model, tokenizer, [prompt], **asked))


TEXT = "Grüße a bc, 日本🙂 stop here"


@pytest.mark.parametrize(
    ("stop", "expected", "finish"),
    [
        ((), TEXT, "separator"),
        (("stop",), "Grüße a bc, 日本🙂 ", "stop"),
        (("本🙂 st", "here"), "Grüße a bc, 日", "stop"),
        (("here", "🙂"), "Grüße a bc, 日本", "stop"),
        (("c,",), "Grüße a b", "stop"),  # within the token "bc" and the next
        (("G",), "", "stop"),
        (("stop hex", "ß!"), TEXT, "separator"),
        (("here", "stop here"), "Grüße a bc, 日本🙂 ", "stop"),
    ],
)
def test_text_is_cut_before_the_first_stop_string(stop, expected, finish, byte_tokenizer):
    whole, pieces = written(byte_tokenizer, TEXT, stop=stop)
    assert (whole.text, whole.finish) == (expected, finish)
    assert "".join(piece.text for piece in pieces) == expected
    assert [piece.finish for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish == finish
    assert "\ufffd" not in "".join(piece.text for piece in pieces)


def test_pieces_come_as_soon_as_they_are_certain(byte_tokenizer):
    _, pieces = written(byte_tokenizer, "aé b stone", stop=("stop",))
    assert [piece.text for piece in pieces] == ["a", "é", " ", "b", " ", "ston", "e", ""]


def test_the_number_of_tokens_ends_a_text_and_shows_half_a_character_as_such(byte_tokenizer):
    whole, pieces = written(byte_tokenizer, "abé", end=False, max_new_tokens=3)
    assert (whole.text, whole.finish) == ("ab\ufffd", "length")
    assert whole.ids == tuple(byte_tokenizer.encode("abé")[:3])
    assert [piece.text for piece in pieces] == ["a", "b", "\ufffd"]


def test_nothing_is_made_of_no_tokens(byte_tokenizer):
    whole, pieces = written(byte_tokenizer, "ab", max_new_tokens=0)
    assert whole == ("", (), "length")
    assert pieces == [(0, "", "length")]


def test_text_is_that_of_the_tokens_of_generate(byte_tokenizer, make_model):
    _, model = make_model("untied", "rotary", vocabulary=259, max_length=40)
    rules = Rules(temperature=1.2, top_k=30, repetition_penalty=1.1)
    prompts, n = ["a bc", "", "日"], 20
    found = generate_text(
        model, byte_tokenizer, prompts, rules=rules, max_new_tokens=n, samples=2, seed=4
    )
    ids = [[byte_tokenizer.separator_id, *byte_tokenizer.encode(p)] for p in prompts for _ in "ab"]
    tokens = generate(model, ids, max_new_tokens=n, seed=4, **rules._asdict())
    end = byte_tokenizer.separator_id
    flat = [continuation for samples in found for continuation in samples]
    for continuation, made in zip(flat, tokens, strict=True):
        kept = made[: made.index(end)] if end in made else made
        assert continuation.text == byte_tokenizer.decode(kept)
        assert list(continuation.ids) == made[: len(kept) + (end in made)]
    assert flat[0] != flat[1]  # two samples of one prompt
    pieces = stream_text(
        model, byte_tokenizer, prompts, rules=rules, max_new_tokens=n, samples=2, seed=4
    )
    joined = [""] * 6
    for row, text, _ in pieces:
        joined[row] += text
    assert joined == [continuation.text for continuation in flat]


class Backwards:
    """A tokenizer whose decoder puts a later token before the earlier ones."""

    def __init__(self, tokenizer):
        self.start_id = self.separator_id = 258
        self.encode, self._tokenizer = tokenizer.encode, tokenizer

    def decode(self, ids):
        return self._tokenizer.decode(list(ids)[::-1])


def test_a_decoder_that_changes_earlier_text_is_refused(byte_tokenizer):
    model = Scripted([1, 2, 3], 2)
    with pytest.raises(HeadlabError, match="changes text that came before"):
        generate_text(model, Backwards(byte_tokenizer), ["x"], rules=GREEDY, max_new_tokens=3)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"prompts": []}, "there is no prompt"),
        ({"samples": 0}, "samples is 0"),
        ({"stop": [""]}, "a stop string is empty"),
        ({"stop": ["a", "\ufffd"]}, r"U\+FFFD"),
        ({"stop": "ab"}, r"it must be a list of texts, such as \['ab'\]"),
        ({"rules": Rules(top_k=260)}, "top_k is 260; it must be in 1 … 259"),
        ({"prompts": ["a" * 64]}, "prompt 0 has 65 tokens, which with 4 new ones make 69"),
        ({"max_new_tokens": 63}, "prompt 0 has 2 tokens, which with 63 new ones make 65"),
    ],
)
@pytest.mark.parametrize("function", [generate_text, stream_text])
def test_what_cannot_be_written_is_refused_at_once(function, changed, said, byte_tokenizer):
    asked = {"prompts": ["x"], "max_new_tokens": 4} | changed
    with pytest.raises(UsageError, match=said):
        function(Scripted([1], 2), byte_tokenizer, **asked)
