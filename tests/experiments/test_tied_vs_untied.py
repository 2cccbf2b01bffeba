"""The tied-against-untied experiment: one command trains, resumes, compares and reports."""

import contextlib
import io
import json
import math
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiments import recording
from experiments.tied_vs_untied import figures, report, run
from headlab import training

SMALL = {
    "data.vocab_size": 300,
    "data.seq_len": 24,
    "model.d_model": 8,
    "model.n_layers": 1,
    "model.n_heads": 2,
    "model.max_length": 24,
    "train.batch_size": 2,
    "train.micro_batches": 1,
    "eval.every": 2,
    "checkpoint.every": 2,
    "log.every": 1,
    "log.tensorboard": "false",
    "log.progress": "false",
}


def experiment(*arguments, steps=4):
    options = [f"--config.{key}={value}" for key, value in SMALL.items()]
    corpus = "--config.data.corpus=text:text.txt"
    return run.main([f"--steps={steps}", corpus, *options, *arguments])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A directory with a text, a cache and, in `out`, what one run of the experiment left."""
    folder = tmp_path_factory.mktemp("experiment")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(40)]
    text = "\n\n".join(" ".join(rng.choices(words, k=300)) for _ in range(250))
    (folder / "text.txt").write_text(text)  # long enough that no split is empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADLAB_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert experiment("--workdir=out") == 0
    (folder / "out" / "printed.txt").write_text(printed.getvalue())
    return folder


@pytest.fixture
def folder(finished, tmp_path, monkeypatch):
    """The working directory of a test: a copy of `finished`, so that a test may change it."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("HEADLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def trained(folder, monkeypatch):
    """The (head, seed) of runs that were trained, by copying the finished run of that head."""
    calls = []

    def copied(config, workdir):
        calls.append((config.head.name, config.seed))
        shutil.copytree(folder / "out" / f"{config.head.name}-seed0", workdir, dirs_exist_ok=True)
        for path in (Path(workdir) / "config.json", Path(workdir) / "result.json"):
            path.write_text(json.dumps({**json.loads(path.read_text()), "seed": config.seed}))
        return json.loads((Path(workdir) / "result.json").read_text())

    monkeypatch.setattr(training, "train", copied)
    return calls


def result(loss, seed):
    return {
        "parameters": {"total": 10},
        "train_loss": loss - 1,
        "validation": {"loss": loss, "bits_per_byte": loss / 4},
        "seed": seed,
    }


def test_one_command_trains_both_heads_and_reports_what_they_reached(folder):
    found = json.loads(Path("out/results.json").read_text())
    printed = Path("out/printed.txt").read_text()
    recorded = {
        head: json.loads(Path(f"out/{head}-seed0/result.json").read_text()) for head in run.HEADS
    }
    losses = {head: recorded[head]["validation"]["loss"] for head in run.HEADS}
    for row in found["summary"]:
        assert row["held_out_loss"] == [losses[row["head"]], None]
        assert f"{losses[row['head']]:.4f}" in printed
    assert f"{losses['untied'] - losses['tied']:+.4f}" in printed
    # untied has one matrix more, and is otherwise the same
    sizes = [row["parameters"] for row in found["summary"]]
    assert sizes[1] - sizes[0] == 300 * 8
    assert [run["result"] for run in found["runs"]] == list(recorded.values())
    assert [point[0] for point in found["curves"][0]["validation"]] == [2, 4]
    assert Path("out/curves.png").read_bytes().startswith(b"\x89PNG")
    page = Path("out/report.html").read_text()
    assert all(f"{loss:.4f}" in page for loss in losses.values())
    assert "The river is" in page  # samples, too


def test_every_prompt_is_continued_by_each_head_greedily_and_at_a_temperature(folder):
    samples = json.loads(Path("out/results.json").read_text())["samples"]
    asked = {(s["head"], s["prompt"], s["temperature"]) for s in samples}
    assert len(samples) == len(asked) == 2 * len(recording.PROMPTS) * len(recording.TEMPERATURES)
    assert all(isinstance(sample["text"], str) for sample in samples)


def test_finished_runs_are_kept_and_only_what_is_missing_is_trained(trained):
    assert experiment("--workdir=out", "--seeds=0,1") == 0
    assert trained == [("tied", 1), ("untied", 1)]
    summary = json.loads(Path("out/results.json").read_text())["summary"]
    assert [row["seeds"] for row in summary] == [2, 2]


