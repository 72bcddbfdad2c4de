"""Random programs of a square matrix and of as many examples as features, with and without a gradient."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SIZE = 16

Operation = Callable[[jax.Array, jax.Array], jax.Array]


def _mapped(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.map(lambda row: jnp.tanh(row @ w), x)


def _per_example_keys(w: jax.Array, x: jax.Array) -> jax.Array:
    keys = jax.random.split(jax.random.key(5), SIZE)
    return x * jax.vmap(lambda key: jax.random.uniform(key, (SIZE,), x.dtype))(keys)


def _segments(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.ops.segment_sum(x, jnp.argmax(x @ w, 1) // 2, SIZE) / SIZE


def _updated_rows(w: jax.Array, x: jax.Array) -> jax.Array:
    def update(i: Any, x: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(x, jnp.tanh(x[i] @ w)[None], i, 0)

    return lax.fori_loop(0, SIZE, update, x)


def _microbatches(w: jax.Array, x: jax.Array) -> jax.Array:
    def add(total: jax.Array, part: jax.Array) -> tuple[jax.Array, jax.Array]:
        return total + part.T @ part / SIZE, jnp.tanh(part @ w)

    total, parts = lax.scan(add, jnp.zeros_like(w), x.reshape(2, SIZE // 2, SIZE))
    return jnp.tanh(parts.reshape(SIZE, SIZE) + total)


def _depthwise(w: jax.Array, x: jax.Array) -> jax.Array:
    images = x.reshape(SIZE, 4, 4)
    numbers = ('NWC', 'WIO', 'NWC')
    y = lax.conv_general_dilated(
        images, w[:3, None, :4], (1,), 'SAME', dimension_numbers=numbers, feature_group_count=4
    )
    return jnp.tanh(y).reshape(SIZE, SIZE)


def _until_small(w: jax.Array, x: jax.Array) -> jax.Array:
    def until(row: jax.Array) -> jax.Array:
        return lax.while_loop(lambda row: jnp.abs(row).max() > 0.2, lambda row: 0.6 * jnp.tanh(row @ w), row)

    return jax.vmap(until)(x)


def _largest(w: jax.Array, x: jax.Array) -> jax.Array:
    values, places = lax.top_k(x, 4)
    return jnp.repeat(values, 4, 1) * jnp.repeat(places, 4, 1) / SIZE


def _norms(w: jax.Array, x: jax.Array) -> jax.Array:
    norm = jnp.sqrt(jnp.square(w).sum() + jnp.square(x).sum())
    return x / (1 + jnp.linalg.norm(x, axis=0)) + w / (1 + norm)


def _solved(w: jax.Array, x: jax.Array) -> jax.Array:
    matrices = x.reshape(SIZE, 4, 4)
    matrices = matrices @ matrices.mT + 4 * jnp.eye(4, dtype=x.dtype)
    solution = jnp.linalg.solve(matrices, jnp.broadcast_to(w[:4, :4], matrices.shape))
    return jnp.tanh(solution).reshape(SIZE, SIZE)


def _carried(w: jax.Array, x: jax.Array) -> jax.Array:
    def layer(carry: tuple[jax.Array, jax.Array], v: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Any]:
        x, norm = carry
        y = jnp.tanh(x @ v.reshape(SIZE, SIZE))
        return (y, norm + jnp.square(y).mean()), y.mean(0)

    stack = jnp.stack([w, w.T, w[::-1]]).reshape(3, -1)
    (x, norm), means = lax.scan(jax.checkpoint(layer), (x, jnp.zeros((), x.dtype)), stack)
    return jnp.tanh(x + norm * means[0])


OPERATIONS: list[Operation] = [
    lambda w, x: jnp.tanh(x @ w),
    lambda w, x: jnp.tanh(w @ x),
    lambda w, x: x.T,
    lambda w, x: jnp.sin(x.reshape(4, 4, 16)).reshape(16, 16),
    lambda w, x: x.reshape(16, 2, 8).transpose(2, 1, 0).reshape(16, 16),
    lambda w, x: x[:, ::-1] * w,
    lambda w, x: x[jnp.argsort(w[0])],
    lambda w, x: jnp.take_along_axis(x, jnp.clip(jnp.round(x * 8), 0, 8).astype(int), 1),
    lambda w, x: jnp.zeros_like(x).at[jnp.arange(16) // 2].add(x / 2),
    lambda w, x: x - x.mean(1, keepdims=True),
    lambda w, x: x / 2 - x.mean(0) / 2,
    lambda w, x: jax.nn.softmax(x),
    lambda w, x: jnp.cumsum(x, 1) / 16,
    lambda w, x: jnp.tanh(x @ x.T),
    lambda w, x: lax.scan(lambda c, r: (jnp.tanh(c @ w + r), c), jnp.zeros(16, x.dtype), x)[1],
    lambda w, x: lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3, reverse=True)[0],
    lambda w, x: lax.cond(w[0, 0] > 0, lambda: jnp.tanh(x @ w), lambda: w),
    lambda w, x: jax.vmap(lambda r: jnp.tanh(w @ r))(x),
    lambda w, x: jnp.tanh(jax.grad(lambda x: jnp.sin(x @ w).sum())(x)),
    lambda w, x: jax.checkpoint(lambda x: jnp.tanh(x @ w))(x),
    lambda w, x: jnp.stack([x[:8], x[8:]], 1).reshape(16, 16),
    lambda w, x: jnp.tanh(lax.conv(x[:, :, None, None], w[:, :, None, None], (1, 1), 'SAME')[:, :, 0, 0]),
    lambda w, x: jax.random.bernoulli(jax.random.key(3), 0.7, x.shape) * x,
    lambda w, x: jnp.tanh(x + jax.random.normal(jax.random.fold_in(jax.random.key(1), 7), x.shape, x.dtype)),
    lambda w, x: x[jax.random.permutation(jax.random.key(2), SIZE)],
    lambda w, x: jnp.sort(x, 1) * w.sum(),
    lambda w, x: jnp.sort(x, 0),
    lambda w, x: jnp.tanh((jnp.exp(1j * x) @ (w + 1j * w.T)).imag),
    lambda w, x: jnp.flip(x, 0) - jax.nn.logsumexp(x, 0) / SIZE,
    lambda w, x: jnp.pad(x, ((1, 0), (0, 1)))[:SIZE, 1:] + jnp.roll(x, 3, 1) / 2,
    lambda w, x: lax.associative_scan(lambda a, b: a * b / 2 + b / 2, x, axis=1),
    lambda w, x: lax.cond(x[0, 0] > 0, lambda: jnp.tanh(x @ w), lambda: x.T),
    lambda w, x: jnp.where(x > x.max(0) / 2, x, w) * (x > 0).sum() / SIZE**2,
    lambda w, x: jnp.einsum('bi,bj,ij->bi', x, x, w) / SIZE,
    lambda w, x: jnp.full_like(x, -1).at[jnp.argmax(x, 1)].max(x),
    lambda w, x: jnp.concatenate([x[:, :8] @ w[:8], w[:, :4] + x[:, 12:]], 1)[:, 4:],
    _mapped,
    _per_example_keys,
    _segments,
    _updated_rows,
    _microbatches,
    _depthwise,
    _largest,
    _norms,
    _solved,
    _carried,
]
"""Operations that take a matrix, and take and return 16 x 16 numbers between -1 and 1."""

WITHOUT_GRADIENT: list[Operation] = [
    lambda w, x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1],
    _until_small,
]
"""More of them, which JAX cannot differentiate in reverse."""


def random_program(random: np.random.Generator) -> Callable[[jax.Array, jax.Array], Any]:
    """Returns a program of a matrix and of examples.

    It returns an array and the number of finite elements in it; or a loss and that number, with the gradients
    of the loss.
    """
    is_gradient = bool(random.integers(2))
    operations = OPERATIONS if is_gradient else OPERATIONS + WITHOUT_GRADIENT
    chosen = [operations[i] for i in random.integers(len(operations), size=random.integers(2, 6))]

    def fun(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        for operation in chosen:
            x = operation(w, x)
        return x, jnp.isfinite(x).sum()

    def loss(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, count = fun(w, x)
        return (value * jnp.linspace(0, 1, SIZE)).sum(), count

    return jax.value_and_grad(loss, (0, 1), has_aux=True) if is_gradient else fun
