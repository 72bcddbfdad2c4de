"""A recommender (DLRM): large embedding tables, dot products of all pairs of features, two MLPs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.unchanged.blocks import Draw
from benchmarks.unchanged.model import Model, Size, Tree
from scalax.sharding import PartitionSpec as P
from scalax.sharding import TreePathShardingRule, with_sharding_annotation


@dataclasses.dataclass(frozen=True)
class Sizes:
    tables: tuple[int, ...]
    width: int
    numbers: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]


SIZES = {
    'small': Sizes((64, 32, 8, 8), 16, 8, (32, 16), (32, 32, 16, 16, 1)),
    'large': Sizes(
        (4_194_304, 2_097_152, 1_048_576, 524_288, 131_072, 16_384, 4096, 256),
        128,
        16,
        (512, 256, 128),
        (4096, 4096, 2048, 1024, 1),
    ),
}
RULE = TreePathShardingRule(
    ('tables', P('fsdp', 'tp')),
    ('bias|bottom|top/4', P()),
    ('top/[02]', P(None, ('tp', 'fsdp'))),
    ('top/[13]', P('tp', 'fsdp')),
)
# Every device looks up all rows in its shard of a table; a reduce-scatter sends results to the rows' devices.
# In the backward pass, all rows go to every shard, so table gradients are not reduced over slices. In one
# slice the plain program does the same, with 3 % fewer bytes.
HAND = {
    'indices': P(None),
    'found': P(None, 'tp'),
    'vector': P('batch', None),
    'columns': P('batch', 'tp'),
    'pairs': P('batch', None, None),
}


def init(key: jax.Array, s: Sizes) -> Tree:
    draw, features = Draw(key, 'float32'), len(s.tables) + 1

    def layers(inputs: int, widths: tuple[int, ...]) -> list[Tree]:
        sizes = zip((inputs, *widths), widths, strict=False)
        return [{'kernel': draw.normal(*size), 'bias': jnp.zeros(size[1])} for size in sizes]

    return {
        'tables': [draw.normal(rows, s.width) for rows in s.tables],
        'bottom': layers(s.numbers, s.bottom),
        'top': layers(s.width + features * (features - 1) // 2, s.top),
    }


def bottom(x: jax.Array, layers: list[Tree]) -> jax.Array:
    """Maps (B, numbers) to (B, D)."""
    for w in layers:
        x = with_sharding_annotation(jax.nn.relu(x @ w['kernel'] + w['bias']), 'vector')
    return x


def top(x: jax.Array, layers: list[Tree]) -> jax.Array:
    """Maps (B, D) to (B, 1)."""
    for number, w in enumerate(layers):
        x = x @ w['kernel'] + w['bias']
        if number < len(layers) - 1:
            x = with_sharding_annotation(jax.nn.relu(x), 'vector' if number % 2 else 'columns')
    return x


def loss(params: Tree, batch: Tree) -> jax.Array:
    dense = bottom(batch['numbers'], params['bottom'])
    features = [dense]
    for number, table in enumerate(params['tables']):
        indices = with_sharding_annotation(batch['indices'][:, number], 'indices')
        features.append(with_sharding_annotation(table[indices], 'found'))
    x = with_sharding_annotation(jnp.stack(features, 1), 'pairs')
    pairs = with_sharding_annotation(jnp.einsum('bfd,bgd->bfg', x, x), 'pairs')
    left, right = jnp.tril_indices(len(features), -1)
    logits = top(jnp.concatenate([dense, pairs[:, left, right]], -1), params['top'])[:, 0]
    losses = jax.nn.softplus(logits) - batch['clicked'] * logits
    return jnp.mean(losses)


def models(size: Size) -> list[Model]:
    """Returns a recommender."""
    s = SIZES[size]

    def batch(rows: int) -> dict[str, Any]:
        return {
            'numbers': jax.ShapeDtypeStruct((rows, s.numbers), 'float32'),
            'indices': jax.ShapeDtypeStruct((rows, len(s.tables)), 'int32'),
            'clicked': jax.ShapeDtypeStruct((rows,), 'float32'),
        }

    return [
        Model(
            'recommender',
            init=lambda key: init(key, s),
            batch=batch,
            loss=lambda params, batch, key: loss(params, batch),
            columns_and_rows=RULE,
            hand=HAND,
            rows=128,
        )
    ]
