"""Resharding between meshes of the devices of one process."""

import gc
import json

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax._data.reshard import device_ops, leaf_transfer
from scalax.errors import ArgumentError, MeshError, ShardingError
from scalax.plan import plan_reshard
from scalax.sharding import MeshShardingHelper
from tests.support import gpu_compiler

ORDERS = [[*range(8)], [7, 6, 5, 4, 3, 2, 1, 0], [4, 5, 6, 7, 0, 1, 2, 3], [3, 0, 6, 1, 7, 4, 2, 5]]
DTYPES = ['float32', 'bfloat16', 'int32', 'int4', 'bool', 'complex64', 'float8_e4m3fn']


def helper_of(devices, *sizes):
    """Makes a mesh with axes a, b, ... of these sizes, over devices given by index."""
    chosen = [jax.devices()[i] for i in devices]
    return MeshShardingHelper(sizes, [*'abc'][: len(sizes)], devices=chosen)


def values(shape, dtype, seed=0):
    numbers = np.random.default_rng(seed).integers(0, 2 if dtype == 'bool' else 7, shape)
    return np.asarray(numbers).astype(jnp.dtype(dtype))


def assert_equal(array, expected):
    """Compares all shards on all devices bit by bit."""
    assert array.dtype == expected.dtype
    for shard in array.addressable_shards:
        assert np.asarray(shard.data).tobytes() == expected[shard.index].tobytes()


ADVICE = (
    'What to do: pass arrays on devices, before they are donated; for a plan, structs with shardings, '
    'from helper.abstract(tree, rules). helper.shard moves arrays from and to host memory.'
)


@st.composite
def meshes(draw):
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (4,), (8,), (2, 2), (3, 2), (2, 4), (4, 2)]))
    devices = draw(st.sampled_from(ORDERS))[: int(np.prod(sizes))]
    entries = draw(st.permutations([*'abc'[: len(sizes)], None]))
    joined = [('a', 'b'), None] if len(sizes) == 2 and draw(st.booleans()) else entries[:2]
    return helper_of(devices, *sizes), P(*joined)


@pytest.mark.slow
@hypothesis.given(meshes(), meshes(), st.sampled_from(DTYPES), st.sampled_from([None, 128]), st.booleans())
def test_reshard_between_random_meshes(before, after, dtype, memory, donate):
    x = values((24, 48), dtype)
    source = before[0].shard(x, before[1])
    moved = after[0].reshard({'x': source}, after[1], memory=memory, donate=donate)['x']
    assert moved.sharding.is_equivalent_to(NamedSharding(after[0].mesh, after[1]), 2)
    assert_equal(moved, x)
    assert source.is_deleted() == donate
    if not donate:
        assert_equal(source, x)


@pytest.mark.medium
def test_leaves_of_all_kinds():
    before, after = helper_of([0, 1, 2, 3], 4), helper_of([5, 2], 2)
    keys = jax.random.split(jax.random.key(3, impl='rbg'), 8)
    tree = {
        'keys': before.shard(keys, P('a')),
        'scalar': before.shard(jnp.float32(2.5), P()),
        'uncommitted': jnp.arange(8),
        'empty': before.shard(np.zeros((0, 4), np.float32), P(None, 'a')),
    }
    for donate in (False, True):
        rules = {**dict.fromkeys(tree, P('a')), 'scalar': P(), 'empty': P(None, 'a')}
        moved = after.reshard(tree, rules, donate=donate, memory='1KiB')
        assert {name: leaf.sharding.spec for name, leaf in moved.items()} == rules
        np.testing.assert_array_equal(jax.random.key_data(moved['keys']), jax.random.key_data(keys))
        assert moved['keys'].dtype == keys.dtype
        assert (moved['scalar'], moved['empty'].shape) == (2.5, (0, 4))
        np.testing.assert_array_equal(moved['uncommitted'], np.arange(8))


