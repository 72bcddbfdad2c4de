"""The search: meshes first, with whole dimensions of the model over their axes; then one group at a time."""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from scalax._find.layout import Axes, Layout, Placement, elsewhere, usual
from scalax._find.trial import Trial, Trials

# Costs within this part of one another are equal: then the one that was there first stays.
EQUAL = 0.002
# After so many larger sizes of the other axis without a gain no larger one is tried.
_WITHOUT_GAIN = 2
# Meshes that cost at most this many times the best one are searched group by group, too.
_NEAR = 1.1


class OutOfTime(Exception):
    """The budget has been used up."""


@dataclasses.dataclass
class Search:
    """A search.

    Attributes:
        trials: what was tried, and tries more.
        axes: the names of the mesh axes.
        meshes: their sizes, in the order in which they are tried.
        shapes: those of the arrays of the batches.
        batch_dim: their dimension with the rows.
        experts: the classes of dimensions of experts.
        ends: when to stop, by `time.monotonic`.
        best: the best so far, which nothing that was tried is better than by more than nothing.
    """

    trials: Trials
    axes: Axes
    meshes: Sequence[dict[str, int]]
    shapes: Sequence[tuple[int, ...]]
    batch_dim: int
    experts: frozenset[int]
    ends: float
    best: Trial | None = None

    def run(self) -> bool:
        """Searches until nothing gets better; returns False if there was no time for that."""
        try:
            starts = [found for sizes in self._sizes() if (found := self._best_of_mesh(sizes)) is not None]
            starts.sort(key=lambda each: each.cost)
            for trial in starts:
                if trial.cost <= _NEAR * starts[0].cost:
                    self._group_by_group(trial)
        except OutOfTime:
            return False
        return True

    def _best_of(self, layouts: Sequence[Layout], best: Trial | None = None) -> Trial:
        """The layout that costs least; the one before them, unless another is better by more than nothing."""
        new = [layout for layout in layouts if layout not in self.trials.known]
        if new and self.trials.known and time.monotonic() > self.ends:
            raise OutOfTime
        cheapest = min(self.trials(layouts), key=lambda each: each.cost, default=best)
        if cheapest is None or (best is not None and cheapest.cost >= best.cost * (1 - EQUAL)):
            cheapest = best
        assert cheapest is not None
        if self.best is None or cheapest.cost < self.best.cost * (1 - EQUAL):
            self.best = cheapest
        return cheapest

    def _sizes(self) -> Iterator[dict[str, int]]:
        """The meshes, until larger sizes of the other axis do not pay."""
        best, without = math.inf, 0
        for sizes in self.meshes:
            yield sizes
            cost = min(
                (trial.cost for layout, trial in self.trials.known.items() if layout.sizes == sizes),
                default=math.inf,
            )
            without = 0 if cost < best * (1 - EQUAL) or best == math.inf else without + 1
            best = min(best, cost)
            if without >= _WITHOUT_GAIN:
                return

    def _best_of_mesh(self, sizes: dict[str, int]) -> Trial | None:
        """The best layout of a mesh whose other axis splits whole dimensions of the model."""
        found = []
        for batch in self._batches(sizes):
            over_rows = self.axes.other in {axis for axes in batch for axis in axes}
            classes = self._classes(sizes) if sizes.get(self.axes.other, 1) > 1 else []
            split = self.experts.intersection(classes) if over_rows else frozenset(self._apart(classes))
            starts = {split: self._layout(sizes, batch, split)}
            if not over_rows:
                starts.update(
                    (split ^ {number}, self._layout(sizes, batch, split ^ {number})) for number in classes
                )
            best = self._best_of([*starts.values()])
            while not over_rows and classes:
                [split] = [each for each, layout in starts.items() if layout == best.layout][:1]
                more = {split ^ {number}: self._layout(sizes, batch, split ^ {number}) for number in classes}
                after = self._best_of([*more.values()], best)
                if after is best:
                    break
                best, starts = after, more
            if self.experts:
                best = self._best_of([self._layout(sizes, batch, split, self.experts)], best)
            found.append(best)
        return min(found, key=lambda trial: trial.cost, default=None)

    def _group_by_group(self, best: Trial) -> Trial:
        """Moves groups of one shape together, and then one group at a time, until no move pays."""
        groups = self.trials.problem.groups
        alike: dict[Any, list[int]] = collections.defaultdict(list)
        for number, group in enumerate(groups):
            alike[group.shape, best.layout.groups[number]].append(number)
        for numbers in [*alike.values(), *([number] for number in range(len(groups)))]:
            best = self._moved(best, numbers)
        while True:
            before = best
            for number in range(len(groups)):
                best = self._moved(best, [number])
            if best is before:
                return best

    def _moved(self, best: Trial, numbers: Sequence[int]) -> Trial:
        """The best of moves of some groups from one place to another."""
        layout, first = best.layout, numbers[0]
        group, here = self.trials.problem.groups[first], best.layout.groups[first]
        moves = []
        for place in elsewhere(group, here, self.axes, layout.sizes):
            moved = layout
            for number in numbers:
                moved = moved.with_group(number, place)
            moves.append(moved)
        return self._best_of(moves, best)

    def _layout(
        self, sizes: dict[str, int], batch: Placement, split: Collection[int], experts: Collection[int] = ()
    ) -> Layout:
        groups = self.trials.problem.groups
        placed = tuple(usual(group, self.axes, sizes, split, experts) for group in groups)
        return Layout(tuple(sizes.items()), batch, placed)

    def _batches(self, sizes: dict[str, int]) -> Iterator[Placement]:
        """Where the rows may be: over the axes of the batch, over all; or with the next dimension split."""
        rows = tuple(axis for axis in self.axes.rows if sizes[axis] > 1)
        before: Placement = ((),) * self.batch_dim
        other = sizes.get(self.axes.other, 1)
        if self._divide(self.batch_dim, math.prod(sizes[axis] for axis in rows)):
            yield (*before, rows)
            if other > 1 and self._divide(self.batch_dim + 1, other):
                yield (*before, rows, (self.axes.other,))
        if other > 1 and self.experts and self._divide(self.batch_dim, math.prod(sizes.values())):
            yield (*before, (*rows, self.axes.other))

    def _divide(self, dim: int, parts: int) -> bool:
        """Whether that dimension of all arrays of the batch divides; some array has to have it."""
        sizes = [shape[dim] for shape in self.shapes if len(shape) > dim]
        return bool(sizes) and all(size % parts == 0 for size in sizes)

    def _classes(self, sizes: dict[str, int]) -> list[int]:
        """The classes of dimensions that divide, the ones in most bytes first."""
        counts: dict[int, int] = collections.Counter()
        width = sizes[self.axes.other]
        for group in self.trials.problem.groups:
            for number, size in zip(group.classes, group.shape, strict=True):
                if number is not None and size % width == 0:
                    counts[number] += group.bytes
        return sorted(counts, key=lambda number: (-counts[number], number))

    def _apart(self, classes: Sequence[int]) -> set[int]:
        """Classes of which no group has two: all but the width of the model, which most groups have."""
        chosen: set[int] = set()
        for number in reversed(classes):
            others = [group.classes for group in self.trials.problem.groups if number in group.classes]
            if not any(chosen.intersection(each) for each in others):
                chosen.add(number)
        return chosen
