"""Arrays and shardings that have a picture, and the errors about others."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax.errors import ShardingError
from scalax.sharding import MeshShardingHelper
from scalax.visualize import visualize
from tests.support.visualize_cases import HELPER, leaf, text


@pytest.mark.parametrize('kind', [AxisType.Auto, AxisType.Explicit])
def test_arrays_are_shown_with_their_shardings(kind):
    mesh = jax.make_mesh((4, 2), ('fsdp', 'tp'), axis_types=(kind,) * 2)
    array = jax.device_put(np.zeros((8, 16), np.float32), NamedSharding(mesh, P(None, 'tp')))
    expected = text(leaf((8, 16), P(None, 'tp')))
    assert text(array) == expected
    assert text(jax.jit(lambda x: x * 2)(array)) == expected


def test_device_order_is_that_of_the_mesh():
    devices = jax.devices()
    helper = MeshShardingHelper([2, 2], ['a', 'b'], devices=[devices[i] for i in (7, 6, 1, 4)])
    array = helper.shard(np.zeros((2, 4)), P('b'))
    (picture,) = visualize(array).pictures
    assert picture.blocks.holders == {(0, 0): (7, 1), (1, 0): (6, 4)}
    assert '│ 7,1 │ 6,4 │' in str(visualize(array))


def test_array_on_one_device(snapshot):
    snapshot(visualize(jax.device_put(np.zeros(3, np.float32), jax.devices()[5])))


def test_prng_keys():
    keys = HELPER.shard(jax.random.split(jax.random.key(0), 8), P('fsdp'))
    assert text(keys).splitlines()[0] == 'key<fry>[8]'
    assert '│ 0,1 │ 2,3 │ 4,5 │ 6,7 │' in text(keys)


def test_values_inside_a_function_are_shown_by_the_compiler():
    drawn = []

    def look(sharding):
        drawn.append(text(jax.ShapeDtypeStruct((8, 16), np.float32, sharding=sharding)))

    @HELPER.sjit(in_shardings=(P('fsdp', 'tp'),))
    def double(x):
        x = x * 2
        jax.debug.inspect_array_sharding(x, callback=look)
        return x

    double(np.zeros((8, 16), np.float32))
    assert drawn == [text(leaf((8, 16), P('fsdp', 'tp')))]


def test_explicit_types_are_shown_inside_a_function():
    mesh = jax.make_mesh((4, 2), ('fsdp', 'tp'), axis_types=(AxisType.Explicit,) * 2)
    drawn = []

    @jax.jit
    def double(x):
        drawn.append(visualize(x))
        return x * 2

    double(jax.device_put(np.zeros((8, 16)), NamedSharding(mesh, P('fsdp', 'tp'))))
    assert 'positions, in mesh order, in the abstract mesh (fsdp=4, tp=2)' in str(drawn[0])
    assert drawn[0].pictures[0].blocks.holders[2, 1] == (5,)


# --- Errors ---------------------------------------------------------------------------------------


def test_leaves_without_a_sharding(snapshot):
    tree = {
        'good': leaf((8,), P()),
        'host': np.zeros((8, 4), np.float32),
        'name': 'llama',
        'open': leaf((8,), P(P.UNCONSTRAINED)),
        'step': 3,
        'struct': jax.ShapeDtypeStruct((2,), np.int32),
    }
    with pytest.raises(ShardingError) as caught:
        visualize(tree)
    snapshot(caught.value)
    kinds = [problem.kind for problem in caught.value.problems]
    assert kinds == ['no-sharding', 'not-an-array', 'unconstrained', 'no-sharding', 'no-sharding']


def test_several_devices_without_a_spec():
    class Private(jax.sharding.Sharding):
        device_set = frozenset(jax.devices())

    array = SimpleNamespace(shape=(8,), dtype=np.dtype('float32'), sharding=Private())
    with pytest.raises(ShardingError, match=r': its Private has no spec\nWhat to do: give rules as well'):
        visualize(array)


def test_traced_values_without_explicit_types(snapshot):
    with snapshot.raises(ShardingError):
        jax.jit(visualize)(HELPER.shard(np.zeros((8, 4), np.float32), P('fsdp')))
