"""Wrappers that run in the trace of their caller, and are jitted if there is no such trace.

`shard_map` and `microbatch` return such functions.
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

BoundArguments = TypeVar('BoundArguments')
_hide_internal_frames = HideInternalFrames()


def defer_jit(
    fun: Callable[..., Any],
    bind: Callable[[Sequence[Any], Mapping[str, Any]], BoundArguments],
    run: Callable[[BoundArguments], Any],
    run_jitted: Callable[[BoundArguments], Any],
) -> Callable[..., Any]:
    """Returns a function with the name and the parameters of *fun* that is jitted only outside of a trace.

    Args:
        fun: the user's function.
        bind: combines the arguments and keywords of a call in one object.
        run: runs a call in the trace of its caller.
        run_jitted: runs a call outside of compiled functions.
    """

    @functools.wraps(fun)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        arguments = bind(args, kwargs)
        with _hide_internal_frames:
            return run(arguments) if is_compiled() else run_jitted(arguments)

    return wrapper


def jit_with_name(fun: Callable[..., Any], name: str) -> jax.stages.Wrapped:
    """Jits an internal function under the name of the user's function, for JAX's messages and profiles."""

    def named(*args: Any) -> Any:
        return fun(*args)

    named.__name__ = named.__qualname__ = name
    return jax.jit(named)


def place_on_mesh(
    call: Call, mesh: Any, resolve_shardings: Callable[[], Sequence[NamedSharding]]
) -> Sequence[Any]:
    """Returns the flat arguments of a call outside of compiled functions, moved to the devices of the mesh.

    Args:
        call: the call.
        mesh: the mesh. If it has no devices, nothing moves.
        resolve_shardings: returns the shardings to which leaves move. It is called only if a leaf moves.

    Raises:
        ArgumentError: the buffers of an argument have been deleted.
    """
    reject_deleted(call)
    if isinstance(mesh, AbstractMesh):
        return call.flat_args
    moving = [i for i, leaf in enumerate(call.leaves) if not _is_on_mesh(leaf, mesh)]
    if not moving:
        return call.flat_args
    shardings = resolve_shardings()
    return move_leaves(call.flat_args, {i: shardings[i] for i in moving})


def _is_on_mesh(leaf: Any, mesh: Any) -> bool:
    """Whether an argument is on the devices of the mesh, with a type of this mesh."""
    if isinstance(leaf, jax.core.Tracer):
        # A tracer of a transformation, such as jax.grad. If its type names no mesh, its devices are unknown.
        return AxisType.Explicit not in mesh.axis_types or not jax.typeof(leaf).sharding.mesh.empty
    if not (is_concrete(leaf) and leaf.committed and isinstance(leaf.sharding, NamedSharding)):
        return False
    return [*leaf.sharding.mesh.devices.flat] == [*mesh.devices.flat] and type_fits_mesh(leaf, mesh)
