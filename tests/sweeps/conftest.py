"""Sweep files for tests: points over a model that trains in a second."""

import pytest

from headlab import sweeps

OVERRIDES = {
    "data.vocab_size": 300,
    "data.seq_len": 16,
    "model.d_model": 16,
    "model.n_layers": 1,
    "train.steps": 12,
    "train.batch_size": 4,
    "eval.every": 6,
    "eval.batch_size": 512,
    "checkpoint.every": 3,
    "log.every": 1,
    "log.progress": False,
    "log.tensorboard": False,
}

FILE = """
from headlab.sweeps import *

def get_sweep(text=""):
    return Sweep(
        base="configs/tiny.py",
        points={points},
        question="Does it work?",
        overrides={overrides!r},
        baseline={baseline!r},
    )
"""


@pytest.fixture
def sweep_file(tmp_path):
    """Writes a sweep file whose points are an expression, and returns its path."""

    def write(points, *, name="test_sweep.py", baseline=(), **overrides):
        dotted = {key.replace("__", "."): value for key, value in overrides.items()}
        text = FILE.format(
            points=points, overrides={**OVERRIDES, **dotted}, baseline=dict(baseline)
        )
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def plan(sweep_file, small_corpus):
    """The plan of points that are an expression, on the small corpus."""

    def load(points, **overrides):
        return sweeps.plan(sweep_file(points, **overrides), [("data.corpus", small_corpus)])

    return load
