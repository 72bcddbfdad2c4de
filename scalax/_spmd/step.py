"""Partitioned steps: one ``jax.shard_map`` runs the partitioned jaxpr of a step on all devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from scalax._jax.equations import open_jaxpr, shape_of
from scalax._jax.rewriting import bind_as_jit
from scalax._spmd.options import DEFAULT, BatchPartitioning
from scalax._spmd.partition import Partitioner
from scalax._spmd.placements.auto_shardings import NO_AXES, AutoDims, AutoShardings, auto_dims, auto_spec
from scalax._spmd.placements.axis_orders import AxisOrder, axis_order, in_other_order, with_outer_axes
from scalax._spmd.placements.collectives import Collective
from scalax._spmd.placements.layouts import Layout, state_placement
from scalax._spmd.placements.placement import REPLICATE, Partial, Placements, spec_of
from scalax._spmd.placements.user_constraints import placements_of_spec
from scalax._spmd.rewrites import StepFacts, apply_rewrites
from scalax._spmd.rewrites.updated_stacks import constrain_updated_stacks
from scalax._spmd.values import REDUCE_TO_ALL, REDUCE_TO_STATE, Argument, is_replicated, replicated

if TYPE_CHECKING:
    from scalax._spmd.report.collective_reasons import CollectiveRow
    from scalax._spmd.report.redundant_work import Redundancy


class StepArgument(NamedTuple):
    """The properties of an argument of a step.

    Attributes:
        spec: its sharding; None if the compiler decides.
        is_batch: whether it holds examples.
        path: its leaf path.
    """

    spec: PartitionSpec | None
    is_batch: bool
    path: str


class StepResult(NamedTuple):
    """The properties of a result of a step.

    Attributes:
        spec: its sharding; None if the compiler decides.
        path: the leaf path of the state that it is, or whose gradient it is. None for other results, such as
            a loss.
        state_spec: the sharding of that state. Partial sums are reduced to it if *spec* is None.
        distance: how many operations scale the state on the way to this result: 0 for an updated weight, more
            for its moments.
    """

    spec: PartitionSpec | None
    path: str | None
    state_spec: PartitionSpec | None = None
    distance: int = 0


class PartitionedStep(NamedTuple):
    """A partitioned step.

    Attributes:
        jaxpr: the jaxpr that each device runs.
        in_specs: the specs of its arguments along the batch axes.
        out_specs: the specs of its results along the batch axes.
        collectives: its collectives, including those whose results are unused.
        axes: the mesh axes of the batch.
        auto_axes: the other mesh axes, which stay Auto inside.
        auto_specs: the specs of its results along the Auto axes; None where the compiler decides.
        batch: which arguments hold examples.
        in_orders: the axes of each argument whose shards over batch axes are parts of shards over Auto axes.
        out_orders: the same of each result.
    """

    jaxpr: Any
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]
    collectives: Sequence[Collective]
    axes: tuple[str, ...]
    auto_axes: frozenset[str] = frozenset()
    auto_specs: tuple[PartitionSpec | None, ...] = ()
    batch: tuple[bool, ...] = ()
    in_orders: tuple[AxisOrder, ...] = ()
    out_orders: tuple[AxisOrder, ...] = ()

    @property
    def redundancy(self) -> Redundancy:
        """The work that devices duplicate, and where the collectives are in the jaxpr."""
        from scalax._spmd.report.redundant_work import Redundancy  # here, because few programs ask

        return Redundancy(self.jaxpr, self.in_specs, self.axes, self.batch)

    @property
    def collective_rows(self) -> list[CollectiveRow]:
        """The rows of the report, one for each kind of collective."""
        from scalax._spmd.report.collective_reasons import collective_rows

        return collective_rows(self.collectives, self.redundancy)

    @property
    def collective_reasons(self) -> dict[int, str]:
        """The reason of each collective, by its id (which is part of the name of its operation)."""
        from scalax._spmd.report.collective_reasons import reasons_of

        return reasons_of(self.collectives, self.redundancy.of_examples)


def partition_step(
    jaxpr: Any,
    arguments: Sequence[StepArgument],
    results: Sequence[StepResult],
    mesh: AbstractMesh,
    batch_axes: Sequence[str],
    options: BatchPartitioning = DEFAULT,
    find_pipelines: Callable[[Any], tuple[Any, Mapping[int, Any]]] | None = None,
) -> PartitionedStep:
    """Partitions the jaxpr of a step.

    Args:
        jaxpr: the closed jaxpr.
        arguments: the properties of its arguments.
        results: the properties of its results.
        mesh: the active mesh, of Auto axes.
        batch_axes: the mesh axes that shard the examples, from major to minor. The pipeline axis, if there is
            one, is the last of them. The compiler partitions along the other mesh axes.
        options: the user's options.
        find_pipelines: returns the jaxpr, and the scans over layers in it that run as pipelines.

    Raises:
        CannotPartition: the partitioner does not support some equation.
    """
    axes = tuple([axis for axis in batch_axes if mesh.shape[axis] > 1])
    invars, outvars = open_jaxpr(jaxpr).invars, open_jaxpr(jaxpr).outvars
    layouts = _LayoutReader(mesh, axes, has_outer_axes=find_pipelines is None)
    auto_sizes = layouts.auto_sizes
    argument_infos = [
        Argument(
            layouts.placements(leaf.spec, var, is_state=not leaf.is_batch),
            is_state=not leaf.is_batch,
        )
        for leaf, var in zip(arguments, invars, strict=True)
    ]
    result_layouts = [
        # Of a weight and its moments, a gradient gets the layout of the weight, in whatever order they come.
        layouts.layout(
            i + leaf.distance * len(results),
            leaf.path,
            leaf.state_spec if leaf.spec is None else leaf.spec,
            var,
        )
        for i, (leaf, var) in enumerate(zip(results, outvars, strict=True))
    ]
    state_layouts = [
        None
        if leaf.is_batch or is_replicated(info.placements)
        else layouts.layout(i, leaf.path, leaf.spec, var)
        for i, (leaf, var, info) in enumerate(zip(arguments, invars, argument_infos, strict=True))
    ]
    if auto_sizes:
        jaxpr = constrain_updated_stacks(
            jaxpr,
            [_sharding(argument.spec, mesh) for argument in arguments],
            [_sharding(result.spec, mesh) for result in results],
            mesh,
        )
    is_pipelined = find_pipelines is not None
    jaxpr = apply_rewrites(jaxpr, StepFacts(argument_infos, result_layouts, mesh, axes, is_pipelined))
    pipelines: Mapping[int, Any] = {}
    if find_pipelines is not None:
        jaxpr, pipelines = find_pipelines(jaxpr)
    argument_auto_dims = [
        layouts.auto_dims(argument.spec, var)
        for argument, var in zip(arguments, open_jaxpr(jaxpr).invars, strict=True)
    ]
    auto_shardings = AutoShardings(jaxpr, argument_auto_dims, auto_sizes)
    partitioner = Partitioner(
        jaxpr, argument_infos, result_layouts, mesh, axes, auto_shardings, options, state_layouts
    )
    partitioner.pipelines.update(pipelines)
    targets = [
        REDUCE_TO_ALL if layout is None else REDUCE_TO_STATE if result.spec is None else layout.placements
        for layout, result in zip(result_layouts, results, strict=True)
    ]
    partitioned = partitioner.partition(jaxpr, argument_infos, targets)
    if any(isinstance(x, Partial) for placements in partitioned.placements for x in placements):
        targets = [*map(_without_partials, partitioned.placements)]
        partitioned = partitioner.partition(jaxpr, argument_infos, targets)
    collectives = [
        dataclasses.replace(collective, origin=arguments[collective.origin].path)
        if isinstance(collective.origin, int)
        else collective
        for collective in partitioned.collectives
    ]
    return PartitionedStep(
        partitioned.jaxpr,
        tuple([spec_of(info.placements, axes) for info in argument_infos]),
        tuple([spec_of(placements, axes) for placements in partitioned.placements]),
        collectives,
        axes,
        frozenset(auto_sizes),
        tuple([layouts.auto_spec(result.spec, var) for result, var in zip(results, outvars, strict=True)]),
        tuple([argument.is_batch for argument in arguments]),
        tuple([axis_order(info.placements, axes) for info in argument_infos]),
        tuple([axis_order(placements, axes) for placements in partitioned.placements]),
    )


class _LayoutReader:
    """Reads the placements and layouts of arguments and results from their specs.

    Args:
        mesh: the mesh.
        axes: the mesh axes of the batch.
        has_outer_axes: whether shards over batch axes may be parts of shards over other axes.

    Attributes:
        auto_sizes: the other mesh axes and their sizes.
    """

    def __init__(self, mesh: AbstractMesh, axes: Sequence[str], *, has_outer_axes: bool) -> None:
        self.auto_sizes = {axis: size for axis, size in mesh.shape.items() if axis not in axes and size > 1}
        self._has_outer_axes = has_outer_axes
        self._sizes = {axis: mesh.shape[axis] for axis in axes}
        # Many leaves have equal specs and shapes.
        self._cached_placements = functools.cache(self._placements)
        self._cached_auto_spec = functools.cache(self._auto_spec)

    def placements(self, spec: PartitionSpec | None, atom: Any, *, is_state: bool) -> Placements:
        """Returns the placements of a value with a spec, along the batch axes."""
        return self._cached_placements(spec, shape_of(atom), is_state)

    def layout(self, result: int, path: str | None, spec: PartitionSpec | None, atom: Any) -> Layout | None:
        """Returns the layout of state with a spec; None if it has none."""
        if spec is None:
            return None
        auto_axes = tuple([(dim, axes) for dim, axes in enumerate(self.auto_dims(spec, atom)) if axes])
        return Layout(self.placements(spec, atom, is_state=True), path, result, auto_axes)

    def auto_dims(self, spec: PartitionSpec | None, atom: Any) -> AutoDims:
        """Returns the Auto axes that shard each dimension of a value with a spec."""
        if not self.auto_sizes:
            return NO_AXES
        return auto_dims(spec or PartitionSpec(), len(shape_of(atom)), self.auto_sizes)

    def auto_spec(self, spec: PartitionSpec | None, atom: Any) -> PartitionSpec | None:
        """Returns the part of a spec along the Auto axes; None if there is no spec."""
        return None if spec is None else self._cached_auto_spec(spec, len(shape_of(atom)))

    def _placements(self, spec: PartitionSpec | None, shape: tuple[int, ...], is_state: bool) -> Placements:
        unspecified = replicated(len(self._sizes))
        placements = placements_of_spec(spec or PartitionSpec(), self._sizes, unspecified, shape)
        if not is_state:
            return placements
        placements = tuple(map(state_placement, placements))
        if spec is None or not self._has_outer_axes:
            return placements
        return with_outer_axes(placements, spec, self._sizes, self.auto_sizes)

    def _auto_spec(self, spec: PartitionSpec, rank: int) -> PartitionSpec:
        return auto_spec(spec, rank, self.auto_sizes)


def run_step(
    step: PartitionedStep, values: Sequence[Any], mesh: Mesh | AbstractMesh, name: str
) -> Sequence[Any]:
    """Runs a partitioned step, inside a trace, and returns its results.

    Args:
        step: the step.
        values: its arguments.
        mesh: the mesh.
        name: the name of the step in profiles.
    """

    def run_on_device(*local_values: Any) -> Sequence[Any]:
        results = bind_as_jit(step.jaxpr, local_values, name)
        if not step.auto_axes:
            return results
        return [
            x if spec is None else jax.lax.with_sharding_constraint(x, spec)
            for x, spec in zip(results, step.auto_specs, strict=True)
        ]

    # Like the placements, a shard_map has the batch axes before the Auto axes in each dimension.
    values = [
        in_other_order(x, order[0], order[1], mesh) if order else x
        for x, order in zip(values, step.in_orders, strict=True)
    ]
    mapped = jax.shard_map(
        run_on_device,
        mesh=mesh,
        in_specs=step.in_specs,
        out_specs=[*step.out_specs],
        axis_names={axis for axis in mesh.axis_names if axis not in step.auto_axes},
        check_vma=False,
    )
    return [
        in_other_order(x, order[1], order[0], mesh) if order else x
        for x, order in zip(mapped(*values), step.out_orders, strict=True)
    ]


def _sharding(spec: PartitionSpec | None, mesh: AbstractMesh) -> NamedSharding | None:
    return None if spec is None else NamedSharding(mesh, spec)


def _without_partials(placements: Placements) -> Placements:
    """Returns placements with partial sums reduced to all devices."""
    return tuple([REPLICATE if isinstance(x, Partial) else x for x in placements])
