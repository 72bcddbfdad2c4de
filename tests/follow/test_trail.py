"""Trails: what is possible, what is common, what comes from a sharding."""

import pytest
from jax.sharding import AbstractMesh, NamedSharding

from scalax._follow import trail as trails
from scalax._follow.trail import closed_spec_of, spec_of
from scalax.sharding import PartitionSpec as P

SIZES = {'data': 2, 'fsdp': 4, 'one': 1}
D, F = ('data',), ('fsdp',)
OPEN = P.UNCONSTRAINED


def test_a_trail_without_axes_is_lost():
    assert trails.of_dims({}, 2) == trails.LOST
    assert trails.of_dims({0: ()}, 2) == trails.LOST
    assert trails.of_dims({1: F}, 2) == ((), F)


def test_the_first_trail_decides_each_dimension():
    assert trails.merged([(F, ()), (D, D), ()], 2) == (F, D)
    assert trails.merged([(F,)], 2) == trails.LOST  # of another rank
    assert trails.merged([], 0) == trails.LOST


@pytest.mark.parametrize(
    ('trail', 'shape', 'expected'),
    [
        ((F, ()), (8, 3), (F, ())),
        ((F, F), (8, 8), (F, ())),  # batch x batch: a mesh axis shards one dimension
        ((F, F), (3, 8), ((), F)),  # the first that divides evenly
        ((D + F, F), (8, 8), (D + F, ())),
        ((D, D + F), (8, 8), (D, ())),
        ((F,), (6,), ()),
        ((F, D), (0, 2), ((), D)),  # empty
        ((), (8,), ()),
        ((), (), ()),
    ],
)
def test_what_is_possible(trail, shape, expected):
    assert trails.possible(trail, shape, SIZES) == expected


def test_what_is_common():
    assert trails.common((F, D), (F, ())) == (F, ())
    assert trails.common((F,), (D,)) == trails.LOST
    assert trails.common((F,), ()) == trails.LOST


@pytest.mark.parametrize(
    ('spec', 'ndim', 'expected'),
    [
        (P('fsdp'), 2, (F, ())),
        (P(('data', 'fsdp')), 1, (D + F,)),
        (P('fsdp', 'data'), 3, (F, D, ())),
        (P(('one', 'fsdp')), 1, (F,)),
        (P('one'), 1, ()),  # an axis of one device is nothing to follow
        (P(None, 'fsdp'), 2, ((), F)),
        (P(), 0, ()),
    ],
)
def test_the_trail_of_a_sharding(spec, ndim, expected):
    mesh = AbstractMesh(tuple(SIZES.values()), tuple(SIZES))
    assert trails.of_sharding(NamedSharding(mesh, spec), ndim) == expected


def test_no_sharding_has_no_trail():
    assert trails.of_sharding(None, 3) == trails.LOST


def test_other_mesh_axes():
    assert trails.without((D + F, F), {'fsdp'}) == (D, ())
    assert trails.without((F,), {'fsdp'}) == trails.LOST


def test_specs():
    assert spec_of((D + F, ())) == P(('data', 'fsdp'), OPEN)
    assert spec_of((F, D)) == P('fsdp', 'data')
    assert closed_spec_of(((), D), 2) == P(None, 'data')
    assert closed_spec_of(trails.LOST, 2) == P(None, None)
