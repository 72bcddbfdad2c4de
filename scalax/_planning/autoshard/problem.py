"""What is searched for: a step, the groups of its leaves, devices; and the plan of a layout."""

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
from scalax._planning.autoshard.dim_uses import ArgumentDimensions, dimensions
from scalax._planning.autoshard.layout import Axes, Layout
from scalax._planning.autoshard.leaf_groups import Group, make_groups, stacked_dims
from scalax._planning.autoshard.step import Leaf, Step, leaves_of
from scalax._planning.compiler.compilation import xla_flags
from scalax._planning.hardware.specs import Hardware
from scalax._planning.mesh_search.meshes import make_helper
from scalax._planning.report.make_plan import make_plan
from scalax._planning.report.plan import Plan
from scalax.errors import ArgumentError, did_you_mean
from scalax.rules import TreePathShardingRule


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """What is searched for.

    Attributes:
        step: the step.
        leaves: the leaves of its arguments.
        groups: those of them that are searched.
        experts: the classes of dimensions of experts.
        stacked: leaf number -> the dimension of its layers, if a loop runs over one.
        fixed: leaf number -> where the user has placed it.
        devices: the devices.
        axes: the names of the mesh axes.
        slices: how many slices the devices are.
        zero1: whether the axes of the rows shard no parameters, but the states of their optimizer.
        hardware: the numbers of the devices, if they are not those that are known of them.
    """

    step: Step
    leaves: Sequence[Leaf]
    groups: Sequence[Group]
    experts: frozenset[int]
    stacked: Mapping[int, int]
    fixed: Mapping[int, PartitionSpec]
    devices: Sequence[Any]
    axes: Axes
    slices: int = 1
    zero1: bool = False
    hardware: Hardware | None = None

    def specs(self, layout: Layout) -> dict[Leaf, PartitionSpec]:
        """The spec of each leaf."""
        found = dict.fromkeys(self.leaves, PartitionSpec())
        for i, spec in self.fixed.items():
            found[self.leaves[i]] = only_axes(spec, layout.sizes)
        for group, place in zip(self.groups, layout.groups, strict=True):
            for i in group.leaves:
                own = place._replace(batch=None) if self.zero1 and i in group.parameters else place
                found[self.leaves[i]] = layout.fitted(own.spec(self.axes), self.leaves[i].shape)
        return {leaf: self._over_stages(found[leaf], i, layout) for i, leaf in enumerate(self.leaves)}

    def group_spec(self, number: int, layout: Layout) -> PartitionSpec:
        """Where a group is, whether or not its dimensions divide."""
        spec = layout.groups[number].spec(self.axes)
        return self._over_stages(spec, self.groups[number].leaves[0], layout)

    def _over_stages(self, spec: PartitionSpec, i: int, layout: Layout) -> PartitionSpec:
        """The spec of a leaf whose layers, if it has some, are the stages of a pipeline."""
        dim = self.stacked.get(i)
        if dim is None or layout.pipeline is None or math.prod(self.leaves[i].shape) == 1:
            return spec
        found = [*entries(spec), *[None] * (dim + 1 - len(entries(spec)))]
        return PartitionSpec(*found[:dim], layout.pipeline.axis, *found[dim + 1 :])

    def of_batch(self, layout: Layout) -> Callable[[tuple[int, ...]], PartitionSpec]:
        """Gives the spec of an array of a batch, from its shape."""
        return functools.partial(layout.fitted, layout.batch)

    def batch_argnums(self, layout: Layout) -> tuple[int, ...]:
        """The arguments of which some array is sharded as a batch."""
        placed = self.step.arguments(lambda leaf: None, self.of_batch(layout))
        return tuple(i for i in sorted(self.step.batch) if any(jax.tree.leaves(placed[i])))

    def plan(self, layout: Layout) -> Plan:
        """The quick plan of the step."""
        step = self.step
        slices = {self.axes.slices: self.slices} if self.slices > 1 else {}
        helper = make_helper(layout.sizes, self.devices, slices)
        given = step.arguments(self.specs(layout).__getitem__, self.of_batch(layout))
        function = helper.sjit(
            step.function,
            in_shardings=given,
            out_shardings=step.returned(given),
            donate_argnums=tuple(step.donated),
            batch_argnums=self.batch_argnums(layout),
            pipeline=layout.pipeline,
        )
        return make_plan(helper, function, step.args, {}, quick=True, hardware=self.hardware)

    def stored(self, layout: Layout) -> int:
        """The bytes of the leaves on each device."""
        sizes = layout.sizes
        parts = {
            leaf: math.prod(sizes[axis] for axis in spec_axes(spec))
            for leaf, spec in self.specs(layout).items()
        }
        return sum(leaf.bytes // parts[leaf] for leaf in self.step.leaves if leaf)

    def fingerprint(self, limit: int | None) -> str:
        """Returns a text that differs for searches whose trials differ.

        Args:
            limit: the bytes of memory that a device may use.
        """
        step = self.step
        devices = [f'{device.device_kind} {coords_of(device)} {slice_of(device)}' for device in self.devices]
        return fingerprint(
            [
                *(str(step.jaxpr), str(sorted(step.batch)), str(sorted(step.donated))),
                *map(str, self.leaves),
                *(group.name for group in self.groups),
                str(dict(self.fixed)),
                *devices,
                *xla_flags(),
                f'{self.slices} {self.axes} {self.zero1} {self.hardware} {limit}',
            ]
        )


def make_problem(
    step: Step,
    devices: Sequence[Any],
    axes: Axes,
    slices: int,
    keep: Any,
    zero1: bool,
    hardware: Hardware | None = None,
) -> Problem:
    """The problem of a step.

    Raises:
        ArgumentError: there is nothing to find, or *keep* is no rule of pairs for these leaves.
    """
    leaves = leaves_of(step)
    fixed = _fixed(keep, leaves, [name for name in dataclasses.astuple(axes) if name])
    known = dimensions_of(step, leaves)
    groups = make_groups(leaves, known, fixed)
    if not groups:
        raise ArgumentError(
            f'{step.name} has nothing to find a rule for: its arguments are batches'
            + (', scalars or fixed by keep' if fixed else ' or scalars')
        )
    experts = frozenset(
        number
        for group in groups
        for i, dim in known.experts
        if i in group.leaves and (number := group.classes[dim]) is not None
    )
    stacked = {i: dim for i, dim in stacked_dims(leaves, known).items() if i not in fixed}
    return Problem(step, leaves, groups, experts, stacked, fixed, devices, axes, slices, zero1, hardware)


def _fixed(keep: Any, leaves: Sequence[Leaf], names: Sequence[str]) -> dict[int, PartitionSpec]:
    """The leaves that the user has placed."""
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


def dimensions_of(step: Step, leaves: Sequence[Leaf]) -> ArgumentDimensions:
    """What a step does with the dimensions of its leaves."""
    numbers = {leaf: i for i, leaf in enumerate(leaves)}
    return dimensions(
        step.jaxpr, {i: numbers[leaf] for i, leaf in enumerate(step.leaves) if leaf is not None}
    )
