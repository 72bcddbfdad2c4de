"""LLaMA with pipeline stages by hand: what an expert writes in `jax.shard_map`, without scalax.

The model is that of examples/llama. A mesh has the axes stage, fsdp and tp; `shard_map` is manual over stage
alone, and XLA partitions what a stage computes over the others. Outside of the pipeline the rows are over
stage and fsdp.

The layers are stacked as (rounds, stages, layers of a group): of each round a stage has one group, and rows
go around all stages once a round. One round is GPipe (arXiv:1811.06965); more are a circular schedule
(arXiv:2104.04473, section 2.2), with a shorter bubble: (S - 1) / (rounds * M + S - 1) for M parts and S stages.

Letters in shapes as in the model; M parts, T stages.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from examples.llama.model import ModelConfig, Params, attention, block_input, init_params, mlp, rotary_angles

Weights = dict[str, jax.Array]
Layer = Callable[[P, jax.Array, Weights], jax.Array]
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
        parts: that the rows are dealt in.
        rounds: how many groups of layers a stage has.
        gathered: when weights are gathered along fsdp: in each tick, layer by layer, or once a step, with as
            many sums of gradients.
    """

    mesh: jax.sharding.Mesh
    parts: int
    rounds: int = 1
    gathered: Literal['tick', 'step'] = 'tick'
    hop: int = 1
    unroll: bool = False

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

    def shardings(self, params: Params) -> Any:
        """Those of the parameters, and of an optimizer's state with their names."""
        layers = {f'{name}': P(None, 'stage', None, *spec) for name, spec in LAYER.items()}
        table = {**layers, 'embed': P(None, ('fsdp', 'tp')), 'unembed': P('fsdp', 'tp')}

        def placed(path: Any, leaf: Any) -> NamedSharding:
            return NamedSharding(self.mesh, table.get(getattr(path[-1], 'key', ''), P()))

        return jax.tree_util.tree_map_with_path(placed, params)

    def dealt(self, rows: jax.Array) -> jax.Array:
        """Rows [B, ...] over (stage, fsdp) as parts [M, B/M, ...]: a stage has M/T of them, and moves none."""
        parts, stages = self.parts, self.stages
        dealt = rows.reshape(stages, len(rows) // parts, parts // stages, *rows.shape[1:])
        return self.placed(jnp.swapaxes(dealt, 1, 2).reshape(parts, -1, *rows.shape[1:]), 'stage', 'fsdp')

    def placed(self, x: jax.Array, *spec: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))

    def __call__(self, layer: Layer, layers: Weights, x: jax.Array) -> jax.Array:
        """Applies all layers to parts [M, B/M, ...], which lie over stage and fsdp, as the results do."""
        dtypes = {name: leaf.dtype for name, leaf in layers.items()}
        wide = {name: leaf.astype(jnp.float32) for name, leaf in layers.items()}  # so are sums of gradients
        run = functools.partial(self._stage, layer, dtypes)
        specs = P(None, 'stage'), P('stage')
        return jax.shard_map(run, mesh=self.mesh, in_specs=specs, out_specs=P('stage'), axis_names={'stage'})(
            wide, x
        )

    def _stage(self, layer: Layer, dtypes: Mapping[str, Any], layers: Weights, x: jax.Array) -> jax.Array:
        """What a stage does, with its groups [rounds, 1, L/(T rounds), ...] and its parts [M/T, B/M, ...]."""
        stages, rounds, last = self.stages, self.rounds, self.stages - 1
        stage = jax.lax.axis_index('stage')
        turn = (
            self.hop * stages
        )  # parts go around together: what the last stage sends is what the first needs
        groups = {name: leaf[:, 0] for name, leaf in layers.items()}
        if self.gathered == 'step':
            # A replica of the weights for each device along fsdp, which sums its own gradients in all ticks.
            replicas = self.mesh.shape['fsdp']
            groups = {name: self._replicated(name, leaf, dtypes[name]) for name, leaf in groups.items()}
            one = functools.partial(layer, P())
            apply = lambda x, weights: jax.vmap(one)(x.reshape(replicas, -1, *x.shape[1:]), weights).reshape(
                x.shape
            )
        else:
            apply = functools.partial(layer, P('fsdp'))

        # What layers take in is saved, and nothing else: not the weights of the group of each tick.
        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names('layer'))
        def group(groups: Weights, index: jax.Array, x: jax.Array) -> jax.Array:
            axis = self.gathered == 'step'
            chosen = {
                name: jnp.moveaxis(jax.lax.dynamic_index_in_dim(leaf, index, axis, keepdims=False), axis, 0)
                for name, leaf in groups.items()
            }
            narrow = {name: leaf.astype(dtypes[name]) for name, leaf in chosen.items()}
            return jax.lax.scan(body, x, narrow, unroll=self.unroll)[0]

        def body(x: jax.Array, weights: Weights) -> tuple[jax.Array, None]:
            return jax.checkpoint(apply)(checkpoint_name(x, 'layer'), weights), None

        def tick(carry: tuple[jax.Array, ...], now: jax.Array) -> tuple[Any, None]:
            parts, arrived, made = carry
            sent = jax.lax.ppermute(made, 'stage', ring)
            arrived = sent if self.hop == 1 else arrived
            done = jnp.clip(now - self.hop * stage, 0, rounds * self.parts - 1)
            part = done // (rounds * turn) * turn + done % turn
            at = done // turn % rounds
            fresh = jax.lax.dynamic_index_in_dim(parts, part, keepdims=False)
            x = jnp.where((stage == 0) & (at == 0), fresh, arrived)
            made = group(groups, at, jax.lax.with_sharding_constraint(x, P('fsdp')))
            # What idle ticks and earlier rounds write is overwritten by what is right.
            parts = jax.lax.dynamic_update_index_in_dim(parts, made, part, 0)
            return (parts, sent, made), None

        ring = [(i, (i + 1) % stages) for i in range(stages if rounds > 1 else last)]
        here = x.shape[0]
        # The first stage gets all parts, point to point; others hold zeros.
        parts = jnp.concatenate([x, *(jax.lax.ppermute(x, 'stage', [(k, 0)]) for k in range(1, stages))])
        parts = jax.lax.with_sharding_constraint(parts, P(None, 'fsdp'))
        nothing = jnp.zeros_like(parts[0])
        (parts, _, _), _ = jax.lax.scan(tick, (parts, nothing, nothing), jnp.arange(self.ticks))
        # The last one has all results, and sends each stage its own.
        results = [parts[k * here : (k + 1) * here] for k in range(stages)]
        sent = [jax.lax.ppermute(results[k], 'stage', [(last, k)]) for k in range(last)]
        return jnp.where(stage == last, results[last], sum(sent))

    def _replicated(self, name: str, leaf: jax.Array, dtype: Any) -> jax.Array:
        """Weights [rounds, L/(T rounds), ...] of each device along fsdp: gathered as they are, summed in float32."""
        whole = [axis if axis == 'tp' else None for axis in LAYER[name]]
        leaf = jnp.broadcast_to(leaf.astype(dtype), (self.mesh.shape['fsdp'], *leaf.shape))
        leaf = jax.lax.with_sharding_constraint(leaf, P('fsdp', None, None, *whole))
        return leaf.astype(jnp.float32)