def test_leaves_that_cannot_be_moved():
    helper = helper_of(range(4), 4)
    pinned = NamedSharding(helper.mesh, P('a'), memory_kind='pinned_host')
    with pytest.raises(ArgumentError) as error:
        helper.reshard({'h': jax.device_put(np.zeros(4), pinned), 'n': 3, 'x': np.zeros(4)}, P())
    assert str(error.value) == (
        'reshard: these leaves cannot be moved:\n'
        '  h: float32[4] is in pinned_host memory\n'
        '  n: Python int has no sharding\n'
        '  x: float64[4] has no sharding\n' + ADVICE
    )
    with pytest.raises(ArgumentError) as error:
        helper.reshard({'x': helper.shard(np.zeros(4), P())}, pinned)
    assert str(error.value) == (
        'reshard: these leaves cannot be moved:\n  x of the result is in pinned_host memory\n' + ADVICE
    )


@pytest.mark.medium
def test_axis_types_and_a_mesh_that_is_set():
    before = helper_of(range(4), 4)
    devices = jax.devices()[2:6]
    after = MeshShardingHelper([2, 2], ['a', 'b'], devices=devices, axis_types=AxisType.Explicit)
    tree = before.shard({'x': values((8, 8), 'float32'), 'k': jax.random.split(jax.random.key(0), 8)}, P('a'))
    with jax.set_mesh(after.mesh):
        moved = after.reshard(tree, P('b'), memory=64)
        assert jax.typeof(moved['x']).sharding.spec == P('b', None)
        parts = after.shard(values((8, 8), 'float32'), P(unreduced={'a'}))
        for helper, array, spec, text in [
            (
                before,
                parts,
                P('a'),
                'reshard: these leaves cannot be moved:\n'
                '  (the leaf itself): float32[8, 8] holds partial sums (unreduced axes)\n' + ADVICE,
            ),
            (
                after,
                tree,
                P(unreduced={'a'}),
                'reshard: these leaves cannot be moved:\n'
                '  k of the result holds partial sums (unreduced axes)\n'
                '  x of the result holds partial sums (unreduced axes)\n' + ADVICE,
            ),
        ]:
            with pytest.raises(ArgumentError) as error:
                helper.reshard(array, spec)
            assert str(error.value) == text
    assert_equal(moved['x'], values((8, 8), 'float32'))


def test_result_shares_memory_only_if_donated():
    helper = helper_of(range(4), 4)
    # The memory of NumPy arrays, which `shard` may share, is not donated.
    source = helper.reshard(helper.shard(values((8, 8), 'float32'), P('a')), P('a'))
    pointers = [shard.data.unsafe_buffer_pointer() for shard in source.addressable_shards]
    moved = helper.reshard(source, P('a'))
    assert not set(pointers) & {shard.data.unsafe_buffer_pointer() for shard in moved.addressable_shards}
    moved = helper.reshard(source, P('a'), donate=True)
    assert source.is_deleted()
    assert pointers == [shard.data.unsafe_buffer_pointer() for shard in moved.addressable_shards]
    assert_equal(moved, values((8, 8), 'float32'))


def test_repeated_arrays():
    before, after = helper_of(range(4), 4), helper_of(range(2, 6), 4)
    x = values((8, 8), 'float32')
    source = before.shard(x, P('a'))
    parts = [shard.data for shard in source.addressable_shards]
    same = jax.make_array_from_single_device_arrays(source.shape, source.sharding, parts)
    moved = after.reshard([source, source, same], P('a'), donate=True)
    assert source.is_deleted()
    assert same.is_deleted()
    for array in moved:
        assert_equal(array, x)
    moved[0].delete()
    assert_equal(moved[1], x)


@pytest.mark.medium
def test_dtype_casts():
    before, after = helper_of(range(4), 4), helper_of(range(4, 8), 2, 2)
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    tree = before.shard({'w': x, 'n': np.arange(8), 's': x.astype('float8_e5m2')}, P('a'))
    moved = after.reshard(tree, P('a'), dtype=jnp.bfloat16)
    assert_equal(moved['w'], x.astype('bfloat16'))
    assert (moved['n'].dtype, moved['s'].dtype) == (np.int32, jnp.float8_e5m2)
    assert_equal(before.reshard(moved, P('a'), dtype='float32')['w'], x.astype('bfloat16').astype('float32'))


@pytest.mark.medium
def test_schedules_are_cached(monkeypatch):
    counted = []
    schedule_of = leaf_transfer.make_schedule
    monkeypatch.setattr(
        leaf_transfer, 'make_schedule', lambda *args: counted.append(args) or schedule_of(*args)
    )
    before, after = helper_of(range(4), 4), helper_of(range(1, 6), 5)
    for seed in range(3):
        tree = {name: before.shard(values((4, 35), 'float32', seed), P('a')) for name in 'xyz'}
        moved = after.reshard(tree, P(None, 'a'))
        assert_equal(moved['z'], values((4, 35), 'float32', seed))
        assert len(counted) == 1


