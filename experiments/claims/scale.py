"""Claims about how memory and cost grow: prompt log-probabilities, and the adaptive head."""

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.claims.findings import DEPENDS, FAILS, HOLDS, Finding
from experiments.claims.runs import Context

LESS = 10  # times less memory, from which a claim of "far more" holds
SLOWER = 0.8  # the exponent of V up to which a cost grows slower than V


def prompt_memory(
    context: Context, tokens: int = 2048, vocab: int = 256_128, d_model: int = 2304
) -> Finding:
    """What XLA needs for a prompt's log-probabilities, held whole or found block by block."""
    return memory_finding(memory(tokens, vocab, d_model))


def memory(tokens: int, vocab: int, d_model: int) -> dict[str, int]:
    """Bytes beyond the inputs, of "whole" (a log-softmax of all logits) and "blockwise" (`token_report`, five best).

    Programs are compiled for shapes; no array of these sizes exists.
    """
    import jax
    from flax import nnx

    from headlab import heads

    def build():
        return heads.build("untied", vocab_size=vocab, d_model=d_model, rngs=nnx.Rngs(0))

    graph, state = nnx.split(nnx.eval_shape(build))
    h = jax.ShapeDtypeStruct((tokens, d_model), "float32")
    ids = jax.ShapeDtypeStruct((tokens,), "int32")
    programs: dict[str, Any] = {
        "whole": lambda state, h, ids: jax.nn.log_softmax(
            h @ nnx.merge(graph, state).weight[...].T, axis=-1
        ),
        "blockwise": lambda state, h, ids: nnx.merge(graph, state).token_report(h, ids, 5),
    }
    found = {}
    for name, program in programs.items():
        needs = jax.jit(program).lower(state, h, ids).compile().memory_analysis()
        found[name] = needs.temp_size_in_bytes + needs.output_size_in_bytes
    return found


def memory_finding(needed: Mapping[str, int]) -> Finding:
    """The verdict on the bytes of both ways."""
    ratio = needed["whole"] / needed["blockwise"]
    verdict = HOLDS if ratio >= LESS else FAILS if ratio <= 1 else DEPENDS
    whole, blockwise = (needed[key] / 1e6 for key in ("whole", "blockwise"))
    found = f"{whole:,.0f} MB whole, {blockwise:,.0f} MB blockwise: {ratio:.1f} times less"
    return Finding({**needed, "ratio": ratio}, verdict, found)


def adaptive_cost(
    context: Context,
    sizes: tuple[int, int] = (8192, 65_536),
    tokens: int = 4096,
    d_model: int = 64,
    repeats: int = 9,
) -> Finding:
    """How operations and CPU time of an adaptive head's nll grow from one vocabulary to a larger one."""
    operations, seconds = {}, {}
    for name in ("adaptive", "untied"):
        for size in sizes:
            found = cost(name, size, tokens, d_model, repeats)
            operations[name, size], seconds[name, size] = found
    small, large = sizes

    def exponent(measured: Mapping[tuple[str, int], float], name: str) -> float:
        return growth(measured[name, small], measured[name, large], large / small)

    return growth_finding(
        {
            f"{name}_{what}": exponent(measured, name)
            for name in ("adaptive", "untied")
            for what, measured in (("operations", operations), ("cpu_time", seconds))
        }
    )


def cost(name: str, vocab: int, tokens: int, d_model: int, repeats: int) -> tuple[float, float]:
    """(operations a token, CPU seconds of one call) of a head's nll on targets drawn by Zipf's law.

    CPU seconds are those of this process, all threads together, so that a busy machine changes little; the least of
    several calls. With fewer than thousands of tokens, an adaptive head's are too few to be told from the threads' own.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from headlab import heads

    share = 1 / np.arange(1, vocab + 1)
    counts = np.ceil(1e7 * share).astype(np.int64)
    head = heads.build(
        name, vocab_size=vocab, d_model=d_model, rngs=nnx.Rngs(0), token_counts=counts
    )
    rng = np.random.default_rng(0)
    targets = jnp.asarray(rng.choice(vocab, tokens, p=share / share.sum()), jnp.int32)
    h = jnp.asarray(rng.normal(size=(tokens, d_model)), jnp.float32)
    graph, state = nnx.split(head)
    nll = jax.jit(lambda state, h, targets: nnx.merge(graph, state).nll(h, targets))
    jax.block_until_ready(nll(state, h, targets))
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        jax.block_until_ready(nll(state, h, targets))
        taken.append(time.process_time() - start)
    return head.cost("scoring", counts).flops_per_token, min(taken)


def growth(small: float, large: float, times: float) -> float:
    """a in cost ∝ Vᵃ.

    >>> growth(3.0, 12.0, 4.0)
    1.0
    """
    return math.log(large / small) / math.log(times)


def growth_finding(exponents: Mapping[str, float]) -> Finding:
    """The verdict on the exponents of V, "adaptive_operations" and "adaptive_cpu_time", beside the full softmax's."""
    own = exponents["adaptive_operations"], exponents["adaptive_cpu_time"]
    verdict = HOLDS if max(own) <= SLOWER else FAILS if min(own) >= 1 else DEPENDS
    found = (
        f"operations as V^{own[0]:.2f}, CPU time as V^{own[1]:.2f}; the full softmax's as "
        f"V^{exponents['untied_operations']:.2f} and V^{exponents['untied_cpu_time']:.2f}"
    )
    return Finding(dict(exponents), verdict, found)
