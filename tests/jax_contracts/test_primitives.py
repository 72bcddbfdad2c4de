"""Tests that `scalax/_jax/primitives` distinguishes JAX primitives from primitives of other libraries."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

from scalax._jax import primitives
from scalax._jax.equations import WITH_JAXPRS, all_equations
from scalax._jax.primitives import KERNEL, primitive_name
from scalax._jaxpr.dim_rules import RULES
from tests.support.contracts import contract

NAMES = sorted({*RULES, *WITH_JAXPRS, KERNEL})


@pytest.mark.parametrize('name', NAMES)
def test_each_primitive_of_the_tables_is_listed(name: str) -> None:
    # This version of JAX may lack primitives of `_NOT_IN_ALL`.
    is_listed = name in primitives._jax_primitives(True) or name in primitives._NOT_IN_ALL
    with contract(f'lists its primitive {name!r} in a public module', 'to tell it from one of somebody else'):
        assert is_listed


# Primitives without a rule, and why they need none.
OPAQUE = {
    **dict.fromkeys(('after_all', 'create_token'), 'tokens have no dimensions'),
    **dict.fromkeys(('empty2', 'iota', 'rng_uniform'), 'it takes no array'),
    **dict.fromkeys(
        ('get', 'swap'), 'reads and writes of references: what a kernel does to them is not read'
    ),
    **dict.fromkeys(
        ('axis_index', 'ragged_all_to_all'),
        'a collective of blocks, inside of shard_map, which is not read',
    ),
    'custom_lin': 'it is gone where a gradient is taken',
    'custom_linear_solve': 'a solver may mix its rows: they are told as lost',
    'rng_bit_generator': 'bits of one key are drawn for all rows',
    'call': 'JAX binds it nowhere',
    'dce_sink': 'it has no result',
    'stage': 'JAX binds it outside of traces only',
    KERNEL: '_spmd/operations/pallas_kernels reads its grid',
}


@pytest.mark.parametrize('name', sorted(primitives._jax_primitives(True)))
def test_each_primitive_of_jax_has_a_rule_or_a_reason_for_none(name: str) -> None:
    with contract(f'has no primitive {name!r} that nobody has looked at', 'to lose no rows without a word'):
        assert (name in RULES) + (name in WITH_JAXPRS) + (name in OPAQUE) == 1


def test_primitives_of_every_version_are_no_exceptions() -> None:
    assert set(NAMES) >= primitives._NOT_IN_ALL


def test_traced_primitives_are_listed() -> None:
    def fun(x: Any) -> Any:
        return jax.jit(jnp.sin)(x) @ jax.lax.scan(lambda c, y: (c + y, c), x[0], x)[1].T

    with contract('binds the primitives that it lists', 'to know them'):
        for equation in all_equations(jax.make_jaxpr(fun)(np.ones((3, 3)))):
            assert primitive_name(equation) == equation.primitive.name


@pytest.mark.parametrize('name', ['sin', 'closed_call', 'stack', KERNEL])
def test_primitives_that_share_a_name_with_jax_are_not_jax_primitives(name: str) -> None:
    assert pallas
    equation = SimpleNamespace(primitive=jax.extend.core.Primitive(name))
    with contract('compares primitives by identity', 'to tell its own from those of others'):
        assert primitive_name(equation) == ''  # type: ignore[arg-type]
    assert primitive_name(SimpleNamespace(primitive=jax.extend.core.Primitive('my own'))) == 'my own'


@pytest.mark.medium
def test_kernels_are_not_loaded_with_jax() -> None:
    code = (
        'import sys, jax; from scalax._jax import primitives; '
        'names = primitives._jax_primitives(False)\n'
        "print('jax.experimental.pallas' in sys.modules, 'sin' in names)"
    )
    done = subprocess.run(
        [sys.executable, '-c', code], capture_output=True, text=True, timeout=500, check=True
    )
    with contract('leaves Pallas alone until it is asked for', 'to look for kernels only then'):
        assert done.stdout.split() == ['False', 'True']
