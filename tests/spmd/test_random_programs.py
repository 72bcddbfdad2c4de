"""Random programs on blocks compute what one device does, on meshes of every kind of axis."""

import jax
import numpy as np
import pytest

from tests.follow.test_random_programs import program
from tests.support.partitioned import FSDP, HSDP, TP, P, assert_equal, partitioned

pytestmark = pytest.mark.medium

# These draw programs with branches that compute nothing, and with `reshard` of constants.
SEEDS = [*range(12), 41, 142]


BOTH = {'fsdp': 2, 'seq': 2, 'tp': 2}
# The mesh, and the specs of the matrix and of the examples.
OTHERS = [
    (TP, P('fsdp', 'tp'), P('fsdp')),
    (TP, P('tp', 'fsdp'), P('fsdp', 'tp')),
    (TP, P(('fsdp', 'tp')), P(None, 'fsdp')),
    (BOTH, P('fsdp', 'tp'), P('fsdp', 'seq')),
    (BOTH, P('tp', ('fsdp', 'seq')), P('seq', 'fsdp')),
]


@pytest.mark.parametrize(
    'seed', [*SEEDS, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(200, 320)]]
)
def test_random_programs_on_blocks(seed):
    random = np.random.default_rng(seed)
    w, x = random.uniform(-0.5, 0.5, (2, 16, 16)).astype(np.float32)
    fun = program(random)
    with jax.default_matmul_precision('highest'):
        _, run = partitioned(fun, w, x, [FSDP, HSDP][seed % 2])
        found, expected = run(), jax.jit(fun)(w, x)
    assert_equal(found, expected, 1e-4)


@pytest.mark.parametrize(
    'seed', [*range(20, 30), *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(400, 500)]]
)
def test_random_programs_with_other_axes(seed):
    random = np.random.default_rng(seed)
    mesh, spec, batch_spec = OTHERS[seed % len(OTHERS)]
    w, x = random.uniform(-0.5, 0.5, (2, 16, 16)).astype(np.float32)
    fun = program(random)
    with jax.default_matmul_precision('highest'):
        _, run = partitioned(fun, w, x, mesh, specs=[spec], batch_specs=[batch_spec])
        found, expected = run(), jax.jit(fun)(w, x)
    assert_equal(found, expected, 1e-4)
