"""A small GPT of flax.nnx modules."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.unchanged.model import Model, Size, Tree
from scalax.sharding import PartitionSpec as P
from scalax.sharding import TreePathShardingRule, with_sharding_annotation


@dataclasses.dataclass(frozen=True)
class Sizes:
    width: int
    layers: int
    heads: int
    hidden: int
    vocabulary: int
    sequence: int
    dtype: str


SIZES = {
    'small': Sizes(32, 2, 4, 64, 64, 8, 'float32'),
    'large': Sizes(2048, 6, 16, 8192, 32_768, 1024, 'bfloat16'),
}
RULE = TreePathShardingRule(
    ('(query|key|value)/kernel', P('fsdp', 'tp')),
    ('out/kernel', P('tp', None, 'fsdp')),
    ('up/kernel|unembed/kernel', P('fsdp', 'tp')),
    ('down/kernel', P('tp', 'fsdp')),
    ('tokens', P('tp', 'fsdp')),
    ('up/bias', P('tp')),
    ('(query|key|value)/bias', P('tp')),
    ('norm|bias|positions', P()),
)
HAND = {
    'residual': P('batch', None, None),
    'heads': P('batch', None, 'tp', None),
    'hidden': P('batch', None, 'tp'),
    'logits': P('batch', None, 'tp'),
}


def attend(query: jax.Array, key: jax.Array, value: jax.Array, **more: object) -> jax.Array:
    """Calls nnx's attention, with names for its heads: (B, S, H, D)."""
    query, key, value = (with_sharding_annotation(x, 'heads') for x in (query, key, value))
    out: jax.Array = nnx.dot_product_attention(query, key, value, **more)  # type: ignore[arg-type]
    return with_sharding_annotation(out, 'heads')


class Block(nnx.Module):
    """Maps (B, S, D) to (B, S, D)."""

    def __init__(self, s: Sizes, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(s.width, param_dtype=s.dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            s.heads, s.width, decode=False, attention_fn=attend, param_dtype=s.dtype, rngs=rngs
        )
        self.mlp_norm = nnx.LayerNorm(s.width, param_dtype=s.dtype, rngs=rngs)
        self.up = nnx.Linear(s.width, s.hidden, param_dtype=s.dtype, rngs=rngs)
        self.down = nnx.Linear(s.hidden, s.width, param_dtype=s.dtype, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = with_sharding_annotation(x + self.attention(self.attention_norm(x), mask=mask), 'residual')
        hidden = with_sharding_annotation(nnx.gelu(self.up(self.mlp_norm(x))), 'hidden')
        return with_sharding_annotation(x + self.down(hidden), 'residual')


class GPT(nnx.Module):
    """Maps tokens (B, S) to logits (B, S, V)."""

    def __init__(self, s: Sizes, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(s.vocabulary, s.width, param_dtype=s.dtype, rngs=rngs)
        self.positions = nnx.Embed(s.sequence, s.width, param_dtype=s.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(s, rngs) for _ in range(s.layers)])
        self.norm = nnx.LayerNorm(s.width, param_dtype=s.dtype, rngs=rngs)
        self.unembed = nnx.Linear(s.width, s.vocabulary, use_bias=False, param_dtype=s.dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(tokens)
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        x = with_sharding_annotation(x, 'residual')
        for block in self.blocks:
            x = block(x, mask)
        return with_sharding_annotation(self.unembed(self.norm(x)), 'logits')


def models(size: Size) -> list[Model]:
    """Splits a module into trained and fixed state, and merges it in the loss."""
    s = SIZES[size]
    abstract = nnx.eval_shape(lambda: GPT(s, nnx.Rngs(0)))
    graph, *states = nnx.split(abstract, nnx.Param, ...)
    rest: Tree = states[1]
    assert not jax.tree.leaves(rest), 'a model without dropout has no other state'

    def init(key: jax.Array) -> Tree:
        return nnx.split(GPT(s, nnx.Rngs(key)), nnx.Param, ...)[1]

    def loss(params: Tree, batch: Tree, key: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params, rest)
        log_probs = jax.nn.log_softmax(model(batch['tokens'][:, :-1]).astype('float32'))
        return -jnp.mean(jnp.take_along_axis(log_probs, batch['tokens'][:, 1:, None], -1))

    return [
        Model(
            'flax.nnx modules',
            init=init,
            batch=lambda rows: {'tokens': jax.ShapeDtypeStruct((rows, s.sequence + 1), 'int32')},
            loss=loss,
            columns_and_rows=RULE,
            hand=HAND,
        )
    ]
