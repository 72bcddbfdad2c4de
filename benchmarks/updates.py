"""Models whose optimizer update moves more memory than the rest of the step (``--only auto_sharding``)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.unchanged import decoders
from benchmarks.unchanged.blocks import Draw
from benchmarks.unchanged.model import Model, Tree
from scalax.sharding import PartitionSpec as P
from scalax.sharding import TreePathShardingRule, with_sharding_annotation

TABLES = 4_194_304, 2_097_152, 1_048_576, 65_536, 16_384, 4096, 1024
WIDTH, NUMBERS, DEEP = 128, 128, (4096, 4096, 2048, 1024, 1)
WIDE_RULE = TreePathShardingRule(
    ('tables', P('fsdp', 'tp')),
    ('bias|deep/4', P()),
    ('wide', P(('fsdp', 'tp'))),
    ('deep/[02]', P('fsdp', 'tp')),
    ('deep/[13]', P('tp', 'fsdp')),
)
WIDE_HAND = {
    'indices': P(None),
    'found': P(None, 'tp'),
    'vector': P('batch', None),
    'columns': P('batch', 'tp'),
}
# 2.6 billion parameters, similar to Gemma 2 2B.
GEMMA = decoders.Sizes(2304, 26, 8, 4, 9216, 256_000, 2048)


def wide_and_deep() -> Model:
    """Returns a linear model of looked-up features, beside embeddings and an MLP, all in float32."""

    def init(key: jax.Array) -> Tree:
        draw = Draw(key, 'float32')
        sizes = zip((NUMBERS + WIDTH * len(TABLES), *DEEP), DEEP, strict=False)
        return {
            'wide': [jnp.zeros(rows) for rows in TABLES],
            'tables': [draw.normal(rows, WIDTH) for rows in TABLES],
            'deep': [{'kernel': draw.normal(*size), 'bias': jnp.zeros(size[1])} for size in sizes],
        }

    def batch(rows: int) -> dict[str, Any]:
        return {
            'numbers': jax.ShapeDtypeStruct((rows, NUMBERS), 'float32'),
            'indices': jax.ShapeDtypeStruct((rows, len(TABLES)), 'int32'),
            'clicked': jax.ShapeDtypeStruct((rows,), 'float32'),
        }

    def loss(params: Tree, batch: Tree, key: jax.Array) -> jax.Array:
        vectors, wide = [batch['numbers']], jnp.zeros(len(batch['clicked']))
        for number, (weights, table) in enumerate(zip(params['wide'], params['tables'], strict=True)):
            indices = with_sharding_annotation(batch['indices'][:, number], 'indices')
            vectors.append(with_sharding_annotation(table[indices], 'found'))
            wide += weights[indices]
        x = with_sharding_annotation(jnp.concatenate(vectors, -1), 'vector')
        for number, w in enumerate(params['deep']):
            x = x @ w['kernel'] + w['bias']
            if number < len(DEEP) - 1:
                x = with_sharding_annotation(jax.nn.relu(x), 'vector' if number % 2 else 'columns')
        logits = wide + x[:, 0]
        return jnp.mean(jax.nn.softplus(logits) - batch['clicked'] * logits)

    return Model('wide and deep', init, batch, loss, WIDE_RULE, WIDE_HAND, rows=1024)


def gemma() -> Model:
    """Returns a decoder with one large embedding for tokens and logits, in float32 with bfloat16 matmuls."""

    def init(key: jax.Array) -> Tree:
        params = decoders.init(key, GEMMA)
        del params['unembed']
        return jax.tree.map(lambda leaf: leaf.astype('float32'), params)

    def batch(rows: int) -> dict[str, Any]:
        return {'tokens': jax.ShapeDtypeStruct((rows, GEMMA.sequence + 1), 'int32')}

    def loss(params: Tree, batch: Tree, key: jax.Array) -> jax.Array:
        params = jax.tree.map(lambda leaf: leaf.astype('bfloat16'), params)
        return decoders.loss({**params, 'unembed': params['embed'].T}, batch, key, GEMMA, remat=True)

    return Model('Gemma-like 2.6B, float32', init, batch, loss, decoders.RULE, decoders.HAND)


def models() -> list[Model]:
    """Returns both models."""
    return [wide_and_deep(), gemma()]
