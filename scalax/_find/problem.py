"""What is searched for: steps, the groups of their leaves, devices; and the plan of a layout."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from scalax._find.dimensions import Dimensions, dimensions
from scalax._find.groups import Group, Leaf, make_groups
from scalax._find.layout import Axes, Layout, fitted, spec_of, without
from scalax._find.step import Key, Step, leaves_of
from scalax._helper import MeshShardingHelper
from scalax._jax.devices import coords_of
from scalax._mesh.gpu_nodes import StandIns
from scalax._plan.make import make_plan
from scalax._plan.plan import Plan
from scalax._report.trial_file import identity
from scalax._search.meshes import helper_of
from scalax._tree.specs import entries, entry_axes, spec_axes
from scalax.errors import ArgumentError, did_you_mean
from scalax.rules import TreePathShardingRule


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """What is searched for.

    Attributes:
        steps: the steps, the first one being that whose plan is shown.
        leaves: the leaves of their arguments.
        groups: those of them that are searched.
        experts: the classes of dimensions of experts.
        fixed: the placements of others that the user has said.
        devices: the devices.
        axes: the names of the mesh axes.
        slices: how many slices the devices are.
        zero1: whether the axes of the rows shard no parameters, but the states of their optimizer.
    """

    steps: tuple[Step, ...]
    leaves: Mapping[Key, Leaf]
    groups: tuple[Group, ...]
    experts: frozenset[int]
    fixed: Mapping[Key, PartitionSpec]
    devices: Sequence[Any]
    axes: Axes
    slices: int = 1
    zero1: bool = False

    @property
    def batch_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the arrays of the batches."""
        return [shape for step in self.steps for shape in step.batch_shapes]

    def specs(self, layout: Layout) -> dict[Key, Any]:
        """The spec of each leaf."""
        keys, found = list(self.leaves), dict(self.fixed)
        for group, placement in zip(self.groups, layout.groups, strict=True):
            whole = without(placement, self.axes.rows) if self.zero1 else placement
            for i in group.leaves:
                own = whole if i in group.parameters else placement
                found[keys[i]] = spec_of(fitted(own, keys[i][1], layout.sizes))
        return {key: _over(found.get(key, spec_of(())), layout.sizes) for key in keys}

    def helper(self, layout: Layout) -> MeshShardingHelper:
        """The helper of the mesh of a layout."""
        slices = {self.axes.slices: self.slices} if self.slices > 1 else {}
        return helper_of(layout.sizes, self.devices, slices)

    def of_batch(self, layout: Layout) -> Callable[[tuple[int, ...]], Any]:
        """Gives the spec of an array of a batch, from its shape."""
        return lambda shape: spec_of(fitted(layout.batch, shape, layout.sizes))

    def batch_argnums(self, layout: Layout, step: Step) -> tuple[int, ...]:
        """The arguments of a step of which some array is sharded as a batch."""
        spec = self.of_batch(layout)
        return tuple(i for i in sorted(step.batch) if any(map(spec, step.shapes_of(i))))

    def plan(self, layout: Layout, step: Step, *, quick: bool = True) -> Plan:
        """The plan of a step."""
        helper, specs = self.helper(layout), self.specs(layout)
        given, returned = step.shardings(lambda leaf: specs[leaf.path, leaf.shape], self.of_batch(layout))
        function = helper.sjit(
            step.function,
            in_shardings=given,
            out_shardings=returned,
            donate_argnums=tuple(step.donated),
            batch_argnums=self.batch_argnums(layout, step),
        )
        return make_plan(helper, function, step.args, {}, quick=quick)

    def stored(self, layout: Layout) -> int:
        """The bytes of the leaves on each device, those of the step that has most."""
        sizes, specs = layout.sizes, self.specs(layout)

        def size(leaf: Leaf) -> int:
            axes = spec_axes(specs[leaf.path, leaf.shape])
            return leaf.bytes // math.prod(sizes[axis] for axis in axes)

        return max(sum(map(size, filter(None, step.leaves))) for step in self.steps)

    def identity(self, limit: int | None) -> str:
        """What a search has in common with one whose trials it can use."""
        parts = [
            *(f'{step.jaxpr} {sorted(step.batch)} {sorted(step.donated)}' for step in self.steps),
            *(str(key) for key in self.leaves),
            *(group.name for group in self.groups),
            f'{dict(self.fixed)} {len(self.devices)} {self.devices[0].device_kind}',
            f'{[*map(coords_of, self.devices)]}',
            f'{self.devices.nodes if isinstance(self.devices, StandIns) else None}',
            f'{self.slices} {self.axes} {self.zero1} {limit}',
        ]
        return identity(parts)


