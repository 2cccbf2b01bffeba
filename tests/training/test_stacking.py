"""Runs that are stacked: they agree with separate ones, resume together, fail alone; and what cannot be stacked."""

import signal

import numpy as np
import pytest

from headlab import config as configs
from headlab import heads, training
from headlab.errors import HeadlabError, UsageError
from headlab.runs import RunDirectory
from headlab.training import Interrupted

SMALL = {
    "data.vocab_size": "300",
    "data.seq_len": "16",
    "model.d_model": "16",
    "model.n_layers": "1",
    "train.steps": "200",
    "train.batch_size": "4",
    "eval.every": "100",
    "eval.batch_size": "512",
    "checkpoint.every": "50",
    "log.every": "1",
    "log.progress": "false",
    "log.tensorboard": "false",
}


@pytest.fixture
def config(small_corpus):
    def load(**changes):
        dotted = {key.replace("__", "."): str(value) for key, value in changes.items()}
        options = {**SMALL, "data.corpus": small_corpus, **dotted}
        return configs.load("configs/tiny.py", list(options.items()))

    return load


def losses(path):
    records = RunDirectory(path).metrics()
    return np.array([record["train/loss"] for record in records if "train/loss" in record])


def of_all(records):
    return [{k: v for k, v in r.items() if not k.startswith("timing/")} for r in records]


@pytest.mark.slow
@pytest.mark.parametrize("head", ["tied", "untied", "low_rank", "mixture_of_softmaxes"])
def test_stacked_runs_agree_with_separate_ones(config, tmp_path, head):
    kinds = [{"seed": 0}, {"seed": 1, "optimizer__peak_rate": 0.004}]
    asked = [config(head__name=head, model__dropout=0.1, **kind) for kind in kinds]
    stack = [(c, str(tmp_path / f"stacked{i}")) for i, c in enumerate(asked)]
    results, failures = training.train_stacked(stack)
    assert not failures
    apart = training.train(asked[1], str(tmp_path / "apart"))
    stacked, separate = losses(tmp_path / "stacked1"), losses(tmp_path / "apart")
    # the first two losses are before and after one update; each is a mean of 64 float32 terms near ln 300
    eps = np.finfo(np.float32).eps
    assert np.all(np.abs(stacked - separate)[:2] <= 64 * eps * separate[:2])
    assert np.max(np.abs(stacked - separate)) < 1e-3 and len(stacked) == 200
    own = results[str(tmp_path / "stacked1")]
    assert abs(own["validation"]["loss"] - apart["validation"]["loss"]) < 1e-3
    assert own.keys() == apart.keys() and own["config_hash"] == apart["config_hash"]
    assert (own["runs_together"], apart["runs_together"]) == (2, 1)
    assert not np.allclose(losses(tmp_path / "stacked0"), stacked)


@pytest.mark.slow
def test_a_stack_that_was_stopped_goes_on_to_the_same_metrics(config, tmp_path, monkeypatch):
    asked = [config(seed=seed, head__untie_at=0.6, train__steps=60) for seed in range(3)]
    whole = [(c, str(tmp_path / f"whole{i}")) for i, c in enumerate(asked)]
    broken = [(c, str(tmp_path / f"broken{i}")) for i, c in enumerate(asked)]
    training.train_stacked(whole)
    for step in (17, 45):
        with monkeypatch.context() as patched:
            stop_at(patched, step)
            with pytest.raises(Interrupted):
                training.train_stacked(broken)
    # as a kill between two saves leaves it: one run has a step more than the others
    ahead = RunDirectory(broken[0][1])
    (ahead.checkpoints_dir / "46").rename(ahead.checkpoints_dir / "59")
    results, _ = training.train_stacked(broken)
    for (_, one), (_, other) in zip(whole, broken, strict=True):
        assert of_all(RunDirectory(one).metrics()) == of_all(RunDirectory(other).metrics())
        assert results[other]["validation"] == RunDirectory(one).result()["validation"]


def stop_at(monkeypatch, step):
    from headlab.data import TrainBatches

    original = TrainBatches.batch
    told = []

    def batch(self, number, *rows):
        if number == step and not told:
            told.append(number)
            signal.raise_signal(signal.SIGTERM)
        return original(self, number, *rows)

    monkeypatch.setattr(TrainBatches, "batch", batch)


def test_a_run_that_diverges_ends_alone(config, tmp_path):
    rates = (0.01, 1e30)
    stack = [
        (config(optimizer__peak_rate=rate, train__steps=20), str(tmp_path / str(rate)))
        for rate in rates
    ]
    results, failures = training.train_stacked(stack)
    assert list(results) == [stack[0][1]] and list(failures) == [stack[1][1]]
    assert "not finite in step" in str(failures[stack[1][1]])
    assert RunDirectory(stack[1][1]).result() is None
    _, failures = training.train_stacked(stack[1:])
    assert isinstance(failures[stack[1][1]], HeadlabError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head__name": "adaptive"}, r"head\.name=adaptive: how long its loops"),
        ({"mesh__vocab": 2}, r"mesh\.data=1 and mesh\.vocab=2: stacked runs share one device"),
        ({"checkpoint__keep": 1}, r"checkpoint\.keep=1: .*at least 2"),
        ({"head__sum_order": "invariant"}, r"head\.sum_order=invariant"),
    ],
)
def test_what_cannot_be_stacked_is_refused_with_the_reason(config, tmp_path, changes, message):
    stack = [(config(seed=seed, **changes), str(tmp_path / str(seed))) for seed in range(2)]
    with pytest.raises(UsageError, match=message):
        training.train_stacked(stack)
    assert not list(tmp_path.iterdir())


def test_runs_that_differ_in_more_are_refused_naming_it(config, tmp_path):
    stack = [(config(train__steps=n), str(tmp_path / str(n))) for n in (20, 30)]
    with pytest.raises(UsageError, match=r"they differ in optimizer\.|they differ in train\.steps"):
        training.train_stacked(stack)


def test_every_head_says_whether_it_can_be_stacked():
    refusing = {name for name in heads.names() if heads.get(name).stacking_refused}
    assert refusing == {"adaptive"}


def test_a_result_tells_the_peak_of_memory(config, tmp_path):
    result = training.train(config(train__steps=10), str(tmp_path / "run"))
    assert result["peak_memory"]["kind"] == "process"
    assert 2**26 < result["peak_memory"]["bytes"] < 2**40
    assert {"total", "head", "body", "embedding"} == set(result["parameters"])
