"""The command line: thin, quick to answer, and one paragraph for whatever goes wrong."""

import errno
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from headlab import cli, training
from headlab.cli import entry
from headlab.cli.commands import COMMANDS
from headlab.errors import HeadlabError

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TINY = str(ROOT / "configs" / "tiny.py")
HEAVY = ("jax", "flax", "optax", "orbax", "tensorflow_datasets", "ml_collections", "numpy", "rich")


def headlab(*arguments, stdout=subprocess.PIPE):
    """The command in a process of its own, which reports the heavy modules it imported."""
    program = (
        "import sys; from headlab.cli import main; code = main(); "
        f"imported = [name for name in {HEAVY!r} if name in sys.modules]; "
        "print('imported', *imported, file=sys.stderr); "
        "sys.exit(code)"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": "80"},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


@pytest.fixture
def trained(monkeypatch):
    """What `training.train` was called with, in place of training."""
    calls = []
    monkeypatch.setattr(
        training, "train", lambda *arguments: calls.append(arguments) or {}, raising=False
    )
    return calls


@pytest.fixture
def failing(monkeypatch):
    """Makes `training.train` raise an exception."""

    def fail(error):
        def train(config, workdir):
            raise error

        monkeypatch.setattr(training, "train", train, raising=False)

    return fail


@pytest.fixture
def said(capsys):
    """The paragraph on stderr, its line breaks undone."""
    return lambda: " ".join(capsys.readouterr().err.split())


# --------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("command", [(), *[(command.name,) for command in COMMANDS]])
def test_help_has_examples_and_imports_nothing_heavy(command):
    done = headlab(*command, "--help")
    assert done.returncode == 0
    assert "examples:\n  headlab " in done.stdout
    assert done.stderr.split() == ["imported"]


def shell_commands(text):
    """The arguments of every line of a shell that calls headlab."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip().startswith("headlab "):
            words = shlex.split(line.strip(), comments=True)
            yield list(itertools.takewhile(lambda word: word not in (">", "&"), words))[1:]


EXAMPLES = [
    *(arguments for command in COMMANDS for arguments in shell_commands(command.examples)),
    *shell_commands("".join(re.findall(r"^```\n(.*?)^```", README, re.DOTALL | re.MULTILINE))),
]


@pytest.mark.parametrize("arguments", EXAMPLES, ids=" ".join)
def test_the_examples_of_the_help_and_the_readme_are_commands(arguments, monkeypatch, said):
    done = tuple(command._replace(run=lambda options, overrides: 0) for command in COMMANDS)
    monkeypatch.setattr(entry, "COMMANDS", done)
    assert cli.main(arguments) == 0, said()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_each_command_has_a_purpose_in_one_line_and_examples_of_its_own(command):
    assert command.help and "\n" not in command.help
    assert command.description.strip()
    assert command.name in [arguments[0] for arguments in shell_commands(command.examples)]


def test_options_are_listed_one_a_line_without_jax():
    done = headlab("options")
    assert done.returncode == 0
    assert "jax" not in done.stderr.split()
    lines = [line for line in done.stdout.splitlines() if line.startswith("model.d_mlp=none ")]
    assert len(lines) == 1
    assert lines[0].endswith("an integer at least 1, or none")


def test_the_options_of_a_head_are_listed_with_its_name(capsys):
    assert cli.main(["options", "--head=untied"]) == 0
    assert "\nhead.softcap=none " in capsys.readouterr().out


def test_a_reader_who_leaves_early_causes_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = headlab("options", stdout=writer)
    finally:
        os.close(writer)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


# ----------------------------------------------------------------------- what was wrongly asked


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "no command 'trian'; did you mean train?"),
        (["--halp"], "headlab has no --halp; did you mean --help?"),
        (["--workdir=a"], "begin with a command"),
        (["train", "--workdr=a"], "headlab train has no --workdr; did you mean --workdir?"),
        (["train", "--config=a.py"], "--workdir"),
        (["train", "--config=a.py", "--workdir=a", "--config.seed"], "--config.seed=VALUE"),
        (["train", "--config.seed", "--workdir=a"], "--config.seed=VALUE"),
        (
            ["evaluate", "--workdir=a", "--split=tset"],
            "none of validation, test; did you mean test?",
        ),
        (["evaluate", "--workdir=a", "--batch-size=0"], "'0' is not an integer of at least 1"),
        (["evaluate", "--workdir=a", "--jsn"], "did you mean --json?"),
        (["evaluate", "--workdir=a", "--config.seed=1"], "takes no --config.seed"),
        (["evaluate", "--workdir=a", "rest"], "headlab evaluate has no place for 'rest'"),
        (["train", "--config=a.py", "--workdir=a", "-x"], "headlab train has no place for '-x'"),
        (["train", "--config=a.py", "--workdir=a", "--steps=9"], "mean --config.train.steps?"),
        (["compare", "a", "--json", "--csv"], "it has --baseline, --format, --metric, --output"),
    ],
)
def test_a_wrong_command_line_exits_2_with_the_nearest_name(arguments, expected, said):
    assert cli.main(arguments) == 2
    message = said()
    assert message.startswith("headlab: error: ")
    assert expected in message


def test_no_command_shows_help_and_exits_2(capsys):
    assert cli.main([]) == 2
    assert "commands:" in capsys.readouterr().err


def test_an_unknown_option_is_refused_before_anything_starts(tmp_path):
    workdir = tmp_path / "run"
    done = headlab("train", f"--config={TINY}", "--config.train.stpes=3", f"--workdir={workdir}")
    assert done.returncode == 2
    assert "did you mean train.steps?" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not workdir.exists()


def test_a_wrong_type_is_refused_before_anything_starts(trained, said):
    arguments = ["train", f"--config={TINY}", "--config.train.steps=3.5", "--workdir=a"]
    assert cli.main(arguments) == 2
    assert "train.steps='3.5' is not allowed: it must be an integer" in said()
    assert trained == []


# --------------------------------------------------------------------------------------- train


@pytest.mark.parametrize(
    "arguments",
    [
        [f"--config={TINY}", "--config.head.name=untied", "--config.seed=7", "--workdir=a"],
        ["--config", TINY, "--config.head.name", "untied", "--config.seed", "7", "--workdir", "a"],
        [
            "--workdir=a",
            "--config.seed=7",
            "--config.head.name=untied",
            "--config",
            TINY,
            "--debug",
        ],
    ],
)
def test_train_passes_the_resolved_configuration_and_the_directory(arguments, trained):
    assert cli.main(["train", *arguments]) == 0
    [(config, workdir)] = trained
    assert (config.head.name, config.seed, config.model.d_model) == ("untied", 7, 32)
    assert workdir == "a"


def test_the_text_of_an_override_may_hold_anything_and_may_be_empty(trained):
    texts = ["--config.data.corpus=text:/a b/=*.txt", "--config.data.tokenizer="]
    assert cli.main(["train", f"--config={TINY}", *texts, "--workdir=a"]) == 0
    [(config, _)] = trained
    assert config.data.corpus == "text:/a b/=*.txt"
    assert config.data.tokenizer == ""


def test_a_negative_value_may_stand_apart_from_its_key(trained, said):
    assert cli.main(["train", f"--config={TINY}", "--config.seed", "-1", "--workdir=a"]) == 2
    assert "seed=-1 is not allowed" in said()


# ------------------------------------------------------------------------------------ failures


def run(*more):
    return cli.main(["train", f"--config={TINY}", "--workdir=a", *more])


def test_a_failure_is_one_wrapped_paragraph_with_its_exit_code(failing, capsys, monkeypatch):
    class Interrupted(HeadlabError):
        exit_code = 143

    monkeypatch.setenv("COLUMNS", "60")
    path = "/runs/" + "long-name" * 10
    failing(Interrupted(f"stopped at step 12.\n\nResume with\n  --workdir={path} " + "word " * 30))
    assert run() == 143
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("headlab: error: stopped at step 12. Resume with")
    assert f"--workdir={path}" in lines
    assert all(len(line) <= 60 for line in lines if path not in line)


def test_an_unforeseen_failure_is_named_and_points_to_debug(failing, said):
    failing(KeyError("gone"))
    assert run() == 1
    assert said() == (
        "headlab: unexpected failure: KeyError: 'gone'; run again with --debug for the traceback"
    )


def test_debug_shows_the_traceback(failing, said):
    failing(HeadlabError("bad luck"))
    assert run("--debug") == 1
    message = said()
    assert message.startswith("Traceback (most recent call last)")
    assert message.endswith("headlab: error: bad luck")


def _caused_by(error):
    outer = RuntimeError("save failed")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/a/x"),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/runs/a/x"),
        _caused_by(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/a/x")),
        ValueError("RESOURCE_EXHAUSTED: Error writing: No space left on device"),
    ],
)
def test_a_full_disk_is_said_in_clear_words(error, failing, said):
    failing(error)
    assert run() == 1
    message = said()
    assert "the disk is full" in message
    assert "free some space" in message
    if "RESOURCE" not in str(error):
        assert "/runs/a/x" in message


def test_an_interrupt_outside_training_exits_as_a_shell_expects(failing, said):
    failing(KeyboardInterrupt())
    assert run() == 130
    assert said().startswith("headlab: interrupted")


# ------------------------------------------------------------------------------------ evaluate


@pytest.fixture
def evaluated(monkeypatch):
    calls = []

    def evaluate_run(workdir, *, split, batch_size):
        calls.append((workdir, split, batch_size))
        return {"loss": 3.25, "tokens": 123456, "by_band": {"rare": 7.5}, "note": "[bold]"}

    monkeypatch.setattr(training, "evaluate_run", evaluate_run, raising=False)
    return calls


def test_evaluate_reads_validation_and_prints_a_table(evaluated, capsys):
    assert cli.main(["evaluate", "--workdir=runs/a"]) == 0
    assert evaluated == [("runs/a", "validation", None)]
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["loss", "3.250000"] in table
    assert ["tokens", "123,456"] in table
    assert ["by", "band", "rare", "7.500000"] in table
    assert ["note", "[bold]"] in table


def test_evaluate_prints_json_alone_when_asked(evaluated, capsys):
    arguments = ["evaluate", "--workdir=runs/a", "--split", "test", "--batch-size=7", "--json"]
    assert cli.main(arguments) == 0
    assert evaluated == [("runs/a", "test", 7)]
    assert json.loads(capsys.readouterr().out)["by_band"] == {"rare": 7.5}
