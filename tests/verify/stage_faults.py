"""Steps that are wrong where pipelines have a mistake in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from scalax._jaxprs import rows
from scalax._stages import pipeline
from scalax._stages.deal import Deal
from scalax._stages.pipeline import Pipeline
from scalax.sharding import MeshShardingHelper, Stages, TreePathShardingRule
from tests.verify.fault import Step, always, normal, seeded

STAGES = {'stage': 2, 'fsdp': 2}
WIDTH, LAYERS, ROWS = 4, 2, 8
RULE = TreePathShardingRule(('layers', P('stage')), ('.*', P()))
microbatch, back = Deal.microbatch, Deal.back

Layer = Callable[[Any, Any], tuple[Any, Any]]


def staged(helper: MeshShardingHelper, layer: Layer, first: Callable[[Any], Any] = lambda x: x) -> Step:
    """A step of gradients, of a loop over layers that runs as a pipeline; *first* makes what it carries."""

    def loss(params: Any, x: Any) -> Any:
        last, given = jax.lax.scan(layer, first(x), params['layers'])
        return sum(jnp.mean(jnp.square(leaf)) for leaf in jax.tree.leaves((last, given)))

    weights = normal(LAYERS, WIDTH, WIDTH), normal(LAYERS, WIDTH, WIDTH, seed=1)
    params = {'layers': dict(zip(('up', 'down'), weights, strict=True))}
    step = helper.sjit(
        jax.value_and_grad(loss),
        in_shardings=(RULE, P('fsdp')),
        out_shardings=(P(), RULE),
        batch_argnums=1,
        stages=Stages('stage', microbatches=2),
    )
    return step, (params, normal(ROWS, WIDTH))


def block(x: Any, w: Any) -> Any:
    return x + jnp.tanh(x @ w['up']) @ w['down']


@seeded(
    ('grad',),
    (Deal, 'microbatch', lambda self, x, rows, i: microbatch(self, x, rows, (i + 1) % self.microbatches)),
    mesh=STAGES,
)
def microbatch_with_numbers_of_another(helper: MeshShardingHelper) -> Step:
    """What is drawn for all rows is that of other ones."""

    def layer(x: Any, w: Any) -> tuple[Any, Any]:
        return block(x, w) * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), None

    return staged(helper, layer)


@seeded(('grad',), (Deal, 'back', lambda self, x, rows: back(self, jnp.roll(x, 1, 1), rows)), mesh=STAGES)
def microbatches_back_in_another_order(helper: MeshShardingHelper) -> Step:
    """Rows come out of a pipeline as others than went in."""
    return staged(helper, lambda x, w: (block(x, w), x))


@seeded(
    ('grad',),
    (pipeline, '_kept', lambda before, x, fact, turn: x if fact is None else before + x),
    mesh=STAGES,
)
def sums_of_idle_ticks(helper: MeshShardingHelper) -> Step:
    """Gradients of what a stage computes while it has nothing to do."""
    return staged(helper, lambda x, w: (block(x, w), None))


@seeded(('grad',), (Deal, 'is_first', always(True)), mesh=STAGES)
def added_by_each_microbatch(helper: MeshShardingHelper) -> Step:
    """What is the same for all rows is added to a sum over them in each microbatch."""

    def layer(x: Any, w: Any) -> tuple[Any, Any]:
        return block(x, w), jnp.sum(x, 0) + w['up'][0]

    return staged(helper, layer)


@seeded(('grad',), (rows, '_WORKS_ALONG', frozenset[str]()), mesh=STAGES)
def running_sums_over_rows(helper: MeshShardingHelper) -> Step:
    """A microbatch begins them anew."""
    return staged(helper, lambda x, w: (block(x, w) + jnp.cumsum(x, 0), None))


@seeded(('grad',), (rows, '_LINEAR', rows._LINEAR | {'square'}), mesh=STAGES)
def square_of_a_mean_over_rows(helper: MeshShardingHelper) -> Step:
    """The squares of the means of microbatches are added up."""

    def layer(x: Any, w: Any) -> tuple[Any, Any]:
        return block(x, w), jax.lax.square(jnp.mean(x, 0))

    return staged(helper, layer)


@seeded(('grad',), (Pipeline, '_sent', lambda self, x: x), mesh=STAGES)
def stage_that_sends_nothing(helper: MeshShardingHelper) -> Step:
    """Each stage goes on with what it gave itself."""
    return staged(helper, lambda x, w: (block(x, w), None))
