"""Ranks on text and the width of the head: what is trained, chosen, measured and kept."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiments.softmax_bottleneck import run, trained, width
from headlab import config as configs
from headlab import sweeps, training
from headlab.errors import UsageError
from headlab.runs import RunDirectory
from headlab.sweeps.directory import SweepDirectory

SMALL = {
    "data.vocab_size": 280,
    "data.seq_len": 8,
    "model.d_model": 8,
    "model.n_layers": 1,
    "model.n_heads": 1,
    "model.max_length": 8,
    "train.steps": 2,
    "train.batch_size": 2,
    "optimizer.warmup_steps": 1,
    "eval.every": 2,
    "eval.batch_size": 1024,
    "checkpoint.every": 2,
    "log.every": 1,
    "log.tensorboard": "false",
    "log.progress": "false",
}


@pytest.fixture(scope="module")
def experiment(small_corpus, tmp_path_factory):
    """Runs a part in one directory, with models that train in this process; (exit code, results.json)."""
    workdir = tmp_path_factory.mktemp("bottleneck")
    options = [f"--config.{key}={value}" for key, value in SMALL.items()]
    calls, models = [], {}

    def train(config, path):
        """Trains one model of a head and width; others are copies, whose loss is 0.25 lower or (low_rank) higher."""
        first = models.setdefault((config.head.name, width_of(configs.flatten(config))), path)
        if first == path:
            training.train(config, path)
            return
        shutil.copytree(first, path)
        Path(path, "config.json").write_text(configs.to_json(config))
        result = json.loads(Path(path, "result.json").read_text())
        result["seed"] = config.seed
        result["validation"]["loss"] += 0.25 if config.head.name == "low_rank" else -0.25
        Path(path, "result.json").write_text(json.dumps(result))

    def in_process(plan, folder, **options):
        SweepDirectory(folder).write(SweepDirectory(folder).check(plan), options["command"])
        for point, status in zip(plan.points, sweeps.statuses(plan, folder), strict=True):
            if status.state != "finished":
                calls.append(status.name)
                train(point.config, f"{folder}/{status.name}")
        return sweeps.statuses(plan, folder)

    def call(part, *flags):
        calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sweeps, "run", in_process)
            code = run.main(
                [
                    part,
                    "--quick",
                    f"--workdir={workdir}",
                    f"--config.data.corpus={small_corpus}",
                    *options,
                    *flags,
                ]
            )
        return code, json.loads((workdir / f"{part}.json").read_text())

    call.workdir, call.calls = workdir, calls
    return call


@pytest.mark.slow
def test_ranks_are_those_of_each_head_beside_the_theorem_and_the_published(experiment, capsys):
    code, found = experiment("text_ranks", "--contexts=300")
    assert code == 0
    assert experiment.calls == ["head=untied", "head=mixture_of_softmaxes"]
    ranks = {one["head"]: one["rank"]["rank"] for one in found["runs"]}
    assert ranks["untied"] == 9  # d_model + 1: the theorem's bound, which text reaches
    assert ranks["mixture_of_softmaxes"] > 9
    assert [one["theory"]["bound"] for one in found["runs"]] == [9, None]
    assert (found["contexts"], found["split"], found["unfinished"]) == (300, "validation", [])
    assert found["published"]["mixture_of_softmaxes"] == 9981
    assert found["environment"]["versions"]["jax"] and "text_ranks" in found["command"]
    result = json.loads((experiment.workdir / "text_ranks/head=untied/result.json").read_text())
    assert found["runs"][0]["loss"] == result["validation"]["loss"]
    assert (experiment.workdir / "text_ranks.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "9,981" in shown and f"{result['validation']['loss']:.4f}" in shown


@pytest.mark.slow
def test_runs_and_ranks_that_are_done_are_kept_and_others_measured(experiment, monkeypatch):
    _, before = experiment("text_ranks", "--contexts=300")
    rank_file = experiment.workdir / "text_ranks/head=untied/rank.json"
    kept = json.loads(rank_file.read_text())
    measured = []
    from headlab.analysis import run_rank

    really = run_rank.rank_of_run
    monkeypatch.setattr(
        run_rank, "rank_of_run", lambda *a, **k: measured.append(a) or really(*a, **k)
    )
    _, again = experiment("text_ranks", "--contexts=300")
    assert (experiment.calls, measured, again["runs"]) == ([], [], before["runs"])
    for change in ({"step": 1}, {"contexts": 299}, {"split": "test"}):
        rank_file.write_text(json.dumps(kept | change))
        assert experiment("text_ranks", "--contexts=300")[1]["runs"] == before["runs"]
    rank_file.write_text(json.dumps(kept)[:100])  # as a kill leaves it
    assert experiment("text_ranks", "--contexts=300")[1]["runs"] == before["runs"]
    assert len(measured) == 4 and experiment.calls == []


@pytest.mark.slow
def test_what_has_finished_is_measured_and_the_rest_named(experiment, capsys):
    experiment("text_ranks", "--contexts=300")
    result = experiment.workdir / "text_ranks/head=untied/result.json"
    aside = result.rename(result.with_suffix(".aside"))
    code, found = experiment("text_ranks", "--contexts=300", "--measure-only")
    aside.rename(result)
    assert code == 1 and experiment.calls == []
    assert [one["head"] for one in found["runs"]] == ["mixture_of_softmaxes"]
    assert [(one["name"], one["state"]) for one in found["unfinished"]] == [
        ("head=untied", "interrupted")
    ]
    assert "1 runs have not finished" in " ".join(capsys.readouterr().err.split())


def test_more_contexts_than_the_split_has_are_refused_before_training(experiment, capsys):
    with pytest.raises(FileNotFoundError):  # nothing was written
        experiment("width", "--contexts=99999999")
    assert experiment.calls == []
    said = " ".join(capsys.readouterr().err.split())
    assert "--contexts is 99999999; the validation split" in said


@pytest.mark.slow
def test_width_searches_rates_on_validation_and_gives_other_seeds_the_best(experiment):
    code, found = experiment("width", "--contexts=300")
    assert code == 0
    search = sorted((experiment.workdir / "width/search").glob("*/result.json"))
    assert len(search) == len(found["search"]) == 2 * 2 * 2
    losses = {}
    for path in search:
        config = RunDirectory(path.parent).config_values()
        key = config["head.name"], width_of(config)
        loss = json.loads(path.read_text())["validation"]["loss"]
        losses.setdefault(key, {})[config["optimizer.peak_rate"]] = loss
        assert config["seed"] == 0
    assert set(losses) == {
        (head, d) for head in ("low_rank", "mixture_of_softmaxes") for d in (4, 8)
    }
    assert len(found["runs"]) == 4
    for one in found["runs"]:
        config = RunDirectory(experiment.workdir / "width/seeds" / one["name"]).config_values()
        key = config["head.name"], width_of(config)
        assert config["optimizer.peak_rate"] == min(losses[key], key=losses[key].get)
        assert config["optimizer.peak_rate"] == (0.005 if key[0] == "low_rank" else 0.01)
        assert config["seed"] == one["seed"] == 1
    for row in found["summary"]:
        if row["head"] == "low_rank":
            assert row["ranks"] == [row["width"] + 1] == [row["bound"]]
        else:
            assert row["ranks"][0] > 9 and row["bound"] is None
    assert [each["width"] for each in found["differences"]] == [4, 8]
    assert len({row["parameters_body"] for row in found["summary"]}) == 1  # the body is fixed
    assert len({one["parameters_embedding"] for one in found["runs"]}) == 1
    assert (experiment.workdir / "width.png").read_bytes().startswith(b"\x89PNG")
    assert experiment("width", "--contexts=300")[1]["runs"] == found["runs"]
    assert experiment.calls == []


def width_of(config):
    return config.get("head.rank", config.get("head.d_latent"))


def point(rate, loss=None, state=None, rank=4):
    options = {"head.name": "low_rank", "head.rank": rank, "optimizer.peak_rate": rate}
    return (
        {"options": options, "loss": loss}
        if state is None
        else {"options": options, "state": state}
    )


def test_the_best_rate_is_of_the_least_loss_and_an_edge_or_a_failure_is_told():
    runs = [point(0.1, 3.0), point(0.2, 2.5), point(0.4, 2.75), point(0.1, 2.0, rank=8)]
    failed = [point(0.2, state="failed", rank=8)]
    inner, edge = width.best_rates(trained.Trained(runs, failed))
    assert (inner["width"], inner["peak_rate"], inner["at_edge"]) == (4, 0.2, False)
    assert inner["tried"] == [[0.1, 3.0], [0.2, 2.5], [0.4, 2.75]]
    assert (edge["width"], edge["peak_rate"], edge["at_edge"]) == (8, 0.1, True)
    assert edge["tried"] == [[0.1, 2.0], [0.2, None]]


def test_a_search_that_is_not_over_chooses_nothing():
    open_ones = [point(0.2, state="interrupted"), point(0.1, state="failed", rank=8)]
    assert width.best_rates(trained.Trained([point(0.1, 3.0)], open_ones)) == []


def test_a_difference_is_paired_by_the_seeds_that_both_heads_have():
    linear, mixture = {1: 3.0, 2: 3.25, 3: 3.125}, {3: 3.0, 2: 3.0, 1: 2.9, 4: 1.0}
    runs = [
        {"head": head, "seed": seed, "loss": loss, "options": {option: 16}}
        for head, option, losses in (
            ("low_rank", "head.rank", linear),
            ("mixture_of_softmaxes", "head.d_latent", mixture),
        )
        for seed, loss in losses.items()
    ]
    alone = {"head": "low_rank", "seed": 1, "loss": 2.0, "options": {"head.rank": 32}}
    (found,) = width.differences([*runs, alone])
    assert (found["width"], found["seeds"]) == (16, [1, 2, 3])
    shared = [[losses[seed] for seed in (1, 2, 3)] for losses in (mixture, linear)]
    reference = stats.ttest_rel(*shared).confidence_interval(0.95)
    expected = [np.subtract(*shared).mean(), reference.low, reference.high]
    np.testing.assert_allclose(found["loss"], expected)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[", "cannot be read"),
        ('[{"head": "low_rank", "width": 16}]', "peak_rate"),
        ('[{"head": "tied", "width": 16, "peak_rate": 0.1}]', "has 'tied' at width 16"),
        ('[{"head": "low_rank", "width": 17, "peak_rate": 0.1}]', "at width 17"),
    ],
)
def test_a_file_that_does_not_give_rates_is_refused(content, said, tmp_path):
    file = tmp_path / "rates.json"
    file.write_text(content)
    with pytest.raises(UsageError, match="rates=") as refused:
        sweeps.plan(f"{width.SWEEP}:rates={file}")
    assert said in str(refused.value)


def test_the_rates_tried_lie_around_the_middle_that_is_given():
    def tried(text=""):
        plan = sweeps.plan(f"{width.SWEEP}{text}")
        return sorted({one.config.optimizer.peak_rate for one in plan.points})

    assert tried() == [0.00035, 0.00071, 0.0014, 0.0028, 0.0057]
    assert tried(":centre=0.004") == [0.001, 0.002, 0.004, 0.008, 0.016]
    assert tried(":tiny,centre=0.004") == [0.002, 0.004]


@pytest.mark.parametrize("words", ["centre=0.004,rates=rates.json", "tiny,centre=0.004,rates=r"])
def test_a_middle_is_refused_beside_a_file_of_rates(words):
    with pytest.raises(UsageError, match=f"{words}: centre= .*; give one of the two"):
        sweeps.plan(f"{width.SWEEP}:{words}")


def test_seeds_take_the_rates_of_the_file_at_full_size(tmp_path):
    file = tmp_path / "rates.json"
    file.write_text(
        '[{"head": "mixture_of_softmaxes", "width": 64, "peak_rate": 0.003},'
        ' {"head": "low_rank", "width": 64, "peak_rate": 0.002}]'
    )
    configs = [one.config for one in sweeps.plan(f"{width.SWEEP}:rates={file}").points]
    assert [(c.head.name, c.optimizer.peak_rate, c.seed) for c in configs] == [
        (head, rate, seed)
        for head, rate in (("mixture_of_softmaxes", 0.003), ("low_rank", 0.002))
        for seed in (1, 2, 3)
    ]
    assert {c.train.steps for c in configs} == {6000} and {c.model.d_model for c in configs} == {
        256
    }


@pytest.mark.parametrize(
    ("flags", "search", "seeds"),
    [
        ([], {}, {}),
        (["--search-rate=0.01"], {}, {}),
        (["--config.train.steps=9"], {"train.steps": "9"}, {"train.steps": "9"}),
        (["--search-steps=3"], {"train.steps": "3"}, {}),
        (
            ["--config.train.steps=9", "--search-steps=3"],
            {"train.steps": "3"},
            {"train.steps": "9"},
        ),
    ],
)
def test_the_search_may_have_fewer_steps_than_the_seeds(
    flags, search, seeds, tmp_path, monkeypatch
):
    trained_with, files = [], []

    def train(file, folder, how):
        files.append(file)
        trained_with.append((folder.name, dict(how.overrides)))
        return trained.Trained([point(0.1, 3.0)], [])

    monkeypatch.setattr(width, "train", train)
    given, overrides = run.cli.split_overrides(["width", *flags])
    width.trained(tmp_path, run._how(run._parser().parse_args(given), overrides, []))
    assert trained_with == [("search", search), ("seeds", seeds)]
    middle = [flag.partition("=")[2] for flag in flags if "rate" in flag]
    assert files[0] == ":".join([str(width.SWEEP), *(f"centre={rate}" for rate in middle)])
    assert files[1] == f"{width.SWEEP}:rates={tmp_path / 'width' / 'rates.json'}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["width", "--rank=8"], "--rank is of known_truth, not of width"),
        (["--contexts=100"], "--contexts is of text_ranks and width, not of known_truth"),
        (["known_truth", "--config.train.steps=3"], "--config.train.steps is of text_ranks"),
        (["text_ranks", "--search-steps=3"], "--search-steps is of width, not of text_ranks"),
        (["--search-rate=0.1"], "--search-rate is of width, not of known_truth"),
        (["width", "--search-rate=0"], "centre=0: it must be a peak rate above 0"),
        (["width", "--search-rate=fast"], "centre=fast: it must be a peak rate above 0"),
        (["widths"], "invalid choice: 'widths'"),
        (["width", "--contexts=0"], "'0' is not an integer of at least 1"),
        (["text_ranks", "--config.train.stpes=3"], "did you mean train.steps?"),
    ],
)
def test_what_does_not_fit_together_is_refused(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run.main(arguments) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not any(tmp_path.iterdir())


def test_quick_alone_is_all_parts_and_with_flags_of_part_1_that_part(monkeypatch):
    def parts(*arguments):
        given, overrides = run.cli.split_overrides(arguments)
        return run._parts(run._parser().parse_args(given), overrides)

    assert parts("--quick") == parts("all") == run.PARTS
    assert parts() == parts("--quick", "--rank=4") == parts("--heads=untied") == ("known_truth",)
    assert parts("width", "--jobs=2") == ("width",)
