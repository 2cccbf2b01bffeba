"""The reference made of docstrings: every public name has one, and what it refers to exists."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import api

ROOT = Path(__file__).parents[1]
MODULES = api.module_names()


def documented(name):
    """(qualified name, object) of the functions, classes and methods that a module's page shows."""
    module = importlib.import_module(name)
    for public in api.public_names(module):
        value = getattr(module, public)
        if not (
            inspect.isclass(value) or inspect.isroutine(value) or hasattr(value, "__wrapped__")
        ):
            continue
        yield f"{name}.{public}", value
        if not inspect.isclass(value):
            continue
        for attribute, defined in vars(value).items():
            is_code = isinstance(defined, property | classmethod | staticmethod)
            if not attribute.startswith("_") and (is_code or inspect.isfunction(defined)):
                yield f"{name}.{public}.{attribute}", getattr(value, attribute)


def docstring(value):
    text = inspect.getdoc(value) or ""
    # a named tuple that says nothing is given its signature
    return "" if text.startswith(f"{getattr(value, '__name__', '')}(") else text


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_has_a_docstring(name):
    assert docstring(importlib.import_module(name))
    found = dict(documented(name))
    assert [key for key, value in found.items() if not docstring(value)] == []


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_exists(name):
    module = importlib.import_module(name)
    assert [key for key in api.public_names(module) if not hasattr(module, key)] == []


@pytest.mark.parametrize("name", MODULES)
def test_what_docstrings_refer_to_in_headlab_exists(name):
    texts = [docstring(value) for _, value in documented(name)]
    texts.append(docstring(importlib.import_module(name)))
    named = {dotted for text in texts for dotted in re.findall(r"\bheadlab(?:\.\w+)+", text)}
    assert [dotted for dotted in sorted(named) if not exists(dotted)] == []


def exists(dotted):
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            found = getattr(found, attribute, None)
        return found is not None
    return False


def test_pages_show_shapes_in_signatures_and_start_no_device(tmp_path):
    program = (
        "import sys; from pathlib import Path; from docs.api import build; "
        "build(Path(sys.argv[1]), ['headlab.ops', 'headlab.data']); "
        "from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout == "False\n"
    assert {path.name for path in tmp_path.rglob("*.html")} == {
        "index.html",
        "ops.html",
        "data.html",
    }
    ops = without_tags(tmp_path / "headlab" / "ops.html")
    assert "h: Float[Array, '*batch d_model']" in ops
    assert "x: Float[Array, '*tokens d_in']" in ops  # of a function with its own gradient
    assert "jaxlib" not in ops and "jaxtyping." not in ops
    data = without_tags(tmp_path / "headlab" / "data.html")
    assert "inputs: Int32[ndarray, 'batch length']" in data
    assert "ForwardRef" not in data and "Alias for field" not in data


def without_tags(page):
    text = re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8"))
    return text.replace("&#39;", "'").replace("&quot;", '"')
