"""Casts and transposes of state that a model makes again in each place where it uses a weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scalax._jax.equations import Literal
from scalax._jax.primitives import primitive_name

if TYPE_CHECKING:
    from scalax._spmd.conversions import Edit

FORMS = frozenset(('convert_element_type', 'transpose'))
"""The primitives that make them."""


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
    for form in () if isinstance(atom, Literal) else edit.values[id(atom)].forms:
        maker = form.narrow_maker
        if primitive_name(maker) == name and maker.params == equation.params:
            edit.alias(var, form)
            return True
    return False
