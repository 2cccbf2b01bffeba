"""Combinators: what they give, in which order, and what they refuse."""

import itertools
import random

import pytest

from headlab.errors import UsageError
from headlab.sweeps import chain, points, product, sort, values, where, zip


@pytest.mark.parametrize("seed", range(5))
def test_a_product_has_every_combination_once_the_last_varying_fastest(seed):
    rng = random.Random(seed)
    sizes = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
    factors = [values(f"key{number}", range(size)) for number, size in enumerate(sizes)]
    found = product(*factors)
    expected = itertools.product(*map(range, sizes))
    assert [tuple(point.values()) for point in found] == list(expected)
    assert all(list(point) == [f"key{n}" for n in range(len(sizes))] for point in found)


def test_a_product_with_no_points_has_none_and_of_nothing_has_the_empty_one():
    assert product(values("a", []), values("b", [1, 2])) == ()
    assert product() == ({},)


def test_zip_joins_points_one_to_one():
    joined = zip(values("a", [1, 2, 3]), values("b", "xyz"))
    assert joined == ({"a": 1, "b": "x"}, {"a": 2, "b": "y"}, {"a": 3, "b": "z"})


def test_zip_refuses_unequal_lengths_and_says_them():
    with pytest.raises(UsageError, match=r"3, 2 of them.*product\(\)"):
        zip(values("a", range(3)), values("b", range(2)))


def test_chain_keeps_the_order_of_its_parts():
    first, second = values("a", [1, 2]), points({"b": 3}, {"a": 0, "b": 4})
    assert chain(first, second) == (*first, *second)


def test_where_keeps_exactly_the_points_asked_for():
    grid = product(values("a", range(3)), values("b", range(3)))
    kept = where(grid, lambda point: point["a"] <= point["b"])
    assert kept == tuple(point for point in grid if point["a"] <= point["b"])
    assert len(kept) == 6


def test_sort_orders_by_one_option_and_keeps_the_order_of_equals():
    grid = product(values("a", "yxz"), values("seed", [2, 0, 1]))
    ordered = sort(grid, "seed")
    assert [point["seed"] for point in ordered] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [point["a"] for point in ordered] == ["y", "x", "z"] * 3
    assert all(list(point) == ["a", "seed"] for point in ordered)


def test_sort_refuses_a_point_without_the_option_and_values_without_an_order():
    with pytest.raises(UsageError, match=r"by seed, which \{'a': 1\} does not set"):
        sort(chain(values("seed", [1]), values("a", [1])), "seed")
    with pytest.raises(UsageError, match=r"cannot order the values of a .*chain\(\)"):
        sort(values("a", [1, None]), "a")


@pytest.mark.parametrize("join", [product, zip])
def test_one_option_cannot_be_set_twice_in_a_point(join):
    with pytest.raises(UsageError, match=r"seed is set twice.*to 0 and 1"):
        join(points({"seed": 0}), points({"seed": 1}))


def test_combining_leaves_the_parts_as_they_were():
    part = points({"a": 1})
    product(part, values("b", [2]))
    assert part == ({"a": 1},)
