"""A Pallas kernel as an operation that the compiler can partition.

    python -m examples.ops.pallas_kernel

The compiler cannot analyze a kernel, so it would gather sharded operands. The rule specifies that rows may be
sharded, and columns may not. On CPUs the kernel runs in Pallas' interpreter.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __spec__ is None:  # run as a file, not with -m: import from the root of the clone
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import functools
from typing import Any

import jax
import numpy as np
from jax.experimental import pallas as pl

from examples.ops.meshes import helper_of, spec_of
from scalax.custom_op import FactorContext, sharded_op
from scalax.sharding import PartitionSpec as P

BLOCK_ROWS = 8


def kernel(epsilon: float, x: Any, scale: Any, out: Any) -> None:
    """Normalizes rows by their root mean square (Zhang and Sennrich, arXiv:1910.07467)."""
    rows = x[...]
    out[...] = rows * jax.lax.rsqrt((rows * rows).mean(axis=-1, keepdims=True) + epsilon) * scale[...]


def by_kernel(x: jax.Array, scale: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """Runs the kernel on blocks of rows."""
    rows, columns = x.shape
    block_rows = min(BLOCK_ROWS, rows)
    return pl.pallas_call(
        functools.partial(kernel, epsilon),
        grid=(pl.cdiv(rows, block_rows),),
        in_specs=[
            pl.BlockSpec((block_rows, columns), lambda i: (i, 0)),
            pl.BlockSpec((1, columns), lambda i: (0, 0)),
        ],
        out_specs=pl.BlockSpec((block_rows, columns), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=jax.default_backend() == 'cpu',
    )(x, scale[None, :])


# JAX cannot track which values vary over devices inside a kernel.
@sharded_op('b c, c -> b c', need_replication_factors=('c',), check_vma=False)
def rms_norm(ctx: FactorContext, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divides rows by their root mean square."""
    return by_kernel(x, scale)


def main() -> None:
    """Compares the operation with the kernel alone."""
    helper = helper_of(4, 2, ('data', 'tp'))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 32)).astype(np.float32)
    scale = np.linspace(0.5, 1.5, 32, dtype=np.float32)
    normed = rms_norm(helper.shard(x, P('data')), scale)
    expected = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * scale
    right = np.allclose(normed, expected, atol=1e-5)
    print(f'the result is sharded as {spec_of(normed)}, and is right: {right}')
    for name, fun in (('rms_norm', rms_norm), ('by_kernel', by_kernel)):
        step = helper.sjit(fun, in_shardings=(P('data'), P()))
        sent = sum(row.count * row.bytes for row in helper.plan(step, x, scale).collectives)
        print(f'{name}: sends {sent:,} bytes, the result is sharded as {spec_of(step(x, scale))}')
        print(f'{name}: the same as on one device: {helper.verify(step, x, scale).ok}')


if __name__ == '__main__':
    main()
