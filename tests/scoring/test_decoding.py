"""Generation with a cache is a plain loop over the whole model and the rules, whatever the prompts beside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract_cases import heads_by_time
from flax import nnx

from headlab import models
from headlab.config import default_config, resolve
from headlab.errors import HeadlabError, UsageError
from headlab.scoring import (
    Rules,
    generate,
    with_min_p,
    with_repetition_penalty,
    with_temperature,
    with_top_k,
    with_top_p,
)

VOCABULARY = 11  # padded to 16: ids 11 to 15 must never come up
MAX_LENGTH = 12
PROMPTS = [[3], [1, 2, 3], [10, 0]]


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()[1]


@pytest.mark.parametrize(
    ("head", "position", "kv_heads"),
    [
        *(pytest.param(*p.values, "learned", 2, marks=p.marks) for p in heads_by_time()),
        ("untied", "rotary", 1),
        ("mixture_of_softmaxes", "rotary", 4),
    ],
)
def test_greedy_generation_is_a_plain_loop_over_the_unpadded_prompt(
    head, position, kv_heads, make_model
):
    _, model = make_model(head, position, kv_heads=kv_heads)
    whole = jax.jit(lambda ids: model.head.log_probs(model(ids), embedding=model.embedding))

    def loop(tokens, n):
        tokens = list(tokens)
        for _ in range(n):
            # padded on the right, which a causal model cannot see: one program for all lengths
            ids = np.zeros((1, MAX_LENGTH), np.int32)
            ids[0, : len(tokens)] = tokens
            tokens.append(int(np.argmax(whole(ids)[0, len(tokens) - 1])))
        return tokens[-n:]

    generated = generate(model, PROMPTS, max_new_tokens=8)
    assert generated == [loop(prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize(("position", "norm"), [("learned", "layer"), ("rotary", "rms")])
def test_states_with_a_cache_are_those_of_the_whole_sequence(position, norm):
    """Rows at different positions, in pieces of different lengths."""
    config = default_config()
    config.model.update(d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, max_length=20)
    config.model.update(position=position, norm=norm, bias=True, activation="swiglu")
    config.data.seq_len = 20
    model = models.build(resolve(config), VOCABULARY)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (3, 14)).astype(np.int32)
    wanted = np.asarray(jax.jit(lambda ids: model(ids))(tokens))
    cached = jax.jit(lambda *arrays: model.cached(*arrays))
    starts = np.array([4, 9, 1])
    cache = model.empty_cache(3, 20)
    spoilt = tokens.copy()  # padding of a prompt: other tokens, whose slots are written again
    for row, start in enumerate(starts):
        spoilt[row, start:] = 0
    first, cache = cached(spoilt[:, :10], cache, np.tile(np.arange(10), (3, 1)))
    for row, start in enumerate(starts):
        np.testing.assert_allclose(first[row, :start], wanted[row, :start], atol=1e-5)
    for step in range(5):
        places = (starts + step)[:, None]
        h, cache = cached(np.take_along_axis(tokens, places, 1), cache, places)
        np.testing.assert_allclose(h[:, 0], wanted[np.arange(3), places[:, 0]], atol=1e-5)


def test_the_rules_are_applied_in_their_order(make_model):
    """The one token that every rule together leaves most probable, by the rules one after the other."""
    _, model = make_model("untied")
    seed, prompt = 3, [1, 2, 3, 2]
    rules = Rules(0.7, 6, 0.8, 0.1, 1.5)
    options = rules._asdict() | {"seed": seed}
    found = generate(model, [prompt], max_new_tokens=6, **options)[0]
    tokens = np.array([[*prompt, *found]], np.int32)
    states = jax.jit(lambda ids: model(ids))(tokens)[0]
    rows = model.head.log_probs(states, embedding=model.embedding)
    for place, token in enumerate(found, start=len(prompt)):
        seen, log_probs = jnp.isin(jnp.arange(VOCABULARY), tokens[0, :place]), rows[place - 1]
        log_probs = with_temperature(with_repetition_penalty(log_probs, seen, 1.5), 0.7)
        log_probs = with_min_p(with_top_p(with_top_k(log_probs, 6), 0.8), 0.1)
        assert log_probs[token] > -jnp.inf
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 0), place)
        assert token == int(jax.random.categorical(key, log_probs))


def test_the_seed_decides_what_is_drawn(model):
    def drawn(seed):
        options = {"max_new_tokens": 7, "max_length": MAX_LENGTH, "temperature": 5.0}
        return generate(model, PROMPTS, seed=seed, **options)

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_equal_prompts_in_one_batch_are_continued_differently(model):
    options = {"max_new_tokens": 9, "max_length": MAX_LENGTH, "temperature": 5.0}
    one, other = generate(model, [[3], [3]], **options)
    assert one != other


def test_a_continuation_does_not_depend_on_the_other_prompts(model):
    options = {"max_new_tokens": 7, "max_length": MAX_LENGTH, "temperature": 2.0, "seed": 5}
    alone = generate(model, [[3]], **options)
    assert generate(model, PROMPTS, **options)[0] == alone[0]
    assert generate(model, [[3], [9, 9, 9]], **options)[0] == alone[0]


def test_a_draw_depends_on_its_position_alone_and_not_on_where_generation_began(model):
    options = {"max_length": MAX_LENGTH, "temperature": 2.0, "seed": 5}
    [whole] = generate(model, [[3]], max_new_tokens=8, **options)
    [rest] = generate(model, [[3, *whole[:3]]], max_new_tokens=5, **options)
    assert rest == whole[3:]


def test_padded_ids_never_come_up_however_hot(model):
    hot = generate(model, [[1]] * 64, max_new_tokens=11, max_length=MAX_LENGTH, temperature=1e30)
    assert {token for row in hot for token in row} == set(range(VOCABULARY))


class Counting(nnx.Module):
    """A model that counts in Python how often it is traced."""

    traces = 0

    def __init__(self, model):
        self.model = model
        self.head, self.embedding, self.max_length = model.head, model.embedding, model.max_length

    def empty_cache(self, batch, slots):
        return self.model.empty_cache(batch, slots)

    def cached(self, tokens, cache, positions):
        type(self).traces += 1
        return self.model.cached(tokens, cache, positions)


def test_two_programs_serve_all_lengths_temperatures_seeds_and_parameters(make_model):
    """One for prompts, one for the tokens after them."""
    for seed in (0, 1):
        model = Counting(make_model(seed=seed)[1])
        for prompts, n, temperature in (([[1], [2]], 3, 0.0), ([[1, 2, 3], [4]], 9, 0.7)):
            generate(model, prompts, max_new_tokens=n, temperature=temperature, seed=seed)
    assert Counting.traces == 2


def test_the_head_sees_one_position_of_each_row(make_model, monkeypatch):
    """Of a prompt, too: log-probabilities of a whole prompt would be the largest array of all."""
    _, model = make_model("untied", max_length=64)
    shapes, kind = [], type(model.head)
    whole = kind.log_probs

    def counted(head, h, **options):
        shapes.append(h.shape)
        return whole(head, h, **options)

    monkeypatch.setattr(kind, "log_probs", counted)
    generate(model, [[1] * 40, [2] * 3], max_new_tokens=3)
    assert shapes == [(2, 8), (2, 8)]


def test_nothing_asked_for_is_nothing_made(model):
    assert generate(model, [], max_new_tokens=3, max_length=MAX_LENGTH) == []
    assert generate(model, PROMPTS, max_new_tokens=0, max_length=MAX_LENGTH) == [[], [], []]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[1, 11]]}, r"id 11; ids must be in \[0, 11\)"),
        ({"prompts": [[-1]]}, r"id -1; ids must be in \[0, 11\)"),
        ({"prompts": [[1], [1] * 9]}, "9 tokens, which with 4 new ones make 13.*max_length of 12"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"max_length": 0}, "max_length is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"top_k": 0}, "top_k is 0; it must be in 1 … 11"),
        ({"top_k": 12}, "top_k is 12"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
    ],
)
def test_what_cannot_be_generated_is_refused_with_the_numbers(model, changed, said):
    asked = {"prompts": [[1]], "max_new_tokens": 4, "max_length": MAX_LENGTH, "seed": 0} | changed
    with pytest.raises(UsageError, match=said):
        generate(model, **asked)


def test_more_than_the_model_can_take_is_refused(model):
    with pytest.raises(UsageError, match=r"max_length is 13; it must be in 1 … 12"):
        generate(model, [[1]], max_new_tokens=1, max_length=MAX_LENGTH + 1)
    with pytest.raises(UsageError, match=r"13 tokens, which with 1 new ones make 14.* of 12"):
        generate(model, [[1] * 13], max_new_tokens=1)
    with pytest.raises(ValueError, match=r"13 positions is longer than model\.max_length=12"):
        model.empty_cache(1, 13)


def test_a_model_that_is_not_finite_generates_nothing():
    config = default_config()
    config.model.update(d_model=8, n_layers=1, n_heads=2, max_length=MAX_LENGTH)
    config.data.seq_len = MAX_LENGTH
    model = models.build(resolve(config), VOCABULARY)
    model.final_norm.gain[...] = jnp.full(8, jnp.nan)
    with pytest.raises(HeadlabError, match="prompt 0 are NaN after 0 new tokens"):
        generate(model, [[1]], max_new_tokens=2, max_length=MAX_LENGTH)
