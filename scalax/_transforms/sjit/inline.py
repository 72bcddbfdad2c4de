"""Calls without a program: parts of functions whose mesh axes have other types than the helper's.

Inside `auto_axes`, `explicit_axes` and ``shard_map``, where shapes are local, too.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from scalax._jax.tracing import is_compiled
from scalax._trace.constraints import apply_shardings, has_other_types, on_devices, retyped_mesh
from scalax._transforms.calls.call import Call, Shardings, call_key
from scalax._transforms.calls.shardings import FunctionRules, Options
from scalax._transforms.sjit.trace import TracedFunction


def runs_inline(mesh: Mesh | AbstractMesh) -> bool:
    """Whether a call is part of a function whose mesh axes have other types than those of *mesh*."""
    ambient = jax.sharding.get_abstract_mesh()
    return not ambient.empty and (bool(ambient.manual_axes) or retyped_mesh(mesh) is not mesh)


def in_eager_axis_modes(mesh: Mesh | AbstractMesh) -> bool:
    """Whether this runs in JAX's own auto_axes or explicit_axes, outside of any ``jax.jit``.

    The types of axes in force then differ from those of ``jax.set_mesh``.
    """
    ambient = jax.sharding.get_abstract_mesh()
    return has_other_types(ambient, mesh) and jax.sharding.get_mesh().abstract_mesh != ambient


def run_inline(function: TracedFunction, call: Call, options: Options) -> Any:
    """Runs the user's function where it is called, by the types that mesh axes have there."""
    call_key(call)  # raises about leaves that are not arrays
    if jax.sharding.get_abstract_mesh().manual_axes:  # shapes are local, and shardings are the caller's
        return function.run_users(call.flat_args)
    mesh = retyped_mesh(function.helper.mesh)
    rules = FunctionRules(function.helper, call.signature, options, mesh)
    arguments, leaves = rules.arguments(call), call.leaves
    leaves = apply_shardings(leaves, arguments)
    constraints: Shardings | None = rules.constraints(call)
    if constraints is not None:
        leaves = apply_shardings(leaves, constraints)
    outputs = function.run_users(call.replaced(leaves))
    outputs = apply_shardings(outputs, rules.outputs(outputs, call, arguments))
    devices = getattr(function.helper.mesh, 'devices', None)
    if devices is None or AxisType.Explicit in mesh.axis_types or not is_compiled():
        return outputs
    return on_devices(outputs, Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types))
