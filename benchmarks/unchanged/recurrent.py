"""A language model of LSTM layers, each a scan over time."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.unchanged.blocks import Draw, cross_entropy
from benchmarks.unchanged.model import Model, Size, Tree
from scalax.sharding import PartitionSpec as P
from scalax.sharding import TreePathShardingRule, with_sharding_annotation


@dataclasses.dataclass(frozen=True)
class Sizes:
    width: int
    layers: int
    vocabulary: int
    sequence: int
    dtype: str


SIZES = {'small': Sizes(16, 2, 32, 8, 'float32'), 'large': Sizes(4096, 2, 32_768, 256, 'bfloat16')}
RULE = TreePathShardingRule(
    ('unembed', P('fsdp', 'tp')),
    ('embed', P('tp', 'fsdp')),
    ('inward|again', P('fsdp', None, 'tp')),
    ('bias', P()),
)
# The weights of a cell are gathered once, before the loop over time, and kept until the backward loop ends.
# With FSDP this takes a quarter to a half more memory than the plain program, but a sixtieth of its bytes and
# a seventh of its time.
HAND = {
    'sequence': P('batch', None, None),
    'gates': P('batch', None, None, 'tp'),
    'gates of a step': P('batch', None, 'tp'),
    'state': P('batch', 'tp'),
    'output': P('batch', None),
    'gathered': P(None, None, 'tp'),
    'logits': P('batch', None, 'tp'),
}


def init(key: jax.Array, s: Sizes) -> Tree:
    draw = Draw(key, s.dtype)

    def gates() -> jax.Array:
        return draw.normal(s.width, 4 * s.width).reshape(s.width, 4, s.width)

    return {
        'embed': draw.normal(s.vocabulary, s.width),
        'cells': [
            {'inward': gates(), 'again': gates(), 'bias': jnp.zeros((4, s.width), s.dtype)}
            for _ in range(s.layers)
        ],
        'unembed': draw.normal(s.width, s.vocabulary),
    }


def lstm(x: jax.Array, w: Tree) -> jax.Array:
    """Maps (B, S, D) to (B, S, D), starting from a state of zeros."""
    again = with_sharding_annotation(w['again'], 'gathered')
    inward = with_sharding_annotation(w['inward'], 'gathered')
    inputs = with_sharding_annotation(jnp.einsum('bsd,dge->bsge', x, inward) + w['bias'], 'gates')

    def step(
        state: tuple[jax.Array, jax.Array], inputs: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        hidden, cell = state
        gates = inputs + jnp.einsum('bd,dge->bge', with_sharding_annotation(hidden, 'output'), again)
        gates = with_sharding_annotation(gates, 'gates of a step')
        inward, forget, outward = (jax.nn.sigmoid(gates[:, number]) for number in range(3))
        cell = with_sharding_annotation(forget * cell + inward * jnp.tanh(gates[:, 3]), 'state')
        hidden = with_sharding_annotation(outward * jnp.tanh(cell), 'state')
        return (hidden, cell), hidden

    zeros = with_sharding_annotation(jnp.zeros((x.shape[0], x.shape[2]), x.dtype), 'state')
    _, outputs = jax.lax.scan(step, (zeros, zeros), inputs.transpose(1, 0, 2, 3))
    return with_sharding_annotation(outputs.transpose(1, 0, 2), 'sequence')


def loss(params: Tree, batch: Tree) -> jax.Array:
    tokens = batch['tokens']
    x = with_sharding_annotation(params['embed'][tokens[:, :-1]], 'sequence')
    for w in params['cells']:
        x = lstm(x, w)
    logits = with_sharding_annotation(x @ params['unembed'], 'logits')
    return jnp.mean(cross_entropy(logits, tokens[:, 1:]))


def models(size: Size) -> list[Model]:
    """Returns a recurrent language model."""
    s = SIZES[size]

    def batch(rows: int) -> dict[str, Any]:
        return {'tokens': jax.ShapeDtypeStruct((rows, s.sequence + 1), 'int32')}

    return [
        Model(
            'recurrent cell',
            init=lambda key: init(key, s),
            batch=batch,
            loss=lambda params, batch, key: loss(params, batch),
            columns_and_rows=RULE,
            hand=HAND,
            rows=4,
        )
    ]
