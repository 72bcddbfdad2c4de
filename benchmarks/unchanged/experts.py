"""Mixture-of-experts decoders: one-hot dispatch, sorted tokens, dense experts, experts over a batch axis."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.unchanged.decoders import norm
from benchmarks.unchanged.model import Model, Size, Tree
from scalax.sharding import PartitionSpec as P
from scalax.sharding import TreePathShardingRule, with_sharding_annotation


@dataclasses.dataclass(frozen=True)
class Sizes:
    width: int
    layers: int
    heads: int
    hidden: int
    experts: int
    chosen: int
    vocabulary: int
    sequence: int
    dtype: str


FEW = {
    'small': Sizes(32, 2, 4, 32, 4, 2, 64, 8, 'float32'),
    'large': Sizes(1024, 12, 16, 4096, 8, 2, 32_768, 2048, 'bfloat16'),
}
MANY = {
    'small': Sizes(32, 2, 4, 64, 8, 2, 64, 8, 'float32'),
    'large': Sizes(1024, 12, 16, 512, 64, 2, 32_768, 2048, 'bfloat16'),
}
SHARED = (
    ('output', P(None, 'tp', 'fsdp')),
    ('query|key|value', P(None, 'fsdp', 'tp')),
    ('unembed', P('fsdp', 'tp')),
    ('embed', P('tp', 'fsdp')),
    ('norm|router', P()),
)
# tp shards the hidden dimension for sorted tokens, and the experts for one-hot dispatch.
COLUMNS_AND_ROWS = TreePathShardingRule(
    ('gate|up', P(None, None, 'fsdp', 'tp')), ('down', P(None, None, 'tp', 'fsdp')), *SHARED
)
EXPERTS_AND_ROWS = TreePathShardingRule(
    ('gate|up', P(None, 'tp', 'fsdp')), ('down', P(None, 'tp', None, 'fsdp')), *SHARED
)
OVER_EXPERTS = {
    'tp': TreePathShardingRule(
        ('gate|up', P(None, 'fsdp', None, 'tp')), ('down', P(None, 'fsdp', 'tp', None)), *SHARED
    ),
    '': TreePathShardingRule(
        ('gate|up|down', P(None, 'fsdp')),
        ('output', P(None, None, 'fsdp')),
        ('unembed', P('fsdp')),
        ('embed', P(None, 'fsdp')),
        ('query|key|value', P(None, 'fsdp')),
        ('norm|router', P()),
    ),
}
DENSE = {
    'residual': P('batch', None, None),
    'heads': P('batch', None, 'tp', None),
    'logits': P('batch', None, 'tp'),
}
ALL_TOKENS = {'all_hidden': P('batch', None, 'tp')}
HAND = DENSE | {
    'routing': P('batch', None, 'tp', None),
    'taken': P('tp', 'batch', None, None),
    'hidden': P('tp', 'batch', None, None),
    'out': P('tp', 'batch', None, None),
}
# Tokens move to their experts and back, in shards of the width, but not between slices.
SPREAD = DENSE | {
    'routing': P('batch', None, None, None),
    'taken': P(None, 'batch', None, 'tp'),
    'arrived': P('fsdp', 'data', None, 'tp'),
    'whole': P('fsdp', 'data', None, None),
    'hidden': P('fsdp', 'data', None, 'tp'),
    'out': P('fsdp', 'data', None, 'tp'),
    'returned': P(None, 'batch', None, 'tp'),
}


def init(key: jax.Array, s: Sizes) -> Tree:
    """Draws the parameters: layers are stacked, and experts within each layer."""
    keys = iter(jax.random.split(key, 10))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, s.dtype) / math.sqrt(shape[-2])

    return {
        'embed': normal(s.vocabulary, s.width),
        'layers': {
            'query': normal(s.layers, s.width, s.width),
            'key': normal(s.layers, s.width, s.width),
            'value': normal(s.layers, s.width, s.width),
            'output': normal(s.layers, s.width, s.width),
            'router': normal(s.layers, s.width, s.experts),
            'gate': normal(s.layers, s.experts, s.width, s.hidden),
            'up': normal(s.layers, s.experts, s.width, s.hidden),
            'down': normal(s.layers, s.experts, s.hidden, s.width),
            'attention_norm': jnp.ones((s.layers, s.width), s.dtype),
            'mlp_norm': jnp.ones((s.layers, s.width), s.dtype),
        },
        'final_norm': jnp.ones(s.width, s.dtype),
        'unembed': normal(s.width, s.vocabulary),
    }


def attention(x: jax.Array, w: Tree, s: Sizes) -> jax.Array:
    """Maps (B, S, D) to (B, S, D), causal."""
    batch, length, _ = x.shape

    def split(matrix: jax.Array) -> jax.Array:
        return with_sharding_annotation((x @ matrix).reshape(batch, length, s.heads, -1), 'heads')

    q, k, v = split(w['query']), split(w['key']), split(w['value'])
    scores = jnp.einsum('bqhd,bkhd->bhqk', q, k) / math.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = with_sharding_annotation(jnp.einsum('bhqk,bkhd->bqhd', jax.nn.softmax(scores), v), 'heads')
    return mixed.reshape(x.shape) @ w['output']


def route(x: jax.Array, w: Tree, s: Sizes) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the weights and indices of the experts of each token, (B, S, K), and the load imbalance."""
    probs = jax.nn.softmax((x @ w['router']).astype('float32'))
    weights, chosen = jax.lax.top_k(probs, s.chosen)
    used = jnp.mean(jax.nn.one_hot(chosen[..., 0], s.experts), (0, 1))
    return weights / jnp.sum(weights, -1, keepdims=True), chosen, s.experts * jnp.mean(probs, (0, 1)) @ used


