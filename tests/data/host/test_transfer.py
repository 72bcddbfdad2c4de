"""Transfer of host data to global arrays and back, in one process."""

import itertools
import math
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from scalax._data.host.local_batch import _boxes_by_process
from scalax._data.host.process_collectives import concat_by_process
from scalax.errors import DataError, MeshError, ScalaxError
from scalax.sharding import MeshShardingHelper

HELPER = MeshShardingHelper([4, 2], ['data', 'tp'])
ORDERS = {
    'as they come': list(range(8)),
    'evens first': [0, 2, 4, 6, 1, 3, 5, 7],
    'backwards': list(range(8))[::-1],
}


@pytest.mark.medium
@pytest.mark.parametrize(
    ('shape', 'options', 'spec', 'part'),
    [
        ((8, 3), {}, P(('data', 'tp')), (1, 3)),
        ((16, 3), {'mesh_axis_subset': None}, P(('data', 'tp')), (2, 3)),
        ((8, 3), {'mesh_axis_subset': 'data'}, P('data'), (2, 3)),
        ((4, 3), {'mesh_axis_subset': ['data']}, P('data'), (1, 3)),  # not by all devices
        ((2, 3), {'mesh_axis_subset': ('tp',)}, P('tp'), (1, 3)),
        ((8, 3), {'mesh_axis_subset': ['tp', 'data']}, P(('tp', 'data')), (1, 3)),
        ((5, 3), {'mesh_axis_subset': []}, P(), (5, 3)),
        ((3, 8), {'batch_axis': 1}, P(None, ('data', 'tp')), (3, 1)),
        ((3, 8), {'batch_axis': -1}, P(None, ('data', 'tp')), (3, 1)),
        ((8, 3), {'batch_axis': -2}, P(('data', 'tp')), (1, 3)),
        ((2, 8, 3), {'batch_axis': 1, 'mesh_axis_subset': 'data'}, P(None, 'data'), (2, 2, 3)),
        ((0, 3), {}, P(('data', 'tp')), (0, 3)),
        ((), {}, P(), ()),
        ((), {'batch_axis': -1}, P(), ()),
    ],
)
@pytest.mark.parametrize('make', [np.asarray, jnp.asarray])
def test_local_data(rng, shape, options, spec, part, make):
    local = make(rng.integers(0, 100, shape).astype(np.int32))
    array = HELPER.local_data_to_global_array(local, **options)
    assert array.sharding.spec == spec
    assert array.sharding.mesh == HELPER.mesh
    assert {shard.data.shape for shard in array.addressable_shards} == {part}
    np.testing.assert_array_equal(array, local)
    axis = options.get('batch_axis', 0)
    np.testing.assert_array_equal(HELPER.global_array_to_local_data(array, axis), local)


def test_cached_shardings_depend_on_all_options():
    local, other = (
        np.zeros((8, 8), np.int32),
        MeshShardingHelper([4, 2], ['data', 'tp'], axis_types=AxisType.Explicit),
    )
    for _ in range(2):
        for options, spec in (
            ({}, P(('data', 'tp'))),
            ({'batch_axis': 1}, P(None, ('data', 'tp'))),
            ({'mesh_axis_subset': ['tp']}, P('tp')),
        ):
            assert HELPER.local_data_to_global_array(local, **options).sharding.spec == spec
        assert other.local_data_to_global_array(local).sharding.mesh == other.mesh != HELPER.mesh
        for options in ({'batch_axis': True}, {'local_batch': 'some'}, {'mesh_axis_subset': ['pt']}):
            with pytest.raises(ScalaxError):
                HELPER.local_data_to_global_array(local, **options)
        with pytest.raises(DataError):
            HELPER.local_data_to_global_array(local[:7])


@pytest.mark.parametrize('order', ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize('subset', [None, 'data', 'tp'])
def test_examples_keep_their_order_for_any_device_order(order, subset):
    helper = MeshShardingHelper([4, 2], ['data', 'tp'], devices=[jax.devices()[i] for i in order])
    array = helper.local_data_to_global_array(np.arange(16), mesh_axis_subset=subset)
    np.testing.assert_array_equal(array, np.arange(16))
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.arange(16)[shard.index])


