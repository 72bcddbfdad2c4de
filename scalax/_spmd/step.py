"""A step on a mesh: its jaxpr is partitioned, and runs on every device in one ``jax.shard_map``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from scalax._jax.equations import opened, shape_of
from scalax._jax.rewriting import run_as_one
from scalax._spmd.options import DEFAULT, BatchPartitioning
from scalax._spmd.partition import Partitioner
from scalax._spmd.placements.auto_shardings import NO_AXES, AutoDims, AutoShardings, auto_dims, auto_spec
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
    """What is known of an argument of a step.

    Attributes:
        spec: its sharding; None if the compiler decides.
        is_batch: whether it holds examples.
        path: its path.
    """

    spec: PartitionSpec | None
    is_batch: bool
    path: str


class StepResult(NamedTuple):
    """What is known of a result of a step.

    Attributes:
        spec: its sharding; None if the compiler decides.
        path: the path of the state that it is, or whose gradient it is; None of others, such as a loss.
        state_spec: the sharding of that state, which sums get if nothing is said of the result.
        distance: how far it is from its state: 0 of an updated weight, and more of its moments.
    """

    spec: PartitionSpec | None
    path: str | None
    state_spec: PartitionSpec | None = None
    distance: int = 0


class PartitionedStep(NamedTuple):
    """A step that is partitioned.

    Attributes:
        jaxpr: the jaxpr that each device runs.
        in_specs: the specs of its arguments along the batch axes.
        out_specs: those of its results.
        collectives: its collectives, and those whose results turned out not to be used.
        axes: the mesh axes of the batch.
        auto_axes: the other mesh axes, which stay Auto inside.
        auto_specs: the specs of its results along these; None where the compiler decides.
        batch: which arguments hold examples.
    """

    jaxpr: Any
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]
    collectives: Sequence[Collective]
    axes: tuple[str, ...]
    auto_axes: frozenset[str] = frozenset()
    auto_specs: tuple[PartitionSpec | None, ...] = ()
    batch: tuple[bool, ...] = ()

    @property
    def redundancy(self) -> Redundancy:
        """The work of each device, with the places of the collectives."""
        from scalax._spmd.report.redundant_work import Redundancy  # here, because few programs ask

        return Redundancy(self.jaxpr, self.in_specs, self.axes, self.batch)

    @property
    def collective_rows(self) -> list[CollectiveRow]:
        """The list of its collectives."""
        from scalax._spmd.report.collective_reasons import collective_rows

        return collective_rows(self.collectives, self.redundancy)

    @property
    def collective_reasons(self) -> dict[int, str]:
        """Why each collective is there, by the numbers in the names of operations."""
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
        arguments: what is known of its arguments.
        results: what is known of its results.
        mesh: the mesh, in force, of Auto axes.
        batch_axes: the mesh axes that shard the examples, from the major one to the minor one; the axis of
            stages, if there is one, is the last of them. The compiler partitions along the others.
        options: what users choose.
        find_pipelines: returns the jaxpr, and the loops over layers in it that run as pipelines.

    Raises:
        CannotPartition: some equation is not handled.
    """
    axes, inner = tuple([axis for axis in batch_axes if mesh.shape[axis] > 1]), opened(jaxpr)
    sizes = {axis: mesh.shape[axis] for axis in axes}
    others = {axis: size for axis, size in mesh.shape.items() if axis not in axes and size > 1}
    whole = replicated(len(axes))

    @functools.cache
    def placed_of(spec: PartitionSpec | None, shape: tuple[int, ...], is_state: bool) -> Placements:
        found = placements_of_spec(spec or PartitionSpec(), sizes, whole, shape)
        return tuple(map(state_placement, found)) if is_state else found

    def placed(spec: PartitionSpec | None, atom: Any, is_state: bool) -> Placements:
        return placed_of(spec, shape_of(atom), is_state)

    known = [
        Argument(placed(each.spec, var, not each.is_batch), is_state=not each.is_batch)
        for each, var in zip(arguments, inner.invars, strict=True)
    ]

    @functools.cache
    def along_others_of(spec: PartitionSpec, rank: int) -> PartitionSpec:
        return auto_spec(spec, rank, others)

    def auto(spec: PartitionSpec | None, atom: Any) -> AutoDims:
        return auto_dims(spec or PartitionSpec(), len(shape_of(atom)), others) if others else NO_AXES

    def layout(i: int, path: str | None, spec: PartitionSpec | None, var: Any) -> Layout | None:
        if spec is None:
            return None
        along_others = tuple([(dim, axes) for dim, axes in enumerate(auto(spec, var)) if axes])
        return Layout(placed(spec, var, is_state=True), path, i, along_others)

    wanted = [
        # What a gradient becomes is its weight rather than its moments, in whatever order they come.
        layout(i + x.distance * len(results), x.path, x.state_spec if x.spec is None else x.spec, var)
        for i, (x, var) in enumerate(zip(results, inner.outvars, strict=True))
    ]
    states = [
        layout(i, leaf.path, leaf.spec, var)
        if not (leaf.is_batch or is_replicated(argument.placements))
        else None
        for i, (leaf, var, argument) in enumerate(zip(arguments, inner.invars, known, strict=True))
    ]
    if others:
        jaxpr = constrain_updated_stacks(
            jaxpr,
            [_sharding(each.spec, mesh) for each in arguments],
            [_sharding(each.spec, mesh) for each in results],
            mesh,
        )
    jaxpr = apply_rewrites(jaxpr, StepFacts(known, wanted, mesh, axes))
    pipelines: Mapping[int, Any] = {}
    if find_pipelines is not None:
        jaxpr, pipelines = find_pipelines(jaxpr)
    placed_along_others = [
        auto(each.spec, var) for each, var in zip(arguments, opened(jaxpr).invars, strict=True)
    ]
    along_others = AutoShardings(jaxpr, placed_along_others, others)
    partitioner = Partitioner(jaxpr, known, wanted, mesh, axes, along_others, options, states)
    partitioner.pipelines.update(pipelines)
    first = [
        REDUCE_TO_ALL if layout is None else REDUCE_TO_STATE if x.spec is None else layout.placements
        for layout, x in zip(wanted, results, strict=True)
    ]
    found = partitioner.partition(jaxpr, known, first)
    if any(isinstance(x, Partial) for placements in found.placements for x in placements):
        found = partitioner.partition(jaxpr, known, [*map(_reduced, found.placements)])
    collectives = [
        dataclasses.replace(each, origin=arguments[each.origin].path)
        if isinstance(each.origin, int)
        else each
        for each in found.collectives
    ]
    return PartitionedStep(
        found.jaxpr,
        tuple([spec_of(x.placements, axes) for x in known]),
        tuple([spec_of(x, axes) for x in found.placements]),
        collectives,
        axes,
        frozenset(others),
        tuple(
            [
                None if each.spec is None else along_others_of(each.spec, len(shape_of(var)))
                for each, var in zip(results, inner.outvars, strict=True)
            ]
        ),
        tuple([each.is_batch for each in arguments]),
    )


def run_step(
    step: PartitionedStep, values: Sequence[Any], mesh: Mesh | AbstractMesh, name: str
) -> Sequence[Any]:
    """Returns the results of a step for values of a trace."""

    def local(*blocks: Any) -> Sequence[Any]:
        results = run_as_one(step.jaxpr, blocks, name)
        if not step.auto_axes:
            return results
        return [
            x if spec is None else jax.lax.with_sharding_constraint(x, spec)
            for x, spec in zip(results, step.auto_specs, strict=True)
        ]

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=step.in_specs,
        out_specs=[*step.out_specs],
        axis_names={axis for axis in mesh.axis_names if axis not in step.auto_axes},
        check_vma=False,
    )
    return mapped(*values)


def _sharding(spec: PartitionSpec | None, mesh: AbstractMesh) -> NamedSharding | None:
    return None if spec is None else NamedSharding(mesh, spec)


def _reduced(placements: Placements) -> Placements:
    """The placements of a result whose sums are reduced to all devices."""
    return tuple([REPLICATE if isinstance(x, Partial) else x for x in placements])
