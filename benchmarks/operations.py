"""The cost of a sharded operation compared with a hand-written ``custom_partitioning``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.timing import Row, compare
from scalax.custom_op import FactorContext, sharded_op

P = PartitionSpec


def with_a_rule() -> Callable[..., Any]:
    """Returns scaled sums of rows as a sharded operation."""

    @sharded_op('b c, -> b', reduction_factors=('c',))
    def sums(ctx: FactorContext, x: jax.Array, scale: jax.Array) -> jax.Array:
        return ctx.psum(scale * x.sum(axis=-1), 'c')

    return sums


def by_hand() -> Callable[..., Any]:
    """Returns the same operation with ``custom_partitioning``, compiled."""

    @custom_partitioning
    def sums(x: jax.Array, scale: jax.Array) -> jax.Array:
        return scale * x.sum(axis=-1)

    def partition(mesh: Mesh, operands: Any, result: Any) -> Any:
        rows, columns = (*operands[0].sharding.spec, None, None)[:2]

        def on_blocks(x: jax.Array, scale: jax.Array) -> jax.Array:
            part = scale * x.sum(axis=-1)
            return part if columns is None else jax.lax.psum(part, columns)

        operand_shardings = NamedSharding(mesh, P(rows, columns)), NamedSharding(mesh, P())
        return mesh, on_blocks, NamedSharding(mesh, P(rows)), operand_shardings

    sums.def_partition(partition, sharding_rule='b c, -> b', reduction_factors=('c',))
    return jax.jit(sums)


def sharded_ops(rounds: int) -> list[Row]:
    """Times calls on one device and on eight, and the first call."""

    def caller(*shape: int) -> Callable[[Callable[..., Any]], object]:
        mesh = Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), ('x', 'y'))
        x = jax.device_put(np.ones((64, 64), np.float32), NamedSharding(mesh, P('x', 'y')))
        scale = jax.device_put(np.float32(2), NamedSharding(mesh, P()))
        return lambda sums: sums(x, scale).block_until_ready()

    rows = []
    for shape, name in (((1, 1), '1 device'), ((4, 2), '8 devices')):
        call = caller(*shape)
        ours, reference = functools.partial(call, with_a_rule()), functools.partial(call, by_hand())
        rows.append(compare(f'sharded_op, {name}', ours, reference, max(rounds // math.prod(shape), 1)))
    call, name = caller(4, 2), 'first call of a sharded_op, 8 devices'
    rows.append(
        compare(name, lambda: call(with_a_rule()), lambda: call(by_hand()), max(rounds // 200, 1), warmup=1)
    )
    return rows
