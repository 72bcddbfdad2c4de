"""Coordinate descent to the best layout: first meshes, then pipelines, classes of dimensions and groups."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Literal

from jax.sharding import PartitionSpec

from scalax._core.pytree import partition_specs
from scalax._core.pytree.partition_specs import canonical, spec_axes
from scalax._planning.autoshard.layout import Layout, default_placement, neighbors
from scalax._planning.autoshard.leaf_groups import LeafGroup
from scalax._planning.autoshard.problem import Problem
from scalax._planning.autoshard.trial import Trial, Trials
from scalax._planning.mesh_search.objective import TIME_TOLERANCE
from scalax._spmd.pipelines.config import Pipeline

# The number of consecutive sizes of the model axis without improvement after which no larger one is tried.
_PATIENCE = 2
# Meshes whose best layout costs at most this factor more than the best mesh are refined.
_NEAR_BEST = 1.1
# The first number of microbatches of a pipeline is at most this factor times its number of stages.
_MAX_MICROBATCHES_PER_STAGE = 8
_FSDP_GATHERS: tuple[Literal['tick', 'step'], ...] = 'tick', 'step'
# Groups with less than this fraction of the bytes of all groups are replicated together in one trial.
_SMALL_GROUP = 0.01


@dataclasses.dataclass(frozen=True)
class CoordinateDescent:
    """Improves layouts, one coordinate at a time, until nothing improves.

    Attributes:
        trials: runs trials, and stores them.
        meshes: the sizes of the meshes, in the order in which they are tried.
        batch_dim: the batch dimension of the arrays of the batches.
    """

    trials: Trials
    meshes: Sequence[dict[str, int]]
    batch_dim: int

    @property
    def _problem(self) -> Problem:
        return self.trials.problem

    def run(self) -> None:
        """Searches until nothing improves.

        Raises:
            OutOfTime: the budget was used up before.
        """
        best_trials = self._best_of_each_mesh()
        if not best_trials:  # no mesh divides the batch dimension
            return
        for improve in (self._improve_pipeline, self._toggle_dim_classes, self._improve_groups):
            best_trials.sort(key=lambda trial: trial.rank)
            max_cost = _NEAR_BEST * best_trials[0].cost
            best_trials = [improve(trial) for trial in best_trials if trial.cost <= max_cost]

    def _best_of(self, layouts: Iterable[Layout], *current: Trial) -> Trial:
        """Tries layouts, and returns the best trial; of equal ones, a current trial."""
        return min([*current, *self.trials(layouts)], key=lambda trial: trial.rank)

    def _best_of_each_mesh(self) -> list[Trial]:
        """Returns the best start on each mesh. Stops where larger sizes of the model axis do not improve."""
        best_trials: list[Trial] = []
        best_cost, without_improvement = math.inf, 0
        for sizes in self.meshes:
            layouts = [*self._start_layouts(sizes)]
            cost = math.inf
            if layouts:
                best_on_mesh = self._best_of(layouts)
                pipelines = self._with_pipelines(best_on_mesh.layout, layouts[0])
                best_trials.append(self._best_of(pipelines, best_on_mesh))
                cost = best_trials[-1].cost
            is_improvement = cost < best_cost * (1 - TIME_TOLERANCE) or best_cost == math.inf
            without_improvement = 0 if is_improvement else without_improvement + 1
            best_cost = min(best_cost, cost)
            if without_improvement >= _PATIENCE:
                break
        return best_trials

    def _start_layouts(self, sizes: dict[str, int]) -> Iterator[Layout]:
        """Yields layouts of a mesh whose model axis shards classes that do not meet in any group."""
        problem = self._problem
        classes, expert_classes, fsdp_size = (
            self._classes(sizes),
            problem.expert_classes,
            sizes[problem.axes.fsdp],
        )
        # The first class is most often the width of the model, which most groups have: it comes last.
        orders = classes[::-1], [*classes[1:], *classes[:1]]
        choices = dict.fromkeys(frozenset(self._independent_classes(order)) for order in orders)
        for batch_spec in self._batch_specs(sizes):
            if self._shards_batch_over_model(batch_spec):
                yield self._layout(sizes, batch_spec, expert_classes.intersection(classes))
                continue
            for model_classes in choices:
                yield (first := self._layout(sizes, batch_spec, model_classes))
                # With enough memory, all groups may be replicated along the fsdp axis.
                yield self._replicate_over_fsdp(first, lambda group: True)
                # If a dimension is not divisible, such as a vocabulary, the fsdp axis shards a dimension that
                # a matmul contracts, which may cost more than replication.
                yield self._replicate_over_fsdp(
                    first, lambda group: group.dims_divisible_by(fsdp_size) != group.dims_divisible_by(1)
                )
                yield self._layout(sizes, batch_spec, model_classes, both_on_one_dim=True)
                if expert_classes:
                    yield self._layout(sizes, batch_spec, model_classes, expert_classes)

    def _with_pipelines(self, *layouts: Layout) -> Iterator[Layout]:
        """Yields layouts with a pipeline over the slices, if the step scans over stacked layers."""
        problem = self._problem
        for layout in layouts if problem.num_slices > 1 and problem.layer_dims else ():
            count = problem.num_slices
            max_count = _MAX_MICROBATCHES_PER_STAGE * problem.num_slices
            while count < max_count and self._divides_into(2 * count, layout):
                count *= 2
            for fsdp_gather in (
                _FSDP_GATHERS if self._batch_shards_in_stage(layout) > 1 else _FSDP_GATHERS[:1]
            ):
                pipeline = Pipeline(problem.axes.dcn, count, fsdp_gather=fsdp_gather)
                yield dataclasses.replace(layout, pipeline=pipeline)

    def _divides_into(self, microbatches: int, layout: Layout) -> bool:
        """Whether microbatches and the devices of a stage divide the batch into equal parts."""
        return self._batch_divides(self.batch_dim, microbatches * self._batch_shards_in_stage(layout))

    def _batch_shards_in_stage(self, layout: Layout) -> int:
        """Returns the number of shards of the batch among the devices of a stage."""
        axes = partition_specs.entry_axes(partition_specs.entries(layout.batch_spec)[self.batch_dim])
        return math.prod(layout.sizes[axis] for axis in axes if axis != self._problem.axes.dcn)

    def _improve_pipeline(self, best: Trial) -> Trial:
        """Changes the microbatches and the repeats of a pipeline, until that does not improve it."""
        previous = None
        while best is not previous and (pipeline := best.layout.pipeline):
            previous, count = best, pipeline.num_microbatches
            counts = [*([count // 2] if count > self._problem.num_slices else []), 2 * count]
            pipelines = [dataclasses.replace(pipeline, num_microbatches=count) for count in counts]
            pipelines.append(dataclasses.replace(pipeline, num_repeats=2 * pipeline.num_repeats))
            layouts = [
                dataclasses.replace(best.layout, pipeline=changed)
                for changed in pipelines
                if self._divides_into(changed.num_microbatches, best.layout)
            ]
            best = self._best_of(layouts, best)
        return best

    def _toggle_dim_classes(self, best: Trial) -> Trial:
        """Shards one class more or one less over the model axis, until that does not improve."""
        sizes = best.layout.sizes
        over_model = self._shards_batch_over_model(best.layout.batch_spec)
        classes = [] if over_model else self._classes(sizes)

        def toggle(layout: Layout, dim_class: int, both_on_one_dim: bool) -> Layout:
            changes = {}
            for i, group in enumerate(self._problem.groups):
                if dim_class in group.classes:
                    is_sharded = layout.placements[i].model == group.classes.index(dim_class)
                    changes[i] = default_placement(
                        group,
                        self._problem.axes,
                        sizes,
                        () if is_sharded else (dim_class,),
                        both_on_one_dim=both_on_one_dim,
                    )
            return layout.with_placements(changes)

        previous = None
        while best is not previous:
            previous = best
            layouts = [
                toggle(best.layout, dim_class, both_on_one_dim)
                for dim_class in classes
                for both_on_one_dim in (False, True)
            ]
            best = self._best_of(layouts, best)
        return best

    def _improve_groups(self, best: Trial) -> Trial:
        """Changes groups of one shape together, then one group at a time, until that does not improve."""
        groups = self._problem.groups
        # Gathering small groups takes time, too.
        small_bytes = _SMALL_GROUP * sum(group.bytes for group in groups)
        replicated = self._replicate_over_fsdp(best.layout, lambda group: group.bytes < small_bytes)
        best = self._best_of([replicated], best)
        equal_groups: dict[Any, list[int]] = collections.defaultdict(list)
        for i, group in enumerate(groups):
            equal_groups[group.shape, best.layout.placements[i]].append(i)
        for indices in equal_groups.values():
            best = self._try_neighbors(best, indices)
        previous = None
        while best is not previous:
            previous = best
            for i in range(len(groups)):
                best = self._try_neighbors(best, [i])
        return best

    def _try_neighbors(self, best: Trial, indices: Sequence[int]) -> Trial:
        """Moves groups with one placement to each neighbor of it, and returns the best trial."""
        layout, first = best.layout, indices[0]
        placements = neighbors(
            self._problem.groups[first], layout.placements[first], self._problem.axes, layout.sizes
        )
        layouts = [layout.with_placements(dict.fromkeys(indices, placement)) for placement in placements]
        return self._best_of(layouts, best)

    def _replicate_over_fsdp(self, layout: Layout, condition: Callable[[LeafGroup], bool]) -> Layout:
        """Returns the layout with the groups that meet a condition replicated along the fsdp axis."""
        pairs = enumerate(zip(self._problem.groups, layout.placements, strict=True))
        return layout.with_placements(
            {i: placement._replace(fsdp=None) for i, (group, placement) in pairs if condition(group)}
        )

    def _layout(
        self,
        sizes: dict[str, int],
        batch_spec: PartitionSpec,
        model_classes: Collection[int],
        fsdp_classes: Collection[int] = (),
        *,
        both_on_one_dim: bool = False,
    ) -> Layout:
        """Returns the layout with the default placement of each group."""
        axes = self._problem.axes
        placements = [
            default_placement(
                group, axes, sizes, model_classes, fsdp_classes, both_on_one_dim=both_on_one_dim
            )
            for group in self._problem.groups
        ]
        return Layout(tuple(sizes.items()), batch_spec, tuple(placements))

    def _shards_batch_over_model(self, batch_spec: PartitionSpec) -> bool:
        return self._problem.axes.model in spec_axes(batch_spec)

    def _batch_specs(self, sizes: dict[str, int]) -> Iterator[PartitionSpec]:
        """Yields the shardings of the batch to try.

        The batch dimension is sharded over the batch axes, alone or with the next dimension over the model
        axis; for experts, also over all axes.
        """
        axes = self._problem.axes
        batch_axes = tuple(axis for axis in axes.batch_axes if sizes[axis] > 1)
        model_size = sizes.get(axes.model, 1)
        specs: list[tuple[Any, ...]] = []
        if self._batch_divides(self.batch_dim, math.prod(sizes[axis] for axis in batch_axes)):
            specs.append((batch_axes,))
            if model_size > 1 and self._batch_divides(self.batch_dim + 1, model_size):
                specs.append((batch_axes, axes.model))
        any_experts = model_size > 1 and self._problem.expert_classes
        if any_experts and self._batch_divides(self.batch_dim, math.prod(sizes.values())):
            specs.append(((*batch_axes, axes.model),))
        for entries in specs:
            yield canonical(PartitionSpec(*[None] * self.batch_dim, *entries))

    def _batch_divides(self, dim: int, num_shards: int) -> bool:
        """Whether a dimension of at least one batch array is divisible; other arrays are replicated."""
        shapes = self._problem.step.batch_shapes
        return any(shape[dim] % num_shards == 0 for shape in shapes if len(shape) > dim)

    def _classes(self, sizes: dict[str, int]) -> list[int]:
        """Returns the classes of dimensions that the model axis divides, largest groups first."""
        class_bytes = collections.Counter[int]()
        model_size = sizes.get(self._problem.axes.model, 1)
        for group in self._problem.groups if model_size > 1 else ():
            for dim_class, size in zip(group.classes, group.shape, strict=True):
                if dim_class is not None and size % model_size == 0:
                    class_bytes[dim_class] += group.bytes
        return sorted(class_bytes, key=lambda dim_class: (-class_bytes[dim_class], dim_class))

    def _independent_classes(self, classes: Sequence[int]) -> set[int]:
        """Chooses classes, in their order, so that no group has dimensions of two of them."""
        chosen: set[int] = set()
        for dim_class in classes:
            groups = [group for group in self._problem.groups if dim_class in group.classes]
            if not any(chosen.intersection(group.classes) for group in groups):
                chosen.add(dim_class)
        return chosen
