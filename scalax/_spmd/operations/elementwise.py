"""Fast path for elementwise equations whose operands have equal placements, as in an optimizer.

Most equations of a step are of this kind. The general rules (`op_rules`) give the same result more slowly.
"""

from __future__ import annotations

from typing import Any

from scalax._jax.equations import Literal, shape_of
from scalax._spmd.conversions import JaxprEditor
from scalax._spmd.placements.repeated_casts import CAST_PRIMITIVES
from scalax._spmd.placements.state_casts import NARROW, SAME_STATE


def write_pointwise(editor: JaxprEditor, name: str, equation: Any) -> bool:
    """Writes an equation if its operands are scalars, and shards of equal shapes and placements.

    Args:
        editor: the editor of the jaxpr.
        name: the name of its primitive, one of `op_rules.POINTWISE`.
        equation: the equation.

    Returns:
        Whether the equation was written.
    """
    first, origin, [var] = None, None, equation.outvars
    shape, atoms = shape_of(var), list[Any]()
    for atom in equation.invars:
        if isinstance(atom, Literal):
            if shape_of(atom):
                return False
            atoms.append(editor.code.literal(atom))
            continue
        value = editor.values[id(atom)]
        if value.is_replicated:
            if shape_of(atom) or value.is_zero:
                return False
        elif value.has_sum or value.is_zero or shape_of(atom) != shape:
            return False
        elif first is None:
            first = value
        elif value.placements != first.placements:
            return False
        if origin is None:
            origin = value.origin
        atoms.append(value.atom)
    if first is None:
        return False
    output = first.with_same_placements(var, editor.code.var(var, shape_of(first.atom)))
    if output.is_state or name in SAME_STATE:
        output.origin = origin
    if output.is_state and name in NARROW:
        output.narrow_producer = equation
    if output.is_state and name in CAST_PRIMITIVES:
        first.casts = (*first.casts, output)
    editor.values[id(var)] = output
    editor.eqns.append(editor.code.localize(equation, atoms, [output.atom]))
    return True
