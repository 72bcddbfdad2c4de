"""Checks of checkpoints with several processes: checkpoint/test_processes.py runs them in each process.

All checks use the same fixed state; they differ in the meshes that save and restore it.
"""

import collections
import functools
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from scalax._core.pytree.paths import is_weakly_typed
from scalax._jax import orbax as known_of_orbax
from scalax.checkpoint import Checkpointer, load_safetensors
from scalax.errors import CheckpointError, CheckpointWarning, ScalaxError
from scalax.sharding import MeshShardingHelper, PolicyShardingRule
from scalax.sharding import PartitionSpec as P

Moments = collections.namedtuple('Moments', 'mu nu')


def wide() -> np.ndarray:
    """Makes an array whose rows are far apart in a file."""
    return np.random.default_rng(8).integers(0, 256, (16, 8192), np.uint8)


def values() -> dict[str, Any]:
    """Makes NumPy arrays of many dtypes and shapes."""
    rng = np.random.default_rng(7)
    bits = rng.integers(0, 2**16, (16, 8), np.uint16)
    bits[bits & 0x7F80 == 0x7F80] = 1  # numbers, so that they can be compared
    return {
        'params': {
            'w': rng.normal(size=(16, 8)).astype(np.float32),
            'b/c': bits.view(ml_dtypes.bfloat16),
            'f8': rng.normal(size=16).astype(ml_dtypes.float8_e4m3fn),
            'mask': rng.integers(0, 2, 16).astype(bool),
        },
        'opt': [Moments(rng.normal(size=(8, 16)).astype(np.float16), None), (np.int8([-1] * 8),)],
        'count': np.uint32(2**32 - 1),
        'zero': np.full(8, -0.0, np.float32),
    }


@functools.cache
def state(helper: MeshShardingHelper) -> dict[str, Any]:
    """Makes a sharded state with keys and Python numbers."""
    placed = helper.shard(values(), rule(helper))
    # Created on the mesh, because device_put does not move keys to devices of other processes.
    keys = helper.sjit(made_keys, out_shardings=rule(helper))()
    return {**placed, **keys, 'counter': helper.shard(5, P()), 'step': 7, 'rate': 0.25, 'on': True}


def made_keys() -> dict[str, jax.Array]:
    return {'key': jax.random.key(3), 'keys': jax.random.split(jax.random.key(4), 8)}


def rule(helper: MeshShardingHelper) -> PolicyShardingRule:
    """Makes a rule that shards each dimension over the next mesh axis."""
    axes = [name for name, size in helper.mesh.shape.items() if size > 1]

    def policy(path: str, leaf: Any) -> P:
        if len(leaf.shape) == 1:
            return P(tuple(axes) or None)
        return P(*axes[: len(leaf.shape)])

    return PolicyShardingRule(policy)


def assert_same(actual: dict[str, Any], helper: MeshShardingHelper) -> None:
    """Checks that every leaf is bit-identical to the saved leaf, and sharded by the rules."""
    assert (actual['step'], actual['rate'], actual['on']) == (7, 0.25, True)
    assert [type(actual[name]) for name in ('step', 'rate', 'on')] == [int, float, bool]
    expected = state(helper)
    assert expected['counter'].weak_type
    shardings = helper.match_sharding_rule(rule(helper), expected)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for leaf, other, sharding in zip(*map(jax.tree.leaves, (actual, expected, shardings)), strict=True):
        if not isinstance(leaf, jax.Array):
            continue
        assert (leaf.dtype, is_weakly_typed(leaf)) == (other.dtype, is_weakly_typed(other))
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf, other = jax.random.key_data(leaf), jax.random.key_data(other)
        for actual_leaf, expected_leaf in zip(leaf.addressable_shards, other.addressable_shards, strict=True):
            assert actual_leaf.index == expected_leaf.index
            assert np.asarray(actual_leaf.data).tobytes() == np.asarray(expected_leaf.data).tobytes()