@pytest.mark.parametrize('count', [1, 3, 6, 7])
def test_meshes_of_some_devices(count):
    helper = MeshShardingHelper([count], ['data'], devices=jax.devices()[-count:])
    array = helper.local_data_to_global_array(np.arange(2 * count))
    assert array.sharding.device_set == set(jax.devices()[-count:])
    np.testing.assert_array_equal(array, np.arange(2 * count))


@pytest.mark.parametrize('types', list(itertools.product([AxisType.Auto, AxisType.Explicit], repeat=2)))
def test_axis_types(types):
    # One dimension cannot be sharded over axes of different types, so mixed meshes need a subset.
    subset = None if len(set(types)) == 1 else 'data'
    helper = MeshShardingHelper([4, 2], ['data', 'tp'], axis_types=types)
    array = helper.local_data_to_global_array(np.arange(8), mesh_axis_subset=subset)
    np.testing.assert_array_equal(array, np.arange(8))
    np.testing.assert_array_equal(helper.sjit(lambda x: 2 * x)(array), 2 * np.arange(8))


def test_trees():
    batch = {
        'tokens': np.arange(16).reshape(8, 2),
        'mask': np.ones((8, 1), bool),
        'keys': jax.random.split(jax.random.key(0), 8),
        'step': 7,
        'scale': np.float32(0.5),
        'extra': None,
    }
    arrays = HELPER.local_data_to_global_array(batch)
    assert jax.tree.structure(arrays) == jax.tree.structure(batch)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(arrays))
    assert (arrays['step'].sharding.spec, int(arrays['step'])) == (P(), 7)
    assert arrays['keys'].dtype == batch['keys'].dtype
    local = HELPER.global_array_to_local_data(arrays)
    keys = local.pop('keys')
    assert (keys == batch['keys']).all()
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(local))
    for name in ('tokens', 'mask', 'step', 'scale'):
        np.testing.assert_array_equal(local[name], batch[name])


def test_one_transfer_for_all_leaves(monkeypatch):
    calls = []
    put = jax.device_put
    monkeypatch.setattr(jax, 'device_put', lambda *args: calls.append(args) or put(*args))
    HELPER.local_data_to_global_array([np.zeros(8), np.zeros((8, 2)), 1.0])
    assert len(calls) == 1
    with pytest.raises(DataError):
        HELPER.local_data_to_global_array([np.zeros(8), np.zeros(7)])
    assert len(calls) == 1


@pytest.mark.parametrize(
    ('data', 'options'),
    [
        ({'x': np.ones((6, 2), np.float32), 'fine': np.ones(8), 'y': np.ones(4, np.int8)}, {}),
        (np.ones((8, 6), np.float32), {'batch_axis': -1, 'mesh_axis_subset': 'data'}),
        ([np.ones(8, np.float32), np.ones((2, 8), np.float32)], {'batch_axis': 1}),
        (
            {
                'count': 2**31,
                'name': 'train',
                'text': np.array(['a'] * 8),
                'shape': jax.ShapeDtypeStruct((8,), 'float32'),
                'objects': np.array([None] * 8),
                'swapped': np.ones(8, '>f4'),
            },
            {},
        ),
    ],
)
def test_indivisible_data(data, options, snapshot):
    with snapshot.raises(DataError):
        HELPER.local_data_to_global_array(data, **options)


@pytest.mark.parametrize(
    ('subset', 'message'),
    [
        ('dat', "mesh_axis_subset: the mesh (data=4, tp=2) has no axis 'dat' (did you mean 'data'?)"),
        (['tp', 'x'], "mesh_axis_subset: the mesh (data=4, tp=2) has no axis 'x' (known: 'data', 'tp')"),
        (['tp', 'tp'], "mesh_axis_subset: mesh axes are named once each, got ('tp', 'tp')"),
    ],
)
def test_unknown_axes(subset, message):
    with pytest.raises(MeshError) as error:
        HELPER.local_data_to_global_array(np.zeros(8), mesh_axis_subset=subset)
    assert str(error.value) == message


def test_axes_of_different_types(snapshot):
    helper = MeshShardingHelper([4, 2], ['data', 'tp'], axis_types=(AxisType.Auto, AxisType.Explicit))
    with snapshot.raises(MeshError):
        helper.local_data_to_global_array(np.zeros(8))


