"""All sharding strategies of the example give equal results, on 1 to 8 devices."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from examples.llama.data import load_corpus
from examples.llama.model import ACTIVATIONS, ModelConfig
from examples.llama.settings import make_helper
from examples.llama.strategies import STRATEGIES, Strategy, in_stages
from examples.llama.trainer import Trainer
from examples.llama.training import (
    OptimizerConfig,
    TrainState,
    make_init,
    make_optimizer,
    make_train_step,
    sequence_losses,
)
from scalax.sharding import NamedSharding
from scalax.sharding import PartitionSpec as P

STEPS, BATCH, SEQUENCE, SEED = 6, 8, 16, 3
MODEL = ModelConfig(width=32, layers=2, heads=4, kv_heads=2)
DROPOUT = dataclasses.replace(MODEL, dropout=0.1)
OPTIMIZER = OptimizerConfig(steps=STEPS, warmup=2)


@pytest.fixture(scope='module', autouse=True)
def compile_quickly() -> Iterator[None]:
    """Compilation takes most of the time here, and optimizations do not change shardings."""
    before = jax.config.read('jax_disable_most_optimizations')
    jax.config.update('jax_disable_most_optimizations', True)
    yield
    jax.config.update('jax_disable_most_optimizations', before)


@functools.cache
def batches() -> list[np.ndarray]:
    corpus = load_corpus((), SEQUENCE)
    return [corpus.batch(BATCH, SEQUENCE, SEED, step) for step in range(STEPS)]


@functools.cache
def unsharded(model: ModelConfig = MODEL) -> tuple[list[float], TrainState]:
    """The reference run: `jax.jit` on one device, without scalax."""
    optimizer = make_optimizer(OPTIMIZER)
    state = jax.jit(make_init(model, optimizer))(jax.random.key(SEED))
    train_step = jax.jit(make_train_step(model, optimizer))
    losses = []
    for batch in batches():
        state, loss = train_step(state, batch)
        losses.append(float(loss))
    return losses, state


@functools.cache
def unsharded_evaluation() -> np.ndarray:
    """The evaluation of the final state of `unsharded`."""
    evaluate = jax.jit(functools.partial(sequence_losses, model=MODEL))
    return np.asarray(evaluate(unsharded()[1].params, batches()[0]))


@functools.cache
def make_trainer(name: str, devices: int, model: ModelConfig = MODEL, stages: int = 1) -> Trainer:
    strategy = STRATEGIES[name]
    if stages > 1:
        strategy = in_stages(strategy, stages, microbatches=2)
    helper = make_helper(strategy, None, jax.devices()[:devices])
    return Trainer(helper, strategy, model, OPTIMIZER)


def path_to_leaf(state: TrainState) -> dict[str, jax.Array]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in leaves}


def train(trainer: Trainer, state: TrainState) -> tuple[TrainState, list[float]]:
    losses = []
    for batch in batches():
        state, loss = trainer.train_step(state, trainer.to_devices(batch))
        losses.append(float(loss))
    assert loss.sharding.is_fully_replicated
    assert loss.sharding.device_set == set(trainer.helper.mesh.devices.flat)
    return state, losses


def assert_placed(trainer: Trainer, state: TrainState) -> None:
    """Asserts that every leaf of the state has the sharding of the strategy's rule."""
    shardings = trainer.helper.match_sharding_rule(trainer.strategy.state, state)
    for (path, leaf), sharding in zip(path_to_leaf(state).items(), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), (path, leaf.sharding, sharding)


# On eight devices; with fewer, the same code runs with other sizes of axes. zero2 shards the state like
# zero1, and the gradients too; fsdp_tp_sp includes the shardings of fsdp_tp, which trains with dropout below.
RUNS = [
    *((name, 8) for name in STRATEGIES if name not in ('zero1', 'fsdp_tp')),
    pytest.param('zero1', 8, marks=pytest.mark.slow),
    pytest.param('fsdp_tp', 8, marks=pytest.mark.slow),
    pytest.param('fsdp_tp', 1, marks=pytest.mark.slow),
    pytest.param('fsdp_tp_sp', 4, marks=pytest.mark.slow),
    pytest.param('zero2', 2, marks=pytest.mark.slow),
]


@pytest.mark.medium
@pytest.mark.sampled(4)
@pytest.mark.parametrize(('name', 'devices'), RUNS)
def test_training_repeats_the_unsharded_run(
    name: str, devices: int, capfd: pytest.CaptureFixture[str]
) -> None:
    expected_losses, expected_state = unsharded()
    trainer = make_trainer(name, devices)
    state = trainer.init(jax.random.key(SEED))
    assert_placed(trainer, state)
    state, losses = train(trainer, state)
    assert_placed(trainer, state)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert int(state.step) == STEPS
    expected_leaves = path_to_leaf(expected_state._replace(rng=None))
    for path, leaf in path_to_leaf(state._replace(rng=None)).items():
        np.testing.assert_allclose(leaf, expected_leaves[path], rtol=1e-3, atol=1e-5, err_msg=path)
    if devices == 8:
        evaluation = trainer.sequence_losses(state.params, trainer.to_devices(batches()[0]))
        np.testing.assert_allclose(evaluation, unsharded_evaluation(), rtol=1e-5)
    # XLA warns if it can only convert between two shardings by replicating an array.
    assert 'Involuntary full rematerialization' not in capfd.readouterr().err


