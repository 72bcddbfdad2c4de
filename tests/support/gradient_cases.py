"""Gradients of operations over Explicit axes, compared with the gradients on one device.

``python gradient_cases.py OPERATION...`` runs in a separate process, because XLA might abort it.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, PartitionSpec

from scalax.custom_op import FactorContext, ShardedOp, sharded_op
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P


@sharded_op('b h k, k v -> b h v', reduction_factors=('k',))
def projected(ctx: FactorContext, x: Array, y: Array) -> Array:
    return ctx.psum(jnp.einsum('bhk,kv->bhv', x, y), 'k')


@sharded_op('b c -> b', reduction_factors=('c',))
def norms(ctx: FactorContext, x: Array) -> Array:
    return jnp.sqrt(ctx.psum((x * x).sum(-1), 'c'))


@sharded_op('b k, b n -> k n', reduction_factors=('b',))
def outer(ctx: FactorContext, x: Array, y: Array) -> Array:
    return ctx.psum(x.T @ y, 'b')


@sharded_op('b d, d f, f e -> b e', reduction_factors=('d', 'f'))
def two_layers(ctx: FactorContext, x: Array, up: Array, down: Array) -> Array:
    return ctx.psum(jnp.tanh(ctx.psum(x @ up, 'd')) @ down, 'f')


@sharded_op('b q d, b k d -> b q k', reduction_factors=('d',))
def scores(ctx: FactorContext, q: Array, k: Array) -> Array:
    return ctx.psum(jnp.einsum('bqd,bkd->bqk', q, k), 'd')


@sharded_op('b q k, b k d, d e -> b q e', reduction_factors=('k', 'd'))
def attended(ctx: FactorContext, weights: Array, values: Array, out: Array) -> Array:
    return ctx.psum(ctx.psum(jnp.einsum('bqk,bkd->bqd', weights, values), 'k') @ out, 'd')


E8 = (8, 8)
SHAPES: dict[str, tuple[ShardedOp, Sequence[tuple[int, ...]]]] = {
    'projected': (projected, [(2, 3, 8), (8, 5)]),
    'norms': (norms, [E8]),
    'outer': (outer, [E8, E8]),
    'two layers': (two_layers, [E8, E8, E8]),
    'scores': (scores, [(8, 8, 8), (8, 8, 8)]),
    'attended': (attended, [(8, 8, 8), (8, 8, 8), E8]),
}
# Cases in which XLA of JAX 0.12.0.1 aborted the process: mesh, operation, specs of the operands.
ABORTED: list[tuple[dict[str, int], str, tuple[PartitionSpec, ...]]] = [
    ({'a': 4, 'b': 2}, 'projected', (P('b', None, 'a'), P(('a', 'b')))),
    ({'a': 2, 'b': 4}, 'projected', (P('a', None, 'b'), P(('b', 'a')))),
    ({'a': 2, 'b': 4}, 'scores', (P(None, 'b'), P(None, ('a', 'b')))),
    ({'a': 2, 'b': 4}, 'scores', (P(None, 'a', 'b'), P(None, None, ('a', 'b')))),
    ({'a': 2, 'b': 2, 'c': 2}, 'two layers', (P('c', 'b'), P('a', 'c'), P('a', ('b', 'c')))),
    (
        {'a': 2, 'b': 2, 'c': 2},
        'attended',
        (P(None, ('b', 'a')), P(('a', 'c'), None, 'b'), P(None, ('b', 'c'))),
    ),
]


def drawn(count: int) -> Iterator[tuple[dict[str, int], str, tuple[PartitionSpec, ...]]]:
    """Yields random cases, the same in every run."""
    random_ = random.Random(0)
    for name in itertools.islice(itertools.cycle(SHAPES), count):
        sizes = random_.choice([{'a': 4, 'b': 2}, {'a': 2, 'b': 2, 'c': 2}])
        yield sizes, name, tuple(spec_of(shape, sizes, random_) for shape in SHAPES[name][1])


def spec_of(shape: tuple[int, ...], sizes: dict[str, int], random_: random.Random) -> PartitionSpec:
    while True:
        dims = {axis: random_.choice([None, *range(len(shape))]) for axis in sizes}
        entries = [tuple(axis for axis in sizes if dims[axis] == dim) for dim in range(len(shape))]
        if all(
            n % int(np.prod([sizes[axis] for axis in e])) == 0 for n, e in zip(shape, entries, strict=True)
        ):
            return P(*entries)


def check(sizes: dict[str, int], name: str, specs: tuple[PartitionSpec, ...]) -> None:
    op, shapes = SHAPES[name]
    helper = MeshShardingHelper(list(sizes.values()), list(sizes), axis_types=AxisType.Explicit)
    numbers = np.random.default_rng(0)
    operands = [numbers.random(shape, np.float32) for shape in shapes]

    def loss(*xs: Any) -> Array:
        return jnp.sin(op(*xs)).sum()

    grads = jax.grad(loss, tuple(range(len(operands))))
    expected = grads(*operands)
    actual = helper.sjit(grads, in_shardings=specs)(*operands)
    for expected_grad, grad, spec in zip(expected, actual, specs, strict=True):
        np.testing.assert_allclose(expected_grad, grad, rtol=1e-3, atol=1e-4)
        assert grad.sharding.is_equivalent_to(helper.match_sharding_rule(spec, grad), grad.ndim)


if __name__ == '__main__':
    jax.config.update('jax_num_cpu_devices', 8)
    for operation in sys.argv[1:]:
        for sizes, name, specs in [*ABORTED, *drawn(6)]:
            if name == operation:
                print(f'{name} on {sizes}: {", ".join(map(str, specs))}', flush=True)
                check(sizes, name, specs)
        print(f'{operation} passed', flush=True)
