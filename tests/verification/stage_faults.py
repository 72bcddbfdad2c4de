"""Steps that are wrong because a fault is seeded into pipelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from scalax._jaxpr import batch_dims as jaxpr_rows
from scalax._spmd.pipelines import schedule as pipelines
from scalax._spmd.placements import op_rules
from scalax._spmd.placements.op_rules import Op, Strategy
from scalax._spmd.placements.placement import SUM
from scalax.sharding import MeshShardingHelper, Pipeline, TreePathShardingRule
from tests.verification.fault import Step, normal, seeded

STAGES = {'stage': 2, 'fsdp': 2}
WIDTH, LAYERS, ROWS, MICROBATCHES = 4, 2, 8, 2
RULE = TreePathShardingRule(('layers', P('stage')), ('.*', P()))
put, put_in_stack = pipelines.Ticks._put, pipelines.Ticks._put_in_stack

Layer = Callable[[Any, Any], tuple[Any, Any]]


def staged(helper: MeshShardingHelper, layer: Layer, layers: int = LAYERS) -> Step:
    """A step that computes gradients of a scan over layers, which runs as a pipeline."""

    def loss(params: Any, x: Any) -> Any:
        last, outputs = jax.lax.scan(layer, x, params['layers'])
        return sum(jnp.mean(jnp.square(leaf)) for leaf in jax.tree.leaves((last, outputs)))

    weights = normal(layers, WIDTH, WIDTH), normal(layers, WIDTH, WIDTH, seed=1)
    params = {'layers': dict(zip(('up', 'down'), weights, strict=True))}
    step = helper.sjit(
        jax.value_and_grad(loss),
        in_shardings=(RULE, P('fsdp')),
        out_shardings=(P(), RULE),
        batch_argnums=1,
        pipeline=Pipeline('stage', num_microbatches=MICROBATCHES),
    )
    return step, (params, normal(ROWS, WIDTH))


def block(x: Any, w: Any) -> Any:
    return x + jnp.tanh(x @ w['up']) @ w['down']


def _stored_as_another(self: Any, before: Any, x: Any, fact: Any, turn: Any) -> Any:
    return put_in_stack(self, before, x, fact, turn._replace(microbatch=(turn.microbatch + 1) % MICROBATCHES))


@seeded(('grad',), (pipelines.Ticks, '_put_in_stack', _stored_as_another), mesh=STAGES)
def activations_of_another_microbatch(helper: MeshShardingHelper) -> Step:
    """A wrong microbatch: the backward pass uses the saved activations of another microbatch."""
    return staged(helper, lambda x, w: (block(x, w), None))


@seeded(
    ('grad',),
    (
        pipelines.Ticks,
        '_put',
        lambda self, before, x, fact, i: put(self, before, x, fact, MICROBATCHES - 1 - i),
    ),
    mesh=STAGES,
)
def microbatches_in_reverse_order(helper: MeshShardingHelper) -> Step:
    """A wrong order: a pipeline returns its microbatches in reverse."""
    return staged(helper, lambda x, w: (block(x, w), x))


@seeded(
    ('grad',),
    (pipelines, '_accumulate', lambda before, x, fact, turn: before + x if fact == SUM else x),
    mesh=STAGES,
)
def gradients_of_idle_ticks(helper: MeshShardingHelper) -> Step:
    """A missing mask: gradients include the values of idle ticks."""
    return staged(helper, lambda x, w: (block(x, w), None))


@seeded(('grad',), (pipelines, '_broadcast', lambda x, is_source, pipeline: x), mesh=STAGES | {'stage': 4})
def last_stage_without_a_broadcast(helper: MeshShardingHelper) -> Step:
    """A missing broadcast: the other stages use their own values instead of the last stage's results."""
    return staged(helper, lambda x, w: (block(x, w), None), layers=4)


def _alone(op: Op) -> Strategy:
    return Strategy(op.placements, op.placements)


@seeded(
    ('grad',),
    (jaxpr_rows, '_ACTS_ALONG', frozenset[str]()),
    (op_rules, 'RULES', op_rules.RULES | {'cumsum': _alone}),
    mesh=STAGES,
)
def cumulative_sum_within_a_microbatch(helper: MeshShardingHelper) -> Step:
    """A wrong split: a cumulative sum starts from zero in each microbatch."""
    return staged(helper, lambda x, w: (block(x, w) + jnp.cumsum(x, 0), None))


@seeded(('grad',), (pipelines.Ticks, '_send', lambda self, x: x), mesh=STAGES)
def stage_without_a_send(helper: MeshShardingHelper) -> Step:
    """A missing send: each stage receives its own result instead of the previous stage's."""
    return staged(helper, lambda x, w: (block(x, w), None))
