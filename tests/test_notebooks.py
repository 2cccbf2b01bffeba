"""The notebooks run from first cell to last, and what is committed of them is what a run shows."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
FIGURES = {"head_anatomy": 1, "logit_rank": 3, "new_head": 1, "tied_vs_untied": 2}
A_MACHINES_PATH = r"/(?:tmp|home|work|root|Users|var)/"
MOST_BYTES = 500_000


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("notebooks")


def read(name):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def figures(notebook):
    """The number of figures that each code cell shows."""
    return [
        sum("image/png" in output.get("data", {}) for output in cell.outputs)
        for cell in code_cells(notebook)
    ]


def test_every_notebook_is_listed_here():
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == set(FIGURES)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_a_notebook_runs_and_shows_the_figures_that_are_committed(name, cache, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("HEADLAB_CACHE", str(cache))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for ours in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS"):  # a reader's kernel has neither
        monkeypatch.delenv(ours)
    committed = read(name)
    executed = NotebookClient(  # in memory: the file stays as it is
        read(name),
        timeout=1200,  # seconds a cell: a hang, not a busy machine
        kernel_name="python3",
        resources={"metadata": {"path": str(ROOT / "notebooks")}},
    ).execute()
    assert figures(executed) == figures(committed)


@pytest.mark.parametrize("name", FIGURES)
def test_a_committed_notebook_was_run_in_order_and_without_complaint(name):
    notebook = read(name)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert sum(figures(notebook)) == FIGURES[name]


@pytest.mark.parametrize("name", FIGURES)
def test_a_committed_notebook_is_small_and_names_no_place_of_a_machine(name):
    text = (ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8")
    assert len(text.encode()) < MOST_BYTES
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("image/png", None)  # base64 has slashes, too
    assert not re.findall(A_MACHINES_PATH, json.dumps(notebook))
