"""flax nnx: modules that a step updates in place.

`training.py` has pure steps, so modules are split here, and merged in each step. In a program that keeps its
modules, `scalax.interop.nnx.sjit` compiles `update_modules` without changes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples.frameworks import sizes
from examples.frameworks.model import OPTIMIZER, Program, mean_loss
from scalax.sharding import PartitionSpec as P
from scalax.sharding import TreePathShardingRule


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(sizes.HEADS, sizes.WIDTH, decode=False, rngs=rngs)
        self.attention_norm = nnx.LayerNorm(sizes.WIDTH, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(sizes.WIDTH, rngs=rngs)
        self.up = nnx.Linear(sizes.WIDTH, sizes.HIDDEN, rngs=rngs)
        self.down = nnx.Linear(sizes.HIDDEN, sizes.WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(sizes.VOCABULARY, sizes.WIDTH, rngs=rngs)
        self.positions = nnx.Embed(sizes.SEQUENCE, sizes.WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(sizes.LAYERS)])
        self.norm = nnx.LayerNorm(sizes.WIDTH, rngs=rngs)
        self.unembed = nnx.Linear(sizes.WIDTH, sizes.VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, nnx.make_causal_mask(tokens))
        return self.unembed(self.norm(x))


def make_modules(key: jax.Array) -> tuple[Transformer, nnx.Optimizer]:
    model = Transformer(nnx.Rngs(key))
    return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)


def update_modules(model: Transformer, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    def loss(model: Transformer) -> jax.Array:
        return mean_loss(model(tokens[:, :-1]), tokens)

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def init(key: jax.Array) -> Any:
    return nnx.split(make_modules(key))


def train_step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    model, optimizer = nnx.merge(*state)
    loss = update_modules(model, optimizer, tokens)
    return nnx.split((model, optimizer)), loss


def logits(state: Any, tokens: jax.Array) -> jax.Array:
    model, _ = nnx.merge(*state)
    return model(tokens)


PROGRAM = Program(
    init,
    train_step,
    logits,
    rule=TreePathShardingRule(
        ('(query|key|value)/kernel', P('fsdp', 'tp')),
        ('out/kernel', P('tp', None, 'fsdp')),
        ('(up|unembed)/kernel', P('fsdp', 'tp')),
        ('down/kernel', P('tp', 'fsdp')),
        ('embed/embedding', P('fsdp', 'tp')),
        ('.*', P()),
    ),
)