def loss(pipeline: Pipeline, config: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """The mean loss of `tokens` [B, S + 1]."""
    tokens = pipeline.dealt(tokens)
    # Each device looks up its part of the width for the rows of its stage: rows travel, and not the table.
    looked_up = pipeline.placed(tokens[..., :-1], 'stage')
    x = pipeline.placed(params['embed'][looked_up], 'stage', None, None, ('fsdp', 'tp'))
    x = pipeline.placed(x, 'stage', 'fsdp')

    def layer(rows: P, x: jax.Array, weights: Weights) -> jax.Array:
        rotation = rotary_angles(x.shape[1], config)
        x = x + attention(block_input(x, weights['attention_norm'], config), weights, rotation, config)
        x = jax.lax.with_sharding_constraint(x, rows)
        x = x + mlp(block_input(x, weights['mlp_norm'], config), weights)
        return jax.lax.with_sharding_constraint(x, rows)

    x = pipeline(layer, params['layers'], x)
    x = pipeline.placed(block_input(x, params['final_norm'], config), 'stage', 'fsdp')
    logits = pipeline.placed(x @ params['unembed'], 'stage', 'fsdp', None, 'tp')
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[..., 1:]))


def train_step(
    pipeline: Pipeline, config: ModelConfig, optimizer: optax.GradientTransformation, dtype: Any = 'bfloat16'
) -> tuple[Any, tuple[Any, Any]]:
    """A compiled step of (parameters, optimizer state) and tokens, and the shapes and shardings of the first."""

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
