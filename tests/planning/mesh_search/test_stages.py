"""`search` with pipelines: which are tried, why they are not chosen, and when they are the best."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from examples import plan_llama
from examples.plan_llama import LLAMA_8B
from scalax._planning.mesh_search.objective import objective_seconds
from scalax.errors import ArgumentError
from scalax.plan import HARDWARE, Plan, search
from scalax.sharding import PartitionSpec as P
from scalax.sharding import Pipeline, TreePathShardingRule
from tests.support import gpu_compiler, tpu_compiler

AXES = ['stage', 'data', 'fsdp']
PARTS = [Pipeline('stage', num_microbatches=parts) for parts in (2, 4, 5)]
# Bytes per second between hosts: an eighth of a card of 1 Gb/s.
SLOW = dataclasses.replace(HARDWARE['v5e'], dcn_bytes_per_second=1e8)


def make_step(helper, pipeline=None, layers=4, rows=64, mixed=False):
    """Returns a gradient step of stacked layers, and its arguments."""

    def layer(x, weights):
        y = jnp.tanh(x @ weights['up']) @ weights['down']
        return (x + y - y.mean(0) if mixed else x + y), None

    def loss(params, x):
        return jnp.square(jax.lax.scan(layer, x, params)[0]).astype('float32').mean()

    def step(params, x):
        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params, x))

    stage = 'stage' if pipeline else None
    rule = TreePathShardingRule(('up', P(stage, 'fsdp')), ('down', P(stage, None, 'fsdp')))
    fun = helper.sjit(
        step,
        in_shardings=(rule, P(('stage', 'data', 'fsdp'))),
        out_shardings=rule,
        donate_argnums=0,
        batch_argnums=1,
        pipeline=pipeline,
    )
    params = {
        'up': jax.ShapeDtypeStruct((layers, 512, 2048), 'bfloat16'),
        'down': jax.ShapeDtypeStruct((layers, 2048, 512), 'bfloat16'),
    }
    return fun, (params, jax.ShapeDtypeStruct((rows, 32, 512), 'bfloat16'))


def over_slices(sizes):
    return sizes['stage'] * sizes['data'] == 2 and sizes['fsdp'] == 4


@pytest.fixture(scope='module')
def result():
    return search(
        make_step,
        'v5e:2x2',
        AXES,
        constraints=over_slices,
        num_slices=2,
        dcn_axis=['stage', 'data'],
        pipelines=PARTS,
        hardware=SLOW,
        full=0,
    )


@tpu_compiler.needed
def test_over_a_slow_network_a_pipeline_wins(result):
    assert [candidate.name for candidate in result.candidates] == [
        'stage=2, data=1, fsdp=4; num_microbatches=4',
        'stage=2, data=1, fsdp=4; num_microbatches=2',
        'stage=1, data=2, fsdp=4',
        'stage=2, data=1, fsdp=4; num_microbatches=5',
    ]
    best, _, without, undivided = result.candidates
    assert (best.pipeline, without.pipeline) == (PARTS[1], None)
    assert 'dcn:data' in without.plan.roofline().parts and 'dcn:stage' in best.plan.roofline().parts
    assert undivided.plan is None and 'are not divisible by 5 microbatches x 4 devices' in undivided.reason


@pytest.mark.medium
@tpu_compiler.needed
def test_it_shows_the_parts_and_is_saved(result):
    assert 'stage=2, data=1, fsdp=4; num_microbatches=4' in result.to_text(160)
    assert 'num_microbatches=4' in result._repr_html_()
    saved = json.loads(json.dumps(result.to_dict()))['candidates']
    assert [record['pipeline'] for record in saved[:3:2]] == [dataclasses.asdict(PARTS[1]), None]


@tpu_compiler.needed
def test_specified_numbers_of_microbatches_are_planned(result):
    plan = result.best
    assert plan.hardware == SLOW and Plan.load(plan.to_json()) == plan
    assert plan.roofline().step_seconds.overlapped > plan.roofline('v5e').step_seconds.overlapped


@pytest.mark.slow
@tpu_compiler.needed
def test_inside_a_slice_it_loses():
    def make(helper, pipeline):
        return make_step(helper, pipeline, rows=2048)

    result = search(make, 'v5e:2x4', AXES, constraints=over_slices, pipelines=PARTS[:2], full=0)
    assert [candidate.pipeline for candidate in result.candidates] == [None, PARTS[1], PARTS[0]]


@pytest.mark.medium
@tpu_compiler.needed
@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'layers': 3}, 'dimension 0 of size 3 is not divisible by 2 (stage=2)'),
        ({'mixed': True}, 'cannot run on microbatches: sub uses a batch-wide sum'),
    ],
)
def test_the_reason_why_a_step_cannot_be_a_pipeline(options, message):
    def make(helper, pipeline):
        return make_step(helper, pipeline, **options)

    result = search(make, 'v5e:2x4', AXES, constraints=over_slices, pipelines=PARTS[1], full=0)
    without, lost = result.candidates
    assert without.reason == '' and lost.plan is None
    assert message in lost.reason and '\n' not in lost.reason and 'What to do' not in lost.reason


def llama(tokens):
    def make(helper, pipeline):
        return plan_llama.make_step(helper, dataclasses.replace(LLAMA_8B, sequence=tokens), pipeline=pipeline)

    return make


def means(result):
    """Returns the objective of a search: without a pipeline, and with one."""
    seconds = {
        bool(candidate.pipeline): objective_seconds(candidate.plan.roofline().step_seconds)
        for candidate in result.candidates
    }
    return seconds[False], seconds[True]


@pytest.mark.slow
@tpu_compiler.newest
@pytest.mark.parametrize(
    ('topology', 'slices', 'tokens', 'least', 'most'),
    # Few tokens on slices of 16 chips, and more tokens on large slices (docs/planning_search.md).
    [('v5e:4x4', 8, 512, 1.4, 1.8), ('v5p:4x4x4', 4, 1024, 0.6, 0.9)],
)
def test_8b_on_tpus(topology, slices, tokens, least, most):
    result = search(
        llama(tokens),
        topology,
        ['stage', 'data', 'fsdp', 'tp'],
        constraints=lambda sizes: {sizes['stage'], sizes['data']} == {1, slices} and sizes['tp'] == 4,
        num_slices=slices,
        dcn_axis=['stage', 'data'],
        pipelines=Pipeline('stage', 4 * slices, fsdp_gather='step'),
        full=0,
    )
    without, pipeline = means(result)
    assert least < without / pipeline < most


@pytest.mark.slow
@gpu_compiler.needed
@pytest.mark.parametrize(('cards', 'least', 'most'), [(0.5, 3, 4), (8, 0.8, 1)])
def test_8b_on_nodes_of_gpus(cards, least, most):
    """Nodes with one card of 200 Gb/s, and with eight cards of 400 Gb/s."""
    result = search(
        llama(1024),
        'h100:4x8',
        ['stage', 'data', 'fsdp', 'tp'],
        constraints=lambda sizes: {sizes['stage'], sizes['data']} == {1, 4} and sizes['tp'] == 8,
        pipelines=Pipeline('stage', 16),
        hardware=dataclasses.replace(HARDWARE['h100'], dcn_bytes_per_second=cards * 5e10),
    )
    without, pipeline = means(result)
    assert least < without / pipeline < most


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (
            {'pipelines': 'stage'},
            "pipelines takes values such as Pipeline('stage', num_microbatches=8), got 's'",
        ),
        (
            {'pipelines': Pipeline('stge', 4)},
            f"{Pipeline('stge', 4)} names no mesh axis (did you mean 'stage'?)",
        ),
        ({'dcn_axis': ['stage', 'dta']}, "dcn_axis='dta' is not a mesh axis (did you mean 'data'?)"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ArgumentError) as raised:
        search(make_step, 'v5e:2x2', AXES, **options)
    assert str(raised.value) == message