def test_errors_before_anything_moves():
    helper = helper_of(range(4), 4)
    for options, text in {
        ('memory', 'much'): "memory is a size ('2GiB', '500MB', or bytes) or None, got 'much'",
        ('dtype', 'int8'): "dtype is that of floating-point leaves, or None, got 'int8'",
        ('donate', 'no'): "donate is True or False, got 'no'",
    }.items():
        with pytest.raises(ArgumentError) as error:
            helper.reshard(np.zeros(4), P(), **dict([options]))
        assert str(error.value) == text
    deleted = helper.shard(np.zeros(4), P())
    deleted.delete()
    struct = helper.abstract(np.zeros(4), P('a'))
    with pytest.raises(ArgumentError) as error:
        helper.reshard({'w': deleted, 'x': struct}, P())
    assert str(error.value) == (
        'reshard: these leaves cannot be moved:\n'
        '  w: float32[4] was deleted, or donated to a function\n'
        '  x: float32[4] has no value, but this process holds a shard of it\n' + ADVICE
    )
    with pytest.raises(ArgumentError) as error:
        helper.reshard({'x': jax.ShapeDtypeStruct((4,), 'float32'), 'y': 'text'}, P())
    assert str(error.value).splitlines()[1:3] == [
        '  x: float32[4] has no sharding',
        '  y: str is not an array',
    ]
    with pytest.raises(ShardingError, match='dimension 0 of size 3'):
        helper.reshard(helper.shard(np.zeros(3), P()), P('a'))


@gpu_compiler.needed
def test_plan_counts_bytes():
    before = MeshShardingHelper.from_topology('h100:2x4', [8], ['fsdp'])
    after = MeshShardingHelper([2, 4], ['dp', 'tp'], devices=before.mesh.devices.flat)
    tree = {'w': before.abstract(jax.ShapeDtypeStruct((64, 64), 'float32'), P('fsdp'))}
    plan = plan_reshard(after, tree, P(None, 'tp'), dtype='bfloat16')
    # Of each of 8 rows of blocks, 4 parts of 256 bytes are needed by two devices each, one in each slice.
    assert (plan.bytes, plan.local_bytes) == (8192, 8 * 256)
    assert plan.bytes_by_network == {'ici': 3 * 8 * 256, 'dcn': 4 * 8 * 256}
    assert plan.max_bytes_received == 7 * 256
    assert plan.hardware == 'h100'
    assert plan.seconds > plan.communication_rounds * 256 / 4.5e11
    assert plan_reshard(after, tree, P(None, 'tp'), memory=256).peak <= 256
    assert json.loads(plan.to_json())['bytes_by_network'] == plan.bytes_by_network
    assert 'moves by NVLink' in str(plan)
    helper = helper_of(range(2), 2)
    assert plan_reshard(helper, helper.shard(np.zeros(4), P()), P()).seconds is None
    with pytest.raises(MeshError) as error:
        plan_reshard(MeshShardingHelper.from_mesh(jax.sharding.AbstractMesh((2,), ('a',))), tree, P())
    assert str(error.value) == 'plan_reshard needs a mesh of devices, which may be absent ones: from_topology'


# --- Names ----------------------------------------------------------------------------------------


@pytest.mark.medium
def test_stacked_renamed_and_transposed_layers():
    trainer, sampler = helper_of(range(4), 2, 2), helper_of(range(4, 7), 3)
    layers = {str(i): {'w': values((4, 6), 'float32', i)} for i in range(6)}
    tree = trainer.shard({'layers': layers, 'head': values((4, 6), 'float32', 9)}, P('a', 'b'))
    mapping = [(r'^layers/(\d+)/w', r'blocks/kernel[\1]', (1, 0)), ('head', 'output', (1, 0)), ('', None)]
    rules = {'blocks': P('a'), 'output': P('a')}
    moved = sampler.reshard(tree, rules, mapping=mapping, memory=64)
    assert_equal(moved['blocks']['kernel'], np.stack([layers[str(i)]['w'].T for i in range(6)]))
    assert_equal(moved['output'], np.asarray(tree['head']).T)
    back = trainer.reshard(
        moved,
        P('a', 'b'),
        mapping={'blocks/kernel': 'layers/*/w', 'output': None},
        donate=True,
    )
    assert moved['blocks']['kernel'].is_deleted()
    assert [*back['layers']] == [str(i) for i in range(6)]
    for i in range(6):
        assert_equal(back['layers'][str(i)]['w'], layers[str(i)]['w'].T)


