"""The loss of a language model, fused with its last layer, so that no device holds all logits of an example.

    python -m examples.ops.cross_entropy

The last layer's weights are sharded over the vocabulary. Each device computes the logits of its shard, and
sends only two numbers per example: a maximum and a sum. The gradient recomputes the logits, which is faster
than saving them.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __spec__ is None:  # run as a file, not with -m: import from the root of the clone
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import jax
import jax.numpy as jnp
import numpy as np

from examples.ops.meshes import helper_of, spec_of
from scalax.custom_op import FactorContext, sharded_op
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P

BATCH, WIDTH, VOCABULARY = 256, 64, 8192


def hits(ctx: FactorContext, labels: jax.Array, block: int) -> jax.Array:
    """Returns a boolean matrix: the columns of this block that are the labels."""
    return labels[:, None] == ctx.index('v') * block + jnp.arange(block)


def on_blocks(
    ctx: FactorContext, hidden: jax.Array, weights: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the cross-entropy of each example, and its log-sum-exp, which is the saved residual."""
    logits = hidden @ weights
    top = ctx.pmax(logits.max(axis=-1), 'v')
    norm = top + jnp.log(ctx.psum(jnp.exp(logits - top[:, None]).sum(axis=-1), 'v'))
    label = ctx.psum(jnp.where(hits(ctx, labels, weights.shape[1]), logits, 0).sum(axis=-1), 'v')
    return norm - label, norm


forward = sharded_op('b h, h v, b -> b, b', reduction_factors=('v',), need_replication_factors=('h',))(
    on_blocks
)


@sharded_op('b h, h v, b -> b', reduction_factors=('v',), need_replication_factors=('h',))
def cross_entropy(ctx: FactorContext, hidden: jax.Array, weights: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the cross-entropy of each example."""
    return on_blocks(ctx, hidden, weights, labels)[0]


@sharded_op('b h, h v, b, b, b -> b h, h v', need_replication_factors=('h',))
def backward(
    ctx: FactorContext,
    hidden: jax.Array,
    weights: jax.Array,
    labels: jax.Array,
    norm: jax.Array,
    cotangent: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of the hidden state and of the weights."""
    probabilities = jnp.exp(hidden @ weights - norm[:, None])
    errors = (probabilities - hits(ctx, labels, weights.shape[1])) * cotangent[:, None]
    return ctx.psum(errors @ weights.T, 'v'), ctx.psum(hidden.T @ errors, 'b')


cross_entropy.defvjp(forward, backward)


def by_the_compiler(hidden: jax.Array, weights: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the cross-entropy of each example, written for one device."""
    logits = jax.nn.log_softmax(hidden @ weights)
    return -jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]


def main() -> None:
    """Compares values, gradients and memory."""
    helper = helper_of(2, 4, ('data', 'tp'))
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(BATCH, WIDTH)).astype(np.float32)
    weights = rng.normal(size=(WIDTH, VOCABULARY)).astype(np.float32) / 8
    labels = rng.integers(0, VOCABULARY, BATCH)
    shardings = (P('data'), P(None, 'tp'), P('data'))
    steps = {
        name: helper.sjit(
            jax.value_and_grad(lambda *args, fun=fun: fun(*args).mean(), argnums=(0, 1)),
            in_shardings=shardings,
        )
        for name, fun in (('cross_entropy', cross_entropy), ('by_the_compiler', by_the_compiler))
    }
    (loss, grads), (expected_loss, expected_grads) = (
        step(hidden, weights, labels) for step in steps.values()
    )
    print(f'loss: {loss:.3f}, gradients are sharded as {spec_of(grads[0])} and {spec_of(grads[1])}')
    pairs = zip((loss, *grads), (expected_loss, *expected_grads), strict=True)
    same = all(np.allclose(value, expected, atol=1e-5) for value, expected in pairs)
    print(f'the same as by the compiler: {same}')
    report(helper, steps, (hidden, weights, labels))


def report(helper: MeshShardingHelper, steps: dict, arrays: tuple) -> None:
    """Prints the memory and the communication of the compiled steps."""
    examples = BATCH // 2
    print(f'logits of the rows of one device: {examples * VOCABULARY * 4 / 2**20:.1f} MiB')
    for name, step in steps.items():
        plan = helper.plan(step, *arrays)
        held = plan.memory.temporaries / (examples * VOCABULARY * 4)
        sent = sum(row.count * row.bytes for row in plan.collectives) / 2**10
        print(f'{name}: holds {held:.2f} of that while it runs, sends {sent:.0f} KiB')


if __name__ == '__main__':
    main()
