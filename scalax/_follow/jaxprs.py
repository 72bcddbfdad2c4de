"""What jaxprs say of a mesh."""

from __future__ import annotations

from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from scalax._jax.equations import is_jaxpr, opened, values_in
from scalax._tree.specs import entries


def is_on_mesh(jaxpr: Any, mesh: Mesh | AbstractMesh) -> bool:
    """Whether an equation, also in a jaxpr inside, says something of such a mesh without its devices.

    Bare specs do. Constants that a transformation makes have the mesh in force too, without a word on it.
    A function of a mesh of another shape has seen to its devices itself.
    """
    seen, found = set(), [opened(jaxpr)]
    for inner in found:  # which grows meanwhile
        for part in (part for equation in inner.eqns for part in values_in(equation)):
            if is_jaxpr(part) and id(opened(part)) not in seen:
                seen.add(id(opened(part)))
                found.append(opened(part))
            elif isinstance(part, NamedSharding) and isinstance(part.mesh, AbstractMesh):
                if part.mesh.shape != mesh.shape:
                    continue
                if any(entries(part.spec)) or AxisType.Explicit in part.mesh.axis_types:
                    return True
            elif isinstance(part, AbstractMesh) and part.shape == mesh.shape:
                return True
    return False
