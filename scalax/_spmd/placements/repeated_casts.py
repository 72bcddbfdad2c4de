"""Elimination of repeated casts and transposes of state, which models make at each use of a weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scalax._jax.equations import Literal, is_same_operation

if TYPE_CHECKING:
    from scalax._spmd.conversions import JaxprEditor

CAST_PRIMITIVES = frozenset(('convert_element_type', 'transpose'))
"""The primitives of casts and transposes."""


def alias_repeated_cast(editor: JaxprEditor, equation: Any) -> bool:
    """Replaces a cast or transpose of state by an earlier identical one, so that one gather serves both.

    Args:
        editor: the editor of the jaxpr.
        equation: an equation of one of the `CAST_PRIMITIVES`.

    Returns:
        Whether there is an earlier one.
    """
    [atom], [var] = equation.invars, equation.outvars
    for cast in () if isinstance(atom, Literal) else editor.values[id(atom)].casts:
        if is_same_operation(cast.narrow_producer, equation):
            editor.alias(var, cast)
            return True
    return False
