"""Forms of state, such as its casts and transposes: one gather of the state serves all of them.

Of narrow state, such as integers and their scales, the weight that an equation takes is computed behind the
gathers, if these send less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scalax._jax.equations import Literal, size_of
from scalax._jax.primitives import primitive_name
from scalax._jaxprs.dims import CHEAP, ELEMENTWISE, FORWARDS
from scalax._spmd.values import Value

if TYPE_CHECKING:
    from scalax._spmd.edit import Edit

SAME_STATE = FORWARDS | {'slice', 'dynamic_slice', 'split', 'optimization_barrier', 'neg'}
"""Of one operand, these make another form of it, or a part."""
NARROW = CHEAP | {'broadcast_in_dim', 'transpose'}
"""Of narrow state, such as integers and their scales, these make the weight that an equation takes."""
FORMS = frozenset(('convert_element_type', 'transpose'))
"""Models make these of one weight in each place where they use it."""


def is_form_again(edit: Edit, name: str, equation: Any) -> bool:
    """Names a cast or a transpose of state after the same one before it, so that one gather serves both.

    Args:
        edit: the jaxpr that is partitioned.
        name: the name of its primitive, one of `FORMS`.
        equation: the equation.

    Returns:
        Whether there is one before it.
    """
    [atom], [var] = equation.invars, equation.outvars
    forms = () if isinstance(atom, Literal) else edit.values[id(atom)].forms
    for form in forms:
        maker = form.narrow_maker
        if primitive_name(maker) == name and maker.params == equation.params:
            edit.alias(var, form)
            return True
    return False


def is_gathered_as_operands(edit: Edit, value: Value) -> bool:
    """Returns whether what state is computed of is gathered in its place.

    Args:
        edit: the jaxpr that is partitioned.
        value: the state.
    """
    if value.narrow_maker is None:
        return False
    size = size_of(value.var) * value.var.aval.dtype.itemsize
    if 2 * _bytes_to_gather(edit, value) <= size:
        return True
    # Such as the transpose of an embedding table, by which logits are computed: one gather serves both.
    is_transpose = primitive_name(value.narrow_maker) == 'transpose'
    return is_transpose and _count_uses(edit, edit.read(value.narrow_maker.invars[0])) > 1


def is_used_again(edit: Edit, value: Value, backward: bool) -> bool:
    """Returns whether state is gathered for several equations of the forward or of the backward pass.

    Args:
        edit: the jaxpr that is partitioned.
        value: the state.
        backward: of which pass.
    """
    return value.is_state and _count_uses(edit, value, backward) > 1


def _bytes_to_gather(edit: Edit, value: Value) -> int:
    """The bytes of the least that is gathered of a value, or of what it is computed of."""
    if value.is_replicated:
        return 0
    size = size_of(value.var) * value.var.aval.dtype.itemsize
    if value.narrow_maker is None:
        return size
    return min(size, sum([_bytes_to_gather(edit, edit.read(x)) for x in value.narrow_maker.invars]))


def _count_uses(edit: Edit, value: Value, backward: bool | None = None) -> int:
    """How many equations take state with examples: an update, which is elementwise, takes its blocks."""
    found = {id(equation): equation for equation in edit.uses.equations(value.var)}.values()
    others = [equation for equation in found if primitive_name(equation) not in ELEMENTWISE]
    return len([x for x in others if backward is None or edit.is_backward(x) == backward])
