"""Decoders whose attention never materializes all scores: a scan over blocks of keys, and a Pallas kernel."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from benchmarks.unchanged import decoders
from benchmarks.unchanged.decoders import norm
from benchmarks.unchanged.model import Model, Size, Tree
from scalax.sharding import PartitionSpec as P
from scalax.sharding import with_sharding_annotation


@dataclasses.dataclass(frozen=True)
class Sizes(decoders.Sizes):
    block: int
    dtype: str


SIZES = {
    'small': Sizes(32, 2, 4, 4, 64, 64, 16, block=4, dtype='float32'),
    'large': Sizes(2048, 16, 16, 16, 8192, 32_768, 4096, block=512, dtype='bfloat16'),
}
HAND = decoders.HAND | {'statistics': P('batch', None, 'tp'), 'blocks': P(None, 'batch', None, 'tp', None)}
Attention = Callable[[jax.Array, jax.Array, jax.Array, int], jax.Array]
# The output, and the log of the sum of a token's unnormalized weights.
Forward = tuple[jax.Array, jax.Array]


def in_blocks(x: jax.Array, block: int) -> jax.Array:
    """Maps (B, S, H, D) to (S / block, B, block, H, D)."""
    x = jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)
    return with_sharding_annotation(x, 'blocks')


def scores_of(q: jax.Array, k: jax.Array, first: jax.Array) -> jax.Array:
    """Returns scores (B, Q, H, K) of a block of keys that starts at this position."""
    scores = jnp.einsum('bqhd,bkhd->bqhk', q, k, preferred_element_type='float32') / math.sqrt(q.shape[-1])
    seen = jnp.arange(q.shape[1])[:, None] >= first + jnp.arange(k.shape[1])
    return jnp.where(seen[:, None], scores, -1e9)


def scanned_forward(q: jax.Array, k: jax.Array, v: jax.Array, block: int) -> Forward:
    """Accumulates sums over blocks, scaled by the largest score so far."""

    def add(carry: Tree, part: Tree) -> tuple[Tree, None]:
        out, largest, total = carry
        first, k, v = part
        scores = scores_of(q, k, first)
        higher = jnp.maximum(largest, jnp.max(scores, -1))
        weights = jnp.exp(scores - higher[..., None])
        scale = jnp.exp(largest - higher)
        total = with_sharding_annotation(total * scale + jnp.sum(weights, -1), 'statistics')
        more = jnp.einsum('bqhk,bkhd->bqhd', weights.astype(v.dtype), v, preferred_element_type='float32')
        out = with_sharding_annotation(out * scale[..., None] + more, 'heads')
        return (out, with_sharding_annotation(higher, 'statistics'), total), None

    zeros = jnp.zeros(q.shape, 'float32')
    start = zeros, jnp.full(q.shape[:3], -1e30), zeros[..., 0]
    firsts = jnp.arange(0, k.shape[1], block)
    (out, largest, total), _ = jax.lax.scan(add, start, (firsts, in_blocks(k, block), in_blocks(v, block)))
    return (out / total[..., None]).astype(q.dtype), largest + jnp.log(total)


def kernel(q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any, sums_ref: Any, *, block: int) -> None:
    """Runs one head: a block of queries, and all keys up to them."""
    at = pl.program_id(1)
    size = q_ref.shape[-1]
    q = q_ref[0]
    rows = at * block + jax.lax.broadcasted_iota('int32', (block, block), 0)

    def add(i: jax.Array, carry: Tree) -> Tree:
        out, largest, total = carry
        keys, values = k_ref[0, pl.ds(i * block, block), :], v_ref[0, pl.ds(i * block, block), :]
        scores = jax.lax.dot_general(q, keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        columns = i * block + jax.lax.broadcasted_iota('int32', (block, block), 1)
        scores = jnp.where(rows >= columns, scores / math.sqrt(size), -1e9)
        higher = jnp.maximum(largest, jnp.max(scores, 1, keepdims=True))
        weights, scale = jnp.exp(scores - higher), jnp.exp(largest - higher)
        more = jnp.dot(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        return out * scale + more, higher, total * scale + jnp.sum(weights, 1, keepdims=True)

    start = jnp.zeros((block, size)), jnp.full((block, 1), -1e30), jnp.zeros((block, 1))
    out, largest, total = jax.lax.fori_loop(0, at + 1, add, start)
    out_ref[0] = (out / total).astype(out_ref.dtype)
    sums_ref[0] = largest + jnp.log(total)


def kernel_forward(q: jax.Array, k: jax.Array, v: jax.Array, block: int) -> Forward:
    """Uses heads as rows of the kernel's grid: (B, S, H, D) -> (B * H, S, D)."""
    batch, length, heads, size = q.shape
    q, k, v = (x.swapaxes(1, 2).reshape(batch * heads, length, size) for x in (q, k, v))
    part = pl.BlockSpec((1, block, size), lambda head, i: (head, i, 0))
    full_sequence = pl.BlockSpec((1, length, size), lambda head, i: (head, 0, 0))
    # Small blocks serve tests without a TPU.
    out, sums = pl.pallas_call(
        functools.partial(kernel, block=block),
        grid=(batch * heads, length // block),
        in_specs=[part, full_sequence, full_sequence],
        out_specs=[part, pl.BlockSpec((1, block, 1), lambda head, i: (head, i, 0))],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch * heads, length, 1), 'float32'),
        ],
        interpret=block < 128,
    )(q, k, v)
    out, sums = (x.reshape(batch, heads, length, -1).swapaxes(1, 2) for x in (out, sums))
    return out, sums[..., 0]


