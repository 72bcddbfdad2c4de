"""Running an operation on each device's block, in the way that the types of the mesh axes allow.

- Auto axes: the compiler chooses shardings. ``custom_partitioning`` learns them while it compiles.
- Explicit axes: shardings are part of types, and ``shard_map`` takes them from there.
- Manual axes: the operands are blocks already, and the function runs on them as it is.
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
        name: its name.
        labels: the names of its operands.
        rule: its rule.
        local: the function: a context and one block of each operand, to one block of each result.
        check_vma: whether JAX can track which values differ between devices.
        factor_map: the factors of operands and results.
    """

    name: str
    labels: Sequence[str]
    rule: Rule
    local: Callable[..., Results]
    check_vma: bool
    factor_map: FactorMap

    def plain(self, *operands: Any) -> Results:
        """The function on whole arrays."""
        return self.local(FactorContext(self.rule.factors, {}, {}), *operands)

    def on_blocks(self, layout: FactorLayout, typed: bool = False) -> Callable[..., Results]:
        """The function on the blocks of a layout, where its mesh axes are named."""
        return functools.partial(self.local, self.context(layout, typed))

    def context(self, layout: FactorLayout, typed: bool) -> FactorContext:
        """What the function is given first, with the blocks of a layout."""
        return FactorContext(self.rule.factors, layout.axes, layout.sizes, typed)

    def batched(self, batched: Sequence[bool], size: int) -> Operation:
        """The operation under ``jax.vmap``: on operands some of which have one more dimension."""
        axes = tuple(0 if more else None for more in batched)

        def local(ctx: FactorContext, *blocks: Any) -> Results:
            mapped: Results = jax.vmap(functools.partial(self.local, ctx), axes)(*blocks)
            return mapped

        return dataclasses.replace(self, factor_map=self.factor_map.batched(batched, size), local=local)


def run(operation: Operation, *operands: Any) -> Results:
    """Runs an operation inside a function that JAX compiles, also under ``jax.vmap``."""

    @custom_vmap
    def call(*operands: Any) -> Results:
        return _placed(operation, *operands)

    @call.def_vmap
    def rule(size: int, batched: Sequence[bool], *operands: Any) -> tuple[Results, tuple[bool, ...]]:
        results = run(operation.batched(batched, size), *operands)
        return results, (True,) * len(results)

    results: Results = call(*operands)
    return results


def mesh_of(operands: Sequence[Any]) -> Any:
    """The abstract mesh that operands of a trace are on: the one in force, or that of their types."""
    mesh = jax.sharding.get_abstract_mesh()
    for operand in operands:
        mesh = jax.typeof(operand).sharding.mesh if mesh.empty else mesh
    return mesh


def _placed(operation: Operation, *operands: Any) -> Results:
    mesh = mesh_of(operands)
    if AxisType.Explicit in mesh.axis_types:
        with jax.sharding.use_abstract_mesh(mesh):
            return _over_explicit_axes(operation, mesh, operands)
    if AxisType.Manual in mesh.axis_types:
        return operation.plain(*operands)
    return _over_auto_axes(operation, operands)


def _over_explicit_axes(operation: Operation, mesh: Any, operands: Sequence[Any]) -> Results:
    layout = explicit_layout(operation, mesh, operands)
    factor_map = operation.factor_map
    results: Results = jax.shard_map(
        operation.on_blocks(layout, typed=operation.check_vma),
        mesh=mesh,
        in_specs=tuple(layout.spec(factors) for factors in factor_map.operands),
        out_specs=tuple(layout.spec(factors) for factors in factor_map.results),
        axis_names=set(layout.sizes),
        check_vma=operation.check_vma,
    )(*as_laid_out(layout, mesh, operands))
    return results


def explicit_layout(operation: Operation, mesh: Any, operands: Sequence[Any]) -> FactorLayout:
    """The layout along the Explicit axes of a mesh, from the types of the operands."""
    explicit = MeshAxes.of(mesh).of_type(AxisType.Explicit)
    sizes = {axis: mesh.shape[axis] for axis in explicit if not is_mapped(mesh, axis)}
    specs = [jax.typeof(operand).sharding.spec for operand in operands]
    return FactorLayout.of_specs(operation.factor_map, specs, sizes)


def as_laid_out(layout: FactorLayout, mesh: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
    """The operands, resharded to a layout."""
    return tuple(
        resharded(operand, NamedSharding(mesh, layout.spec(factors)))
        for operand, factors in zip(operands, layout.factor_map.operands, strict=True)
    )


def resharded(operand: Any, wanted: NamedSharding) -> Any:
    """The operand with this sharding, over Explicit axes."""
    if canonical(jax.typeof(operand).sharding.spec) == canonical(wanted.spec):
        return operand
    return reshard(operand, wanted)


def _over_auto_axes(operation: Operation, operands: Sequence[Any]) -> Results:
    # `custom_partitioning` takes no function that closes over arrays, such as a table of numbers: they are
    # further operands, which every device has whole.
    constants = jax.make_jaxpr(operation.plain)(*operands).consts
    factors = operation.factor_map.operands
    whole: list[Factors] = [(None,) * jax.typeof(value).ndim for value in constants]
    factor_map = dataclasses.replace(operation.factor_map, operands=(*factors, *whole))

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        specs = [array.sharding.spec for array in (*operands, *results)]
        layout = FactorLayout.of_specs(factor_map, specs, dict(mesh.shape))
        result_shardings, operand_shardings = (
            tuple(NamedSharding(mesh, layout.spec(factors)) for factors in arrays)
            for arrays in (factor_map.results, factor_map.operands)
        )
        local = _with_operands(constants, operation.on_blocks(layout))
        return mesh, local, result_shardings, operand_shardings

    call = custom_partitioning(_with_operands(constants, operation.plain))
    rule, special = factor_map.shardy_rule()
    call.def_partition(partition, sharding_rule=rule, **special)
    results: Results = call(*operands, *constants)
    return results


def _with_operands(constants: Sequence[Any], fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the arrays that it closes over as further operands, behind its own.

    Tracing it on whole arrays shows which they are, in an order that need not be that of a trace on blocks.
    """
    if not constants:
        return fun

    def call(*operands: Any) -> tuple[Any, ...]:
        own, values = operands[: -len(constants)], operands[-len(constants) :]
        closed = jax.make_jaxpr(fun)(*own)
        return tuple(eval_jaxpr(closed, own, [values[_index(each, constants)] for each in closed.consts]))

    return call


def _index(value: Any, constants: Sequence[Any]) -> int:
    for i, known in enumerate(constants):
        if value is known:
            return i
        traced = any(isinstance(each, jax.core.Tracer) for each in (value, known))
        if not traced and value.dtype == known.dtype and np.array_equal(value, known):
            return i
    raise RuleError(
        f'an array ({leaf_text(value)}) that the function of a sharded_op makes outside of '
        'JAX depends on its blocks: compute it with jax.numpy from ctx.index and '
        'ctx.size, or make it an operand'
    )
