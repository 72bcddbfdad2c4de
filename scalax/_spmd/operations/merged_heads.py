"""Kernels over a merged dimension of examples and heads, where Auto axes shard the heads.

A model may reshape ``(examples, heads, ...)`` to ``(examples * heads, ...)`` for a kernel. If an Auto axis
shards the heads, its shards of the merged dimension are not contiguous, and XLA would gather the heads. So
the kernel gets the heads as a dimension of their own, and each device merges its examples with its own heads:
the steps of the grid are independent, in whatever order. The model splits the results again, in which the
heads are also a dimension of their own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from scalax._jax import kernels
from scalax._jax.equations import permutes_elements, shape_of
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import with_results
from scalax._jaxpr.dim_rules import Axes, reshape_groups
from scalax._spmd.editor import EditorBase
from scalax._spmd.operations.pallas_kernels import MergedDim, auto_grid_axes, kernel_along_auto_axes


def write_kernel(editor: EditorBase, equation: Any, operands: Sequence[Any], results: Sequence[Any]) -> None:
    """Writes a kernel on local shards, for a mesh with Auto axes.

    Args:
        editor: the editor of the jaxpr.
        equation: a `pallas_call`.
        operands: the variables of its operands, of local shapes.
        results: the variables of its results, of local shapes.
    """
    shapes = [*map(shape_of, (*operands, *results))]
    merged = _merged_dims(editor, equation, operands, shapes)
    split_shapes = [_split_shape(equation, i, shape, merged) for i, shape in enumerate(shapes)]
    inputs = [
        atom if shape == split_shape else _split(editor, equation, atom, split_shape)
        for atom, shape, split_shape in zip(operands, shapes, split_shapes, strict=False)
    ]
    outputs = [
        atom if shape_of(atom) == split_shape else editor.code.var(atom, split_shape)
        for atom, split_shape in zip(results, split_shapes[len(operands) :], strict=True)
    ]
    editor.eqns.append(
        kernel_along_auto_axes(editor.code, editor.context.auto, equation, inputs, outputs, shapes, merged)
    )
    for atom, output in zip(results, outputs, strict=True):
        if output is not atom:
            function, key = _reshape_to(shape_of(atom))
            editor.eqns.append(with_results(editor.code.equation(function, key, equation, [output]), [atom]))
            editor.unmerged[id(atom)] = output


def _merged_dims(
    editor: EditorBase, equation: Any, operands: Sequence[Any], shapes: Sequence[Sequence[int]]
) -> dict[int, MergedDim]:
    """Returns the dimensions that are merged from others, of which Auto axes shard one, by grid dimension."""
    result, arrays = dict[int, MergedDim](), _block_arrays(equation)
    for grid_dim, axes in auto_grid_axes(equation, editor.context.auto, shapes).items():
        dims = [*_array_dims(equation, grid_dim)]
        candidates = [
            _merged_dim(editor, equation.invars[i], operands[i], dim, axes)
            for i, dim in dims
            if i < len(operands)
        ]
        merged = next(filter(None, candidates), None)
        if merged is None or any(shapes[i][dim] != math.prod(merged) for i, dim in dims):
            continue
        # A block must have the same elements on a device as before.
        shards = math.prod(editor.context.auto.sizes[axis] for axis in axes)
        i, dim = dims[0]
        block_size = kernels.array_shape(arrays[i])[dim] // kernels.grid(equation)[grid_dim]
        if merged.size // shards * merged.after % block_size == 0:
            result[grid_dim] = merged
    return result


def _block_arrays(equation: Any) -> dict[int, Any]:
    """Returns the block mappings of operands and results, by their index."""
    return dict(enumerate(kernels.block_mappings_of(equation), kernels.count_index_operands(equation)))


def _array_dims(equation: Any, grid_dim: int) -> Iterator[tuple[int, int]]:
    """Yields the operands and results with a block for each step of a grid dimension, and their dimension."""
    for i, array in _block_arrays(equation).items():
        for dim, array_grid_dim in kernels.grid_dims(array).items():
            if array_grid_dim == grid_dim:
                yield i, dim


def _merged_dim(editor: EditorBase, var: Any, atom: Any, dim: int, axes: Axes) -> MergedDim | None:
    """Returns the parts of a dimension of an operand; None if a reshape does not merge it from them.

    Args:
        editor: the editor of the jaxpr.
        var: the variable of the operand in the original jaxpr.
        atom: the variable of the operand, of local shape.
        dim: the dimension.
        axes: the Auto axes that shard it.
    """
    producer, reshape = editor.producer_of(editor.read(var)), _reshape_of(editor, atom)
    if reshape is None or primitive_name(producer) != 'reshape':
        return None
    auto_dims, shape = editor.context.auto.of(producer.invars[0]), shape_of(reshape.invars[0])
    for old_dims, new_dims in reshape_groups(reshape):
        sharded = [old_dim for old_dim in old_dims if auto_dims and auto_dims[old_dim] == axes]
        if [*new_dims] == [dim] and len(sharded) == 1:
            before, after = (
                math.prod(shape[old_dim] for old_dim in dims)
                for dims in ([x for x in old_dims if x < sharded[0]], [x for x in old_dims if x > sharded[0]])
            )
            return MergedDim(before, shape[sharded[0]], after) if before > 1 else None
    return None


def _reshape_of(editor: EditorBase, atom: Any) -> Any:
    """Returns the written reshape that computes a variable; None if none does."""
    written = (x for x in reversed(editor.eqns) if any(result is atom for result in x.outvars))
    reshape = next(written, None)
    is_reshape = reshape is not None and primitive_name(reshape) == 'reshape'
    return reshape if is_reshape and not permutes_elements(reshape) else None


def _split_shape(
    equation: Any, i: int, shape: Sequence[int], merged: Mapping[int, MergedDim]
) -> tuple[int, ...]:
    """Returns the shape of an operand or result of a kernel with merged dimensions apart."""
    parts = {
        dim: merged[grid_dim] for grid_dim in merged for j, dim in _array_dims(equation, grid_dim) if i == j
    }
    return tuple([part for dim, size in enumerate(shape) for part in parts.get(dim, (size,))])


def _split(editor: EditorBase, equation: Any, atom: Any, shape: tuple[int, ...]) -> Any:
    """Returns an operand with merged dimensions apart, from before the reshape that merged them."""
    reshape = _reshape_of(editor, atom)
    source = atom if reshape is None else reshape.invars[0]
    return source if shape_of(source) == shape else editor.emit(*_reshape_to(shape), equation, [source])


def _reshape_to(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Returns the function that reshapes a value, and its cache key."""
    return functools.partial(jax.lax.reshape, new_sizes=shape), ('reshape', shape)
