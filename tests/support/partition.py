"""Programs of independent examples, the bytes that a mesh moves for them, and their values on one device."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalax.plan import Plan
from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P

FSDP = FSDPShardingRule(min_fsdp_size=1)
# Reductions that are not weight gradients: the loss, gradient norms, batch norm statistics.
SMALL_SUMS = 4096


@dataclasses.dataclass(frozen=True)
class Program:
    """A loss of weights and a batch.

    Attributes:
        loss: the function.
        weights: the shape of each weight.
        batch: the shape of the batch.
        batch_dtype: int32 for integers below 16; otherwise normal numbers.
        rule: the sharding rule of the weights.
    """

    loss: Callable[[Any, Any], jax.Array]
    weights: Mapping[str, tuple[int, ...]]
    batch: tuple[int, ...]
    batch_dtype: str = 'float32'
    rule: Any = FSDP

    @property
    def weight_bytes(self) -> int:
        return sum(4 * math.prod(shape) for shape in self.weights.values())

    @property
    def training_bytes(self) -> int:
        """Returns the bytes of two gathers of all weights and one reduction of their gradients."""
        return 3 * self.weight_bytes + SMALL_SUMS

    def types(self) -> tuple[Any, Any]:
        weights = {name: jax.ShapeDtypeStruct(shape, 'float32') for name, shape in self.weights.items()}
        return weights, jax.ShapeDtypeStruct(self.batch, self.batch_dtype)

    def arguments(self, examples: int) -> tuple[Any, Any]:
        """Returns weights scaled by their number of rows, and a batch of some examples."""
        batch = (examples, *self.batch[1:])
        random = np.random.default_rng(0)
        weights = {
            name: random.normal(size=shape).astype('float32') / np.sqrt(np.prod(shape[-2:-1], dtype=float))
            for name, shape in self.weights.items()
        }
        if self.batch_dtype == 'int32':
            return weights, random.integers(0, 16, batch).astype('int32')
        return weights, random.normal(size=batch).astype('float32')

    def step(self, weights: Any, batch: Any) -> tuple[Any, jax.Array]:
        """Returns one step of gradient descent."""
        value, gradients = jax.value_and_grad(self.loss)(weights, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    def compiled_step(self, helper: MeshShardingHelper) -> Any:
        return helper.sjit(self.step, in_shardings=(self.rule, P('fsdp')), out_shardings=(self.rule, P()))

    def plan(self, helper: MeshShardingHelper, **options: Any) -> Plan:
        return helper.plan(self.compiled_step(helper), *self.types(), **options)


def moved_bytes(plan: Plan, *axes: str) -> int:
    """Returns the bytes that the collectives of a plan move, along some mesh axes or all."""
    return sum(size for names, kinds in plan.totals.items() if {*axes} <= {*names} for size in kinds.values())


def assert_values_of_one_device(step: Any, function: Callable[..., Any], *args: Any) -> None:
    """Asserts that a compiled step returns the function's results on one device, up to rounding."""
    with jax.default_matmul_precision('highest'):
        values, expected = step(*args), jax.jit(function)(*args)
    assert jax.tree.structure(values) == jax.tree.structure(expected)
    for value, expected_value in zip(jax.tree.leaves(values), jax.tree.leaves(expected), strict=True):
        scale = float(jnp.max(jnp.abs(expected_value))) if jnp.size(expected_value) else 1.0
        np.testing.assert_allclose(value, expected_value, rtol=1e-4, atol=1e-4 * max(scale, 1e-3))
