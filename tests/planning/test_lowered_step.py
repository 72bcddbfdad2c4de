"""Lowered steps: their properties, and their fingerprints."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from scalax._planning.compiler.lowered_step import lower_step
from scalax.plan import HARDWARE
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
    ('argument', 'expected_bytes'),
    [
        (array(8, 16, spec=P('fsdp')), 8 * 16 * 4 // 4),
        (array(8, 16, spec=P(('fsdp', 'tp'))), 8 * 16 * 4 // 8),
        (array(8, 16, spec=P()), 8 * 16 * 4),
        (array(8, 16), 8 * 16 * 4 // 8),  # unknown so far; it may be sharded evenly
        (array(8, 16, dtype='bfloat16', spec=P('tp')), 8 * 16),
        (array(8, 16, dtype='int4', spec=P('tp')), 8 * 16 // 2 // 2),
        (array(8, 16, dtype='bool', spec=P('tp')), 8 * 16 // 2),
        (array(8, 16, dtype='complex64', spec=P('tp')), 8 * 16 * 8 // 2),
        (array(8, 16, dtype='float8_e4m3fn', spec=P('tp')), 8 * 16 // 2),
        (array(spec=P()), 4),
    ],
)
def test_bytes_of_arguments(argument, expected_bytes):
    assert lowered(lambda x: x, argument).argument_bytes == expected_bytes


def test_unused_arguments_do_not_count():
    used = array(8, 16, spec=P('fsdp'))
    assert lowered(lambda x, y: x, used, array(64, 64, spec=P())).argument_bytes == 128  # not used
    key = jax.eval_shape(lambda: jax.random.key(0))
    assert lowered(lambda x, k: (x, k), used, key).argument_bytes == 128 + 8


def test_arguments_on_the_host_do_not_count():
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    host = next((kind for kind in ('pinned_host', 'unpinned_host') if kind in kinds), None)
    if host is None:
        pytest.skip('the devices here have no memory of their host')
    offloaded = NamedSharding(HELPER.mesh, P('fsdp'), memory_kind=host)
    step = lowered(lambda x, y: (x, y), jax.ShapeDtypeStruct((8, 16), 'float32', sharding=offloaded), 1.0)
    assert step.argument_bytes <= 4


@pytest.mark.parametrize('name', ['w', 'größe', 'a"b', "a'b", 'a\\b', 'a\\41', 'a}]b'])
def test_shardings_of_arguments_by_their_names(name):
    arguments, results = lowered(lambda tree: tree[name], {name: array(8, 16, spec=P('fsdp'))}).shardings
    assert (arguments, results) == ([NamedSharding(HELPER.mesh, P('fsdp', None))], [None])


# --- Fingerprints ---------------------------------------------------------------------------------


def step(x):
    with jax.named_scope('inner'):
        return jnp.sin(x) @ x


def fingerprint(fun=step, shape=(16, 16), spec='fsdp', helper=HELPER, hardware=None, **options):
    fun = helper.sjit(fun, in_shardings=P(spec), **options)
    return lower_step(helper, fun, (jax.ShapeDtypeStruct(shape, 'float32'),), {}, hardware).fingerprint


def test_the_same_step_has_the_same_fingerprint():
    def elsewhere():
        return fingerprint()

    def step(x):
        # Some lines further down.
        with jax.named_scope('inner'):
            return jnp.sin(x) @ x

    assert fingerprint() == elsewhere() == fingerprint(step)


def test_another_step_has_another_fingerprint():
    def other(x):
        with jax.named_scope('inner'):
            return jnp.cos(x) @ x

    def step(x):
        with jax.named_scope('outer'):
            return jnp.sin(x) @ x

    def of_y(y):
        with jax.named_scope('inner'):
            return jnp.sin(y) @ y

    of_y.__name__ = of_y.__qualname__ = 'step'
    reverse = MeshShardingHelper([4, 2], ['fsdp', 'tp'], devices=jax.devices()[::-1])
    fingerprints = [
        fingerprint(),
        fingerprint(other),
        fingerprint(step),
        fingerprint(of_y),
        fingerprint(shape=(32, 32)),
        fingerprint(jnp.sin, shape=(80, 128)),
        fingerprint(jnp.sin, shape=(80, 256)),
        fingerprint(spec='tp'),
        fingerprint(helper=MeshShardingHelper([2, 4], ['fsdp', 'tp'])),
        fingerprint(helper=reverse),
        fingerprint(hardware=HARDWARE['h100']),
        fingerprint(donate_argnums=0),
        fingerprint(compiler_options={'xla_cpu_enable_fast_math': True}),
    ]
    assert len(set(fingerprints)) == len(fingerprints)


def test_constants_do_not_make_it_long():
    large = jnp.arange(1 << 20, dtype='float32')
    lowered_step = lowered(lambda x: x + large, array(1 << 20, spec=P('fsdp')))
    assert len(lowered_step.fingerprint) == 16


def test_flags_in_a_file_count(monkeypatch, tmp_path):
    flags = tmp_path / 'flags'
    flags.write_text('--xla_something=1')
    monkeypatch.setenv('XLA_FLAGS', str(flags))
    before = fingerprint()
    assert before == fingerprint()
    flags.write_text('--xla_something=2')
    assert fingerprint() != before
