"""A selective state-space model: an associative scan over time in each layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.unchanged.blocks import Draw, cross_entropy, rms_norm
from benchmarks.unchanged.model import Model, Size, Tree
from scalax.sharding import PartitionSpec as P
from scalax.sharding import TreePathShardingRule, with_sharding_annotation


@dataclasses.dataclass(frozen=True)
class Sizes:
    width: int
    layers: int
    inner: int
    states: int
    vocabulary: int
    sequence: int
    dtype: str


SIZES = {
    'small': Sizes(16, 2, 32, 4, 32, 8, 'float32'),
    'large': Sizes(1024, 48, 2048, 16, 32_768, 1024, 'bfloat16'),
}
RULE = TreePathShardingRule(
    ('unembed', P('fsdp', 'tp')),
    ('embed', P('tp', 'fsdp')),
    ('inward|gate', P(None, 'fsdp', 'tp')),
    ('outward', P(None, 'tp', 'fsdp')),
    ('select', P(None, ('tp', 'fsdp'), None)),
    ('step', P(None, None, ('tp', 'fsdp'))),
    ('decay', P(None, 'tp', None)),
    ('window', P(None, None, 'tp')),
    ('skip', P(None, 'tp')),
    ('norm', P()),
)
HAND = {
    'residual': P('batch', None, None),
    'inner': P('batch', None, 'tp'),
    'states': P('batch', None, 'tp', None),
    'logits': P('batch', None, 'tp'),
}


def init(key: jax.Array, s: Sizes) -> Tree:
    draw, rank, n = Draw(key, s.dtype), s.width // 16, s.layers
    decay = jnp.log(jnp.broadcast_to(jnp.arange(1.0, s.states + 1), (n, s.inner, s.states)))
    return {
        'embed': draw.normal(s.vocabulary, s.width),
        'layers': {
            'norm': jnp.ones((n, s.width), s.dtype),
            'inward': draw.normal(n, s.width, s.inner),
            'gate': draw.normal(n, s.width, s.inner),
            'window': draw.normal(n, 4, s.inner),
            'select': draw.normal(n, s.inner, rank + 2 * s.states),
            'step': draw.normal(n, rank, s.inner),
            'decay': decay.astype(s.dtype),
            'skip': jnp.ones((n, s.inner), s.dtype),
            'outward': draw.normal(n, s.inner, s.width),
        },
        'norm': jnp.ones(s.width, s.dtype),
        'unembed': draw.normal(s.width, s.vocabulary),
    }


def windowed(x: jax.Array, window: jax.Array) -> jax.Array:
    """Computes a causal depthwise convolution: (B, S, E)."""
    padded = jnp.pad(x, ((0, 0), (len(window) - 1, 0), (0, 0)))
    return sum((padded[:, i : i + x.shape[1]] * window[i] for i in range(len(window))), jnp.zeros_like(x))


def combined(first: Any, second: Any) -> Any:
    """Combines two steps of h = a h + b."""
    return first[0] * second[0], first[1] * second[0] + second[1]


def mixer(x: jax.Array, w: Tree, s: Sizes) -> jax.Array:
    """Maps (B, S, D) to (B, S, D)."""
    gate = with_sharding_annotation(x @ w['gate'], 'inner')
    x = with_sharding_annotation(jax.nn.silu(windowed(x @ w['inward'], w['window'])), 'inner')
    selected = with_sharding_annotation(x @ w['select'], 'residual')
    rank = s.width // 16
    low, inputs, outputs = jnp.split(selected, [rank, rank + s.states], -1)
    step = with_sharding_annotation(jax.nn.softplus(low @ w['step']), 'inner')
    decays = jnp.exp(-step[..., None] * jnp.exp(w['decay']))
    added = with_sharding_annotation((step * x)[..., None] * inputs[:, :, None, :], 'states')
    decays = with_sharding_annotation(decays, 'states')
    _, states = jax.lax.associative_scan(combined, (decays, added), axis=1)
    states = with_sharding_annotation(states, 'states')
    y = with_sharding_annotation(jnp.einsum('bsen,bsn->bse', states, outputs), 'inner') + x * w['skip']
    return (y * jax.nn.silu(gate)) @ w['outward']


def loss(params: Tree, batch: Tree, s: Sizes) -> jax.Array:
    tokens = batch['tokens']

    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        return with_sharding_annotation(x + mixer(rms_norm(x, w['norm']), w, s), 'residual'), None

    x = with_sharding_annotation(params['embed'][tokens[:, :-1]], 'residual')
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params['layers'])
    logits = with_sharding_annotation(rms_norm(x, params['norm']) @ params['unembed'], 'logits')
    return jnp.mean(cross_entropy(logits, tokens[:, 1:]))


def models(size: Size) -> list[Model]:
    """Returns a state-space model."""
    s = SIZES[size]

    def batch(rows: int) -> dict[str, Any]:
        return {'tokens': jax.ShapeDtypeStruct((rows, s.sequence + 1), 'int32')}

    return [
        Model(
            'state-space model',
            init=lambda key: init(key, s),
            batch=batch,
            loss=lambda params, batch, key: loss(params, batch, s),
            columns_and_rows=RULE,
            hand=HAND,
        )
    ]
