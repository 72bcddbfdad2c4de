"""examples/frameworks: five libraries with the same scalax code."""

import importlib

import jax
import numpy as np
import pytest

from examples.frameworks.model import FRAMEWORKS
from examples.frameworks.sizes import SEQUENCE
from examples.frameworks.training import train, write
from examples.llama.data import load_corpus
from scalax.sharding import MeshShardingHelper

CORPUS = load_corpus([], SEQUENCE)


def program(framework):
    if framework == 'haliax' and not hasattr(jax.core, 'is_constant_dim'):
        pytest.skip('haliax uses what newer JAX lacks')
    return importlib.import_module(f'examples.frameworks.{framework}').PROGRAM


def mesh(fsdp, tp):
    return MeshShardingHelper([fsdp, tp], ['fsdp', 'tp'], devices=jax.devices()[: fsdp * tp])


@pytest.mark.slow
@pytest.mark.parametrize(
    'framework',
    [name if name == 'equinox' else pytest.param(name, marks=pytest.mark.slow) for name in FRAMEWORKS],
)
def test_losses_of_a_continued_run_match_one_device(framework, tmp_path):
    its = program(framework)
    expected, _ = train(its, mesh(1, 1), CORPUS, 4)
    first, _ = train(its, mesh(4, 2), CORPUS, 2, tmp_path / 'run')
    rest, state = train(its, mesh(2, 4), CORPUS, 4, tmp_path / 'run')
    np.testing.assert_allclose([*first, *rest], expected, rtol=1e-4)
    assert expected[-1] < expected[0] - 0.5
    assert len(write(its, mesh(2, 4), state, CORPUS, length=8).encode()) >= SEQUENCE + 8
