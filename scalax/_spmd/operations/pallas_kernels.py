"""Pallas kernels: each device runs a kernel on its local examples if the grid shows their independence.

If a dimension of the grid iterates over blocks of examples, each block is read and written by one grid index
only, and the kernel does not use that index, each device runs the part of the grid for its examples. Other
mesh axes may split another dimension of the grid in the same way, such as heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from scalax._core.pytree.partition_specs import canonical_entry
from scalax._jax import kernels
from scalax._jax.manual_axes import ManualEquations
from scalax._jax.rewriting import rebind
from scalax._jaxpr.dim_rules import Axes
from scalax._spmd.placements.auto_shardings import AutoShardings
from scalax._spmd.placements.placement import REPLICATE, Placement, Shard, shards_examples


def kernel_placements(
    equation: Any, placements: Sequence[Placement], blocks: int
) -> tuple[list[Placement], list[Placement]] | None:
    """Returns the placements of the operands and of the results of a kernel; None if it needs all examples.

    Args:
        equation: a `pallas_call`.
        placements: the placements of its operands along one axis.
        blocks: the product of the sizes of all batch axes.
    """
    arrays, num_index_operands = kernels.block_mappings_of(equation), kernels.count_index_operands(equation)
    operands = len(equation.invars)
    if num_index_operands + len(arrays) != operands + len(equation.outvars):
        return None
    if any(shards_examples(x) for x in placements[:num_index_operands]):
        return None
    batch_grid_dims = [
        kernels.grid_dims(array).get(x.dim)
        for array, x in zip(arrays, placements[num_index_operands:], strict=False)
        if shards_examples(x)
    ]
    grid_dim = next((x for x in batch_grid_dims if x is not None), None)
    if grid_dim is None or not kernels.can_split_grid(equation, grid_dim, blocks):
        return None
    result: list[Placement] = [REPLICATE] * num_index_operands
    for array in arrays:
        dims = [dim for dim, array_grid_dim in kernels.grid_dims(array).items() if array_grid_dim == grid_dim]
        result.append(Shard(dims[0]) if dims else REPLICATE)
    return result[:operands], result[operands:]


def kernel_params(
    code: ManualEquations, equation: Any, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Returns the parameters of a kernel that runs on local shards.

    Args:
        code: makes equations.
        equation: a `pallas_call`.
        operands: the local shapes of its operands.
        results: the local shapes of its results.
    """
    shards = _grid_shards(equation, [*operands, *results])
    params = kernels.split_grid_params(equation, shards) if shards else {}
    if kernels.is_interpreted(equation):
        return kernels.interpreted_params(equation, params, code.localize_jaxpr)
    return params


def _grid_shards(equation: Any, shapes: Sequence[Sequence[int]]) -> dict[int, int]:
    """Returns the number of shards of each split grid dimension, as follows from the local shapes."""
    shards = dict[int, int]()
    for array, local in zip(
        kernels.block_mappings_of(equation), shapes[kernels.count_index_operands(equation) :], strict=False
    ):
        shape = kernels.array_shape(array)
        for dim, grid_dim in kernels.grid_dims(array).items():
            if local[dim] != shape[dim]:
                shards[grid_dim] = shape[dim] // local[dim]
    return shards


class MergedDim(NamedTuple):
    """The sizes of the dimensions that a reshape merged, such as examples and heads.

    Attributes:
        before: the size of the dimensions before the one that Auto axes shard.
        size: the size of that dimension.
        after: the size of the dimensions after it.
    """

    before: int
    size: int
    after: int


