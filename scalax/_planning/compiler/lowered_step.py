"""A step that is lowered for a mesh: what is known of it before a compiler sees it."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from scalax._compile.call.signature import name_of
from scalax._compile.sjit.function import sjit
from scalax._core.context.active_helper import MeshOwner
from scalax._core.mesh.meshes import require_devices
from scalax._core.pytree.partition_specs import spec_axes
from scalax._core.render.trial_log import fingerprint
from scalax._jax.devices import coords_of, slice_of
from scalax._jax.equations import argument_names
from scalax._jax.lowered import LoweredArray, arguments_of, results_of, text_of
from scalax._jax.tracing import compiler_options
from scalax._planning.compiler.compilation import xla_flags
from scalax._planning.hardware.specs import Hardware, hardware_of
from scalax._planning.hardware.torus import DevicePosition, positions_of
from scalax.errors import ArgumentError


@dataclasses.dataclass(frozen=True, eq=False)
class LoweredStep:
    """A step that JAX has traced and lowered for the mesh of a helper.

    Attributes:
        name: the name of the function, for messages.
        mesh: the mesh.
        function: the jitted function.
        args: its arguments.
        kwargs: its keyword arguments.
        traced: the ``jax.stages.Traced``.
        lowered: the ``jax.stages.Lowered``.
        already_jitted: whether the user's function was jitted already.
        hardware_override: the hardware that the caller passed in place of the known
            specification of the devices.
    """

    name: str
    mesh: Mesh
    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    traced: Any
    lowered: Any
    already_jitted: bool
    hardware_override: Hardware | None = None

    @property
    def hardware(self) -> Hardware | None:
        """The hardware that it is planned for, if it is known."""
        return self.hardware_override or hardware_of(self.mesh.devices.flat[0].device_kind)

    @property
    def device_positions(self) -> tuple[DevicePosition, ...]:
        """The positions of the devices, in the order of the mesh."""
        return positions_of(self.mesh.devices.flat)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Those that the user gave to ``jax.jit`` or ``sjit``."""
        return compiler_options(self.function, self.args, self.kwargs) if self.already_jitted else {}

    @functools.cached_property
    def shardings(self) -> tuple[list[NamedSharding | None], list[NamedSharding | None]]:
        """Those of arguments and results that are asked for; None where the choice is the compiler's."""
        known = {each.name: each.spec for each in arguments_of(self.lowered)}
        given = [known.get(name) for name in argument_names(self.traced.jaxpr)]  # unused ones too
        taken = [each.spec for each in results_of(self.lowered)]
        return [*map(self._sharding, given)], [*map(self._sharding, taken)]

    def _sharding(self, spec: PartitionSpec | None) -> NamedSharding | None:
        return None if spec is None else NamedSharding(self.mesh, spec)

    @functools.cached_property
    def argument_bytes(self) -> int:
        """The bytes of the arguments in the memory of each device: no program takes less.

        Arguments that the program does not use are not there; what has no sharding yet is divided evenly.
        """
        return sum(map(self._bytes, arguments_of(self.lowered)))

    def _bytes(self, array: LoweredArray) -> int:
        sizes = self.mesh.shape
        axes = sizes if array.spec is None else spec_axes(array.spec)
        return array.bits // (8 * math.prod(sizes[axis] for axis in axes))

    @functools.cached_property
    def fingerprint(self) -> str:
        """A text that differs for steps whose plans differ in more than the lines of the user's files."""
        devices = [
            f'{device.device_kind} {coords_of(device) or device.id} {slice_of(device) or 0}'
            for device in self.mesh.devices.flat
        ]
        options = repr(sorted(self.compiler_options.items()))
        compiler = [*xla_flags(), repr(self.hardware_override), options]
        return fingerprint(
            [self.name, str(self.mesh.shape), *devices, *compiler, text_of(self.lowered)],
        )


def lower_step(
    helper: MeshOwner,
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    hardware: Hardware | None = None,
) -> LoweredStep:
    """Traces and lowers a function.

    Args:
        helper: the helper of the mesh.
        fun: the function.
        args: its arguments.
        kwargs: its keyword arguments.
        hardware: the hardware that the caller passed in place of the known
            specification of the devices.

    Raises:
        MeshError: the helper was made from an AbstractMesh.
        ArgumentError: *fun* is not a function.
    """
    if not callable(fun):
        raise ArgumentError(
            f'plan takes a function first, got {type(fun).__name__}: helper.plan(step, *arguments)'
        )
    mesh = helper.mesh
    if isinstance(mesh, AbstractMesh):
        require_devices(mesh, 'plan')
    name = name_of(fun)
    fun, args, kwargs = pure_call(fun, args, kwargs)
    if isinstance(fun, types.MethodType) and _is_jitted(fun.__func__):
        # Attributes of a bound method are those of the function, which do not know the bound object.
        bound: types.MethodType = fun
        fun, args = bound.__func__, (bound.__self__, *args)
    function: Any = fun if _is_jitted(fun) else sjit(helper, fun, jit_kwargs={})
    traced = _trace(function, name, args, kwargs)
    is_jitted = function is fun
    return LoweredStep(name, mesh, function, args, kwargs, traced, traced.lower(), is_jitted, hardware)


def pure_call(
    fun: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    """A call of the pure function behind one that changes nnx modules; any other call as it is."""
    # As scalax.interop.nnx makes it. The class cannot be imported where flax is not installed.
    if hasattr(fun, 'pure') and hasattr(fun, 'arguments'):
        return fun.pure, fun.arguments(*args, **kwargs), {}
    return fun, args, kwargs


def _trace(function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Traces a jitted function; *name* is that of the user's, for messages."""
    try:
        return function.trace(*args, **kwargs)
    except jax.errors.ConcretizationTypeError as error:  # a TypeError, too
        error.add_note(
            f'{name!r} cannot be planned, because a plan is made without values. Make the value a static '
            'argument (static_argnames), or use jax.lax.cond or jnp.where'
        )
        raise
    except TypeError as error:
        if not args and not kwargs:
            error.add_note(
                f'Is {name} a function that returns a step and its arguments? Plan these: '
                f'helper.plan(*{name}(helper)); one that takes no helper is for autoshard(*{name}(), ...)'
            )
        raise


def _is_jitted(fun: Any) -> bool:
    return hasattr(fun, 'trace') and hasattr(fun, 'lower')
