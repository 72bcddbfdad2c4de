"""Forms of state, such as its casts and transposes: one gather of the state serves all of them.

Of narrow state, such as integers and their scales, the weight that an equation takes is computed behind the
gathers, if these send less.
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
"""Of one operand, these make another form of it, or a part."""
NARROW = CHEAP_ELEMENTWISE | {'broadcast_in_dim', 'transpose'}
"""Of narrow state, such as integers and their scales, these make the weight that an equation takes."""


def is_gathered_as_operands(value: Value, read: Read, uses: Uses) -> bool:
    """Returns whether what state is computed of is gathered in its place.

    Args:
        value: the state.
        read: gives the value of a variable.
        uses: the equations that take variables.
    """
    if value.narrow_producer is None:
        return False
    size = size_of(value.var) * value.var.aval.dtype.itemsize
    if 2 * _bytes_to_gather(value, read) <= size:
        return True
    # Such as the transpose of an embedding table, by which logits are computed: one gather serves both.
    is_transpose = primitive_name(value.narrow_producer) == 'transpose'
    return is_transpose and len(gathering_uses(read(value.narrow_producer.invars[0]), uses)) > 1


def gathering_uses(value: Value, uses: Uses) -> list[Any]:
    """Returns the equations that gather state; an update, which is elementwise, takes its blocks."""
    equations = {id(equation): equation for equation in uses.equations(value.var)}.values()
    return [equation for equation in equations if primitive_name(equation) not in ELEMENTWISE]


def _bytes_to_gather(value: Value, read: Read) -> int:
    """Returns the bytes of the least that is gathered of a value, or of what it is computed of."""
    if value.is_replicated:
        return 0
    size = size_of(value.var) * value.var.aval.dtype.itemsize
    if value.narrow_producer is None:
        return size
    return min(size, sum([_bytes_to_gather(read(x), read) for x in value.narrow_producer.invars]))
