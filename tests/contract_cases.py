"""The contract suite's cases: of each head, the ways to build it that its tests take.

Factors are the dtype of the states, the padding, the blocks, and each option. `make test` runs for the tied head
a covering array, in which every pair of values of any two factors occurs in some case, and for each other head one or
two cases that differ in every factor, which the tests of no particular case share; `make test-full` runs the rest of
the whole product (the mark `full`).
"""

import functools
import itertools
from collections.abc import Mapping
from typing import NamedTuple

import pytest
from reference_heads import OURS, REFERENCES

from headlab import heads

#: heads whose second cases, meshes and scores are in `make test`; those of the others are in `make test-slow`
QUICK = ("tied", "adaptive", "mixture_of_softmaxes")


def is_slow(name: str, quick=QUICK) -> bool:
    """Whether tests of a head are left to `make test-slow`: it is one of our own, and not among the quick ones."""
    return name in OURS and name not in quick


def heads_by_time() -> list:
    """The names of all heads as parameters, with the mark `slow` where it `is_slow`."""
    return [
        pytest.param(name, marks=[pytest.mark.slow] * is_slow(name), id=name)
        for name in heads.names()
    ]


class Case(NamedTuple):
    """One head, built one way."""

    name: str
    dtype: str = "float32"
    vocab_multiple: int = 8  # 1: no padding; 8: eleven tokens in sixteen rows
    row_block: int | None = (
        4  # None: all rows at once, where the loss makes its gradients in the forward pass
    )
    options: tuple = ()  # pairs

    def __str__(self):
        chosen = "-".join(f"{key}={value}" for key, value in self.options)
        blocks = f"multiple={self.vocab_multiple}-block={self.row_block}"
        return f"{self.name}-{self.dtype}-{blocks}-{chosen}"


def covering(factors: Mapping[str, tuple]) -> list[dict]:
    """Rows of the product of `factors` in which every pair of values of two factors occurs; found greedily."""
    rows = [
        dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())
    ]

    def pairs(row):
        return set(itertools.combinations(row.items(), 2))

    missing, chosen = set().union(*map(pairs, rows)), []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def default_case(name, dtype="float32", *, multiple=8, row_block=4, **changed) -> Case:
    """Every option at its default, but for those `changed`."""
    options = {key: values[0] for key, values in REFERENCES[name].options.items()}
    return Case(name, dtype, multiple, row_block, tuple({**options, **changed}.items()))


def loaded_case(name, dtype="float32") -> Case:
    """Every option away from its default at once: what a device or a compiler must cope with."""
    options = tuple((key, values[-1]) for key, values in REFERENCES[name].options.items())
    return Case(name, dtype, 8, 4, options)


def case_of(name, dtype) -> Case:
    """One of the two cases of every head."""
    if dtype == "float32":
        return loaded_case(name)
    return default_case(name, "bfloat16", multiple=1, row_block=None)


def one_by_one(name) -> list[dict]:
    """Options: the defaults, each option's last value alone, and all of these together."""
    options = REFERENCES[name].options
    first, last = ({key: values[i] for key, values in options.items()} for i in (0, -1))
    alone = [{**first, key: last[key]} for key in options if last[key] != first[key]]
    return [first, *alone, last]


@functools.cache
def cases_of_all_heads(full: bool) -> list:
    """All cases of all heads, those that no covering array needs with the mark `full`; or only the others."""
    cases = []
    for name in heads.names():
        options = REFERENCES[name].options if name in REFERENCES else {}
        sizes = {"multiple": (1, 8), "row_block": (4, None)}
        factors = {"dtype": ("float32", "bfloat16"), **sizes, **options}
        product = [dict(zip(factors, v, strict=True)) for v in itertools.product(*factors.values())]
        follows = name in REFERENCES and REFERENCES[name].follows_linear
        shared = [loaded_case(name), default_case(name, "bfloat16", multiple=1, row_block=None)]
        chosen = [] if follows else covering(factors)
        for row in product:
            dtype, multiple, row_block, *_ = row.values()
            chosen_options = tuple((key, row[key]) for key in options)
            case = Case(name, dtype, multiple, row_block, chosen_options)
            covers = row in chosen or case in shared
            if covers or full:
                marks = () if covers else pytest.mark.full
                if covers and dtype == "bfloat16" and is_slow(name):
                    marks = pytest.mark.slow
                cases.append(pytest.param(case, marks=marks, id=str(case)))
    return cases
