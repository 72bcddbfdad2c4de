"""Ring attention: causal attention for sequences that are sharded over devices.

    python -m examples.ring_attention

Each device has one block of the sequence. Blocks of keys and values move around the ring of devices, one step
at a time, and every device accumulates the current block into its softmax, so that no device ever holds
more than two blocks. In the backward pass, gradients of keys and values move around the ring with their
block, until they are back on their own device. Devices send data only to their next neighbour.

After "Ring Attention with Blockwise Transformers for Near-Infinite Context" (Liu, Zaharia, Abbeel, 2023).
"""

from __future__ import annotations

import sys
from pathlib import Path

if __spec__ is None:  # run as a file, not with -m: import from the root of the clone
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from examples.devices import choose_devices
from scalax.sharding import MeshShardingHelper, PartitionSpec

SEQUENCE = 'sp'
Block = tuple[jax.Array, jax.Array]


def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Returns causal attention [B, S, H, D] of `query`, `key` and `value` [B, S, H, D], on one device."""
    scores = jnp.einsum('bqhd,bkhd->bhqk', query, key) / np.sqrt(query.shape[-1])
    positions = jnp.arange(query.shape[1])
    scores = jnp.where(positions[:, None] >= positions, scores, -jnp.inf)
    return jnp.einsum('bhqk,bkhd->bqhd', jax.nn.softmax(scores, axis=-1), value)


def sharded_attention(helper: MeshShardingHelper) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Returns the function for a mesh with axis 'sp', over which sequences are sharded.

    Other axes of the mesh, over which batches or heads may be sharded, stay automatic.
    """
    spec = PartitionSpec(None, SEQUENCE)
    return helper.shard_map(ring_attention, in_specs=spec, out_specs=spec, axis_names=SEQUENCE)


@jax.custom_vjp
def ring_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Returns the attention of one device's block of the sequence, inside `shard_map`."""
    return _forward(query, key, value)[0]


