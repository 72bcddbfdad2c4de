"""Primitives of other libraries, which may fail to lower inside of ``jax.shard_map``.

Some compare the types of arrays with types from outside. The types of arrays in `shard_map` name its mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from scalax._jax.equations import shape_of
from scalax._jax.rewriting import rebind

_OTHER_PLATFORM = 'not found for platform'


def lowering_error(equation: Any, mesh: AbstractMesh, axes: Collection[str]) -> Exception | None:
    """Returns the error that an equation raises where it is lowered inside of `shard_map`; None if it lowers.

    Relies on `lower` naming the platform if a primitive has no lowering for it, which is no error: a plan may
    be for other devices.

    Args:
        equation: the equation.
        mesh: the mesh, of Auto axes.
        axes: the manual axes.
    """
    avals = [atom.aval for atom in equation.invars]
    if not all(isinstance(aval, jax.core.ShapedArray) for aval in avals):
        return None
    replicated = PartitionSpec()
    mapped = jax.shard_map(
        functools.partial(rebind, equation),
        mesh=mesh,
        in_specs=replicated,
        out_specs=replicated,
        axis_names={*axes},
        check_vma=False,
    )
    structs = [jax.ShapeDtypeStruct(shape_of(atom), atom.aval.dtype) for atom in equation.invars]
    try:
        with jax.sharding.use_abstract_mesh(mesh):  # instead of another ambient mesh
            jax.jit(mapped).trace(*structs).lower(lowering_platforms=('cpu',))
    except Exception as error:  # noqa: BLE001 - code of another library may raise anything
        return None if _OTHER_PLATFORM in str(error) else error
    return None
