"""Top-k over a sharded vocabulary: each device sends its own candidates, never all its logits.

    python -m examples.ops.top_k

The *k* largest logits are among the *k* largest of each block. So every device selects its own *k* largest
logits, which are gathered, and the *k* largest of these are selected.
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


@sharded_op('b v -> b k, b k', reduction_factors=('v',))
def top_k(ctx: FactorContext, logits: jax.Array, *, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the *k* largest logits of each example, and their indices in the vocabulary."""
    block = logits.shape[-1]
    values, tokens = jax.lax.top_k(logits, min(k, block))
    tokens = tokens + ctx.index('v') * block
    values = ctx.all_gather(values, 'v', axis=1, tiled=True)
    tokens = ctx.all_gather(tokens, 'v', axis=1, tiled=True)
    values, best = jax.lax.top_k(values, k)
    return values, jnp.take_along_axis(tokens, best, axis=1)


def main() -> None:
    """Compares results and communication with ``jax.lax.top_k``."""
    helper = helper_of(2, 4, ('data', 'tp'))
    logits = np.random.default_rng(0).permuted(np.tile(np.arange(4096.0, dtype=np.float32), (8, 1)), axis=1)
    values, tokens = top_k(helper.shard(logits, P('data', 'tp')), k=4)
    print(f'the results are sharded as {spec_of(values)} and {spec_of(tokens)}')
    print(f'values of row 0: {values[0].tolist()}')
    expected = jax.lax.top_k(logits, 4)
    same = np.array_equal(values, expected[0]) and np.array_equal(tokens, expected[1])
    print(f'the same as on one device: {same}')

    for name, fun in (('top_k', top_k), ('jax.lax.top_k', jax.lax.top_k)):
        step = helper.sjit(lambda x, fun=fun: fun(x, k=4), in_shardings=P('data', 'tp'))
        sent = sum(row.count * row.bytes for row in helper.plan(step, logits).collectives)
        print(f'{name}: {sent:,} bytes gathered for a group of devices')


if __name__ == '__main__':
    main()