def one_hot(x: jax.Array, w: Tree, s: Sizes) -> tuple[jax.Array, jax.Array]:
    """Treats rows as groups, (G, S, D). An expert processes C tokens of each group and drops the others."""
    weights, chosen, uneven = route(x, w, s)
    length = x.shape[1]
    capacity = max(4, length * s.chosen * 5 // (4 * s.experts))
    mask = jax.nn.one_hot(chosen, s.experts, dtype='int32')
    # First choices come before second choices.
    flat = mask.swapaxes(1, 2).reshape(-1, s.chosen * length, s.experts)
    position = (jnp.cumsum(flat, 1) - 1).reshape(-1, s.chosen, length, s.experts).swapaxes(1, 2)
    position = jnp.sum(position * mask, -1)
    slots = jax.nn.one_hot(position, capacity, dtype=x.dtype)
    dispatch = jnp.einsum('gske,gskc->gsec', mask.astype(x.dtype), slots)
    combine = jnp.einsum('gsk,gske,gskc->gsec', weights.astype(x.dtype), mask.astype(x.dtype), slots)
    dispatch, combine = (with_sharding_annotation(y, 'routing') for y in (dispatch, combine))
    dispatched = with_sharding_annotation(jnp.einsum('gsec,gsd->egcd', dispatch, x), 'taken')
    dispatched = with_sharding_annotation(with_sharding_annotation(dispatched, 'arrived'), 'whole')
    gate = jnp.einsum('egcd,edh->egch', dispatched, w['gate'])
    hidden = jax.nn.silu(gate) * jnp.einsum('egcd,edh->egch', dispatched, w['up'])
    hidden = with_sharding_annotation(hidden, 'hidden')
    out = with_sharding_annotation(jnp.einsum('egch,ehd->egcd', hidden, w['down']), 'out')
    out = with_sharding_annotation(out, 'returned')
    return jnp.einsum('gsec,egcd->gsd', combine, out), uneven


def sorted_tokens(x: jax.Array, w: Tree, chosen: jax.Array, weights: jax.Array) -> jax.Array:
    """Processes tokens (B, S, D) sorted by their experts (B, S, K), without dropping any."""
    experts, count = w['gate'].shape[0], chosen.shape[-1]
    tokens = x.reshape(-1, x.shape[-1])
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=experts)
    routed = tokens[order // count]
    hidden = jax.nn.silu(jax.lax.ragged_dot(routed, w['gate'], sizes)) * jax.lax.ragged_dot(
        routed, w['up'], sizes
    )
    out = jax.lax.ragged_dot(hidden, w['down'], sizes)
    out = out[jnp.argsort(order)].reshape(*chosen.shape, -1)
    return jnp.einsum('bskd,bsk->bsd', out, weights.astype(x.dtype))


def dropless(x: jax.Array, w: Tree, s: Sizes) -> tuple[jax.Array, jax.Array]:
    weights, chosen, uneven = route(x, w, s)
    return sorted_tokens(x, w, chosen, weights), uneven


def dropless_by_row(x: jax.Array, w: Tree, s: Sizes) -> tuple[jax.Array, jax.Array]:
    """Sorts the tokens of each row separately, row after row."""
    weights, chosen, uneven = route(x, w, s)

    def of_row(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        x, chosen, weights = (array[None] for array in row)
        return sorted_tokens(x, w, chosen, weights)[0]

    return jax.lax.map(of_row, (x, chosen, weights)), uneven


def dense(x: jax.Array, w: Tree, s: Sizes) -> tuple[jax.Array, jax.Array]:
    """Runs every expert on all tokens; tokens that did not choose the expert get a weight of zero."""
    weights, chosen, uneven = route(x, w, s)
    total = jnp.zeros_like(x)
    for expert in range(s.experts):
        hidden = jax.nn.silu(x @ w['gate'][expert]) * (x @ w['up'][expert])
        out = with_sharding_annotation(hidden, 'all_hidden') @ w['down'][expert]
        expert_weight = jnp.sum(jnp.where(chosen == expert, weights, 0), -1, keepdims=True)
        total += expert_weight.astype(x.dtype) * out
    return total, uneven


def dropless_by_hand(x: jax.Array, w: Tree, s: Sizes, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """Sorts tokens on each device; tp shards the hidden dimension."""
    weights, chosen, uneven = route(x, w, s)
    mesh = jax.sharding.get_abstract_mesh()
    tp = 'tp' if 'tp' in mesh.axis_names else None
    matrices = {name: w[name] for name in ('gate', 'up', 'down')}
    # The specs of the weights: a gather inside becomes a reduce-scatter of the gradient.
    if tp:
        specs = {'gate': P(None, 'fsdp', tp), 'up': P(None, 'fsdp', tp), 'down': P(None, tp, 'fsdp')}
    else:
        specs = {'gate': P(None, None, 'fsdp'), 'up': P(None, None, 'fsdp'), 'down': P(None, 'fsdp')}

    def here(x: jax.Array, w: Tree, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        def gathered(name: str, y: jax.Array) -> jax.Array:
            return jax.lax.all_gather(y, 'fsdp', axis=list(specs[name]).index('fsdp'), tiled=True)

        out = sorted_tokens(x, {name: gathered(name, y) for name, y in w.items()}, chosen, weights)
        return jax.lax.psum(out, tp) if tp else out

    rows = P(axes)
    fun = jax.shard_map(here, in_specs=(rows, specs, rows, rows), out_specs=rows)
    return fun(x, matrices, chosen, weights), uneven


Layer = Callable[[jax.Array, Tree, Sizes], tuple[jax.Array, jax.Array]]


def loss(params: Tree, batch: Tree, key: jax.Array, s: Sizes, mlp: Layer) -> jax.Array:
    tokens = batch['tokens']

    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, jax.Array]:
        x = with_sharding_annotation(x + attention(norm(x, w['attention_norm']), w, s), 'residual')
        y, uneven = mlp(norm(x, w['mlp_norm']), w, s)
        return with_sharding_annotation(x + y, 'residual'), uneven

    x = with_sharding_annotation(params['embed'][tokens[:, :-1]], 'residual')
    x, uneven = jax.lax.scan(jax.checkpoint(layer), x, params['layers'])
    logits = norm(x, params['final_norm']) @ params['unembed']
    logits = with_sharding_annotation(logits, 'logits').astype('float32')
    log_probs = jax.nn.log_softmax(logits)
    return 0.01 * jnp.mean(uneven) - jnp.mean(jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1))


def with_experts(
    name: str, s: Sizes, mlp: Layer, hand: dict[str, P], columns_and_rows: TreePathShardingRule, **more: Any
) -> Model:
    return Model(
        name,
        init=lambda key: init(key, s),
        batch=lambda rows: {'tokens': jax.ShapeDtypeStruct((rows, s.sequence + 1), 'int32')},
        loss=lambda params, batch, key: loss(params, batch, key, s, mlp),
        columns_and_rows=columns_and_rows,
        hand=hand,
        **more,
    )


def models(size: Size) -> list[Model]:
    """Returns models that dispatch tokens to experts in several ways."""

    def dropless_loss(params: Tree, batch: Tree, key: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        return loss(params, batch, key, FEW[size], functools.partial(dropless_by_hand, axes=axes))

    few, many = FEW[size], MANY[size]
    return [
        with_experts('experts, one-hot dispatch', few, one_hot, HAND, EXPERTS_AND_ROWS),
        with_experts(
            'experts, sorted tokens', few, dropless, DENSE, COLUMNS_AND_ROWS, hand_loss=dropless_loss
        ),
        with_experts(
            'experts, sorted by row', few, dropless_by_row, DENSE, COLUMNS_AND_ROWS, hand_loss=dropless_loss
        ),
        with_experts('experts, all tokens', few, dense, DENSE | ALL_TOKENS, COLUMNS_AND_ROWS),
        with_experts(
            'experts, over the batch axis',
            many,
            one_hot,
            SPREAD,
            OVER_EXPERTS['tp'],
            fsdp_rule=OVER_EXPERTS[''],
        ),
    ]
