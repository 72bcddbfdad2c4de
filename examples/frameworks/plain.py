"""Plain JAX: the parameters are a dict, and layers are stacked and scanned."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.frameworks import sizes
from examples.frameworks.model import OPTIMIZER, Program, mean_loss
from scalax.sharding import PartitionSpec as P
from scalax.sharding import TreePathShardingRule

Params = dict[str, Any]


def init_params(key: jax.Array) -> Params:
    keys = iter(jax.random.split(key, 7))

    def draw(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[-2] ** -0.5

    layers = {
        'query_key_value': draw(sizes.LAYERS, sizes.WIDTH, 3 * sizes.WIDTH),
        'out': draw(sizes.LAYERS, sizes.WIDTH, sizes.WIDTH),
        'up': draw(sizes.LAYERS, sizes.WIDTH, sizes.HIDDEN),
        'down': draw(sizes.LAYERS, sizes.HIDDEN, sizes.WIDTH),
        'norms': jnp.ones((sizes.LAYERS, 2, sizes.WIDTH)),
    }
    return {
        'embed': draw(sizes.VOCABULARY, sizes.WIDTH),
        'positions': draw(sizes.SEQUENCE, sizes.WIDTH),
        'layers': layers,
        'norm': jnp.ones(sizes.WIDTH),
        'unembed': draw(sizes.WIDTH, sizes.VOCABULARY),
    }


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def block(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
    batch, length, _ = x.shape
    heads = normed(x, layer['norms'][0]) @ layer['query_key_value']
    query, key, value = jnp.split(heads.reshape(batch, length, sizes.HEADS, -1), 3, -1)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + mixed.reshape(x.shape) @ layer['out']
    return x + jax.nn.gelu(normed(x, layer['norms'][1]) @ layer['up']) @ layer['down'], None


def forward(params: Params, tokens: jax.Array) -> jax.Array:
    x = params['embed'][tokens] + params['positions'][: tokens.shape[1]]
    x, _ = jax.lax.scan(block, x, params['layers'])
    return normed(x, params['norm']) @ params['unembed']


def init(key: jax.Array) -> Any:
    params = init_params(key)
    return {'params': params, 'optimizer': OPTIMIZER.init(params)}


def train_step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    def loss(params: Params) -> jax.Array:
        return mean_loss(forward(params, tokens[:, :-1]), tokens)

    value, grads = jax.value_and_grad(loss)(state['params'])
    updates, optimizer = OPTIMIZER.update(grads, state['optimizer'], state['params'])
    return {'params': optax.apply_updates(state['params'], updates), 'optimizer': optimizer}, value


PROGRAM = Program(
    init,
    train_step,
    logits=lambda state, tokens: forward(state['params'], tokens),
    rule=TreePathShardingRule(
        ('layers/(query_key_value|up)', P(None, 'fsdp', 'tp')),
        ('layers/(out|down)', P(None, 'tp', 'fsdp')),
        ('unembed', P('fsdp', 'tp')),
        ('embed', P('fsdp', 'tp')),
        ('.*', P()),
    ),
)
