"""GPipe and circular schedules that gather weights each tick or once per step: values, and bytes sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax.plan import make_plan
from scalax.sharding import MeshShardingHelper, Pipeline, TreePathShardingRule
from scalax.sharding import PartitionSpec as P

LAYERS, ROWS, WIDTH, CLASSES = 8, 32, 16, 10
RULE = TreePathShardingRule(('layers/bias', P('stage')), ('layers', P('stage', 'fsdp')), ('.*', P('fsdp')))
OVER_ALL = P(('stage', 'fsdp'))
SCHEDULES = [
    Pipeline('stage', 8),
    Pipeline('stage', 4, num_repeats=2),
    Pipeline('stage', 8, num_repeats=2, fsdp_gather='step'),
    Pipeline('stage', 8, fsdp_gather='step'),
]


def parameters(dtype=np.float32):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return (rng.normal(size=shape) / np.sqrt(WIDTH)).astype(dtype)

    return {
        'embed': normal(64, WIDTH),
        'layers': {'weight': normal(LAYERS, WIDTH, WIDTH), 'bias': normal(LAYERS, WIDTH)},
        'head': normal(WIDTH, CLASSES),
    }


def loss(params, tokens, *, reverse=False):
    def layer(x, layer_inputs):
        weights, key = layer_inputs
        added = jnp.tanh(x @ weights['weight'] + weights['bias'])
        return x + jnp.where(jax.random.bernoulli(key, 0.8, x.shape), added, 0), None

    keys = jax.random.split(jax.random.key(3), LAYERS)
    x = params['embed'][tokens]
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, (params['layers'], keys), reverse=reverse)
    return jnp.mean(jax.nn.log_softmax(x @ params['head']) ** 2)


def step(params, tokens):
    value, grads = jax.value_and_grad(loss)(params, tokens)
    return value, grads, jax.tree.map(lambda w, g: (w - 0.5 * g).astype(w.dtype), params, grads)


def backwards(params, tokens):
    return jax.value_and_grad(lambda params, tokens: loss(params, tokens, reverse=True))(params, tokens)


def staged(fun, pipeline, spec=OVER_ALL):
    helper = MeshShardingHelper([4, 2], ['stage', 'fsdp'])
    return helper, helper.sjit(fun, in_shardings=(RULE, spec), batch_argnums=1, pipeline=pipeline)


TOKENS = np.random.default_rng(1).integers(0, 64, ROWS)


def assert_close(actual, expected):
    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())

    jax.tree.map(close, actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    'pipeline, spec',
    [
        (SCHEDULES[0], OVER_ALL),
        *zip(SCHEDULES, [P('fsdp'), OVER_ALL, P(('fsdp', 'stage')), P('fsdp')], strict=True),
    ],
    ids=str,
)
def test_values_match_one_device(pipeline, spec):
    _, fun = staged(step, pipeline, spec)
    params, expected_params = parameters(), parameters()
    for _ in range(2):
        value, grads, params = fun(params, TOKENS)
        expected_value, expected_grads, expected_params = jax.jit(step)(expected_params, TOKENS)
        assert_close((value, grads, params), (expected_value, expected_grads, expected_params))


@pytest.mark.slow
@pytest.mark.parametrize('pipeline', SCHEDULES[::2], ids=str)
def test_loops_from_the_last_layer_to_the_first(pipeline):
    _, fun = staged(backwards, pipeline)
    assert_close(fun(parameters(), TOKENS), jax.jit(backwards)(parameters(), TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize('pipeline', SCHEDULES[::2], ids=str)
def test_layers_are_sent_nowhere_but_to_the_stage_that_runs_them(pipeline):
    helper, fun = staged(step, pipeline)
    plan = make_plan(helper, fun, (parameters(), TOKENS), {})
    along = [row for row in plan.collectives if 'stage' in row.axes]
    # Outside the pipeline, examples and gradients also move between stages, with fewer bytes than the layers.
    others = [row.bytes for row in along if row.kind != 'collective-permute']
    assert max(others) <= 64 * WIDTH * 4 < LAYERS * WIDTH * WIDTH * 4
    hops = 2 * (pipeline.num_repeats * pipeline.num_microbatches + 3)
    assert sum(row.count for row in along if row.kind == 'collective-permute') >= hops


@pytest.mark.medium
def test_weights_are_gathered_once_a_step():
    gathered = {}
    for gather in ('tick', 'step'):
        helper, fun = staged(step, Pipeline('stage', 8, fsdp_gather=gather))
        plan = make_plan(helper, fun, (parameters(), TOKENS), {})
        gathered[gather] = sum(row.count for row in plan.collectives if row.kind == 'all-gather')
    assert gathered['step'] * 4 < gathered['tick']


@pytest.mark.medium
def test_gradients_are_summed_over_microbatches_in_float32():
    """In bfloat16, a sum of many microbatches would stop growing: 256 + 1 is 256."""

    def fun(weights, x):
        def total(weights):
            return jax.lax.scan(lambda c, w: (c * w, None), x, weights)[0].sum(dtype=jnp.float32)

        return jax.grad(total)(weights)

    helper = MeshShardingHelper([2, 4], ['stage', 'fsdp'])
    count = 512
    placed = P('stage'), P(('fsdp', 'stage'))
    staged = helper.sjit(fun, in_shardings=placed, batch_argnums=1, pipeline=Pipeline('stage', 128))
    grads = staged(jnp.ones(2, 'bfloat16'), jnp.ones(count, 'bfloat16'))
    np.testing.assert_array_equal(np.asarray(grads, np.float32), count)


@pytest.mark.medium
def test_one_trace_for_each_signature_and_no_cost_of_a_call():
    traced = []

    def counted(params, tokens):
        traced.append(1)
        return loss(params, tokens)

    _, fun = staged(counted, Pipeline('stage', 8))
    params = parameters()
    for _ in range(3):
        fun(params, TOKENS)
    assert len(traced) == 1
