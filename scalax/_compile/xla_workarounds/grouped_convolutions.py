"""What XLA's partitioner makes wrong: grouped convolutions, rows out of bounds, and scatters (`uneven`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from scalax._compile.xla_workarounds.scatter_padding import REDUCING, with_even_updates
from scalax._jax.equations import conv_dims, conv_groups, shape_of
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import Rewriter, bound, equation_of
from scalax.errors import ArgumentError


def with_right_gradients(
    jaxpr: Any, mesh: Mesh | AbstractMesh, batch_axes: Sequence[str], *, name: str, can_change: bool = True
) -> Any:
    """The jaxpr, whose grouped convolutions and sums over their rows are right; the same one if it has none.

    The gradient of the kernel of a grouped or depthwise convolution is a convolution with groups of rows. XLA
    adds it up over all devices, also those that have the same rows: where rows are over some mesh axes, or
    over a part of one, it is as many times too large. Here each device convolves its own rows, in a
    `shard_map` over all axes (XLA makes the same mistake over those that are left to it), and the results are
    added up over those of the rows. Sums over rows are those of scatters (`uneven`).

    Args:
        jaxpr: the jaxpr, open or closed.
        mesh: the mesh.
        batch_axes: the mesh axes over which rows are first.
        name: the name of the function, for messages.
        can_change: whether another jaxpr can take the place of this one.

    Raises:
        ArgumentError: it has such convolutions, and cannot change, or the mesh has an Explicit axis, where
            types say where values are.
    """
    if mesh.size == 1:
        return jaxpr
    order = [*dict.fromkeys([*batch_axes, *mesh.axis_names])]
    is_changed = can_change and AxisType.Explicit not in mesh.axis_types
    evened = with_even_updates(jaxpr, mesh)

    def right(equation: Any) -> Any:
        primitive = primitive_name(equation)
        if primitive in REDUCING and is_changed:
            return evened(equation)
        if primitive != 'conv_general_dilated':
            return equation
        features, groups_of_rows = conv_groups(equation)
        if groups_of_rows == 1:
            return _laid_out_as_images(equation) if features > 1 and is_changed else equation
        if not is_changed:
            from scalax._jaxpr.source_lines import line_of  # here, because hardly any program is refused

            raise ArgumentError(
                f'{name} takes the gradient of a grouped convolution ({line_of(equation)}), which XLA sums '
                'over too many devices. scalax corrects this on meshes of Auto axes, in functions that close '
                'over no value of an outer trace.\n'
                'What to do: make the helper with AxisType.Auto, and pass the arrays that it closes over as '
                'arguments'
            )
        return _on_own_rows(equation, mesh, order)

    return Rewriter(right).jaxpr(jaxpr)


def _on_own_rows(equation: Any, mesh: Mesh | AbstractMesh, order: Sequence[str]) -> Any:
    """The convolution on each device's own rows, added up."""
    numbers, axes = conv_dims(equation), []
    rows = shape_of(equation.invars[0])[numbers.lhs_spec[1]]
    for axis in order:  # as many as divide the rows
        if rows % mesh.shape[axis] == 0:
            rows //= mesh.shape[axis]
            axes.append(axis)

    def summed(images: Any, kernel: Any) -> Any:
        return jax.lax.psum(bound(equation, images, kernel), tuple(axes))

    given = [PartitionSpec(*[None] * dim, tuple(axes)) for dim in (numbers.lhs_spec[1], numbers.rhs_spec[1])]
    in_force = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    with jax.sharding.use_abstract_mesh(in_force):
        mapped = jax.shard_map(
            summed, mesh=mesh, in_specs=tuple(given), out_specs=PartitionSpec(), check_vma=False
        )
        return equation_of(mapped, equation)


def _laid_out_as_images(equation: Any) -> Any:
    """A convolution with groups of channels, whose result XLA takes apart as its images are laid out.

    Where it is laid out in another way, as in the gradient of a gradient, it is transposed behind it.
    """
    numbers = conv_dims(equation)
    if numbers.out_spec == numbers.lhs_spec:
        return equation
    alike = numbers._replace(out_spec=numbers.lhs_spec)
    pairs = sorted(zip(numbers.out_spec, numbers.lhs_spec, strict=True))

    def convolved(images: Any, kernel: Any) -> Any:
        found = bound(equation, images, kernel, dimension_numbers=alike)
        return jnp.transpose(found, [dim for _, dim in pairs])

    return equation_of(jax.jit(convolved), equation)
