"""Primitives of other libraries, which have no rules, even if they reuse names of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType

from scalax._jax.equations import WITH_JAXPRS
from scalax._jaxpr.dim_rules import RULES
from scalax.errors import PartitioningWarning
from scalax.sharding import MeshShardingHelper
from tests.support.partitioned import P, assert_equal, partitioned

pytestmark = pytest.mark.medium

TABLED = sorted({*RULES, *WITH_JAXPRS, 'pallas_call'})
W = np.eye(8, dtype='f')
X = np.linspace(-1, 1, 128, dtype='f').reshape(16, 8)


def other(name):
    """Returns a primitive of another library, with a name of JAX, that returns its first operand."""
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda *operands: operands[0])
    mlir.register_lowering(primitive, lambda context, *operands: [operands[0]])
    return primitive


def test_primitives_that_reuse_names_of_jax_gather_all_examples():
    """One step uses all of them, and the report names each."""
    primitives = [other(name) for name in TABLED]

    def fun(w, x):
        return [primitive.bind(jnp.tanh(x @ w), w) @ w for primitive in primitives]

    step, run = partitioned(fun, W, X)
    assert_equal(run(), [jnp.tanh(X)] * len(TABLED))
    reported = {row.primitive for row in step.collective_rows if row.what == 'examples'}
    assert reported == {*TABLED} - {'add_any'}  # which is reported as add


def comparing(name):
    """Returns a primitive of another library that fails in ``jax.shard_map``."""

    def check(x):
        if AxisType.Manual in jax.typeof(x).sharding.mesh.axis_types:
            raise ValueError('the type has changed')
        return x

    primitive = other(name)
    mlir.register_lowering(primitive, mlir.lower_fun(check, multiple_results=False))
    return primitive


@pytest.mark.parametrize('mesh', [{'fsdp': 8}, {'fsdp': 4, 'tp': 2}], ids=['fsdp', 'tp'])
def test_primitives_that_fail_in_shard_map_run_without_partitioning(mesh):
    primitive = comparing('comparing')

    def loss(w, x):
        def cell(x, _):
            return primitive.bind(jnp.tanh(x @ w)), None

        return jnp.mean(lax.scan(cell, x, length=2)[0])

    helper = MeshShardingHelper([*mesh.values()], [*mesh])
    step = helper.sjit(loss, in_shardings=(P('fsdp'), P('fsdp')), out_shardings=P(), batch_argnums=1)
    with pytest.warns(PartitioningWarning, match='comparing.*ValueError: the type has changed') as warnings:
        value = step(W, X)
    assert 'test_unknown_primitives.py' in str(warnings[0].message)
    np.testing.assert_allclose(value, jax.jit(loss)(W, X), atol=1e-6)


def test_primitives_of_other_devices_are_partitioned():
    """A plan may be for devices that are not here."""
    primitive = Primitive('for_other_devices')
    primitive.def_abstract_eval(lambda x: x)
    step, _ = partitioned(lambda w, x: primitive.bind(x @ w), W, X)
    assert [row.primitive for row in step.collective_rows if row.what == 'examples'] == ['for_other_devices']
