"""The search for smaller numbers with which a step is the same program but for its sizes."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from scalax._core.pytree.partition_specs import axis_sizes_text
from scalax._jaxpr.source_lines import line_of_stack
from scalax._verification.downscale.fingerprint import ProgramFingerprint, division, lines, missing_facts
from scalax._verification.downscale.replay_rules import Answers, with_replayed_rules
from scalax._verification.reference import StepCall
from scalax._verification.report import first_line
from scalax.errors import ArgumentError, plural

StepAndArgs = tuple[Any, tuple[Any, ...]]
"""A step, and its arguments."""
Sizes = Mapping[int, int]
"""Of each number the one in its place."""

# Elements. Fewer run in no time; more are worth it where dimensions then divide as before.
_FEW, _MANY = 2**24, 2**27
_PERIOD = 2**12  # which numbers divide alike repeats after fewer than these
_LONG = 32  # numbers from here on may be one and another plus one or two
_MOST = 8  # numbers of a kind that are tried in the place of one
_SHOWN = 5  # lines of differences


class FullSizeStep:
    """A step for a large mesh, which small ones are compared with.

    Attributes:
        mesh: its mesh.
        answers: what rules answered about it.
        program: its program.
    """

    def __init__(self, helper: Any, step: Any, args: Sequence[Any]) -> None:
        self.mesh, self.answers = helper.mesh, Answers()
        self.program = _program(helper, with_replayed_rules(step, self.answers, False), args)


class Shrinker:
    """Looks for smaller numbers. Equal ones stay equal, and close ones as close as they are.

    Args:
        large: the step for the large mesh.
        helper: the helper of the small mesh.
        numbers: name -> number.
        make: from other numbers in the place of these to a step over the small mesh, and its arguments.
        until: when to end, by `time.monotonic`.

    Attributes:
        sizes: the best ones so far.
    """

    def __init__(
        self,
        large: FullSizeStep,
        helper: Any,
        numbers: Mapping[str, int],
        make: Callable[[Sizes], StepAndArgs],
        until: float,
    ) -> None:
        self._large, self._helper, self._make, self._until = large, helper, make, until
        self._wanted, self._numbers = large.program, numbers
        self._units: list[list[int]] = []
        for number in sorted({*numbers.values()}):
            if self._units and number >= _LONG and number - self._units[-1][0] <= 2:
                self._units[-1].append(number)
            else:
                self._units.append([number])
        self.sizes: Sizes = {number: number for number in numbers.values()}
        self._known: dict[tuple[int, ...], ProgramFingerprint | str] = {}
        self._idle: set[int] = set()
        found = self._program(self.sizes)
        self._now = found if isinstance(found, ProgramFingerprint) else None

    @property
    def is_faithful(self) -> bool:
        """Whether the program is no other one."""
        return self._now is not None and self._now.operations.keys() == self._wanted.operations.keys()

    @property
    def is_small(self) -> bool:
        """Whether it is small enough, too."""
        return self._score(self._now) <= (0, _MANY)

    def made(self, sizes: Sizes | None = None) -> StepAndArgs:
        """The step and its arguments with the best numbers, or others, placed as those of the large one."""
        step, args = self._make(self.sizes if sizes is None else sizes)
        return with_replayed_rules(step, self._large.answers, True), args

    def _program(self, sizes: Sizes) -> ProgramFingerprint | str:
        """The program of other numbers, or why there is none."""
        key = tuple(sizes.values())
        if key not in self._known:
            try:
                self._known[key] = _program(self._helper, *self.made(sizes), self._wanted)
            except Exception as error:  # noqa: BLE001 - of the user's code, whatever it is
                self._known[key] = _failure(error)
        return self._known[key]

    def _score(self, program: ProgramFingerprint | None) -> tuple[float, ...]:
        """How good a program is: what is lower is better."""
        if program is None:
            return (math.inf,)
        operations = program.operations.keys() ^ self._wanted.operations.keys()
        divisions = program.divisibility.keys() ^ self._wanted.divisibility.keys()
        return len(operations), max(program.elements, _MANY), len(divisions), program.elements

    def run(self) -> None:
        """Looks for better numbers: of one at a time, and of two that have a factor in common.

        Raises:
            ArgumentError: no numbers were found with which the step can be traced.
        """
        while self._each() or self._pairs():
            pass
        if self._now is None:
            sizes, why = axis_sizes_text(self._helper.mesh.shape), self._program(self.sizes)
            raise ArgumentError(f'the step cannot be traced for a mesh of ({sizes}): {why}')

    def _each(self) -> bool:
        found = False
        for unit in self._units[::-1]:
            found |= any(self._offer((unit, value)) for value in self._candidates(unit))
        return found

    def _pairs(self) -> bool:
        found = False
        units = [unit for unit in self._units[::-1] if unit[0] not in self._idle]
        for one, other in itertools.combinations(units, 2):
            for factor in (2, 3, 5, 7):
                while (a := self.sizes[one[0]]) % factor == (b := self.sizes[other[0]]) % factor == 0:
                    if not self._offer((one, a // factor), (other, b // factor)):
                        break
                    found = True
        return found

    def _offer(self, *changes: tuple[Sequence[int], int]) -> bool:
        """Takes other numbers if they are better, and what is right stays right."""
        sizes = {**self.sizes}
        for unit, value in changes:
            sizes.update((number, value + number - unit[0]) for number in unit)
        is_done = self._score(self._now) <= (0, _MANY, 0, _FEW)
        if is_done or min(sizes.values()) < 2 or time.monotonic() > self._until:
            return False
        found = self._program(sizes)
        right = self._wanted.operations.keys() & (self._now.operations.keys() if self._now else ())
        if isinstance(found, str) or not right <= found.operations.keys():
            return False
        if self._score(found) == self._score(self._now):
            self._idle.add(changes[0][0][0])
        if self._score(found) >= self._score(self._now):
            return False
        self.sizes, self._now = sizes, found
        return True

    def _candidates(self, unit: Sequence[int]) -> list[int]:
        """Smaller numbers: the least ones and divisors that divide as the first one did, then others."""
        now = self.sizes[unit[0]]
        taken = {value for number, value in self.sizes.items() if number not in unit}
        factors = [factor for factor in range(2, math.isqrt(now) + 1) if now % factor == 0]
        divisors = {*factors, *[now // factor for factor in factors]}
        least = (value for value in range(2, min(now, _PERIOD)) if self._divides_alike(unit, value))
        alike = {*itertools.islice((value for value in least if value not in taken), 3)}
        alike |= {value for value in divisors if self._divides_alike(unit, value)}
        return [*sorted(alike)[:_MOST], *sorted(divisors - alike)[:_MOST]]

    def _divides_alike(self, unit: Sequence[int], value: int) -> bool:
        """Whether the small mesh divides numbers as the large one divides the first ones."""
        meshes = self._large.mesh.shape, self._helper.mesh.shape
        for axes in self._wanted.axes:
            large, small = (math.prod(mesh.get(axis, 1) for axis in axes) for mesh in meshes)
            for number in unit:
                if division(number, large) != division(value + number - unit[0], small):
                    return False
        return True

    def smaller(self) -> dict[str, tuple[int, int]]:
        """What became smaller: name -> number before and after."""
        pairs = {name: (number, self.sizes[number]) for name, number in self._numbers.items()}
        return {name: (before, now) for name, (before, now) in pairs.items() if before != now}

    def differences(self) -> Iterator[str]:
        """How the small program differs from the large one."""
        wanted, now = self._wanted, self._now or self._wanted
        for what, facts in (
            ('only the large step has', missing_facts(wanted.operations, now.operations)),
            (
                'dimensions divide differently than in the large step:',
                missing_facts(wanted.divisibility, now.divisibility),
            ),
        ):
            every = lines(facts)
            yield from (f'{what} {line}' for line in every[:_SHOWN])
            if every[_SHOWN:]:
                yield f'... and {plural(len(every) - _SHOWN, "line")} more'


def _program(
    helper: Any, step: Any, args: Sequence[Any], like: ProgramFingerprint | None = None
) -> ProgramFingerprint:
    """What a step computes."""
    own = StepCall(helper, step, args, {})
    with helper.get_context():
        jaxpr = jax.make_jaxpr(lambda *leaves: own.call(leaves))(*own.leaves)
    return ProgramFingerprint(jaxpr, own.paths, helper.mesh.shape, like)


def _failure(error: Exception) -> str:
    """Why a step could not be traced, with the line of the user's code."""
    line = line_of_stack(error.__traceback__)
    return f'{line}: {first_line(error)}' if line else first_line(error)
