"""Kernels of Pallas: each device runs a kernel on its own examples if the grid shows that they are apart.

A dimension of the grid walks over blocks of examples. If each block is read and written by a step of its own,
and the kernel does not ask which step it is, then each device takes the steps of its examples. Likewise,
other mesh axes may split another dimension of the grid, such as heads, if they shard its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from scalax._core.pytree.partition_specs import canonical_entry
from scalax._jax import kernels
from scalax._jax.equations import shape_of
from scalax._jax.manual_axes import ManualEquations
from scalax._jax.rewriting import rebind
from scalax._jaxpr.dim_rules import Axes
from scalax._spmd.placements.auto_shardings import AutoShardings
from scalax._spmd.placements.placement import REPLICATE, Placement, Shard


def kernel_placements(
    equation: Any, placements: Sequence[Placement], blocks: int
) -> tuple[list[Placement], list[Placement]] | None:
    """Returns the placements of the operands and of the results of a kernel; None if it takes all examples.

    Args:
        equation: a `pallas_call`.
        placements: those of its operands along one axis.
        blocks: into how many blocks all batch axes split a dimension.
    """
    arrays, whole = kernels.block_mappings_of(equation), kernels.count_index_operands(equation)
    operands = len(equation.invars)
    if whole + len(arrays) != operands + len(equation.outvars):
        return None
    if any(isinstance(x, Shard) and not x.is_state for x in placements[:whole]):
        return None
    steps = [
        kernels.grid_dims(array).get(x.dim)
        for array, x in zip(arrays, placements[whole:], strict=False)
        if isinstance(x, Shard) and not x.is_state
    ]
    step = next((x for x in steps if x is not None), None)
    if step is None or not kernels.can_split_grid(equation, step, blocks):
        return None
    found: list[Placement] = [REPLICATE] * whole
    for array in arrays:
        dims = [dim for dim, other in kernels.grid_dims(array).items() if other == step]
        found.append(Shard(dims[0]) if dims else REPLICATE)
    return found[:operands], found[operands:]


def kernel_params(
    code: ManualEquations, equation: Any, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Returns the parameters of a kernel that runs on blocks.

    Args:
        code: makes equations.
        equation: a `pallas_call`.
        operands: the local shapes of its operands.
        results: those of its results.
    """
    shards = _shards(equation, [*operands, *results])
    params = kernels.split_grid_params(equation, shards) if shards else {}
    if kernels.is_interpreted(equation):
        return kernels.interpreted_params(equation, params, code.localize_jaxpr)
    return params


def _shards(equation: Any, shapes: Sequence[Sequence[int]]) -> dict[int, int]:
    """Into how many blocks the steps of each dimension of the grid are split, by the local shapes."""
    shards = dict[int, int]()
    for array, local in zip(
        kernels.block_mappings_of(equation), shapes[kernels.count_index_operands(equation) :], strict=False
    ):
        shape = kernels.array_shape(array)
        for dim, step in kernels.grid_dims(array).items():
            if local[dim] != shape[dim]:
                shards[step] = shape[dim] // local[dim]
    return shards


def kernel_along_auto_axes(
    code: ManualEquations, auto: AutoShardings, equation: Any, operands: Sequence[Any], results: Sequence[Any]
) -> Any:
    """Returns the equation of a kernel that runs on blocks, on a mesh with axes that stay Auto inside.

    The compiler cannot partition a kernel along these, so the kernel runs in a ``jax.shard_map`` over them:
    on blocks of an operand, such as heads, if a dimension of the grid walks over them, and else on all of it.

    Args:
        code: makes equations.
        auto: where values are along these axes.
        equation: a `pallas_call`.
        operands: its operands, of local shapes.
        results: its results, of local shapes.
    """
    shards = _shards(equation, [*map(shape_of, operands), *map(shape_of, results)])
    over = _auto_steps(equation, auto, shards)
    specs = [PartitionSpec()] * (len(operands) + len(results))
    whole = kernels.count_index_operands(equation)
    for i, array in enumerate(kernels.block_mappings_of(equation) if over else (), whole):
        dims = {dim: over[step] for dim, step in kernels.grid_dims(array).items() if step in over}
        entries = [canonical_entry(dims.get(dim, ())) for dim in range(len(kernels.array_shape(array)))]
        specs[i] = PartitionSpec(*entries)
    shards |= {step: math.prod(auto.sizes[axis] for axis in axes) for step, axes in over.items()}

    params = kernels.split_grid_params(equation, shards)
    if kernels.is_interpreted(equation):
        params = kernels.interpreted_params(equation, params, code.along_all_axes().localize_jaxpr)

    return in_shard_map(code, auto, equation, operands, results, specs, params)


def in_shard_map(
    code: ManualEquations,
    auto: AutoShardings,
    equation: Any,
    operands: Sequence[Any],
    results: Sequence[Any],
    specs: Sequence[PartitionSpec],
    params: Mapping[str, Any],
) -> Any:
    """Returns an equation that runs in a ``jax.shard_map`` over the axes that stay Auto inside.

    Args:
        code: makes equations.
        auto: where values are along these axes.
        equation: the equation.
        operands: its operands, of local shapes.
        results: its results, of local shapes.
        specs: the specs of the operands, and then those of the results, along these axes.
        params: its parameters that change.
    """

    def on_device(*blocks: Any) -> Any:
        return rebind(equation, *blocks, **params)

    mapped = jax.shard_map(
        on_device,
        in_specs=tuple(specs[: len(operands)]),
        out_specs=[*specs[len(operands) :]],
        axis_names={*auto.sizes},
        check_vma=False,
    )
    return code.call_function_into(mapped, equation, operands, results)


def _auto_steps(equation: Any, auto: AutoShardings, shards: dict[int, int]) -> dict[int, Axes]:
    """The Auto axes over which devices share the steps of dimensions of the grid.

    Args:
        equation: a `pallas_call`.
        auto: where values are along these axes.
        shards: the dimensions of the grid whose steps the axes of the batch split.
    """
    arrays, whole = kernels.block_mappings_of(equation), kernels.count_index_operands(equation)
    found, used = dict[int, Axes](), set[str]()
    if whole + len(arrays) != len(equation.invars) + len(equation.outvars):
        return found
    for array, atom in zip(arrays, equation.invars[whole:], strict=False):
        dims = auto.of(atom)
        for dim, step in kernels.grid_dims(array).items() if dims else ():
            count = math.prod(auto.sizes[axis] for axis in dims[dim])
            is_free = step not in shards and step not in found and used.isdisjoint(dims[dim])
            if count > 1 and is_free and kernels.can_split_grid(equation, step, count):
                found[step] = dims[dim]
                used.update(dims[dim])
    return found
