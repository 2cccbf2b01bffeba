"""What each command says of a command line that is wrong: one paragraph that names the nearest right one."""

import re
import sys
from pathlib import Path

import pytest

from headlab import cli
from headlab.cli.commands import COMMANDS

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "configs" / "tiny.py")
WIDTH = str(ROOT / "configs" / "sweeps" / "width.py")

# (arguments, words of the message), by command. Where nothing else is wrong, a directory that is nowhere is.
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
    "export": [
        (["out"], "required: --workdir"),
        (GIVEN, "required: FOLDER"),
        ([*GIVEN, "out"], "nowhere is not a run"),
        ([*GIVEN, "out", "--layuot=llama"], "did you mean --layout?"),
        ([*GIVEN, "out", "--step=lst"], "--step is 'lst'; it must be last, best"),
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


@pytest.fixture
def said(capsys):
    """The paragraph on stderr, its line breaks undone."""
    return lambda: " ".join(capsys.readouterr().err.split())


def test_every_command_has_a_table_of_what_can_be_wrong():
    own = [command.name for command in COMMANDS if not command.hands_on]
    assert [*WRONG] == own  # the others hand their arguments on to another program


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


def test_the_harness_is_asked_for_where_it_is_not_installed(said, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "headlab.scoring.lm_eval", raising=False)
    assert cli.main(["lm-eval", "ls", "tasks"]) == 2
    assert "pip install 'headlab[lm_eval]'" in said()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_flag_in_the_help_of_a_command_is_known(command, capsys, monkeypatch):
    assert cli.main([command.name, "--help"]) == 0
    shown = capsys.readouterr().out
    listed = re.findall(r"^  (?:-\w.*?, )?(--[a-z-]+)", shown, re.MULTILINE)
    assert len(listed) > 1
    usage = shown.partition("\n\n")[0]
    assert [flag for flag in listed if flag != "--help" and flag not in usage] == []
