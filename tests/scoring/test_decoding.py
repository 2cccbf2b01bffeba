"""Decoding rules are exact functions of the distribution; generation is a plain loop over them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import log_softmax, softmax

from headlab import models
from headlab.config import default_config, resolve
from headlab.errors import HeadlabError, UsageError
from headlab.scoring import generate, greedy, sample, with_temperature

VOCABULARY = 11  # padded to 16: ids 11 to 15 must never come up
MAX_LENGTH = 12
PROMPTS = [[3], [1, 2, 3], [10, 0]]


def model_config(head="tied", position="learned", seed=0):
    config = default_config()
    config.seed = seed
    config.model.update(d_model=8, n_layers=1, n_heads=2, max_length=MAX_LENGTH, position=position)
    config.data.seq_len = MAX_LENGTH
    config.head.name = head
    config.head.vocab_multiple = 16
    if head == "adaptive":
        config.head.cutoffs = (4,)
    # far from uniform, so that the choice of a token is not a matter of rounding
    config.groups.embedding.init_scale = config.groups.head.init_scale = 8.0
    return resolve(config)


@pytest.fixture(scope="module")
def model():
    return models.build(model_config(), VOCABULARY)


def random_logits(*shape):
    return np.random.default_rng(0).normal(0, 3, shape).astype(np.float32)


# --------------------------------------------------------------------------------- the rules


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_is_applied_before_normalising(temperature):
    logits = random_logits(4, 50)
    log_probs = log_softmax(logits, axis=-1)
    cooled = np.asarray(with_temperature(log_probs, temperature), np.float64)
    expected = log_softmax(logits.astype(np.float64) / temperature, axis=-1)
    # a handful of float32 roundings, each at most of the size of the largest value
    rounding = 8 * np.finfo(np.float32).eps * np.abs(expected).max()
    np.testing.assert_allclose(cooled, expected, rtol=0, atol=rounding)
    np.testing.assert_allclose(np.exp(cooled).sum(-1), 1, rtol=0, atol=rounding)


@pytest.mark.parametrize("temperature", [0.0, np.finfo(np.float32).tiny])
def test_a_cold_distribution_puts_all_mass_on_the_most_probable_token(temperature):
    log_probs = log_softmax(random_logits(4, 50), axis=-1)
    cold = np.exp(with_temperature(log_probs, temperature))
    np.testing.assert_array_equal(cold, np.eye(50)[log_probs.argmax(-1)])


def test_temperature_0_samples_greedily_and_a_tie_goes_to_the_lowest_id():
    log_probs = jnp.log(jnp.array([[0.1, 0.4, 0.4, 0.1], [0.7, 0.1, 0.1, 0.1]]))
    assert greedy(log_probs).tolist() == [1, 0]
    assert [int(sample(jax.random.key(s), log_probs, 0.0)[0]) for s in range(5)] == [1] * 5
    np.testing.assert_array_equal(np.exp(with_temperature(log_probs, 0.0))[0], [0, 1, 0, 0])


def test_samples_have_the_frequencies_of_the_softmax_at_that_temperature():
    logits, n = random_logits(6) / 2, 40_000
    log_probs = jnp.tile(log_softmax(logits), (n, 1))
    drawn = np.bincount(sample(jax.random.key(1), log_probs, 2.0), minlength=6)
    p = softmax(logits.astype(np.float64) / 2)
    # five standard deviations of a binomial count: a right sampler fails in one seed of a million
    assert (np.abs(drawn - n * p) < 5 * np.sqrt(n * p * (1 - p))).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e30])
def test_a_token_of_probability_0_never_comes_up(temperature):
    log_probs = jnp.tile(jnp.array([-jnp.inf, -jnp.log(2), -jnp.inf, -jnp.log(2)]), (1000, 1))
    assert set(sample(jax.random.key(0), log_probs, temperature).tolist()) <= {1, 3}
    assert float(jnp.exp(with_temperature(log_probs, temperature))[0, 0]) == 0


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf"), 1e39, 1e-40])
@pytest.mark.parametrize("rule", [with_temperature, lambda p, t: sample(jax.random.key(0), p, t)])
def test_a_temperature_that_is_no_temperature_is_refused(rule, temperature):
    with pytest.raises(UsageError, match=r"temperature is .*it must be 0"):
        rule(jnp.zeros(3), temperature)


# -------------------------------------------------------------------------------- generation


@pytest.mark.parametrize(
    ("head", "position"),
    [
        ("tied", "learned"),
        ("untied", "rotary"),
        ("adaptive", "learned"),
        ("mixture_of_softmaxes", "rotary"),
    ],
)
def test_greedy_generation_is_a_plain_loop_over_the_unpadded_prompt(head, position):
    model = models.build(model_config(head, position), VOCABULARY)

    @jax.jit
    def all_log_probs(ids):
        return model.head.log_probs(model(ids), embedding=model.embedding)

    def loop(tokens, n):
        tokens = list(tokens)
        for _ in range(n):
            log_probs = all_log_probs(jnp.array([tokens], jnp.int32))
            tokens.append(int(np.argmax(log_probs[0, -1])))
        return tokens[-n:]

    generated = generate(model, PROMPTS, max_new_tokens=4, max_length=MAX_LENGTH)
    assert generated == [loop(prompt, 4) for prompt in PROMPTS]


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
        self.head, self.embedding = model.head, model.embedding

    def __call__(self, tokens):
        type(self).traces += 1
        return self.model(tokens)


def test_one_program_serves_all_lengths_temperatures_seeds_and_parameters():
    for seed in (0, 1):
        model = Counting(models.build(model_config(seed=seed), VOCABULARY))
        for prompts, n, temperature in (([[1], [2]], 3, 0.0), ([[1, 2, 3], [4]], 9, 0.7)):
            generate(
                model,
                prompts,
                max_new_tokens=n,
                max_length=MAX_LENGTH,
                temperature=temperature,
                seed=seed,
            )
    assert Counting.traces == 1


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
    ],
)
def test_what_cannot_be_generated_is_refused_with_the_numbers(model, changed, said):
    asked = {"prompts": [[1]], "max_new_tokens": 4, "max_length": MAX_LENGTH, "seed": 0} | changed
    with pytest.raises(UsageError, match=said):
        generate(model, **asked)


def test_more_than_the_model_can_take_is_refused_by_the_model(model):
    with pytest.raises(ValueError, match=r"13 tokens is longer than model\.max_length=12"):
        generate(model, [[1]], max_new_tokens=1, max_length=MAX_LENGTH + 1)


def test_a_model_that_is_not_finite_generates_nothing():
    model = models.build(model_config(), VOCABULARY)
    model.final_norm.gain[...] = jnp.full(8, jnp.nan)
    with pytest.raises(HeadlabError, match="prompt 0 are NaN after 0 new tokens"):
        generate(model, [[1]], max_new_tokens=2, max_length=MAX_LENGTH)