def _forward(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    devices, index = jax.lax.axis_size(SEQUENCE), jax.lax.axis_index(SEQUENCE)

    def fold(step: jax.Array | int, sums: tuple[jax.Array, ...], block: Block) -> tuple[jax.Array, ...]:
        """Accumulates the block that has moved `step` devices into the softmax, in float32."""
        total, weight, largest = sums
        scores = _scores(query, block[0], index, (index - step) % devices)
        new_largest = jnp.maximum(largest, scores.max(axis=-1))
        # The first block is the device's own, in which each position attends to itself, so the maximum is
        # finite.
        scale, weights = jnp.exp(largest - new_largest), jnp.exp(scores - new_largest[..., None])
        added = jnp.einsum('bhqk,bkhd->bhqd', weights, block[1])
        return total * scale[..., None] + added, weight * scale + weights.sum(axis=-1), new_largest

    def ring_step(carry: tuple, step: jax.Array) -> tuple[tuple, None]:
        sums, block = carry
        block = _to_next(block)
        return (fold(step, sums, block), block), None

    zeros = (
        jnp.swapaxes(query, 1, 2).astype(jnp.float32) * 0
    )  # [B, H, Q, D], varying over devices like the query
    sums = zeros, zeros[..., 0], zeros[..., 0] - jnp.inf
    sums = fold(0, sums, (key, value))
    (sums, _), _ = jax.lax.scan(ring_step, (sums, (key, value)), jnp.arange(1, devices))
    total, weight, largest = sums
    result = jnp.swapaxes(total / weight[..., None], 1, 2).astype(query.dtype)
    return result, (query, key, value, result, largest + jnp.log(weight))


def _backward(saved: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    query, key, value, result, log_weight = saved
    devices, index = jax.lax.axis_size(SEQUENCE), jax.lax.axis_index(SEQUENCE)
    gradient = gradient.astype(jnp.float32)
    delta = jnp.einsum('bqhd,bqhd->bhq', gradient, result.astype(jnp.float32))

    def fold(step: jax.Array | int, d_query: jax.Array, block: Block, sums: Block) -> tuple[jax.Array, Block]:
        """Adds the gradients from the block that has moved `step` devices."""
        weights = jnp.exp(_scores(query, block[0], index, (index - step) % devices) - log_weight[..., None])
        d_weights = jnp.einsum('bqhd,bkhd->bhqk', gradient, block[1])
        d_scores = weights * (d_weights - delta[..., None]) / np.sqrt(query.shape[-1])
        d_query = d_query + jnp.einsum('bhqk,bkhd->bqhd', d_scores, block[0])
        d_key = sums[0] + jnp.einsum('bhqk,bqhd->bkhd', d_scores, query)
        return d_query, (d_key, sums[1] + jnp.einsum('bhqk,bqhd->bkhd', weights, gradient))

    def ring_step(carry: tuple, step: jax.Array) -> tuple[tuple, None]:
        d_query, block, sums = carry
        block, sums = _to_next((block, sums))
        d_query, sums = fold(step, d_query, block, sums)
        return (d_query, block, sums), None

    zeros = jax.tree.map(lambda x: x.astype(jnp.float32) * 0, (query, (key, value)))
    d_query, sums = fold(0, zeros[0], (key, value), zeros[1])
    carry = d_query, (key, value), sums
    (d_query, _, sums), _ = jax.lax.scan(ring_step, carry, jnp.arange(1, devices))
    d_key, d_value = _to_next(sums)  # the last step, back to their device
    return d_query.astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype)


ring_attention.defvjp(_forward, _backward)


def _scores(query: jax.Array, key: jax.Array, query_block: jax.Array, key_block: jax.Array) -> jax.Array:
    """Returns the scores [B, H, Q, K] of two blocks, with -inf where the key comes after the query."""
    scores = jnp.einsum('bqhd,bkhd->bhqk', query, key, preferred_element_type=jnp.float32)
    positions = jnp.arange(query.shape[1])
    queries, keys = (positions + block * len(positions) for block in (query_block, key_block))
    return jnp.where(queries[:, None] >= keys, scores / np.sqrt(query.shape[-1]), -jnp.inf)


def _to_next(tree: tuple) -> tuple:
    """Sends each device's arrays to the next device of the ring."""
    devices = jax.lax.axis_size(SEQUENCE)
    ring = [(device, (device + 1) % devices) for device in range(devices)]
    return jax.tree.map(functools.partial(jax.lax.ppermute, axis_name=SEQUENCE, perm=ring), tree)


def main(sequence: int = 512, devices: int | None = None, seed: int = 0) -> float:
    """Compares values and gradients with a single device, and returns the largest difference."""
    helper = MeshShardingHelper([-1], [SEQUENCE], devices=choose_devices(devices))
    size = helper.mesh.size
    if sequence % size:
        raise app.UsageError(f'--sequence {sequence} is not a multiple of {size} devices.')
    keys = jax.random.split(jax.random.key(seed), 3)
    inputs = [np.asarray(jax.random.normal(key, (2, sequence, 4, 16))) for key in keys]

    def loss(attend: Callable[..., jax.Array], inputs: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        result = attend(*inputs)
        return jnp.sum(jnp.sin(result)), result

    def step(attend: Callable[..., jax.Array], inputs: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        (_, result), gradients = jax.value_and_grad(loss, argnums=1, has_aux=True)(attend, inputs)
        return result, gradients

    expected = jax.jit(functools.partial(step, attention))(inputs)
    sharded_step = helper.sjit(
        functools.partial(step, sharded_attention(helper)), in_shardings=PartitionSpec(None, SEQUENCE)
    )
    plan = helper.plan(sharded_step, inputs)
    for row in plan.collectives:
        print(f'{row.count:3} x {row.kind} along {", ".join(row.axes)}, {row.bytes:,} bytes, {row.phase}')
    differences = jax.tree.map(
        lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), expected, sharded_step(inputs)
    )
    return max(jax.tree.leaves(differences))


if __name__ == '__main__':
    LENGTH = flags.DEFINE_integer('sequence', 512, 'Positions in a sequence.', lower_bound=1)
    DEVICES = flags.DEFINE_integer(
        'devices', None, 'The number of devices to use, or to simulate.', lower_bound=1
    )
    app.run(lambda argv: print(f'largest difference {main(LENGTH.value, DEVICES.value):.1e}'))
