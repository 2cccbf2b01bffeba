"""lm-evaluation-harness gives the same figures through headlab as through `transformers` on the exported model.

The harness itself runs, on tasks and data written here; nothing is downloaded.
"""

import json
import os
import subprocess
import sys

import pytest

from headlab import models
from headlab.config import default_config, resolve
from headlab.pretrained import save_pretrained

pytestmark = pytest.mark.peers

LONGEST = 64
QUESTIONS = [
    # (question, choices, the right one): white space at the end, nothing, and more than the model can read
    ("The sea is", ["calm", "a", "full of bc"], 0),
    ("The moon is ", ["made of a cheese", "round"], 1),
    ("", ["yes", "no", "bc bc"], 2),
    ("bc a " * 20 + "and then\n", ["a", "b"], 0),
    ("é 日", ["本", "a"], 0),
]
TEXTS = [
    "The sea is calm tonight.",
    "The tide is full, the moon lies fair\nupon the straits, " * 2,
    "a",
]
PROMPTS = ["The sea", "bc a " * 20, "x"]
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
""",
    "going_on": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "b"
generation_kwargs:
  until: ["/", "}"]
  max_gen_toks: 12
  do_sample: false
metric_list:
  - metric: exact_match
""",
}
DATA = {
    "choices": [dict(question=q, choices=c, answer=a) for q, c, a in QUESTIONS],
    "rolling": [dict(text=text) for text in TEXTS],
    "going_on": [dict(text=text) for text in PROMPTS],
}


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """The environment of a harness that finds nothing but what is here."""
    found = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tmp_path_factory.mktemp("hf")),
        "TOKENIZERS_PARALLELISM": "false",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in found.items():
            patch.setenv(name, value)
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory, byte_tokenizer):
    """A model that headlab and transformers open, its distributions far from uniform."""
    config = default_config()
    config.model.update(
        d_model=16,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        d_mlp=32,
        max_length=LONGEST,
        position="rotary",
        norm="rms",
        activation="swiglu",
    )
    config.data.seq_len = LONGEST
    config.head.name = "untied"
    config.groups.embedding.init_scale = config.groups.head.init_scale = 3.0
    config = resolve(config)
    path = tmp_path_factory.mktemp("model") / "exported"
    save_pretrained(path, models.build(config, byte_tokenizer.vocab_size), config, byte_tokenizer)
    return path


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tasks")
    for name, text in TASKS.items():
        data = directory / f"{name}.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in DATA[name]))
        given = {"task": f"headlab_{name}", "dataset_path": "json", "test_split": "test"}
        head = "".join(f"{key}: {value}\n" for key, value in given.items())
        files = f"dataset_kwargs:\n  data_files:\n    test: {data}\n"
        (directory / f"{name}.yaml").write_text(head + files + text.lstrip())
    return directory


@pytest.fixture(scope="module")
def found(folder, tasks, offline):
    """found[model]: (metrics by task, what the model answered each request, by task)."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    import headlab.scoring.lm_eval  # noqa: F401 (registers the model)

    manager = TaskManager(include_path=str(tasks), include_defaults=False)

    def run(model, arguments, batch_size):
        results = lm_eval.simple_evaluate(
            model=model,
            model_args=arguments,
            tasks=[f"headlab_{name}" for name in TASKS],
            task_manager=manager,
            batch_size=batch_size,
            device="cpu",
            bootstrap_iters=0,
        )
        answers = {
            task: [
                answer
                for sample in sorted(samples, key=lambda sample: sample["doc_id"])
                for answer in sample["filtered_resps"]
            ]
            for task, samples in results["samples"].items()
        }
        return results, answers

    return {
        "headlab": run("headlab", {"workdir": str(folder)}, 4),
        "hf": run("hf", {"pretrained": str(folder), "dtype": "float32"}, 2),
    }


def test_choices_have_the_same_accuracy_and_log_likelihoods(found):
    (ours, answers), (theirs, expected) = found["headlab"], found["hf"]
    for metric in ("acc,none", "acc_norm,none"):
        assert (
            ours["results"]["headlab_choices"][metric]
            == theirs["results"]["headlab_choices"][metric]
        )
    assert len(answers["headlab_choices"]) == sum(len(choices) for _, choices, _ in QUESTIONS)
    for one, two in zip(answers["headlab_choices"], expected["headlab_choices"], strict=True):
        assert float(one[0]) == pytest.approx(float(two[0]), abs=1e-4)
        assert str(one[1]) == str(two[1])  # whether greedy decoding gives it


def test_rolling_perplexities_are_the_same(found):
    """Of texts of one window, of several, and of one token."""
    (ours, answers), (theirs, expected) = found["headlab"], found["hf"]
    for one, two in zip(answers["headlab_rolling"], expected["headlab_rolling"], strict=True):
        assert float(one) == pytest.approx(float(two), abs=1e-4, rel=1e-6)
    for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        one, two = (r["results"]["headlab_rolling"][f"{metric},none"] for r in (ours, theirs))
        assert one == pytest.approx(two, rel=1e-5)


def test_greedy_text_is_the_same(found):
    """After short contexts and one that is too long, up to a stop string or the number of tokens."""
    answers, expected = found["headlab"][1], found["hf"][1]
    assert answers["headlab_going_on"] == expected["headlab_going_on"]
    assert any(answers["headlab_going_on"])


def test_the_cache_of_answers_is_filled_and_read(folder, tasks, offline, tmp_path, monkeypatch):
    import lm_eval
    from lm_eval.tasks import TaskManager

    from headlab.scoring.lm_eval import HeadlabLM

    def accuracy():
        results = lm_eval.simple_evaluate(
            model="headlab",
            model_args={"workdir": str(folder)},
            tasks=["headlab_choices"],
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            batch_size=4,
            use_cache=str(tmp_path / "answers"),
            bootstrap_iters=0,
        )
        return results["results"]["headlab_choices"]["acc,none"]

    asked, whole = [], HeadlabLM.loglikelihood
    monkeypatch.setattr(
        HeadlabLM, "loglikelihood", lambda model, r: asked.append(len(r)) or whole(model, r)
    )
    assert accuracy() == accuracy()
    assert asked == [sum(len(choices) for _, choices, _ in QUESTIONS)]


def test_results_say_which_model_it_was(found, folder):
    config = found["headlab"][0]["config"]
    assert config["headlab_workdir"] == str(folder) and config["headlab_head"] == "untied"


def test_the_command_line_runs_the_harness(folder, tasks, offline, tmp_path, found):
    command = [sys.executable, "-m", "headlab.cli", "lm-eval", "--model", "headlab"]
    command += ["--model_args", f"workdir={folder},batch_size=4", "--tasks", "headlab_choices"]
    command += ["--include_path", str(tasks), "--output_path", str(tmp_path), "--log_samples"]
    done = subprocess.run(
        command, env={**os.environ, **offline}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "headlab_choices" in done.stdout
    [written] = tmp_path.rglob("results_*.json")
    results = json.loads(written.read_text())["results"]["headlab_choices"]
    assert results["acc,none"] == found["headlab"][0]["results"]["headlab_choices"]["acc,none"]
