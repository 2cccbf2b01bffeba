"""The command line: thin, quick to answer, and one paragraph for whatever goes wrong."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headlab import cli, training
from headlab.cli.commands import COMMANDS
from headlab.errors import HeadlabError

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "configs" / "tiny.py")
WIDTH = str(ROOT / "configs" / "sweeps" / "width.py")
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


# What can be wrong in a command line of each command: where it is right otherwise, a directory that is nowhere would be
# the error. (arguments, words of the message); a new command needs a row of its own.
GIVEN = ["--workdir=nowhere"]
WRONG = {
    "train": [
        ([f"--config={TINY}"], "required: --workdir"),
        (["--workdir=a"], "required: --config"),
        ([f"--config={TINY}", "--workdr=a"], "did you mean --workdir?"),
        ([f"--config={TINY[:-3]}s.py", "--workdir=a"], "did you mean " + TINY),
        ([f"--config={TINY}", "--workdir="], "argument --workdir: the name is empty"),
        ([f"--config={TINY}", f"--workdir={TINY}"], "is a file, or below one"),
        ([f"--config={TINY}", f"--workdir={TINY}/a"], "is a file, or below one"),
        ([f"--config={TINY}", f"--config={TINY}", "--workdir=a"], "--config is given twice"),
        (
            [f"--config={TINY}", "--workdir=a", "--config.seed=1", "--config.seed=2"],
            "--config.seed is given twice, as '1' and '2'",
        ),
        ([f"--config={TINY}", "--workdir=a", "--config.head.nam=tied"], "mean head.name?"),
        ([f"--config={TINY}", "--workdir=a", "--config.head.name=teid"], "did you mean tied?"),
        ([f"--config={TINY}", "--workdir=a", "--mesh=4"], "did you mean --config.mesh.data?"),
        (
            [f"--config={TINY}", "--workdir=a", "--config.mesh.vocab=64"],
            "there are 8 devices (cpu): it needs 64 devices",
        ),
        ([f"--config={TINY}", "--workdir=a", "--processes=2"], "add --distributed"),
        (
            [f"--config={TINY}", "--workdir=a", "--distributed", "--processes=2", "--process-id=2"],
            "the process id is 2; it must be in 0 … 1",
        ),
    ],
    "sweep": [
        ([f"--config={WIDTH}"], "required: --workdir"),
        ([f"--config={WIDTH}", "--workdir=a", "--job=2"], "did you mean --jobs?"),
        ([f"--config={WIDTH}", "--workdir=a", "--jobs=0"], "'0' is not an integer of at least 1"),
        ([f"--config={WIDTH[:-3]}s.py", "--workdir=a"], "did you mean " + WIDTH),
        ([f"--config={WIDTH}:tny", "--workdir=a"], "did you mean 'tiny'?"),
        ([f"--config={TINY}", "--workdir=a"], "has no function get_sweep()"),
        ([f"--config={WIDTH}", "--workdir=a", "--launcher=slrum"], "did you mean slurm?"),
        ([f"--config={WIDTH}", "--workdir=a", "--partition=gpu"], "add --launcher=slurm"),
        (
            [f"--config={WIDTH}:tiny", "--workdir=a", "--config.train.stpes=5"],
            "did you mean train.steps?",
        ),
        (
            [f"--config={WIDTH}:tiny", "--workdir=a", "--config.model.d_model=5"],
            "the points of the sweep set model.d_model themselves",
        ),
    ],
    "evaluate": [
        ([], "required: --workdir"),
        (["--workdr=a"], "did you mean --workdir?"),
        (GIVEN, "nowhere is not a run"),
        ([*GIVEN, "--split=tset"], "did you mean test?"),
        ([*GIVEN, "--batch-size=0"], "'0' is not an integer of at least 1"),
    ],
    "compare": [
        ([], "required: RUNS"),
        (["nowhere"], "nowhere is no run and holds none"),
        ([TINY], "tiny.py is no run and holds none"),
        ([""], "argument RUNS: the name is empty"),
        (["nowhere", "--basline=tied"], "did you mean --baseline?"),
        (["nowhere", "--metric=los"], "did you mean loss?"),
        (["nowhere", "--format=csvv"], "did you mean csv?"),
        (["nowhere", "--sort=parameter"], "did you mean parameters?"),
    ],
    "report": [
        ([], "required: WORKDIR"),
        (["nowhere"], "nowhere is no run and holds none"),
        (["nowhere", "--titel=x"], "did you mean --title?"),
        (["nowhere", "--outptu=x"], "did you mean --output?"),
        (["nowhere", "--output=x"], "nowhere is no run"),
        (["nowhere", "--metric=los"], "did you mean loss?"),
    ],
    "rank": [
        ([], "required: --workdir"),
        (GIVEN, "nowhere is not a run"),
        ([*GIVEN, "--split=tset"], "did you mean test?"),
        ([*GIVEN, "--step=lst"], "--step is 'lst'; it must be last, best"),
        ([*GIVEN, "--contexts=0"], "'0' is not an integer of at least 1"),
        ([*GIVEN, "--sketsh=9"], "did you mean --sketch?"),
    ],
    "score": [
        ([TINY], "required: --workdir"),
        (GIVEN, "required: FILE"),
        ([*GIVEN, TINY], "nowhere is not a run"),
        ([*GIVEN, "nowhere.txt"], "cannot read nowhere.txt"),
        ([*GIVEN, TINY, "--stirde=4"], "did you mean --stride?"),
        ([*GIVEN, TINY, "--top=x"], "argument --top: invalid int value: 'x'"),
    ],
    "generate": [
        (["The sea"], "required: --workdir"),
        (GIVEN, "required: PROMPT"),
        ([*GIVEN, "The sea"], "nowhere is not a run"),
        ([*GIVEN, "The", "sea"], "no place for 'sea'; a text with spaces stands in quotes"),
        ([*GIVEN, "The sea", "--temprature=0"], "did you mean --temperature?"),
        ([*GIVEN, "The sea", "--temperature=hot"], "invalid float value: 'hot'"),
        ([*GIVEN, "The sea", "--temperature=0", "--top-p=0.5"], "--top-p would change nothing"),
        ([*GIVEN, "The sea", "--temperature=0", "--samples=3"], "--samples would change nothing"),
        ([*GIVEN, "The sea", "--samples=2", "--stream"], "leave --samples out"),
        ([*GIVEN, "The sea", "--stop=a", "--stop=b"], "nowhere is not a run"),
    ],
    "lm-eval": [],  # hands its arguments on
    "export": [
        (["folder"], "required: --workdir"),
        (GIVEN, "required: FOLDER"),
        ([*GIVEN, "folder"], "nowhere is not a run"),
        ([*GIVEN, "folder", "--layuot=llama"], "did you mean --layout?"),
        ([*GIVEN, "folder", "--layout=lama"], "did you mean llama?"),
        ([*GIVEN, "folder", "--step=lst"], "--step is 'lst'; it must be last, best"),
        ([*GIVEN, ""], "argument FOLDER: the name is empty"),
        ([*GIVEN, "folder", "more"], "no place for 'more'"),
    ],
    "cost": [
        ([], "one of the arguments --config --model --hf --all is required"),
        (["--modl=gpt2"], "did you mean --model?"),
        (["--model=gpt3"], "did you mean gpt2?"),
        (["--model=gpt2", "--all"], "not allowed with argument --model"),
        (["--all", "--against=gpt2"], "leave --against out"),
        (["--model=gpt2", "--chip=h10"], "did you mean h100?"),
        (["--model=gpt2", "--dtype=float3"], "did you mean float32?"),
        (["--hf=nowhere"], "nowhere"),
        ([f"--config={TINY[:-3]}s.py"], "did you mean " + TINY),
        ([f"--config={TINY}", "--config.head.nam=tied"], "did you mean head.name?"),
    ],
    "options": [
        (["--had=tied"], "did you mean --head?"),
        (["--head=teid"], "did you mean tied?"),
        (["tied"], "headlab options has no place for 'tied'"),
    ],
}  # fmt: skip


def test_every_command_has_a_table_of_what_can_be_wrong():
    assert [*WRONG] == [command.name for command in COMMANDS]


@pytest.mark.parametrize(
    ("command", "arguments", "expected"),
    [(command, *row) for command, rows in WRONG.items() for row in rows],
)
def test_each_command_says_in_one_paragraph_what_is_wrong_and_starts_nothing(
    command, arguments, expected, said, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    assert cli.main([command, *arguments]) == 2
    message = said()
    assert message.startswith("headlab: error: ")
    assert expected in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["evaluate", "--workdir=runs/tide"],
        ["rank", "--workdir=runs/tide"],
        ["score", "--workdir=runs/tide", "text.txt"],
        ["generate", "--workdir=runs/tide", "The sea"],
        ["compare", "runs/tide"],
        ["report", "runs/tide"],
        ["score", "--workdir=runs/tied", "runs/tied/config.jsn"],
    ],
)
def test_a_run_or_file_that_is_not_there_is_told_from_the_one_most_like_it(
    arguments, said, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "tied").mkdir(parents=True)
    (tmp_path / "runs" / "tied" / "config.json").write_text("{}")
    (tmp_path / "text.txt").write_text("a text")
    assert cli.main(arguments) == 2
    near = "runs/tied/config.json" if "config" in arguments[-1] else "runs/tied"
    assert f"id you mean {near}?" in said()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_flag_in_the_help_of_a_command_is_known(command, capsys, monkeypatch):
    assert cli.main([command.name, "--help"]) == 0
    shown = capsys.readouterr().out
    listed = re.findall(r"^  (?:-\w.*?, )?(--[a-z-]+)", shown, re.MULTILINE)
    assert len(listed) > 1
    usage = shown.partition("\n\n")[0]
    assert [flag for flag in listed if flag != "--help" and flag not in usage] == []


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
