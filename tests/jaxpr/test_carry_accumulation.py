"""The reductions of a loop's carry, as `scalax._jaxpr.carry_accumulation` reads them from the body."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from scalax._jax.equations import loop_of, open_jaxpr
from scalax._jaxpr.carry_accumulation import carry_increment, carry_reductions


def add(total: Any, x: Any) -> Any:
    return total + x, None


def print_and_replace(total: Any, x: Any) -> Any:
    jax.debug.print('{}', total)
    return x, None


def multiply(total: Any, x: Any) -> Any:
    return total * x, None


def loop_over(body: Callable[..., Any]) -> Any:
    jaxpr = jax.make_jaxpr(lambda xs: jax.lax.scan(body, jnp.zeros(3), xs))(jnp.ones((4, 3)))
    return loop_of(jaxpr.eqns[-1])


@pytest.mark.parametrize(('body', 'is_sum'), [(add, True), (print_and_replace, False), (multiply, False)])
def test_only_a_sum_has_an_increment(body: Callable[..., Any], is_sum: bool) -> None:
    body_jaxpr = open_jaxpr(loop_over(body).body)
    increments = carry_increment(body_jaxpr, body_jaxpr.invars[0], body_jaxpr.outvars[0])
    assert (increments is not None) == is_sum
    if increments is not None:
        assert increments == [body_jaxpr.invars[1]]


def test_a_carry_that_a_callback_reads_is_not_reduced() -> None:
    assert carry_reductions(loop_over(add)).of(0) is not None
    assert carry_reductions(loop_over(print_and_replace)).of(0) is None
