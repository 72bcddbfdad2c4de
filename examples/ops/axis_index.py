"""The index of a device's block, for each factor: ``ctx.index``.

    python -m examples.ops.axis_index

The first operation adds 100 for each preceding block, so its results depend on the operand's sharding. The
second one uses the same index to number the elements of the global array, and gives the same results for any
sharding.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __spec__ is None:  # run as a file, not with -m: import from the root of the clone
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import jax
import jax.numpy as jnp
import numpy as np

from examples.ops.meshes import helper_of
from scalax.custom_op import FactorContext, sharded_op
from scalax.sharding import PartitionSpec as P


@sharded_op('b c -> b c')
def add_block(ctx: FactorContext, x: jax.Array) -> jax.Array:
    """Adds 100 for each preceding block, along rows and columns."""
    return x + 100 * (ctx.index('b') + ctx.index('c'))


@sharded_op('b c -> b c')
def number_elements(ctx: FactorContext, x: jax.Array) -> jax.Array:
    """Adds the index of each element in the flattened global array."""
    rows, columns = x.shape
    row = ctx.index('b') * rows + jnp.arange(rows)
    column = ctx.index('c') * columns + jnp.arange(columns)
    return x + row[:, None] * (columns * ctx.size('c')) + column


def main() -> None:
    """Prints the value that each device adds."""
    helper = helper_of(2, 2, ('rows', 'columns'))
    x = np.zeros((4, 8), np.int32)
    for spec in (P('rows', 'columns'), P(('rows', 'columns')), P()):
        added = add_block(helper.shard(x, spec))
        first = [int(np.asarray(shard.data)[0, 0]) for shard in added.addressable_shards]
        print(f'{spec!s:24} each device adds {first}')
    for spec in (P('rows', 'columns'), P(('rows', 'columns'))):
        report = helper.verify(helper.sjit(number_elements, in_shardings=spec), x)
        print(f'{spec!s:24} number_elements is the same as on one device: {report.ok}')
    print(f'row 1: {number_elements(x)[1].tolist()}')


if __name__ == '__main__':
    main()
