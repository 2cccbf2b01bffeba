"""Log-probabilities of any head in float64 throughout, on a CPU, whatever JAX is set to."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from headlab.errors import UsageError


def log_probs_float64(head: Any, h: Any, embedding: Any, *, logits: bool = False) -> Any:
    """`head.log_probs(h)`, NumPy [..., V], with parameters and states widened first: `Head.log_probs(dtype=float64)`.

    With `logits`, log p + lse: what stands before the head's one softmax. One program is compiled for each structure of
    a head and shape of h. TypeError where an input is traced; UsageError for logits of a head of several softmaxes.
    """
    leaves = jax.tree.leaves((h, head, embedding))
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise TypeError(
            "log_probs(dtype=float64) was called on traced values; call it outside jax.jit, grad and vmap"
        )
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        graphs, states = zip(*(_split(module) for module in (head, embedding)), strict=True)
        out = _compiled(graphs, logits, states, jnp.asarray(np.asarray(h, dtype=np.float64)))
        if out.dtype != jnp.float64:
            raise TypeError(f"log_probs(dtype=float64) came out as {out.dtype}")
        return np.asarray(out)


def log_prob_function(head: Any, embedding: Any) -> tuple[Any, Any]:
    """(function, parameters): function(parameters, h) is log_probs in float64, to be traced and differentiated.

    Both are of use inside `jax.enable_x64(True)` alone, where this is called, too.
    """
    graphs, states = zip(*(_split(module) for module in (head, embedding)), strict=True)
    return functools.partial(_log_probs, graphs), states


def _log_probs(graphs, states, h):
    head, embedding = (g and nnx.merge(g, s) for g, s in zip(graphs, states, strict=True))
    return head._log_probs(h, embedding)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compiled(graphs, logits, states, h):
    """log_probs, or logits, of the (head, embedding) that were split into graphs and states."""
    head, embedding = (g and nnx.merge(g, s) for g, s in zip(graphs, states, strict=True))
    log_probs = head._log_probs(h, embedding)
    if not logits:
        return log_probs
    norm = head.normalise(head._rows(h), embedding)
    lse = norm.max + norm.log_sum if hasattr(norm, "log_sum") else None
    if lse is None or lse.ndim != 1:
        raise UsageError(
            f"{type(head).__name__} has no one softmax, so no logits; take its log-probabilities"
        )
    return log_probs + lse.reshape(*h.shape[:-1], 1)


def _split(module):
    """(graph, state) of a module with every floating parameter widened to float64; (None, None) of None."""
    if module is None:
        return None, None
    graph, state = nnx.split(module)

    def widen(leaf):
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.asarray(np.asarray(leaf), jnp.float64 if floating else leaf.dtype)

    return graph, jax.tree.map(widen, state)
