"""The way to the best layout: all meshes; on the best, classes of dimensions; then one group at a time."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Literal

from jax.sharding import PartitionSpec

from scalax._core.pytree import partition_specs
from scalax._core.pytree.partition_specs import canonical, spec_axes
from scalax._planning.autoshard.layout import Layout, elsewhere, usual
from scalax._planning.autoshard.leaf_groups import Group
from scalax._planning.autoshard.problem import Problem
from scalax._planning.autoshard.trial import Trial, Trials
from scalax._planning.mesh_search.objective import TIME_TOLERANCE
from scalax._spmd.pipelines.config import Pipeline

# After so many larger sizes of the other axis without a gain no larger one is tried.
_WITHOUT_GAIN = 2
# Meshes that cost at most this many times the best one are searched group by group, too.
_NEAR = 1.1
# Microbatches are first as many times the stages of a pipeline as the batch allows, but no more than these.
_MOST_MICROBATCHES = 8
_GATHERS: tuple[Literal['tick', 'step'], ...] = 'tick', 'step'
# Groups of less than this part of the bytes of all groups are tried whole together.
_TOGETHER = 0.01


@dataclasses.dataclass(frozen=True)
class Descent:
    """Goes from one layout to a better one, until none is.

    Attributes:
        trials: what was tried, and tries more.
        meshes: their sizes, in the order in which they are tried.
        batch_dim: the dimension of the arrays of the batches that has the rows.
    """

    trials: Trials
    meshes: Sequence[dict[str, int]]
    batch_dim: int

    @property
    def _problem(self) -> Problem:
        return self.trials.problem

    def run(self) -> None:
        """Searches until nothing gets better.

        Raises:
            OutOfTime: there was no time for that.
        """
        found = self._starts()
        for better in (self._pipeline_by_pipeline, self._class_by_class, self._group_by_group):
            found.sort(key=lambda trial: trial.rank)
            found = [better(trial) for trial in found if trial.cost <= _NEAR * found[0].cost]

    def _best_of(self, layouts: Iterable[Layout], *before: Trial) -> Trial:
        """The best layout; the one before them, unless another is better."""
        return min([*before, *self.trials(layouts)], key=lambda trial: trial.rank)

    def _starts(self) -> list[Trial]:
        """The best start on each mesh, until larger sizes of the other axis do not pay."""
        found: list[Trial] = []
        best, without = math.inf, 0
        for sizes in self.meshes:
            layouts = [*self._first_layouts(sizes)]
            cost = math.inf
            if layouts:
                best_here = self._best_of(layouts)
                pipelines = self._pipelines(best_here.layout, layouts[0])
                found.append(self._best_of(pipelines, best_here))
                cost = found[-1].cost
            without = 0 if cost < best * (1 - TIME_TOLERANCE) or best == math.inf else without + 1
            best = min(best, cost)
            if without >= _WITHOUT_GAIN:
                break
        return found

    def _first_layouts(self, sizes: dict[str, int]) -> Iterator[Layout]:
        """Layouts of a mesh whose other axis splits classes of which no group has two."""
        classes, experts, rows = self._classes(sizes), self._problem.experts, sizes[self._problem.axes.batch]
        # The width of the model, which most groups have, comes last.
        orders = classes[::-1], [*classes[1:], *classes[:1]]
        splits = dict.fromkeys(frozenset(self._apart(order)) for order in orders)
        for batch in self._batches(sizes):
            if self._over_rows(batch):
                yield self._layout(sizes, batch, experts.intersection(classes))
                continue
            for split in splits:
                yield (first := self._layout(sizes, batch, split))
                # Where memory is free, all may be whole along the axis of the rows. Where a dimension does
                # not divide, such as a vocabulary, that axis has one that products sum over, which may cost.
                yield self._whole(first, lambda group: True)
                yield self._whole(first, lambda group: group.dividing(rows) != group.dividing(1))
                yield self._layout(sizes, batch, split, together=True)
                if experts:
                    yield self._layout(sizes, batch, split, experts)

    def _pipelines(self, *layouts: Layout) -> Iterator[Layout]:
        """Layouts with the layers that a loop runs over as stages over the slices."""
        problem = self._problem
        for layout in layouts if problem.slices > 1 and problem.stacked else ():
            count = problem.slices
            while count < _MOST_MICROBATCHES * problem.slices and self._into(2 * count, layout):
                count *= 2
            for gather in _GATHERS if self._inside(layout) > 1 else _GATHERS[:1]:
                pipeline = Pipeline(problem.axes.slices, count, fsdp_gather=gather)
                yield dataclasses.replace(layout, pipeline=pipeline)

    def _into(self, microbatches: int, layout: Layout) -> bool:
        """Whether the batch divides into microbatches, and each of them over the devices of a stage."""
        return self._divide(self.batch_dim, microbatches * self._inside(layout))

    def _inside(self, layout: Layout) -> int:
        """The devices of a stage over which rows are."""
        rows = partition_specs.entry_axes(partition_specs.entries(layout.batch)[self.batch_dim])
        return math.prod(layout.sizes[axis] for axis in rows if axis != self._problem.axes.slices)

    def _pipeline_by_pipeline(self, best: Trial) -> Trial:
        """Changes the microbatches and rounds of a pipeline, until that does not pay."""
        before = None
        while best is not before and (pipeline := best.layout.pipeline):
            before, count, least = best, pipeline.num_microbatches, self._problem.slices
            fewer = [count // 2] if count > least else []
            moves = [dataclasses.replace(pipeline, num_microbatches=each) for each in [*fewer, 2 * count]]
            moves.append(dataclasses.replace(pipeline, num_repeats=2 * pipeline.num_repeats))
            moves = [each for each in moves if self._into(each.num_microbatches, best.layout)]
            best = self._best_of([dataclasses.replace(best.layout, pipeline=each) for each in moves], best)
        return best

    def _class_by_class(self, best: Trial) -> Trial:
        """Splits one class more, or one less, over the other axis, until that does not pay."""
        sizes = best.layout.sizes
        classes = [] if self._over_rows(best.layout.batch) else self._classes(sizes)

        def toggled(layout: Layout, number: int, together: bool) -> Layout:
            places = {}
            for i, group in enumerate(self._problem.groups):
                if number in group.classes:
                    is_split = layout.groups[i].other == group.classes.index(number)
                    split = () if is_split else (number,)
                    places[i] = usual(group, self._problem.axes, sizes, split, together=together)
            return layout.moved(places)

        before = None
        while best is not before:
            before = best
            moves = [toggled(best.layout, number, each) for number in classes for each in (False, True)]
            best = self._best_of(moves, best)
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
        for numbers in alike.values():
            best = self._moved(best, numbers)
        before = None
        while best is not before:
            before = best
            for number in range(len(groups)):
                best = self._moved(best, [number])
        return best

    def _moved(self, best: Trial, numbers: Sequence[int]) -> Trial:
        """The best of moves of some groups from one place to another."""
        layout, first = best.layout, numbers[0]
        places = elsewhere(
            self._problem.groups[first], layout.groups[first], self._problem.axes, layout.sizes
        )
        return self._best_of([layout.moved(dict.fromkeys(numbers, place)) for place in places], best)

    def _whole(self, layout: Layout, chosen: Callable[[Group], bool]) -> Layout:
        """The same with some groups whole along the axis of the batch."""
        pairs = enumerate(zip(self._problem.groups, layout.groups, strict=True))
        return layout.moved({i: place._replace(batch=None) for i, (group, place) in pairs if chosen(group)})

    def _layout(
        self,
        sizes: dict[str, int],
        batch: PartitionSpec,
        split: Collection[int],
        experts: Collection[int] = (),
        *,
        together: bool = False,
    ) -> Layout:
        placed = [
            usual(group, self._problem.axes, sizes, split, experts, together=together)
            for group in self._problem.groups
        ]
        return Layout(tuple(sizes.items()), batch, tuple(placed))

    def _over_rows(self, batch: PartitionSpec) -> bool:
        """Whether the other axis shards the batch."""
        return self._problem.axes.other in spec_axes(batch)

    def _batches(self, sizes: dict[str, int]) -> Iterator[PartitionSpec]:
        """Where the rows may be: over the axes of the batch, over all; or with the next dimension split."""
        axes = self._problem.axes
        rows = tuple(axis for axis in axes.rows if sizes[axis] > 1)
        other = sizes.get(axes.other, 1)
        entries: list[tuple[Any, ...]] = []
        if self._divide(self.batch_dim, math.prod(sizes[axis] for axis in rows)):
            entries.append((rows,))
            if other > 1 and self._divide(self.batch_dim + 1, other):
                entries.append((rows, axes.other))
        if other > 1 and self._problem.experts and self._divide(self.batch_dim, math.prod(sizes.values())):
            entries.append(((*rows, axes.other),))
        for each in entries:
            yield canonical(PartitionSpec(*[None] * self.batch_dim, *each))

    def _divide(self, dim: int, parts: int) -> bool:
        """Whether that dimension of some array of the batch divides; the others are whole."""
        return any(shape[dim] % parts == 0 for shape in self._problem.step.batch_shapes if len(shape) > dim)

    def _classes(self, sizes: dict[str, int]) -> list[int]:
        """The classes of dimensions that divide, the ones in most bytes first."""
        counts = collections.Counter[int]()
        width = sizes.get(self._problem.axes.other, 1)
        for group in self._problem.groups if width > 1 else ():
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
