"""Promises of the parts of the page: thinned curves look the same, spectra and samples are read or named."""

import itertools
import json

import numpy as np
import pytest
from synthetic_runs import write_run

from headlab.sweeps.page.curves import FIRST_KEPT, points_per_run, thinned
from headlab.sweeps.page.extras import samples, spectra
from headlab.sweeps.page.markup import json_block
from headlab.sweeps.results import collect


@pytest.mark.parametrize("n", [1, 2, 299, 300])
def test_a_short_curve_stays_as_it_is(n):
    steps, values = np.arange(n), np.random.default_rng(0).normal(size=n)
    assert thinned(steps, values, 300) == (steps, values)


@pytest.mark.parametrize(("n", "limit"), [(301, 300), (6000, 1000), (100_000, 300)])
def test_a_thinned_curve_keeps_its_ends_its_start_and_the_extremes_of_every_stretch(n, limit):
    steps = np.arange(1, n + 1) * 10
    values = np.random.default_rng(n).normal(size=n)
    values[n // 2] = 100.0  # one spike
    kept_steps, kept = thinned(steps, values, limit)
    assert len(kept) <= limit
    assert (np.diff(kept_steps) > 0).all()
    by_step = dict(zip(steps, values, strict=True))
    assert [by_step[step] for step in kept_steps] == list(kept)
    assert list(kept_steps[:FIRST_KEPT]) == list(steps[:FIRST_KEPT])
    assert kept_steps[-1] == steps[-1]
    assert kept.max() == 100.0
    # wherever a reader looks, the range of what is drawn is the range of what there is
    edges = np.linspace(FIRST_KEPT, n, (limit - FIRST_KEPT - 1) // 2 + 1).astype(int)
    for low, high in itertools.pairwise(edges):
        here = kept[(kept_steps >= steps[low]) & (kept_steps <= steps[high - 1])]
        assert here.min() == values[low:high].min()
        assert here.max() == values[low:high].max()


def test_many_runs_share_the_points_of_a_page():
    assert points_per_run(20) == 1000
    assert points_per_run(100) == 500
    assert points_per_run(10_000) == 300


@pytest.mark.parametrize(
    "content",
    [
        {"singular_values": [1.0, 3.0, 2.0]},
        {"spectrum": [3, 2, 1]},
        {"log_probs": {"singular_values": [3.0, 2.0, 1.0]}, "rank": 2},
        [{"kind": "logits", "spectrum": [3.0, 2.0, 1.0]}],
    ],
)
def test_a_spectrum_is_found_wherever_it_stands(tmp_path, content):
    path = write_run(tmp_path / "a")
    (path / "rank.json").write_text(json.dumps(content))
    [found], problems = spectra(collect(path).runs)
    assert (found.run, found.numbers, found.values) == ("a", [1, 2, 3], [3.0, 2.0, 1.0])
    assert problems == []


def test_a_long_spectrum_keeps_its_start_and_its_end(tmp_path):
    path = write_run(tmp_path / "a")
    (path / "rank.json").write_text(json.dumps({"spectrum": list(range(8192, 0, -1))}))
    [found], _ = spectra(collect(path).runs)
    assert found.numbers[:200] == list(range(1, 201))
    assert found.numbers[-1] == 8192
    assert len(found.numbers) <= 402


@pytest.mark.parametrize("content", ["{", "{}", '{"spectrum": [1, "a"]}', '{"spectrum": [1, NaN]}'])
def test_a_rank_file_without_a_spectrum_is_named(tmp_path, content):
    path = write_run(tmp_path / "a")
    (path / "rank.json").write_text(content)
    found, [problem] = spectra(collect(path).runs)
    assert found == []
    assert "rank.json" in problem


def test_samples_are_read_from_either_file(tmp_path):
    sample = {"head": "tied", "prompt": "The", "temperature": 0.8, "text": " end"}
    (tmp_path / "samples.json").write_text(json.dumps([sample]))
    (tmp_path / "results.json").write_text(json.dumps({"summary": [], "samples": [sample]}))
    assert samples([tmp_path]) == ([sample, sample], [])


@pytest.mark.parametrize("content", ["[3]", "{", '[{"prompt": "a"}]'])
def test_samples_that_cannot_be_read_are_named(tmp_path, content):
    (tmp_path / "samples.json").write_text(content)
    _, [problem] = samples([tmp_path])
    assert "samples.json" in problem


def test_data_cannot_end_its_element_and_reads_back():
    content = ["</script><script>alert(1)</script>", "<!--", "a & b", "\u2028"]
    block = json_block("data", content)
    inner = block.removeprefix('<script type="application/json" id="data">')
    inner = inner.removesuffix("</script>")
    assert not set(inner) & set("<>&\u2028")
    assert json.loads(inner) == content
