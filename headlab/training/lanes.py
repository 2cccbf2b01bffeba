"""How runs share one program: a run alone, or several stacked along a leading axis and mapped over it."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from headlab.training.step import Own


class Lanes(Protocol):
    """Where the states, batches and reports of runs lie in those of the program."""

    #: whether the step takes what runs differ in as values
    with_own: bool

    def mapped(self, step: Callable) -> Callable:
        """The step of a run as that of all."""

    def join(self, parts: Sequence[Any]) -> Any:
        """Trees of the runs as one."""

    def split(self, tree: Any) -> list[Any]:
        """The trees of the runs."""


class Alone:
    """One run: everything is as it is."""

    with_own = False

    def mapped(self, step: Callable) -> Callable:
        return step

    def join(self, parts: Sequence[Any]) -> Any:
        (only,) = parts
        return only

    def split(self, tree: Any) -> list[Any]:
        return [tree]


class Stacked:
    """Runs that differ in their seed and peak rate alone: `jax.vmap` over a leading axis, a run a place."""

    with_own = True

    def __init__(self, configs: Sequence[Any]):
        self._count = len(configs)
        self._own = Own(
            jnp.array([config.seed for config in configs], jnp.int32),
            jnp.array([config.optimizer.peak_rate for config in configs], jnp.float32),
        )

    def mapped(self, step: Callable) -> Callable:
        mapped = jax.vmap(step)
        return lambda state, batch: mapped(state, batch, self._own)

    def join(self, parts: Sequence[Any]) -> Any:
        def stacked(*leaves: Any) -> Any:
            on_host = all(isinstance(leaf, np.ndarray) for leaf in leaves)
            return np.stack(leaves) if on_host else jnp.stack(leaves)

        return jax.tree.map(stacked, *parts)

    def split(self, tree: Any) -> list[Any]:
        return [jax.tree.map(operator.itemgetter(lane), tree) for lane in range(self._count)]
