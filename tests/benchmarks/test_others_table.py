"""Tests of the table of third-party models: its lines, its ideal bytes, and how it compares values."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from benchmarks.unchanged import decoders, others, others_table, values
from tests.support import tpu_compiler
from tests.support.benchmark_program import ended

SMALL, LARGE = decoders.models('small')[0], decoders.models('large')[0]


def test_lines(monkeypatch):
    def measured(model, strategy, topology, variant):
        return {'moved': 6.0, 'peak': 1.25, 'seconds': 0.125} if variant == 'partitioned' else None

    monkeypatch.setattr(others_table, 'measured', measured)
    monkeypatch.setattr(others_table, 'difference', lambda model: 2e-6 if model is SMALL else 1.0)
    monkeypatch.setattr(others_table, 'ideal', lambda model, topology: 8.0)
    head, rule, row = others_table.lines([(SMALL, LARGE)], 'v5p:4x4x4')
    assert len(head) == len(rule) == len(row)
    assert [cell.strip() for cell in row.split('|')[1:-1]] == [
        *(LARGE.name, '2e-06', '8 GiB', '0.75', '-', '1.25 GiB', '-', '0.125 s', '-')
    ]


@tpu_compiler.needed
def test_the_ideal_of_a_decoder():
    weights = 2.25  # GiB, and some norms: gathered twice and summed, each by an all-reduce
    assert others_table.ideal(LARGE, 'v5e:2x4') == pytest.approx(7 / 8 * 6 * weights, rel=1e-3)


@pytest.mark.slow
def test_a_step_on_eight_devices_is_compared_with_one():
    assert 0 < values.difference(SMALL) < 1e-4


@pytest.mark.medium
def test_a_step_that_is_not_partitioned_shows_nothing():
    product = dataclasses.replace(
        SMALL,
        init=lambda key: jnp.ones((64, 64)),
        batch=lambda rows: jax.ShapeDtypeStruct((rows, 64), 'float32'),
        loss=lambda params, batch, key: jnp.mean(batch @ params),
        example=None,
    )
    refusal = r'would show nothing: jax\.disable_jit is active'
    with jax.disable_jit(), pytest.raises(ValueError, match=refusal):
        values.difference(product)


def test_difference_is_relative_to_the_largest_value_of_an_array():
    expected = {'a': jnp.array([1.0, 100.0]), 'zero': jnp.array([0.0, 1e-9])}
    assert values.largest_difference(expected, expected) == 0
    assert values.largest_difference({**expected, 'a': jnp.array([2.0, 100.0])}, expected) == pytest.approx(
        0.01
    )
    assert values.largest_difference({**expected, 'zero': jnp.array([1e-9, 0.0])}, expected) < 1e-7
    assert values.largest_difference({**expected, 'zero': jnp.array([1.0, 0.0])}, expected) > 1


def test_without_the_libraries(monkeypatch):
    def missing(size):
        raise ModuleNotFoundError("No module named 'transformers'")

    monkeypatch.setattr(others, 'models', missing)
    message = ended(monkeypatch, '--only', 'others')
    assert message.startswith('No module named \'transformers\'\n`make bench ARGS="--only others"` installs')
