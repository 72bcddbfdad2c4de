"""Slices of a few examples, or of a few rows of state: devices send the slice instead of its operand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.partitioned import FSDP, HSDP, assert_equal, collectives, partitioned, with_gradients

pytestmark = pytest.mark.medium

W, X = np.split(np.random.default_rng(0).normal(size=(48, 16)), [16])
GATHERED = {'all_gather state gathered for dot_general': 1}


SENT = {'all_reduce examples moved for slice': 1}
ALL = {'all_gather examples gathered for slice': 1}
PRODUCT = {'all_reduce sum over blocks of state for a result': 1}
# The collectives of each program if examples are sharded, and if features are sharded.
PROGRAMS = {
    'first': (lambda w, x: (x @ w)[0], GATHERED | SENT, {'all_reduce sum over examples for a result': 1}),
    'element': (lambda w, x: jnp.where(x[3, 2] > 0, x, 1 - x), SENT, SENT),
    'strided': (lambda w, x: jnp.sin(x[3::9]).sum(0), SENT, {}),
    'of both': (lambda w, x: x[4:8, 3:5] * w[2:6, 1:3], SENT | PRODUCT, SENT | PRODUCT),
    'integers': (lambda w, x: jnp.int32(x * 9)[-4:], SENT, {}),
    'all features': (lambda w, x: x[2:4, ::-1], SENT, {'all_gather examples gathered for rev': 1}),
    # Reducing half of them sends as many bytes as gathering all of them.
    'half': (lambda w, x: x[:16], ALL, {}),
    'booleans': (lambda w, x: (x > 0)[2:4], ALL, {}),
    'one by one': (lambda w, x: sum(jnp.sin(x[i]) for i in range(3)), ALL, {}),
}


@pytest.mark.parametrize('dim', [0, 1], ids=['examples', 'features'])
def test_collectives_of_slices(dim):
    with jax.enable_x64(True):
        sent = {
            name: collectives(partitioned(fun, W, X, batch_dim=dim)[0])
            for name, (fun, *_) in PROGRAMS.items()
        }
    assert sent == {name: expected[dim] for name, (_, *expected) in PROGRAMS.items()}


@pytest.mark.parametrize(
    'mesh, dim',
    [(FSDP, 0), *[pytest.param(*case, marks=pytest.mark.slow) for case in ((HSDP, 0), (FSDP, 1))]],
)
def test_values_match_one_device(mesh, dim):
    def run_all(w, x):
        return [with_gradients(fun)(w, x) for fun, *_ in PROGRAMS.values()]

    with jax.enable_x64(True):
        _, run = partitioned(run_all, W, X, mesh, batch_dim=dim)
        assert_equal(run(), jax.jit(run_all)(W, X), 1e-12)
