"""Every head trains from the command line; an order of tokens comes back from the checkpoint, not from the corpus."""

import json
import random
from pathlib import Path

import pytest

from experiments.benchmarks import heads as benchmark
from headlab import cli, training
from headlab.config import load
from headlab.runs import RunDirectory, restore_model

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = {
    "data.corpus": "text:text.txt",
    "data.vocab_size": 300,
    "data.seq_len": 24,
    "model.d_model": 8,
    "model.n_layers": 1,
    "model.n_heads": 2,
    "train.batch_size": 2,
    "train.micro_batches": 1,
    "log.every": 1,
    "log.tensorboard": "false",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function (head, options) → what the benchmark printed of it; all in one folder with one text."""
    folder = tmp_path_factory.mktemp("heads")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(40)]
    text = "\n\n".join(" ".join(rng.choices(words, k=300)) for _ in range(250))
    (folder / "text.txt").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADLAB_CACHE", str(folder / "cache"))
        patch.chdir(folder)

        def run(head, **options):
            chosen = SMALL | {f"head.{key}": value for key, value in options.items()}
            arguments = [f"--config.{key}={value}" for key, value in chosen.items()]
            code = benchmark.main([f"--head={head}", "--steps=3", "--workdir=out", *arguments])
            return code, json.loads((folder / "out" / "heads.json").read_text())[head]

        yield run


@pytest.mark.slow
def test_a_row_has_what_the_finished_run_recorded(trained, capsys):
    code, found = trained("mixture_of_softmaxes", n_experts=2)
    assert code == 0
    result = RunDirectory("out/mixture_of_softmaxes").result()
    assert found["loss"] == result["validation"]["loss"]
    assert found["parameters"] == result["parameters"]
    assert found["tokens_per_second"] > 0 and found["peak_bytes"] > 50e6
    assert "mixture_of_softmaxes" in capsys.readouterr().out
    records = RunDirectory("out/mixture_of_softmaxes").metrics()
    experts = [records[0][f"train/expert_{k}"] for k in range(2)]
    assert sum(experts) == pytest.approx(1, rel=1e-5)
    assert trained("mixture_of_softmaxes", n_experts=2) == (0, found)  # not trained again


@pytest.mark.slow
def test_an_adaptive_run_is_opened_with_its_own_order_of_tokens(trained):
    """The held-out loss of the restored model is the one that was recorded, and its order is not that of ids."""
    code, found = trained("adaptive", cutoffs="(50,100)", div_value="2.0", tied="true")
    assert code == 0
    restored = restore_model(RunDirectory("out/adaptive"))
    order = restored.model.embedding.order.token[...]
    assert sorted(order.tolist()) == list(range(300)) and order.tolist() != list(range(300))
    evaluated = training.evaluate_run("out/adaptive")
    assert evaluated["loss"] == pytest.approx(found["loss"], rel=1e-6)


@pytest.mark.slow
def test_automatic_cutoffs_are_recorded_as_numbers_and_asked_for_again_are_the_same_run(trained):
    chosen = SMALL | {"head.name": "adaptive", "train.steps": "3", "log.progress": "false"}
    config = load(CONFIGS / "micro.py", [(key, str(value)) for key, value in chosen.items()])
    assert config.head.cutoffs == "auto"
    first = training.train(config, "out/automatic")
    recorded = RunDirectory("out/automatic").config().head.cutoffs
    assert isinstance(recorded, tuple) and all(isinstance(place, int) for place in recorded)
    assert training.train(config, "out/automatic") == first


@pytest.mark.parametrize(
    ("head", "option", "message"),
    [
        ("untied", "softcap=-1.0", "softcap is -1.0; it must be positive"),
        ("low_rank", "rank=9", "rank is 9; it must be in 1 … 8"),
        ("adaptive", "cutoffs=(50,50)", r"cutoffs"),
        ("mixture_of_softmaxes", "n_experts=0", "n_experts is 0; it must be at least 1"),
    ],
)
def test_an_option_that_the_head_refuses_is_named_before_the_corpus_is_read(
    head, option, message, tmp_path, capsys
):
    values = SMALL | {"data.corpus": "text:there-is-no-such-file.txt"}
    code = cli.main(
        [
            "train",
            f"--config={CONFIGS / 'micro.py'}",
            *(f"--config.{key}={value}" for key, value in values.items()),
            f"--config.head.name={head}",
            f"--config.head.{option}",
            f"--workdir={tmp_path / 'run'}",
        ]
    )
    printed = " ".join(capsys.readouterr().err.split())
    assert code == 2 and message in printed and "there-is-no-such-file" not in printed
    assert not (tmp_path / "run").exists()
