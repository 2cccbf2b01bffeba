"""Modules with parameters drawn afresh, for which the initial ones are not even computed."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from headlab.embeddings import Constant


def drawn(build: Callable, draw: Callable[[tuple[int, ...]], np.ndarray]):
    """The module that build() makes, its constants as they are, with draw(shape) in place of every parameter."""
    graph, params, constants = nnx.split(nnx.eval_shape(build), nnx.Param, Constant)
    if jax.tree.leaves(constants):
        constants = jax.jit(lambda: nnx.split(build(), nnx.Param, Constant)[2])()
    params = jax.tree.map(lambda a: jnp.asarray(draw(a.shape), a.dtype), params)
    return nnx.merge(graph, params, constants)
