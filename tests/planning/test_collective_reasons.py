"""Reasons in plans for scalax's collectives, from the names of their operations."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalax._planning.cost.collective_causes import reason_of
from scalax._planning.program.module_scopes import scopes_in
from scalax._spmd.placements.collectives import COLLECTIVE_SCOPE
from scalax.plan import Plan
from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P

pytestmark = pytest.mark.medium

WIDTH, EXAMPLES, LAYERS = 64, 64, 3


def loss(params, x):
    def layer(x, w):
        return jnp.tanh(x @ w['up']) @ w['down'], None

    x, _ = jax.lax.scan(layer, x, params['blocks'])
    ranks = jnp.argsort(x[:, 0])
    return jnp.mean(x**2 * ranks[:, None])


def step(params, x):
    value, gradients = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value


def plan_of(fun=step):
    helper = MeshShardingHelper([8], ['fsdp'])
    rule = FSDPShardingRule(min_fsdp_size=1)
    out = (rule, P()) if fun is step else None
    function = helper.sjit(fun, in_shardings=(rule, P('fsdp')), out_shardings=out, batch_argnums=1)
    up, down = np.ones((LAYERS, WIDTH, 2 * WIDTH), 'float32'), np.ones((LAYERS, 2 * WIDTH, WIDTH), 'float32')
    params = {'blocks': {'up': up, 'down': down}}
    return helper.plan(function, params, np.ones((EXAMPLES, WIDTH), 'float32'))


def test_each_collective_has_its_reason():
    plan = plan_of()
    reasons = {(row.kind, row.reason) for row in plan.collectives}
    for name in ('up', 'down'):
        assert ('all-gather', f'weight params/blocks/{name} for dot_general') in reasons
        assert any(reason == f'gradient of params/blocks/{name}' for _, reason in reasons)
    assert ('all-gather', 'examples gathered for sort') in reasons
    assert all(row.reason for row in plan.collectives)
    assert {row.cause for row in plan.collectives} <= {'sharding', 'resharding', 'compiler'}
    ups = [row for row in plan.collectives if row.reason == 'weight params/blocks/up for dot_general']
    assert {(row.phase, row.count) for row in ups} == {('forward', LAYERS), ('backward', LAYERS)}
    line = loss.__code__.co_firstlineno + 2
    assert {str(row.source) for row in ups} == {f'test_collective_reasons.py:{line} layer'}


def test_text_and_json():
    plan = plan_of()
    text = plan.to_text(200)
    line = loss.__code__.co_firstlineno + 2
    assert f'weight params/blocks/up for dot_general, test_collective_reasons.py:{line} layer' in text
    assert "partitioned along fsdp; its batch is 'x': " in text
    assert 'examples gathered for sort at test_collective_reasons.py:' in text
    assert Plan.load(plan.to_json()) == plan


def test_text_of_an_unpartitioned_step():
    def writing(params, x):
        return jax.new_ref(2 * x)[...] @ params['blocks']['up'][0]

    with pytest.warns(match='is not partitioned'):
        plan = plan_of(writing)
    assert 'not partitioned along its batch: it changes an array in place (jax.new_ref)' in plan.to_text(200)
    assert not any(row.reason for row in plan.collectives)


def test_scopes_exclude_the_indices_of_collectives():
    name = 'jit(step)/transpose(jvp(Model))/up/scalax(weight, 7)/all_gather'
    assert scopes_in(COLLECTIVE_SCOPE.sub('', name)) == ['Model', 'up']
    assert not any('scalax(' in scope.scope for row in plan_of().collectives for scope in row.scopes)


def test_a_collective_without_a_name_gets_no_reason_of_its_neighbor():
    """The TPU compiler fuses a reduction and drops its name, next to a collective that has one."""
    reasons = {5: 'gradient of params/up'}
    neighbour = types.SimpleNamespace(op_name='jit(step)/scalax(gradient, 5)/reduce_scatter')
    nameless = types.SimpleNamespace(op_name='')
    assert reason_of(neighbour, neighbour, reasons, {5}) == 'gradient of params/up'
    assert reason_of(nameless, neighbour, reasons, {5}) == ''
    assert reason_of(nameless, neighbour, reasons, {4}) == 'gradient of params/up'
    assert reason_of(nameless, None, reasons, {5}) == ''
