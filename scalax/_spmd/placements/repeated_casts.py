"""Casts and transposes of state that a model makes again in each place where it uses a weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scalax._jax.equations import Literal, is_same_operation

if TYPE_CHECKING:
    from scalax._spmd.conversions import JaxprEditor

CAST_PRIMITIVES = frozenset(('convert_element_type', 'transpose'))
"""The primitives that make them."""


def alias_repeated_cast(editor: JaxprEditor, equation: Any) -> bool:
    """Names a cast or a transpose of state after the same one before it, so that one gather serves both.

    Args:
        editor: the jaxpr that is partitioned.
        equation: the equation, of one of `CAST_PRIMITIVES`.

    Returns:
        Whether there is one before it.
    """
    [atom], [var] = equation.invars, equation.outvars
    for form in () if isinstance(atom, Literal) else editor.values[id(atom)].casts:
        if is_same_operation(form.narrow_producer, equation):
            editor.alias(var, form)
            return True
    return False
