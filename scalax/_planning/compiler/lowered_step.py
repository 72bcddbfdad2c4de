"""A step that is lowered for a mesh, before compilation."""

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
        already_jitted: whether the user's function is jitted.
        hardware_override: the hardware that the caller passed in place of that of the devices.
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
        """The hardware of the plan; None if it is unknown."""
        return self.hardware_override or hardware_of(self.mesh.devices.flat[0].device_kind)

    @property
    def device_positions(self) -> tuple[DevicePosition, ...]:
        """The positions of the devices, in the order of the mesh."""
        return positions_of(self.mesh.devices.flat)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """The compiler options that the user passed to ``jax.jit`` or ``sjit``."""
        return compiler_options(self.function, self.args, self.kwargs) if self.already_jitted else {}

    @functools.cached_property
    def shardings(self) -> tuple[list[NamedSharding | None], list[NamedSharding | None]]:
        """The requested shardings of arguments and results; None where the compiler chooses."""
        specs = {array.name: array.spec for array in arguments_of(self.lowered)}
        arguments = [specs.get(name) for name in argument_names(self.traced.jaxpr)]  # also unused ones
        results = [array.spec for array in results_of(self.lowered)]
        return [*map(self._sharding, arguments)], [*map(self._sharding, results)]

    def _sharding(self, spec: PartitionSpec | None) -> NamedSharding | None:
        return None if spec is None else NamedSharding(self.mesh, spec)

    @functools.cached_property
    def argument_bytes(self) -> int:
        """The bytes of the arguments on each device, a lower bound of the memory of the program.

        Unused arguments do not count. An argument without a sharding counts as evenly sharded.
        """
        return sum(map(self._bytes, arguments_of(self.lowered)))

    def _bytes(self, array: LoweredArray) -> int:
        sizes = self.mesh.shape
        axes = sizes if array.spec is None else spec_axes(array.spec)
        return array.bits // (8 * math.prod(sizes[axis] for axis in axes))

    @functools.cached_property
    def fingerprint(self) -> str:
        """A text that is the same for steps whose plans differ at most in source lines."""
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
        hardware: the hardware, if not that of the devices.

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
        # A bound method has the attributes of its function, such as trace, which do not pass the bound
        # object.
        method: types.MethodType = fun
        fun, args = method.__func__, (method.__self__, *args)
    function: Any = fun if _is_jitted(fun) else sjit(helper, fun, jit_kwargs={})
    traced = _trace(function, name, args, kwargs)
    is_jitted = function is fun
    return LoweredStep(name, mesh, function, args, kwargs, traced, traced.lower(), is_jitted, hardware)


def pure_call(
    fun: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    """Returns the call of the pure function in a function of `scalax.interop.nnx`; other calls unchanged."""
    # The class cannot be imported where flax is not installed.
    if hasattr(fun, 'pure') and hasattr(fun, 'arguments'):
        return fun.pure, fun.arguments(*args, **kwargs), {}
    return fun, args, kwargs


def _trace(function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Traces a jitted function; *name* is that of the user's function, for messages."""
    try:
        return function.trace(*args, **kwargs)
    except jax.errors.ConcretizationTypeError as error:  # a subclass of TypeError
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
