"""`autoshard` with pipelines: when layers become stages over slices, and when they do not."""

import dataclasses
import html
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from scalax._spmd.pipelines.config import options_text
from scalax.plan import HARDWARE, autoshard
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support import tpu_compiler

pytestmark = tpu_compiler.needed
OPTIMIZER = optax.sgd(1e-2, momentum=0.9)
SLOW = dataclasses.replace(HARDWARE['v5e'], dcn_bytes_per_second=1e8)


def train_step(state, x):
    params, opt_state = state

    def layer(x, w):
        return x + jnp.tanh(x * w['scale'] @ w['up']) @ w['down'], None

    def loss(params):
        return (
            jnp.square(jax.lax.scan(layer, x, params['layers'])[0] @ params['head']).astype('float32').mean()
        )

    updates, opt_state = OPTIMIZER.update(jax.grad(loss)(params), opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def arguments(layers=4, rows=64):
    def struct(*shape):
        return jax.ShapeDtypeStruct(shape, 'bfloat16')

    stacks = {
        'up': struct(layers, 512, 2048),
        'down': struct(layers, 2048, 512),
        'scale': struct(layers, 512),
    }
    params = {'layers': stacks, 'head': struct(512, 256)}
    return (params, jax.eval_shape(OPTIMIZER.init, params)), struct(rows, 32, 512)


def found_for(*, hardware=SLOW, budget_s=600, keep=(), **options):
    return autoshard(
        train_step,
        arguments(**options),
        'v5e:2x2',
        batch_argnums=1,
        donate_argnums=0,
        sizes={'tp': 1},
        num_slices=2,
        hardware=hardware,
        keep=keep,
    )


@pytest.fixture(scope='module')
def result():
    return found_for()


def test_over_a_slow_network_layers_are_stages(result):
    assert result.pipeline is not None and result.pipeline.axis == 'data'
    state, _ = arguments()
    params, opt_state = result.rule.apply(state)
    # All stacked arrays, including small ones and their statistics; the head belongs to no layer.
    layers = [*params['layers'].values(), *opt_state[0].trace['layers'].values()]
    assert len(layers) == 6 and all(spec[0] == 'data' for spec in layers)
    assert 'data' not in params['head']
    best, *others = result.meshes
    assert best.pipeline == result.pipeline and [row.pipeline for row in others] == [None]
    assert others[0].mean_seconds > 2 * best.mean_seconds


@pytest.mark.medium
def test_its_code_makes_the_program_of_the_plan(result):
    code = result.to_code()
    assert f"    pipeline=Pipeline('data', {options_text(result.pipeline)}),\n" in code
    assert "# Found for 'v5e:2x2': it needs 8 such devices.\nhelper = MeshShardingHelper([" in code
    code = code.replace('MeshShardingHelper([', "MeshShardingHelper.from_topology('v5e:2x2', [")
    scope = {'train_step': train_step}
    exec(code.replace('dcn_axis_dims', 'num_slices=2, dcn_axis_dims'), scope)
    assert scope['helper'].plan(scope['step'], *arguments(), quick=True).totals == result.plan.totals


@pytest.mark.slow
def test_its_steps_match_one_device(result):
    keys = iter(jax.random.split(jax.random.key(0), 8))
    shapes, x = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), arguments()), next(keys)
    params = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape) / 32, shapes[0][0])
    x = jax.random.normal(x, shapes[1].shape)
    helper = MeshShardingHelper([*result.mesh.values()], [*result.mesh])
    step = helper.sjit(
        train_step,
        in_shardings=(result.rule, result.batch_spec),
        out_shardings=result.rule,
        batch_argnums=1,
        pipeline=result.pipeline,
    )
    expected, actual = (params, OPTIMIZER.init(params)), (params, OPTIMIZER.init(params))
    for _ in range(3):
        expected, actual = jax.jit(train_step)(expected, x), step(actual, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), actual, expected)
    assert not np.allclose(expected[0]['head'], params['head'], rtol=1e-4, atol=1e-6)


def test_it_shows_the_stages_and_is_saved(result):
    mesh = f'data=2, fsdp=4; {options_text(result.pipeline)}'
    text = result.to_text(160)
    assert text.startswith(f'{mesh} on v5e:2x2') and mesh in html.unescape(result._repr_html_())
    [up] = [line for line in text.splitlines() if line.startswith('0/layers/up ')]
    assert "P('data'," in up
    saved = json.loads(json.dumps(result.to_dict()))
    assert saved['pipeline'] == dataclasses.asdict(result.pipeline)


@pytest.mark.slow
def test_over_a_fast_network_there_is_no_pipeline():
    fast = dataclasses.replace(SLOW, dcn_bytes_per_second=1e12)
    result = found_for(hardware=fast, rows=2048)
    assert result.pipeline is None and 'Pipeline' not in result.to_code()
    assert {row.pipeline is None for row in result.meshes} == {True, False}


@pytest.mark.medium
@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'layers': 3}, 'dimension 0 of size 3 is not divisible by 2 (data=2)'),
        ({'keep': [('scale', P())]}, 'takes stacks that are sharded over'),
    ],
)
def test_the_reason_why_a_step_cannot_be_a_pipeline(options, message):
    result = found_for(**options)
    [reason] = [row.reason for row in result.meshes if row.pipeline]
    assert result.pipeline is None and message in reason
