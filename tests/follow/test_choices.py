"""What comes behind the last choice of the compiler is not looked at, and computes the same."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxpr_as_fun

from scalax._follow.choices import follow_choices
from scalax._follow.follow import follow
from scalax._follow.types import Arguments
from tests.support.following import MESH, constraints, equations, like, rows_at

ROWS, WEIGHTS = like(8, 4096), like(4096, 512)


def _followed(fun, *args):
    """The jaxpr of a function of rows and others, followed whole and without its end."""
    with jax.sharding.use_abstract_mesh(MESH):
        jaxpr = jax.make_jaxpr(fun)(*args)
        trails = [rows_at(0, 2), *[()] * (len(args) - 1)]
        arguments = Arguments(trails, [()] * len(trails), frozenset({'fsdp'}))
        return jaxpr, follow(jaxpr, arguments, MESH), follow_choices(jaxpr, arguments, MESH)


def step(x, weights):
    loss, gradient = jax.value_and_grad(lambda weights: jnp.sum(jnp.square(x @ weights)))(weights)
    clipped = jnp.where(loss > 1, gradient / jnp.sqrt(jnp.sum(jnp.square(gradient))), gradient)
    return weights - 0.1 * clipped, loss


def product_and_more(x, weights):
    y = x @ weights
    return y + 1, y, x


def nothing_behind(x, weights):
    return x @ weights


def product_in_a_call(x, weights):
    return jnp.sin(jax.jit(lambda x: jnp.cos(x) @ weights)(x))


def only_elements(x, weights):
    return jnp.sin(x), weights


@pytest.mark.parametrize(
    'fun',
    [step, product_and_more, nothing_behind, product_in_a_call, only_elements],
    ids=lambda fun: fun.__name__,
)
def test_same_constraints_and_values_as_of_the_whole(fun):
    jaxpr, whole, found = _followed(fun, ROWS, WEIGHTS)
    assert [*constraints(found.jaxpr)] == [*constraints(whole.jaxpr)]
    assert [(each.aval, each.spec) for each in found.kept] == [(each.aval, each.spec) for each in whole.kept]
    names = [[each.primitive.name for each in equations(of)] for of in (found.jaxpr, whole.jaxpr)]
    assert names[0] == names[1]
    assert str(found.jaxpr) == str(whole.jaxpr)  # each equation reads the same values
    assert found.jaxpr.out_avals == jaxpr.out_avals


def test_values_are_those_of_the_function():
    x, weights = jax.random.normal(jax.random.key(0), (8, 64)), jnp.ones((64, 16))
    mesh = jax.make_mesh((jax.device_count(),), ('fsdp',), axis_types=(jax.sharding.AxisType.Auto,))
    trails = [rows_at(0, 2), ()]
    with jax.set_mesh(mesh):
        found = follow_choices(
            jax.make_jaxpr(step)(x, weights), Arguments(trails, [(), ()], frozenset({'fsdp'})), mesh
        )
        assert constraints(found.jaxpr)
        for result, expected in zip(jaxpr_as_fun(found.jaxpr)(x, weights), step(x, weights), strict=True):
            assert jnp.allclose(result, expected, rtol=1e-5)


def test_the_end_of_a_train_step_is_not_looked_at(monkeypatch):
    seen = []

    def spied(jaxpr, *args):
        seen.append(len(jaxpr.eqns))
        return follow(jaxpr, *args)

    monkeypatch.setattr('scalax._follow.choices.follow', spied)
    jaxpr, whole, found = _followed(step, ROWS, WEIGHTS)
    assert seen[0] < len(jaxpr.eqns) - 5
    assert len(found.jaxpr.eqns) == len(whole.jaxpr.eqns)
