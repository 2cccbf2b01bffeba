"""Names of points: readable, safe for a file system, stable."""

import re

import pytest

from headlab.sweeps.names import names


@pytest.mark.parametrize(
    ("point", "name"),
    [
        ({"head.name": "tied", "seed": 0}, "head=tied,seed=0"),
        ({"optimizer.peak_rate": 1e-3}, "peak_rate=0.001"),
        ({"head.cutoffs": (100, 200)}, "cutoffs=(100,200)"),
        ({"head.untie_at": None, "model.bias": True}, "untie_at=none,bias=true"),
        ({"data.corpus": "text:a b/*.txt"}, "corpus=text-a-b-.txt"),
        ({}, "base"),
    ],
)
def test_a_point_is_named_by_what_it_sets(point, name):
    assert names([point]) == [name]


def test_keys_whose_last_parts_are_alike_are_named_in_full():
    found = names([{"train.batch_size": 4, "eval.batch_size": 8, "seed": 0}])
    assert found == ["train.batch_size=4,eval.batch_size=8,seed=0"]


def test_more_points_do_not_change_the_names_of_those_there_were():
    before = [{"head.name": "tied", "seed": 0}]
    after = [*before, {"head.name": "tied", "seed": 1}, {"head.name": "untied", "seed": 0}]
    assert names(after)[0] == names(before)[0]


def test_names_are_safe_and_long_ones_stay_apart():
    long = [{"data.corpus": "text:" + "x" * 300 + end} for end in ("1", "2")]
    found = names([*long, {"data.corpus": "../../etc"}])
    assert len(set(found)) == 3
    assert all(re.fullmatch(r"[\w.,=+()-]{1,120}", name, re.ASCII) for name in found)
    assert all("/" not in name and name not in (".", "..") for name in found)
