"""Gradients of grouped convolutions, of which XLA's partitioner makes wrong ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from scalax._jax.equations import (
    CALLS,
    WITH_JAXPRS,
    branches,
    called,
    conv_dims,
    conv_groups,
    loop_of,
    opened,
    shape_of,
)
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import bound, equation_of, replaced, with_jaxprs


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
    return _Guard(mesh, batch_axes or mesh.axis_names).jaxpr(jaxpr)


class _Guard:
    def __init__(self, mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> None:
        self._mesh, self._axes = mesh, axes
        # The jaxprs are kept as well, so that no other object gets their ids.
        self._known: dict[int, tuple[Any, Any]] = {}

    def jaxpr(self, jaxpr: Any) -> Any:
        """The jaxpr, or another one in its place."""
        if id(jaxpr) not in self._known:
            before = opened(jaxpr).eqns
            equations = [*map(self._equation, before)]
            changed = any(new is not old for new, old in zip(equations, before, strict=True))
            self._known[id(jaxpr)] = jaxpr, replaced(jaxpr, eqns=equations) if changed else jaxpr
        return self._known[id(jaxpr)][1]

    def _equation(self, equation: Any) -> Any:
        name = primitive_name(equation)
        if name in WITH_JAXPRS:
            held = branches(equation) if name == 'cond' else [_body(equation, name)]
            new = [*map(self.jaxpr, held)]
            same = all(a is b for a, b in zip(new, held, strict=True))
            return equation if same else with_jaxprs(equation, *new)
        if name == 'conv_general_dilated' and conv_groups(equation)[1] > 1:
            return self._on_own_rows(equation)
        return equation

    def _on_own_rows(self, equation: Any) -> Any:
        """The convolution on each device's own rows, added up."""
        numbers, axes = conv_dims(equation), []
        rows = shape_of(equation.invars[0])[numbers.lhs_spec[1]]
        for axis in self._axes:  # as many as divide the rows
            if rows % self._mesh.shape[axis] == 0:
                rows //= self._mesh.shape[axis]
                axes.append(axis)

        def summed(images: Any, kernel: Any) -> Any:
            result = bound(equation, images, kernel)
            return jax.lax.psum(result, axes) if axes else result

        def split(dim: int) -> PartitionSpec:
            return PartitionSpec(*[None] * dim, tuple(axes)) if axes else PartitionSpec()

        mapped = jax.shard_map(
            summed,
            mesh=self._mesh,
            in_specs=(split(numbers.lhs_spec[1]), split(numbers.rhs_spec[1])),
            out_specs=PartitionSpec(),
            axis_names={*axes} or {*self._mesh.axis_names},
            check_vma=False,
        )
        return equation_of(mapped, equation)


def _body(equation: Any, name: str) -> Any:
    return called(equation) if name in CALLS else loop_of(equation).body
