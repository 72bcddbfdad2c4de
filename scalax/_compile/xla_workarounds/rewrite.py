"""The rewrite that applies the workarounds to a jaxpr."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh

from scalax._compile.xla_workarounds.grouped_convolutions import convolve_local_examples, keep_input_layout
from scalax._compile.xla_workarounds.scatter_padding import REDUCING, scatter_padding
from scalax._jax.equations import conv_groups
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import Rewriter
from scalax.errors import ArgumentError


def apply_workarounds(
    jaxpr: Any, mesh: Mesh | AbstractMesh, batch_axes: Sequence[str], *, name: str, can_change: bool = True
) -> Any:
    """Replaces the operations of a jaxpr that XLA's partitioner computes incorrectly.

    Returns the same jaxpr if it has none.

    Args:
        jaxpr: the jaxpr, open or closed.
        mesh: the mesh.
        batch_axes: the mesh axes of the batch. Examples are sharded over these first.
        name: the name of the function, for messages.
        can_change: whether the caller can use another jaxpr in place of this one.

    Raises:
        ArgumentError: the jaxpr has the gradient of a grouped convolution, and cannot change, or the mesh has
            an Explicit axis, where types hold shardings.
    """
    if mesh.size == 1:
        return jaxpr
    order = [*dict.fromkeys([*batch_axes, *mesh.axis_names])]
    may_replace = can_change and AxisType.Explicit not in mesh.axis_types
    pad_updates = scatter_padding(jaxpr, mesh)

    def replace(equation: Any) -> Any:
        primitive = primitive_name(equation)
        if primitive in REDUCING and may_replace:
            return pad_updates(equation)
        if primitive != 'conv_general_dilated':
            return equation
        feature_groups, batch_groups = conv_groups(equation)
        if batch_groups == 1:
            return keep_input_layout(equation) if feature_groups > 1 and may_replace else equation
        if not may_replace:
            from scalax._jaxpr.source_lines import line_of  # here, because hardly any program is rejected

            raise ArgumentError(
                f'{name} takes the gradient of a grouped convolution ({line_of(equation)}), which XLA sums '
                'over too many devices. scalax corrects this on meshes of Auto axes, in functions that close '
                'over no value of an outer trace.\n'
                'What to do: make the helper with AxisType.Auto, and pass the arrays that it closes over as '
                'arguments'
            )
        return convolve_local_examples(equation, mesh, order)

    return Rewriter(replace).jaxpr(jaxpr)
