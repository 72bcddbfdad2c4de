"""Plan section on pipelines: ticks, FLOPs of idle stages, memory and sends of stages."""

import dataclasses
import functools
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import pytest

import scalax
from scalax._core.render import blocks
from scalax._planning.report.plan_page import plan_blocks
from scalax.plan import HARDWARE, DevicePosition, PipelinedLoop, Plan
from scalax.sharding import MeshShardingHelper, Pipeline
from scalax.sharding import PartitionSpec as P

STAGES, LAYERS, MICROBATCHES, ROWS, WIDTH = 2, 6, 4, 16, 8
HELPER = MeshShardingHelper([STAGES, 4], ['stage', 'fsdp'])
PRODUCT = 2 * ROWS * WIDTH * WIDTH
ROW_BYTES = WIDTH * 4


def loss(stack, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)
    return jnp.mean(x**2)


def step(stack, x):
    value, gradient = jax.value_and_grad(loss)(stack, x)
    return value, stack - gradient


@functools.cache
def plan(microbatches=MICROBATCHES):
    """Returns the plan of the step with this number of microbatches; None: without a pipeline."""
    rules, pipeline = (
        (P('stage', 'fsdp'), P('fsdp')),
        None if microbatches is None else Pipeline('stage', microbatches),
    )
    compiled = HELPER.sjit(step, in_shardings=rules, batch_argnums=1, pipeline=pipeline)
    return HELPER.plan(compiled, jnp.ones((LAYERS, WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH)))


@pytest.mark.slow
def test_ticks_and_bytes():
    forward, backward = plan().pipelines
    assert [forward.is_backward, backward.is_backward] == [False, True]
    for loop in (forward, backward):
        assert (loop.axis, loop.stages, loop.num_microbatches, loop.num_repeats) == (
            'stage',
            STAGES,
            MICROBATCHES,
            1,
        )
        assert (loop.layers, loop.executions, loop.ticks) == (LAYERS, 1, MICROBATCHES + STAGES - 1)
        assert loop.bubble == (STAGES - 1) / (MICROBATCHES + STAGES - 1)
        assert loop.send_bytes == ROWS // MICROBATCHES * ROW_BYTES
        assert loop.io_bytes == 2 * loop.send_bytes
        assert loop.line.startswith('test_pipelines.py:')
    assert forward.weights == LAYERS * WIDTH * ROW_BYTES
    assert forward.saved_activation_bytes >= LAYERS * ROWS * ROW_BYTES  # the result of each layer
    assert backward.saved_activation_bytes == 0


def test_sends_have_the_line_of_the_loop():
    permutes = [row for row in plan().collectives if row.kind == 'collective-permute']
    line = plan().pipelines[0].line
    assert {str(row.source) for row in permutes} == {
        f'{line}, to the next stage',
        f'{line}, microbatches enter the pipeline',
        f'{line}, microbatches leave the pipeline',
    }
    assert not any('pipeline' in runs.scope for row in permutes for runs in row.scopes)


@pytest.mark.medium
def test_flops_of_idle_stages_are_not_model_flops():
    forward, backward = plan().pipelines
    assert (forward.flops, backward.flops) == (LAYERS * PRODUCT, 2 * LAYERS * PRODUCT)
    without = plan(None)
    assert not without.pipelines and not without.idle_flops
    assert (plan().flops, plan().model_flops) == (without.flops, without.model_flops)
    idle = plan().idle_flops
    assert idle == 3 * LAYERS * PRODUCT * (STAGES - 1) // MICROBATCHES
    # The devices do compute it.
    assert plan().device_cost.flops * plan().devices == plan().flops + idle


@pytest.mark.slow
def test_a_step_in_microbatches_runs_its_pipelines_as_often():
    rules = (P('stage', 'fsdp'), P('fsdp'))
    compiled = HELPER.sjit(
        scalax.microbatch(step, 2, reduce='mean'),
        in_shardings=rules,
        batch_argnums=1,
        pipeline=Pipeline('stage', 2),
    )
    plan_ = HELPER.plan(compiled, jnp.ones((LAYERS, WIDTH, WIDTH)), jnp.ones((2 * ROWS, WIDTH)))
    assert [(loop.executions, loop.flops) for loop in plan_.pipelines] == [
        (2, 2 * LAYERS * PRODUCT),
        (2, 4 * LAYERS * PRODUCT),
    ]


LOOP = PipelinedLoop('model.py:1 forward', 'stage', 3, 6, 1, 6, False, 1, 0, 0, 0, 0)


@pytest.mark.parametrize('rounds', [1, 2])
@pytest.mark.parametrize('is_backward', [False, True])
def test_the_schedule_respects_dependencies(rounds, is_backward):
    loop = dataclasses.replace(LOOP, num_repeats=rounds, is_backward=is_backward)
    order = [*range(loop.stages)][:: -1 if is_backward else 1]
    done = {}  # ((microbatch, repeat), stage) -> tick
    for tick in range(loop.ticks):
        for stage in order:
            if (work := loop.at(stage, tick)) is not None:
                done[work, stage] = tick
    assert len(done) == rounds * loop.num_microbatches * loop.stages
    for ((part, number), stage), tick in done.items():
        position = order.index(stage)
        if position:  # from the previous stage; at the first stage, from the last one of the previous repeat
            before = done[(part, number), order[position - 1]]
        elif number:
            before = done[(part, number - 1), order[-1]]
        else:
            continue
        assert before == tick - 1
    idle = loop.stages * loop.ticks - len(done)
    assert idle / (loop.stages * loop.ticks) == pytest.approx(loop.bubble)


def test_text():
    text = plan().to_text(110)
    assert '4 microbatches pass through 2 stages along stage' in text
    assert 'test_pipelines.py' in text and ' 20.0% ' in text
    assert f"idle stages compute {plan().idle_flops / 1e3:.3g} kFLOPs, not counted as the model's" in text
    assert 'pass through' not in plan(None).to_text(110)


def test_seconds():
    timed = plan().roofline('v5e', torus={'stage': 2, 'fsdp': 4})
    of_v5e = dataclasses.replace(
        plan(),
        device_kind=HARDWARE['v5e'].device_kinds[0],
        platform='tpu',
        device_positions=tuple(DevicePosition(0, (i // 4, i % 4)) for i in range(8)),
    )
    assert of_v5e.known_roofline.peak == timed.peak
    row = next(line for line in of_v5e.to_text(140).splitlines() if ' backward ' in line and '20.0%' in line)
    assert row.split()[-4::2] == [
        f'{2e3 * LAYERS * PRODUCT / timed.peak:.3g}',
        f'{2e3 * LAYERS * PRODUCT / MICROBATCHES / timed.peak:.3g}',
    ]


def test_a_page_draws_the_schedule():
    html = blocks.html(plan_blocks(plan(), 'Plan'))
    [drawn] = [
        element
        for element in ET.fromstring(f'<div>{html}</div>').iter('div')
        if element.get('class') == 'ticks'
    ]
    rows = [[cell.text for cell in row.iter('span')] for row in drawn][1:]
    assert rows == [
        ['0', '1', '2', '3', '·', None, '·', '0', '1', '2', '3', None],
        ['·', '0', '1', '2', '3', None, '0', '1', '2', '3', '·', None],
    ]
    many = dataclasses.replace(plan(), pipelines=(dataclasses.replace(LOOP, num_microbatches=10**6),))
    assert 'class="ticks"' not in blocks.html(plan_blocks(many, 'Plan'))


def test_saved():
    assert Plan.load(plan().to_json()) == plan()
