"""Pipelined steps: the collectives of a step, and the results of unusual layers."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax._compile.sjit import partitioned
from scalax.sharding import MeshShardingHelper, Pipeline, TreePathShardingRule
from scalax.sharding import PartitionSpec as P
from tests.spmd.pipelines.programs import PROGRAMS, arguments
from tests.spmd.pipelines.test_programs import assert_close, staged

pytestmark = pytest.mark.medium

LAYERS, EXAMPLES, WIDTH, HIDDEN = 8, 32, 16, 32
RULE = TreePathShardingRule(('^layers/', P('stage', 'fsdp')), ('.*', P('fsdp')))
STAGES, MICROBATCHES = 4, 8
TICKS = MICROBATCHES + STAGES - 1


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype('float32') / shape[-2] ** 0.5


def train_step(params, x):
    def layer(x, weights):
        return x + jnp.tanh(x @ weights['up']) @ weights['down'], None

    def loss(params):
        hidden, _ = jax.lax.scan(jax.checkpoint(layer), x @ params['embed'], params['layers'])
        return jnp.mean((hidden @ params['head'] - x) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def rows_of(monkeypatch, gather):
    """Counts the collectives of a training step by kind and reason."""
    steps = []

    def partition_step(*args, **options):
        steps.append(partition(*args, **options))
        return steps[-1]

    partition = partitioned.partition_step
    monkeypatch.setattr(partitioned, 'partition_step', partition_step)
    helper = MeshShardingHelper([STAGES, 2], ['stage', 'fsdp'])
    step = helper.sjit(
        train_step,
        in_shardings=(RULE, P(('fsdp', 'stage'))),
        out_shardings=(RULE, P()),
        batch_argnums=1,
        pipeline=Pipeline('stage', MICROBATCHES, fsdp_gather=gather),
    )
    layers = {'up': normal(1, LAYERS, WIDTH, HIDDEN), 'down': normal(2, LAYERS, HIDDEN, WIDTH)}
    params = {'embed': normal(0, 4, WIDTH), 'layers': layers, 'head': normal(3, WIDTH, 4)}
    jax.eval_shape(step, params, normal(4, EXAMPLES, 4))
    row_counts = Counter()
    for row in steps[-1].collective_rows:
        row_counts[row.kind, row.axes, row.reason.split(' for ')[0]] += row.count
    return row_counts


OUTSIDE = {
    ('all_gather', ('fsdp',), 'weight params/embed'): 1,
    ('all_gather', ('fsdp',), 'weight params/head'): 1,  # the forward pass ends with it
    ('reduce_scatter', ('fsdp',), 'gradient of params/embed'): 1,
    ('reduce_scatter', ('fsdp',), 'gradient of params/head'): 1,
    ('all_reduce', ('stage',), 'gradient of params/embed'): 1,
    ('all_reduce', ('stage',), 'gradient of params/head'): 1,
}


@pytest.mark.parametrize('gather', ['tick', 'step'])
def test_weights_of_layers_are_gathered_in_each_tick_or_once(monkeypatch, gather):
    """In both passes; gradients are reduced as often as weights are gathered."""
    row_counts = rows_of(monkeypatch, gather)
    inside = dict(row_counts)
    assert {key: inside.pop(key) for key in OUTSIDE} == OUTSIDE
    [(loss, count)] = [(key, inside.pop(key)) for key in [*inside] if key[1] == ('fsdp', 'stage')]
    assert (loss[0], count) == ('all_reduce', 1)
    runs = TICKS * LAYERS // STAGES
    expected = {}
    for weight in ('up', 'down'):
        times = {'tick': (2 * runs, runs), 'step': (1, 1)}[gather]
        expected['all_gather', ('fsdp',), f'weight params/layers/{weight}'] = times[0]
        expected['reduce_scatter', ('fsdp',), f'gradient of params/layers/{weight}'] = times[1]
    assert inside == expected


@pytest.mark.parametrize(
    'name, how',
    [
        ('several_values_carried', {}),
        ('fewer_microbatches_than_stages', {}),
        ('numbers_of_rows', {'num_repeats': 2}),
        ('branches_in_layers', {'fsdp_gather': 'step'}),
        ('rows_over_others_and_stages', {'num_repeats': 2}),
    ],
)
@pytest.mark.filterwarnings('ignore::scalax.errors.PipelineWarning')
@pytest.mark.sampled(3)
def test_values_match_one_device(name, how):
    program = PROGRAMS[name]
    expected = jax.jit(program.compiled)(*arguments())
    assert_close(staged(program, **how)(*arguments()), expected, program.tolerance)
