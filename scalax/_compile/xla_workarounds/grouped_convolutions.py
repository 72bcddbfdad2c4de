"""Grouped convolutions, which XLA's partitioner computes incorrectly in two cases.

The gradient of the kernel of a grouped or depthwise convolution is a convolution with ``batch_group_count``.
XLA sums it over all devices, including devices that hold the same examples: if the batch is sharded over
only some of the mesh axes, the gradient is too large by the number of copies. `convolve_local_examples`
replaces it.

For a convolution with ``feature_group_count``, XLA shards the result as if it had the dimension order of the
input. The gradient of a gradient has another order. `keep_input_layout` replaces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from scalax._jax.equations import conv_dims, shape_of
from scalax._jax.rewriting import rebind, trace_equation


def convolve_local_examples(equation: Any, mesh: Mesh | AbstractMesh, axis_order: Sequence[str]) -> Any:
    """Returns a convolution in which each device convolves its local examples, and one all-reduce sums them.

    The `shard_map` is over all mesh axes, because XLA makes the same mistake over axes that are left to it.

    Args:
        equation: a convolution with ``batch_group_count``. The dimension of the examples is the feature
            dimension of its input and the output-feature dimension of its kernel.
        mesh: the mesh.
        axis_order: all mesh axes, in the order in which they shard the examples.
    """
    dims, sharded_over = conv_dims(equation), []
    num_examples = shape_of(equation.invars[0])[dims.lhs_spec[1]]
    for axis in axis_order:  # as many axes as divide the number of examples
        if num_examples % mesh.shape[axis] == 0:
            num_examples //= mesh.shape[axis]
            sharded_over.append(axis)

    def convolve_and_sum(images: Any, kernel: Any) -> Any:
        return jax.lax.psum(rebind(equation, images, kernel), tuple(sharded_over))

    in_specs = tuple(
        PartitionSpec(*[None] * dim, tuple(sharded_over)) for dim in (dims.lhs_spec[1], dims.rhs_spec[1])
    )
    abstract_mesh = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    with jax.sharding.use_abstract_mesh(abstract_mesh):
        mapped = jax.shard_map(
            convolve_and_sum, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec(), check_vma=False
        )
        return trace_equation(mapped, equation)


def keep_input_layout(equation: Any) -> Any:
    """Returns a convolution in the dimension order of its input, followed by a transpose."""
    dims = conv_dims(equation)
    if dims.out_spec == dims.lhs_spec:
        return equation
    same_order = dims._replace(out_spec=dims.lhs_spec)
    permutation = [dim for _, dim in sorted(zip(dims.out_spec, dims.lhs_spec, strict=True))]

    def convolve_and_transpose(images: Any, kernel: Any) -> Any:
        result = rebind(equation, images, kernel, dimension_numbers=same_order)
        return jnp.transpose(result, permutation)

    return trace_equation(jax.jit(convolve_and_transpose), equation)