def test_an_interrupted_experiment_says_so_and_goes_on_where_it_stopped(
    folder, trained, monkeypatch, capsys
):
    train = training.train

    def interrupted(config, workdir):
        if config.head.name == "untied":
            raise training.Interrupted("stopped after step 2", signal.SIGINT)
        return train(config, workdir)

    with monkeypatch.context() as patch:
        patch.setattr(training, "train", interrupted)
        assert experiment("--workdir=again") == 128 + signal.SIGINT
    assert "stopped after step 2" in capsys.readouterr().err
    assert not Path("again/results.json").exists()
    assert experiment("--workdir=again") == 0
    assert trained == [("tied", 0), ("untied", 0)]
    whole, again = (json.loads(Path(name, "results.json").read_text()) for name in ("out", "again"))
    assert again == whole


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config.head.name=untied"], "--config.head.name is set by the experiment"),
        (["--config.seed=3"], "--config.seed is set by the experiment; use --seeds"),
        (["--config.train.stpes=3"], "did you mean train.steps?"),
        (["--seeds=0,0"], "--seeds=0,0: give different integers"),
        (["--seeds=a"], "--seeds=a: give different integers"),
        (["--steps=0"], "'0' is not an integer of at least 1"),
        (["--stepz=3"], "unrecognized arguments: --stepz=3"),
        (["--config=gone.py"], "cannot read the config file gone.py"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_paragraph_before_anything_starts(
    arguments, said, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert run.main(["--workdir=out", *arguments]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert message.startswith("headlab: error: ")
    assert said in message
    assert not Path("out").exists()


def test_finished_runs_of_another_configuration_are_refused(folder, capsys):
    assert experiment("--workdir=out", steps=5) == 2
    assert "train.steps is 4 in the run and 5" in " ".join(capsys.readouterr().err.split())


def test_quick_is_shorter_but_yields_to_what_is_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(run, "compare", lambda *arguments: asked.append(arguments) or {})
    monkeypatch.setattr(report, "show", lambda results: None)
    run.main(["--quick"])
    run.main(["--quick", "--steps=7"])
    run.main([])
    steps = [dict(overrides).get("train.steps") for _, overrides, _, _ in asked]
    assert steps == [dict(run.QUICK)["train.steps"], "7", None]
    assert [str(workdir) for *_, workdir in asked] == [
        "runs/tied_vs_untied-quick",
        "runs/tied_vs_untied-quick",
        "runs/tied_vs_untied",
    ]


# ------------------------------------------------------------------------------------ figures


def test_means_errors_and_the_paired_interval_are_those_of_students_t():
    tied, untied = [4.0, 4.1, 4.3], [4.05, 4.2, 4.32]
    rows = report.summarise(
        {
            "tied": [result(loss, seed) for seed, loss in enumerate(tied)],
            "untied": [result(loss, seed) for seed, loss in enumerate(untied)],
        }
    )
    assert rows[0]["difference"] is None
    np.testing.assert_allclose(rows[0]["held_out_loss"], [np.mean(tied), stats.sem(tied)])
    np.testing.assert_allclose(rows[1]["bits_per_byte"][0], np.mean(untied) / 4)
    reference = stats.ttest_rel(untied, tied).confidence_interval(0.95)
    expected = [np.mean(untied) - np.mean(tied), reference.low, reference.high]
    np.testing.assert_allclose(rows[1]["difference"], expected)


def test_one_seed_has_a_difference_but_no_uncertainty():
    rows = report.summarise({"tied": [result(4.0, 0)], "untied": [result(4.25, 0)]})
    assert rows[1]["difference"] == [0.25, None, None]
    assert rows[1]["held_out_loss"] == [4.25, None]


def test_curves_are_light_for_training_and_dark_for_held_out_with_units_on_the_axes():
    curves = [
        {
            "head": head,
            "seed": seed,
            "train": [[1, 9.0 + seed], [2, 8.0]],
            "validation": [[2, 8.5 + lift]],
        }
        for seed in (0, 1)
        for head, lift in (("tied", 0.0), ("untied", 0.25))
    ]
    losses, differences = figures.draw(curves).axes
    assert losses.get_ylabel() == "loss (nats per token)"
    assert differences.get_xlabel() == "step"
    legend = [text.get_text() for text in losses.get_legend().get_texts()]
    assert legend == ["tied, training", "tied, held-out", "untied, training", "untied, held-out"]
    for training_line, held_out in zip(losses.lines[::2], losses.lines[1::2], strict=True):
        assert _lightness(training_line) > _lightness(held_out)
    blue, red = (figures.COLOURS[head][1] for head in run.HEADS)
    assert int(blue[5:], 16) > int(blue[1:3], 16) and int(red[1:3], 16) > int(red[5:], 16)
    drawn = [line.get_ydata() for line in differences.lines[1:]]
    assert [list(values) for values in drawn] == [[0.25], [0.25]]


def _lightness(line):
    colour = line.get_color()
    return math.fsum(int(colour[i : i + 2], 16) for i in (1, 3, 5))
