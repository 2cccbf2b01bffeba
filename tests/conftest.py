"""What all tests share: eight virtual CPU devices, and caches of the checkout's own.

Compiling is most of the time of the tests. Programs that were compiled once, by whichever process, are read from the
cache; and they are compiled fast, not well, for what most tests say holds of formulas. Tests of what the compiler makes
of a program have the mark `optimised`.
"""

import os
import runpy
from pathlib import Path

import pytest

_DEVICES = "--xla_force_host_platform_device_count"

# Before JAX starts its backend: afterwards neither variable is read.
os.environ["JAX_PLATFORMS"] = "cpu"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()
os.environ.setdefault(
    "HEADLAB_CACHE", str(Path(__file__).resolve().parents[1] / "build" / "test-cache")
)
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(Path(__file__).resolve().parents[1] / "build" / "test-programs"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# The processes that tests start inherit it: their bits are those of this one.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


def pytest_addoption(parser):
    parser.addoption(
        "--head-file",
        action="append",
        default=[],
        metavar="FILE",
        help="a Python file that calls headlab.heads.register(NAME, …) and sets reference_heads.REFERENCES[NAME]: the "
        "tests of all heads run on it, too (-k NAME: on it alone)",
    )


def pytest_configure(config):
    for file in config.getoption("--head-file"):
        runpy.run_path(file)


@pytest.fixture(autouse=True)
def optimised(request):
    """Compiles the programs of a test with the mark `optimised` as users' are."""
    if request.node.get_closest_marker("optimised") is None:
        yield
        return
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", before)