@functools.cache
def meshes() -> list[MeshShardingHelper]:
    """Makes meshes of all devices: with one axis, and with two axes in both orders."""
    devices = len(jax.devices())
    shapes = {(devices,), (devices // 2, 2), (2, devices // 2)}
    return [MeshShardingHelper(shape, ['x', 'y'][: len(shape)]) for shape in sorted(shapes)]


def folder(name: str) -> Path:
    return Path(os.environ['CHECKPOINT_CHECKS'], name)


def check_restoring_a_save_of_one_process() -> None:
    for helper in meshes()[:2]:
        assert_same(Checkpointer(folder('one')).restore(helper, rule(helper), state(helper)), helper)


def check_saving_and_restoring() -> None:
    first, *others = meshes()
    me = jax.process_index()
    checkpointer = Checkpointer(folder(f'{jax.process_count()}-processes'))
    with checkpointer:
        for step in (1, 2):
            assert checkpointer.save(step, state(first), data={'position': 10 * step + me})
        checkpointer.wait()
        for helper in others:
            restored = checkpointer.restore(helper, rule(helper), state(helper), verify=True)
            assert_same(restored, helper)
    assert checkpointer.restored_step == 2
    local = folder(f'{jax.process_count()}-processes') / '2' / 'state' / known_of_orbax.folder_of_process(me)
    assert [*local.rglob('d/*')], f'Orbax writes the arrays of process {me} elsewhere'
    assert checkpointer.data() == {'position': 20 + me}
    assert checkpointer.data(1) == {'position': 10 + me}


def check_states_written_by_one_process() -> None:
    helper = meshes()[0]
    tree = helper.shard({'w': np.arange(3.0)}, P())
    for number, expected in enumerate([{'w': np.arange(3.0)}, {'step': 7}, tree, {**tree, 'step': 7}]):
        where = folder(f'one-{jax.process_count()}-{number}')
        with Checkpointer(where, timeout=60) as checkpointer:
            checkpointer.save(1, expected)
        restored = Checkpointer(where).restore(helper, P(), expected, verify=True)
        assert sorted(restored) == sorted(expected)
        assert restored.get('step') == expected.get('step')
        if 'w' in restored:
            assert np.asarray(restored['w'].addressable_data(0)).tolist() == [0, 1, 2]


def check_safetensors() -> None:
    """Every process holds the shards of its devices."""
    expected = wide()
    # Each process has one row of the mesh, so it holds all rows of some columns.
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    grid = np.asarray(devices, dtype=object).reshape(jax.process_count(), -1)
    helper = MeshShardingHelper.from_mesh(jax.sharding.Mesh(grid, ('process', 'device')))
    tree = load_safetensors(helper, folder('w.safetensors'), P('device', 'process'))
    for shard in tree['w'].addressable_shards:
        assert np.asarray(shard.data).tobytes() == expected[shard.index].tobytes()


def check_restores_that_differ() -> None:
    """All processes raise. Otherwise they would read different steps, or deadlock."""
    helper = meshes()[0]
    me, last = jax.process_index(), jax.process_count() - 1
    where = folder(f'asked-{jax.process_count()}')
    with Checkpointer(where) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {'w': helper.shard(np.full(8, step), P('x'))})
    checkpointer = Checkpointer(where)
    like = {'w': jax.ShapeDtypeStruct((8,), np.int32)}
    for arguments, message in [
        ({'step': 1 + (me == last)}, 'calls it with step=2, only=None'),
        ({'rename': [('a', 'b')] * (me == last)}, "rename=[(re.compile('a'), 'b')]"),
        ({'like': {'w': jax.ShapeDtypeStruct((8 + 8 * (me == last),), np.int32)}}, 'w is int32[16]'),
        ({'rules': P('x') if me == last else P()}, "w is int32[8] as P('x',), and int32[8] as P()"),
        (
            {'step': 1.5 if me == last else None},
            'ArgumentError: step has to be an integer of at least 0, got 1.5',
        ),
    ]:
        error = caught(checkpointer.restore, **{'helper': helper, 'rules': P('x'), 'like': like, **arguments})
        if me == last and 'ArgumentError' in message:
            assert message == f'{type(error).__name__}: {error}'
        else:
            assert type(error) is CheckpointError, error
            assert 'restore: the processes disagree (' in str(error), error
            assert message in str(error), error
    assert checkpointer.restored_step is None
    assert np.asarray(checkpointer.restore(helper, P(), like)['w'].addressable_data(0)).tolist() == [2] * 8


def check_failure_on_one_process_is_raised_by_all() -> None:
    """All raise before they read arrays, which would wait for the other processes."""
    helper = meshes()[0]
    me, last = jax.process_index(), jax.process_count() - 1
    where, part = folder(f'one-fails-{jax.process_count()}'), folder(f'one-sees-{jax.process_count()}')
    with Checkpointer(where) as checkpointer:
        for step in (1, 2):
            data = None if me == last else {'position': me}
            checkpointer.save(step, {'w': helper.shard(np.full(8, step), P('x'))}, data=data)
    if me == last:
        shutil.copytree(where / '1', part / '1')
    like = {'w': jax.ShapeDtypeStruct((8,), np.int32)}

    def fails() -> dict[str, Any]:
        if me == last:
            raise FileNotFoundError('no configuration')
        return like

    class Iterator:
        state = None

        def set_state(self, state: Any) -> None:
            self.state = state

    iterator = Iterator()
    for directory, options, local_text, others in [
        (where, {'like': fails}, 'no configuration', f'process {last}: FileNotFoundError: no configuration'),
        (
            where,
            {'data': iterator},
            'the data state of this process',
            f'process {last}: CheckpointError: the checkpoint of',
        ),
        (
            part if me == last else where,
            {'step': 2},
            'has no checkpoint of step 2: it has 1',
            'has no checkpoint of step 2: it has 1',
        ),
    ]:
        error = caught(
            Checkpointer(directory).restore, **{'helper': helper, 'rules': P('x'), 'like': like, **options}
        )
        assert (local_text if me == last else others) in str(error), error
    assert iterator.state is None


def caught(function: Any, **kwargs: Any) -> BaseException:
    try:
        function(**kwargs)
    except (ScalaxError, FileNotFoundError) as error:
        return error
    raise AssertionError('no error was raised')


def check_damage_is_found_by_all_processes() -> None:
    helper = meshes()[0]
    where = folder(f'damaged-{jax.process_count()}')
    with Checkpointer(where) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(helper))
    if jax.process_index() == 0:
        largest = max((where / '2').rglob('ocdbt*/d/*'), key=lambda path: path.stat().st_size)
        bits = bytearray(largest.read_bytes())
        bits[len(bits) // 2] ^= 1
        largest.write_bytes(bits)
        truncated = max((where / '3').rglob('ocdbt*/d/*'), key=lambda path: path.stat().st_size)
        os.truncate(truncated, truncated.stat().st_size // 2)
    wait_for_all()
    with Checkpointer(where) as checkpointer:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            restored = checkpointer.restore(helper, rule(helper), state(helper), verify=True)
        assert_same(restored, helper)
        assert checkpointer.restored_step == 1
        [warning] = [file for file in caught if file.category is CheckpointWarning]
        assert 'step 2: ' in str(warning.message) and 'step 3: ' in str(warning.message)
        try:
            checkpointer.restore(helper, rule(helper), state(helper), step=3)
        except CheckpointError as error:
            assert f'{truncated_size(error)} bytes' in str(error)
        else:
            raise AssertionError('a truncated checkpoint was restored')
        assert checkpointer.save(2, state(helper))  # replaces the damaged steps
    assert sorted(path.name for path in where.iterdir()) == ['1', '2', 'writer.json']


def truncated_size(error: CheckpointError) -> str:
    return str(error).partition(' has ')[2].partition('has ')[2].partition(' bytes')[0]


def wait_for_all() -> None:
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices('checks')
