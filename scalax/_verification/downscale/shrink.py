"""Search for smaller sizes that leave a step the same program except for its sizes."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from scalax._core.pytree.partition_specs import axis_sizes_text
from scalax._jaxpr.source_lines import line_of_stack
from scalax._verification.downscale.fingerprint import (
    ProgramFingerprint,
    division,
    fact_lines,
    missing_facts,
)
from scalax._verification.downscale.replay_rules import Answers, with_replayed_rules
from scalax._verification.reference import StepCall
from scalax._verification.report import first_line
from scalax.errors import ArgumentError, plural

StepAndArgs = tuple[Any, tuple[Any, ...]]
Sizes = Mapping[int, int]
"""Original size -> the size in its place."""

# Elements of all arguments and results. Fewer run in no time; up to the second number, divisibility is
# preserved.
_SMALL, _MAX_ELEMENTS = 2**24, 2**27
_PERIOD = 2**12  # divisibility by the sizes of mesh axes repeats after fewer sizes than this
# Sizes from here on that differ by one or two are grouped, such as a length and the length plus one.
_MIN_GROUPED = 32
_MAX_CANDIDATES = 8  # candidates of each kind for one size
_MAX_LINES = 5  # listed differences


class FullSizeStep:
    """A step for a large mesh, which downscaled steps are compared with.

    Attributes:
        mesh: the mesh.
        answers: the answers of its rules.
        fingerprint: the fingerprint of its program.
    """

    def __init__(self, helper: Any, step: Any, args: Sequence[Any]) -> None:
        self.mesh, self.answers = helper.mesh, Answers()
        recording_step = with_replayed_rules(step, self.answers, record=True)
        self.fingerprint = _fingerprint(helper, recording_step, args)


class Shrinker:
    """Searches for smaller sizes. Equal sizes stay equal, and large sizes that differ by one or two still do.

    Args:
        full: the step for the large mesh.
        helper: the helper of the small mesh.
        named_sizes: name -> size.
        make: from sizes to a step over the small mesh, and its arguments.
        deadline: when to stop, by `time.monotonic`.

    Attributes:
        sizes: the best sizes so far.
    """

    def __init__(
        self,
        full: FullSizeStep,
        helper: Any,
        named_sizes: Mapping[str, int],
        make: Callable[[Sizes], StepAndArgs],
        deadline: float,
    ) -> None:
        self._full, self._helper, self._make, self._deadline = full, helper, make, deadline
        self._target, self._named_sizes = full.fingerprint, named_sizes
        self._groups: list[list[int]] = []  # indices of sizes that change together
        for size in sorted({*named_sizes.values()}):
            if self._groups and size >= _MIN_GROUPED and size - self._groups[-1][0] <= 2:
                self._groups[-1].append(size)
            else:
                self._groups.append([size])
        self.sizes: Sizes = {size: size for size in named_sizes.values()}
        self._fingerprints: dict[tuple[int, ...], ProgramFingerprint | str] = {}
        self._ineffective: set[int] = set()  # sizes that do not change the program
        fingerprint = self._fingerprint_of(self.sizes)
        self._best = fingerprint if isinstance(fingerprint, ProgramFingerprint) else None

    @property
    def is_faithful(self) -> bool:
        """Whether the program has the same operations as the full-size step."""
        return self._best is not None and self._best.operations.keys() == self._target.operations.keys()

    @property
    def is_small(self) -> bool:
        """Whether the program is faithful, and small enough."""
        return self._score(self._best) <= (0, _MAX_ELEMENTS)

    def make_step(self, sizes: Sizes | None = None) -> StepAndArgs:
        """Makes the step and its arguments with the best sizes, or with others."""
        step, args = self._make(self.sizes if sizes is None else sizes)
        return with_replayed_rules(step, self._full.answers, record=False), args

    def _fingerprint_of(self, sizes: Sizes) -> ProgramFingerprint | str:
        """Returns the fingerprint of the step with other sizes, or the reason why it cannot be traced."""
        key = tuple(sizes.values())
        if key not in self._fingerprints:
            try:
                self._fingerprints[key] = _fingerprint(self._helper, *self.make_step(sizes), self._target)
            except Exception as error:  # noqa: BLE001 - the user's code may raise anything
                self._fingerprints[key] = _failure(error)
        return self._fingerprints[key]

    def _score(self, fingerprint: ProgramFingerprint | None) -> tuple[float, ...]:
        """Returns how far a program is from a small and faithful one; lower is better."""
        if fingerprint is None:
            return (math.inf,)
        operations = fingerprint.operations.keys() ^ self._target.operations.keys()
        divisibility = fingerprint.divisibility.keys() ^ self._target.divisibility.keys()
        elements = fingerprint.elements
        return len(operations), max(elements, _MAX_ELEMENTS), len(divisibility), elements

    def run(self) -> None:
        """Searches until nothing improves: changes one size at a time, or two with a common factor.

        Raises:
            ArgumentError: the step cannot be traced with any sizes.
        """
        while self._shrink_single() or self._shrink_pairs():
            pass
        if self._best is None:
            mesh, reason = axis_sizes_text(self._helper.mesh.shape), self._fingerprint_of(self.sizes)
            raise ArgumentError(f'the step cannot be traced for a mesh of ({mesh}): {reason}')

    def _shrink_single(self) -> bool:
        improved = False
        for group in self._groups[::-1]:
            improved |= any(self._try((group, size)) for size in self._candidates(group))
        return improved

    def _shrink_pairs(self) -> bool:
        improved = False
        groups = [group for group in self._groups[::-1] if group[0] not in self._ineffective]
        for first, second in itertools.combinations(groups, 2):
            for factor in (2, 3, 5, 7):
                while (a := self.sizes[first[0]]) % factor == (b := self.sizes[second[0]]) % factor == 0:
                    if not self._try((first, a // factor), (second, b // factor)):
                        break
                    improved = True
        return improved

    def _try(self, *changes: tuple[Sequence[int], int]) -> bool:
        """Keeps other sizes if they are better and lose no matching operation.

        Args:
            changes: groups with the size in place of their smallest one.
        """
        sizes = {**self.sizes}
        for group, new_size in changes:
            sizes.update((size, new_size + size - group[0]) for size in group)
        is_done = self._score(self._best) <= (0, _MAX_ELEMENTS, 0, _SMALL)
        if is_done or min(sizes.values()) < 2 or time.monotonic() > self._deadline:
            return False
        fingerprint = self._fingerprint_of(sizes)
        best_operations = self._best.operations.keys() if self._best else set()
        right = self._target.operations.keys() & best_operations
        if isinstance(fingerprint, str) or not right <= fingerprint.operations.keys():
            return False
        if self._score(fingerprint) == self._score(self._best):
            self._ineffective.add(changes[0][0][0])
        if self._score(fingerprint) >= self._score(self._best):
            return False
        self.sizes, self._best = sizes, fingerprint
        return True

    def _candidates(self, group: Sequence[int]) -> list[int]:
        """Returns smaller sizes for a group.

        First the smallest sizes and the divisors that preserve divisibility, then other divisors.
        """
        current = self.sizes[group[0]]
        other_sizes = {new_size for size, new_size in self.sizes.items() if size not in group}
        factors = [factor for factor in range(2, math.isqrt(current) + 1) if current % factor == 0]
        divisors = {*factors, *[current // factor for factor in factors]}
        smallest = (
            size
            for size in range(2, min(current, _PERIOD))
            if self._preserves_divisibility(group, size) and size not in other_sizes
        )
        preserving = {*itertools.islice(smallest, 3)}
        preserving |= {size for size in divisors if self._preserves_divisibility(group, size)}
        return [*sorted(preserving)[:_MAX_CANDIDATES], *sorted(divisors - preserving)[:_MAX_CANDIDATES]]

    def _preserves_divisibility(self, group: Sequence[int], new_size: int) -> bool:
        """Whether the small mesh divides the new sizes of a group as the large mesh divides its sizes."""
        meshes = self._full.mesh.shape, self._helper.mesh.shape
        for axes in self._target.axes:
            large, small = (math.prod(mesh.get(axis, 1) for axis in axes) for mesh in meshes)
            for size in group:
                if division(size, large) != division(new_size + size - group[0], small):
                    return False
        return True

    def changed_sizes(self) -> dict[str, tuple[int, int]]:
        """Returns name -> original size and new size, for the sizes that changed."""
        pairs = {name: (size, self.sizes[size]) for name, size in self._named_sizes.items()}
        return {name: (before, after) for name, (before, after) in pairs.items() if before != after}

    def differences(self) -> Iterator[str]:
        """Describes how the program differs from the full-size one."""
        target, best = self._target, self._best or self._target
        operations = missing_facts(target.operations, best.operations)
        divisibility = missing_facts(target.divisibility, best.divisibility)
        for difference, facts in (
            ('only the full-size step has', operations),
            ('dimensions divide differently than in the full-size step:', divisibility),
        ):
            lines = fact_lines(facts)
            yield from (f'{difference} {line}' for line in lines[:_MAX_LINES])
            if lines[_MAX_LINES:]:
                yield f'... and {plural(len(lines) - _MAX_LINES, "line")} more'


def _fingerprint(
    helper: Any, step: Any, args: Sequence[Any], like: ProgramFingerprint | None = None
) -> ProgramFingerprint:
    call = StepCall(helper, step, args, {})
    with helper.get_context():
        jaxpr = jax.make_jaxpr(lambda *leaves: call.call(leaves))(*call.leaves)
    return ProgramFingerprint(jaxpr, call.paths, helper.mesh.shape, like)


def _failure(error: Exception) -> str:
    """Returns why a step cannot be traced, with the line of the user's code."""
    line = line_of_stack(error.__traceback__)
    return f'{line}: {first_line(error)}' if line else first_line(error)
