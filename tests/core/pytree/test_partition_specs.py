"""Canonical forms, faults and indivisible dimensions of PartitionSpecs."""

import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from scalax._core.pytree import partition_specs, spec_validation

U = P.UNCONSTRAINED
AXES = partition_specs.MeshAxes({'a': 2, 'b': 3, 'c': 4}, dict.fromkeys('abc', AxisType.Auto))
MIXED = partition_specs.MeshAxes(
    {'a': 2, 'b': 3, 'm': 4},
    {'a': AxisType.Auto, 'b': AxisType.Explicit, 'm': AxisType.Manual},
)


@pytest.mark.parametrize(
    ('entry', 'axes'),
    [(None, ()), (U, ()), ('ab', ('ab',)), (('a', 'b'), ('a', 'b')), (['a'], ('a',)), ((), ())],
)
def test_entry_axes(entry, axes):
    assert partition_specs.entry_axes(entry) == axes


def test_spec_axes_keeps_order_and_repetitions():
    assert partition_specs.spec_axes(P('b', None, ('a', 'b'), U)) == ('b', 'a', 'b')


@pytest.mark.parametrize(
    ('spec', 'canonical'),
    [
        (P(), P()),
        (P(None), P()),
        (P(None, None, None), P()),
        (P('a', None), P('a')),
        (P(('a',), None), P('a')),
        (P((), 'a'), P(None, 'a')),
        (P(None, 'a', None), P(None, 'a')),
        (P(('a', 'b'), ()), P(('a', 'b'))),
        (P('a', U), P('a', U)),
        (P(U, None), P(U)),
        (P('a', None, unreduced={'b'}), P('a', unreduced={'b'})),
    ],
)
def test_canonical(spec, canonical):
    result = partition_specs.canonical(spec)
    assert result == canonical
    assert len(result) == len(canonical)
    assert partition_specs.canonical(result) == result


def test_new_entries_keep_the_unreduced_axes():
    assert partition_specs.with_entries(P('a', unreduced={'b'}), [None, 'c']) == P(None, 'c', unreduced={'b'})


@pytest.mark.parametrize(
    ('spec', 'expected'),
    [
        (P('m', 'a'), P(None, 'a')),
        (P(('a', 'm'), U), P('a', U)),
        (P('m'), P()),
        (P('unknown', 'm'), P('unknown')),
    ],
)
def test_without_manual_axes(spec, expected):
    assert partition_specs.without_manual_axes(spec, MIXED) == expected


@pytest.mark.parametrize(
    ('spec', 'kinds'),
    [
        (P('a', ('b', 'c')), []),
        (P(U, None), []),
        (P('x'), ['unknown-axis']),
        (P('x', 'x'), ['unknown-axis', 'axis-reuse']),
        (P('a', 'a'), ['axis-reuse']),
        (P(('a', 'a')), ['axis-reuse']),
        (P('a', None, None), ['rank']),
        (P(None, None, None), ['rank']),
        (P('a', unreduced={'b'}), ['unreduced']),
        (P('x', 'a', 'a'), ['unknown-axis', 'axis-reuse', 'rank']),
    ],
)
def test_all_faults_are_reported(spec, kinds):
    assert [fault.kind for fault in spec_validation.faults(spec, (12, 12), AXES)] == kinds


@pytest.mark.parametrize(
    ('spec', 'kinds'),
    [
        (P('a', 'b'), []),
        (P(('a', 'b')), ['mixed-axis-types']),
        (P('a', unreduced={'b'}), ['unreduced']),
        (P('a', reduced={'b'}), ['unreduced']),
        (P('b', unreduced={'a'}), ['unreduced']),
    ],
)
def test_faults_that_depend_on_axis_types(spec, kinds):
    assert [fault.kind for fault in spec_validation.faults(spec, (12, 12), MIXED)] == kinds


@pytest.mark.parametrize(
    ('spec', 'shape', 'dims', 'dropped'),
    [
        (P('a', 'b'), (2, 3), [], P('a', 'b')),
        (P('a', 'b'), (3, 3), [(0, ('a',))], P(None, 'b')),
        (P('a', 'b'), (3, 4), [(0, ('a',)), (1, ('b',))], P()),
        (P(('a', 'b')), (6, 1), [], P(('a', 'b'))),
        (P(('a', 'b')), (4, 1), [(0, ('a', 'b'))], P('a')),
        (P(('b', 'a')), (4, 1), [(0, ('b', 'a'))], P()),
        (P(('a', 'b', 'c')), (12, 1), [(0, ('a', 'b', 'c'))], P(('a', 'b'))),
        (P('c'), (2, 1), [(0, ('c',))], P()),
        (P('c'), (0, 1), [], P('c')),
        (P(U, 'c'), (3, 3), [(1, ('c',))], P(U)),
    ],
)
def test_indivisible_dimensions_lose_axes_from_the_right(spec, shape, dims, dropped):
    assert spec_validation.indivisible_dims(spec, shape, AXES) == dims
    assert spec_validation.drop_indivisible(spec, shape, AXES) == dropped
    assert not spec_validation.indivisible_dims(dropped, shape, AXES)


def test_mesh_axes():
    assert str(AXES) == 'a=2, b=3, c=4'
    assert AXES.size(('a', 'c')) == 8
    assert AXES.size(()) == 1
