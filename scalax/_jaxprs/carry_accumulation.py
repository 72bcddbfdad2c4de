"""What a round of a loop adds to a sum that it carries."""

from __future__ import annotations

from collections import Counter
from typing import Any

from scalax._jax.primitives import primitive_name


def added_by_round(body: Any, var: Any, out: Any) -> list[Any] | None:
    """What a round adds to a carried value that it uses for nothing else; None if it does otherwise."""
    readers = {id(x): each for each in body.eqns for x in each.invars}
    uses = Counter(map(id, [*[x for each in body.eqns for x in each.invars], *body.outvars]))
    found: list[Any] = []
    while uses[id(var)] == 1 and var is not out:
        reader = readers.get(id(var))
        if reader is None:
            return None
        name, after = primitive_name(reader), reader.outvars[0]
        is_same = name == 'convert_element_type' and after.aval.dtype == var.aval.dtype
        if name not in ('add', 'add_any') and not is_same:
            return None
        found += [x for x in reader.invars if x is not var]
        var = after
    return found if uses[id(var)] == 1 else None
