"""The way to the best layout: all meshes; on the best, classes of dimensions; then one group at a time."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from scalax._find.groups import Group
from scalax._find.layout import Layout, Placement, elsewhere, usual, without
from scalax._find.problem import Problem
from scalax._find.trial import OutOfTime, Trial, Trials
from scalax._search.objective import EQUAL

# After so many larger sizes of the other axis without a gain no larger one is tried.
_WITHOUT_GAIN = 2
# Meshes that cost at most this many times the best one are searched group by group, too.
_NEAR = 1.1
# Groups of less than this part of the bytes of all groups are tried whole together.
_TOGETHER = 0.01


@dataclasses.dataclass
class Descent:
    """Goes from one layout to a better one, until none is.

    Attributes:
        trials: what was tried, and tries more.
        meshes: their sizes, in the order in which they are tried.
        batch_dim: the dimension of the arrays of the batches that has the rows.
        ends: when to stop, by `time.monotonic`.
        best: the best so far.
    """

    trials: Trials
    meshes: Sequence[dict[str, int]]
    batch_dim: int
    ends: float
    best: Trial | None = None

    @property
    def _problem(self) -> Problem:
        return self.trials.problem

    def run(self) -> bool:
        """Searches until nothing gets better; returns False if there was no time for that."""
        try:
            meshes = [found for sizes in self._sizes() if (found := self._start(sizes)) is not None]
            for search in (self._class_by_class, self._group_by_group):
                meshes.sort(key=lambda each: each.rank)
                least = meshes[0].cost if meshes else 0.0
                meshes = [search(trial) for trial in meshes if trial.cost <= _NEAR * least]
        except OutOfTime:
            return False
        return True

    def stopped(self) -> Trial | None:
        """The best of a search that was stopped: of a set of layouts some may have been tried."""
        known = [*filter(None, [self.best]), *self.trials.known.values()]
        return min(known, key=lambda each: each.rank, default=None)

    def _best_of(self, layouts: Sequence[Layout], best: Trial | None = None) -> Trial:
        """The best layout; the one before them, unless another is better."""
        before = [] if best is None else [best]
        found = min([*before, *self.trials(layouts, self.ends)], key=lambda each: each.rank)
        self.best = min(filter(None, [self.best, found]), key=lambda each: each.rank)
        return found

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

    def _start(self, sizes: dict[str, int]) -> Trial | None:
        """The best of some layouts of a mesh: its other axis splits classes of which no group has two."""
        layouts, rows = [], self._problem.axes.batch
        for batch in self._batches(sizes):
            classes = self._classes(sizes)
            if self._over_rows(batch):
                layouts.append(self._layout(sizes, batch, self._problem.experts.intersection(classes)))
                continue
            # The width of the model, which most groups have, comes last.
            orders = [classes[::-1], [*classes[1:], *classes[:1]]] if classes else [[]]
            for split in dict.fromkeys(frozenset(self._apart(order)) for order in orders):
                layouts.append(self._layout(sizes, batch, split))
                # Where memory is free, all may be whole along the axis of the rows. Where a dimension does
                # not divide, such as a vocabulary, that axis has one that products sum over, which may cost.
                layouts.append(self._whole(layouts[-1], lambda group: True))
                layouts.append(self._whole(layouts[-2], functools.partial(_is_uneven, sizes[rows])))
                layouts.append(self._layout(sizes, batch, split, together=True))
                if self._problem.experts:
                    layouts.append(self._layout(sizes, batch, split, self._problem.experts))
        return self._best_of(layouts) if layouts else None

    def _class_by_class(self, best: Trial) -> Trial:
        """Splits one class more, or one less, over the other axis, until that does not pay."""
        groups, axes = self._problem.groups, self._problem.axes
        classes = [] if self._over_rows(best.layout.batch) else self._classes(best.layout.sizes)
        while classes:
            sizes, placed = best.layout.sizes, best.layout.groups
            moves = []
            for number in classes:
                for together in (False, True):
                    layout = best.layout
                    for i, group in enumerate(groups):
                        if number in group.classes:
                            dim = group.classes.index(number)
                            split = set() if axes.other in placed[i][dim] else {number}
                            place = usual(group, axes, sizes, split, together=together)
                            layout = layout.with_group(i, place)
                    moves.append(layout)
            after = self._best_of(list(dict.fromkeys(moves)), best)
            if after is best:
                break
            best = after
        return best

    def _group_by_group(self, best: Trial) -> Trial:
        """Moves groups of one shape together, and then one group at a time, until no move pays."""
        groups = self._problem.groups
        # To gather small groups takes time, too.
        least = _TOGETHER * sum(group.bytes for group in groups)
        best = self._best_of([self._whole(best.layout, lambda group: group.bytes < least)], best)
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
        group, here = self._problem.groups[first], best.layout.groups[first]
        moves = []
        for place in elsewhere(group, here, self._problem.axes, layout.sizes):
            moved = layout
            for number in numbers:
                moved = moved.with_group(number, place)
            moves.append(moved)
        return self._best_of(moves, best)

    def _whole(self, layout: Layout, chosen: Callable[[Group], bool]) -> Layout:
        """The same with some groups whole along the axis of the batch."""
        for i, group in enumerate(self._problem.groups):
            if chosen(group):
                layout = layout.with_group(i, without(layout.groups[i], [self._problem.axes.batch]))
        return layout

    def _layout(
        self,
        sizes: dict[str, int],
        batch: Placement,
        split: Collection[int],
        experts: Collection[int] = (),
        *,
        together: bool = False,
    ) -> Layout:
        groups = self._problem.groups
        placed = tuple(
            usual(group, self._problem.axes, sizes, split, experts, together=together) for group in groups
        )
        return Layout(tuple(sizes.items()), batch, placed)

    def _over_rows(self, batch: Placement) -> bool:
        """Whether the other axis shards the batch."""
        return any(self._problem.axes.other in axes for axes in batch)

    def _batches(self, sizes: dict[str, int]) -> Iterator[Placement]:
        """Where the rows may be: over the axes of the batch, over all; or with the next dimension split."""
        rows = tuple(axis for axis in self._problem.axes.rows if sizes[axis] > 1)
        before: Placement = ((),) * self.batch_dim
        other = sizes.get(self._problem.axes.other, 1)
        if self._divide(self.batch_dim, math.prod(sizes[axis] for axis in rows)):
            yield (*before, rows)
            if other > 1 and self._divide(self.batch_dim + 1, other):
                yield (*before, rows, (self._problem.axes.other,))
        if other > 1 and self._problem.experts and self._divide(self.batch_dim, math.prod(sizes.values())):
            yield (*before, (*rows, self._problem.axes.other))

    def _divide(self, dim: int, parts: int) -> bool:
        """Whether that dimension of some array of the batch divides; the others are whole."""
        return any(shape[dim] % parts == 0 for shape in self._problem.batch_shapes if len(shape) > dim)

    def _classes(self, sizes: dict[str, int]) -> list[int]:
        """The classes of dimensions that divide, the ones in most bytes first."""
        counts: dict[int, int] = collections.Counter()
        width = sizes.get(self._problem.axes.other, 1)
        if width == 1:
            return []
        for group in self._problem.groups:
            for number, size in zip(group.classes, group.shape, strict=True):
                if number is not None and size % width == 0:
                    counts[number] += group.bytes
        return sorted(counts, key=lambda number: (-counts[number], number))

    def _apart(self, classes: Sequence[int]) -> set[int]:
        """Classes of which no group has two; the first ones come first."""
        chosen: set[int] = set()
        for number in classes:
            others = [group.classes for group in self._problem.groups if number in group.classes]
            if not any(chosen.intersection(each) for each in others):
                chosen.add(number)
        return chosen


def _is_uneven(parts: int, group: Group) -> bool:
    """Whether a dimension of a group, which could be sharded, does not divide."""
    pairs = zip(group.classes, group.shape, strict=True)
    return any(number is not None and size % parts for number, size in pairs)