@pytest.mark.medium
def test_stacks_are_transposed_before_they_are_split():
    x = values((4, 3, 6), 'float32')
    source = helper_of(range(4), 2, 2).shard({'x': x}, P('a', None, 'b'))
    moved = helper_of([6, 3], 2).reshard(source, P(None, 'a'), mapping={'x': ('y/*', (1, 0, 2))}, memory=64)
    for i in range(3):
        assert_equal(moved['y'][str(i)], x.transpose(1, 0, 2)[i])


def test_invalid_mappings():
    helper = helper_of(range(4), 4)
    tree = helper.shard(
        {'a': np.zeros(4), 'b': np.zeros(8), 'c': np.zeros(4, 'int32'), 'd': np.zeros(4), 's': np.zeros(())},
        P(),
    )
    mapping = {'a': 'x[0]', 'b': 'x[1]', 'c': 'y[1]', 'd': ('z', (1, 0)), 's': '*'}
    with pytest.raises(ArgumentError) as error:
        helper.reshard(tree, P(), mapping=mapping)
    assert str(error.value) == (
        'the mapping does not fit the tree:\n'
        '  d: float32[4] does not have the axes (1, 0)\n'
        '  s: float32[] has no first dimension to split\n'
        '  a, b: go to x, one array, and are float32[4], float32[8]\n'
        '  c: go to y, whose layers would be [1]\n'
        'What to do: give every leaf its own path, or path[0], path[1], ... in a stack, or a path with * for '
        'its layers, or None to leave it out.'
    )
    with pytest.raises(ArgumentError) as error:
        helper.reshard(tree, P(), mapping={'a': 'x', 'b': 'x', 'c': 'y', 'd': 'y/z', 's': None})
    assert str(error.value).splitlines()[1:3] == [
        '  a, b: go to x, which is one leaf',
        '  d: goes to y/z, which overlaps the path of another leaf',
    ]
    with pytest.raises(ArgumentError) as error:
        helper.reshard({'norm/scale': tree['a'], 'b': tree['b']}, P(), mapping={'norm/scales': 'x'})
    assert str(error.value).splitlines()[1:3] == [
        '  b: not in the mapping',
        "  norm/scale: not in the mapping, whose name 'norm/scales' no leaf has",
    ]


# --- Memory ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('spec', [P('a'), P(None, 'a'), P()])
def test_memory_bound(spec, monkeypatch):
    before, after = helper_of(range(4), 4), helper_of(range(8), 8)
    x = values((64, 256), 'float32')
    source = before.shard(x, P('a'))
    gc.collect()

    def alive():
        # In JAX 0.10, reading the shards of other arrays would keep them alive.
        alive_bytes = dict.fromkeys(jax.devices(), 0)
        for _, device, size in {
            (array.unsafe_buffer_pointer(), *array.devices(), array.nbytes)
            for array in jax.live_arrays()
            if len(array.devices()) == 1
        }:
            alive_bytes[device] += size
        return alive_bytes

    block = after.shard(np.zeros(x.shape, np.float32), spec).addressable_shards[0].data.nbytes
    gc.collect()
    parts = [shard.data for shard in source.addressable_shards]
    first, most = alive(), dict.fromkeys(jax.devices(), 0)
    assert sum(first.values()) >= sum(part.nbytes for part in parts)

    def measured(function):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            for device, size in alive().items():
                most[device] = max(most[device], size - first[device])
            return result

        return call

    for name in ('extract', 'send', 'insert'):
        monkeypatch.setattr(device_ops, name, measured(getattr(device_ops, name)))
    assert_equal(after.reshard(source, spec), x)
    unbounded = max(most.values()) - block
    most.update(dict.fromkeys(most, 0))
    assert_equal(after.reshard(source, spec, memory='2KiB'), x)
    assert 0 < max(most.values()) - block <= 2048 < unbounded
