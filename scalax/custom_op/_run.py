"""Execution of an operation on local blocks, depending on the types of the mesh axes.

- Auto axes: the compiler chooses shardings, and ``custom_partitioning`` receives them during compilation.
- Explicit axes: the types of the operands have the shardings for ``shard_map``.
- Manual axes: the operands are already blocks, and the function runs on them directly.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding

from scalax._core.context.resharding import reshard
from scalax._core.pytree.partition_specs import MeshAxes, canonical
from scalax._core.pytree.paths import leaf_text
from scalax._jax.rewriting import eval_jaxpr
from scalax._jax.tracing import is_mapped
from scalax.custom_op._layout import FactorContext, FactorLayout
from scalax.custom_op._rule import FactorMap, Factors, Rule
from scalax.errors import RuleError

Results = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """An operation on operands of known shapes.

    Attributes:
        name: the name of the operation.
        labels: the names of the operands.
        rule: the rule.
        local_fn: the user's function: takes a context and one block of each operand, and returns one block of
            each result.
        check_vma: whether JAX can track which values vary over mesh axes.
        factor_map: the factors of operands and results.
    """

    name: str
    labels: Sequence[str]
    rule: Rule
    local_fn: Callable[..., Results]
    check_vma: bool
    factor_map: FactorMap

    def on_global_arrays(self, *operands: Any) -> Results:
        """Calls the function with global arrays."""
        return self.local_fn(FactorContext(self.rule.factors, {}, {}), *operands)

    def on_blocks(self, layout: FactorLayout, check_vma: bool = False) -> Callable[..., Results]:
        """Returns the function for the blocks of a layout; it is to run where the mesh axes are Manual."""
        return functools.partial(self.local_fn, self.context(layout, check_vma))

    def context(self, layout: FactorLayout, check_vma: bool) -> FactorContext:
        """Returns the context for the blocks of a layout."""
        return FactorContext(self.rule.factors, layout.axes, layout.sizes, check_vma)

    def batched(self, batched: Sequence[bool], size: int) -> Operation:
        """Returns the operation under ``jax.vmap``; parameters as for `FactorMap.batched`."""
        axes = tuple(0 if is_batched else None for is_batched in batched)

        def local_fn(ctx: FactorContext, *blocks: Any) -> Results:
            results: Results = jax.vmap(functools.partial(self.local_fn, ctx), axes)(*blocks)
            return results

        factor_map = self.factor_map.batched(batched, size)
        return dataclasses.replace(self, factor_map=factor_map, local_fn=local_fn)


def run(operation: Operation, *operands: Any) -> Results:
    """Runs an operation inside a function that JAX compiles, which may be under ``jax.vmap``."""

    @custom_vmap
    def call(*operands: Any) -> Results:
        return _run_on_mesh(operation, *operands)

    @call.def_vmap
    def rule(size: int, batched: Sequence[bool], *operands: Any) -> tuple[Results, tuple[bool, ...]]:
        results = run(operation.batched(batched, size), *operands)
        return results, (True,) * len(results)

    results: Results = call(*operands)
    return results


def mesh_of(operands: Sequence[Any]) -> Any:
    """Returns the abstract mesh of the operands of a trace: the active mesh, or the mesh of their types."""
    mesh = jax.sharding.get_abstract_mesh()
    for operand in operands:
        mesh = jax.typeof(operand).sharding.mesh if mesh.empty else mesh
    return mesh


def _run_on_mesh(operation: Operation, *operands: Any) -> Results:
    mesh = mesh_of(operands)
    if AxisType.Explicit in mesh.axis_types:
        with jax.sharding.use_abstract_mesh(mesh):
            return _run_on_explicit_axes(operation, mesh, operands)
    if AxisType.Manual in mesh.axis_types:
        return operation.on_global_arrays(*operands)
    return _run_on_auto_axes(operation, operands)


def _run_on_explicit_axes(operation: Operation, mesh: Any, operands: Sequence[Any]) -> Results:
    layout = explicit_layout(operation, mesh, operands)
    factor_map = operation.factor_map
    results: Results = jax.shard_map(
        operation.on_blocks(layout, operation.check_vma),
        mesh=mesh,
        in_specs=tuple(layout.spec(factors) for factors in factor_map.operands),
        out_specs=tuple(layout.spec(factors) for factors in factor_map.results),
        axis_names=set(layout.sizes),
        check_vma=operation.check_vma,
    )(*apply_layout(layout, mesh, operands))
    return results


def explicit_layout(operation: Operation, mesh: Any, operands: Sequence[Any]) -> FactorLayout:
    """Returns the layout over the Explicit axes of a mesh, from the types of the operands."""
    explicit = MeshAxes.of(mesh).of_type(AxisType.Explicit)
    sizes = {axis: mesh.shape[axis] for axis in explicit if not is_mapped(mesh, axis)}
    specs = [jax.typeof(operand).sharding.spec for operand in operands]
    return FactorLayout.from_specs(operation.factor_map, specs, sizes)


def apply_layout(layout: FactorLayout, mesh: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Reshards the operands to a layout."""
    return tuple(
        reshard_to(operand, NamedSharding(mesh, layout.spec(factors)))
        for operand, factors in zip(operands, layout.factor_map.operands, strict=True)
    )


