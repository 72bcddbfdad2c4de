"""Tests that LLaMA with hand-written pipeline stages on eight devices equals the example on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from benchmarks.stages import table
from benchmarks.stages.by_hand import Pipeline, train_step
from examples.llama.model import ModelConfig, init_params
from examples.llama.training import sequence_losses
from tests.support import gpu_compiler

CONFIG = ModelConfig(width=32, layers=8, heads=4, kv_heads=2)
# AdamW scales gradients near zero to full steps: its default epsilon would amplify their rounding errors.
OPTIMIZER = optax.adamw(1e-3, b2=0.95, eps=1e-6)
STEPS, ROWS = 3, 32


@pytest.fixture(scope='module')
def batches() -> Any:
    return jax.random.randint(jax.random.key(1), (STEPS, ROWS, 9), 0, CONFIG.vocabulary)


@pytest.fixture(scope='module')
def on_one_device(batches: Any) -> tuple[Any, list[float]]:
    """Returns the parameters after the steps, and the loss of each step."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return jnp.mean(sequence_losses(params, tokens, CONFIG))

    @jax.jit
    def step(params: Any, moments: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, moments = OPTIMIZER.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, value

    params = init_params(jax.random.key(0), CONFIG)
    moments, losses = OPTIMIZER.init(params), []
    for tokens in batches:
        params, moments, value = step(params, moments, tokens)
        losses.append(float(value))
    return params, losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ('mesh', 'options'),
    [
        pytest.param((2, 2, 2), {'parts': 4}, id='GPipe, with FSDP and TP'),
        pytest.param((4, 2, 1), {'parts': 8, 'rounds': 2}, id='circular'),
        pytest.param((2, 4, 1), {'parts': 4, 'gathered': 'step'}, id='weights gathered once'),
        pytest.param((2, 2, 2), {'parts': 8, 'rounds': 2, 'hop': 2}, id='hops beside computing'),
    ],
)
def test_hand_written_pipeline_equals_one_device(
    mesh: tuple[int, ...], options: dict[str, Any], batches: Any, on_one_device: tuple[Any, list[float]]
) -> None:
    devices = np.array(jax.devices()).reshape(mesh)
    pipeline = Pipeline(Mesh(devices, ('stage', 'fsdp', 'tp')), **options)
    step, (_, shardings) = train_step(pipeline, CONFIG, OPTIMIZER, 'float32')
    params = pipeline.stacked(init_params(jax.random.key(0), CONFIG))
    state, losses = jax.device_put((params, OPTIMIZER.init(params)), shardings), []
    for tokens in batches:
        state, value = step(state, tokens)
        losses.append(float(value))
    expected, expected_losses = on_one_device
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-5)
    jax.tree.map(
        lambda actual_leaf, expected_leaf: np.testing.assert_allclose(
            actual_leaf, expected_leaf, rtol=0, atol=1e-5
        ),
        jax.device_get(state[0]),
        jax.device_get(pipeline.stacked(expected)),
    )


def test_the_ticks_of_a_schedule() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2, 1), ('stage', 'fsdp', 'tp'))
    assert Pipeline(mesh, parts=8).ticks == 8 + 3
    assert Pipeline(mesh, parts=8, rounds=2).ticks == 16 + 3
    assert Pipeline(mesh, parts=8, hop=2).ticks == 8 + 6


@pytest.mark.slow
@gpu_compiler.needed
def test_collectives_on_the_slow_network(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Only point-to-point hops between stages and the gradients of shared parameters cross it."""
    monkeypatch.setitem(table.MODELS, '8B', CONFIG)
    monkeypatch.setattr(table, 'SEQUENCE', 8)
    case = table.Case('8B', 'h100:2x4', 1, (table.gpipe(2, 2, 2, 4), table.Layout({'fsdp': -1})))
    plan = case.plan(case.layouts[0])
    crossing = [row for row in plan.collectives if 'dcn' in row.networks]
    permutes = sum(row.count for row in crossing if row.kind == 'collective-permute')
    ticks, doors = 4 + 1, 2 * (2 - 1)
    assert permutes == 2 * (ticks + doors)
    shared = 2 * CONFIG.vocabulary * CONFIG.width * 2 / 4  # bytes of embed and unembed along stage
    others = [row for row in crossing if row.kind != 'collective-permute']
    assert {row.kind for row in others} == {'all-reduce'}
    assert shared <= sum(row.bytes * row.count for row in others) < 1.5 * shared
    monkeypatch.setattr(table, 'cases', lambda: [case])
    monkeypatch.setattr(table.Case, 'plan', lambda *_: plan)
    table.show('8B', 'h100')
    lines = [line.split('|')[1:-1] for line in capsys.readouterr().out.splitlines()]
    assert [cell.strip() for cell in lines[0]] == list(table.HEAD)
    assert [len(line) for line in lines] == [len(table.HEAD)] * 4
    assert [line[9].strip() for line in lines[2:]] == ['1.25', '1']
