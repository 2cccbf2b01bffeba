"""What all tests share: eight virtual CPU devices, caches of the checkout's own, and a small corpus.

Compiling is most of the time of the tests. Programs that were compiled once, by whichever process, are read from the
cache; and they are compiled fast, not well, for what most tests say holds of formulas. Tests of what the compiler makes
of a program have the mark `optimised`.
"""

import functools
import gc
import importlib.metadata
import os
import random
import runpy
from pathlib import Path

import pytest

_DEVICES = "--xla_force_host_platform_device_count"

# Before JAX starts its backend: afterwards neither variable is read.
os.environ["JAX_PLATFORMS"] = "cpu"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()
# The emitters of fusions by way of MLIR take half the time of compiling. A JAX without the flag would refuse it.
_EMITTERS = "xla_cpu_use_fusion_emitters"
_WITHOUT_EMITTERS = importlib.metadata.version("jaxlib").startswith("0.10.")
if _WITHOUT_EMITTERS and _EMITTERS not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += f" --{_EMITTERS}=false"
os.environ.setdefault(
    "HEADLAB_CACHE", str(Path(__file__).resolve().parents[1] / "build" / "test-cache")
)
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(Path(__file__).resolve().parents[1] / "build" / "test-programs"),
)
# Even of a single addition: reading it takes a sixth of the time of compiling it.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Inherited by workers and by what tests start: threads that wait for each other take the time of other workers.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
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


def pytest_collection_modifyitems(items):
    """Optimised tests after the others: what changes between the two kinds clears all that was compiled."""
    items.sort(key=lambda item: item.get_closest_marker("optimised") is not None)


def pytest_collection_finish():
    """What collecting made stays to the end: the collector of garbage need not look at it again and again."""
    gc.collect()
    gc.freeze()


_compiling = {"optimised": False}


@pytest.fixture(autouse=True)
def optimised(request):
    """Compiles the programs of a test with the mark `optimised` as users' are.

    What was compiled the other way is forgotten, since only the cache on disk tells the two kinds apart.
    """
    wanted = request.node.get_closest_marker("optimised") is not None
    if wanted == _compiling["optimised"]:
        return
    import jax

    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", not wanted)
    if _WITHOUT_EMITTERS:
        _hook_compile_options()
    _compiling["optimised"] = wanted


@functools.cache
def _hook_compile_options():
    """Lets programs have the emitters where `optimised` asks for them: JAX has no option of that kind for all."""
    from jax._src import compiler

    plain = compiler.get_compile_options

    def options(*arguments, env_options_overrides=None, **keywords):
        overrides = dict(env_options_overrides or {})
        if _compiling["optimised"]:
            overrides.setdefault(_EMITTERS, True)
        return plain(*arguments, env_options_overrides=overrides, **keywords)

    compiler.get_compile_options = options


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory):
    """The name of a `text:` corpus of 800 kB or so, with words of Zipf-like frequency."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(500)]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    with path.open("w") as file:
        for _ in range(300):
            file.write(" ".join(rng.choices(words, weights, k=rng.randint(200, 700))) + ".\n\n")
    return f"text:{path}"
