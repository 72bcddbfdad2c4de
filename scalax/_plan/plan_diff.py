"""The difference of two plans."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from scalax._plan.batch import followed_text
from scalax._report.pages import visible
from scalax._report.tables import distinct_texts, human_bytes, milliseconds
from scalax._tree.specs import axis_sizes_text
from scalax.explain import ReportDiff

if TYPE_CHECKING:
    from scalax._plan.plan import Plan

_CollectiveKey = tuple[str, tuple[str, ...], int]


@dataclasses.dataclass(frozen=True)
class PlanDiff:
    """The difference of two plans: false when nothing changed; ``str()`` of it lists the changes.

    Attributes:
        before: the first plan.
        after: the second one.
    """

    before: Plan
    after: Plan

    @property
    def collectives(self) -> dict[_CollectiveKey, tuple[int, int]]:
        """The collectives that changed: (kind, mesh axes, bytes) -> how often before, and after.

        Their lines in the program are not compared, because lines move.
        """
        before, after = _counts(self.before), _counts(self.after)
        return {
            key: (before[key], after[key])
            for key in sorted({*before, *after}, key=lambda key: (-key[2], key))
            if before[key] != after[key]
        }

    @property
    def inputs(self) -> ReportDiff:
        """The arguments whose shardings changed."""
        return self.before.inputs.diff(self.after.inputs)

    @property
    def outputs(self) -> ReportDiff:
        """The outputs whose shardings changed."""
        return self.before.outputs.diff(self.after.outputs)

    def __bool__(self) -> bool:
        return bool(self._changed_facts() or self.collectives or self.inputs or self.outputs)

    def __str__(self) -> str:
        if not self:
            return visible(f'{self.after.name}: nothing changed')
        meshes = [axis_sizes_text(plan.mesh) for plan in (self.before, self.after)]
        lines = [f'{self.after.name}: ' + ' -> '.join(dict.fromkeys(f'({mesh})' for mesh in meshes))]
        lines += [f'  {name:<12}  {old} -> {new}' for name, old, new in self._changed_facts()]
        if self.collectives:
            lines += ['', 'collectives (times before -> after):']
            lines += [
                f'  {kind}  {" x ".join(axes)}  {human_bytes(size)}  {old} -> {new}'
                for (kind, axes, size), (old, new) in self.collectives.items()
            ]
        lines = [visible(line) for line in lines]
        for name, report in (('arguments', self.inputs), ('outputs', self.outputs)):
            lines += ['', f'{name}:', str(report)] if report else []
        return '\n'.join(lines)

    def _changed_facts(self) -> list[tuple[str, str, str]]:
        """What changed, beside collectives and shardings, as text."""
        sizes = zip(_sizes(self.before), _sizes(self.after), strict=True)
        every = [(name, *distinct_texts(old, new, human_bytes, ' B')) for (name, old), (_, new) in sizes]
        flops = distinct_texts(self.before.flops, self.after.flops, '{:.4g}'.format, '')
        every.append(('flops', *flops))
        facts = zip(_facts(self.before), _facts(self.after), strict=True)
        every += [(name, old, new) for (name, old), (_, new) in facts]
        return [(name, old, new) for name, old, new in every if old != new]


def _counts(plan: Plan) -> collections.Counter[_CollectiveKey]:
    counts: collections.Counter[_CollectiveKey] = collections.Counter()
    for row in plan.collectives:
        counts[row.kind, row.axes, row.bytes] += row.count
    return counts


def _sizes(plan: Plan) -> Iterator[tuple[str, int]]:
    memory, moves = plan.memory, plan.host_moves
    yield 'peak', memory.peak
    for name in ('arguments', 'outputs', 'temporaries'):
        yield name, getattr(memory, name)
    yield 'on the host', memory.host
    yield 'host:out', moves.to_host
    yield 'host:in', moves.from_host


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    yield 'devices', f'{plan.devices} {plan.simulates or plan.device_kind}'
    yield 'fits', {True: 'yes', False: 'no', None: 'not known'}[plan.fits]
    roofline = plan.known_roofline
    step = None if roofline is None else ' .. '.join(map(milliseconds, roofline.step_seconds))
    yield 'step', step or 'not known'
    yield 'bound by', 'not known' if roofline is None else roofline.bound
    yield 'batch', followed_text(plan.followed)