def make_problem(
    steps: Sequence[Step], devices: Sequence[Any], axes: Axes, slices: int, keep: Any, zero1: bool
) -> Problem:
    """The problem of some steps.

    Raises:
        ArgumentError: there is nothing to find, or *keep* is no rule of pairs for these leaves.
    """
    leaves = leaves_of(steps)
    fixed = _fixed(keep, leaves, [name for name in dataclasses.astuple(axes) if name])
    keys = list(leaves)
    known = joined(steps, keys)
    groups = make_groups(list(leaves.values()), known, [keys.index(key) for key in fixed])
    if not groups:
        raise ArgumentError(
            f'{steps[0].name} has nothing to find a rule for: its arguments are batches'
            + (', scalars or what keep has placed' if fixed else ' or scalars')
        )
    experts = frozenset(
        number
        for group in groups
        for dim, number in enumerate(group.classes)
        if number is not None and any((i, dim) in known.experts for i in group.leaves)
    )
    return Problem(tuple(steps), leaves, tuple(groups), experts, fixed, devices, axes, slices, zero1)


def _fixed(keep: Any, leaves: Collection[Key], names: Sequence[str]) -> dict[Key, PartitionSpec]:
    """The leaves that the user has placed."""
    rule = keep if isinstance(keep, TreePathShardingRule) else TreePathShardingRule(*(keep or ()))
    fixed: dict[Key, PartitionSpec] = {}
    for pattern, spec in rule.rules:
        if not isinstance(spec, PartitionSpec):
            raise ArgumentError(f'keep takes pairs of a regex and a PartitionSpec, got {spec!r}')
        before = len(fixed)
        for key in leaves:
            if key not in fixed and math.prod(key[1]) > 1 and re.search(pattern, key[0]):
                if len(spec) > len(key[1]):
                    raise ArgumentError(
                        f'keep has {spec!r} for {key[0]!r}, which has the shape {key[1]}: a spec has at most '
                        'an entry for each dimension'
                    )
                fixed[key] = spec
        if len(fixed) == before:
            raise ArgumentError(
                f'keep has {pattern!r}, which is found in no path that no pair before it matches'
            )
    unknown = [axis for spec in fixed.values() for axis in spec_axes(spec) if axis not in names]
    if unknown:
        raise ArgumentError(f'keep names the mesh axis {unknown[0]!r} ({did_you_mean(unknown[0], names)})')
    return fixed


def joined(steps: Sequence[Step], keys: Sequence[Key]) -> Dimensions:
    """What all steps do with the dimensions of their leaves; the first that has a leaf decides about it."""
    numbers = {key: i for i, key in enumerate(keys)}
    classes: dict[tuple[int, int], int] = {}
    ranks = {i: len(key[1]) for i, key in enumerate(keys)}
    stacked, multiplied, experts = set(), set(), set()
    for step in steps:
        own = {i: numbers[leaf.path, leaf.shape] for i, leaf in enumerate(step.leaves) if leaf is not None}
        found = dimensions(step.jaxpr, own)
        first = len(set(classes.values())) + len(classes)
        seen = {place[0] for place in classes}
        for (i, dim), number in found.classes.items():
            if own[i] not in seen:
                classes.setdefault((own[i], dim), first + number)
        stacked |= {(own[i], dim) for i, dim in found.stacked}
        experts |= {(own[i], dim) for i, dim in found.experts}
        multiplied |= {own[i] for i in found.multiplied}
    return Dimensions(classes, frozenset(stacked), frozenset(multiplied), frozenset(experts), ranks)


def _over(spec: PartitionSpec, axes: Container[str]) -> PartitionSpec:
    """A spec without mesh axes that a mesh does not have."""
    kept = [tuple(axis for axis in entry_axes(entry) if axis in axes) for entry in entries(spec)]
    return spec_of(tuple(kept))
