"""The reference of headlab's public names, one HTML page a module, from their docstrings; needs no network.

`python -m docs.api DIR` writes it, and fails where a public name or an annotation cannot be resolved.
"""

import importlib
import inspect
import pkgutil
import re
import sys
import typing
import warnings
from pathlib import Path
from types import ModuleType

# What the command line and the packages are made of; all else below `headlab` has a page.
_PRIVATE = ("checkpoint_files", "files", "run_files")
# Modules of packages that are public beside the packages themselves.
_INNER = ("analysis.plots", "sweeps.comparison", "sweeps.page")


def module_names() -> tuple[str, ...]:
    """The public modules, by full name."""
    import headlab

    found = [m.name for m in pkgutil.iter_modules(headlab.__path__) if m.name not in _PRIVATE]
    return ("headlab", *(f"headlab.{name}" for name in sorted([*found, *_INNER])))


def public_names(module: ModuleType) -> list[str]:
    """What a module offers: its `__all__`, or what it defines itself without a leading underscore."""
    own = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    return list(getattr(module, "__all__", own))


def build(directory: Path, names: typing.Sequence[str] = ()) -> None:
    """Writes the pages of the named modules, all public ones by default, an index and a search index."""
    import pdoc.doc
    import pdoc.render

    _shorten_array_types()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module=r"pdoc\b")
        modules = {}
        for name in names or module_names():
            _make_readable(importlib.import_module(name))
            modules[name] = pdoc.doc.Module.from_name(name)
        pdoc.render.configure(docformat="google", show_source=False)
        for name, module in modules.items():
            page = directory / f"{name.replace('.', '/')}.html"
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(pdoc.render.html_module(module, modules), encoding="utf-8")
        (directory / "index.html").write_text(pdoc.render.html_index(modules), encoding="utf-8")
        (directory / "search.js").write_text(pdoc.render.search_index(modules), encoding="utf-8")


def _shorten_array_types() -> None:
    """Lets signatures say Float[Array, 'tokens d_model'], without the modules; before headlab is imported."""
    import jax

    typing.GENERATING_DOCUMENTATION = "headlab"  # type: ignore[attr-defined]  # jaxtyping reads it
    jax.Array.__module__ = "builtins"


def _make_readable(module: ModuleType) -> None:
    """Shows pdoc what a module imports later, functions behind JAX's wrappers, and comments on fields."""
    for name in public_names(module):
        value = getattr(module, name)
        if not inspect.isclass(value) and not inspect.isfunction(value) and callable(value):
            value = getattr(value, "__wrapped__", value)
        setattr(module, name, value)
        if inspect.isclass(value) and hasattr(value, "_fields"):
            _describe_fields(value)


def _describe_fields(cls: typing.Any) -> None:
    """Gives the fields of a named tuple their types, and the comments on their lines as docstrings."""
    import jaxtyping

    source = inspect.getsource(cls)
    cls.__new__.__annotations__ = typing.get_type_hints(cls, localns=dict(vars(jaxtyping)))
    for field in cls._fields:
        comment = re.search(rf"^    {field}: [^#\n]*#\s*(.*)$", source, re.MULTILINE)
        getattr(cls, field).__doc__ = comment[1] if comment else ""
    cls.__new__.__doc__ = ""


if __name__ == "__main__":
    build(Path(sys.argv[1]), sys.argv[2:])
