"""A layer of experts on different devices: tokens travel to their experts and back.

    python -m examples.expert_parallel

Each token goes to the two experts that the router likes best for it. A device sorts its tokens by expert into
buffers of a fixed capacity, one all-to-all brings every buffer to the device of its expert, and another one
brings the results back. What an expert has no room for is left out. Nothing else is sent.

After "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding" (Lepikhin and others,
2020): tokens are routed in groups, here one for each device, and every group has its own capacity.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __spec__ is None:  # started as a file and not by -m: imports are from the root of the clone
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from examples.devices import choose_devices
from scalax.sharding import MeshShardingHelper, PartitionSpec, TreePathShardingRule

EXPERT = 'expert'
CHOICES = 2
CAPACITY_FACTOR = 1.25

Params = dict[str, jax.Array]
Layer = Callable[[Params, jax.Array], jax.Array]

PARAMS = TreePathShardingRule(('router', PartitionSpec()), ('up|down', PartitionSpec(EXPERT)))
TOKENS = PartitionSpec(('dp', EXPERT))


def init_params(key: jax.Array, experts: int, width: int, hidden: int) -> Params:
    """Returns a router [D, E] and the experts' matrices [E, D, F] and [E, F, D]."""
    router, up, down = jax.random.split(key, 3)
    return {
        'router': jax.random.normal(router, (width, experts)) / math.sqrt(width),
        'up': jax.random.normal(up, (experts, width, hidden)) / math.sqrt(width),
        'down': jax.random.normal(down, (experts, hidden, width)) / math.sqrt(hidden),
    }


def route(router: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns which place of which expert each token goes to, and how much the result counts.

    Args:
      router: [D, E].
      tokens: [T, D], one group.

    Returns:
      Two arrays [T, E, C]: ones and zeros, and the same with the router's weights in place of ones. C is the
      capacity: the places that an expert has for this group.
    """
    experts = router.shape[-1]
    capacity = math.ceil(CHOICES * len(tokens) / experts * CAPACITY_FACTOR)
    weights, chosen = jax.lax.top_k(jax.nn.softmax(tokens @ router), CHOICES)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    wanted = jax.nn.one_hot(chosen, experts)  # [T, K, E]
    # First choices before second ones, each in the order of the tokens; who comes too late is left out.
    in_order = jnp.swapaxes(wanted, 0, 1).reshape(-1, experts)
    place = (jnp.cumsum(in_order, axis=0) - in_order).reshape(CHOICES, -1, experts)
    place = (jnp.swapaxes(place, 0, 1) * wanted).sum(axis=-1).astype(jnp.int32)  # [T, K]
    places = wanted[..., None] * jax.nn.one_hot(place, capacity)[..., None, :]  # [T, K, E, C]
    return places.sum(axis=1), jnp.einsum('tk,tkec->tec', weights, places)


def run_experts(params: Params, tokens: jax.Array) -> jax.Array:
    """Returns what each expert makes of its own tokens, [E, C, D] to [E, C, D]."""
    hidden = jax.nn.gelu(jnp.einsum('ecd,edf->ecf', tokens, params['up']))
    return jnp.einsum('ecf,efd->ecd', hidden, params['down'])


def expert_layer(params: Params, tokens: jax.Array, groups: int) -> jax.Array:
    """Returns [T, D] for `tokens` [T, D] in so many groups, on one device."""

    def one_group(tokens: jax.Array) -> jax.Array:
        places, weights = route(params['router'], tokens)
        results = run_experts(params, jnp.einsum('tec,td->ecd', places, tokens))
        return jnp.einsum('tec,ecd->td', weights, results)

    return jax.vmap(one_group)(tokens.reshape(groups, -1, tokens.shape[-1])).reshape(tokens.shape)


def sharded_expert_layer(helper: MeshShardingHelper) -> Layer:
    """Returns the same layer for a mesh with axes 'dp' and 'expert', each device with a group of its own.

    Other axes of the mesh are left alone: along them the compiler may split the experts' matrices.
    """

    def one_device(params: Params, tokens: jax.Array) -> jax.Array:
        places, weights = route(params['router'], tokens)
        sent = jnp.einsum('tec,td->ecd', places, tokens)  # for every expert: [E, C, D]
        swap = functools.partial(jax.lax.all_to_all, axis_name=EXPERT, tiled=True)
        arrived = swap(sent, split_axis=0, concat_axis=1)  # for the experts here, from all: [E/n, n C, D]
        returned = swap(run_experts(params, arrived), split_axis=1, concat_axis=0)
        return jnp.einsum('tec,ecd->td', weights, returned)

    axes = ('dp', EXPERT)
    return helper.shard_map(one_device, in_specs=(PARAMS, TOKENS), out_specs=TOKENS, axis_names=axes)


def main(tokens: int = 512, devices: int | None = None, seed: int = 0) -> float:
    """Compares values and gradients with those of one device; returns the largest difference."""
    found = choose_devices(devices)
    helper = MeshShardingHelper([1 if len(found) % 2 else 2, -1], ['dp', EXPERT], devices=found)
    if tokens % len(found):
        raise app.UsageError(
            f'--tokens {tokens} do not divide over {len(found)} devices: take a multiple of it.'
        )
    first, second = jax.random.split(jax.random.key(seed))
    params = init_params(first, experts=2 * helper.mesh.shape[EXPERT], width=32, hidden=64)
    batch = jax.random.normal(second, (tokens, 32))
    params, batch = jax.tree.map(np.asarray, (params, batch))

    def loss(params: Params, batch: jax.Array, layer: Layer) -> tuple[jax.Array, jax.Array]:
        result = layer(params, batch)
        return jnp.mean(result**2), result

    def step(layer: Layer, params: Params, batch: jax.Array) -> tuple[jax.Array, tuple[Params, jax.Array]]:
        gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, result), gradients = gradient(params, batch, layer)
        return result, gradients

    on_one_layer = functools.partial(expert_layer, groups=len(found))
    on_one = jax.jit(functools.partial(step, on_one_layer))(params, batch)
    on_all = helper.sjit(functools.partial(step, sharded_expert_layer(helper)), in_shardings=(PARAMS, TOKENS))
    for row in helper.plan(on_all, params, batch).collectives:
        print(f'{row.count:3} x {row.kind} along {", ".join(row.axes)}, {row.bytes:,} bytes, {row.phase}')
    differences = jax.tree.map(
        lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), on_one, on_all(params, batch)
    )
    return max(jax.tree.leaves(differences))


if __name__ == '__main__':
    TOKENS_FLAG = flags.DEFINE_integer('tokens', 512, 'Tokens of a batch.', lower_bound=1)
    DEVICES = flags.DEFINE_integer('devices', None, 'How many devices to use, or to simulate.', lower_bound=1)
    app.run(lambda argv: print(f'largest difference {main(TOKENS_FLAG.value, DEVICES.value):.1e}'))
