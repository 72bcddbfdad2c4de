"""Checks of host data with several processes: data/host/test_processes.py runs them in each process.

They run with any number of processes; every function runs on all of them at the same time.
"""

import contextlib
import faulthandler
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax._core.context import resharding
from scalax._data.host import process_collectives
from scalax.errors import ArgumentError, DataError
from scalax.sharding import MeshShardingHelper

ADVICE = (
    'What to do: pass data of the same structure, shapes and dtypes on every process, with equal scalars; '
    'drop the incomplete batch at the end of the data, or pad it.'
)


def me() -> int:
    return jax.process_index()


def count() -> int:
    return jax.process_count()


def orders() -> dict[str, list[Any]]:
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    per_process = len(devices) // count()
    return {
        'as they come': devices,
        'backwards': devices[::-1],
        'process by process in turn': [
            devices[p * per_process + i] for i in range(per_process) for p in range(count())
        ],
        'evens first': devices[::2] + devices[1::2],
    }


def helpers() -> Iterator[tuple[MeshShardingHelper, Any]]:
    """Yields meshes, each with the axes over which to shard the batch."""
    for name, devices in orders().items():
        helper = MeshShardingHelper([-1, 2], ['data', 'tp'], devices=devices)
        yield helper, None
        yield helper, 'data'
        if name in ('as they come', 'evens first'):
            yield helper, 'tp'
            yield helper, ('tp', 'data')
            yield helper, []
        # Two batch axes with one between them, in both orders.
        three = MeshShardingHelper([2, -1, 2], ['slice', 'tp', 'data'], devices=devices)
        yield three, ('slice', 'data')
        yield three, ('data', 'slice')
    types = (AxisType.Explicit, AxisType.Auto)
    yield MeshShardingHelper([2, -1], ['data', 'tp'], devices=orders()['backwards'], axis_types=types), 'data'
    # Axes across processes and inside them: first the batch across processes, then the model.
    yield MeshShardingHelper([-1, 2], ['data', 'tp'], dcn_axis_dims=[count(), 1]), 'data'
    yield MeshShardingHelper([2, -1], ['data', 'tp'], dcn_axis_dims=[1, count()]), 'data'


def whole_batch(rows: int) -> dict[str, Any]:
    numbers = np.arange(rows * 6)
    return {
        'x': numbers.reshape(rows, 6).astype(np.float32),
        'last': numbers.reshape(6, rows).astype(ml_dtypes.bfloat16).T.copy(),
        'mask': numbers[:rows] % 3 == 0,
        'keys': jax.random.split(jax.random.key(7), rows),
        'bits': np.full((rows, 2), -0.0, np.float32),
        'step': 3,
    }


def select(batch: dict[str, Any], rows: Any) -> dict[str, Any]:
    return {name: leaf if np.ndim(leaf) == 0 else leaf[rows] for name, leaf in batch.items()}


def assert_same(actual: Any, expected: Any) -> None:
    if jax.dtypes.issubdtype(actual.dtype, jax.dtypes.prng_key):
        actual, expected = jax.random.key_data(actual), jax.random.key_data(expected)
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    assert actual.tobytes() == expected.astype(actual.dtype).tobytes()


def assert_global(arrays: dict[str, jax.Array], expected: dict[str, Any]) -> None:
    """Checks that every device holds the right examples, bit by bit."""
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        assert array.shape == np.shape(expected[name])
        assert len(array.addressable_shards) == jax.local_device_count()
        for shard in array.addressable_shards:
            assert_same(
                shard.data, expected[name][shard.index[: array.ndim]] if array.ndim else expected[name]
            )


