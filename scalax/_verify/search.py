"""The search for smaller numbers with which a step is the same program but for its sizes."""

from __future__ import annotations

import itertools
import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from scalax._transforms.sjit import names_of_arguments
from scalax._tree.paths import join, optional_path
from scalax._tree.specs import axis_sizes_text
from scalax._util.user_frames import file_text, users_own
from scalax._verify.alike import Axes, Program, Reader, division
from scalax._verify.kept_rules import KeptRules
from scalax._verify.numbers import Values, is_array
from scalax.errors import ArgumentError, plural

Made = tuple[Any, tuple[Any, ...]]
"""A step, and its arguments."""

# Elements. Fewer run in no time; more are worth it where dimensions then divide as before.
_FEW, _MANY = 2**25, 2**26
_PERIOD = 2**16  # Which numbers divide alike repeats after fewer than these.
_LONG = 32  # a dimension that is worth a word
_SHOWN = 5  # lines of differences
_JAX = jax.__file__.removesuffix('__init__.py')


class Work:
    """What the searches for one step have in common.

    Args:
        large: the helper of the large mesh.
        small: that of the small one.
        seconds: how long better numbers are looked for.

    Attributes:
        small: as given.
        rules: what rules decided about the large step.
        reader: what reads its program, and those of small ones.
        wanted: that program.
        jaxpr: what it was read of.
        names: what the arrays among its arguments are called.
    """

    def __init__(self, large: Any, small: Any, seconds: float, made: Made) -> None:
        self.large, self.small = large, small
        self.rules, self.reader = KeptRules(large.mesh.shape), Reader()
        self._until = time.monotonic() + seconds
        step, args = made
        self.jaxpr, self.names = traced(large, self.rules.in_step(step), args)
        self.wanted = self.reader.program(self.jaxpr, self.names, large.mesh.shape)

    @property
    def is_over(self) -> bool:
        """Whether there is no time left."""
        return time.monotonic() > self._until

    def parts(self, axes: Axes) -> tuple[int, int]:
        """In how many parts axes divide a dimension: in the large mesh and in the small one."""
        large, small = (
            math.prod(helper.mesh.shape[axis] for axis in axes) for helper in (self.large, self.small)
        )
        return large, small


class Search:
    """Looks for smaller numbers.

    Args:
        work: what all searches have in common.
        numbers: name -> number.
        make: from a helper, and other numbers, to a step and its arguments.

    Attributes:
        first: the numbers at first.
        best: the best ones so far.
    """

    def __init__(
        self,
        work: Work,
        numbers: Values,
        make: Callable[[Any, Values], Made],
    ) -> None:
        self.work, self._wanted, self._make = work, work.wanted, make
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
        return self.is_alike and self._elements <= _MANY

    @property
    def is_alike(self) -> bool:
        """Whether they make no other program."""
        return self._now is not None and not self._differences(self._now)

    def made(self, helper: Any, values: Values) -> Made:
        """The step and its arguments over the mesh of a helper, placed as those of the large one."""
        step, args = self._make(helper, values)
        return self.work.rules.in_step(step), args

    def _program(self, values: Values) -> Program | str:
        """The program of other numbers, or why there is none."""
        key = tuple(values.values())
        if key not in self._known:
            helper = self.work.small
            try:
                step, args = self.made(helper, values)
                jaxpr, names = traced(helper, step, args)
                shape = helper.mesh.shape
                self._known[key] = self.work.reader.program(jaxpr, names, shape, self._wanted.axes)
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
        if values == self.best or is_small or self.work.is_over:
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
            text = f'the program would change at {self._lost(found)[0]}' if score[0] > now[0] else ''
        else:
            text = found
        if len(changes) == 1 and text:
            self._refused.setdefault(next(iter(changes)), text)
        return False

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
            sizes = axis_sizes_text(self.work.small.mesh.shape)
            raise ArgumentError(
                f'the step cannot be traced for a mesh of ({sizes}): {self._program(self.first)}'
            )
        most = max(_MANY, 4 * self._elements)
        names = self._names()
        while names and self._now.sizes != self._wanted.sizes:
            names = [name for name in names if self._mended(name, most)]

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

    def _mended(self, name: str, most: int) -> bool:
        """Whether dimensions divide more as they did with another number."""
        offers = [self._offer({name: value}, True, most) for value in self._near(name)]
        return any(offers)

    def _names(self) -> list[str]:
        """The numbers that may be sizes, the least ones first."""
        return sorted((name for name in self.best if name not in self._idle), key=self.best.__getitem__)

    def _candidates(self, name: str) -> list[int]:
        """Smaller numbers: those that divide as the first one did, and parts of it, from the smallest one."""
        now = self.best[name]
        small = [each for each in range(2, math.isqrt(now) + 1) if now % each == 0]
        factors = [*dict.fromkeys([*[now // each for each in small], *small[::-1]])]
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
        parts = [self.work.parts(axes) for axes in self._wanted.axes]
        wanted = [division(first, big) for big, _ in parts]
        least = max(2, least)
        for value in range(least, min(end, least + _PERIOD)):
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
        yield from _first(map('only the large step has {}'.format, self._lost(self._now)))
        sizes = self.work.reader.where(self._wanted.sizes - self._now.sizes)
        yield from _first(map('dimensions divide differently than in the large step: {}'.format, sizes))

    def _lost(self, program: Program) -> list[str]:
        """What the large step has and a small one does not, or what that has instead."""
        wanted, where = self._wanted.operations, self.work.reader.where
        return where(wanted - program.operations) or where(program.operations - wanted)


def _first(texts: Iterable[str]) -> Iterator[str]:
    """The first of some lines, and how many others there are."""
    every = [*texts]
    yield from every[:_SHOWN]
    if (others := len(every) - _SHOWN) > 0:
        yield f'... and {plural(others, "line")} more'


def traced(helper: Any, step: Any, args: Sequence[Any]) -> tuple[Any, list[str]]:
    """What a step computes, and what the arrays among its arguments are called."""
    leaves, structure = jax.tree.flatten(tuple(args))
    arrays = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

    def call(values: Sequence[Any]) -> Any:
        given = {**dict(enumerate(leaves)), **dict(zip(arrays, values, strict=True))}
        return step(*jax.tree.unflatten(structure, given.values()))

    with helper.get_context():
        jaxpr = jax.make_jaxpr(call)([leaves[i] for i in arrays])
    own = names_of_arguments(step, args) or []
    names = own if len(own) == len(args) else [f'argument {i}' for i, _ in enumerate(args)]
    paths = [
        join(name, optional_path(path)) or name
        for name, argument in zip(names, args, strict=True)
        for path, _ in jax.tree.leaves_with_path(argument)
    ]
    return jaxpr, [paths[i] for i in arrays]


def _failure(error: Exception) -> str:
    """Why a step could not be traced, with the line of the user's code."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    frame = users_own(
        [each for each in frames if not each.filename.startswith(_JAX)], lambda each: each.filename
    )
    where = f'{file_text(frame.filename)}:{frame.lineno} {frame.name}: ' if frame else ''
    text = ' '.join(str(error).split())
    return f'{where}{type(error).__name__}: {text[:200]}{"..." if len(text) > 200 else ""}'
