"""What a traced program holds, read from its jaxpr: nothing is computed, so shapes may be of any size."""

from collections.abc import Callable, Iterator

import jax
from jax.extend.core import jaxprs_in_params


def largest_array(function: Callable, *shapes) -> int:
    """Elements of the largest intermediate array of `function`, the bodies of its loops included."""
    return max(_sizes(jax.make_jaxpr(function)(*shapes).jaxpr))


def _sizes(jaxpr) -> Iterator[int]:
    for equation in jaxpr.eqns:
        yield from (variable.aval.size for variable in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from _sizes(inner)
