"""Tests that the models of benchmarks/unchanged compute the same on eight devices as on one."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from benchmarks.unchanged.catalogue import all_models
from benchmarks.unchanged.model import Model, Strategy
from benchmarks.unchanged.values import ROWS, example, weights
from scalax.sharding import FSDPShardingRule, MeshShardingHelper, ShardingRule
from scalax.sharding import PartitionSpec as P

FSDP = Strategy('FSDP', {'fsdp': 8}, ('fsdp',))
FSDP_TP = Strategy('FSDP x TP', {'fsdp': 4, 'tp': 2}, ('fsdp',))
# These options halve the compile time.
QUICKLY = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}
MODELS = {model.name: model for model in all_models('small')}
# Compiling takes most of the time of a test. These three models cover the features of the others: a loop over
# blocks, contractions over the batch, sorted tokens, and custom gradients. Another test checks that every
# model is partitioned, and `make test-all` computes all of them.
COMPUTED = ('decoder, grouped heads', 'experts, sorted tokens', 'flash attention, custom_vjp')


def arguments(model: Model) -> tuple[Any, Any, jax.Array]:
    """Returns arguments of a loss: parameters, a batch and a key."""
    batch = example(model)
    kinds = jax.tree.map(lambda x: (x.shape, x.dtype), model.batch(ROWS * model.rows))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), batch) == kinds
    return weights(model), batch, jax.random.key(2)


def on_one_device(model: Model, args: tuple[Any, Any, jax.Array]) -> Any:
    """Returns the loss and its gradients, computed on one device."""
    plain = jax.value_and_grad(model.loss, has_aux=model.has_aux)
    result = jax.tree.map(np.asarray, jax.jit(plain, compiler_options=QUICKLY)(*args))
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(result))
    assert max(np.max(np.abs(x)) for x in jax.tree.leaves(result[1])) > 1e-3
    return result


def placed(model: Model, strategy: Strategy) -> tuple[MeshShardingHelper, ShardingRule]:
    """Returns the mesh of a strategy, and the rule that shards all parameters of a model, however small."""
    helper = MeshShardingHelper(list(strategy.mesh.values()), list(strategy.mesh))
    fsdp = model.fsdp_rule or FSDPShardingRule('fsdp', min_fsdp_size=1)
    return helper, model.columns_and_rows if 'tp' in strategy.mesh else fsdp


def compiled(model: Model, strategy: Strategy, by_hand: bool) -> Any:
    """Returns the function of the loss and its gradients over a mesh, partitioned or hand-written."""
    helper, rule = placed(model, strategy)

    def loss(params: Any, batch: Any, key: Any) -> Any:
        if by_hand and model.hand_loss is not None:
            return model.hand_loss(params, batch, key, strategy.batch_axes)
        return model.loss(params, batch, key)

    names = {name: strategy.bound(spec) for name, spec in model.hand.items()} if by_hand else {}
    return helper.sjit(
        jax.value_and_grad(loss, has_aux=model.has_aux),
        in_shardings=(rule, strategy.batch(model), P()),
        out_shardings=(P(), rule),
        annotation_shardings=names,
        batch_argnums=() if by_hand else 1,
        compiler_options=QUICKLY,
    )


def ten_losses(model: Model, strategy: Strategy | None, args: tuple[Any, Any, jax.Array]) -> list[float]:
    """Returns the losses of ten steps of AdamW, partitioned over a mesh or on one device."""
    params, batch, key = args
    optimizer = optax.adamw(1e-3)

    def step(state: Any, batch: Any, key: Any) -> Any:
        params, opt_state = state
        value, grads = jax.value_and_grad(model.loss, has_aux=model.has_aux)(params, batch, key)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), jax.tree.leaves(value)[0]

    state = (
        params,
        jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(optimizer.init, params)),
    )
    if strategy is None:
        run: Any = jax.jit(step, compiler_options=QUICKLY)
    else:
        helper, rule = placed(model, strategy)
        run = helper.sjit(
            step,
            in_shardings=(rule, strategy.batch(model), P()),
            out_shardings=(rule, P()),
            donate_argnums=0,
            compiler_options=QUICKLY,
        )
        state = helper.shard(state, rule)
        assert not run.explain_propagation(state, batch, key).reason
    losses = []
    for i in range(10):
        state, loss = run(state, batch, jax.random.fold_in(key, i))
        losses.append(float(loss))
    return losses


def assert_equal(actual: Any, expected: Any) -> None:
    for actual_leaf, expected_leaf in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = max(0.1, np.max(np.abs(expected_leaf)))
        np.testing.assert_allclose(actual_leaf, expected_leaf, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.medium
@pytest.mark.sampled(11)
@pytest.mark.parametrize('name', MODELS)
def test_each_model_is_partitioned(name: str) -> None:
    step = compiled(MODELS[name], FSDP_TP, by_hand=False)
    report = step.explain_propagation(*arguments(MODELS[name]))
    assert report.collectives and not report.reason


@pytest.mark.slow
@pytest.mark.parametrize('name', COMPUTED)
def test_partitioned_loss_equals_one_device(name: str) -> None:
    args = arguments(MODELS[name])
    step = compiled(MODELS[name], FSDP_TP, by_hand=False)
    assert_equal(step(*args), on_one_device(MODELS[name], args))


@pytest.mark.slow
@pytest.mark.parametrize('by_hand', [False, True], ids=['partitioned', 'by hand'])
@pytest.mark.parametrize('name', MODELS)
def test_every_strategy_equals_one_device(name: str, by_hand: bool) -> None:
    args = arguments(MODELS[name])
    expected = on_one_device(MODELS[name], args)
    for strategy in (FSDP, FSDP_TP):
        assert_equal(compiled(MODELS[name], strategy, by_hand)(*args), expected)


def assert_ten_steps(name: str, *strategies: Strategy) -> None:
    args = arguments(MODELS[name])
    expected_losses = ten_losses(MODELS[name], None, args)
    assert np.all(np.isfinite(expected_losses))
    # The comparison is meaningless if the model does not learn.
    assert max(expected_losses) - min(expected_losses) > 1e-3 * abs(expected_losses[0])
    for strategy in strategies:
        np.testing.assert_allclose(ten_losses(MODELS[name], strategy, args), expected_losses, rtol=1e-4)


@pytest.mark.slow
def test_ten_steps_of_a_recurrent_cell() -> None:
    assert_ten_steps('recurrent cell', FSDP_TP)


@pytest.mark.slow
@pytest.mark.parametrize('name', MODELS)
def test_ten_steps_equal_one_device(name: str) -> None:
    assert_ten_steps(name, FSDP, FSDP_TP)
