"""Random programs on blocks compute what one device does, on the meshes of FSDP and of HSDP."""

import jax
import numpy as np
import pytest

from tests.follow.test_random_programs import program
from tests.support.partitioned import FSDP, HSDP, assert_equal, partitioned

pytestmark = pytest.mark.medium

# These draw programs with branches that compute nothing, and with `reshard` of constants.
SEEDS = [*range(12), 41, 142]


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