@pytest.mark.slow
def test_random_values_do_not_depend_on_the_sharding() -> None:
    trainer = make_trainer('fsdp_tp', 8, DROPOUT)
    _, losses = train(trainer, trainer.init(jax.random.key(SEED)))
    np.testing.assert_allclose(losses, unsharded(DROPOUT)[0], rtol=1e-5)
    assert losses != unsharded()[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    [pytest.param(name, marks=[] if name == 'fsdp_tp' else pytest.mark.slow) for name in STRATEGIES],
)
def test_pipeline_stages_repeat_the_unsharded_run(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(name, 8, DROPOUT, stages=2)
    state = trainer.init(jax.random.key(SEED))
    layers = state.params['layers']['up']
    assert layers.sharding.shard_shape(layers.shape)[0] == MODEL.layers // 2
    state, losses = train(trainer, state)
    assert_placed(trainer, state)
    expected_losses, expected_state = unsharded(DROPOUT)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    expected_leaves = path_to_leaf(expected_state._replace(rng=None))
    for path, leaf in path_to_leaf(state._replace(rng=None)).items():
        np.testing.assert_allclose(leaf, expected_leaves[path], rtol=1e-3, atol=1e-5, err_msg=path)
    evaluation = trainer.sequence_losses(state.params, trainer.to_devices(batches()[0]))
    unsharded_losses = jax.jit(functools.partial(sequence_losses, model=MODEL))
    np.testing.assert_allclose(
        evaluation, unsharded_losses(jax.device_get(state.params), batches()[0]), rtol=1e-5
    )
    assert 'Involuntary full rematerialization' not in capfd.readouterr().err


MU, NU = 'opt_state/1/0/mu', 'opt_state/1/0/nu'

# Written by hand, for eight devices: the spec of a leaf and the shape of the part a device keeps.
EXPECTED = {
    'dp': {
        'params/layers/up': (P(), (2, 32, 128)),
        f'{MU}/layers/up': (P(), (2, 32, 128)),
        'params/embed': (P(), (256, 32)),
    },
    'zero1': {
        'params/layers/up': (P(), (2, 32, 128)),
        f'{MU}/layers/up': (P(None, None, 'dp'), (2, 32, 16)),
        f'{NU}/layers/down': (P(None, 'dp'), (2, 16, 32)),
        f'{NU}/final_norm': (P('dp'), (4,)),
        'opt_state/1/0/count': (P(), ()),
    },
    'zero2': {
        'params/layers/up': (P(), (2, 32, 128)),
        f'{NU}/layers/up': (P(None, None, 'dp'), (2, 32, 16)),
    },
    'fsdp': {
        'params/layers/up': (P(None, None, 'fsdp'), (2, 32, 16)),
        f'{MU}/layers/up': (P(None, None, 'fsdp'), (2, 32, 16)),
        f'{NU}/layers/down': (P(None, 'fsdp'), (2, 16, 32)),
        'params/embed': (P('fsdp'), (32, 32)),
        'params/final_norm': (P(), (32,)),
        'step': (P(), ()),
    },
    'fsdp_tp': {
        'params/layers/up': (P(None, 'fsdp', 'tp'), (2, 8, 64)),
        f'{MU}/layers/up': (P(None, 'fsdp', 'tp'), (2, 8, 64)),
        f'{NU}/layers/down': (P(None, 'tp', 'fsdp'), (2, 64, 8)),
        'params/layers/key': (P(None, 'fsdp', 'tp'), (2, 8, 8)),
        'params/embed': (P('fsdp', 'tp'), (64, 16)),
        'params/unembed': (P('fsdp', 'tp'), (8, 128)),
        f'{NU}/layers/mlp_norm': (P(), (2, 32)),
        'rng': (P(), ()),
    },
    'fsdp_tp_sp': {
        'params/layers/output': (P(None, 'tp', 'fsdp'), (2, 16, 8)),
        f'{NU}/unembed': (P('fsdp', 'tp'), (8, 128)),
        'params/embed': (P('tp', 'fsdp'), (128, 8)),
    },
}


@pytest.mark.medium
@pytest.mark.sampled(7)
@pytest.mark.parametrize('name', STRATEGIES)
def test_state_is_created_with_the_hand_written_shardings(name: str) -> None:
    trainer = make_trainer(name, 8)
    leaves = path_to_leaf(trainer.init(jax.random.key(SEED)))
    for path, (spec, part) in EXPECTED[name].items():
        leaf = leaves[path]
        expected = NamedSharding(trainer.helper.mesh, spec)
        assert leaf.sharding.is_equivalent_to(expected, leaf.ndim), (path, leaf.sharding)
        assert {shard.data.shape for shard in leaf.addressable_shards} == {part}, path


@pytest.mark.parametrize('name', STRATEGIES)
def test_batch_is_split_over_the_data_axes_alone(name: str) -> None:
    trainer = make_trainer(name, 8)
    batch = trainer.to_devices(batches()[0])
    parts = 4 if name.startswith('fsdp_tp') else 8
    assert {shard.data.shape for shard in batch.addressable_shards} == {(BATCH // parts, SEQUENCE + 1)}
    np.testing.assert_array_equal(batch, batches()[0])


def test_no_device_ever_holds_an_unsharded_state() -> None:
    trainer = make_trainer('fsdp', 8)
    memory = trainer.init.lower(jax.random.key(SEED)).compile().memory_analysis()
    state = jax.eval_shape(make_init(MODEL, make_optimizer(OPTIMIZER)), jax.random.key(SEED))
    state_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < state_bytes / 4


@pytest.mark.parametrize('strategy', STRATEGIES.values(), ids=STRATEGIES)
def test_strategies_bind_the_names_of_the_model(strategy: Strategy) -> None:
    assert set(strategy.activations) <= set(ACTIVATIONS)
    assert set(strategy.data_axes) <= set(strategy.mesh)
    assert list(strategy.mesh.values()).count(-1) == 1
    for name, spec in strategy.activations.items():
        assert len(spec) <= len(ACTIVATIONS[name])
