"""Expert parallelism: tokens are sent to the devices of their experts, and the results back.

    python -m examples.expert_parallel

Each token goes to the two experts with the highest router weights. A device sorts its tokens by expert into
buffers of a fixed capacity, one all-to-all sends every buffer to the device of its expert, and another one
sends the results back. Tokens beyond the capacity of an expert are dropped. Nothing else is sent.

After "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding" (Lepikhin et al.,
2020): tokens are routed in groups, here one per device, and every group has its own capacity.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __spec__ is None:  # run as a file, not with -m: import from the root of the clone
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
    """Returns the expert and the buffer slot of each token, and the weight of its result.

    Args:
      router: [D, E].
      tokens: [T, D], one group.

    Returns:
      Two arrays [T, E, C]: a mask of ones and zeros, and the mask times the router's weights. C is the
      capacity: the number of slots that an expert has for this group.
    """
    experts = router.shape[-1]
    capacity = math.ceil(CHOICES * len(tokens) / experts * CAPACITY_FACTOR)
    weights, chosen = jax.lax.top_k(jax.nn.softmax(tokens @ router), CHOICES)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    choices = jax.nn.one_hot(chosen, experts)  # [T, K, E]
    # Slots are assigned to first choices before second choices, in the order of the tokens, until none is
    # left.
    in_order = jnp.swapaxes(choices, 0, 1).reshape(-1, experts)
    slots = (jnp.cumsum(in_order, axis=0) - in_order).reshape(CHOICES, -1, experts)
    slots = (jnp.swapaxes(slots, 0, 1) * choices).sum(axis=-1).astype(jnp.int32)  # [T, K]
    mask = choices[..., None] * jax.nn.one_hot(slots, capacity)[..., None, :]  # [T, K, E, C]
    return mask.sum(axis=1), jnp.einsum('tk,tkec->tec', weights, mask)


def run_experts(params: Params, tokens: jax.Array) -> jax.Array:
    """Applies each expert to its own tokens, [E, C, D] to [E, C, D]."""
    hidden = jax.nn.gelu(jnp.einsum('ecd,edf->ecf', tokens, params['up']))
    return jnp.einsum('ecf,efd->ecd', hidden, params['down'])


def expert_layer(params: Params, tokens: jax.Array, groups: int) -> jax.Array:
    """Returns [T, D] for `tokens` [T, D], routed in groups, on one device."""

    def one_group(tokens: jax.Array) -> jax.Array:
        mask, weights = route(params['router'], tokens)
        results = run_experts(params, jnp.einsum('tec,td->ecd', mask, tokens))
        return jnp.einsum('tec,ecd->td', weights, results)

    return jax.vmap(one_group)(tokens.reshape(groups, -1, tokens.shape[-1])).reshape(tokens.shape)


def sharded_expert_layer(helper: MeshShardingHelper) -> Layer:
    """Returns the layer for a mesh with axes 'dp' and 'expert', with one group per device.

    Other axes of the mesh stay automatic: the compiler may shard the experts' matrices over them.
    """

    def one_device(params: Params, tokens: jax.Array) -> jax.Array:
        mask, weights = route(params['router'], tokens)
        sent = jnp.einsum('tec,td->ecd', mask, tokens)  # for every expert: [E, C, D]
        swap = functools.partial(jax.lax.all_to_all, axis_name=EXPERT, tiled=True)
        arrived = swap(
            sent, split_axis=0, concat_axis=1
        )  # for the local experts, from all devices: [E/n, n C, D]
        returned = swap(run_experts(params, arrived), split_axis=1, concat_axis=0)
        return jnp.einsum('tec,ecd->td', weights, returned)

    axes = ('dp', EXPERT)
    return helper.shard_map(one_device, in_specs=(PARAMS, TOKENS), out_specs=TOKENS, axis_names=axes)


def main(tokens: int = 512, devices: int | None = None, seed: int = 0) -> float:
    """Compares values and gradients with a single device, and returns the largest difference."""
    mesh_devices = choose_devices(devices)
    helper = MeshShardingHelper([1 if len(mesh_devices) % 2 else 2, -1], ['dp', EXPERT], devices=mesh_devices)
    if tokens % len(mesh_devices):
        raise app.UsageError(f'--tokens {tokens} is not a multiple of {len(mesh_devices)} devices.')
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

    single_device_layer = functools.partial(expert_layer, groups=len(mesh_devices))
    expected = jax.jit(functools.partial(step, single_device_layer))(params, batch)
    sharded_step = helper.sjit(
        functools.partial(step, sharded_expert_layer(helper)), in_shardings=(PARAMS, TOKENS)
    )
    for row in helper.plan(sharded_step, params, batch).collectives:
        print(f'{row.count:3} x {row.kind} along {", ".join(row.axes)}, {row.bytes:,} bytes, {row.phase}')
    differences = jax.tree.map(
        lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), expected, sharded_step(params, batch)
    )
    return max(jax.tree.leaves(differences))


if __name__ == '__main__':
    TOKENS_FLAG = flags.DEFINE_integer('tokens', 512, 'Tokens in a batch.', lower_bound=1)
    DEVICES = flags.DEFINE_integer(
        'devices', None, 'The number of devices to use, or to simulate.', lower_bound=1
    )
    app.run(lambda argv: print(f'largest difference {main(TOKENS_FLAG.value, DEVICES.value):.1e}'))
