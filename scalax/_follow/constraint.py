"""Equations of a jaxpr that constrain a value to a trail.

Apart from the pass, because only this file makes equations, and only as JAX makes them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Container
from typing import Any

import jax
from jax.extend.core import Var
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from scalax._follow.trail import Trail


def spec_of(trail: Trail, whole: Container[int] = ()) -> PartitionSpec:
    """The spec that keeps the followed dimensions where they are.

    Args:
        trail: the trail.
        whole: the dimensions that are not sharded if nothing is followed in them. What else there is, is left
            to the compiler.
    """
    return PartitionSpec(
        *[
            axes[0] if len(axes) == 1 else axes or (None if i in whole else PartitionSpec.UNCONSTRAINED)
            for i, axes in enumerate(trail)
        ]
    )


def closed_spec_of(trail: Trail, ndim: int) -> PartitionSpec:
    """The spec of a trail whose other dimensions are whole."""
    return spec_of(trail or ((),) * ndim, range(ndim))


def constraint(var: Any, spec: PartitionSpec, mesh: Mesh | AbstractMesh, source_info: Any) -> Any:
    """An equation that constrains a variable; the mesh is the one in force."""
    template = _template(NamedSharding(mesh, spec), jax.sharding.get_abstract_mesh())
    return template.replace(invars=[var], outvars=[Var(var.aval)], source_info=source_info)


@functools.lru_cache(maxsize=1024)
def _template(sharding: NamedSharding, ambient: AbstractMesh) -> Any:
    """An equation as JAX makes it. Its parameters depend on the sharding and the mesh in force only."""
    sizes = sharding.mesh.shape
    shape = []
    for entry in sharding.spec:
        axes = entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else ()
        shape.append(math.prod(sizes[axis] for axis in axes))

    def constrained(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, sharding)

    [equation] = jax.jit(constrained).trace(jax.ShapeDtypeStruct(tuple(shape), 'float32')).jaxpr.eqns
    return equation
