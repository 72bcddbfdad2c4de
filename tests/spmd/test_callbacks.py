"""Python callbacks inside a step run once, with global values."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from scalax._jax.manual_axes import callbacks_nest
from scalax.errors import PartitioningWarning
from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P

pytestmark = pytest.mark.medium

MESHES = {
    'fsdp': (MeshShardingHelper([8], ['fsdp']), P('fsdp')),
    'hsdp': (MeshShardingHelper([2, 4], ['data', 'fsdp']), P(('data', 'fsdp'))),
    'hsdp and tp': (MeshShardingHelper([2, 2, 2], ['data', 'fsdp', 'tp']), P(('data', 'fsdp'))),
}
RNG = np.random.default_rng(0)
W, X = np.asarray(RNG.normal(size=(8, 8)), 'f'), np.asarray(RNG.normal(size=(16, 8)), 'f')
CALLS: list[np.ndarray] = []


@pytest.fixture(autouse=True)
def no_calls():
    CALLS.clear()


def note(x):
    CALLS.append(np.asarray(x))


def doubled(x):
    note(x)
    return np.asarray(x) * 2


def debugged(w, x):
    y = jnp.tanh(x @ w)
    jax.debug.callback(note, y)
    return jnp.mean(y**2)


def in_a_loop(w, x):
    def layer(x, _):
        jax.debug.callback(note, x.mean())
        return jnp.tanh(x @ w), None

    return jnp.mean(lax.scan(layer, x, None, 3)[0])


def in_a_branch(w, x):
    y = jnp.tanh(x @ w)
    lax.cond(y.sum() > -1e9, lambda: jax.debug.callback(note, y.max()), lambda: None)
    return jnp.mean(y**2)


def pure(w, x):
    y = jnp.tanh(x @ w)
    return jnp.mean(y * jax.pure_callback(doubled, jax.typeof(y), lax.stop_gradient(y)))


def bits(w, x):
    """Callbacks return signed zeros, booleans and complex numbers bit by bit."""
    y = jnp.tanh(x @ w)
    kinds = (
        jnp.zeros(3),
        jnp.ones(3, bool),
        jnp.ones(3, 'complex64'),
        jnp.ones(3, 'int8'),
        jnp.ones(3, 'bfloat16'),
    )

    def call(*_):
        note(0)
        zeros = np.asarray([-0.0, np.inf, np.nan], 'f')
        others = (
            np.asarray([True, False, True]),
            zeros.astype('complex64').conj(),
            np.arange(-1, 2, dtype='int8'),
        )
        return zeros, *others, zeros.astype('bfloat16')

    results = io_callback(call, [jax.typeof(kind) for kind in kinds], lax.stop_gradient(y))
    return jnp.mean(y), results


PROGRAMS = {program.__name__: program for program in (debugged, in_a_loop, in_a_branch, pure)}


each_mesh = pytest.mark.parametrize('mesh', MESHES if callbacks_nest() else ['fsdp', 'hsdp'])


@each_mesh
@pytest.mark.parametrize('name', PROGRAMS)
@pytest.mark.sampled(3)
def test_callbacks_see_all_examples_once(name, mesh):
    (helper, spec), gradient = MESHES[mesh], jax.value_and_grad(PROGRAMS[name])
    step = helper.sjit(gradient, in_shardings=(FSDPShardingRule(min_fsdp_size=1), spec), batch_argnums=1)
    results = step(W, X)
    jax.effects_barrier()
    calls = [*CALLS]
    CALLS.clear()
    expected = jax.jit(gradient)(W, X)
    jax.effects_barrier()
    for a, b in zip(results, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    assert len(calls) == len(CALLS)
    # Callbacks of iterations may run in any order.
    order = (lambda calls: sorted(calls, key=np.sum)) if name == 'in_a_loop' else list
    for a, b in zip(order(calls), order(CALLS), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@each_mesh
def test_all_devices_get_all_bits_of_results(mesh):
    helper, spec = MESHES[mesh]
    step = helper.sjit(bits, in_shardings=(P(), spec), batch_argnums=1)
    _, results = jax.block_until_ready(step(W, X))
    jax.effects_barrier()
    assert len(CALLS) == 1
    for a, b in zip(results, jax.jit(bits)(W, X)[1], strict=True):
        for shard in a.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.asarray(b).tobytes()


def test_nested_callbacks_are_probed_under_an_active_mesh():
    callbacks_nest.cache_clear()
    with jax.sharding.use_abstract_mesh(MESHES['hsdp'][0].mesh.abstract_mesh):
        inside = callbacks_nest()
    callbacks_nest.cache_clear()
    assert inside == callbacks_nest()


def test_prints_match_one_device(capfd):
    def fun(w, x):
        y = jnp.tanh(x @ w)
        jax.debug.print('largest {:.4f} of {}', jnp.abs(x).max(), y.shape[0])
        return y

    helper, spec = MESHES['fsdp']
    helper.sjit(fun, in_shardings=(P(), spec), batch_argnums=1)(W, X)
    jax.effects_barrier()
    assert capfd.readouterr().out == f'largest {np.abs(X).max():.4f} of 16\n'


def test_partitioned_callbacks_run_on_every_device():
    helper, spec = MESHES['fsdp']

    def fun(w, x):
        y = x @ w
        jax.debug.callback(note, y, partitioned=True)
        return y

    y = helper.sjit(fun, in_shardings=(P(), spec), batch_argnums=1)(W, X)
    jax.effects_barrier()
    assert sorted(block.tobytes() for block in CALLS) == sorted(
        np.asarray(block.data).tobytes() for block in y.addressable_shards
    )


@pytest.mark.skipif(callbacks_nest(), reason='this JAX runs them there')
def test_callbacks_on_meshes_with_other_axes_need_a_new_jax():
    helper, spec = MESHES['hsdp and tp']
    step = helper.sjit(debugged, in_shardings=(P(), spec), batch_argnums=1)
    with pytest.warns(
        PartitioningWarning, match='it runs callbacks, which this version of JAX does not support'
    ):
        step(W, X)
    jax.effects_barrier()
    assert len(CALLS) == 1


def told_by(fun, *, helper, spec):
    """Returns the only warning about a step, without the folder of its line."""
    step = helper.sjit(fun, in_shardings=(P(), spec), batch_argnums=1)
    with pytest.warns(PartitioningWarning) as warned:
        step.trace(W, X)
    [message] = [str(warning.message).replace(__file__, 'test_callbacks.py') for warning in warned]
    return message.replace(f'test_callbacks.py:{fun.__code__.co_firstlineno + 1} ', 'line 1 of ')


FALLS_BACK = 'It runs as jax.jit runs it, and the compiler alone decides how activations are sharded.'


def test_steps_with_ordered_callbacks_are_not_partitioned():
    """JAX rejects ordered callbacks on several devices."""
    helper, spec = MESHES['fsdp']

    def fun(w, x):
        jax.debug.callback(note, x.sum(), ordered=True)
        return x @ w

    assert told_by(fun, helper=helper, spec=spec) == (
        'fun is not partitioned along its batch: it runs callbacks in order, which JAX allows on one device '
        f'only (line 1 of fun). {FALLS_BACK}\nWhat to do: leave out ordered=True, and pass the callback '
        'the index of the iteration, or turn partitioning off with batch_argnums=().'
    )


def test_steps_with_mutable_arrays_are_not_partitioned():
    helper, spec = MESHES['fsdp']

    def fun(w, x):
        ref = jax.new_ref(x @ w)
        ref[0] = jnp.ones(8)
        return jax.ref.freeze(ref)

    assert told_by(fun, helper=helper, spec=spec) == (
        'fun is not partitioned along its batch: it changes an array in place (jax.new_ref) '
        f'(line 1 of fun). {FALLS_BACK}\nWhat to do: return a new array, as x.at[i].set(y) and the carry of '
        'a loop do, or turn partitioning off with batch_argnums=().'
    )
    with pytest.warns(PartitioningWarning):
        result = helper.sjit(fun, in_shardings=(P(), spec), batch_argnums=1, out_shardings=spec)(W, X)
    np.testing.assert_allclose(result, jax.jit(fun)(W, X), rtol=1e-5)


@pytest.mark.parametrize('mesh', ['fsdp', 'hsdp'])
def test_inspected_shardings_are_the_placements(mesh):
    helper, spec = MESHES[mesh]
    shardings = []

    def fun(w, x):
        def layer(x, _):
            x = jnp.tanh(x @ w)
            jax.debug.inspect_array_sharding(x, callback=shardings.append)
            return x, None

        x, _ = lax.scan(layer, x, None, 3)
        for value in (w, x.sum(), x.T):
            jax.debug.inspect_array_sharding(value, callback=shardings.append)
        return x.sum()

    step = helper.sjit(fun, in_shardings=(FSDPShardingRule(min_fsdp_size=1), spec), batch_argnums=1)
    result = step(W, X)
    step(W, X)
    batch = spec[0]  # the compiler calls back in any order
    assert Counter(sharding.spec for sharding in shardings) == Counter(
        [P('fsdp'), P(), P(None, batch), P(batch)]
    )
    assert {sharding.mesh for sharding in shardings} == {helper.mesh}
    np.testing.assert_allclose(result, jax.jit(fun)(W, X), rtol=1e-5)


def test_the_compiler_decides_shardings_along_other_axes():
    helper, spec = MESHES['hsdp and tp']

    def fun(w, x):
        jax.debug.inspect_array_sharding(x, callback=note)
        return x @ w

    assert told_by(fun, helper=helper, spec=spec) == (
        'fun is not partitioned along its batch: it asks for the sharding of a value, part of which '
        f'the compiler decides (along tp) (line 1 of fun). {FALLS_BACK}\nWhat to do: leave it out, and read '
        'the compiled program, or turn partitioning off with batch_argnums=().'
    )
