"""Integers that are folded before a program runs equal those that JAX computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scalax._jaxpr.dim_rules import ELEMENTWISE
from scalax._jaxpr.static_integers import INTEGER_OPS, StaticIntegers

X = np.array([-7, -1, 0, 3, 100, 2**31 - 1], np.int32)
Y = np.array([2, -3, 5, 1, 7, 2], np.int32)
FUNCTIONS = {
    'and': lambda x, y: x & y,
    'clamp': lambda x, y: lax.clamp(jnp.minimum(x, y), x, y),
    'not': lambda x, y: ~x,
    'or': lambda x, y: x | y,
    'select_n': lambda x, y: lax.select_n(lax.clamp(0, x, 2), x, y, x - y),
    'xor': lambda x, y: x ^ y,
}
UNARY = ('abs', 'neg', 'sign')


def fold(fun, *arguments, iotas=False):
    """Returns the integers of the result of a function whose arguments have these integers."""
    shapes = [jax.ShapeDtypeStruct(shape, 'int32') for shape, _ in arguments]
    jaxpr = jax.make_jaxpr(fun)(*shapes).jaxpr
    integers = StaticIntegers(jaxpr, iotas=iotas)
    integers.set(jaxpr.invars, [values for _, values in arguments])
    return integers.of(jaxpr.outvars[0])


@pytest.mark.medium
@pytest.mark.parametrize('name', sorted(ELEMENTWISE & INTEGER_OPS.keys()))
def test_operations_match_jax(name):
    def fun(x, y):
        return getattr(lax, name)(x) if name in UNARY else FUNCTIONS.get(name, getattr(lax, name, None))(x, y)

    folded, expected = fold(fun, (X.shape, X), (Y.shape, Y)), fun(jnp.array(X), jnp.array(Y))
    np.testing.assert_array_equal(folded, expected)
    assert folded.dtype == expected.dtype


def test_functions_and_other_forms():
    def fun(x):
        return jax.jit(lambda x: x // 3)(x.reshape(2, 3)).astype('uint8').reshape(-1) + jnp.uint8(250)

    np.testing.assert_array_equal(fold(fun, (X.shape, X)), fun(jnp.array(X)))
    assert fold(lambda x: x.reshape(2, 3).T, (X.shape, X)) is None
    assert fold(lambda x: x // jnp.where(x < 0, 0, 1), (X.shape, X)) is None  # a division by zero


def test_numbers_of_elements():
    def fun(x):
        return x + jnp.arange(6)

    np.testing.assert_array_equal(fold(fun, (X.shape, X), iotas=True), fun(jnp.array(X)))
    assert fold(fun, (X.shape, X)) is None


def test_integers_per_iteration_differ_from_integers_per_element():
    iterations = np.arange(6, dtype=np.int32)
    np.testing.assert_array_equal(fold(lambda i: i * 2 + 1, ((), iterations)), iterations * 2 + 1)
    assert fold(lambda i, x: i + x, ((), iterations), (X.shape, X)) is None
    assert fold(lambda i, x: lax.select_n(i < 1, x, x + 1), ((), iterations), (X.shape, X)) is None
