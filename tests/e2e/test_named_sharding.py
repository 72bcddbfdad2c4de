"""NamedShardings with all their features in scalax, and errors that name the leaf."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from scalax._core.pytree.partition_specs import text
from scalax.errors import PlacementError, ShardingError
from scalax.sharding import MeshShardingHelper, with_sharding_constraint
from scalax.testing import assert_collectives

P = PartitionSpec
U = P.UNCONSTRAINED
AUTO = MeshShardingHelper([4, 2], ['a', 'b'])
EXPLICIT = MeshShardingHelper([4, 2], ['a', 'b'], axis_types=AxisType.Explicit)
MIXED = MeshShardingHelper([4, 2], ['a', 'b'], axis_types=[AxisType.Explicit, AxisType.Auto])
HELPERS = {'auto': AUTO, 'explicit': EXPLICIT, 'mixed': MIXED}
NUMBERS = np.arange(64, dtype=np.float32).reshape(8, 8)

each_mesh = pytest.mark.parametrize('helper', HELPERS.values(), ids=HELPERS)


def named(helper: MeshShardingHelper, spec: PartitionSpec, **options: Any) -> NamedSharding:
    return NamedSharding(helper.mesh, spec, **options)


# --- Features --------------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize('helper', [AUTO, EXPLICIT], ids=['auto', 'explicit'])
@pytest.mark.parametrize('spec', [P(('a', 'b')), P(('b', 'a')), P(None, ('b', 'a')), P(('a',), 'b')])
def test_tuples_of_axes_are_ordered(helper: MeshShardingHelper, spec: PartitionSpec) -> None:
    placed = helper.shard(NUMBERS, spec)
    expected = NamedSharding(helper.mesh, spec).devices_indices_map((8, 8))
    assert {shard.device: shard.index for shard in placed.addressable_shards} == expected
    step = helper.sjit(lambda x: x + 1, in_shardings=spec, out_shardings=spec)
    assert step(NUMBERS).sharding.devices_indices_map((8, 8)) == expected
    np.testing.assert_array_equal(helper.gather(placed), NUMBERS)


def test_an_empty_tuple_replicates() -> None:
    assert AUTO.shard(NUMBERS, P((), ())).sharding == named(AUTO, P())


@pytest.mark.medium
@each_mesh
def test_unconstrained_dimensions_are_left_to_the_compiler(helper: MeshShardingHelper) -> None:
    for rule in (P(U, 'b'), named(helper, P(U, 'b')) if helper is not EXPLICIT else P(U, 'b')):
        step = helper.sjit(lambda x, rule=rule: with_sharding_constraint(x + 1, rule), in_shardings=P('a'))
        assert step(NUMBERS).sharding.is_equivalent_to(named(helper, P('a', 'b')), 2)


@each_mesh
def test_memory_kinds(helper: MeshShardingHelper) -> None:
    host = named(helper, P('a'), memory_kind='pinned_host')
    placed = helper.shard({'w': NUMBERS}, host)
    assert placed['w'].sharding == host
    assert helper.shard(placed, P('a'))['w'].sharding.memory_kind == 'device'
    step = helper.sjit(lambda x: x, in_shardings=host, out_shardings=host)
    assert step.shardings_for(placed['w']) == ((host,), host)
    try:
        out = step(placed['w'])
    except jax.errors.JaxRuntimeError as error:  # XLA for CPUs, of JAX 0.10
        assert 'Side-effect ops cannot be replicated' in str(error)
    else:
        assert out.sharding == host
    moving = helper.sjit(lambda x: 2 * x, in_shardings=P('a'), on_mismatch='reshard')
    assert moving(placed['w']).sharding.memory_kind == 'device'
    struct = helper.abstract({'w': NUMBERS}, host)['w']
    assert (struct.sharding.spec, struct.sharding.memory_kind) == (P('a'), 'pinned_host')


@each_mesh
def test_with_memory_kind_and_update(helper: MeshShardingHelper) -> None:
    sharding = helper.match_sharding_rule({'w': P('a')}, {'w': NUMBERS})['w']
    host = sharding.with_memory_kind('pinned_host')
    assert helper.shard(NUMBERS, host).sharding == host
    turned = sharding.update(spec=P(None, 'b'))
    assert helper.shard(NUMBERS, turned).sharding == turned
    assert helper.shard(NUMBERS, host.update(memory_kind='device')).sharding == sharding


@each_mesh
def test_equality_and_hashing(helper: MeshShardingHelper) -> None:
    specs = [P('a'), P('a', None), P(('a',)), P(('a',), ())]
    resolved = helper.match_sharding_rule(specs, [NUMBERS] * 4)
    assert len(set(resolved)) == len({id(sharding) for sharding in resolved}) == 1
    assert resolved[0] == named(helper, P('a'))
    # Equal shardings compile nothing again, and are not a mismatch.
    again = MeshShardingHelper([4, 2], ['a', 'b'], axis_types=helper.axis_types)
    step = helper.sjit(lambda x: 2 * x, in_shardings=P('a'))
    assert step(again.shard(NUMBERS, P('a', None))).shape == (8, 8)
    assert helper.shard(NUMBERS, named(again, P('a'))).sharding == resolved[0]


@each_mesh
def test_abstract_meshes(helper: MeshShardingHelper) -> None:
    mesh = helper.mesh.abstract_mesh
    abstract = MeshShardingHelper.from_mesh(mesh)
    sharding = abstract.match_sharding_rule(P('a', 'b'), NUMBERS)
    assert sharding == NamedSharding(mesh, P('a', 'b'))
    assert isinstance(sharding.mesh, AbstractMesh)
    # A sharding on the abstract mesh is a rule for the mesh with devices, and vice versa.
    assert helper.shard(NUMBERS, sharding).sharding == named(helper, P('a', 'b'))
    assert abstract.match_sharding_rule(named(helper, P('b')), NUMBERS) == NamedSharding(mesh, P('b'))


def matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    """A matmul whose result is a partial sum on each device."""
    return jnp.einsum('ij,jk->ik', x, y, out_sharding=P('a', None, unreduced={'b'}))


def test_unreduced_axes() -> None:
    specs = (P('a', 'b'), P('b'))
    partial = EXPLICIT.sjit(matmul, in_shardings=specs)
    parts = partial(NUMBERS, NUMBERS)
    assert parts.sharding.spec.unreduced == {'b'}
    assert_collectives(partial, NUMBERS, NUMBERS, all_reduce=0, reduce_scatter=0, all_gather=0)
    rule = P('a', unreduced={'b'})
    out = EXPLICIT.sjit(matmul, in_shardings=specs, out_shardings=rule)(NUMBERS, NUMBERS)
    assert out.sharding.spec.unreduced == {'b'}
    for rules in (None, rule):  # as an argument, and reduced by a constraint
        reduce_sum = EXPLICIT.sjit(lambda x: with_sharding_constraint(x, P('a')), in_shardings=rules)
        np.testing.assert_allclose(reduce_sum(parts), NUMBERS @ NUMBERS)
        assert_collectives(reduce_sum, parts, all_reduce={'b': 1})
    scattered = EXPLICIT.sjit(lambda x: with_sharding_constraint(x, P('a', 'b')))
    np.testing.assert_allclose(scattered(parts), NUMBERS @ NUMBERS)
    assert scattered(parts).sharding.spec == P('a', 'b')


def test_reduced_axes() -> None:
    rule = P('a', reduced={'b'})
    placed = EXPLICIT.shard(NUMBERS, rule)
    assert placed.sharding.spec.reduced == {'b'}
    np.testing.assert_array_equal(EXPLICIT.gather(placed), NUMBERS)
    step = EXPLICIT.sjit(lambda x: with_sharding_constraint(2 * x, rule), in_shardings=P('a'))
    assert step(NUMBERS).sharding.spec.reduced == {'b'}

    def loss(w, x):
        return jnp.einsum('ij,kj->ik', x, w).sum()

    # The gradient of a reduced value is a partial sum: at most one collective at the end.
    grad = EXPLICIT.sjit(jax.grad(loss), in_shardings=(P(None, None, reduced={'b'}), P('b')))
    assert grad(NUMBERS, NUMBERS).sharding.spec.unreduced == {'b'}


@pytest.mark.parametrize('spec', [P('a', unreduced={'b'}), P('a', reduced={'b'})], ids=str)
def test_specs_with_reductions_are_resolved_and_reported(spec: PartitionSpec) -> None:
    tree = {'w': NUMBERS}
    assert EXPLICIT.match_sharding_rule(spec, tree)['w'] == named(EXPLICIT, spec)
    assert EXPLICIT.match_sharding_rule(named(EXPLICIT, spec), tree)['w'].spec == spec
    assert EXPLICIT.abstract(tree, spec)['w'].sharding.spec == spec
    row = EXPLICIT.explain(tree, spec).rows[0]
    assert (row.spec, row.bytes_per_device) == (spec, 64)


# --- Checks ----------------------------------------------------------------------------------------

TREE = {
    'layer': {'up': jax.ShapeDtypeStruct((8, 8), jnp.float32)},
    'scale': jax.ShapeDtypeStruct((8,), jnp.float32),
}
UP = '  layer/up: float32[8, 8]'

CHECKS: dict[str, tuple[MeshShardingHelper, PartitionSpec, str, str]] = {
    'an axis twice': (
        AUTO,
        P('a', 'a'),
        "mesh axis 'a' is used more than once (dimensions 0, 1)",
        'use each mesh axis at most once in a spec.',
    ),
    'an axis twice in a dimension': (
        AUTO,
        P(('a', 'b', 'a')),
        "mesh axis 'a' is used more than once (dimensions 0, 0)",
        'use each mesh axis at most once in a spec.',
    ),
    'an unknown axis': (
        EXPLICIT,
        P(('b', 'c')),
        "the mesh has no axis 'c' (known: 'a', 'b')",
        'name only axes of the mesh, or build the mesh with that axis.',
    ),
    'axes of two types in a dimension': (
        MIXED,
        P(('a', 'b')),
        'dimension 0 mixes mesh axes of types Auto and Explicit',
        'use axes of one type for each dimension (JAX would reorder them silently).',
    ),
    'unreduced, unknown': (
        EXPLICIT,
        P('a', unreduced={'c'}),
        "the mesh has no axis 'c' (known: 'a', 'b')",
        'name only axes of the mesh, or build the mesh with that axis.',
    ),
    'unreduced, not Explicit': (
        MIXED,
        P('a', unreduced={'b'}),
        "unreduced or reduced axes ('b') on a mesh that has axes of type Auto ('b')",
        'unreduced and reduced axes need a mesh whose axes are all of type Explicit.',
    ),
    'reduced, unknown': (
        EXPLICIT,
        P('a', reduced={'c'}),
        "the mesh has no axis 'c' (known: 'a', 'b')",
        'name only axes of the mesh, or build the mesh with that axis.',
    ),
    'reduced, not Explicit': (
        AUTO,
        P('a', reduced={'b'}),
        "unreduced or reduced axes ('b') on a mesh that has axes of type Auto ('a', 'b')",
        'unreduced and reduced axes need a mesh whose axes are all of type Explicit.',
    ),
    'unreduced, beside Auto axes': (
        MIXED,
        P(None, unreduced={'a'}),
        "unreduced or reduced axes ('a') on a mesh that has axes of type Auto ('b')",
        'unreduced and reduced axes need a mesh whose axes are all of type Explicit.',
    ),
    'more entries than dimensions': (
        AUTO,
        P('a', None, 'b'),
        'the spec has 3 entries, the array 2 dimensions',
        'give a spec at most one entry per dimension (PartitionSpec() replicates).',
    ),
    'unconstrained device_put': (
        AUTO,
        P(U),
        'an UNCONSTRAINED dimension does not determine where an array is placed',
        'UNCONSTRAINED is for constraints and annotations inside a compiled function.',
    ),
}


@pytest.mark.parametrize(('helper', 'spec', 'detail', 'hint'), CHECKS.values(), ids=CHECKS)
def test_each_check_names_the_leaf(
    helper: MeshShardingHelper, spec: PartitionSpec, detail: str, hint: str
) -> None:
    rules = {'layer': {'up': spec}, 'scale': P()}
    calls: list[Callable[[], Any]] = [
        lambda: helper.match_sharding_rule(rules, TREE),
        lambda: helper.abstract(TREE, rules),
        lambda: helper.explain(TREE, rules),
    ]
    for call in calls:
        with pytest.raises(ShardingError) as caught:
            call()
        assert str(caught.value) == '\n'.join(
            [
                'One leaf cannot be sharded as asked (mesh: a=4, b=2):',
                UP,
                f'    {detail}',
                f'    asked for: {text(spec)} from the spec given',
                f'What to do: {hint}',
            ]
        )


def test_a_scalar_takes_an_empty_spec_only() -> None:
    with pytest.raises(ShardingError) as caught:
        AUTO.shard({'step': 3}, P('a'))
    assert 'the spec has 1 entry, the array 0 dimensions' in str(caught.value)
    assert str(caught.value).endswith('or are two arguments, or their rules, swapped?')
    assert AUTO.shard({'step': 3}, P())['step'].sharding.spec == P()


def unreduced() -> jax.Array:
    return EXPLICIT.sjit(matmul, in_shardings=(P('a', 'b'), P('b')))(NUMBERS, NUMBERS)


MOVES = {
    'replicated': P(),
    'one dimension': P('a'),
    'two dimensions': P('b', 'a'),
    'two axes in a dimension': P(('a', 'b')),
    'reduced': P('a', reduced={'b'}),
    'other axis unreduced': P(None, 'a', unreduced={'b'}),
    'axis unreduced': P('b', unreduced={'a'}),
    'all axes unreduced': P(unreduced={'a', 'b'}),
}


@pytest.mark.medium
@pytest.mark.parametrize('spec', MOVES.values(), ids=MOVES)
def test_moving_an_unreduced_array_keeps_its_sum(spec: PartitionSpec) -> None:
    tree, summed = {'grads': {'w': unreduced()}}, NUMBERS @ NUMBERS
    moved = EXPLICIT.shard(tree, spec)['grads']['w']
    assert moved.sharding.is_equivalent_to(named(EXPLICIT, spec), 2)
    step = EXPLICIT.sjit(lambda tree: tree, in_shardings=spec, on_mismatch='reshard')
    out = step(tree)['grads']['w']
    assert out.sharding.is_equivalent_to(named(EXPLICIT, spec), 2)
    for array in (moved, out):
        np.testing.assert_array_equal(EXPLICIT.gather({'w': array})['w'], summed)
        assert jax.typeof(array).sharding.spec.unreduced == spec.unreduced


@pytest.mark.medium
@pytest.mark.parametrize('spec', MOVES.values(), ids=MOVES)
def test_unreduced_values_keep_their_sum_inside_of_compiled_functions(spec: PartitionSpec) -> None:
    @EXPLICIT.sjit(in_shardings=(P('a', 'b'), P('b')), out_shardings=P())
    def moved(x: jax.Array, y: jax.Array) -> jax.Array:
        there = with_sharding_constraint(matmul(x, y), spec)
        assert jax.typeof(there).sharding.spec.unreduced == spec.unreduced
        return there

    np.testing.assert_array_equal(moved(NUMBERS, NUMBERS), NUMBERS @ NUMBERS)


def test_unreduced_arrays_move_to_other_meshes() -> None:
    other = MeshShardingHelper([2, 4], ['x', 'y'], axis_types=AxisType.Explicit)
    for helper, spec in ((other, P('x')), (other, P('x', unreduced={'y'})), (AUTO, P('b', 'a'))):
        moved = helper.shard(unreduced(), spec)
        assert moved.sharding.is_equivalent_to(named(helper, spec), 2)
        np.testing.assert_array_equal(helper.gather(moved), NUMBERS @ NUMBERS)


PLACES: dict[str, Callable[[], Any]] = {
    'host': lambda: NUMBERS,
    'nowhere': lambda: jnp.asarray(NUMBERS),
    'on the mesh': lambda: EXPLICIT.shard(NUMBERS, P('b')),
    'elsewhere': lambda: jax.device_put(NUMBERS, jax.devices()[3]),
    'narrow': lambda: NUMBERS.astype(np.int8),
    'a number': lambda: 3.0,
}


@pytest.mark.medium
@pytest.mark.parametrize('make_array', PLACES.values(), ids=PLACES)
def test_any_array_is_made_unreduced(make_array: Callable[[], Any]) -> None:
    x = make_array()
    spec = P('a', unreduced={'b'}) if np.ndim(x) else P(unreduced={'b'})
    placed = EXPLICIT.shard({'w': x}, spec)['w']
    assert placed.sharding.is_equivalent_to(named(EXPLICIT, spec), np.ndim(x))
    assert (placed.dtype, placed.weak_type) == (jnp.asarray(x).dtype, np.ndim(x) == 0)
    np.testing.assert_array_equal(EXPLICIT.gather(placed), x)
    reduce_sum = EXPLICIT.sjit(
        lambda w: with_sharding_constraint(w, P()), in_shardings=spec, on_mismatch='reshard'
    )
    np.testing.assert_array_equal(reduce_sum(x), x)


def test_one_device_has_the_value_and_the_others_zeros() -> None:
    placed = EXPLICIT.shard(NUMBERS + 1, P(unreduced={'a'}))
    blocks = np.stack([np.asarray(shard.data) for shard in placed.addressable_shards])
    np.testing.assert_array_equal(blocks.sum(axis=0), 2 * (NUMBERS + 1))  # two copies, along 'b'
    assert sorted(map(np.count_nonzero, blocks)) == [0, 0, 0, 0, 0, 0, 64, 64]


UNREDUCED, REDUCED = P('a', unreduced={'b'}), P('a', reduced={'b'})


@pytest.mark.medium
@pytest.mark.parametrize(
    'make_array', [unreduced, lambda: NUMBERS, PLACES['elsewhere']], ids=['parts', 'host', 'off']
)
def test_blocks_of_unreduced_arrays_are_parts_of_sums(make_array: Callable[[], Any]) -> None:
    x = make_array()
    summed = EXPLICIT.gather(x)
    kinds = []

    def total(block: jax.Array) -> jax.Array:
        kinds.append(str(jax.typeof(block)))
        return jax.lax.psum(block, 'b')

    mapped = EXPLICIT.shard_map(total, UNREDUCED, P('a'))
    np.testing.assert_array_equal(mapped(x), summed)
    for rule in (UNREDUCED, P('b')):  # arguments with another sharding are converted inside
        step = EXPLICIT.sjit(mapped, in_shardings=rule, on_mismatch='reshard')
        np.testing.assert_array_equal(step(x), summed)
    parts = EXPLICIT.shard(x, UNREDUCED)
    np.testing.assert_array_equal(EXPLICIT.shard_map(total, None, P('a'))(parts), summed)  # like its type
    assert set(kinds) == {'float32[2,8]{V:a, U:b}'}
    same = EXPLICIT.shard_map(lambda block: block, UNREDUCED, UNREDUCED)(parts)
    assert jax.typeof(same).sharding.spec.unreduced == {'b'}
    np.testing.assert_array_equal(EXPLICIT.gather(same), summed)


def test_blocks_of_reduced_arrays() -> None:
    mapped = EXPLICIT.shard_map(lambda block: block, REDUCED, REDUCED)
    for call in (mapped, EXPLICIT.sjit(mapped), EXPLICIT.sjit(mapped, in_shardings=REDUCED)):
        out = call(NUMBERS)
        assert out.sharding.spec.reduced == {'b'}
        np.testing.assert_array_equal(EXPLICIT.gather(out), NUMBERS)


def test_complex_numbers_are_not_made_unreduced() -> None:
    with pytest.raises(ShardingError) as caught:
        EXPLICIT.shard(NUMBERS.astype(np.complex64), P('a', unreduced={'b'}))
    lines = str(caught.value).splitlines()
    assert lines[1:3] == [
        '  (the leaf itself): complex64[8, 8]',
        '    complex numbers cannot be placed as terms of a sum',
    ]
    for array, kind in (
        (1j * NUMBERS, 'complex numbers'),
        (jax.random.split(jax.random.key(0), 8), 'PRNG keys'),
    ):
        step = EXPLICIT.sjit(lambda x: with_sharding_constraint(x, P('a', unreduced={'b'})))
        with pytest.raises(ShardingError, match=f'{kind} cannot be placed as terms of a sum'):
            step(array)
    # They are reduced like other sums.
    parts = EXPLICIT.sjit(matmul, in_shardings=(P('a', 'b'), P('b')))(1j * NUMBERS, NUMBERS)
    np.testing.assert_array_equal(EXPLICIT.gather(parts), 1j * NUMBERS @ NUMBERS)


@pytest.mark.skipif(
    not hasattr(jax.sharding, 'UnreducedKind'), reason='needs UnreducedKind, which JAX 0.10 lacks'
)
def test_only_sums_are_made() -> None:
    spec = P('a', unreduced={'b'}, unreduced_kind=jax.sharding.UnreducedKind.max)
    for array in (NUMBERS, unreduced()):
        with pytest.raises(ShardingError, match='arrays cannot be placed as terms of a max'):
            EXPLICIT.shard(array, spec)


def test_an_unreduced_argument_is_no_other() -> None:
    step = EXPLICIT.sjit(lambda grads: grads, in_shardings=P('a'))
    with pytest.raises(
        PlacementError, match=re.escape("grads: float32[8, 8] is sharded as P('a', None, unreduced={'b'}")
    ):
        step(unreduced())
