"""Launchers: how a machine is divided among jobs."""

import os

import pytest

from headlab.sweeps.directory import SweepDirectory
from headlab.sweeps.launchers import Local


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
