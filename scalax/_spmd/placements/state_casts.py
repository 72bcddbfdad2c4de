"""Values computed from state, such as casts and transposes, that share one gather of the state.

If the operands of such a computation are smaller than its result, as with quantized weights and their scales,
the operands are gathered, and the computation runs after the gather.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scalax._jax.equations import size_of
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.dim_rules import CHEAP_ELEMENTWISE, ELEMENTWISE, SHAPE_OPS
from scalax._spmd.uses import Uses
from scalax._spmd.values import Value

Read = Callable[[Any], Value]
SAME_STATE = SHAPE_OPS | {'slice', 'dynamic_slice', 'split', 'optimization_barrier', 'neg'}
"""Primitives whose result is the same state as their operand, in another form, or a part of it."""
NARROW = CHEAP_ELEMENTWISE | {'broadcast_in_dim', 'transpose'}
"""Primitives that compute a weight from narrower state, such as quantized integers and their scales."""


def is_gathered_as_operands(value: Value, read: Read, uses: Uses) -> bool:
    """Returns whether the operands from which a state value is computed are gathered instead of the value.

    Args:
        value: the state.
        read: returns the value of a variable.
        uses: the equations that use each variable.
    """
    if value.narrow_producer is None:
        return False
    size = size_of(value.var) * value.var.aval.dtype.itemsize
    if 2 * _bytes_to_gather(value, read) <= size:
        return True
    # Logits, for example, use the transpose of the embedding table: one gather of it serves both.
    is_transpose = primitive_name(value.narrow_producer) == 'transpose'
    return is_transpose and len(gathering_uses(read(value.narrow_producer.invars[0]), uses)) > 1


def gathering_uses(value: Value, uses: Uses) -> list[Any]:
    """Returns the equations that gather a state value. Elementwise ones, as in an update, use its shards."""
    equations = {id(equation): equation for equation in uses.equations(value.var)}.values()
    return [equation for equation in equations if primitive_name(equation) not in ELEMENTWISE]


def _bytes_to_gather(value: Value, read: Read) -> int:
    """Returns the bytes to gather a value or, if fewer, the operands from which it is computed."""
    if value.is_replicated:
        return 0
    size = size_of(value.var) * value.var.aval.dtype.itemsize
    if value.narrow_producer is None:
        return size
    return min(size, sum([_bytes_to_gather(read(x), read) for x in value.narrow_producer.invars]))
