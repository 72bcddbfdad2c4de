"""Fast path for elementwise equations whose operands have equal placements, as in an optimizer.

Most equations of a step are of this kind. The general rules (`op_rules`) give the same result more slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scalax._jax.equations import Literal, shape_of
from scalax._jax.primitives import primitive_name
from scalax._spmd.conversions import JaxprEditor
from scalax._spmd.placements.op_rules import POINTWISE
from scalax._spmd.placements.placement import Placements
from scalax._spmd.placements.repeated_casts import CAST_PRIMITIVES
from scalax._spmd.placements.state_casts import NARROW, SAME_STATE
from scalax._spmd.values import Value


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


def operand_placements(
    equation: Any, values: Sequence[Value], replicated: Placements
) -> Sequence[Placements]:
    """Returns the placements of the operands of an equation.

    Of an elementwise equation, operands of which devices compute any block alone count as replicated.
    """
    if primitive_name(equation) in POINTWISE:
        fixed = {value.placements for value in values if value.producer is None and value.has_examples}
        if len(fixed) == 1:
            return [
                value.placements if value.producer is None or value.placements in fixed else replicated
                for value in values
            ]
    return [value.placements for value in values]
