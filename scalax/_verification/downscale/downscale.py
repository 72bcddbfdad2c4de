"""Downscaling of a step for a large mesh: a small step with the same program except for its sizes.

The sizes are the integers of a configuration, or the dimensions of the arguments. The step is traced with
smaller sizes, which are taken if the fingerprint of the program stays the same. Relations between sizes need
not be known: sizes that violate them fail to trace, or change the fingerprint.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from scalax._core.context.active_helper import MeshOwner
from scalax._core.pytree.partition_specs import axis_sizes_text
from scalax._core.pytree.paths import dtype_on_devices, is_weakly_typed
from scalax._planning.compiler.lowered_step import pure_call
from scalax._verification.downscale.shrink import FullSizeStep, Shrinker, Sizes, StepAndArgs
from scalax._verification.reference import StepCall, helper_on_mesh, is_array
from scalax.errors import MeshError

_SECONDS = 60.0
_MAX_MESHES = 3
_MAX_SIZE = 2**31  # larger integers are not sizes, such as the number of tokens to train with


@dataclasses.dataclass(frozen=True, eq=False)
class DownscaledStep:
    """A small step that stands for a large one.

    Attributes:
        helper: the helper of the small mesh.
        step: the step over the small mesh.
        args: its arguments, as ShapeDtypeStructs.
        config: its configuration; None if there is none.
        sizes: name -> size before and after, for each size that was reduced.
        caveats: the differences to the program of the large step, with lines of the user's code.
        is_faithful: whether the program is that of the large step except for its sizes.
    """

    helper: Any
    step: Any
    args: tuple[Any, ...]
    config: Any
    sizes: Mapping[str, tuple[int, int]]
    caveats: tuple[str, ...]
    is_faithful: bool


def small_meshes(shape: Mapping[str, int], devices: int) -> list[dict[str, int]]:
    """Returns small meshes with the same axes, the best one first. Axes of several devices keep at least 2.

    Args:
        shape: mesh axis -> size, for the large mesh.
        devices: the number of devices.

    Raises:
        MeshError: there are too few devices.

    Example:
        >>> small_meshes({'data': 1, 'fsdp': 64, 'tp': 8}, 8)[0]
        {'data': 1, 'fsdp': 4, 'tp': 2}
    """
    small_sizes = [
        [small for small in range(min(size, 2), min(size, devices) + 1) if small <= 2 or size % small == 0]
        for size in shape.values()
    ]
    fitting = [sizes for sizes in itertools.product(*small_sizes) if math.prod(sizes) <= devices]
    if not fitting:
        axes = [name for name, size in shape.items() if size > 1]
        needed = 2 ** len(axes)
        raise MeshError(
            f'a mesh with the axes of ({axis_sizes_text(shape)}) needs at least {needed} devices, 2 along '
            f'each of {", ".join(axes)}, but there are {devices}: simulate them with '
            f"jax.config.update('jax_num_cpu_devices', {needed}) before JAX is used"
        )

    def cost(sizes: Sequence[int]) -> Any:
        """Ranks sizes: axes that do not divide, devices left over, the largest reduction, early axes."""
        pairs = [*zip(shape.values(), sizes, strict=True)]
        uneven = sum(size % small > 0 for size, small in pairs)
        reduction = max(size / small for size, small in pairs)
        return uneven, -math.prod(sizes), reduction, [-small for small in sizes]

    return [dict(zip(shape, sizes, strict=True)) for sizes in sorted(fitting, key=cost)]


def downscale(
    make: Callable[[Any, Any], StepAndArgs],
    config: Any,
    helper: MeshOwner,
    devices: Sequence[Any],
    seconds: float = _SECONDS,
) -> DownscaledStep:
    """Reduces the sizes of a configuration, then the dimensions of arguments that do not come from it.

    Tries several small meshes, and returns the first faithful step, or the step over the first mesh. Some
    steps need a mesh axis of more than 2 devices: a dimension as long as the axis may not divide by its half.

    Args:
        make: from a helper and a configuration to a step over its mesh, and the arguments.
        config: the configuration: a dataclass, dict, list or tuple of integers or of nested ones; or None.
        helper: the helper of the large mesh, which may be an AbstractMesh.
        devices: the devices for the small mesh.
        seconds: the time limit of the search for sizes, for each small mesh.

    Raises:
        MeshError: there are too few devices.
        ArgumentError: the step can be traced neither over the large mesh nor over the small one.
    """
    large_helper = helper_on_mesh(helper, helper.mesh.shape)
    full = FullSizeStep(large_helper, *_make_step(make, large_helper, config))
    steps = []
    for sizes in small_meshes(helper.mesh.shape, len(devices))[:_MAX_MESHES]:
        small_helper = helper_on_mesh(helper, sizes, np.array(devices[: math.prod(sizes.values())]))
        steps.append(_downscale_over(small_helper, make, config, full, time.monotonic() + seconds))
        if steps[-1].is_faithful:
            return steps[-1]
    return steps[0]


def _downscale_over(
    helper: Any,
    make: Callable[[Any, Any], StepAndArgs],
    config: Any,
    full: FullSizeStep,
    deadline: float,
) -> DownscaledStep:
    """Downscales a step over a small mesh."""

    def make_with_config(sizes: Sizes) -> StepAndArgs:
        return _make_step(make, helper, replace_sizes(config, sizes))

    shrinker = Shrinker(full, helper, dict(config_sizes(config)), make_with_config, deadline)
    shrinker.run()
    config, changed = replace_sizes(config, shrinker.sizes), shrinker.changed_sizes()
    if not shrinker.is_small:  # some sizes are not in the configuration, such as the sequence length
        step, args = _make_step(make, helper, config)
        call, names = StepCall(helper, step, args, {}), dict[int, str]()
        for path, leaf in zip(call.paths, call.leaves, strict=True):
            for dim, size in enumerate(leaf.shape):
                names.setdefault(size, f'dimension {dim} of {path}')

        def make_with_args(sizes: Sizes) -> StepAndArgs:
            return step, resize_arguments(args, sizes, helper.mesh)

        named_sizes = {name: size for size, name in names.items() if size > 1}
        shrinker = Shrinker(full, helper, named_sizes, make_with_args, deadline)
        shrinker.run()
    step, args = shrinker.make_step()
    changed |= shrinker.changed_sizes()
    caveats = tuple(shrinker.differences())
    return DownscaledStep(helper, step, args, config, changed, caveats, shrinker.is_faithful)


def _make_step(make: Callable[[Any, Any], StepAndArgs], helper: Any, config: Any) -> StepAndArgs:
    step, args, _ = pure_call(*make(helper, config), {})
    return step, tuple(args)


def config_sizes(config: Any, name: str = '') -> Iterator[tuple[str, int]]:
    """Yields the integers of a configuration that may be sizes, with their names."""
    if type(config) is int and 1 < config < _MAX_SIZE:  # not bool, and not IntEnum
        yield name, config
    for key, field in _fields(config).items():
        yield from config_sizes(field, f'{name}.{key}' if name else str(key))


def _fields(config: Any) -> Mapping[Any, Any]:
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        fields = [field for field in dataclasses.fields(config) if field.init]
        return {field.name: getattr(config, field.name) for field in fields}
    if isinstance(config, tuple | list):
        return dict(enumerate(config))
    return config if isinstance(config, Mapping) else {}


def replace_sizes(config: Any, sizes: Sizes) -> Any:
    """Returns the configuration with other sizes; parts without changes are returned as they are."""
    old_fields = _fields(config)
    fields = {key: replace_sizes(field, sizes) for key, field in old_fields.items()}
    if all(fields[key] is old_fields[key] for key in fields):
        return sizes.get(config, config) if type(config) is int else config
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.replace(config, **fields)
    if isinstance(config, Mapping):
        return type(config)(fields)  # type: ignore[call-arg]
    return type(config)(*fields.values()) if hasattr(config, '_fields') else type(config)(fields.values())


def resize_arguments(args: Sequence[Any], sizes: Sizes, mesh: Any) -> tuple[Any, ...]:
    """Returns arguments as ShapeDtypeStructs with other sizes of dimensions, over another mesh."""

    def resize(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        sharding = getattr(leaf, 'sharding', None)
        resized_sharding = NamedSharding(mesh, sharding.spec) if isinstance(sharding, NamedSharding) else None
        return jax.ShapeDtypeStruct(
            tuple(sizes.get(size, size) for size in leaf.shape),
            dtype_on_devices(leaf),
            sharding=resized_sharding,
            weak_type=is_weakly_typed(leaf),
        )

    return jax.tree.map(resize, tuple(args))
