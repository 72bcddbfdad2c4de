"""A scalar or an array as a parameter: two rules for one function.

    python -m examples.ops.scalar_or_array

The scale is one number, or one number per column. The array shares the factor ``c`` with the data, so each
device gets the shard for its own columns, whatever the sharding of the array.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __spec__ is None:  # run as a file, not with -m: import from the root of the clone
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import jax
import numpy as np

from examples.ops.meshes import helper_of, spec_of
from scalax.custom_op import FactorContext, sharded_op
from scalax.sharding import PartitionSpec as P

shapes: list[tuple[int, ...]] = []


def scale(ctx: FactorContext, x: jax.Array, by: jax.Array) -> jax.Array:
    """Scales the columns of a block."""
    shapes.append(by.shape)
    return x * by


by_scalar = sharded_op('b c, -> b c')(scale)
by_column = sharded_op('b c, c -> b c')(scale)


def main() -> None:
    """Scales an array by a scalar and by columns."""
    helper = helper_of(2, 2, ('data', 'tp'))
    x = np.ones((4, 8), np.float32)
    columns = np.arange(8, dtype=np.float32)
    placed = helper.shard(x, P('data', 'tp'))

    scaled = by_scalar(placed, np.float32(3))
    print(f'a scalar: each device has {shapes[-1]}, the result is sharded as {spec_of(scaled)}')
    np.testing.assert_array_equal(scaled, 3 * x)

    for spec in (P(), P('tp')):
        scaled = by_column(placed, helper.shard(columns, spec))
        print(f'an array as {spec}: each device has {shapes[-1]}, the result is sharded as {spec_of(scaled)}')
        np.testing.assert_array_equal(scaled, x * columns)


if __name__ == '__main__':
    main()
