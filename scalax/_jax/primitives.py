"""Which primitives are JAX's own: anybody can make one called `sort` or `dot_general`."""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.core.primitives

KERNEL = 'pallas_call'
_LISTED = {
    value.name: value
    for module in (jax.extend.core.primitives, jax.lax)
    for value in vars(module).values()
    if isinstance(value, jax.extend.core.Primitive)
}


def primitive_name(equation: Any) -> str:
    """The name of an equation's primitive; nothing if JAX has another one of this name.

    Other libraries name primitives as they like, and tables say what JAX's do and which parameters they have.
    Relies on public modules of JAX listing its primitives. One that they do not list, such as ``shard_map``,
    is known by its name.
    """
    primitive = equation.primitive
    return primitive.name if _LISTED.get(primitive.name, primitive) is primitive else ''
