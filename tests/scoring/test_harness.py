"""What a harness is told of a model is what the whole distributions say, whatever the order and the batches."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from headlab import runs
from headlab.errors import UsageError
from headlab.pretrained import opening
from headlab.scoring import generate_text
from headlab.scoring.harness import HarnessModel

LONGEST = 40
# of eight products and 259 exponentials, float32, summed over up to forty tokens
CLOSE = 1e-4


def asked(*arguments):
    return [SimpleNamespace(args=given) for given in arguments]


@pytest.fixture
def opened(make_model, byte_tokenizer, monkeypatch):
    """opened(**arguments): the harness's model of a run without files."""
    config, model = make_model("untied", "rotary", vocabulary=259, max_length=LONGEST)
    restored = runs.Restored(model, "untied", byte_tokenizer, config, 7)
    monkeypatch.setattr(opening, "restore_model", lambda run, step, shards: restored)
    return lambda **arguments: HarnessModel("run", **arguments)


def dense(model, ids):
    """[len, 259] float64 log-probabilities of the token after each position."""
    padded = np.zeros((1, LONGEST), np.int32)
    padded[0, : len(ids)] = ids
    h = jax.jit(lambda model, ids: model(ids))(model, padded)
    return model.head.log_probs(h, embedding=model.embedding, dtype=np.float64)[0][: len(ids)]


def total(model, context, continuation):
    ids = [*context, *continuation][-LONGEST - 1 :]
    rows = dense(model, ids[:-1])[-len(continuation) :]
    return rows[np.arange(len(continuation)), continuation].sum()


def test_log_likelihoods_are_sums_of_the_dense_distributions(opened, byte_tokenizer, caplog):
    """Also of a context that is too long, which a warning tells."""
    harness = opened(batch_size=2)
    long = "abc " * 20
    pairs = [("x", " yes"), ("", "no"), (long, "b"), ("a bc ", "a bc")]
    kept = []
    harness.cache_hook = SimpleNamespace(add_partial=lambda *given: kept.append(given))
    found = harness.loglikelihood(asked(*pairs))
    encode, start = byte_tokenizer.encode, byte_tokenizer.start_id
    ids = [
        (encode("x"), encode(" yes")),
        ([start], encode("no")),
        (encode(long.rstrip()), encode(" b")),
        (encode("a bc"), encode(" a bc")),
    ]
    for (log_prob, _), pair in zip(found, ids, strict=True):
        assert log_prob == pytest.approx(total(harness.model, *pair), abs=CLOSE)
    assert "1 of 4 contexts do not fit the model's max_length of 40" in caplog.text
    assert sorted(kept) == sorted(zip(["loglikelihood"] * 4, pairs, found, strict=True))
    assert harness.loglikelihood([]) == []


def test_shards_of_the_vocabulary_say_the_same(opened):
    pairs = [("x", " yes"), ("a bc ", "a bc")]
    one, two = (opened(shards=n, batch_size=2).loglikelihood(asked(*pairs)) for n in (1, 2))
    for (log_prob, greedy), (other, also) in zip(one, two, strict=True):
        assert log_prob == pytest.approx(other, abs=CLOSE) and greedy == also


def test_a_text_is_scored_in_the_harness_windows(opened, byte_tokenizer):
    harness = opened(max_length=16)
    text = "the sea is calm tonight, bc"
    ids = byte_tokenizer.encode(text)
    assert 16 < len(ids) < 32
    whole = [byte_tokenizer.start_id, *ids]
    first = total(harness.model, whole[:1], ids[:16])
    rest = total(harness.model, whole[len(ids) - 16 : 17], ids[16:])
    [found, short] = harness.loglikelihood_rolling(asked((text,), ("a",)))
    assert found == pytest.approx(first + rest, abs=CLOSE)
    assert short == pytest.approx(
        total(harness.model, whole[:1], byte_tokenizer.encode("a")), abs=CLOSE
    )