def reshard_to(operand: Any, sharding: NamedSharding) -> Any:
    """Reshards an operand over Explicit axes, unless it has this sharding already."""
    if canonical(jax.typeof(operand).sharding.spec) == canonical(sharding.spec):
        return operand
    return reshard(operand, sharding)


def _run_on_auto_axes(operation: Operation, operands: Sequence[Any]) -> Results:
    # `custom_partitioning` does not accept a function that closes over arrays, such as a constant table, so
    # these arrays become additional, replicated operands.
    constants = jax.make_jaxpr(operation.on_global_arrays)(*operands).consts
    factors = operation.factor_map.operands
    constant_factors: list[Factors] = [(None,) * jax.typeof(value).ndim for value in constants]
    factor_map = dataclasses.replace(operation.factor_map, operands=(*factors, *constant_factors))

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        specs = [array.sharding.spec for array in (*operands, *results)]
        layout = FactorLayout.from_specs(factor_map, specs, dict(mesh.shape))
        result_shardings, operand_shardings = (
            tuple(NamedSharding(mesh, layout.spec(factors)) for factors in arrays)
            for arrays in (factor_map.results, factor_map.operands)
        )
        local_fn = _with_const_operands(constants, operation.on_blocks(layout))
        return mesh, local_fn, result_shardings, operand_shardings

    call = custom_partitioning(_with_const_operands(constants, operation.on_global_arrays))
    rule, special = factor_map.shardy_rule()
    call.def_partition(partition, sharding_rule=rule, **special)
    results: Results = call(*operands, *constants)
    return results


def _with_const_operands(constants: Sequence[Any], fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with the arrays that it closes over as operands after its own.

    The constants are from a trace on global arrays. A trace on blocks may have them in another order.
    """
    if not constants:
        return fun

    def call(*operands: Any) -> tuple[Any, ...]:
        own_operands, values = operands[: -len(constants)], operands[-len(constants) :]
        closed_jaxpr = jax.make_jaxpr(fun)(*own_operands)
        consts = [values[_index(const, constants)] for const in closed_jaxpr.consts]
        return tuple(eval_jaxpr(closed_jaxpr, own_operands, consts))

    return call


def _index(value: Any, constants: Sequence[Any]) -> int:
    """Returns the index of the constant that is equal to a value."""
    for i, constant in enumerate(constants):
        if value is constant:
            return i
        is_traced = isinstance(value, jax.core.Tracer) or isinstance(constant, jax.core.Tracer)
        if not is_traced and value.dtype == constant.dtype and np.array_equal(value, constant):
            return i
    raise RuleError(
        f'an array ({leaf_text(value)}) that the function of a sharded_op creates outside JAX depends on its '
        'blocks: compute it with jax.numpy from ctx.index and ctx.size, or make it an operand'
    )
