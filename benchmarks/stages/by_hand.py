"""LLaMA with pipeline stages by hand: what an expert writes in `jax.shard_map`, without scalax.

The model is that of examples/llama. A mesh has the axes stage, fsdp and tp; `shard_map` is manual over stage
alone, and XLA partitions what a stage computes over the others. Outside of the pipeline the rows are over
stage and fsdp.

The layers are stacked as (rounds, stages, layers of a group): of each round a stage has one group, and rows
go around all stages once a round. One round is GPipe (arXiv:1811.06965); more are a circular schedule
(arXiv:2104.04473, section 2.2), with a shorter bubble: (T - 1) / (rounds * M + T - 1) of the time.

Letters in shapes as in the model; M parts, T stages.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from examples.llama.model import ModelConfig, Params, block_input, init_params, rotary_angles, rotate

Weights = dict[str, jax.Array]
Layer = Callable[[str | None, jax.Array, Weights], jax.Array]
# Between blocks tp shares out positions (arXiv:2205.05198): a device saves and sends its own.
RESIDUAL = P('fsdp', 'tp')
constrain = jax.lax.with_sharding_constraint
# Of a layer, over fsdp and tp: Megatron's columns and rows.
LAYER = {
    'attention_norm': P(),
    'query': P('fsdp', 'tp'),
    'key': P('fsdp', 'tp'),
    'value': P('fsdp', 'tp'),
    'output': P('tp', 'fsdp'),
    'mlp_norm': P(),
    'gate': P('fsdp', 'tp'),
    'up': P('fsdp', 'tp'),
    'down': P('tp', 'fsdp'),
}


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A schedule.

    Attributes:
        mesh: with the axes stage, fsdp and tp.
        parts: how many the rows are dealt in; divided by the stages (and by two for hops of two ticks).
        rounds: how many groups of layers a stage has.
        gathered: when weights are gathered along fsdp: in each tick, layer by layer, or once a step, with as
            many sums of gradients.
        hop: the ticks that it takes to the next stage: 2, so that what is sent is not waited for. With twice
            the parts the bubble is the same.
    """

    mesh: jax.sharding.Mesh
    parts: int
    rounds: int = 1
    gathered: Literal['tick', 'step'] = 'tick'
    hop: Literal[1, 2] = 1

    @property
    def stages(self) -> int:
        return self.mesh.shape['stage']

    @property
    def ticks(self) -> int:
        return self.rounds * self.parts + self.hop * (self.stages - 1)

    def stacked(self, params: Params) -> Params:
        """The parameters of the example with their layers in groups."""
        return {**params, 'layers': jax.tree.map(self._groups, params['layers'])}

    def _groups(self, leaf: jax.Array) -> jax.Array:
        return leaf.reshape(self.rounds, self.stages, -1, *leaf.shape[1:])

    def shardings(self, params: Any) -> Any:
        """Those of the parameters, and of an optimizer's state with their names."""
        layers = {f'{name}': P(None, 'stage', None, *spec) for name, spec in LAYER.items()}
        table = {**layers, 'embed': P(None, ('tp', 'fsdp')), 'unembed': P('fsdp', 'tp')}

        def placed(path: Any, leaf: Any) -> NamedSharding:
            return NamedSharding(self.mesh, table.get(getattr(path[-1], 'key', ''), P()))

        return jax.tree_util.tree_map_with_path(placed, params)

    def dealt(self, rows: jax.Array) -> jax.Array:
        """Rows [B, ...] over (stage, fsdp) as parts [M, B/M, ...]: M/T of each stage, and none moves."""
        parts, stages = self.parts, self.stages
        dealt = rows.reshape(stages, len(rows) // parts, parts // stages, *rows.shape[1:])
        return self.placed(jnp.swapaxes(dealt, 1, 2).reshape(parts, -1, *rows.shape[1:]), 'stage', 'fsdp')

    def placed(self, x: jax.Array, *spec: Any) -> jax.Array:
        return constrain(x, NamedSharding(self.mesh, P(*spec)))

    def __call__(self, layer: Layer, layers: Weights, x: jax.Array) -> jax.Array:
        """Applies all layers to parts [M, B/M, ...], which lie over stage and fsdp, as the results do."""
        run = functools.partial(self._stage, layer)
        specs = (P(None, 'stage'), P(None, 'stage'), P('stage'))
        mapped = jax.shard_map(
            run, mesh=self.mesh, in_specs=specs, out_specs=P('stage'), axis_names={'stage'}
        )
        return mapped(jax.lax.stop_gradient(layers), sums_of(layers), x)

    def _stage(self, layer: Layer, layers: Weights, sums: Weights, x: jax.Array) -> jax.Array:
        """What a stage does, with its groups [rounds, 1, L/(T rounds), ...] and its parts [M/T, B/M, ...]."""
        stages, rounds, last = self.stages, self.rounds, self.stages - 1
        stage = jax.lax.axis_index('stage')
        groups = tuple(
            {name: self._used(name, leaf[:, 0]) for name, leaf in stack.items()} for stack in (layers, sums)
        )

        # What layers take in is saved, and nothing else: not the weights of the group of each tick.
        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names('layer'))
        def group(groups: tuple[Weights, Weights], index: jax.Array, x: jax.Array) -> jax.Array:
            pick = functools.partial(jax.lax.dynamic_index_in_dim, index=index, keepdims=False)
            return jax.lax.scan(body, x, summed_into(*jax.tree.map(pick, groups)))[0]

        @jax.checkpoint
        def apply(x: jax.Array, weights: Weights) -> jax.Array:
            if self.gathered == 'tick':
                return layer('fsdp', x, weights)
            local = x.reshape(self.mesh.shape['fsdp'], -1, *x.shape[1:])
            return jax.vmap(functools.partial(layer, None))(local, weights).reshape(x.shape)

        def body(x: jax.Array, weights: Weights) -> tuple[jax.Array, None]:
            return apply(checkpoint_name(x, 'layer'), weights), None

        def tick(carry: tuple[jax.Array, ...], now: jax.Array) -> tuple[Any, None]:
            parts, arrived, output = carry
            sent = jax.lax.ppermute(output, 'stage', ring)
            arrived = sent if self.hop == 1 else arrived
            # As many parts go around together as can be under way: what the last stage sends is then what
            # the first one needs.
            together = self.hop * stages
            done = jnp.clip(now - self.hop * stage, 0, rounds * self.parts - 1)
            index = done // together % rounds
            part = done // (rounds * together) * together + done % together
            first = (stage == 0) & (index == 0)
            x = jnp.where(first, jax.lax.dynamic_index_in_dim(parts, part, keepdims=False), arrived)
            output = group(groups, index, constrain(x, RESIDUAL))
            # What idle ticks and earlier rounds write is overwritten by what is right.
            parts = jax.lax.dynamic_update_index_in_dim(parts, output, part, 0)
            return (parts, sent, output), None

        ring = [(i, (i + 1) % stages) for i in range(stages if rounds > 1 else last)]
        here = x.shape[0]
        # The first stage gets all parts, point to point; others hold zeros.
        parts = jnp.concatenate([x, *(jax.lax.ppermute(x, 'stage', [(k, 0)]) for k in range(1, stages))])
        parts = constrain(parts, P(None, *RESIDUAL))
        nothing = jnp.zeros_like(parts[0])
        (parts, _, _), _ = jax.lax.scan(tick, (parts, nothing, nothing), jnp.arange(self.ticks))
        # The last one has all results, and sends each stage its own.
        results = [parts[k * here : (k + 1) * here] for k in range(stages)]
        sent = [jax.lax.ppermute(results[k], 'stage', [(last, k)]) for k in range(last)]
        return jnp.where(stage == last, results[last], sum(sent))

    def _used(self, name: str, leaf: jax.Array) -> jax.Array:
        """Weights [rounds, L/(T rounds), ...] as the ticks use them.

        Gathered once, there is a replica for each device along fsdp, whose gradients wait for all ticks.
        """
        if self.gathered == 'tick':
            return leaf
        replicas = jnp.broadcast_to(
            leaf[:, :, None], (*leaf.shape[:2], self.mesh.shape['fsdp'], *leaf.shape[2:])
        )
        other_axes = [axis if axis == 'tp' else None for axis in LAYER[name]]
        return constrain(replicas, P(None, None, 'fsdp', *other_axes))


