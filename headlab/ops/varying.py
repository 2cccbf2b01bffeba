"""Manual mesh axes inside `jax.shard_map`: over which axes a value varies, and how to make two values agree.

Outside a `shard_map` no value varies over anything and both functions return their argument unchanged.
"""

from typing import Any

import jax
from jaxtyping import Array


def varying_axes(*arrays: Array) -> frozenset[str]:
    """The mesh axes over which any of `arrays` may differ from device to device."""
    axes: frozenset[str] = frozenset()
    for array in arrays:
        aval = jax.typeof(array)
        manual = getattr(aval, "manual_axis_type", None)
        # Older and newer JAX keep the set under different names.
        axes |= frozenset(manual.varying if manual is not None else getattr(aval, "vma", ()))
    return axes


def vary_like(x: Array, *others: Array) -> Array:
    """Marks `x` as varying over every axis that `others` vary over: what a loop's first carry needs."""
    missing = varying_axes(*others) - varying_axes(x)
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def sum_to_like(gradient: Array, primal: Array) -> Array:
    """Sums a cotangent over the axes that its primal does not vary over (the transpose of `vary_like`)."""
    extra = varying_axes(gradient) - varying_axes(primal)
    return jax.lax.psum(gradient, tuple(sorted(extra))) if extra else gradient


def narrow_like(gradients: Any, primals: Any) -> Any:
    """Gradients summed over the mesh axes that their primals do not vary over, in the dtypes of the primals."""
    return jax.tree.map(lambda d, p: sum_to_like(d, p).astype(p.dtype), gradients, primals)
