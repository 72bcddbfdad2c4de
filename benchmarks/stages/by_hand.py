"""LLaMA with hand-written pipeline stages: expert code in `jax.shard_map`, without scalax.

The model is examples/llama. The mesh has the axes stage, fsdp and tp. `shard_map` is manual over stage only,
and XLA partitions the computation of a stage over the other axes. Outside the pipeline, rows are sharded over
stage and fsdp.

The layers are stacked as (rounds, stages, layers of a group): a stage has one group per round, and rows pass
through all stages once per round. One round is GPipe (arXiv:1811.06965); several are a circular schedule
(arXiv:2104.04473, section 2.2), with a shorter bubble: (T - 1) / (rounds * M + T - 1) of the time.

Letters in shapes are those of the model; M microbatches, T stages.
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
# Between blocks, positions are sharded over tp (arXiv:2205.05198): a device saves and sends its shard.
RESIDUAL = P('fsdp', 'tp')
constrain = jax.lax.with_sharding_constraint
# Specs of a layer over fsdp and tp: Megatron's column- and row-parallel weights.
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
    """A pipeline schedule.

    Attributes:
        mesh: a mesh with the axes stage, fsdp and tp.
        parts: the number of microbatches; divisible by the stages (times two if a hop takes two ticks).
        rounds: the number of layer groups of a stage.
        gathered: when weights are gathered along fsdp: in each tick, layer by layer, or once per step.
            Gradients are reduced equally often.
        hop: the ticks between sending and receiving; with 2, no stage waits for a transfer. With twice
            the microbatches the bubble is the same.
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
        """Returns the parameters of the example with their layers in groups."""
        return {**params, 'layers': jax.tree.map(self._groups, params['layers'])}

    def _groups(self, leaf: jax.Array) -> jax.Array:
        return leaf.reshape(self.rounds, self.stages, -1, *leaf.shape[1:])

    def shardings(self, params: Any) -> Any:
        """Returns the shardings of the parameters, or of an optimizer state with their names."""
        layers = {f'{name}': P(None, 'stage', None, *spec) for name, spec in LAYER.items()}
        table = {**layers, 'embed': P(None, ('tp', 'fsdp')), 'unembed': P('fsdp', 'tp')}

        def placed(path: Any, leaf: Any) -> NamedSharding:
            return NamedSharding(self.mesh, table.get(getattr(path[-1], 'key', ''), P()))

        return jax.tree_util.tree_map_with_path(placed, params)

    def dealt(self, rows: jax.Array) -> jax.Array:
        """Splits rows [B, ...] over (stage, fsdp) into microbatches [M, B/M, ...] without communication."""
        parts, stages = self.parts, self.stages
        dealt = rows.reshape(stages, len(rows) // parts, parts // stages, *rows.shape[1:])
        return self.placed(jnp.swapaxes(dealt, 1, 2).reshape(parts, -1, *rows.shape[1:]), 'stage', 'fsdp')

    def placed(self, x: jax.Array, *spec: Any) -> jax.Array:
        return constrain(x, NamedSharding(self.mesh, P(*spec)))

    def __call__(self, layer: Layer, layers: Weights, x: jax.Array) -> jax.Array:
        """Applies all layers to microbatches [M, B/M, ...] that are sharded over stage and fsdp."""
        run = functools.partial(self._stage, layer)
        specs = (P(None, 'stage'), P(None, 'stage'), P('stage'))
        mapped = jax.shard_map(
            run, mesh=self.mesh, in_specs=specs, out_specs=P('stage'), axis_names={'stage'}
        )
        return mapped(jax.lax.stop_gradient(layers), sums_of(layers), x)

    def _stage(self, layer: Layer, layers: Weights, sums: Weights, x: jax.Array) -> jax.Array:
        """Runs a stage on its groups [rounds, 1, L/(T rounds), ...] and its microbatches [M/T, B/M, ...]."""
        stages, rounds, last = self.stages, self.rounds, self.stages - 1
        stage = jax.lax.axis_index('stage')
        groups = tuple(
            {name: self._used(name, leaf[:, 0]) for name, leaf in stack.items()} for stack in (layers, sums)
        )

        # Saves only the inputs of layers, not the weights of each tick's group.
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
            # As many microbatches circulate as can be in flight: the last stage sends exactly the one that
            # the first stage needs next.
            together = self.hop * stages
            done = jnp.clip(now - self.hop * stage, 0, rounds * self.parts - 1)
            index = done // together % rounds
            part = done // (rounds * together) * together + done % together
            first = (stage == 0) & (index == 0)
            x = jnp.where(first, jax.lax.dynamic_index_in_dim(parts, part, keepdims=False), arrived)
            output = group(groups, index, constrain(x, RESIDUAL))
            # Valid results overwrite those of idle ticks and earlier rounds.
            parts = jax.lax.dynamic_update_index_in_dim(parts, output, part, 0)
            return (parts, sent, output), None

        ring = [(i, (i + 1) % stages) for i in range(stages if rounds > 1 else last)]
        here = x.shape[0]
        # The first stage receives all microbatches point to point; the other stages hold zeros.
        parts = jnp.concatenate([x, *(jax.lax.ppermute(x, 'stage', [(k, 0)]) for k in range(1, stages))])
        parts = constrain(parts, P(None, *RESIDUAL))
        nothing = jnp.zeros_like(parts[0])
        (parts, _, _), _ = jax.lax.scan(tick, (parts, nothing, nothing), jnp.arange(self.ticks))
        # The last stage has all results, and sends each stage its share.
        results = [parts[k * here : (k + 1) * here] for k in range(stages)]
        sent = [jax.lax.ppermute(results[k], 'stage', [(last, k)]) for k in range(last)]
        return jnp.where(stage == last, results[last], sum(sent))

    def _used(self, name: str, leaf: jax.Array) -> jax.Array:
        """Returns weights [rounds, L/(T rounds), ...] as the ticks use them.

        If they are gathered once, each device along fsdp has a copy; its gradients are reduced after all
        ticks.
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
    """Returns float32 zeros, to which the gradients of *weights* are added (`summed_into`)."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), weights)


@jax.custom_vjp
def summed_into(weights: Weights, sums: Weights) -> Weights:
    """Returns the weights; their gradients are added to the gradients of *sums*."""
    return weights


def _narrowed(like: Weights, sums: Weights) -> tuple[Weights]:
    return (jax.tree.map(lambda leaf, total: total.astype(leaf.dtype), like, sums),)


sums_of.defvjp(lambda weights: (sums_of(weights), weights), _narrowed)
summed_into.defvjp(
    lambda weights, sums: (weights, None),
    lambda _, grads: (None, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), grads)),
)


def attention(rows: str | None, x: jax.Array, weights: Weights, config: ModelConfig) -> jax.Array:
    """Runs the example's attention on the local heads."""
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
    """Runs the example's MLP on the local units."""
    x = constrain(x, P(rows))
    hidden = jax.nn.silu(x @ weights['gate']) * (x @ weights['up'])
    return constrain(hidden, P(rows, None, 'tp')) @ weights['down']


def loss(pipeline: Pipeline, config: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Returns the mean loss of `tokens` [B, S + 1]."""
    tokens = pipeline.dealt(tokens)
    # Each device looks up its shard of the width for its stage's rows: the rows move instead of the table,
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
    """Returns a compiled step of (parameters, optimizer state) and tokens, and structs of the former."""

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
