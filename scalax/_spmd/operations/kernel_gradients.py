"""Gradients of the kernels of grouped convolutions, whose channels XLA cannot shard along the Auto axes."""

from __future__ import annotations

from typing import Any

from jax.sharding import PartitionSpec

from scalax._jax.equations import conv_dims, conv_groups, shape_of
from scalax._jax.primitives import primitive_name


def kernel_gradient_spec(equation: Any) -> PartitionSpec | None:
    """Returns the spec along the Auto axes that leaves the channels of a gradient unsharded.

    XLA aborts the process if it shards them. Returns None if an equation is not such a gradient.
    """
    if primitive_name(equation) != 'conv_general_dilated' or conv_groups(equation)[1] == 1:
        return None
    entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * len(shape_of(equation.outvars[0]))
    entries[conv_dims(equation).out_spec[0]] = None
    return PartitionSpec(*entries)
