"""Programs that look like others which run on blocks, and differ: their values are those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support.partitioned import FSDP, HSDP, assert_equal, partitioned

pytestmark = pytest.mark.medium

W, X = np.asarray(np.random.default_rng(0).normal(size=(2, 8, 8)), 'f')


def bits_of_integers(w, x):
    """Bits of integers are no maximum of them."""
    signs = jnp.int32(x * 100)
    return (
        lax.reduce_or(jnp.uint8(jnp.abs(x) * 50), (0,)),
        lax.reduce_and(signs, (0,)),
        lax.reduce_or(signs, (1,)),
    )


def product_of_booleans(w, x):
    """A product of booleans says whether any pair is true."""
    return (x > 1).T @ (x > 0.5), (x > 1).T @ (w > 0)


PROGRAMS = [bits_of_integers, product_of_booleans]


@pytest.mark.parametrize('fun', PROGRAMS, ids=lambda fun: fun.__name__)
@pytest.mark.parametrize('mesh', [FSDP, HSDP], ids=['fsdp', 'hsdp'])
def test_values_are_those_of_one_device(fun, mesh):
    _, run = partitioned(fun, W, X, mesh)
    assert_equal(run(), jax.jit(fun)(W, X))
