"""Primitives of other libraries, which have no rules, even if they reuse names of JAX."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from scalax._jax.equations import WITH_JAXPRS
from scalax._jaxpr.dim_rules import RULES
from tests.support.partitioned import assert_equal, partitioned

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
