"""Auto-sharding of the models of benchmarks/unchanged: its programs match one device."""

import math
from typing import Any

import jax
import numpy as np
import optax
import pytest

from scalax.plan import AutoShardingResult, autoshard
from tests.benchmarks.test_unchanged_models import MODELS, Model, arguments, ten_losses

OPTIMIZER = optax.adamw(1e-3)
SEARCHED = [name for name in MODELS if 'Pallas' not in name]  # an unpartitioned kernel is rejected


def found_losses(model: Model) -> tuple[AutoShardingResult, list[float]]:
    """Returns the result with memory for half of the state, and the losses of ten steps of its program."""
    params, batch, key = arguments(model)

    def step(state: Any, batch: Any, key: Any) -> Any:
        params, opt_state = state
        value, grads = jax.value_and_grad(model.loss, has_aux=model.has_aux)(params, batch, key)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), jax.tree.leaves(value)[0]

    shapes = jax.eval_shape(OPTIMIZER.init, params)
    state = params, jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    result = autoshard(
        step,
        (state, batch, key),
        batch_argnums=1,
        donate_argnums=0,
        batch_dim=model.batch_dim,
        memory=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) // 2,
        budget_s=10,
    )
    scope: dict[str, Any] = {'step': step}
    exec(result.to_code(), scope)
    state = scope['helper'].shard(state, scope['rule'])
    losses = []
    for i in range(10):
        state, loss = scope['step'](state, batch, jax.random.fold_in(key, i))
        losses.append(float(loss))
    return result, losses


@pytest.mark.slow
@pytest.mark.parametrize('name', SEARCHED)
def test_ten_steps_match_one_device(name: str) -> None:
    result, losses = found_losses(MODELS[name])
    assert math.prod(result.mesh.values()) == 8
    expected = ten_losses(MODELS[name], None, arguments(MODELS[name]))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
