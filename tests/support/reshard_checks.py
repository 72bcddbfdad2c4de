"""Checks of resharding with several processes: reshard/test_processes.py runs them in each process."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalax.errors import ArgumentError, DataError
from scalax.sharding import MeshShardingHelper


def ordered() -> list[Any]:
    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))


def helper_of(numbers: Any, *sizes: int) -> MeshShardingHelper:
    chosen = [ordered()[i] for i in numbers]
    return MeshShardingHelper(sizes, [*'abc'][: len(sizes)], devices=chosen)


def placed(helper: MeshShardingHelper, x: np.ndarray, spec: P) -> Any:
    """Makes an array on a mesh without communication."""
    sharding = NamedSharding(helper.mesh, spec)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index], dtype=x.dtype)


def assert_equal(array: jax.Array, expected: np.ndarray) -> None:
    assert array.shape == expected.shape, array
    assert array.dtype == expected.dtype, array
    for shard in array.addressable_shards:
        assert np.asarray(shard.data).tobytes() == expected[shard.index].tobytes(), shard


def x_of(dtype: str = 'float32') -> np.ndarray:
    return (
        np.random.default_rng(0).integers(0, 2 if dtype == 'bool' else 7, (24, 48)).astype(jnp.dtype(dtype))
    )


def check_reshard_between_meshes() -> None:
    """Meshes with fewer, more or other devices, or another order: disjoint, overlapping, equal sets."""
    meshes = [
        (helper_of(range(8), 4, 2), P('a', 'b')),
        (helper_of(range(7, -1, -1), 2, 4), P('b', 'a')),
        (helper_of(range(4), 4), P('a')),
        (helper_of(range(4, 8), 2, 2), P(None, ('a', 'b'))),
        (helper_of([1, 4, 6], 3), P(None, 'a')),
        (helper_of([5, 2], 2), P()),
    ]
    x = x_of()
    for (before, spec), (after, expected) in itertools.permutations(meshes, 2):
        source = placed(before, x, spec)
        moved = after.reshard(source, expected)
        assert_equal(moved, x)
        assert_equal(source, x)


def check_dtypes() -> None:
    before, after = helper_of(range(4), 4), helper_of(range(3, 7), 4)
    for dtype in ('int4', 'bool', 'float8_e4m3fn', 'complex64'):
        assert_equal(after.reshard(placed(before, x_of(dtype), P('a')), P('a')), x_of(dtype))
    x = np.random.default_rng(0).normal(size=(24, 48)).astype(np.float32)
    moved = after.reshard(placed(before, x, P('a')), P('a'), dtype='bfloat16')
    assert_equal(moved, x.astype('bfloat16'))
    assert_equal(before.reshard(moved, P('a'), dtype='float32'), x.astype('bfloat16').astype('float32'))


def check_trees() -> None:
    """Keys, scalars, and leaves without local shards; with donation and a memory limit."""
    before, after = helper_of(range(4), 4), helper_of(range(4, 8), 2, 2)
    keys = jax.random.split(jax.random.key(3), 8)
    tree = {
        'w': placed(before, x_of(), P('a')),
        'keys': before.shard(keys, P('a')) if before.mesh.local_devices else None,
        'scalar': placed(before, np.float32(2.5), P()),
    }
    if tree['keys'] is None:
        sharding = NamedSharding(before.mesh, P('a'))
        tree['keys'] = jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=sharding)
        assert not tree['w'].addressable_shards
    rules = {**dict.fromkeys(tree, P('b')), 'w': P('a', 'b'), 'scalar': P()}
    moved = after.reshard(tree, rules, donate=True, memory=256)
    assert tree['w'].is_deleted()
    assert_equal(moved['w'], x_of())
    assert_equal(moved['scalar'], np.float32(2.5))
    assert moved['keys'].dtype == keys.dtype
    for shard in moved['keys'].addressable_shards:
        expected = jax.random.key_data(keys)[shard.index[:1]]
        np.testing.assert_array_equal(jax.random.key_data(shard.data), expected)


def check_names() -> None:
    trainer, sampler = helper_of(range(4), 2, 2), helper_of(range(3, 6), 3)
    layers = {str(i): placed(trainer, x_of() + i, P('a', 'b')) for i in range(3)}
    mapping = [(r'(\d+)', r'w[\1]', (1, 0))]
    moved = sampler.reshard(layers, P('a'), mapping=mapping, memory='1KiB')
    assert_equal(moved['w'], np.stack([(x_of() + i).T for i in range(3)]))
    back = trainer.reshard(moved, P('b'), mapping={'w': 'layers/*'})
    for i in range(3):
        assert_equal(back['layers'][str(i)], (x_of() + i).T)


def check_disagreement() -> None:
    before, after = helper_of(range(4), 4), helper_of(range(4, 8), 4)
    source = placed(before, x_of(), P('a'))
    me = jax.process_index()
    text = ''
    try:
        after.reshard({'u': jnp.arange(8)}, P('a'))
    except ArgumentError as error:
        text = str(error)
    assert 'u: int32[8] was never placed on a mesh: each process has its own copy' in text, text
    try:
        after.reshard({'w': source}, P('a') if me else P(None, 'a'))
    except DataError as error:
        text = str(error)
    assert text == (
        'reshard: the processes disagree (mesh (a=4)):\n'
        "  process 1: w is float32[24, 48] for P('a',) from w float32[24, 48] as P('a',) on devices "
        "{0}, and float32[24, 48] for P(None, 'a') from w float32[24, 48] as P('a',) on devices {0} on "
        'process 0\n'
        'What to do: call it on every process of the program, with trees of one structure, shape, dtype and '
        'sharding; where a process holds no shard of an array, pass '
        'jax.ShapeDtypeStruct(shape, dtype, sharding=...) in its place.'
    ).format(', '.join(str(device.id) for device in ordered()[:4])), text
    try:
        after.reshard({'w': source}, P('a'), memory='1KiB' if me else None)
    except DataError as error:
        text = str(error)
    assert 'process 1: (the call) is with donate=False and memory=1024, and with donate=False and ' in text, (
        text
    )
    try:
        after.reshard({'w': source}, P('a'), dtype='int8' if me else None)
    except (ArgumentError, DataError) as error:
        text = str(error)
    assert "dtype is that of floating-point leaves, or None, got 'int8'" in text, text
    if me == 0:
        source.delete()
    try:
        after.reshard({'w': source}, P('a'))
    except (ArgumentError, DataError) as error:
        text = str(error)
    assert 'w: float32[24, 48] was deleted, or donated to a function' in text, text
