"""Steps that are lowered: what they store, and when one can stand in for another."""

import jax
import pytest
from jax.sharding import NamedSharding

from scalax._plan.lowered_step import lower_step
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])


def array(*shape, dtype='float32', spec=None):
    sharding = None if spec is None else NamedSharding(HELPER.mesh, spec)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def lowered(fun, *args, **options):
    return lower_step(HELPER, jax.jit(fun, **options), args, {})


# --- Bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('given', 'bytes_of_each'),
    [
        (array(8, 16, spec=P('fsdp')), 8 * 16 * 4 // 4),
        (array(8, 16, spec=P(('fsdp', 'tp'))), 8 * 16 * 4 // 8),
        (array(8, 16, spec=P()), 8 * 16 * 4),
        (array(8, 16), 8 * 16 * 4 // 8),  # not known yet: it may be divided evenly
        (array(8, 16, dtype='bfloat16', spec=P('tp')), 8 * 16),
        (array(8, 16, dtype='int4', spec=P('tp')), 8 * 16 // 2 // 2),
        (array(8, 16, dtype='bool', spec=P('tp')), 8 * 16 // 2),
        (array(8, 16, dtype='complex64', spec=P('tp')), 8 * 16 * 8 // 2),
        (array(8, 16, dtype='float8_e4m3fn', spec=P('tp')), 8 * 16 // 2),
        (array(spec=P()), 4),
    ],
)
def test_bytes_of_arguments(given, bytes_of_each):
    assert lowered(lambda x: x, given).argument_bytes == bytes_of_each


def test_what_is_not_on_the_device_does_not_count():
    used = array(8, 16, spec=P('fsdp'))
    assert lowered(lambda x, y: x, used, array(64, 64, spec=P())).argument_bytes == 128  # not used
    key = jax.eval_shape(lambda: jax.random.key(0))
    assert lowered(lambda x, k: (x, k), used, key).argument_bytes == 128 + 8


def test_what_is_on_the_host_does_not_count():
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    host = next((kind for kind in ('pinned_host', 'unpinned_host') if kind in kinds), None)
    if host is None:
        pytest.skip('the devices here have no memory of their host')
    offloaded = NamedSharding(HELPER.mesh, P('fsdp'), memory_kind=host)
    step = lowered(lambda x, y: (x, y), jax.ShapeDtypeStruct((8, 16), 'float32', sharding=offloaded), 1.0)
    assert step.argument_bytes <= 4


@pytest.mark.parametrize('name', ['w', 'größe', 'a"b', "a'b", 'a\\b', 'a\\41', 'a}]b'])
def test_shardings_of_arguments_by_their_names(name):
    given, results = lowered(lambda tree: tree[name], {name: array(8, 16, spec=P('fsdp'))}).shardings
    assert (given, results) == ([NamedSharding(HELPER.mesh, P('fsdp', None))], [None])
