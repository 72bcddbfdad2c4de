"""Follows the part of a jaxpr in which the compiler has a choice, and passes over what comes behind it.

Nearly half of the equations of a train step are those of its optimizer, and its last ones: it computes each
parameter anew, element by element. There is nothing to keep in them, and to look at them takes time.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from scalax._follow.follow import follow
from scalax._follow.said import placed_by_user
from scalax._follow.types import Arguments, Followed
from scalax._jax.equations import CALLS, Literal, called, opened
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import replaced, with_operands
from scalax._jaxprs.dims import ELEMENTWISE

# Nothing is kept behind these, and they lose no rows.
_PLAIN = ELEMENTWISE | {'broadcast_in_dim', 'reduce_max', 'reduce_min', 'reduce_sum'}


def follow_choices(jaxpr: Any, arguments: Arguments, mesh: Mesh | AbstractMesh) -> Followed:
    """Like `follow`, of a jaxpr that is in no other one: nobody asks for the trails of its results."""
    inner = opened(jaxpr)
    end = len(inner.eqns)
    while end and _is_plain(inner.eqns[end - 1]):
        end -= 1
    rest = inner.eqns[end:]
    read = [*[atom for equation in rest for atom in equation.invars], *inner.outvars]
    passed = {id(atom): atom for atom in read if not isinstance(atom, Literal)}
    head = replaced(jaxpr, eqns=inner.eqns[:end], outvars=[*passed.values()])
    found = follow(head, arguments, mesh)
    if found.jaxpr is head:  # nothing is constrained
        return dataclasses.replace(found, jaxpr=jaxpr)
    kept = opened(found.jaxpr)
    renamed = {old: new for old, new in zip(passed, kept.outvars, strict=True) if old != id(new)}
    names = renamed.keys()

    def current(atom: Any) -> Any:
        return renamed.get(id(atom), atom)

    equations = [
        equation
        if names.isdisjoint(map(id, equation.invars))
        else with_operands(equation, [*map(current, equation.invars)])
        for equation in rest
    ]
    whole = replaced(jaxpr, eqns=[*kept.eqns, *equations], outvars=[*map(current, inner.outvars)])
    return dataclasses.replace(found, jaxpr=whole)


def _is_plain(equation: Any) -> bool:
    name = primitive_name(equation)
    if name in CALLS:
        inside = opened(called(equation)).eqns
        return not any(placed_by_user(equation)) and all(map(_is_plain, inside))
    return name in _PLAIN
