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
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from scalax._jax.equations import loop_of
from scalax._jaxprs.dimensions import Dimensions, Numbers
from scalax._trace.contexts import MeshOwner
from scalax._transforms.sjit import SjitFunction, names_of_arguments
from scalax._tree.paths import dtype_on_devices, join, leaf_shape, optional_path
from scalax._tree.specs import axis_sizes_text
from scalax._util.user_frames import file_text, users_own
from scalax._verify.alike import Axes, Program, Reader, division
from scalax._verify.kept_rules import KeptRules
from scalax.errors import ArgumentError, MeshError, plural

Values = dict[str, int]
Made = tuple[Any, tuple[Any, ...]]
"""A step, and its arguments."""

_SECONDS = 40.0
# Elements of all results. Fewer run in no time; more are worth it where dimensions then divide as before.
_FEW, _MANY = 2**22, 2**24
_LONG = 32  # a dimension that is worth a word
_JAX = jax.__file__.removesuffix('__init__.py')


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
    """

    mesh: Mapping[str, int]
    sizes: Mapping[str, tuple[int, int]]
    config: Any
    step: Any
    args: tuple[Any, ...]
    helper: Any
    said: tuple[str, ...]


# --- The mesh --------------------------------------------------------------------------------------------


def small_mesh(shape: Mapping[str, int], devices: int) -> dict[str, int]:
    """The sizes of mesh axes on a few devices: at least 2 where they were, and more for larger ones.

    Args:
        shape: mesh axis -> size.
        devices: how many devices there are.

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
            (shape[name] // size, shape[name], name)
            for name, size in small.items()
            if shape[name] % size == 0 and 1 < _least_part(shape[name] // size) <= room
        ]
        if not growing:
            return small
        _, _, name = max(growing, key=lambda each: each[:2])
        small[name] *= _least_part(shape[name] // small[name])


def _least_part(size: int) -> int:
    """The least number of parts that is even or odd as *size* is: 1, 2, or 3."""
    return size if size < 2 else 2 + size % 2


def _helper_over(helper: Any, mesh: Mesh | AbstractMesh) -> Any:
    return type(helper).from_mesh(
        mesh, on_indivisible=helper.on_indivisible, follow_batch=helper.follow_batch
    )


# --- What is reduced -------------------------------------------------------------------------------------


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
        seconds: how long better ones are looked for.

    Raises:
        MeshError: there are too few devices.
        ArgumentError: the step cannot be traced, neither as it is nor over the small mesh.
    """
    work = _Work(helper, devices, seconds)

    def make(own: Any, values: Mapping[str, int]) -> Made:
        return _pure(lambda given: make_step(given, _changed(config, '', values)))(own)

    numbers = dict(_numbers(config, ''))
    wanted = work.large(lambda own: make(own, numbers))
    searches = [by_config := _Search(work, wanted, numbers, make)]
    by_config.run()
    by_config.restore()
    if not by_config.is_done:  # the code has sizes of its own, such as how long the rows of the batch are
        searches.append(_of_arguments(work, wanted, lambda own: make(own, by_config.best)))
        searches[-1].run()
    return work.result(searches, _changed(config, '', by_config.best))


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
        seconds: how long better ones are looked for.

    Raises:
        MeshError: there are too few devices.
        ArgumentError: as for `reduced`.
    """
    work = _Work(helper, devices, seconds)

    make = _pure(lambda own: (step_over(own), tuple(args)))
    wanted = work.large(make)
    search = _of_arguments(work, wanted, make)
    search.run()
    return work.result([search], None)


def over(step: SjitFunction[Any, Any]) -> Callable[[Any], Any]:
    """From a helper to the same step over its mesh."""
    make, (_, function) = step.__reduce__()
    return lambda helper: make(helper, function)


def _pure(make: Callable[[Any], Made]) -> Callable[[Any], Made]:
    """The pure function behind a step that changes nnx modules, and what it takes; any other as it is."""

    def made(helper: Any) -> Made:
        step, args = make(helper)
        if hasattr(step, 'pure') and hasattr(step, 'arguments'):
            return step.pure, step.arguments(*args)
        return step, args

    return made


def _numbers(config: Any, name: str) -> Iterator[tuple[str, int]]:
    """The numbers of a configuration, from 2 on, with their names."""
    if isinstance(config, int) and not isinstance(config, bool) and config > 1:
        yield name, config
    for key, part in _parts(config):
        yield from _numbers(part, f'{name}.{key}' if name else str(key))


def _parts(config: Any) -> Iterator[tuple[Any, Any]]:
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        yield from (
            (each.name, getattr(config, each.name)) for each in dataclasses.fields(config) if each.init
        )
    elif isinstance(config, Mapping):
        yield from config.items()
    elif isinstance(config, tuple | list):
        yield from enumerate(config)


def _changed(config: Any, name: str, values: Mapping[str, int]) -> Any:
    """The configuration with other numbers."""
    parts = {
        key: _changed(part, f'{name}.{key}' if name else str(key), values) for key, part in _parts(config)
    }
    if not any(parts[key] is not part for key, part in _parts(config)):
        return values.get(name, config) if isinstance(config, int) else config
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.replace(config, **parts)
    if isinstance(config, Mapping):
        return type(config)(parts)  # type: ignore[call-arg]
    made = type(config)
    return made(*parts.values()) if hasattr(config, '_fields') else made(parts.values())


class _Dimensions(Dimensions):
    """Those of all stacks that a loop runs over are one."""

    def loop(self, equation: Any, operands: Sequence[Numbers]) -> Sequence[Numbers]:
        results = super().loop(equation, operands)
        loop = loop_of(equation)
        first, *others = [
            each[0] for each in (*loop.parts(operands)[2], *results[loop.carried :]) if each
        ] or [0]
        for other in others:
            self.classes.unite(first, other)
        return results


def _of_arguments(work: _Work, wanted: Program, make: Callable[[Any], Made]) -> _Search:
    """The search for smaller arguments."""
    step, args = make(work.small)
    jaxpr, _ = _traced(work.small, step, args)
    leaves, structure = jax.tree.flatten(args)
    arrays = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
    found = _Dimensions(jaxpr)
    classes: dict[int, dict[tuple[int, int], int]] = {}
    for i, numbers in zip(arrays, found.arguments, strict=True):
        for dim, (number, size) in enumerate(zip(numbers, leaf_shape(leaves[i]) or (), strict=True)):
            if size > 1:
                classes.setdefault(found.classes.root(number), {})[i, dim] = size
    units: dict[str, dict[tuple[int, int], int]] = {}
    values: Values = {}
    paths = _names(step, args)
    for places in classes.values():
        i, dim = next(iter(places))
        name = f'dimension {dim} of {paths[i]}'
        values[name] = unit = math.gcd(*places.values())
        units[name] = {place: size // unit for place, size in places.items()}

    def smaller(own: Any, sizes: Mapping[str, int]) -> Made:
        again, _ = (step, args) if own is work.small else make(own)
        shapes = {i: [*(leaf_shape(leaves[i]) or ())] for i in arrays}
        for name, places in units.items():
            for (i, dim), unit in places.items():
                shapes[i][dim] = unit * sizes[name]
        structs = [
            _struct(leaf, tuple(shapes[i]), own.mesh) if i in shapes else leaf
            for i, leaf in enumerate(leaves)
        ]
        return again, jax.tree.unflatten(structure, structs)

    return _Search(work, wanted, {name: value for name, value in values.items() if value > 1}, smaller)


def _names(step: Any, args: Sequence[Any]) -> list[str]:
    """What the leaves of arguments are called."""
    own = names_of_arguments(step, args) or []
    names = own if len(own) == len(args) else [f'argument {i}' for i, _ in enumerate(args)]
    return [
        join(name, optional_path(path)) or name
        for name, argument in zip(names, args, strict=True)
        for path, _ in jax.tree.leaves_with_path(argument)
    ]


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, 'shape') and hasattr(leaf, 'dtype')


def _struct(leaf: Any, shape: tuple[int, ...], mesh: Any) -> jax.ShapeDtypeStruct:
    own = getattr(leaf, 'sharding', None)
    moved = NamedSharding(mesh, own.spec) if isinstance(own, NamedSharding) else None
    return jax.ShapeDtypeStruct(shape, dtype_on_devices(leaf), sharding=moved)


def _traced(helper: Any, step: Any, args: Sequence[Any]) -> tuple[Any, list[str]]:
    """What a step computes, and what its arguments are called."""
    leaves, structure = jax.tree.flatten(tuple(args))
    arrays = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
    names = _names(step, args)

    def call(values: Sequence[Any]) -> Any:
        given = {**dict(enumerate(leaves)), **dict(zip(arrays, values, strict=True))}
        return step(*jax.tree.unflatten(structure, given.values()))

    with helper.get_context():
        jaxpr = jax.make_jaxpr(call)([leaves[i] for i in arrays])
    return jaxpr, [names[i] for i in arrays]


# --- The search ------------------------------------------------------------------------------------------


class _Work:
    """What the searches for one step have in common."""

    def __init__(self, helper: Any, devices: Sequence[Any], seconds: float) -> None:
        large = helper.mesh
        self.sizes = small_mesh(large.shape, len(devices))
        types, names = large.axis_types, tuple(self.sizes)
        self._helper = helper
        self._big = _helper_over(helper, AbstractMesh(tuple(large.shape.values()), names, axis_types=types))
        self.small = _helper_over(helper, AbstractMesh(tuple(self.sizes.values()), names, axis_types=types))
        grid = np.array(devices[: math.prod(self.sizes.values())]).reshape(tuple(self.sizes.values()))
        self._on_devices = _helper_over(helper, Mesh(grid, names, axis_types=types))
        self.reader = Reader()
        self.rules = KeptRules(large.shape)
        self._until = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._until

    def parts(self, axes: Axes) -> tuple[int, int]:
        """In how many parts axes divide a dimension: in the large mesh and in the small one."""
        return tuple(math.prod(mesh[axis] for axis in axes) for mesh in (self._helper.mesh.shape, self.sizes))  # type: ignore[return-value]

    def large(self, make: Callable[[Any], Made]) -> Program:
        """The program of the large step."""
        step, args = make(self._big)
        return self.program(self._big, self.rules.in_step(step), args)

    def program(self, helper: Any, step: Any, args: Sequence[Any], axes: Iterable[Axes] = ()) -> Program:
        """The program of a step."""
        jaxpr, names = _traced(helper, step, args)
        return self.reader.program(jaxpr, names, helper.mesh.shape, axes)

    def result(self, searches: Sequence[_Search], config: Any) -> Reduced:
        """The result of searches, the last of which has the step."""
        last = searches[-1]
        step, args = last.made(self._on_devices, last.best)
        sizes = {
            name: (before, search.best[name])
            for search in searches
            for name, before in search.first.items()
            if before != search.best[name]
        }
        said = [text for search in searches for text in search.said()]
        self.rules.otherwise.clear()
        if isinstance(step, SjitFunction) and (step.shardings_for(*args), self.rules.otherwise)[1]:
            paths = [*self.rules.otherwise]
            said.append(
                f'placed as in the large step, and otherwise by rules at small sizes: '
                f'{plural(len(paths), "array")}, such as {paths[0]}'
            )
        said += last.differences()
        return Reduced(self.sizes, sizes, config, step, args, self._on_devices, tuple(said))


class _Search:
    """Looks for smaller numbers.

    Args:
        work: what all searches have in common.
        wanted: the large step.
        numbers: name -> number.
        make: from a helper, and other numbers, to a step and its arguments.

    Attributes:
        first: the numbers at first.
        best: the best ones so far.
    """

    def __init__(
        self,
        work: _Work,
        wanted: Program,
        numbers: Values,
        make: Callable[[Any, Mapping[str, int]], Made],
    ) -> None:
        self._work, self._wanted, self._make = work, wanted, make
        self.first, self.best = numbers, dict(numbers)
        self._known: dict[tuple[int, ...], Program | str] = {}
        self._refused: dict[str, str] = {}
        self._smaller: set[str] = set()  # those that make the step smaller by themselves
        self._idle: set[str] = set()  # those that do not
        found = self._program(self.best)
        self._now = found if isinstance(found, Program) else None

    @property
    def is_done(self) -> bool:
        """Whether the best numbers make a small step, and no other program."""
        return self._now is not None and self._now.elements <= _MANY and not self._differences(self._now)

    def made(self, helper: Any, values: Mapping[str, int]) -> Made:
        """The step and its arguments over the mesh of a helper, placed as those of the large one."""
        step, args = self._make(helper, values)
        return self._work.rules.in_step(step), args

    def _program(self, values: Values) -> Program | str:
        """The program of other numbers, or why there is none."""
        key = tuple(values.values())
        if key not in self._known:
            helper = self._work.small
            try:
                step, args = self.made(helper, values)
                self._known[key] = self._work.program(helper, step, args, self._wanted.axes)
            except Exception as error:  # noqa: BLE001 - of the user's code, whatever it is
                self._known[key] = _failure(error)
        return self._known[key]

    def _differences(self, program: Program) -> frozenset[int]:
        return program.operations ^ self._wanted.operations

    def _score(self, program: Program | None, sizes_too: bool) -> tuple[float, ...]:
        if program is None:
            return (math.inf,)
        sizes = len(program.sizes ^ self._wanted.sizes) if sizes_too else 0
        return len(self._differences(program)), sizes, program.elements

    def _offer(
        self,
        changes: Mapping[str, int],
        sizes_too: bool = False,
        most: float = math.inf,
        *,
        or_equal: bool = False,
    ) -> bool:
        """Takes other numbers if they are better."""
        values = {**self.best, **changes}
        is_small = self.is_done and self._elements < _FEW and not sizes_too
        if values == self.best or is_small or self._work.is_over:
            return False
        found = self._program(values)
        if isinstance(found, Program):
            if len(changes) == 1 and found.elements == self._elements:
                self._idle.update(changes)
            score, now = self._score(found, sizes_too), self._score(self._now, sizes_too)
            if (score < now or (or_equal and score == now)) and found.elements <= most:
                if len(changes) == 1:
                    self._smaller.update(changes)
                self.best, self._now = values, found
                return True
            text = '' if score[:2] <= now[:2] else self._text_of(found)
        else:
            text = found
        if len(changes) == 1 and text:
            self._refused.setdefault(next(iter(changes)), text)
        return False

    def _text_of(self, program: Program) -> str:
        wanted = self._wanted.operations
        lost = self._work.reader.where(wanted - program.operations)
        new = self._work.reader.where(program.operations - wanted)
        return f'another program: {(lost or new or ["another one"])[0]}'

    def run(self) -> None:
        """Looks for the smallest numbers, then for those whose dimensions divide as they did.

        Raises:
            ArgumentError: no numbers were found with which the step can be traced.
        """
        self._offer(self._all_small())
        for factor in (512, 128, 64, 32, 16, 8, 4, 3, 2):
            self._offer(
                {
                    name: value // factor
                    for name, value in self.best.items()
                    if value % factor == 0 and value > factor
                }
            )
        while self._each() or self._together():
            pass
        if self._now is None:
            sizes = axis_sizes_text(self._work.sizes)
            raise ArgumentError(
                f'the step cannot be traced for a mesh of ({sizes}): {self._program(self.first)}'
            )
        most = max(_MANY, 4 * self._elements)
        while self._now.sizes != self._wanted.sizes and self._mended(most):
            pass

    def restore(self) -> None:
        """Gives numbers that make nothing smaller, and were divided with others, what they were at first."""
        for name, value in self.first.items():
            if name not in self._smaller:
                self._offer({name: value}, True, self._elements, or_equal=True)

    @property
    def _elements(self) -> int:
        return 0 if self._now is None else self._now.elements

    def _all_small(self) -> Values:
        """The least numbers that divide as the first ones did; those that are different stay so."""
        small: dict[int, int] = {}
        for first in sorted({*self.first.values()}):
            beside = [value + first - other for other, value in small.items() if first - other <= 2]
            some = itertools.chain(beside, self._alike(first, 2, first)) if first >= _LONG else ()
            small[first] = next((value for value in some if value not in small.values()), first)
        return {name: small[first] for name, first in self.first.items()}

    def _each(self) -> bool:
        found = False
        for name in self._names()[::-1]:
            found |= any(self._offer({name: value}) for value in self._candidates(name))
        return found

    def _together(self) -> bool:
        """Numbers that are close to one another, or have a factor in common."""
        names = self._names()[::-1]
        for name, reach in itertools.product(names, (0, 2)):
            off = {other: self.best[other] - self.best[name] for other in names}
            close = {other: by for other, by in off.items() if abs(by) <= reach}
            if len(close) > 1 and any(
                self._offer({other: value + by for other, by in close.items()})
                for value in self._candidates(name)
                if value + min(close.values()) > 1
            ):
                return True
        for one, other in itertools.combinations(names, 2):
            a, b = self.best[one], self.best[other]
            factor = next((each for each in (2, 3, 5, 7) if a % each == b % each == 0), 0)
            if factor and min(a, b) > factor and self._offer({one: a // factor, other: b // factor}):
                return True
        return False

    def _mended(self, most: int) -> bool:
        found = False
        for name in self._names():
            found |= any(self._offer({name: value}, True, most) for value in self._near(name))
        return found

    def _names(self) -> list[str]:
        """The numbers that may be sizes, the least ones first."""
        return sorted((name for name in self.best if name not in self._idle), key=self.best.__getitem__)

    def _candidates(self, name: str) -> list[int]:
        """Smaller numbers: those that divide as the first one did, and parts of it, from the smallest one."""
        now = self.best[name]
        factors = [now // each for each in range(2, now // 2 + 1) if now % each == 0]
        alike = itertools.islice(self._others(name, 2, now), 3)
        return [*alike, *factors[-3:][::-1], *factors[:2][::-1]]

    def _near(self, name: str) -> list[int]:
        """Numbers of about the size of the best one that divide as the first one did, and its double."""
        now, first = self.best[name], self.first[name]
        more = itertools.islice(self._others(name, now + 1, first), 1)
        less = itertools.islice(self._others(name, now // 2, now), 1)
        return [value for value in dict.fromkeys([*more, 2 * now, *less]) if value < first]

    def _others(self, name: str, least: int, end: int) -> Iterator[int]:
        """Numbers that divide as the first one did, and are not what other numbers are by now."""
        first = self.first[name]
        taken = {self.best[other] for other, number in self.first.items() if number != first}
        return (value for value in self._alike(first, least, end) if value not in taken)

    def _alike(self, first: int, least: int, end: int) -> Iterator[int]:
        """Numbers in a range that the small mesh divides as the large one divides the first one."""
        parts = [self._work.parts(axes) for axes in self._wanted.axes]
        wanted = [division(first, big) for big, _ in parts]
        for value in range(max(2, least), end):
            if wanted == [division(value, small) for _, small in parts]:
                yield value

    def said(self) -> Iterator[str]:
        """What is no smaller than it was, and why."""
        for name, value in self.best.items():
            if value == self.first[name] and name in self._refused and value >= _LONG:
                yield f'{name} stays {value}: {self._refused[name]}'

    def differences(self) -> Iterator[str]:
        """How the small program differs from the large one."""
        if self._now is None:
            return
        for text in self._work.reader.where(self._differences(self._now)):
            yield f'differs from the large program: {text}'
        for text in self._work.reader.where(self._now.sizes - self._wanted.sizes):
            yield f'divides in another way than in the large program: {text}'


def _failure(error: Exception) -> str:
    """Why a step could not be traced, with the line of the user's code."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    frame = users_own(
        [each for each in frames if not each.filename.startswith(_JAX)], lambda each: each.filename
    )
    where = f'{file_text(frame.filename)}:{frame.lineno} {frame.name}: ' if frame else ''
    text = ' '.join(str(error).split())
    return f'{where}{type(error).__name__}: {text[:200]}{"..." if len(text) > 200 else ""}'
