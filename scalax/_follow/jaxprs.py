"""What jaxprs say of a mesh."""

from __future__ import annotations

from typing import Any

from jax.sharding import AbstractMesh, AxisType, NamedSharding

from scalax._jax.equations import is_jaxpr, opened, values_in
from scalax._tree.specs import entries


def is_on_mesh(jaxpr: Any) -> bool:
    """Whether an equation, also in a jaxpr inside, says something of a mesh without its devices.

    Bare specs do. Constants that a transformation makes have the mesh in force too, without a word on it.
    """
    seen, found = set(), [opened(jaxpr)]
    for inner in found:  # which grows meanwhile
        for part in (part for equation in inner.eqns for part in values_in(equation)):
            if is_jaxpr(part) and id(opened(part)) not in seen:
                seen.add(id(opened(part)))
                found.append(opened(part))
            elif isinstance(part, NamedSharding) and isinstance(part.mesh, AbstractMesh):
                if any(entries(part.spec)) or AxisType.Explicit in part.mesh.axis_types:
                    return True
            elif isinstance(part, AbstractMesh) and not part.empty:
                return True
    return False
