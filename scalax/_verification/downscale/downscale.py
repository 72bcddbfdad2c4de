"""A step for a large mesh, made small enough for the devices at hand, so that it stands for the large one.

There are numbers: those of a configuration, or sizes of dimensions of the arguments. Smaller ones are tried:
the step is traced with them, and they are taken if the program is the same but for its sizes (`alike`), and
computes less. Relations between numbers need not be known: without them a step cannot be traced, or differs.
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
_MESHES = 3  # that are tried
_NO_SIZE = 2**31  # as many tokens as a model is trained with


@dataclasses.dataclass(frozen=True, eq=False)
class DownscaledStep:
    """A small step that stands for a large one.

    Attributes:
        helper: the helper of a small mesh.
        step: the step over that.
        args: its arguments, ShapeDtypeStructs.
        config: its configuration; None if there is none.
        sizes: what is smaller: name -> size before and after.
        caveats: what is not alike, with lines of the user's code.
        is_faithful: whether its program is that of the large step, but for sizes.
    """

    helper: Any
    step: Any
    args: tuple[Any, ...]
    config: Any
    sizes: Mapping[str, tuple[int, int]]
    caveats: tuple[str, ...]
    is_faithful: bool


def small_meshes(shape: Mapping[str, int], devices: int) -> list[dict[str, int]]:
    """The sizes of mesh axes on a few devices, the best ones first: at least 2 where they were.

    Args:
        shape: mesh axis -> size.
        devices: how many devices there are.

    Raises:
        MeshError: there are too few.

    Example:
        >>> small_meshes({'data': 1, 'fsdp': 64, 'tp': 8}, 8)[0]
        {'data': 1, 'fsdp': 4, 'tp': 2}
    """
    parts = [
        [part for part in range(min(size, 2), min(size, devices) + 1) if part <= 2 or size % part == 0]
        for size in shape.values()
    ]
    fitting = [sizes for sizes in itertools.product(*parts) if math.prod(sizes) <= devices]
    if not fitting:
        long = [name for name, size in shape.items() if size > 1]
        needed = 2 ** len(long)
        raise MeshError(
            f'a mesh with the axes of ({axis_sizes_text(shape)}) needs at least {needed} devices, 2 along '
            f'each of {", ".join(long)}, but there are {devices}: simulate them with '
            f"jax.config.update('jax_num_cpu_devices', {needed}) before JAX is used"
        )

    def cost(sizes: Sequence[int]) -> Any:
        """What does not divide the large mesh, devices that are left over, what stays long, and where."""
        pairs = [*zip(shape.values(), sizes, strict=True)]
        uneven = sum(size % small > 0 for size, small in pairs)
        longest = max(size / small for size, small in pairs)
        return uneven, -math.prod(sizes), longest, [-small for small in sizes]

    return [dict(zip(shape, sizes, strict=True)) for sizes in sorted(fitting, key=cost)]


def downscale(
    make: Callable[[Any, Any], StepAndArgs],
    config: Any,
    helper: MeshOwner,
    devices: Sequence[Any],
    seconds: float = _SECONDS,
) -> DownscaledStep:
    """Reduces the numbers of a configuration, and then the dimensions of arguments that do not come from it.

    The first of some small meshes is taken where the step is like the large one, or else the first: where a
    dimension is as long as a mesh axis, and half of it does not divide, 2 devices are too few.

    Args:
        make: from a helper and a configuration to a step over its mesh, and the arguments.
        config: the configuration: a dataclass, a dict, a list or a tuple of numbers, or of more of these; or
            None.
        helper: the helper of the large mesh; an AbstractMesh will do.
        devices: the devices for the small one.
        seconds: how long better numbers are looked for, over each small mesh.

    Raises:
        MeshError: there are too few devices.
        ArgumentError: the step cannot be traced, neither as it is nor over the small mesh.
    """
    own = helper_on_mesh(helper, helper.mesh.shape)
    large = FullSizeStep(own, *_made(make, own, config))
    found = []
    for sizes in small_meshes(helper.mesh.shape, len(devices))[:_MESHES]:
        small = helper_on_mesh(helper, sizes, np.array(devices[: math.prod(sizes.values())]))
        found.append(_over(small, make, config, large, time.monotonic() + seconds))
        if found[-1].is_faithful:
            return found[-1]
    return found[0]


def _over(
    small: Any, make: Callable[[Any, Any], StepAndArgs], config: Any, large: FullSizeStep, until: float
) -> DownscaledStep:
    """The step over a small mesh."""
    numbers = dict(config_sizes(config))
    search = Shrinker(
        large, small, numbers, lambda sizes: _made(make, small, replace_sizes(config, sizes)), until
    )
    search.run()
    config, smaller = replace_sizes(config, search.sizes), search.smaller()
    if not search.is_small:  # the code has sizes of its own, such as how long the rows of the batch are
        step, args = _made(make, small, config)
        given, names = StepCall(small, step, args, {}), dict[int, str]()
        for path, leaf in zip(given.paths, given.leaves, strict=True):
            for dim, size in enumerate(leaf.shape):
                names.setdefault(size, f'dimension {dim} of {path}')
        numbers = {name: size for size, name in names.items() if size > 1}
        search = Shrinker(
            large, small, numbers, lambda sizes: (step, resize_arguments(args, sizes, small.mesh)), until
        )
        search.run()
    step, args = search.made()
    smaller |= search.smaller()
    return DownscaledStep(small, step, args, config, smaller, (*search.differences(),), search.is_faithful)


def _made(make: Callable[[Any, Any], StepAndArgs], helper: Any, config: Any) -> StepAndArgs:
    step, args, _ = pure_call(*make(helper, config), {})
    return step, tuple(args)


def config_sizes(config: Any, name: str = '') -> Iterator[tuple[str, int]]:
    """The numbers of a configuration that may be sizes, with their names."""
    if type(config) is int and 1 < config < _NO_SIZE:  # neither booleans nor members of enumerations
        yield name, config
    for key, part in _parts(config).items():
        yield from config_sizes(part, f'{name}.{key}' if name else str(key))


def _parts(config: Any) -> Mapping[Any, Any]:
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {each.name: getattr(config, each.name) for each in dataclasses.fields(config) if each.init}
    if isinstance(config, tuple | list):
        return dict(enumerate(config))
    return config if isinstance(config, Mapping) else {}


def replace_sizes(config: Any, sizes: Sizes) -> Any:
    """The configuration with other numbers in the place of some."""
    before = _parts(config)
    parts = {key: replace_sizes(part, sizes) for key, part in before.items()}
    if all(parts[key] is before[key] for key in parts):
        return sizes.get(config, config) if type(config) is int else config
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.replace(config, **parts)
    if isinstance(config, Mapping):
        return type(config)(parts)  # type: ignore[call-arg]
    return type(config)(*parts.values()) if hasattr(config, '_fields') else type(config)(parts.values())


def resize_arguments(args: Sequence[Any], sizes: Sizes, mesh: Any) -> tuple[Any, ...]:
    """Arguments as ShapeDtypeStructs with other dimensions in the place of some, over another mesh."""

    def smaller(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        own = getattr(leaf, 'sharding', None)
        placed = NamedSharding(mesh, own.spec) if isinstance(own, NamedSharding) else None
        shape = tuple([sizes.get(size, size) for size in leaf.shape])
        return jax.ShapeDtypeStruct(
            shape, dtype_on_devices(leaf), sharding=placed, weak_type=is_weakly_typed(leaf)
        )

    return jax.tree.map(smaller, tuple(args))