@jax.custom_vjp
def sums_of(weights: Weights) -> Weights:
    """Zeros in float32, to which the gradients of *weights* are added (`summed_into`)."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), weights)


@jax.custom_vjp
def summed_into(weights: Weights, sums: Weights) -> Weights:
    """The weights; what their gradients are is added to those of *sums*."""
    return weights


def _narrowed(like: Weights, sums: Weights) -> tuple[Weights]:
    return (jax.tree.map(lambda leaf, total: total.astype(leaf.dtype), like, sums),)


sums_of.defvjp(lambda weights: (sums_of(weights), weights), _narrowed)
summed_into.defvjp(
    lambda weights, sums: (weights, None),
    lambda _, grads: (None, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), grads)),
)


def attention(rows: str | None, x: jax.Array, weights: Weights, config: ModelConfig) -> jax.Array:
    """That of the example, of the heads of a device."""
    x, heads = constrain(x, P(rows)), P(rows, None, 'tp')
    rotation = rotary_angles(x.shape[1], config)
    q, k, v = (
        constrain((x @ weights[name]).reshape(*x.shape[:2], -1, config.head_size), heads)
        for name in ('query', 'key', 'value')
    )
    q, k = constrain(rotate(q, rotation), heads), constrain(rotate(k, rotation), heads)
    q = q.reshape(*x.shape[:2], config.kv_heads, -1, config.head_size)
    scores = jnp.einsum('bqghk,btgk->bghqt', q, k) / math.sqrt(config.head_size)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = constrain(jnp.where(causal, scores, -jnp.inf), P(rows, 'tp'))
    mixed = jnp.einsum('bghqt,btgk->bqghk', jax.nn.softmax(scores), v)
    mixed = constrain(mixed.reshape(*x.shape[:2], -1), heads)
    return mixed @ weights['output']


def mlp(rows: str | None, x: jax.Array, weights: Weights) -> jax.Array:
    """That of the example, of the units of a device."""
    x = constrain(x, P(rows))
    hidden = jax.nn.silu(x @ weights['gate']) * (x @ weights['up'])
    return constrain(hidden, P(rows, None, 'tp')) @ weights['down']


def loss(pipeline: Pipeline, config: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """The mean loss of `tokens` [B, S + 1]."""
    tokens = pipeline.dealt(tokens)
    # Each device looks up its part of the width for the rows of its stage: rows travel, and not the table,
    # along one axis at a time.
    ids = pipeline.placed(tokens[..., :-1], 'stage')
    x = pipeline.placed(params['embed'][ids], 'stage', None, None, ('tp', 'fsdp'))
    x = pipeline.placed(x, 'stage', 'fsdp', None, 'tp')
    x = pipeline.placed(x, 'stage', *RESIDUAL)

    def layer(rows: str | None, x: jax.Array, weights: Weights) -> jax.Array:
        x = constrain(
            x + attention(rows, block_input(x, weights['attention_norm'], config), weights, config),
            P(rows, 'tp'),
        )
        return constrain(x + mlp(rows, block_input(x, weights['mlp_norm'], config), weights), P(rows, 'tp'))

    x = pipeline(layer, params['layers'], x)
    x = pipeline.placed(block_input(x, params['final_norm'], config), 'stage', 'fsdp')
    logits = pipeline.placed(x @ params['unembed'], 'stage', 'fsdp', None, 'tp')
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[..., 1:]))


def train_step(
    pipeline: Pipeline, config: ModelConfig, optimizer: optax.GradientTransformation, dtype: Any = 'bfloat16'
) -> tuple[Any, tuple[Any, Any]]:
    """A compiled step of (parameters, optimizer state) and tokens; shapes and shardings of the first."""

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        value, grads = jax.value_and_grad(functools.partial(loss, pipeline, config))(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    params = jax.eval_shape(lambda key: pipeline.stacked(init_params(key, config)), jax.random.key(0))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params)
    state = params, jax.eval_shape(optimizer.init, params)
    shardings = pipeline.shardings(state)
    rows = NamedSharding(pipeline.mesh, P(('stage', 'fsdp')))
    compiled = jax.jit(
        step,
        in_shardings=(shardings, rows),
        out_shardings=(shardings, NamedSharding(pipeline.mesh, P())),
        donate_argnums=0,
    )
    return compiled, (state, shardings)
