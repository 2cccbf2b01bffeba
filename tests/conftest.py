"""What all tests share: eight virtual CPU devices, caches of the checkout's own, and a small corpus.

Compiling is most of the time of the tests. Programs that were compiled once, by whichever process, are read from the
cache; and they are compiled fast, not well, for what most tests say holds of formulas. Tests of what the compiler makes
of a program have the mark `optimised`.
"""

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
