"""What `shard_map` and `microbatch` share.

Each returns a function that runs in the trace of its caller, and is compiled where there is none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from scalax._compile.call.call_key import Call, is_concrete, type_fits_mesh
from scalax._compile.call.placement import move_leaves
from scalax._compile.call.placement_errors import reject_deleted
from scalax._compile.tracebacks import HideInternalFrames
from scalax._jax.tracing import is_compiled

Given = TypeVar('Given')
_hiding_ours = HideInternalFrames()


def called(
    fun: Callable[..., Any],
    read: Callable[[Sequence[Any], Mapping[str, Any]], Given],
    run: Callable[[Given], Any],
    at_once: Callable[[Given], Any],
) -> Callable[..., Any]:
    """A function for users, with the name and the parameters of their own.

    Args:
        fun: the user's function.
        read: makes one object of the arguments and keywords of a call.
        run: runs a call in the trace of its caller.
        at_once: runs a call outside of compiled functions.
    """

    @functools.wraps(fun)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        given = read(args, kwargs)
        with _hiding_ours:
            return run(given) if is_compiled() else at_once(given)

    return wrapper


def compiled(run: Callable[..., Any], name: str) -> jax.stages.Wrapped:
    """``jax.jit`` of a function of ours, which JAX's messages and profiles call as the user's."""

    def named(*args: Any) -> Any:
        return run(*args)

    named.__name__ = named.__qualname__ = name
    return jax.jit(named)


def placed(call: Call, mesh: Any, wanted: Callable[[], Sequence[NamedSharding]]) -> Sequence[Any]:
    """The flat arguments of a call outside of compiled functions, on the devices of the mesh.

    Args:
        call: the call.
        mesh: the mesh; without devices, nothing moves.
        wanted: the shardings to which leaves move; asked for only if one has to.

    Raises:
        ArgumentError: an argument's buffers are gone.
    """
    reject_deleted(call)
    if isinstance(mesh, AbstractMesh):
        return call.flat_args
    moving = [i for i, leaf in enumerate(call.leaves) if not _stays_on(leaf, mesh)]
    if not moving:
        return call.flat_args
    shardings = wanted()
    return move_leaves(call.flat_args, {i: shardings[i] for i in moving})


def _stays_on(leaf: Any, mesh: Any) -> bool:
    """Whether an argument stays where it is: on these devices, with a type of this mesh."""
    if isinstance(leaf, jax.core.Tracer):
        # Of a transformation that runs at once. Where its type has no mesh, it may be on any devices.
        return AxisType.Explicit not in mesh.axis_types or not jax.typeof(leaf).sharding.mesh.empty
    if not (is_concrete(leaf) and leaf.committed and isinstance(leaf.sharding, NamedSharding)):
        return False
    return [*leaf.sharding.mesh.devices.flat] == [*mesh.devices.flat] and type_fits_mesh(leaf, mesh)