@pytest.mark.parametrize(
    ('shape', 'axis', 'spec', 'part'),
    [
        ((16, 3), 0, P(('process', 'device')), (2, 3)),
        ((3, 8), 1, P(None, ('process', 'device')), (3, 1)),
        ((9, 3), 0, P('process'), (9, 3)),
        ((4, 8), 0, P('process'), (4, 8)),
    ],
)
def test_concat_by_process_shards_over_devices_if_they_divide(shape, axis, spec, part):
    rows = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    array = concat_by_process(HELPER.mesh, rows, axis)
    assert array.sharding.spec == spec
    assert {shard.data.shape for shard in array.addressable_shards} == {part}
    np.testing.assert_array_equal(array, rows)


def test_boxes_by_process():
    """Devices of a process may hold the same box or several, and processes may hold the same boxes."""
    first, last = (slice(0, 4), slice(None)), (slice(4, None), slice(None))
    held = [(0, first), (0, first), (1, last), (1, first)]
    placed = {Mock(process_index=process): index for process, index in held}
    leaf = Mock(shape=(8, 3), sharding=Mock(devices_indices_map=lambda _: placed))
    assert _boxes_by_process(leaf) == {
        0: {((0, 4), (0, 3))},
        1: {((0, 4), (0, 3)), ((4, 8), (0, 3))},
    }


@pytest.mark.parametrize('subset', [None, 'data', 'tp', []])
def test_one_process_needs_every_example(subset):
    assert HELPER.process_examples(16, mesh_axis_subset=subset) == slice(0, 16)
    local = np.arange(32).reshape(16, 2)
    array = HELPER.local_data_to_global_array(
        local, 0, subset, local_batch='addressable', check_replicas=True
    )
    np.testing.assert_array_equal(array, local)
    np.testing.assert_array_equal(HELPER.global_array_to_local_data(array, local_batch='addressable'), local)


@pytest.mark.parametrize(
    'call',
    [
        lambda: HELPER.process_examples(6),
        lambda: HELPER.process_examples(-8),
        lambda: HELPER.process_examples([8]),
        lambda: HELPER.process_examples(8, 'data'),
        lambda: HELPER.local_data_to_global_array(np.zeros(8), local_batch='some'),
        lambda: HELPER.global_array_to_local_data(np.zeros(8), local_batch='some'),
        lambda: HELPER.local_data_to_global_array({'x': np.zeros(6)}, local_batch='addressable'),
        lambda: HELPER.broadcast_from(1, 5),
        lambda: HELPER.broadcast_from(0, {'a': 'text', 'b': 2**70, 'c': jax.ShapeDtypeStruct((2,), 'int8')}),
    ],
)
def test_invalid_data_calls(call, snapshot):
    with snapshot.raises(DataError):
        call()


def test_broadcast_on_one_process():
    key = jax.random.key(3)
    tree = {'x': np.arange(3, dtype=np.int64), 'y': jnp.ones(2), 'n': 2**40, 'f': 0.1, 'b': True, 'key': key}
    result = HELPER.broadcast_from(0, tree)
    assert (result['n'], result['f'], result['b'], result['key']) == (2**40, 0.1, True, key)
    assert result['x'].dtype == np.int64
    assert isinstance(result['y'], np.ndarray)
    result['x'][0] = 9  # in separate memory
    assert tree['x'][0] == 0


@pytest.mark.parametrize('axis', [True, 0.0, '0'], ids=repr)
def test_cached_shardings_depend_on_the_type_of_the_axis(axis: Any) -> None:
    data = np.zeros((8, 8))
    for equal in (0, 1):  # True is equal to 1, and 0.0 to 0
        HELPER.local_data_to_global_array(data, equal)
    with pytest.raises(DataError, match='batch_axis is an integer'):
        HELPER.local_data_to_global_array(data, axis)


def test_cached_shardings_depend_on_dtype_and_structure() -> None:
    for dtype in (np.float64, np.int32, np.dtype('float16'), bool):
        with jax.enable_x64(True):
            assert HELPER.local_data_to_global_array(np.zeros(8, dtype)).dtype == dtype
        for tree in ({'a': np.zeros(8, dtype)}, [np.zeros(8, dtype)], {True: np.zeros(8, dtype)}):
            array = HELPER.local_data_to_global_array(tree)
            assert jax.tree.structure(array) == jax.tree.structure(tree)
            assert {leaf.dtype for leaf in jax.tree.leaves(array)} == {jax.dtypes.canonicalize_dtype(dtype)}
