"""A matrix multiply whose gradients are plain two-dimensional matrix multiplies.

XLA on CPU fuses the automatic weight gradient of a batched contraction with its neighbours and multiplies through a
transposed copy; two flat `dot_general`s that contract the token axis are faster and mean the same.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from headlab.ops.varying import sum_to_like


@jax.custom_vjp
def linear(
    x: Float[Array, "*tokens d_in"], kernel: Float[Array, "d_in d_out"]
) -> Float[Array, "*tokens d_out"]:
    """`y = x · kernel`, in the dtype of `x`, accumulated in at least float32.

    The kernel is cast to the dtype of `x`; its gradient comes back in the kernel's own dtype and is rounded once,
    after the sum over all tokens.
    """
    return _product(x, kernel.astype(x.dtype), 0).astype(x.dtype)


def _product(x: Array, kernel: Array, contract: int) -> Array:
    """x [..., k] times a matrix whose axis `contract` has size k, flattened to two dimensions."""
    flat = jax.lax.dot_general(
        x.reshape(-1, x.shape[-1]),
        kernel,
        (((1,), (contract,)), ((), ())),
        preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
    )
    return flat.reshape(*x.shape[:-1], flat.shape[-1])


def _forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return linear(x, kernel), (x, kernel)


def _backward(residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, kernel = residuals
    dx = _product(dy, kernel.astype(dy.dtype), 1).astype(x.dtype)
    dkernel = jax.lax.dot_general(
        x.reshape(-1, x.shape[-1]),
        dy.reshape(-1, dy.shape[-1]),
        (((0,), (0,)), ((), ())),
        preferred_element_type=jnp.promote_types(kernel.dtype, jnp.float32),
    ).astype(kernel.dtype)
    return sum_to_like(dx, x), sum_to_like(dkernel, kernel)


linear.defvjp(_forward, _backward)
