"""The package as a whole."""

import subprocess
import sys


def test_analysis_never_imports_training():
    program = "import headlab.analysis, sys; print([m for m in sys.modules if m.startswith('headlab.training')])"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
