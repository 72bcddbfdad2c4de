"""Training setups around a decoder: distillation, low-rank adapters, gradients of several microbatches."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.unchanged import decoders
from benchmarks.unchanged.decoders import attention, norm
from benchmarks.unchanged.model import Model, Size, Tree
from scalax.sharding import PartitionSpec as P
from scalax.sharding import TreePathShardingRule, with_sharding_annotation

SIZES = {
    'small': decoders.Sizes(32, 2, 4, 4, 64, 64, 8),
    'large': decoders.Sizes(2048, 16, 16, 16, 8192, 32_768, 2048),
}
STUDENTS = {
    'small': decoders.Sizes(16, 2, 4, 4, 32, 64, 8),
    'large': decoders.Sizes(1024, 12, 16, 16, 4096, 32_768, 2048),
}
DTYPES = {'small': 'float32', 'large': 'bfloat16'}
HAND = decoders.HAND
MICROBATCHES = 4
RANK = {'small': 4, 'large': 16}


def init(key: jax.Array, s: decoders.Sizes, dtype: str) -> Tree:
    """Draws a decoder's weights."""
    return jax.tree.map(lambda x: x.astype(dtype), decoders.init(key, s))


def logits_of(params: Tree, tokens: jax.Array, s: decoders.Sizes) -> jax.Array:
    """Maps (B, S) to (B, S, V)."""

    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        x = with_sharding_annotation(x + attention(norm(x, w['attention_norm']), w, s), 'residual')
        y = norm(x, w['mlp_norm'])
        hidden = with_sharding_annotation(jax.nn.silu(y @ w['gate']) * (y @ w['up']), 'hidden')
        return with_sharding_annotation(x + hidden @ w['down'], 'residual'), None

    x = with_sharding_annotation(params['embed'][tokens], 'residual')
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params['layers'])
    return with_sharding_annotation(norm(x, params['final_norm']) @ params['unembed'], 'logits')


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean over all labels."""
    log_probs = jax.nn.log_softmax(logits.astype('float32'))
    return -jnp.mean(jnp.take_along_axis(log_probs, labels[..., None], -1))


def distillation(size: Size) -> Model:
    """Returns the loss of a student; the teacher is among the parameters, but is not trained."""
    teacher, student, dtype = SIZES[size], STUDENTS[size], DTYPES[size]

    def init_both(key: jax.Array) -> Tree:
        teacher_key, student_key = jax.random.split(key)
        return {'teacher': init(teacher_key, teacher, dtype), 'student': init(student_key, student, dtype)}

    def loss(params: Tree, batch: Tree, key: jax.Array) -> jax.Array:
        tokens, temperature = batch['tokens'], 2.0
        teacher_logits = logits_of(jax.lax.stop_gradient(params['teacher']), tokens[:, :-1], teacher)
        student_logits = logits_of(params['student'], tokens[:, :-1], student)
        teacher_logits = jax.nn.softmax(teacher_logits.astype('float32') / temperature)
        log_probs = jax.nn.log_softmax(student_logits.astype('float32') / temperature)
        soft = -jnp.mean(jnp.sum(teacher_logits * log_probs, -1)) * temperature**2
        return 0.5 * soft + 0.5 * cross_entropy(student_logits, tokens[:, 1:])

    return Model(
        'distillation', init_both, tokens_of(teacher), loss, columns_and_rows=decoders.RULE, hand=HAND
    )


def lora(size: Size) -> Model:
    """Returns the loss with adapters of the four attention projections; everything else is frozen."""
    s, dtype, rank = SIZES[size], DTYPES[size], RANK[size]
    names = ('query', 'key', 'value', 'output')

    def init_both(key: jax.Array) -> Tree:
        base_key, adapter_key = jax.random.split(key)
        first = jax.random.normal(adapter_key, (4, s.layers, s.width, rank), dtype) / math.sqrt(s.width)
        adapters = {
            name: {'a': a, 'b': jnp.zeros((s.layers, rank, s.width), dtype)}
            for name, a in zip(names, first, strict=True)
        }
        return {'base': init(base_key, s, dtype), 'adapters': adapters}

    def loss(params: Tree, batch: Tree, key: jax.Array) -> jax.Array:
        tokens, base = batch['tokens'], jax.lax.stop_gradient(params['base'])

        def project(x: jax.Array, w: Tree, a: Tree, name: str) -> jax.Array:
            return x @ w[name] + 2 * ((x @ a[name]['a']) @ a[name]['b'])

        def layer(x: jax.Array, scanned: Any) -> tuple[jax.Array, None]:
            w, a = scanned
            y = norm(x, w['attention_norm'])

            def heads(name: str) -> jax.Array:
                split = project(y, w, a, name).reshape(*y.shape[:2], s.heads, -1)
                return with_sharding_annotation(split, 'heads')

            q, k, v = heads('query'), heads('key'), heads('value')
            scores = jnp.einsum('bqhd,bkhd->bhqk', q, k) / math.sqrt(q.shape[-1])
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
            mixed = jnp.einsum('bhqk,bkhd->bqhd', jax.nn.softmax(scores), v)
            mixed = with_sharding_annotation(mixed, 'heads').reshape(x.shape)
            x = with_sharding_annotation(x + project(mixed, w, a, 'output'), 'residual')
            y = norm(x, w['mlp_norm'])
            hidden = with_sharding_annotation(jax.nn.silu(y @ w['gate']) * (y @ w['up']), 'hidden')
            return with_sharding_annotation(x + hidden @ w['down'], 'residual'), None

        x = with_sharding_annotation(base['embed'][tokens[:, :-1]], 'residual')
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, (base['layers'], params['adapters']))
        logits = with_sharding_annotation(norm(x, base['final_norm']) @ base['unembed'], 'logits')
        return cross_entropy(logits, tokens[:, 1:])

    # For a row-parallel matrix, the adapter's input is sharded too; both of its matrices are small.
    rule = TreePathShardingRule(
        ('adapters/output/a', P(None, 'tp', None)),
        ('adapters/output/b', P(None, None, 'fsdp')),
        ('adapters/.*/a', P(None, 'fsdp', None)),
        ('adapters/.*/b', P(None, None, 'tp')),
        *decoders.RULE.rules,
    )
    return Model('low-rank adapters', init_both, tokens_of(s), loss, columns_and_rows=rule, hand=HAND)


def microbatches(size: Size) -> Model:
    """Returns the mean loss over microbatches, one after another."""
    s, dtype = SIZES[size], DTYPES[size]

    def loss(params: Tree, batch: Tree, key: jax.Array) -> jax.Array:
        parts = jax.tree.map(lambda x: x.reshape(MICROBATCHES, -1, *x.shape[1:]), batch)
        parts = with_sharding_annotation(parts, 'parts')

        @jax.checkpoint
        def add(total: jax.Array, part: Tree) -> tuple[jax.Array, None]:
            tokens = part['tokens']
            return total + cross_entropy(logits_of(params, tokens[:, :-1], s), tokens[:, 1:]), None

        total, _ = jax.lax.scan(add, jnp.zeros(()), parts)
        return total / MICROBATCHES

    return Model(
        'microbatches',
        lambda key: init(key, s, dtype),
        tokens_of(s),
        loss,
        columns_and_rows=decoders.RULE,
        hand=HAND | {'parts': P(None, 'batch')},
        rows=MICROBATCHES,
    )


def tokens_of(s: decoders.Sizes) -> Any:
    """Returns a function that maps a number of rows to a batch of tokens."""
    return lambda rows: {'tokens': jax.ShapeDtypeStruct((rows, s.sequence + 1), 'int32')}


def models(size: Size) -> list[Model]:
    """Returns one model per setup."""
    return [distillation(size), lora(size), microbatches(size)]