def kernel_along_auto_axes(
    code: ManualEquations,
    auto: AutoShardings,
    equation: Any,
    operands: Sequence[Any],
    results: Sequence[Any],
    shapes: Sequence[Sequence[int]],
    merged: Mapping[int, MergedDim],
) -> Any:
    """Returns the equation of a kernel on local shards, for a mesh with Auto axes.

    The compiler cannot partition a kernel along the Auto axes, so the kernel runs in a ``jax.shard_map`` over
    them. If a grid dimension iterates over a sharded dimension, such as heads, the kernel runs on the shards;
    otherwise, its operands are replicated.

    Args:
        code: makes equations.
        auto: the shardings along the Auto axes.
        equation: a `pallas_call`.
        operands: the variables of its operands, of local shapes, with merged dimensions apart.
        results: the variables of its results, of local shapes, with merged dimensions apart.
        shapes: the local shapes of its operands and results as the kernel takes them.
        merged: the merged dimensions, by grid dimension.
    """
    grid_axes = auto_grid_axes(equation, auto, shapes)
    auto_shards = {
        grid_dim: math.prod(auto.sizes[axis] for axis in axes) for grid_dim, axes in grid_axes.items()
    }
    specs = [PartitionSpec()] * len(shapes)
    # The shapes on one device, as the kernel takes them, and with merged dimensions apart.
    kernel_shapes, shard_shapes = [*map(tuple, shapes)], [*map(tuple, shapes)]
    num_index_operands = kernels.count_index_operands(equation)
    for i, array in enumerate(kernels.block_mappings_of(equation) if grid_axes else (), num_index_operands):
        grid_dims, entries, sizes = kernels.grid_dims(array), list[Any](), list[int]()
        for dim, size in enumerate(shapes[i]):
            grid_dim = grid_dims.get(dim, -1)
            count, parts = auto_shards.get(grid_dim, 1), merged.get(grid_dim)
            entry = canonical_entry(grid_axes.get(grid_dim, ()))
            entries += [entry] if parts is None else [None, entry, None]
            sizes += [size // count] if parts is None else [parts.before, parts.size // count, parts.after]
        specs[i], shard_shapes[i] = PartitionSpec(*entries), (*sizes,)
        kernel_shapes[i] = tuple(
            [size // auto_shards.get(grid_dims.get(dim, -1), 1) for dim, size in enumerate(shapes[i])]
        )
    shards = _grid_shards(equation, shapes)
    shards |= {grid_dim: count * shards.get(grid_dim, 1) for grid_dim, count in auto_shards.items()}
    params = kernels.split_grid_params(equation, shards)
    if kernels.is_interpreted(equation):
        params = kernels.interpreted_params(equation, params, code.along_all_axes().localize_jaxpr)

    def on_device(*blocks: Any) -> Any:
        arrays = [x.reshape(shape) for x, shape in zip(blocks, kernel_shapes, strict=False)]
        outputs = rebind(equation, *arrays, **params)
        return [x.reshape(shape) for x, shape in zip(outputs, shard_shapes[len(operands) :], strict=True)]

    return in_shard_map(code, auto, equation, operands, results, specs, on_device)


def in_shard_map(
    code: ManualEquations,
    auto: AutoShardings,
    equation: Any,
    operands: Sequence[Any],
    results: Sequence[Any],
    specs: Sequence[PartitionSpec],
    on_device: Callable[..., Any],
) -> Any:
    """Returns an equation that runs a function in a ``jax.shard_map`` over the Auto axes.

    Args:
        code: makes equations.
        auto: the shardings along the Auto axes.
        equation: the equation that it replaces.
        operands: the variables of its operands, of local shapes.
        results: the variables of its results, of local shapes.
        specs: the specs of the operands, followed by the specs of the results, along the Auto axes.
        on_device: the function; it returns a list.
    """
    mapped = jax.shard_map(
        on_device,
        in_specs=tuple(specs[: len(operands)]),
        out_specs=[*specs[len(operands) :]],
        axis_names={*auto.sizes},
        check_vma=False,
    )
    return code.call_function_into(mapped, equation, operands, results)


def auto_grid_axes(equation: Any, auto: AutoShardings, shapes: Sequence[Sequence[int]]) -> dict[int, Axes]:
    """Returns the Auto axes that split dimensions of the grid of a kernel, by grid dimension.

    Args:
        equation: a `pallas_call`.
        auto: the shardings along the Auto axes.
        shapes: the local shapes of its operands and results.
    """
    shards = _grid_shards(equation, shapes)
    arrays, num_index_operands = kernels.block_mappings_of(equation), kernels.count_index_operands(equation)
    grid_axes, used_axes = dict[int, Axes](), set[str]()
    if num_index_operands + len(arrays) != len(equation.invars) + len(equation.outvars):
        return grid_axes
    for array, atom in zip(arrays, equation.invars[num_index_operands:], strict=False):
        dims = auto.of(atom)
        for dim, grid_dim in kernels.grid_dims(array).items() if dims else ():
            num_shards = math.prod(auto.sizes[axis] for axis in dims[dim])
            is_free = grid_dim not in grid_axes and used_axes.isdisjoint(dims[dim])
            total_shards = num_shards * shards.get(grid_dim, 1)
            if num_shards > 1 and is_free and kernels.can_split_grid(equation, grid_dim, total_shards):
                grid_axes[grid_dim] = dims[dim]
                used_axes.update(dims[dim])
    return grid_axes
