"""Which mesh axes do the named dimensions of one leaf get? The decision of LogicalAxisShardingRule."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jax.sharding import PartitionSpec

from scalax._tree.specs import Fault, entries, entry_axes, spec_axes
from scalax.errors import did_you_mean, near_names
from scalax.rules._answers import Answer, AxisSizes
from scalax.rules._pattern import Dimension, Part, Pattern, as_text
from scalax.rules._tree_path import regex_text

if TYPE_CHECKING:
    from scalax.rules._logical_axis import LogicalAxisShardingRule

_FACTOR = 'give the dimension the size that its parts make, or correct sizes=.'
_DIVIDE = (
    "change the sizes or the mapping, or set on_indivisible='replicate' (or 'warn') on the rule to leave "
    'out the mesh axes that do not divide.'
)
_KNOW = (
    'add the name to axis_mapping (None leaves its dimensions whole), or pass strict=False to leave '
    'dimensions of unknown names whole.'
)
_ONCE = "give each dimension of an array a name of its own, or none ('_' in a pattern, None in metadata)."
_RANK = (
    "name every dimension ('_' for one without a name, '...' for any number of them), or put a rule for "
    'such leaves before this one.'
)
_BOXED = (
    "name every dimension of such leaves in axis_names, without '...', as in "
    "axis_names=[('query/kernel', 'embed heads _')], which counts where a leaf's own names do not fit; or "
    'put a rule for such leaves before this one.'
)


@dataclasses.dataclass(frozen=True)
class Named:
    """The names of the dimensions of a leaf, and where they come from."""

    pattern: Pattern
    text: str
    number: int | None = None
    regex: str | re.Pattern[str] = ''

    @property
    def source(self) -> str:
        if self.number is None:
            return f"the leaf's own names {self.text!r}"
        return f'regex {regex_text(self.regex)}: {self.text!r}'


@dataclasses.dataclass(frozen=True)
class NamedLeaf:
    """What a rule decides from: the names and the shape of a leaf, what is taken, and the mesh."""

    rule: LogicalAxisShardingRule
    named: Named
    shape: tuple[int, ...]
    stacked: int
    taken: PartitionSpec
    axis_sizes: AxisSizes | None

    def decide(self) -> tuple[Answer | Fault, list[str]]:
        """The answer, or what is wrong; and which axes had to go for it, where the policy allows that."""
        dimensions = self.named.pattern.of_rank(len(self.shape))
        fault = self._rank_fault() if dimensions is None else self._name_fault(dimensions)
        if fault is not None:
            return fault, []
        assert dimensions is not None
        used, taken = list(spec_axes(self.taken)), entries(self.taken)
        chosen: list[tuple[str, ...]] = []
        dropped: list[str] = []
        reasons: list[str] = []
        notes: list[str] = []
        for dim, parts in enumerate(dimensions):
            sizes = self._part_sizes(parts, self.shape[dim])
            if sizes is None:
                return self._grouping_fault(dim, parts), []
            chosen.append(())
            if dim < len(taken) and taken[dim] is not None:
                asked = [axis for part in parts for axis in self._choose(part, used)[0]]
                if not {*entry_axes(taken[dim])}.issuperset(asked):
                    notes.append(self._in_vain(asked, dim, 'not free'))
                continue
            for part, size in zip(parts, sizes, strict=True):
                axes, why, busy = self._choose(part, used)
                if not axes and set(busy).intersection(spec_axes(self.taken)):
                    why = ''  # it is another rule that is in the way
                    notes.append(self._in_vain(busy, dim, 'in use'))
                kept = self._dividing(axes, size, is_whole=len(parts) == 1)
                if kept != axes:
                    text = self._uneven(dim, parts, part, size, axes)
                    if self.rule.on_indivisible == 'error':
                        return Fault('indivisible', text, _DIVIDE), []
                    dropped.append(f'{text}; {"x".join(kept) or "no axis"} is used')
                    why = dropped[-1]
                used.extend(kept)
                chosen[-1] += kept
                reasons.extend([why] if why else [])
        spec = PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in chosen))
        number = self.named.number
        clauses = () if number is None else ((self.rule, number),)
        reason = '; '.join(reasons) or ('' if notes else 'no name has a mesh axis here')
        policies, unheard = (self.rule.on_indivisible,), tuple(dict.fromkeys(notes))
        source = self.named.source
        return Answer(spec, source, reason, policies, clauses=clauses, notes=unheard), dropped

    def _in_vain(self, axes: Sequence[str], dim: int, why: str) -> str:
        return f'{self.named.source} asked for {", ".join(dict.fromkeys(axes))} on dimension {dim}: {why}'

    def _choose(self, name: Part, used: list[str]) -> tuple[tuple[str, ...], str, list[str]]:
        """The mesh axes of a name, why, and those in use; the docstring of the rule has the precedence."""
        first: tuple[str, ...] = ()
        busy: list[str] = []
        absent: list[str] = []
        present: list[str] = []
        for other, entry in self.rule.axis_mapping:
            if other != name:
                continue
            if entry is None:
                return (), '', busy
            here = [a for a in entry_axes(entry) if self.axis_sizes is None or a in self.axis_sizes]
            free = tuple(axis for axis in here if axis not in used)
            present.extend(here)
            absent.extend(axis for axis in entry_axes(entry) if axis not in here)
            if here and len(free) == len(here):
                return free, f'{name} -> {", ".join(free)}{self._lacks(absent, present)}', busy
            first = first or free
            busy.extend(axis for axis in here if axis in used)
        in_use = f'{", ".join(dict.fromkeys(busy))} in use'
        lacks = self._lacks(absent, present)
        if first:
            return first, f'{name} -> {", ".join(first)} ({in_use}){lacks}', busy
        return (), f'{name}: {in_use}{lacks}' if busy else f'{name}{lacks}' if lacks else '', busy

    def _lacks(self, absent: Sequence[str], present: Sequence[str]) -> str:
        """Which mesh axes of a name the mesh lacks: all if it has none of them, else one that looks misspelt.

        To skip them is the contract, and a mapping for many meshes names many. An axis is not meant by
        another name where it is named itself.
        """
        if self.axis_sizes is None or not absent:
            return ''
        others = [axis for axis in self.axis_sizes if axis not in present]
        odd = next((axis for axis in absent if near_names(axis, others)), None)
        hint = '' if odd is None else f' ({did_you_mean(odd, others)})'
        if not present:
            return f': the mesh has no {", ".join(map(repr, dict.fromkeys(absent)))}{hint}'
        return '' if odd is None else f'; the mesh has no {odd!r}{hint}'

    def _part_sizes(self, parts: Dimension, size: int) -> list[int | None] | None:
        """The sizes of the parts of a dimension as far as they are known; None if they do not fit it."""
        known = dict(self.rule.sizes)
        sizes = [part if isinstance(part, int) else known.get(part or '') for part in parts]
        rest, remainder = divmod(size, math.prod(n for n in sizes if n is not None))
        if remainder or (None not in sizes and rest != 1):
            return None
        return [rest if n is None else n for n in sizes] if sizes.count(None) == 1 else sizes

    def _dividing(self, axes: tuple[str, ...], size: int | None, is_whole: bool) -> tuple[str, ...]:
        """The axes without those, from the right, by which a dimension or a part of one does not divide."""
        # A whole dimension that may not be left out is judged where everything else about a spec is.
        judged = is_whole and self.rule.on_indivisible == 'error'
        if size is not None and self.axis_sizes is not None and not judged:
            while size % math.prod(self.axis_sizes[axis] for axis in axes):
                axes = axes[:-1]
        return axes

    def _uneven(self, dim: int, parts: Dimension, part: Part, size: int | None, axes: tuple[str, ...]) -> str:
        assert self.axis_sizes is not None
        shards = math.prod(self.axis_sizes[axis] for axis in axes)
        said = ' x '.join(f'{axis}={self.axis_sizes[axis]}' for axis in axes)
        return (
            f'{part!r} of size {size} in dimension {dim}, {as_text((parts,))}, does not divide by '
            f'{shards} ({said})'
        )

    def _rank_fault(self) -> Fault:
        pattern, rank = self.named.pattern, len(self.shape)
        count = len(pattern.dimensions)
        return Fault(
            'names-rank',
            f'{self.named.text!r} names {"" if pattern.ellipsis is None else "at least "}{count} '
            f'dimension{"" if count == 1 else "s"}, the array has {rank}'
            + (' without its stack of layers' if self.stacked else ''),
            _BOXED if self.named.number is None else _RANK,
        )

    def _name_fault(self, dimensions: tuple[Dimension, ...]) -> Fault | None:
        """The first thing that is wrong with names that a leaf holds; those of regexes were checked."""
        places: dict[str, list[int]] = {}
        for dim, parts in enumerate(dimensions):
            for part in parts:
                if isinstance(part, str):
                    places.setdefault(part, []).append(dim)
        known = [name for name, _ in self.rule.axis_mapping]
        unknown = [name for name in places if name not in known] if self.rule.strict else []
        if unknown:
            said = [
                f'{name!r} of dimension {places[name][0]} ({did_you_mean(name, known)})' for name in unknown
            ]
            return Fault('unknown-name', f'axis_mapping has no name {", ".join(said)}', _KNOW)
        for name, dims in places.items():
            if len(dims) > 1:
                listed = ', '.join(map(str, dims))
                return Fault('name-reuse', f'{name!r} is used more than once (dimensions {listed})', _ONCE)
        return None

    def _grouping_fault(self, dim: int, parts: Dimension) -> Fault:
        known = ', '.join(f'{name}={size}' for name, size in self.rule.sizes if name in parts)
        return Fault(
            'grouping',
            f'dimension {dim} of size {self.shape[dim]} is not {as_text((parts,))}'
            + (f' with {known}' if known else ''),
            _FACTOR,
        )
