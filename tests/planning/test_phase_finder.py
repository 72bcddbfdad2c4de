"""Phases of instructions without a phase in their name, such as the optimizer's update."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest

from scalax._planning.cost.collectives import collectives
from scalax._planning.cost.device_cost import device_cost_of
from scalax._planning.program.hlo import parse
from scalax.plan import HARDWARE
from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support.leaves import leaf
from tests.support.recorded import recorded

HELPER = MeshShardingHelper([8], ['fsdp'])
SIZE, ROWS = 8192, 2**18


def planned(optimizer, wrapped=lambda update: update, donate=(0, 1), take=jax.grad):
    """Plans a step of one matmul."""

    def loss(params, x):
        return jnp.square(x @ params['w']).sum()

    def update(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def step(params, state, x):
        return wrapped(update)(params, state, take(loss)(params, x))

    rule = FSDPShardingRule('fsdp', min_fsdp_size=1)
    params = {'w': leaf(SIZE, SIZE)}
    state = jax.eval_shape(optimizer.init, params)
    fun = HELPER.sjit(
        step, in_shardings=(rule, rule, P('fsdp')), out_shardings=(rule, rule), donate_argnums=donate
    )
    return HELPER.plan(fun, params, state, leaf(ROWS, SIZE))


@pytest.mark.medium
@pytest.mark.parametrize('wrapped', [lambda update: update, jax.jit], ids=['inline', 'jit'])
def test_bytes_of_an_update(wrapped):
    """Parameters and two moments are read and written. A matmul may write gradients that are used at once."""
    plan = planned(optax.adamw(1e-3), wrapped)
    assert plan.device_cost.bytes_by_phase['update'] == pytest.approx(6 * 4 * SIZE**2 / 8, rel=1e-3)
    assert set(plan.device_cost.bytes_by_phase) == {'forward', 'backward', 'update'}
    assert plan.device_cost.by_phase.keys() == {'forward', 'backward'}


def test_phases_follow_one_another():
    """Matmuls are bound by compute, and the update by memory, so it adds its time."""
    plan = planned(optax.adamw(1e-3))
    roofline = plan.roofline('h100')
    forward, backward, update = roofline.phases
    assert [phase.name for phase in roofline.phases] == ['forward', 'backward', 'update']
    assert update.compute == 0
    assert update.hbm == pytest.approx(6 * 4 * SIZE**2 / 8 / HARDWARE['h100'].hbm_bytes_per_second, rel=1e-3)
    phases = sum(max(phase.compute, phase.hbm) for phase in roofline.phases)
    network = max(row.busy for row in roofline.communication)
    assert roofline.step_seconds.overlapped == pytest.approx(max(phases, network))
    assert phases > max(roofline.compute, roofline.hbm)
    assert sum(phase.hbm for phase in roofline.phases) == pytest.approx(roofline.hbm)
    assert forward.compute + backward.compute == pytest.approx(roofline.compute)


@pytest.mark.medium
def test_gradients_of_a_loop():
    """Gradients are accumulated over microbatches in a loop; the update comes after it."""

    def sums(loss):
        def take(params, x):
            def add(total, rows):
                return jax.tree.map(jnp.add, total, jax.grad(loss)(params, rows)), None

            zeros = jax.tree.map(jnp.zeros_like, params)
            return jax.lax.scan(add, zeros, x.reshape(4, -1, SIZE))[0]

        return take

    work = planned(optax.adamw(1e-3), take=sums).device_cost
    assert work.bytes_by_phase['update'] == pytest.approx(6 * 4 * SIZE**2 / 8, rel=1e-3)
    assert work.by_phase.keys() == {'forward', 'backward'}


def test_gradients_without_matmuls():
    """Phases are found even if the step only looks up rows of a table."""

    def step(table, ids):
        return table - 0.1 * jax.grad(lambda table: jnp.square(table[ids]).sum())(table)

    fun = HELPER.sjit(step, in_shardings=(P('fsdp'), P()), out_shardings=P('fsdp'), donate_argnums=0)
    plan = HELPER.plan(fun, leaf(SIZE, SIZE), leaf(8, dtype=jnp.int32))
    assert plan.device_cost.bytes_by_phase['update'] == 2 * 4 * SIZE**2 / 8
    phases = plan.roofline('h100').phases
    assert [phase.name for phase in phases] == ['forward', 'backward', 'update']
    assert phases[2].hbm > 0.99 * sum(phase.hbm for phase in phases)


def test_they_are_shown():
    plan = planned(optax.adamw(1e-3))
    [row] = [line.split() for line in str(plan).splitlines() if line.startswith('update')]
    assert row[:3] == ['update', '192.0', 'MiB']
    assert 'update' in plan._repr_html_()
    assert (
        json.loads(plan.to_json())['device_cost']['bytes_by_phase']['update']
        == plan.device_cost.bytes_by_phase['update']
    )


def block(w, x):
    return jnp.tanh(x @ w['up']) @ w['down']


@pytest.mark.medium
@pytest.mark.parametrize('take', [jax.grad, jax.value_and_grad])
@pytest.mark.parametrize(
    ('wrap', 'phases'),
    [
        (lambda fun: fun, {'forward': 2}),
        (jax.jit, {'forward': 2}),
        (jax.checkpoint, {'forward': 2, 'recomputed': 1, 'backward': 1}),
    ],
    ids=['plain', 'jit', 'checkpoint'],
)
def test_a_gather_belongs_to_its_first_use(take, wrap, phases):
    """For a weight that both passes use: the compiler names the gather after the gathered argument."""

    def step(w, x):
        def loss(w):
            with jax.named_scope('block'):
                return jnp.square(wrap(block)(w, x)).mean()

        return take(loss)(w)

    w = {'up': leaf(64, 256), 'down': leaf(256, 64)}
    rule = FSDPShardingRule('fsdp', min_fsdp_size=1)
    plan = HELPER.plan(HELPER.sjit(step, in_shardings=(rule, P('fsdp'))), w, leaf(4096, 64))
    gathers = [row for row in plan.collectives if row.kind == 'all-gather']
    assert {phase: sum(row.count for row in gathers if row.phase == phase) for phase in phases} == phases
    assert sum(row.count for row in gathers) == sum(phases.values())
    assert {runs.scope for row in gathers for runs in row.scopes} == {'block'}


@pytest.mark.medium
def test_matmuls_of_an_update():
    """An optimizer that multiplies matrices: its operations do not belong to the backward pass."""

    def make(size):
        def update(grads, state, params=None):
            return jax.tree.map(lambda g: jax.lax.fori_loop(0, 5, lambda _, x: x @ x.T @ x, g), grads), state

        return optax.GradientTransformation(lambda params: (), update)

    work = planned(make(SIZE)).device_cost
    assert work.by_phase['update'] > 0
    once = planned(optax.sgd(1.0)).device_cost
    assert {part: flops for part, flops in work.by_phase.items() if part != 'update'} == once.by_phase


def test_a_program_without_a_gradient_has_one_phase():
    plan = HELPER.plan(HELPER.sjit(lambda x: x @ x.T, in_shardings=P('fsdp')), leaf(SIZE, SIZE))
    assert plan.known_roofline is None and plan.roofline('h100').phases == ()
    assert set(plan.device_cost.bytes_by_phase) == {'other'}


def test_collectives_of_an_update():
    """Parameters are gathered after their update if only the moments are sharded."""
    recording = recorded('zero_1 v5e')
    rows = collectives(parse(recording.optimized), recording.mesh, partitioned=parse(recording.partitioned))
    phases = {(row.kind, row.phase) for row in rows}
    assert ('all-gather', 'update') in phases
    assert ('all-gather', 'other') not in phases


@pytest.mark.medium
@pytest.mark.parametrize('name', ['decoder v5e', 'llama 8b v5p', 'zero_1 v5e'])
def test_updates_of_recorded_programs(name):
    """By hand: bfloat16 parameters, times the minimum passes of these optimizers."""
    recording = recorded(name)
    update_bytes = device_cost_of(parse(recording.optimized)).bytes_by_phase['update']
    assert update_bytes >= recording.memory['argument_size_in_bytes'] / 2
