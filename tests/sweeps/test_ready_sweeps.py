"""The sweep files of the repository: each resolves whole, says its command, and matches what it says it matches."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from headlab import heads, models, sweeps
from headlab.data import open_dataset

FOLDER = Path(__file__).parents[2] / "configs" / "sweeps"
FILES = sorted(FOLDER.glob("*.py"))
VARIANTS = [
    *[(path, text) for path in FILES for text in ("", ":tiny")],
    (FOLDER / "tied_vs_untied.py", ":matched"),
    (FOLDER / "tied_vs_untied.py", ":matched,tiny"),
]
SHARE = 0.005  # the tolerance that the files state


def counted(config, token_counts=None):
    """Parameters of the whole model, by building it."""
    found = {}

    def build():
        model = models.build(config, config.data.vocab_size, token_counts=token_counts)
        found.update(models.count_parameters(model))
        found["flops"] = model.head.cost("training", token_counts).flops_per_token
        return models.split(model)[1]

    jax.eval_shape(build)
    return found


@functools.cache
def loaded(path, text, overrides=()):
    return sweeps.plan(f"{path}{text}", overrides)


@pytest.mark.parametrize(
    ("path", "text"), VARIANTS, ids=lambda value: getattr(value, "stem", value)
)
def test_every_ready_sweep_resolves(path, text):
    plan = loaded(path, text)
    assert len({point.name for point in plan.points}) == len(plan.points) > 1
    assert plan.sweep.question.endswith("?")
    assert plan.sweep.baseline
    tiny = "tiny" in text
    assert all((point.config.train.steps <= 60) == tiny for point in plan.points)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_ready_sweep_says_its_command_points_and_time(path):
    text = path.read_text(encoding="utf-8")
    assert f"headlab sweep --config=configs/sweeps/{path.name} --workdir=" in text
    assert "Points: " in text and "Expected time and losses: " in text
    assert f"{SHARE:.1%}".rstrip("0") in text or "TOLERANCE" not in text


@pytest.mark.parametrize("text", [":matched", ":matched,tiny"])
def test_tied_models_match_the_parameters_of_the_untied_one(text):
    plan = loaded(FOLDER / "tied_vs_untied.py", text)
    sizes = {point.name: counted(point.config) for point in plan.points if point.config.seed == 0}
    untied = sizes.pop("head=untied,seed=0")["total"]
    plain = sizes.pop("head=tied,seed=0")["total"]
    assert (
        untied - plain
        == plan.points[0].config.data.vocab_size * plan.points[0].config.model.d_model
    )
    assert len(sizes) == 2
    assert all(abs(size["total"] - untied) <= SHARE * untied for size in sizes.values())


def test_the_zoo_has_every_head_at_equal_parameters():
    plan = loaded(FOLDER / "head_zoo.py", "")
    configs = [point.config for point in plan.points if point.config.seed == 0]
    sizes = {config.head.name: counted(config)["total"] for config in configs}
    assert set(sizes) == set(heads.names())
    # what the sweep counted, part by part, is what the whole model has
    assert {config.head.name: sweeps.size(config).parameters for config in configs} == sizes
    assert max(sizes.values()) - min(sizes.values()) <= 2 * SHARE * max(sizes.values())


def test_the_zoo_has_every_head_at_equal_operations(small_corpus):
    overrides = (
        ("data.corpus", small_corpus),
        ("data.vocab_size", "300"),
        ("log.progress", "false"),
    )
    plan = loaded(FOLDER / "head_zoo.py", ":flops,tiny", overrides)
    counts = open_dataset(plan.points[0].config.data, progress=False).store.counts
    flops = {}
    for point in plan.points:
        model = point.config.model
        # a block's matrices: four of d², two of d·d_mlp; attention over (T + 1)/2 positions, products and sums
        matrices = 4 * model.d_model**2 + 2 * model.d_model * model.d_mlp
        attention = model.d_model * (point.config.data.seq_len + 1)
        body = 3 * model.n_layers * 2 * (matrices + attention)
        flops[point.config.head.name] = body + counted(point.config, counts)["flops"]
    assert set(flops) == set(heads.names())
    assert np.ptp(list(flops.values())) <= 2 * SHARE * max(flops.values())
