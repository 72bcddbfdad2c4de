"""Random programs on local shards match one device, on meshes with every kind of axis.

Values are compared in float64: a wrong element, or a wrong random bit, stands out from rounding.
"""

import jax
import numpy as np
import pytest

from tests.support.partitioned import FSDP, HSDP, TP, P, assert_equal, partitioned
from tests.support.random_programs import SIZE, random_program

pytestmark = pytest.mark.medium

SEQUENCES = {'fsdp': 2, 'seq': 2, 'tp': 2}
# The mesh, and the specs of the matrix and of the examples.
MESHES = [
    (FSDP, P('fsdp'), P('fsdp')),
    (HSDP, P('fsdp'), P(('replica', 'fsdp'))),
    (TP, P('fsdp', 'tp'), P('fsdp')),
    (TP, P('tp', 'fsdp'), P('fsdp', 'tp')),
    (TP, P(('fsdp', 'tp')), P(None, 'fsdp')),
    (SEQUENCES, P('fsdp', 'tp'), P('fsdp', 'seq')),
    (SEQUENCES, P('tp', ('fsdp', 'seq')), P('seq', 'fsdp')),
    (FSDP, P(None, 'fsdp'), P(None, 'fsdp')),
]


@pytest.mark.sampled(40)
@pytest.mark.parametrize('seed', range(480))
def test_values_match_one_device(seed):
    random = np.random.default_rng(seed)
    mesh, spec, batch_spec = MESHES[seed % len(MESHES)]
    with jax.enable_x64(True):
        w, x = random.uniform(-0.5, 0.5, (2, SIZE, SIZE))
        fun = random_program(random)
        _, run = partitioned(fun, w, x, mesh, specs=[spec], batch_specs=[batch_spec])
        assert_equal(run(), jax.jit(fun)(w, x), 1e-9)
