"""Tests of the benchmark on the local GPU: its arguments, its table, and its output without a GPU."""

import jax
import numpy as np
import optax
import pytest

from benchmarks import on_gpu
from benchmarks.on_gpu import Measured
from tests.support import ROOT


def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys):
    monkeypatch.setenv('XLA_PYTHON_CLIENT_PREALLOCATE', 'true')  # instead of the state that it ends with
    on_gpu.show('')
    assert capsys.readouterr().out == "no GPU is here, and nothing is measured: JAX has 'cpu'\n"


@pytest.mark.parametrize('scheduled', [0.1, None])
def test_line_of_a_measured_step(scheduled):
    line = on_gpu.line('a step', Measured(3 * 2**30, 4 * 2**30, 0.05, scheduled, 0.08))
    schedule, off = ('100.', '+25%') if scheduled else ('-', '-')
    assert line == f'| a step | 3.00 | 4.00 | -25.0% | 50.0 | {schedule} | 80.0 | {off} |'


@pytest.mark.medium
def test_arguments_have_values():
    params = {'w': jax.ShapeDtypeStruct((2000, 3), 'bfloat16')}
    state = jax.eval_shape(optax.adamw(1e-3).init, params)
    tokens, key = jax.ShapeDtypeStruct((4, 2000), 'int32'), jax.eval_shape(lambda: jax.random.key(0))
    structs = params, state, tokens, key
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    args = on_gpu.values(structs, jax.tree.map(lambda _: here, structs))

    def types(tree):
        return jax.tree.map(lambda leaf: f'{leaf.dtype}{list(leaf.shape)}', tree)

    assert types(args) == types(structs)
    assert np.std(args[0]['w'].astype('float32')) == pytest.approx(0.02 / 2**0.5, rel=0.1)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(args[1]))
    assert set(np.unique(args[2])) == set(range(1000))


def test_the_page_has_a_row_for_each_step():
    """The rows have the order of `on_gpu.STEPS`."""
    page = (ROOT / 'docs' / 'estimates.md').read_text(encoding='utf-8')
    part = page[page.index('## Steps that ran') :]
    rows = [
        line.split('|')[1].strip() for line in part[: part.index('Kernel times')].splitlines() if '|' in line
    ]
    assert rows[2:] == list(on_gpu.STEPS)
