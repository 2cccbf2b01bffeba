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
# Half the time of compiling: the emitters of fusions by way of MLIR, and cutting a small program up for many threads.
# {flag: (here, where programs are optimised)}. A JAX that does not know a flag would refuse it.
_FLAGS = {
    "xla_cpu_use_fusion_emitters": ("false", True),
    "xla_cpu_parallel_codegen_split_count": ("1", 32),
}
_HAS_FLAGS = importlib.metadata.version("jaxlib").startswith("0.10.")
for _flag, (_here, _) in _FLAGS.items() if _HAS_FLAGS else ():
    if _flag not in os.environ["XLA_FLAGS"]:
        os.environ["XLA_FLAGS"] += f" --{_flag}={_here}"
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


# Long and of few tests: at the end, one worker would wait for another. Then short ones fill the gaps.
_EARLY = ("tests/test_notebooks.py",)
_LATE = ("headlab", "tests/config", "tests/costs", "tests/data")
_MOST_PROGRAMS = 1000  # that are kept; each may take a megabyte


def pytest_collection_modifyitems(items):
    """Tests of one file one after another and in one process, for they share what was made and compiled.

    So do all `optimised` tests: what changes between the two kinds clears all that was compiled.
    """
    for item in items:
        optimised = item.get_closest_marker("optimised") is not None
        if optimised or item.get_closest_marker("xdist_group") is None:
            group = "optimised" if optimised else item.location[0]
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=_turn)


def _turn(item):
    early = item.location[0] in _EARLY
    optimised = item.get_closest_marker("optimised") is not None
    return not early, not optimised, item.location[0].startswith(_LATE)


def pytest_collection_finish():
    """What collecting made stays to the end: the collector of garbage need not look at it again and again."""
    gc.collect()
    gc.freeze()


_compiling = {"optimised": False, "programs": 0}


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
    if _HAS_FLAGS:
        _hook_compile_options()
    _compiling["optimised"] = wanted


@functools.cache
def _hook_compile_options():
    """Gives programs the flags of a user where `optimised` asks for them: JAX has no option of that kind for all."""
    from jax._src import compiler

    plain = compiler.get_compile_options

    def options(*arguments, env_options_overrides=None, **keywords):
        overrides = dict(env_options_overrides or {})
        if _compiling["optimised"]:
            overrides = {flag: users for flag, (_, users) in _FLAGS.items()} | overrides
        return plain(*arguments, env_options_overrides=overrides, **keywords)

    compiler.get_compile_options = options


@pytest.fixture(scope="module", autouse=True)
def let_go():
    """Forgets compiled programs between files before they fill the memory."""
    _count_programs()
    if _compiling["programs"] > _MOST_PROGRAMS:
        import jax

        jax.clear_caches()
        _compiling["programs"] = 0


@functools.cache
def _count_programs():
    import jax

    def count(event, _, **__):
        _compiling["programs"] += event.endswith("backend_compile_duration")

    jax.monitoring.register_event_duration_secs_listener(count)


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


@pytest.fixture(scope="session")
def byte_tokenizer():
    """Each byte is a token; beside them " a", "bc" and the separator: 259 ids."""
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, pre_tokenizers
    from tokenizers import models as kinds

    from headlab.data import Tokenizer

    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa", "bc", "<|endoftext|>"]
    merges = [("Ġ", "a"), ("b", "c")]
    model = Model(kinds.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<|endoftext|>"])
    return Tokenizer(model.to_str())
