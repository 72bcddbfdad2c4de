"""Gradients of grouped convolutions, of which XLA's partitioner makes wrong ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from scalax._jax.equations import conv_dims, conv_groups, shape_of
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import Rewriter, bound, equation_of


def with_right_gradients(jaxpr: Any, mesh: Mesh | AbstractMesh, batch_axes: Sequence[str] = ()) -> Any:
    """The jaxpr, whose sums over the rows of grouped convolutions are right; the same one if it has none.

    The gradient of the kernel of a grouped or depthwise convolution is a convolution with groups of rows.
    Where its rows are over some axes of a mesh and not over others, XLA adds it up over all devices: it is as
    many times too large as there are devices with the same rows. Here each device convolves its own rows, in
    a `shard_map`, and the results are added up over the axes of the rows.

    Args:
        jaxpr: the jaxpr, open or closed.
        mesh: a mesh of Auto axes.
        batch_axes: the mesh axes over which rows are; all if that is not known.
    """
    if [size > 1 for size in mesh.shape.values()].count(True) < 2:
        return jaxpr

    def right(equation: Any) -> Any:
        is_wrong = primitive_name(equation) == 'conv_general_dilated' and conv_groups(equation)[1] > 1
        return _on_own_rows(equation, mesh, batch_axes or mesh.axis_names) if is_wrong else equation

    return Rewriter(right).jaxpr(jaxpr)


def _on_own_rows(equation: Any, mesh: Mesh | AbstractMesh, mesh_axes: Sequence[str]) -> Any:
    """The convolution on each device's own rows, added up."""
    numbers, axes = conv_dims(equation), []
    rows = shape_of(equation.invars[0])[numbers.lhs_spec[1]]
    for axis in mesh_axes:  # as many as divide the rows
        if rows % mesh.shape[axis] == 0:
            rows //= mesh.shape[axis]
            axes.append(axis)

    def summed(images: Any, kernel: Any) -> Any:
        result = bound(equation, images, kernel)
        return jax.lax.psum(result, axes) if axes else result

    def split(dim: int) -> PartitionSpec:
        return PartitionSpec(*[None] * dim, tuple(axes)) if axes else PartitionSpec()

    mapped = jax.shard_map(
        summed,
        mesh=mesh,
        in_specs=(split(numbers.lhs_spec[1]), split(numbers.rhs_spec[1])),
        out_specs=PartitionSpec(),
        axis_names={*axes} or {*mesh.axis_names},
        check_vma=False,
    )
    return equation_of(mapped, equation)
