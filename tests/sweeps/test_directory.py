"""sweep.json: what it records, what may be added, and what is refused."""

import json
import subprocess
import sys

import pytest

from headlab import config as configs
from headlab.errors import UsageError
from headlab.sweeps.directory import SweepDirectory
from headlab.sweeps.states import check_runs

HEADS = 'values("head.name", ["tied", "untied"])'


@pytest.fixture
def directory(tmp_path):
    return SweepDirectory(tmp_path / "sweep_dir")


def recorded(directory, plan):
    plan = directory.check(plan)
    directory.write(plan, ["headlab", "sweep"])
    return directory.record()


def test_the_record_tells_what_the_sweep_is(directory, plan):
    given = plan(HEADS, baseline={"head.name": "tied"})
    record = recorded(directory, given)
    assert record["question"] == "Does it work?"
    assert record["command"] == ["headlab", "sweep"]
    assert record["baseline"] == {"head.name": "tied"}
    assert record["keys"] == ["head.name"]
    assert record["sweep"].endswith("test_sweep.py") and len(record["sha256"]) == 64
    assert [point["name"] for point in record["points"]] == ["head=tied", "head=untied"]
    for point, planned in zip(record["points"], given.points, strict=True):
        assert point["overrides"] == planned.overrides
        values = json.loads(json.dumps(configs.flatten(planned.config)))
        assert {**record["config"], **point["config"]} == values


def test_points_can_be_added_and_left_out_and_stay_recorded(directory, plan):
    recorded(directory, plan('product(values("head.name", ["tied"]), values("seed", [0]))'))
    record = recorded(directory, plan(f'product({HEADS}, values("seed", range(2)))'))
    assert len(record["points"]) == 4
    record = recorded(
        directory, plan('product(values("head.name", ["untied"]), values("seed", [5]))')
    )
    assert len(record["points"]) == 5
    hashes = {point["name"]: point["config_hash"] for point in record["points"]}
    for point in plan(f'product({HEADS}, values("seed", range(2)))').points:
        assert hashes[point.name] == configs.config_hash(point.config)
        (whole,) = [p for p in record["points"] if p["name"] == point.name]
        assert {**record["config"], **whole["config"]} == json.loads(
            json.dumps(configs.flatten(point.config))
        )


def test_a_point_keeps_the_name_that_it_was_recorded_under(directory, plan):
    recorded(directory, plan('values("groups.head.init_scale", [0.5])'))
    more = plan(
        'chain(*(values(f"groups.{group}.init_scale", [0.5]) for group in ("head", "body")))'
    )
    assert more.points[0].name == "groups.head.init_scale=0.5"
    kept = [point.name for point in directory.check(more).points]
    assert kept == ["init_scale=0.5", "groups.body.init_scale=0.5"]


def test_a_changed_point_is_refused_naming_the_keys(directory, plan):
    recorded(directory, plan(HEADS))
    with pytest.raises(
        UsageError, match=r"head=tied.*has changed: train\.steps was 12 and is now 24"
    ):
        directory.check(plan(HEADS, train__steps=24))


def test_how_points_are_carried_out_may_change(directory, plan):
    recorded(directory, plan(HEADS))
    directory.check(plan(HEADS, log__every=3, checkpoint__keep=4))


def test_the_directory_of_another_sweep_is_refused(directory, plan):
    recorded(directory, plan(HEADS))
    with pytest.raises(UsageError, match=r"holds the sweep .*test_sweep\.py, not .*other\.py"):
        directory.check(plan('values("seed", [0])', name="other.py"))


@pytest.mark.parametrize(
    ("name", "message"),
    [("config.json", r"is a run, not a sweep"), ("notes.txt", r"not empty.*holds notes\.txt")],
)
def test_a_directory_of_something_else_is_refused(directory, plan, name, message):
    directory.path.mkdir()
    (directory.path / name).write_text("{}")
    with pytest.raises(UsageError, match=message):
        directory.check(plan(HEADS))


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is damaged"), ('{"format": 99}', r"has format 99.*newer")]
)
def test_a_record_that_cannot_be_read_is_refused(directory, plan, text, message):
    directory.path.mkdir()
    directory.record_path.write_text(text)
    with pytest.raises(UsageError, match=message):
        directory.check(plan(HEADS))


def test_a_run_of_another_config_where_a_point_goes_is_refused_naming_the_keys(directory, plan):
    (point, _) = plan(HEADS).points
    path = directory.run_path(point.name)
    path.mkdir(parents=True)
    other = configs.replace(point.config, {"model.d_model": 8})
    (path / "config.json").write_text(configs.to_json(other))
    with pytest.raises(
        UsageError, match=r"point head=tied: .*model\.d_model is 8 in the run and 16"
    ):
        check_runs(directory, plan(HEADS).points)
    (path / "config.json").rename(path / "something")
    with pytest.raises(
        UsageError, match=r"head=tied is not empty and not a run: it holds something"
    ):
        check_runs(directory, plan(HEADS).points)


def test_a_second_process_is_refused_and_a_dead_one_lets_go(directory):
    program = (
        "import sys; from headlab.sweeps.directory import SweepDirectory\n"
        f"with SweepDirectory({str(directory.path)!r}).lock(): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        with (
            pytest.raises(UsageError, match=rf"being run by process {holder.pid} on"),
            directory.lock(),
        ):
            pass
        holder.kill()
    with directory.lock(), directory.sign_of_life() as alive:
        assert alive.path
