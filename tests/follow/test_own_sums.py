"""Loops over microbatches add up on each device, and devices are summed once after the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scalax import microbatch
from scalax._jax.equations import equations
from scalax._jax.primitives import primitive_name
from scalax.custom_op import sharded_op
from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P

DDP = MeshShardingHelper([8], ['data'])
HSDP = MeshShardingHelper([2, 4], ['replica', 'fsdp'])
BOTH = MeshShardingHelper([4, 2], ['data', 'model'])
FSDP_RULE = FSDPShardingRule('fsdp', min_fsdp_size=1)


def layer(x, w):
    return x + jnp.tanh(x @ w.astype(x.dtype)), None


def loss(params, x):
    """Layers in a loop, in bfloat16: the compiler alone sums in each layer of each microbatch."""
    y, _ = lax.scan(jax.checkpoint(layer), x.astype(jnp.bfloat16), params['w'])
    return jnp.mean((y.astype(jnp.float32) + params['b'] - x) ** 2)


@pytest.fixture
def params(rng):
    w = rng.normal(size=(3, 16, 16)).astype(np.float32) / 8
    return {'w': w, 'b': rng.normal(size=16).astype(np.float32)}


@pytest.fixture
def x(rng):
    return rng.normal(size=(64, 16)).astype(np.float32)


def on_mesh(helper, fun, rule, rows, *args):
    """The results on one device and on the mesh, and the bytes of all-reduces along each mesh axis."""
    step = helper.sjit(fun, in_shardings=(rule, rows), out_shardings=(P(), rule), batch_argnums=1)
    totals = helper.plan(step, *args).totals
    return jax.jit(fun)(*args), step(*args), {axes: each.get('all-reduce') for axes, each in totals.items()}


def assert_close(found, expected, tolerance):
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_gradients_of_replicated_parameters_are_summed_once(params, x):
    step = microbatch(jax.value_and_grad(loss), 4)
    expected, found, sent = on_mesh(DDP, step, P(), P('data'), params, x)
    assert_close(found, expected, 3e-3)
    assert sent == {('data',): 4 * (3 * 16 * 16 + 16 + 1)}  # the gradients and the loss, in float32


@pytest.mark.slow
def test_replicas_of_sharded_parameters_too(params, x):
    step = microbatch(jax.value_and_grad(loss), 4)
    expected, found, sent = on_mesh(HSDP, step, FSDP_RULE, P(('replica', 'fsdp')), params, x)
    assert_close(found, expected, 3e-3)
    assert sent['replica',] == 4 * (3 * 16 * 16 + 16) // 4 + 4


def accumulated(of_part):
    """A loop over four microbatches that somebody wrote, with a sum that does not begin at zero."""

    def step(params, x):
        def add(total, part):
            index, rows = part
            value, ours = jax.value_and_grad(of_part)(params, rows)
            return jax.tree.map(jnp.add, total, ours), (value, index)

        parts = jnp.moveaxis(x.reshape(-1, 4, *x.shape[1:]), 1, 0)
        return lax.scan(add, params, (jnp.arange(4), parts))[::-1]

    return step


@pytest.mark.medium
def test_what_a_loop_starts_with_counts_once(params, x):
    def of_part(params, x):
        return jnp.sum(jnp.tanh(x @ params['w'][0]) + params['b'] * x)

    expected, found, sent = on_mesh(DDP, accumulated(of_part), P(), P('data'), params, x)
    assert_close(found, expected, 1e-4)
    assert sent == {('data',): 4 * (3 * 16 * 16 + 16 + 4)}


ALONE = {
    'products': lambda params, x: jnp.sum(jnp.tanh(x @ params['w'][0])),
    'what is the same in all microbatches': lambda params, x: jnp.sum(
        jnp.tanh(x @ params['w'][0]) * jnp.linspace(0, 1, len(x))[:, None]
    ),
    'rows that are looked up': lambda params, x: jnp.sum(jnp.tanh(params['w'][0][jnp.argmax(x, 1)]) * x),
}
TOGETHER = {
    'a statistic': lambda params, x: jnp.sum((x - x.mean(0)) @ params['w'][0]),
    'draws': lambda params, x: jnp.sum(x @ params['w'][0] * jax.random.normal(jax.random.key(0), x.shape)),
    'a product of all': lambda params, x: jnp.prod(x @ params['w'][0]),
}


@pytest.mark.parametrize(
    ('of_part', 'is_alone'),
    [*((each, True) for each in ALONE.values()), *((each, False) for each in TOGETHER.values())],
    ids=[*ALONE, *TOGETHER],
)
def test_devices_add_up_alone_where_each_example_counts_alone(of_part, is_alone, params, x):
    step = DDP.sjit(accumulated(of_part), in_shardings=(P(), P('data')), batch_argnums=1)
    primitives = {primitive_name(each) for each in equations(step.trace(params, x).jaxpr)}
    assert ('shard_map' in primitives) is is_alone


@pytest.mark.slow
@pytest.mark.parametrize(
    'of_part',
    [
        lambda params, x: jnp.sum((x - x.mean(0)) @ params['w'][0]) ** 2,  # a statistic of the microbatch
        lambda params, x: jnp.sum(x @ params['w'][0] * jax.random.normal(jax.random.key(0), x.shape)),
    ],
    ids=['statistic', 'draws'],
)
def test_what_needs_all_examples_stays_as_it_is(of_part, params, x):
    expected, found, sent = on_mesh(DDP, accumulated(of_part), P(), P('data'), params, x)
    assert_close(found, expected, 1e-4)
    assert sent['data',] > 4 * 4 * 16 * 16


@pytest.mark.medium
def test_unsigned_differences_of_counts_are_those_of_all_examples(params, x):
    """Those of one device would begin anew at the largest number, and be sums of floats after that."""

    def of_part(params, x):
        return (jnp.uint32(256) - jnp.sum(x > 0, dtype=jnp.uint32)) * jnp.sum(params['w'] ** 2)

    expected, found, _ = on_mesh(DDP, accumulated(of_part), P(), P('data'), params, x)
    assert_close(found, expected, 1e-4)


@sharded_op('i -> i')
def doubled(context, x):
    return 2 * x


def summed_on_devices(x):
    return jax.shard_map(lambda x: lax.psum(x, 'data'), mesh=BOTH.mesh, in_specs=P('data'), out_specs=P())(x)


def called_back(x):
    return jax.pure_callback(np.cumsum, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@pytest.mark.medium
@pytest.mark.parametrize('of_parameters', [doubled, summed_on_devices, called_back])
def test_what_is_written_for_all_devices_compiles(of_parameters, params, x):
    def step(params, x):
        def add(total, part):
            return total + jnp.sum(part @ params['w'][0], 0) * jnp.sum(of_parameters(params['b'])), None

        return lax.scan(add, jnp.zeros(16), jnp.moveaxis(x.reshape(-1, 4, 16), 1, 0))[0]

    found = BOTH.sjit(step, in_shardings=(P(), P('data')), batch_argnums=1)(params, x)
    assert_close(found, jax.jit(step)(params, x), 1e-4)