def test_text_goes_on_from_what_fits_up_to_a_stop(opened, byte_tokenizer):
    harness = opened(batch_size=2)
    long = "abc " * 20
    arguments = {"max_gen_toks": 6, "do_sample": False}
    requests = asked(("x", arguments), (long, arguments), ("", arguments))
    found = harness.generate_until(requests)
    prompts = [
        byte_tokenizer.encode("x"),
        byte_tokenizer.encode(long)[-34:],
        [byte_tokenizer.start_id],
    ]
    for text, ids in zip(found, prompts, strict=True):
        made = []
        for _ in range(6):
            made.append(int(dense(harness.model, [*ids, *made])[-1].argmax()))
        before = byte_tokenizer.decode(ids)
        assert text == byte_tokenizer.decode([*ids, *made])[len(before) :]
    stop = found[0][1]
    [cut] = harness.generate_until(asked(("x", {**arguments, "until": [stop]})))
    assert cut == found[0].split(stop)[0]


def test_sampled_text_depends_on_the_seed(opened, byte_tokenizer):
    request = asked(("x", {"max_gen_toks": 6, "temperature": 1.0}))
    texts = {seed: opened(seed=seed).generate_until(request) for seed in (0, 1)}
    assert texts[0] == opened(seed=0).generate_until(request) != texts[1]
    ids = byte_tokenizer.encode("x")
    [[same]] = generate_text(opened().model, byte_tokenizer, [ids], max_new_tokens=6, seed=1)
    assert texts[1] == [same.text]


@pytest.mark.parametrize(
    ("call", "requests", "said"),
    [
        ("loglikelihood", [("a", "")], "a continuation of the context 'a' is empty"),
        ("loglikelihood", [("a", "b" * 41)], "a continuation has 41 tokens; the model reads 40"),
        ("loglikelihood_rolling", [("",)], "text 0 is empty"),
        ("generate_until", [("a", {"max_gen_toks": 40})], "max_gen_toks is 40; .* below 40"),
        ("generate_until", [("a", {"top_k": 260})], "top_k is 260; it must be in 1 … 259"),
    ],
)
def test_requests_that_cannot_be_are_refused(call, requests, said, opened):
    with pytest.raises(UsageError, match=said):
        getattr(opened(), call)(asked(*requests))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"batch_size": "auto"}, "batch_size is 'auto'; it must be an integer at least 1"),
        ({"max_length": 41}, "max_length is 41; it must be an integer in 1 … 40"),
        ({"max_gen_toks": 0}, "max_gen_toks is 0"),
        ({"step": "first"}, "step is 'first'"),
        ({"seed": -1}, "seed is -1"),
        ({"add_bos_token": "maybe"}, "add_bos_token is 'maybe'"),
        ({"shards": 9}, "mesh.vocab=9, and there are 8 devices"),
    ],
)
def test_models_that_cannot_be_are_refused(arguments, said, opened):
    with pytest.raises(UsageError, match=said):
        opened(**arguments)


def test_a_tokenizer_larger_than_the_table_is_refused(make_model, byte_tokenizer, monkeypatch):
    config, model = make_model()
    restored = runs.Restored(model, "tied", byte_tokenizer, config, 7)
    monkeypatch.setattr(opening, "restore_model", lambda run, step, shards: restored)
    with pytest.raises(UsageError, match="run has ids up to 258; the model has 11 tokens"):
        HarnessModel("run")


def test_the_arguments_of_the_command_line(opened):
    """A batch size among them goes before the harness's, which always gives one, and a device."""
    own = {"batch_size": 1, "device": "cuda:0"}
    made = HarnessModel.create_from_arg_obj({"workdir": "run", "batch_size": 3}, own)
    assert made.batch_size == 3 and made.max_gen_toks == 20
    assert HarnessModel.create_from_arg_obj({"workdir": "run"}, own).batch_size == 1
    with pytest.raises(UsageError, match="pretrained='gpt2' is unknown to headlab; it has workdir"):
        HarnessModel.create_from_arg_obj({"pretrained": "gpt2"}, own)
    with pytest.raises(UsageError, match="no run is given; .*workdir=RUN"):
        HarnessModel.create_from_arg_obj({}, own)


def test_chat_templates_are_refused(opened):
    assert opened().chat_template(False) is None
    for call in (lambda h: h.chat_template(True), lambda h: h.apply_chat_template([])):
        with pytest.raises(UsageError, match="no chat template"):
            call(opened())
