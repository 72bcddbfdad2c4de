"""A step for a large mesh, made small enough for the devices at hand, so that it stands for the large one.

There are numbers: those of a configuration, or sizes of dimensions of the arguments. Smaller ones are tried:
the step is traced with them, and they are taken if the program is the same but for its sizes (`alike`), and
computes less. Relations between numbers need not be known: without them a step cannot be traced, or differs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from scalax._trace.contexts import MeshOwner
from scalax._transforms.sjit import SjitFunction, made_anew
from scalax._tree.specs import axis_sizes_text
from scalax._verify.numbers import Sizes, Values, numbers_of, with_numbers
from scalax._verify.search import Made, Search, Work, traced
from scalax.errors import MeshError, plural

_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, eq=False)
class Reduced:
    """A small step that stands for a large one.

    Attributes:
        mesh: mesh axis -> size.
        sizes: what is smaller: name -> size before and after.
        config: the configuration of the small step; None if there is none.
        step: the step over the helper of the small mesh.
        args: its arguments, ShapeDtypeStructs.
        helper: that helper.
        said: what is not smaller or not alike, and why, with lines of the user's code.
        is_alike: whether its program is that of the large step, but for sizes.
    """

    mesh: Mapping[str, int]
    sizes: Mapping[str, tuple[int, int]]
    config: Any
    step: Any
    args: tuple[Any, ...]
    helper: Any
    said: tuple[str, ...]
    is_alike: bool


def small_mesh(shape: Mapping[str, int], devices: int, longest: str = '') -> dict[str, int]:
    """The sizes of mesh axes on a few devices: at least 2 where they were, and more for larger ones.

    Args:
        shape: mesh axis -> size.
        devices: how many devices there are.
        longest: a mesh axis that grows before others.

    Raises:
        MeshError: there are too few.

    Example:
        >>> small_mesh({'data': 1, 'fsdp': 64, 'tp': 8}, 8)
        {'data': 1, 'fsdp': 4, 'tp': 2}
    """
    small = {name: _least_part(size) for name, size in shape.items()}
    if math.prod(small.values()) > devices:  # what is odd may be even rather than not be there
        small = {name: min(size, 2) for name, size in shape.items()}
    needed = math.prod(small.values())
    if needed > devices:
        long = [name for name, size in shape.items() if size > 1]
        raise MeshError(
            f'a mesh with the axes of ({axis_sizes_text(shape)}) takes {needed} devices at least, 2 along '
            f'each of {", ".join(long)}, and there are {devices}: simulate them with '
            f"jax.config.update('jax_num_cpu_devices', {needed}) before JAX is used"
        )
    while True:
        room = devices // math.prod(small.values())
        growing = [
            (name == longest, shape[name] // size, shape[name], name)
            for name, size in small.items()
            if shape[name] % size == 0 and 1 < _least_part(shape[name] // size) <= room
        ]
        if not growing:
            return small
        *_, name = max(growing, key=lambda each: each[:3])
        small[name] *= _least_part(shape[name] // small[name])


def _least_part(size: int) -> int:
    """The least number of parts that is even or odd as *size* is: 1, 2, or 3."""
    return size if size < 2 else 2 + size % 2


def _helper_over(helper: Any, mesh: Mesh | AbstractMesh) -> Any:
    return type(helper).from_mesh(
        mesh, on_indivisible=helper.on_indivisible, follow_batch=helper.follow_batch
    )


def reduced(
    make_step: Callable[[Any, Any], Made],
    config: Any,
    helper: MeshOwner,
    devices: Sequence[Any],
    seconds: float = _SECONDS,
) -> Reduced:
    """Reduces the numbers of a configuration, and then the dimensions of arguments that do not come from it.

    Args:
        make_step: from a helper and a configuration to a step over its mesh, and the arguments.
        config: the configuration: a dataclass, a dict, a list or a tuple of numbers, or of more of these.
        helper: the helper of the large mesh; an AbstractMesh will do.
        devices: the devices for the small one.
        seconds: how long better ones are looked for, over each of a few small meshes.

    Raises:
        MeshError: there are too few devices.
        ArgumentError: the step cannot be traced, neither as it is nor over the small mesh.
    """

    def make(own: Any, values: Values) -> Made:
        return _pure(*make_step(own, with_numbers(config, values)))

    def over_mesh(large: Any, small: Any) -> Reduced:
        numbers = dict(numbers_of(config))
        work = Work(large, small, seconds, make(large, numbers))
        search = Search(work, numbers, make)
        search.run()
        search.restore()
        best, searches = search.best, [search]
        if not search.is_done:  # the code has sizes of its own, such as how long the rows of the batch are
            searches.append(_of_arguments(work, small, lambda own: make(own, best)))
        return _result(searches, devices, with_numbers(config, best))

    return _over_meshes(helper, devices, over_mesh)


def reduced_args(
    step_over: Callable[[Any], Any],
    args: Sequence[Any],
    helper: MeshOwner,
    devices: Sequence[Any],
    seconds: float = _SECONDS,
) -> Reduced:
    """Reduces the dimensions of the arguments of a step, whose code has no sizes of its own.

    Args:
        step_over: from a helper to the step over its mesh; `over` makes one of what `sjit` made.
        args: the arguments, with the shapes of the large step; arrays or ShapeDtypeStructs.
        helper: as for `reduced`; this and the others.
        devices: the devices for the small mesh.
        seconds: how long better ones are looked for, over each of a few small meshes.

    Raises:
        MeshError: there are too few devices.
        ArgumentError: as for `reduced`.
    """

    def make(own: Any) -> Made:
        return _pure(step_over(own), tuple(args))

    def over_mesh(large: Any, small: Any) -> Reduced:
        work = Work(large, small, seconds, make(large))
        return _result([_of_arguments(work, large, make)], devices, None)

    return _over_meshes(helper, devices, over_mesh)


def over(step: SjitFunction[Any, Any]) -> Callable[[Any], Any]:
    """From a helper to the same step over its mesh."""
    return lambda helper: made_anew(step, helper)


def _pure(step: Any, args: tuple[Any, ...]) -> Made:
    """The pure function behind a step that changes nnx modules, and what it takes; any other as it is."""
    if hasattr(step, 'pure') and hasattr(step, 'arguments'):
        return step.pure, step.arguments(*args)
    return step, args


def _of_arguments(work: Work, helper: Any, make: Callable[[Any], Made]) -> Search:
    """Smaller arguments of a step that is traced over the mesh of a helper."""
    step, args = make(helper)
    sizes = Sizes(*traced(helper, step, args), args)
    search = Search(work, sizes.values, lambda own, values: (make(own)[0], sizes.args(values, own.mesh)))
    search.run()
    return search


def _over_meshes(helper: Any, devices: Sequence[Any], reduce: Callable[[Any, Any], Reduced]) -> Reduced:
    """The small step over the first of several small meshes where it is like the large one, or the first one.

    Where a dimension is as long as a mesh axis, and half of it does not divide, 2 devices are too few.
    """
    shape, types = helper.mesh.shape, helper.mesh.axis_types

    def abstract(sizes: Mapping[str, int]) -> Any:
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
        return _helper_over(helper, mesh)

    meshes = [small_mesh(shape, len(devices), longest) for longest in ('', *shape)]
    found = []
    for i, sizes in enumerate(meshes):
        if sizes not in meshes[:i]:
            found.append(reduce(abstract(shape), abstract(sizes)))
            if found[-1].is_alike:
                return found[-1]
    return found[0]


def _result(searches: Sequence[Search], devices: Sequence[Any], config: Any) -> Reduced:
    """The result of searches, the last of which has the step."""
    last = searches[-1]
    small = last.work.small
    shape = small.mesh.shape
    grid = np.array(devices[: math.prod(shape.values())]).reshape(tuple(shape.values()))
    own = _helper_over(small, Mesh(grid, tuple(shape), axis_types=small.mesh.axis_types))
    step, args = last.made(own, last.best)
    sizes = {
        name: (before, search.best[name])
        for search in searches
        for name, before in search.first.items()
        if before != search.best[name]
    }
    said = [text for search in searches for text in search.said()]
    if paths := last.work.rules.decided_otherwise(step, args):
        said.append(
            'sharded as in the large step, although the rules decide differently at small sizes: '
            f'{plural(len(paths), "array")}, such as {paths[0]}'
        )
    said += last.differences()
    return Reduced(dict(shape), sizes, config, step, args, own, tuple(said), last.is_alike)
