"""Launchers: how a machine is divided among jobs, and what Slurm is asked for."""

import os

import pytest

from headlab.errors import HeadlabError
from headlab.sweeps import SlurmOptions
from headlab.sweeps.directory import SweepDirectory
from headlab.sweeps.job import Job
from headlab.sweeps.launchers import Local, Slurm


@pytest.fixture
def directory(tmp_path):
    return SweepDirectory(tmp_path / "sweep")


def test_jobs_share_the_cores_and_none_has_none(directory, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4}, raising=False)
    shares = [Local(directory, 2).share(slot)["cores"] for slot in range(2)]
    assert shares == [(0, 2, 4), (1, 3)]
    crowded = [Local(directory, 7).share(slot)["cores"] for slot in range(7)]
    assert {core for share in crowded for core in share} == {0, 1, 2, 3, 4}
    assert all(crowded)
    assert Local(directory, 1).share(0)["cores"] is None


def test_jobs_share_the_gpus_and_their_memory(directory, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)

    def shares(jobs):
        environs = [dict(Local(directory, jobs).share(slot)["environ"]) for slot in range(jobs)]
        return [
            (e["CUDA_VISIBLE_DEVICES"], e.get("XLA_PYTHON_CLIENT_MEM_FRACTION")) for e in environs
        ]

    assert shares(1) == [("4,5,6", None)]  # all, where submitit would show none
    assert shares(2) == [("4,6", None), ("5", None)]
    assert shares(4) == [("4", "0.450"), ("5", "0.450"), ("6", "0.450"), ("4", "0.450")]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Commands in place of Slurm's: sbatch keeps the script that it is given, or refuses."""

    def install(sbatch):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name, text in (("sbatch", sbatch), ("srun", "exit 0")):
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    return install


def test_slurm_gets_one_array_with_what_each_job_needs(directory, slurm, tmp_path):
    slurm(f'cp "$1" {tmp_path}/script; echo Submitted batch job 7')
    options = SlurmOptions(partition="gpu", gpus=1, cpus=4, memory_gb=16, minutes=90)
    launcher = Slurm(directory, 1, options)
    started = launcher.start([(name, Job(str(directory.path), ((name, "{}"),))) for name in "ab"])
    assert [job.job_id for job in started] == ["7_0", "7_1"]
    script = (tmp_path / "script").read_text()
    for line in (
        "--array=0-1%1",
        "--partition=gpu",
        "--gpus-per-node=1",
        "--cpus-per-task=4",
        "--mem=16GB",
        "--time=90",
    ):
        assert f"#SBATCH {line}\n" in script
    assert launcher.found("7_1").job_id == "7_1"


def test_jobs_that_slurm_refuses_are_an_error_with_its_words(directory, slurm):
    slurm("echo sbatch: error: invalid partition specified: gpuu >&2; exit 1")
    launcher = Slurm(directory, 1, SlurmOptions(partition="gpuu"))
    with pytest.raises(HeadlabError, match=r"sbatch refused the jobs.*Nothing was started"):
        launcher.start([("a", Job(str(directory.path), (("a", "{}"),)))])
