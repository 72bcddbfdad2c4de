"""LLaMA-3 with Muon, which multiplies matrices, and with Adafactor, which sums their rows and columns.

In the expert program each device gets entire matrices for Muon: weights of one shape are stacked, and the
stack moves by one all-to-all per mesh axis, and back. Adafactor runs on the shards of the weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon, scale_by_muon

from benchmarks.unchanged.llama import LLAMA_8B, SEQUENCE, llama
from benchmarks.unchanged.model import Model, Size, Tree
from examples.llama.model import ModelConfig
from scalax.sharding import OptimizerStateShardingRule, with_sharding_constraint
from scalax.sharding import PartitionSpec as P

COLUMNS, ROWS = (None, 'fsdp', 'tp'), (None, 'tp', 'fsdp')
SPECS = {
    **dict.fromkeys(('query', 'key', 'value', 'gate', 'up'), COLUMNS),
    **dict.fromkeys(('output', 'down'), ROWS),
}
COEFFICIENTS, STEPS, RATE = (3.4445, -4.7750, 2.0315), 5, 1e-3


def numbers(params: Tree) -> Tree:
    """Returns which dimensions of stacks are matrix dimensions; None for weights updated by Adam."""

    def of(path: Any, leaf: Any) -> Any:
        return MuonDimensionNumbers(1, 2) if getattr(path[-1], 'key', '') in SPECS else None

    return jax.tree.map_with_path(of, params, is_leaf=lambda x: isinstance(x, optax.MaskedNode))


def muon_by_hand(mesh: Mapping[str, int]) -> optax.GradientTransformation:
    """Returns Muon whose Newton-Schulz iterations run on entire matrices."""

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        leaves, structure = jax.tree.flatten_with_path(updates)
        names = [path[-1].key for path, _ in leaves]
        wide = [x if x.shape[1] <= x.shape[2] else x.swapaxes(1, 2) for _, x in leaves]
        orthogonalized = dict.fromkeys(names, wide[0])
        for shape in {x.shape for x in wide}:
            group = [(name, x) for name, x in zip(names, wide, strict=True) if x.shape == shape]
            parts = jnp.split(_whole(jnp.concatenate([x for _, x in group]), mesh), len(group))
            orthogonalized.update({name: part for (name, _), part in zip(group, parts, strict=True)})
        results = []
        for name, (_, x) in zip(names, leaves, strict=True):
            result = orthogonalized[name] if x.shape[1] <= x.shape[2] else orthogonalized[name].swapaxes(1, 2)
            spec = P(*(axis if axis in mesh else None for axis in SPECS[name]))
            scale = math.sqrt(max(1, x.shape[2] / x.shape[1]))
            results.append(scale * with_sharding_constraint(result, spec))
        return jax.tree.unflatten(structure, results), state

    def of_matrices(params: Tree) -> Tree:
        return jax.tree.map(lambda x: MuonDimensionNumbers(1, 2), params)

    def labels(params: Tree) -> Tree:
        return jax.tree.map_with_path(lambda path, x: 'muon' if path[-1].key in SPECS else 'adam', params)

    matrices = optax.chain(
        scale_by_muon(ns_steps=0, weight_dimension_numbers=of_matrices),
        optax.GradientTransformation(lambda params: optax.EmptyState(), update),
        optax.scale_by_learning_rate(RATE),
    )
    others = optax.adamw(RATE, weight_decay=0.0, nesterov=True)
    return optax.partition({'muon': matrices, 'adam': others}, labels)


def _whole(stack: jax.Array, mesh: Mapping[str, int]) -> jax.Array:
    """Runs Newton-Schulz on a stack of matrices that is sharded along the stack dimension."""
    count, devices = len(stack), 1
    way, axes = [], [axis for axis in mesh if axis in ('fsdp', 'tp')]
    for i, axis in enumerate(axes):
        devices *= mesh[axis]
        way.append(P(tuple(axes[: i + 1]), None, *axes[i + 1 :]))
    stack = jnp.pad(stack, ((0, -count % devices), (0, 0), (0, 0)))
    for spec in way:
        stack = with_sharding_constraint(stack, spec)
    a, b, c = COEFFICIENTS

    def step(_: int, x: jax.Array) -> jax.Array:
        square = x @ x.swapaxes(1, 2)
        return a * x + (b * square + c * square @ square) @ x

    stack = jax.lax.fori_loop(0, STEPS, step, stack)
    for spec in way[::-1]:
        stack = with_sharding_constraint(stack, spec)
    return stack[:count]


def models(size: Size) -> list[Model]:
    """Returns 8B with Muon, and with Adafactor, whose state has statistics of rows and columns."""
    small = ModelConfig(width=32, layers=2, heads=4, kv_heads=2)
    model = llama('', small, 16, dtype='float32') if size == 'small' else llama('', LLAMA_8B, SEQUENCE)
    optimizer = muon(RATE, muon_weight_dimension_numbers=numbers)
    params = jax.eval_shape(model.init, jax.random.key(0))
    return [
        dataclasses.replace(model, name='LLaMA-3 8B, Muon', optimizer=optimizer, hand_optimizer=muon_by_hand),
        dataclasses.replace(
            model,
            name='LLaMA-3 8B, Adafactor',
            optimizer=optax.adafactor(RATE),
            columns_and_rows=OptimizerStateShardingRule(model.columns_and_rows, params),
            fsdp_rule=OptimizerStateShardingRule(model.fsdp_rule, params),
        ),
    ]
