"""Values of models, and the difference between a step on several devices and on one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.unchanged.measure import make_step, training_step
from benchmarks.unchanged.model import Model, Strategy, Tree
from scalax.sharding import FSDPShardingRule, MeshShardingHelper

ROWS = 8
# Batches over all eight devices, and over half of them: the other axis then duplicates computations.
MESHES = (
    Strategy('FSDP', {'fsdp': 8}, ('fsdp',)),
    Strategy('FSDP x nothing', {'fsdp': 4, 'others': 2}, ('fsdp',)),
)
# Its state contains unscaled gradients, so that large and small ones are compared equally.
SGD = optax.sgd(1e-2, momentum=0.9)


def weights(model: Model) -> Tree:
    """Returns parameters in float32, without compiling."""
    rng = np.random.default_rng(0)

    def values(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        scale = 1 / np.sqrt(np.prod(leaf.shape[-2:-1] or (100,)))
        return (scale * rng.normal(size=leaf.shape) + (leaf.ndim < 2)).astype('float32')

    return jax.tree.map(values, jax.eval_shape(model.init, jax.random.key(0)))


def example(model: Model) -> Tree:
    """Returns a batch with values."""
    rows = ROWS * model.rows
    if model.example is not None:
        return model.example(rows)
    rng = np.random.default_rng(1)

    def values(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        is_integer = np.issubdtype(leaf.dtype, np.integer)
        drawn = rng.integers(0, 8, leaf.shape) if is_integer else rng.normal(size=leaf.shape)
        return drawn.astype(leaf.dtype)

    return jax.tree.map(values, model.batch(rows))


def difference(model: Model) -> float:
    """Returns the difference between a step on eight devices and on one.

    It is the largest difference of the loss and of each array of the state, relative to its largest value.

    Raises:
        ValueError: the model is not partitioned along its batch.
    """
    model = dataclasses.replace(model, optimizer=SGD, fsdp_rule=FSDPShardingRule(min_fsdp_size=1))
    params = weights(model)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(SGD.init, params))
    args = (params, zeros), example(model), jax.random.key(2)
    expected = jax.jit(training_step(model, model.loss))(*args)
    differences = []
    for strategy in MESHES:
        helper = MeshShardingHelper(list(strategy.mesh.values()), list(strategy.mesh))
        step, _ = make_step(model, strategy, helper, 'partitioned', ROWS * model.rows)
        if reason := step.explain_propagation(*args).reason:
            raise ValueError(f'{model.name} is not partitioned, and would show nothing: {reason}')
        differences.append(largest_difference(step(*args), expected))
    return max(differences)


def largest_difference(actual: Any, expected: Any) -> float:
    """Returns the largest difference of an array, relative to its largest value."""
    pairs = [
        (np.asarray(a), np.asarray(b))
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    ]
    # Gradients that are zero except for rounding, as of key biases, have no scale to compare with.
    least = 1e-3 * max(float(np.max(np.abs(b))) for _, b in pairs)
    return max(float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), least)) for a, b in pairs)