def backward(block: int, saved: Tree, d_out: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Recomputes the weights block by block."""
    q, k, v, out, sums = saved
    inner = jnp.sum(out.astype('float32') * d_out, -1)

    def add(dq: jax.Array, part: Tree) -> tuple[jax.Array, Tree]:
        first, k, v = part
        weights = jnp.exp(scores_of(q, k, first) - sums[..., None])
        dv = jnp.einsum('bqhk,bqhd->bkhd', weights.astype(v.dtype), d_out)
        d_weights = jnp.einsum('bqhd,bkhd->bqhk', d_out, v, preferred_element_type='float32')
        d_scores = (weights * (d_weights - inner[..., None]) / math.sqrt(q.shape[-1])).astype(q.dtype)
        dk = jnp.einsum('bqhk,bqhd->bkhd', d_scores, q)
        more = jnp.einsum('bqhk,bkhd->bqhd', d_scores, k, preferred_element_type='float32')
        return with_sharding_annotation(dq + more, 'heads'), (dk, dv)

    firsts = jnp.arange(0, k.shape[1], block)
    parts = firsts, in_blocks(k, block), in_blocks(v, block)
    dq, (dk, dv) = jax.lax.scan(add, jnp.zeros(q.shape, 'float32'), parts)
    dk, dv = (jnp.moveaxis(with_sharding_annotation(x, 'blocks'), 0, 1).reshape(k.shape) for x in (dk, dv))
    return dq.astype(q.dtype), dk, dv


def with_backward(forward: Callable[[jax.Array, jax.Array, jax.Array, int], Forward]) -> Attention:
    """Returns attention with a custom backward pass."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, block: int) -> jax.Array:
        return forward(q, k, v, block)[0]

    def save(q: jax.Array, k: jax.Array, v: jax.Array, block: int) -> tuple[jax.Array, Tree]:
        out, sums = forward(q, k, v, block)
        return out, (q, k, v, out, sums)

    attend.defvjp(save, backward)
    return attend


by_scan = with_backward(scanned_forward)
by_kernel = with_backward(kernel_forward)


def kernel_by_hand(axes: tuple[str, ...]) -> Attention:
    """Runs the kernel in a shard_map: each device has its rows and its heads."""

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, block: int) -> Forward:
        tp = 'tp' if 'tp' in jax.sharding.get_abstract_mesh().axis_names else None
        heads = P(axes, None, tp)
        run = functools.partial(kernel_forward, block=block)
        fun = jax.shard_map(run, in_specs=(heads,) * 3, out_specs=(heads, heads), check_vma=False)
        return fun(q, k, v)

    return with_backward(forward)


def loss(params: Tree, batch: Tree, key: jax.Array, s: Sizes, attend: Attention) -> jax.Array:
    tokens = batch['tokens']

    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        y = norm(x, w['attention_norm'])

        def split(matrix: jax.Array) -> jax.Array:
            return with_sharding_annotation((y @ matrix).reshape(*y.shape[:2], s.heads, -1), 'heads')

        mixed = attend(split(w['query']), split(w['key']), split(w['value']), s.block)
        mixed = with_sharding_annotation(mixed, 'heads').reshape(x.shape)
        x = with_sharding_annotation(x + mixed @ w['output'], 'residual')
        y = norm(x, w['mlp_norm'])
        hidden = with_sharding_annotation(jax.nn.silu(y @ w['gate']) * (y @ w['up']), 'hidden')
        return with_sharding_annotation(x + hidden @ w['down'], 'residual'), None

    x = with_sharding_annotation(params['embed'][tokens[:, :-1]], 'residual')
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params['layers'])
    logits = norm(x, params['final_norm']) @ params['unembed']
    log_probs = jax.nn.log_softmax(with_sharding_annotation(logits, 'logits').astype('float32'))
    return -jnp.mean(jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1))


def models(size: Size) -> list[Model]:
    """Returns the models. The kernel has no plain program on TPUs: JAX requires a shard_map around it."""
    s = SIZES[size]

    def kernel_loss(params: Tree, batch: Tree, key: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        return loss(params, batch, key, s, kernel_by_hand(axes))

    def model(name: str, attend: Attention, **more: Any) -> Model:
        return Model(
            name,
            init=lambda key: jax.tree.map(lambda x: x.astype(s.dtype), decoders.init(key, s)),
            batch=lambda rows: {'tokens': jax.ShapeDtypeStruct((rows, s.sequence + 1), 'int32')},
            loss=lambda params, batch, key: loss(params, batch, key, s, attend),
            columns_and_rows=decoders.RULE,
            **more,
        )

    named = {name: spec for name, spec in HAND.items() if name != 'statistics'}
    return [
        model('flash attention, custom_vjp', by_scan, hand=HAND),
        model('flash attention, Pallas', by_kernel, hand=named, hand_loss=kernel_loss),
    ]
