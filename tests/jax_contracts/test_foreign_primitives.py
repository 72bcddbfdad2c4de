"""Tests that lowering shows whether primitives of other libraries work inside of ``jax.shard_map``."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType

from scalax._jax.equations import open_jaxpr
from scalax._jax.foreign_primitives import lowering_error
from scalax._jax.primitives import is_foreign
from tests.support.contracts import contract

MESH = AbstractMesh((4, 2), ('fsdp', 'tp'), axis_types=(AxisType.Auto,) * 2)


def equation_of(name, lower=None):
    """Returns the only equation of a function that binds another library's primitive."""
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x: x)
    if lower is not None:
        mlir.register_lowering(primitive, mlir.lower_fun(lower, multiple_results=False))
    [equation] = open_jaxpr(jax.make_jaxpr(primitive.bind)(jnp.zeros(4))).eqns
    return equation


def test_primitives_of_other_libraries_are_foreign():
    [equation] = open_jaxpr(jax.make_jaxpr(jnp.sin)(jnp.zeros(4))).eqns
    assert not is_foreign(equation)
    assert is_foreign(equation_of('sin')) and is_foreign(equation_of('solve'))


def check_type(x):
    if AxisType.Manual in jax.typeof(x).sharding.mesh.axis_types:
        raise ValueError('the type has changed')
    return x


@pytest.mark.parametrize('axes', [{'fsdp'}, {'fsdp', 'tp'}], ids=['one axis', 'all axes'])
def test_error_of_a_lowering(axes):
    assert lowering_error(equation_of('works', jnp.sin), MESH, axes) is None
    with contract('lowers a shard_map over an abstract mesh', 'to try primitives of other libraries'):
        assert str(lowering_error(equation_of('checks', check_type), MESH, axes)) == 'the type has changed'


def test_missing_lowering_for_a_platform_is_no_error():
    with contract('says that a primitive has no lowering for a platform', 'to plan for other devices'):
        assert lowering_error(equation_of('for_other_devices'), MESH, {'fsdp'}) is None
