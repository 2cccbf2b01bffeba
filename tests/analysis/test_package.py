"""The package as a whole."""

import ast
from pathlib import Path

from headlab import analysis


def _imported(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return names | {f"{node.module}.{alias.name}" for node in froms for alias in node.names}


def test_analysis_never_imports_training():
    files = list(Path(analysis.__file__).parent.glob("*.py"))
    assert len(files) > 5
    for file in files:
        assert not [name for name in _imported(file) if name.startswith("headlab.training")], file
