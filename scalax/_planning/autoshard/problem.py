"""The search problem of auto-sharding: a step, the groups of its leaves, and the devices."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from scalax._core.pytree.partition_specs import entries, only_axes, spec_axes
from scalax._core.render.trial_log import fingerprint
from scalax._jax.devices import coords_of, slice_of
from scalax._planning.autoshard.dim_uses import DimUses, analyze_dim_uses
from scalax._planning.autoshard.layout import Axes, Layout
from scalax._planning.autoshard.leaf_groups import LeafGroup, layer_dims_of, make_groups
from scalax._planning.autoshard.step import Leaf, TracedStep, unique_leaves
from scalax._planning.compiler.compilation import xla_flags
from scalax._planning.hardware.specs import Hardware
from scalax._planning.mesh_search.meshes import make_helper
from scalax._planning.report.make_plan import make_plan
from scalax._planning.report.plan import Plan
from scalax.errors import ArgumentError, did_you_mean
from scalax.rules import TreePathShardingRule


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A step whose best layout is searched.

    Attributes:
        step: the step.
        leaves: the leaves of its arguments, except those of batches.
        groups: the groups of leaves whose sharding is searched.
        expert_classes: the classes of expert dimensions.
        layer_dims: leaf index -> the dimension of stacked layers, if a loop runs over it.
        fixed: leaf index -> the spec that the user has fixed.
        devices: the devices.
        axes: the names of the mesh axes.
        num_slices: the number of slices.
        zero1: whether `Axes.fsdp` shards optimizer states only, and no parameters.
        hardware: hardware specifications in place of the known ones.
    """

    step: TracedStep
    leaves: Sequence[Leaf]
    groups: Sequence[LeafGroup]
    expert_classes: frozenset[int]
    layer_dims: Mapping[int, int]
    fixed: Mapping[int, PartitionSpec]
    devices: Sequence[Any]
    axes: Axes
    num_slices: int = 1
    zero1: bool = False
    hardware: Hardware | None = None

    def specs(self, layout: Layout) -> dict[Leaf, PartitionSpec]:
        """Returns the spec of each leaf in a layout."""
        specs = dict.fromkeys(self.leaves, PartitionSpec())
        for i, spec in self.fixed.items():
            specs[self.leaves[i]] = only_axes(spec, layout.sizes)
        for group, placement in zip(self.groups, layout.placements, strict=True):
            for i in group.leaves:
                is_replicated = self.zero1 and i in group.parameters
                leaf_placement = placement._replace(fsdp=None) if is_replicated else placement
                spec = leaf_placement.spec(self.axes)
                specs[self.leaves[i]] = layout.fit_spec(spec, self.leaves[i].shape)
        return {leaf: self._shard_layers(specs[leaf], i, layout) for i, leaf in enumerate(self.leaves)}

    def group_spec(self, index: int, layout: Layout) -> PartitionSpec:
        """Returns the spec of a group in a layout, whether or not its dimensions are divisible."""
        spec = layout.placements[index].spec(self.axes)
        return self._shard_layers(spec, self.groups[index].leaves[0], layout)

    def _shard_layers(self, spec: PartitionSpec, i: int, layout: Layout) -> PartitionSpec:
        """Shards the stacked layers of a leaf over the stages of the pipeline, if there are both."""
        dim = self.layer_dims.get(i)
        if dim is None or layout.pipeline is None or math.prod(self.leaves[i].shape) == 1:
            return spec
        padded = [*entries(spec), *[None] * (dim + 1 - len(entries(spec)))]
        return PartitionSpec(*padded[:dim], layout.pipeline.axis, *padded[dim + 1 :])

    def batch_spec_of(self, layout: Layout) -> Callable[[tuple[int, ...]], PartitionSpec]:
        """Returns a function from the shape of an array of the batch to its spec in a layout."""
        return functools.partial(layout.fit_spec, layout.batch_spec)

    def batch_argnums(self, layout: Layout) -> tuple[int, ...]:
        """Returns the batch arguments with at least one sharded array."""
        specs = self.step.map_arguments(lambda leaf: None, self.batch_spec_of(layout))
        return tuple(i for i in sorted(self.step.batch_argnums) if any(jax.tree.leaves(specs[i])))

    def plan(self, layout: Layout) -> Plan:
        """Makes the quick plan of the step in a layout."""
        step = self.step
        slices = {self.axes.dcn: self.num_slices} if self.num_slices > 1 else {}
        helper = make_helper(layout.sizes, self.devices, slices)
        in_shardings = step.map_arguments(self.specs(layout).__getitem__, self.batch_spec_of(layout))
        function = helper.sjit(
            step.function,
            in_shardings=in_shardings,
            out_shardings=step.map_results(in_shardings),
            donate_argnums=tuple(step.donate_argnums),
            batch_argnums=self.batch_argnums(layout),
            pipeline=layout.pipeline,
        )
        return make_plan(helper, function, step.args, {}, quick=True, hardware=self.hardware)

    def stored_bytes(self, layout: Layout) -> int:
        """Returns the bytes of the leaves on each device."""
        sizes = layout.sizes
        num_shards = {
            leaf: math.prod(sizes[axis] for axis in spec_axes(spec))
            for leaf, spec in self.specs(layout).items()
        }
        return sum(leaf.bytes // num_shards[leaf] for leaf in self.step.leaves if leaf)

    def fingerprint(self, limit: int | None) -> str:
        """Returns a text that differs for searches whose trials differ.

        Args:
            limit: the usable bytes of memory of a device.
        """
        step = self.step
        devices = [f'{device.device_kind} {coords_of(device)} {slice_of(device)}' for device in self.devices]
        return fingerprint(
            [
                *(str(step.jaxpr), str(sorted(step.batch_argnums)), str(sorted(step.donate_argnums))),
                *map(str, self.leaves),
                *(group.name for group in self.groups),
                str(dict(self.fixed)),
                *devices,
                *xla_flags(),
                f'{self.num_slices} {self.axes} {self.zero1} {self.hardware} {limit}',
            ]
        )


def make_problem(
    step: TracedStep,
    devices: Sequence[Any],
    axes: Axes,
    num_slices: int,
    keep: Any,
    zero1: bool,
    hardware: Hardware | None = None,
) -> Problem:
    """Makes the search problem of a step.

    Raises:
        ArgumentError: no leaf can be sharded, or *keep* does not consist of pairs that match leaves.
    """
    leaves = unique_leaves(step)
    fixed = _fixed(keep, leaves, [name for name in dataclasses.astuple(axes) if name])
    dim_uses = dim_uses_of(step, leaves)
    groups = make_groups(leaves, dim_uses, fixed)
    if not groups:
        raise ArgumentError(
            f'{step.name} has nothing to find a rule for: its arguments are batches'
            + (', scalars or fixed by keep' if fixed else ' or scalars')
        )
    expert_classes = frozenset(
        dim_class
        for group in groups
        for i, dim in dim_uses.expert_dims
        if i in group.leaves and (dim_class := group.classes[dim]) is not None
    )
    layer_dims = {i: dim for i, dim in layer_dims_of(leaves, dim_uses).items() if i not in fixed}
    return Problem(
        step, leaves, groups, expert_classes, layer_dims, fixed, devices, axes, num_slices, zero1, hardware
    )


def _fixed(keep: Any, leaves: Sequence[Leaf], names: Sequence[str]) -> dict[int, PartitionSpec]:
    """Returns leaf index -> spec, for the leaves that the user has fixed."""
    rule = keep if isinstance(keep, TreePathShardingRule) else TreePathShardingRule(*(keep or ()))
    fixed: dict[int, PartitionSpec] = {}
    for pattern, spec in rule.rules:
        if not isinstance(spec, PartitionSpec):
            raise ArgumentError(f'keep takes pairs of a regex and a PartitionSpec, got {spec!r}')
        matched = [
            i
            for i, leaf in enumerate(leaves)
            if i not in fixed and math.prod(leaf.shape) > 1 and re.search(pattern, leaf.path)
        ]
        if not matched:
            raise ArgumentError(f'keep: {pattern!r} matches no leaf path that earlier pairs leave')
        fixed.update(dict.fromkeys(matched, spec))
    unknown = [axis for spec in fixed.values() for axis in spec_axes(spec) if axis not in names]
    if unknown:
        raise ArgumentError(
            f'keep names an unknown mesh axis {unknown[0]!r} ({did_you_mean(unknown[0], names)})'
        )
    return fixed


def dim_uses_of(step: TracedStep, leaves: Sequence[Leaf]) -> DimUses:
    """Analyzes how a step uses the dimensions of its leaves."""
    index_of = {leaf: i for i, leaf in enumerate(leaves)}
    arguments = {i: index_of[leaf] for i, leaf in enumerate(step.leaves) if leaf is not None}
    return analyze_dim_uses(step.jaxpr, arguments)
