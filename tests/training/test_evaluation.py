"""Held-out loss: every token once, whatever the batch, by the plain float64 formula."""

import math

import numpy as np
import pytest
import reference_decoder

from headlab import config as configs
from headlab import data, sharding
from headlab.training import Evaluator, frequency_bands
from headlab.training.step import make_phase


@pytest.fixture(scope="module")
def setting(small_corpus):
    config = configs.load(
        "configs/tiny.py",
        [
            ("data.corpus", small_corpus),
            ("data.vocab_size", "300"),
            ("model.n_layers", "1"),
            ("head.name", "untied"),
        ],
    )
    dataset = data.open_dataset(config.data, progress=False)
    phase, state = make_phase(config, 300, dataset.store.counts, head_name="untied", end=1)
    return config, dataset.store, phase, state


def evaluate(setting, batch_size, split="validation", devices=1):
    config, store, phase, state = setting
    mesh = sharding.make_mesh(devices)
    specs = sharding.param_specs(state.params)
    evaluator = Evaluator(
        phase.graph, store, mesh, specs, seq_len=config.data.seq_len, batch_size=batch_size
    )
    variables = sharding.place((state.params, state.constants), mesh, (specs, sharding.REPLICATED))
    return evaluator(variables, split)


def test_the_loss_does_not_depend_on_the_batch_and_equals_plain_float64(setting):
    config, store, _, state = setting
    results = [evaluate(setting, size) for size in (3, 4, 7, 64)]
    tokens = np.asarray(store.tokens("validation"), np.int64)
    length = config.data.seq_len
    nats, count = 0.0, 0
    for start in range(0, len(tokens) - 1, length):
        window = tokens[start : start + length + 1]
        log_probs = reference_decoder.log_probs(state.params, config.model, window[None, :-1], 300)
        nats -= log_probs[0, np.arange(len(window) - 1), window[1:]].sum()
        count += len(window) - 1
    assert count == len(tokens) - 1
    for found in results:
        assert found["tokens"] == count
        assert found["loss"] == pytest.approx(results[0]["loss"], abs=1e-6)
        assert found["loss"] == pytest.approx(nats / count, abs=1e-5)
        assert found["bits_per_byte"] == pytest.approx(
            nats / math.log(2) / store.n_bytes("validation"), rel=1e-5
        )


def test_devices_along_data_change_nothing_but_rounding(setting):
    one, four = evaluate(setting, 8), evaluate(setting, 8, devices=4)
    assert one["loss"] == pytest.approx(four["loss"], abs=1e-6)
    assert one["band_tokens"] == four["band_tokens"]


def test_bands_add_up_to_the_mean(setting):
    found = evaluate(setting, 16, "test")
    total = sum(
        loss * n
        for loss, n in zip(found["bands"], found["band_tokens"], strict=True)
        if loss is not None
    )
    assert sum(found["band_tokens"]) == found["tokens"]
    assert total / found["tokens"] == pytest.approx(found["loss"], rel=1e-12)


def test_bands_are_deciles_of_the_vocabulary_by_training_count():
    counts = np.array([5, 0, 9, 9, 1, 7, 3, 2, 8, 6, 4, 10, 0, 0, 0, 0, 0, 0, 0, 0])
    bands = frequency_bands(counts)
    assert np.bincount(bands, minlength=10).tolist() == [2] * 10
    assert set(np.flatnonzero(bands == 0)) == {11, 2}  # ten, then the first of the two nines
    assert bands[3] == 1 and bands[19] == 9
    for low, high in zip(range(9), range(1, 10), strict=True):
        assert counts[bands == low].min() >= counts[bands == high].max()


def test_bands_of_a_vocabulary_smaller_than_ten_are_still_in_range():
    assert frequency_bands(np.array([3, 1, 2])).tolist() == [0, 6, 3]