def own_rows(rows: int) -> slice:
    return slice(me() * rows // count(), (me() + 1) * rows // count())


def check_every_mesh() -> None:
    rows = 2 * jax.device_count()
    batch = {'x': np.arange(rows * 6).reshape(rows, 6), 'step': 3}
    for helper, axes in helpers():
        assert_both_ways(helper, axes, batch)


def check_every_third_mesh() -> None:
    batch = {'x': np.arange(12 * jax.device_count()).reshape(-1, 6), 'step': 3}
    for helper, axes in itertools.islice(helpers(), 0, None, 3):
        assert_both_ways(helper, axes, batch)


def check_every_dtype() -> None:
    for helper, axes in itertools.islice(helpers(), 4):
        assert_both_ways(helper, axes, whole_batch(2 * jax.device_count()))


def assert_both_ways(helper: MeshShardingHelper, axes: Any, batch: dict[str, Any]) -> None:
    rows = 2 * jax.device_count()
    local = select(batch, own_rows(rows))
    arrays = helper.local_data_to_global_array(local, mesh_axis_subset=axes)
    assert_global(arrays, batch)
    for name, leaf in helper.global_array_to_local_data(arrays).items():
        assert_same(leaf, local[name])
    # The rows that this process needs, without any exchange.
    held = select(batch, helper.process_examples(rows, mesh_axis_subset=axes))
    arrays = helper.local_data_to_global_array(
        held, mesh_axis_subset=axes, local_batch='addressable', check_replicas=True
    )
    assert_global(arrays, batch)
    for name, leaf in helper.global_array_to_local_data(arrays, local_batch='addressable').items():
        assert_same(leaf, held[name])


def check_other_batch_axes() -> None:
    rows = jax.device_count()
    for helper, axes in itertools.islice(helpers(), 3):
        global_array = np.arange(5 * rows * 2).reshape(5, rows, 2)
        array = helper.local_data_to_global_array(global_array[:, own_rows(rows)], 1, axes)
        assert_global({'x': array}, {'x': global_array})
        assert_same(helper.global_array_to_local_data(array, -2), global_array[:, own_rows(rows)])
        global_array = global_array.transpose(0, 2, 1)
        array = helper.local_data_to_global_array(global_array[..., own_rows(rows)], -1, axes)
        assert_global({'x': array}, {'x': global_array})


def check_examples_that_do_not_divide_by_the_devices_of_a_process() -> None:
    for devices in (orders()['backwards'], orders()['evens first']):
        helper = MeshShardingHelper([count(), -1], ['data', 'tp'], devices=devices)
        global_array = np.arange(3 * count() * 2).reshape(-1, 2)
        array = helper.local_data_to_global_array(
            global_array[own_rows(len(global_array))], mesh_axis_subset='data'
        )
        assert_global({'x': array}, {'x': global_array})


def check_mesh_set_by_the_user() -> None:
    batch = whole_batch(jax.device_count())
    local = select(batch, own_rows(jax.device_count()))
    helper = MeshShardingHelper([-1], ['data'], devices=orders()['backwards'])
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        other = Mesh(np.asarray(orders()['evens first']), ('other',), axis_types=(axis_type,))
        with jax.set_mesh(other):
            assert_global(helper.local_data_to_global_array(local), batch)
            assert_same(helper.gather(helper.local_data_to_global_array(local['x'])), batch['x'])
            assert helper.broadcast_from(1, me()) == 1
            with helper.prefetch([local, local]) as batches:
                for arrays in batches:
                    assert_global(arrays, batch)


def check_processes_with_different_numbers_of_devices() -> None:
    devices = orders()['as they come'][:-1]
    helper = MeshShardingHelper([-1], ['data'], devices=devices)
    rows = len(devices) * count()
    global_array = np.arange(rows)
    array = helper.local_data_to_global_array(global_array[own_rows(rows)])
    for shard in array.addressable_shards:
        assert_same(shard.data, global_array[shard.index])
    assert_same(helper.gather(array), global_array)
    assert_same(helper.global_array_to_local_data(array), global_array[own_rows(rows)])
    assert_same(helper.broadcast_from(0, np.full(5, me())), np.zeros(5, int))


def check_meshes_of_some_processes() -> None:
    here = MeshShardingHelper([-1], ['data'], devices=jax.local_devices())
    array = here.local_data_to_global_array(np.arange(8) + me())
    assert_same(array, np.arange(8) + me())
    assert here.broadcast_from(me(), 5) == 5
    other = (me() + 1) % count()
    other_devices = [device for device in jax.devices() if device.process_index == other]
    there = MeshShardingHelper([-1], ['data'], devices=other_devices)
    message = (
        f'process {me()} has no devices in this mesh (its devices belong to processes {other}). Call this on '
        'those processes only, or make the mesh from devices of all processes'
    )
    for call in (
        lambda: there.local_data_to_global_array(np.arange(8)),
        lambda: there.process_examples(8),
        lambda: there.broadcast_from(other, 5),
        lambda: there.prefetch([]),
    ):
        with raises(message):
            call()


@contextlib.contextmanager
def raises(message: str, kind: type[BaseException] = DataError) -> Iterator[None]:
    try:
        yield
    except kind as error:
        info = str(error)
        assert info == message, f'\n{info}\n--- is not ---\n{message}'
    else:
        raise AssertionError(f'no {kind.__name__}')


# --- What is communicated ------------------------------------------------------------------------


@contextlib.contextmanager
def compilations(most: int) -> Iterator[None]:
    """Checks the number of compiled programs: without one, nothing can be communicated."""
    events: list[str] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event == '/jax/core/compile/backend_compile_duration':
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(events) == most, f'{len(events)} programs were compiled, not {most}'


def check_numpy_arrays_of_a_compiled_function() -> None:
    # JAX rejects them, because each process has a part.
    helper = MeshShardingHelper([-1, 2], ['data', 'tp'])

    def doubled(tree: Any) -> Any:
        return jax.tree.map(lambda x: 2 * x, tree)

    double = helper.sjit(doubled, in_shardings=P('data'))
    batch = {'x': np.ones((8, 2), np.float32), 'placed': helper.shard(np.ones(8, np.float32), P('data'))}
    for _ in range(2):  # one call that compiles, and one that hits the cache
        try:
            double(batch)
        except ValueError as error:
            assert 'non-trivial shardings for numpy inputs' in str(error), error
        else:
            raise AssertionError('numpy data was taken')
        double({**batch, 'x': helper.shard(batch['x'], P('data'))})
    assert double({**batch, 'x': jnp.ones((8, 2))})['x'].shape == (8, 2)
    assert helper.sjit(jnp.sum, in_shardings=P())(np.ones(8, np.float32)) == 8


def check_no_unneeded_communication() -> None:
    helper = MeshShardingHelper([-1, 2], ['data', 'tp'])
    width = itertools.count(11)  # shapes without a compiled program
    process_collectives._queue_calls = itertools.count(1)  # waiting for simulated devices runs a program too

    def fresh(rows: int) -> dict[str, Any]:
        return {'x': np.zeros((rows, next(width))), 'step': 1}

    with compilations(0):
        helper.local_data_to_global_array(fresh(8), check=False)
        helper.local_data_to_global_array(fresh(8), check=False, mesh_axis_subset='data')
        helper.local_data_to_global_array(
            fresh(8), check=False, local_batch='addressable', mesh_axis_subset='tp'
        )
        jax.block_until_ready(helper.prefetch([fresh(8)], check=False))
    jax.clear_caches()
    resharding.identity.cache_clear()
    with compilations(1):  # the agreement, once
        for _ in range(3):
            helper.local_data_to_global_array(fresh(8))
            helper.local_data_to_global_array(fresh(8), local_batch='addressable', mesh_axis_subset='tp')
    scattered = MeshShardingHelper([-1], ['data'], devices=orders()['backwards'])
    with compilations(1):  # the program that moves the rows
        helper_rows = fresh(jax.local_device_count())
        scattered.local_data_to_global_array(helper_rows, check=False)


# --- Processes that disagree ---------------------------------------------------------------------


def last() -> bool:
    return me() == count() - 1


def check_disagreement() -> None:
    helper = MeshShardingHelper([-1, 2], ['data', 'tp'])
    sizes = ', '.join(f'{name}={size}' for name, size in helper.mesh.shape.items())
    call = f"mesh ({sizes}), batch on axis 0 over all mesh axes, local_batch='equal_share'"
    head = f'local_data_to_global_array: the processes disagree ({call}):'
    odd = count() - 1
    n = 2 * jax.device_count()
    f32 = np.float32
    weak = 'weakly typed'
    good = {'a': {'x': np.zeros((n, 3), f32)}, 'n': 1}
    cases: list[tuple[Any, list[str]]] = [
        (
            {'a': {'x': np.zeros((n + n, 3), f32)}, 'n': 1},
            [f'a/x is float32[{n + n}, 3], and float32[{n}, 3]'],
        ),
        ({'a': {'x': np.zeros((n, 3), int)}, 'n': 1}, [f'a/x is int32[{n}, 3], and float32[{n}, 3]']),
        (
            {'a': {'x': np.zeros((n, 3), f32)}, 'n': 2},
            [f'n is {weak} int32 2, and {weak} int32 1'],
        ),
        (
            {'a': {'x': np.zeros((n, 3), f32)}, 'n': 1.0},
            [f'n is {weak} float32 1.0, and {weak} int32 1'],
        ),
        ({'a': {'x': np.zeros((n, 3), f32)}, 'n': np.int32(1)}, [f'n is int32 1, and {weak} int32 1']),
        (
            {'b': np.zeros(n, f32), 'n': 1},
            [f'a/x is missing, and float32[{n}, 3]', f'b is float32[{n}], and missing'],
        ),
    ]
    for bad, lines in cases:
        listed = '\n'.join(f'  process {odd}: {line} on process 0' for line in lines)
        with raises(f'{head}\n{listed}\n{ADVICE}'):
            helper.local_data_to_global_array(bad if last() else good)
    # Options, and arguments that are errors on one process too.
    if last():
        call = f"mesh ({sizes}), batch on axis 1 over all mesh axes, local_batch='equal_share'"
    with raises(
        f'local_data_to_global_array: the processes disagree ({call}):\n'
        f'  process {odd}: calls it with mesh ({sizes}), batch on axis 1 over all mesh axes, '
        f"local_batch='equal_share', and process 0 with mesh ({sizes}), batch on axis 0 over all mesh axes, "
        f"local_batch='equal_share'\n{ADVICE}"
    ):
        helper.local_data_to_global_array(np.zeros((n, n)), 1 if last() else 0)
    local_text = (
        f'local data does not fit the mesh ({sizes}), with the batch on axis 0 over mesh axes '
        "('data', 'tp'):\n  x: str is not an array\n"
        'What to do: pad the batch or drop its last examples, or shard it over fewer axes with '
        'mesh_axis_subset.'
    )
    message = f'  process {odd}: DataError: {local_text}'.replace('\n', '\n    ')
    with raises(local_text if last() else f'{head}\n{message}\n{ADVICE}'):
        helper.local_data_to_global_array({'x': 'text' if last() else np.zeros(n)})
    # After all this they still agree.
    assert_same(helper.local_data_to_global_array(7), 7)


def check_meshes_that_differ() -> None:
    devices = orders()['backwards' if last() else 'as they come']
    helper = MeshShardingHelper([-1], ['data'], devices=devices)
    call = f"mesh (data={jax.device_count()}), batch on axis 0 over all mesh axes, local_batch='equal_share'"
    with raises(
        f'local_data_to_global_array: the processes disagree ({call}):\n'
        f'  process {count() - 1}: has the devices of the mesh in another order than process 0\n{ADVICE}'
    ):
        helper.local_data_to_global_array(np.zeros(jax.device_count()))


def check_replicas_that_differ() -> None:
    helper = MeshShardingHelper([2, -1], ['data', 'tp'], dcn_axis_dims=[1, count()])
    sizes = ', '.join(f'{name}={size}' for name, size in helper.mesh.shape.items())
    batch = {'x': np.zeros((4, 3)), 'y': np.zeros(4), 'keys': jax.random.split(jax.random.key(0), 4)}
    if last():
        batch['y'][2] = 1
    with raises(
        'local_data_to_global_array: processes that load the same examples hold different values '
        f"(mesh ({sizes}), batch on axis 0 over mesh axes 'data', local_batch='addressable'):\n"
        f'  y: examples 2:4 of process {count() - 1} differ from those of process 0\n'
        'What to do: load exactly the examples that helper.process_examples gives, with the same shuffling, '
        'augmentation and seed on every process.'
    ):
        helper.local_data_to_global_array(batch, 0, 'data', local_batch='addressable', check_replicas=True)


def check_leaves_without_elements() -> None:
    for devices in (orders()['as they come'], orders()['backwards']):  # rows stay, and rows move
        helper = MeshShardingHelper([-1, 2], ['data', 'tp'], devices=devices)
        n = jax.local_device_count()
        local = {
            'wide': np.zeros((n, 0), np.float32),
            'long': np.zeros((0, 4), np.float32),
            'x': np.full((n, 3), me()),
            'keys': jax.random.split(jax.random.key(0), (n, 2))[:, :0],
        }
        for axes in (None, 'data', ('tp', 'data')):
            arrays = helper.local_data_to_global_array(local, mesh_axis_subset=axes)
            assert arrays['wide'].shape == arrays['keys'].shape == (n * count(), 0)
            assert arrays['long'].shape == (0, 4)
            for name, leaf in helper.global_array_to_local_data(arrays).items():
                assert_same(leaf, local[name])


def deleted_on_the_last(array: jax.Array) -> jax.Array:
    if last():
        array.delete()
    return array


def check_errors_of_shard_and_gather_reach_all_processes() -> None:
    helper = MeshShardingHelper([-1], ['data'])
    n, odd = jax.local_device_count(), count() - 1
    call = f'mesh (data={jax.device_count()})'
    gone = 'Array has been deleted with shape=int32['
    mixed: Any = {1: np.zeros(n), 'a' if last() else 2: np.zeros(n)}
    with says(
        'Comparator raised exception while sorting pytree dictionary keys.'
        if last()
        else f'process {odd}: ValueError: Comparator raised exception'
    ):
        helper.local_data_to_global_array(mixed)
    for make in (
        lambda x: helper.local_data_to_global_array({'x': x}),
        lambda x: helper.broadcast_from(odd, {'x': x}),
        lambda x: next(helper.prefetch([{'x': x}])),
    ):
        with says(gone if last() else f'process {odd}: RuntimeError: {gone}'):
            make(deleted_on_the_last(jnp.arange(n)))
    # Values of global arrays, and their shardings.
    global_array = np.arange(4 * jax.device_count())

    def placed() -> jax.Array:
        return helper.shard(global_array, P('data'))

    message = f'int32[{len(global_array)}] as {P("data")}'
    line = f'process {odd}: x is {message}, deleted, and {message} on process 0'
    with says(f'gather: the processes disagree ({call}):\n  {line}'):
        helper.gather({'x': deleted_on_the_last(placed())})
    line, more = f'process {odd}: a is {message}, and missing on process 0', placed()
    with says(f'gather: the processes disagree ({call}):\n  {line}'):
        helper.gather({'x': placed(), 'a': more if last() else 1})
    across = helper.shard(global_array.reshape(4, -1), P(None, 'data'))
    with says('global_array_to_local_data: the processes disagree'):
        helper.global_array_to_local_data({'x': deleted_on_the_last(across), 'y': more})
    size = len(global_array)
    line = f'process {odd}: x is int32[{size + 8}] for {P("data")}, and int32[{size}] for'
    with says(f'shard: the processes disagree ({call}):\n  {line}'):
        helper.shard({'x': np.arange(len(global_array) + 8 * last())}, P('data'))
    with says('x: int64[3]' if last() else f'process {odd}: ShardingError: One leaf cannot be sharded'):
        helper.shard({'x': np.arange(3) if last() else global_array}, P('data'))
    # After all this they still agree.
    assert_same(helper.gather(placed()), global_array)


@contextlib.contextmanager
def says(message: str) -> Iterator[None]:
    """Checks that an error contains *message*."""
    try:
        yield
    except Exception as error:
        assert message in str(error), f'\n{error}\n--- has not ---\n{message}'
    else:
        raise AssertionError(f'no error: {message}')


# --- Values of one process -----------------------------------------------------------------------


def check_broadcast() -> None:
    helper = MeshShardingHelper([-1, 2], ['data', 'tp'], devices=orders()['evens first'])
    source = count() - 1

    def tree(process: int) -> dict[str, Any]:
        rng = np.random.default_rng(process)
        return {
            'double': rng.normal(size=(3, 5)),
            'half': rng.normal(size=7).astype(ml_dtypes.bfloat16),
            'flag': np.asarray([True, False, process == 0]),
            'empty': np.zeros((0, 4)),
            'zero': np.float32(-0.0) if process else np.float32(0.0),
            'nan': np.asarray([np.nan, np.inf * (-1) ** process], np.float32),
            'int': 2**40 + process,
            'float': 0.1 + process,
            'bool': process == 0,
            'key': jax.random.key(process),
            'rbg': jax.random.split(jax.random.key(process, impl='rbg'), 3),
            'device': jnp.arange(4) + process,
        }

    result = helper.broadcast_from(source, tree(me()))
    for name, expected in tree(source).items():
        assert type(result[name]) is type(expected) or isinstance(result[name], np.ndarray), name
        assert_same(
            np.asarray(result[name]) if np.ndim(expected) == 0 and name != 'key' else result[name], expected
        )
    assert result['key'].dtype == jax.random.key(0).dtype
    assert result['rbg'].dtype == jax.random.key(0, impl='rbg').dtype
    # Abstract trees on other processes, and replicated global arrays.
    tree_or_shapes = tree(source) if me() == source else jax.eval_shape(lambda: {'x': jnp.zeros((2, 3))})
    result = helper.broadcast_from(
        source, {'x': np.full((2, 3), 5, np.float32)} if me() == source else tree_or_shapes
    )
    assert_same(result['x'], np.full((2, 3), 5, np.float32))
    replicated = helper.local_data_to_global_array(9)
    assert helper.broadcast_from(0, replicated) == 9


def check_broadcast_of_trees_that_differ() -> None:
    helper = MeshShardingHelper([-1, 2], ['data', 'tp'])
    sizes = ', '.join(f'{name}={size}' for name, size in helper.mesh.shape.items())
    odd = count() - 1
    with raises(
        f'broadcast_from: the processes disagree (mesh ({sizes}), process=0):\n'
        f'  process {odd}: w is float64[3], and float64[2] on process 0\n'
        'What to do: call it on every process with a tree of the same structure, shapes and dtypes; the '
        'values matter on process 0 only.'
    ):
        helper.broadcast_from(0, {'w': np.zeros(3 if last() else 2)})
    with raises(
        'broadcast_from takes the index of a process that holds devices of the mesh '
        f'({", ".join(map(str, range(count())))}), got 17'
    ):
        helper.broadcast_from(17, 1)


def check_gather() -> None:
    for helper, axes in itertools.islice(helpers(), 4):
        rows = jax.device_count()
        batch = whole_batch(rows)
        arrays = helper.local_data_to_global_array(select(batch, own_rows(rows)), mesh_axis_subset=axes)
        keys = arrays.pop('keys')
        for name, leaf in helper.gather(arrays).items():
            assert isinstance(leaf, np.ndarray)
            assert_same(leaf, batch[name])
        assert helper.gather({'keys': keys, 'text': 'x'}) == {'keys': keys, 'text': 'x'}


def check_shard_of_keys() -> None:
    # JAX cannot move typed keys to devices of other processes.
    global_keys = {
        'many': jax.random.split(jax.random.key(7), 4 * jax.device_count()),
        'one': jax.random.key(1, impl='rbg'),
        'plain': np.arange(4 * jax.device_count()),
    }
    for helper, _ in itertools.islice(helpers(), 4):
        rules = {'many': P('data'), 'one': P(), 'plain': P('data')}
        placed = helper.shard(global_keys, rules)
        assert_global(placed, global_keys)
        assert jax.tree.map(lambda leaf: leaf.sharding, placed) == helper.match_sharding_rule(
            rules, global_keys
        )
        assert placed['one'].dtype == global_keys['one'].dtype
        moved = helper.shard(placed, {'many': P('tp'), 'one': P(), 'plain': P('tp')})
        assert_global(moved, global_keys)
        assert moved['many'].sharding.spec == P('tp')
        functions, _ = helper.make_shard_and_gather_fns(global_keys, rules)
        assert_global(helper.apply_shard_and_gather_fns(functions, global_keys), global_keys)
        with jax.set_mesh(MeshShardingHelper([-1], ['other']).mesh):
            assert_global(helper.shard(global_keys, rules), global_keys)


def check_weak_types() -> None:
    """JAX makes strongly typed arrays from local shards; a program must not depend on it."""
    helper = MeshShardingHelper([-1], ['data'])
    values = {'step': 3, 'rate': 0.25, 'fixed': np.float32(1), 'x': np.zeros(len(jax.devices()), np.float32)}
    step = helper.sjit(lambda state: {**state, 'step': state['step'] + 1}, out_shardings=P())
    state = step(helper.shard(values, P()))
    assert int(state['step']) == 4
    for placed in (
        state,
        helper.shard(values, P()),
        helper.shard(state, P()),
        helper.reshard(state, P()),
        helper.local_data_to_global_array(values),
    ):
        weak = {name: leaf.weak_type for name, leaf in placed.items()}
        assert weak == {'step': True, 'rate': True, 'fixed': False, 'x': False}, weak


def check_specs_that_hold_sets() -> None:
    """JAX prints the axes of a set in an order that differs between processes; they still agree."""
    helper = MeshShardingHelper(
        [-1, 2, 1, 1, 1], ['a', 'b', 'c', 'd', 'e'], axis_types=jax.sharding.AxisType.Explicit
    )
    global_array = np.arange(4 * jax.device_count())
    parts = helper.shard(global_array, P('a', unreduced={'b', 'c', 'd', 'e'}))
    moved = helper.shard(parts, P('a', reduced={'b', 'c', 'd', 'e'}))
    assert_same(helper.gather(moved), global_array)


def check_examples_of_arrays_sharded_along_other_axes() -> None:
    helper = MeshShardingHelper([-1, 2], ['data', 'tp'])
    global_array = np.arange(8 * 4 * jax.device_count()).reshape(-1, 8)

    def placed(spec: P) -> jax.Array:
        sharding = NamedSharding(helper.mesh, spec)
        return jax.make_array_from_callback(global_array.shape, sharding, lambda index: global_array[index])

    both, other = placed(P('data', 'tp')), placed(P(None, ('data', 'tp')))
    assert_same(helper.global_array_to_local_data(both), global_array[own_rows(len(global_array))])
    assert_same(
        helper.global_array_to_local_data(other), global_array[own_rows(len(global_array))]
    )  # fetched
    with raises(
        'global arrays have no local share along axis 0:\n'
        f'  x: int32{list(global_array.shape)}: no process holds entire examples, because another axis is '
        'sharded '
        f'over several processes ({other.sharding})\n'
        'What to do: choose another batch_axis, or fetch entire arrays with helper.gather.'
    ):
        helper.global_array_to_local_data({'x': other}, local_batch='addressable')
    odd = placed(P())[:3]
    with raises(
        'global arrays have no local share along axis 0:\n'
        f'  (the leaf itself): int32[3, 8]: 3 examples are not divisible by {count()} processes; '
        "local_batch='addressable' gives the examples that the devices of each process hold\n"
        'What to do: choose another batch_axis, or fetch entire arrays with helper.gather.'
    ):
        helper.global_array_to_local_data(odd)


# --- Loading ahead -------------------------------------------------------------------------------


def step_of(helper: MeshShardingHelper) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The collectives of a step still run when the loop requests the next batch."""

    @helper.sjit(in_shardings=(P(), None), out_shardings=P())
    def step(state: jax.Array, batch: jax.Array) -> jax.Array:
        for _ in range(3):
            state = jnp.tanh(state @ state) * 0 + state + batch.sum()
        return state

    return step


def check_prefetch_beside_steps() -> None:
    steps, rows = 30, 2 * jax.device_count()
    for devices in (orders()['as they come'], orders()['backwards']):  # rows stay, and rows move
        helper = MeshShardingHelper([-1], ['data'], devices=devices)
        step = step_of(helper)
        global_array = [np.full(rows, float(i)) for i in range(steps)]
        state = helper.local_data_to_global_array(
            np.zeros((64, 64)), mesh_axis_subset=[], local_batch='addressable'
        )
        for batch in helper.prefetch(part[own_rows(rows)] for part in global_array):
            state = step(state, batch)
        assert_same(state.addressable_data(0)[0, 0], np.float32(3 * rows * steps * (steps - 1) / 2))


def check_queue_of_steps_is_bounded() -> None:
    # Simulated devices queue at most 32 programs; a longer queue usually hangs. Only this check reaches it.
    faulthandler.dump_traceback_later(50, exit=True)
    helper = MeshShardingHelper([-1], ['data'])

    @helper.sjit(in_shardings=(P(), P('data')), out_shardings=P())
    def step(state: jax.Array, batch: jax.Array) -> jax.Array:
        return state - 1e-6 * (batch.T @ jnp.tanh(batch @ state))

    eye = helper.local_data_to_global_array(
        np.eye(256, dtype=np.float32), mesh_axis_subset=[], local_batch='addressable'
    )
    part = np.ones((32 * jax.local_device_count(), 256), np.float32)
    parts = itertools.repeat(part, 100)
    for batches in (
        (helper.local_data_to_global_array(rows, check=False) for rows in parts),
        helper.prefetch(itertools.repeat(part, 100), check=False),
    ):
        state = eye
        for batch in batches:
            state = step(state, batch)
        jax.block_until_ready(state)
    faulthandler.cancel_dump_traceback_later()


def check_data_that_ends_early() -> None:
    helper = MeshShardingHelper([-1], ['data'])
    rows = jax.local_device_count()
    batch = [np.zeros(rows, np.float32)] * (2 if last() else 3)
    batches = helper.prefetch(batch)
    next(batches)
    next(batches)
    call = f"mesh (data={jax.device_count()}), batch on axis 0 over all mesh axes, local_batch='equal_share'"
    line = 'has no more data after 2 batches, and process 0 has more data'
    with raises(f'prefetch: the processes disagree ({call}):\n  process {count() - 1}: {line}\n{ADVICE}'):
        next(batches)
    assert next(batches, None) is None


def check_loader_that_fails() -> None:
    helper = MeshShardingHelper([-1], ['data'])

    def load(error: BaseException) -> Iterator[np.ndarray]:
        yield np.zeros(jax.local_device_count())
        if last():
            raise error
        yield np.zeros(jax.local_device_count())

    for error in (OSError('the file is gone'), SystemExit('the file is gone')):
        batches = helper.prefetch(load(error))
        next(batches)
        call = (
            f"mesh (data={jax.device_count()}), batch on axis 0 over all mesh axes, local_batch='equal_share'"
        )
        line = f'process {count() - 1}: {type(error).__name__}: the file is gone'
        message = f'prefetch: the processes disagree ({call}):\n  {line}\n{ADVICE}'
        with raises('the file is gone' if last() else message, type(error) if last() else DataError):
            next(batches)
        assert next(batches, None) is None


def check_verify_is_refused() -> None:
    helper = MeshShardingHelper([-1], ['data'])
    step = helper.sjit(jnp.sin, in_shardings=P('data'))
    try:
        helper.verify(step, jax.ShapeDtypeStruct((8,), 'float32'))
    except ArgumentError as error:
        assert 'the mesh has devices of several processes, but verify runs in one' in str(error)
    else:
        raise AssertionError('it was verified')
