"""A scalar parameter of an operation on sharded arrays: it is replicated, and causes no communication.

    python -m examples.ops.scalar_parameters

In the rule ``'b c, -> b c'``, the operand after the comma has no dimensions.
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
from scalax.sharding import PartitionSpec as P


@sharded_op('b c, -> b c')
def soften(ctx: FactorContext, logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """Divides logits by a temperature."""
    return logits / temperature


@sharded_op('b c, -> b', reduction_factors=('c',))
def count_above(ctx: FactorContext, x: jax.Array, threshold: jax.Array) -> jax.Array:
    """Counts the elements of each row that are above a threshold."""
    return ctx.psum((x > threshold).sum(axis=-1), 'c')


def main() -> None:
    """Runs both operations on a mesh with two axes."""
    helper = helper_of(2, 2, ('data', 'tp'))
    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    for spec in (P('data', 'tp'), P('data'), P()):
        placed = helper.shard(x, spec)
        softened = soften(placed, jnp.float32(2))
        np.testing.assert_array_equal(softened, x / 2)
        above = count_above(placed, 11.0)
        print(f'{spec!s:18} soften: {spec_of(softened):18} count_above: {spec_of(above):10} {above.tolist()}')
    step = helper.sjit(soften, in_shardings=(P('data', 'tp'), P()))
    print(f'collectives of soften: {len(helper.plan(step, x, np.float32(2)).collectives)}')


if __name__ == '__main__':
    main()
