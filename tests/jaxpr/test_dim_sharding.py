"""Shardings by dimension: from dimensions and from specs, merged, and less some mesh axes."""

import pytest
from jax.sharding import AbstractMesh, NamedSharding

from scalax._jaxpr.dim_sharding import UNSHARDED, axes_of, merged, of_dims, of_sharding, only_along, without
from scalax.sharding import PartitionSpec as P

SIZES = {'data': 2, 'fsdp': 4, 'one': 1}
D, F = ('data',), ('fsdp',)


def test_a_sharding_without_axes_is_unsharded():
    assert of_dims({}, 2) == of_dims({0: ()}, 2) == UNSHARDED
    assert of_dims({1: F}, 2) == ((), F)


def test_the_first_sharding_decides_each_dimension():
    assert merged([(F, ()), (D, D), ()], 2) == (F, D)
    assert merged([(F,)], 2) == UNSHARDED  # of another rank
    assert merged([], 0) == UNSHARDED


@pytest.mark.parametrize(
    ('spec', 'ndim', 'expected'),
    [
        (P('fsdp'), 2, (F, ())),
        (P(('data', 'fsdp')), 1, (D + F,)),
        (P('fsdp', 'data'), 3, (F, D, ())),
        (P(('one', 'fsdp')), 1, (F,)),
        (P('one'), 1, UNSHARDED),  # an axis of one device shards nothing
        (P(None, 'fsdp'), 2, ((), F)),
        (P(), 0, UNSHARDED),
    ],
)
def test_a_sharding_of_a_spec(spec, ndim, expected):
    mesh = AbstractMesh(tuple(SIZES.values()), tuple(SIZES))
    assert of_sharding(NamedSharding(mesh, spec), ndim) == expected


def test_an_array_of_unknown_sharding_is_unsharded():
    assert of_sharding(None, 3) == UNSHARDED


def test_mesh_axes():
    assert axes_of((D + F, F)) == {'data', 'fsdp'}
    assert without((D + F, F), {'fsdp'}) == (D, ())
    assert without((F,), {'fsdp'}) == UNSHARDED
    assert only_along((D + F, D, ()), frozenset(F)) == (D + F, (), ())
    assert only_along((D,), frozenset(F)) == UNSHARDED
