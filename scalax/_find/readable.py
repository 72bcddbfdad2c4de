"""Rules by leaf path as a person would write them, made from the spec of each leaf.

For each spec, a greedy cover finds the shortest runs of keys (`key_runs`) that its leaves have and those of
other specs lack; they become the alternatives of one regex. Rows are found from the simplest to the most
complex, and later ones may rely on earlier ones. A last check over all leaves puts the exact path of any leaf
that would still resolve wrongly in front.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jax.sharding import PartitionSpec

from scalax._find.key_runs import (
    Alternative,
    Mark,
    Numbered,
    Run,
    anchored,
    any_numbers,
    escaped,
    groups_of,
    is_name,
    key_text,
    numbers_of,
    regex_of,
    runs_of,
)
from scalax._tree import specs as spec_forms
from scalax.rules import TreePathShardingRule

REPLICATED = PartitionSpec()


def readable_rule(
    leaves: Mapping[str, tuple[tuple[int, ...], PartitionSpec]],
) -> TreePathShardingRule:
    """The short `TreePathShardingRule` that gives every leaf its spec.

    Specs are equal if they differ in trailing None only. Arrays of one element are left out: the rule
    replicates them whatever their path.

    Args:
        leaves: leaf path -> (shape, spec), in the order in which the rows should read.

    Example:
        >>> P = PartitionSpec
        >>> readable_rule(
        ...     {
        ...         '0/layers/0/attn/query/kernel': ((8, 8), P('fsdp', 'tp')),
        ...         '0/layers/0/mlp/up/kernel': ((8, 32), P('fsdp', 'tp')),
        ...         '0/layers/0/mlp/down/kernel': ((32, 8), P('tp', 'fsdp')),
        ...         '0/layers/0/norm/scale': ((8,), P()),
        ...     }
        ... )
        TreePathShardingRule(('down/kernel', P('tp', 'fsdp')), ('kernel', P('fsdp', 'tp')), ('.*', P()))
    """
    asked = {
        path: spec_forms.canonical(spec)
        for path, (shape, spec) in leaves.items()
        if any(size != 1 for size in shape)
    }
    rows = _Table(asked).rows() if asked else [('.*', REPLICATED)]
    return TreePathShardingRule(*_exact_rows(asked, rows), *rows)


def _exact_rows(
    asked: Mapping[str, PartitionSpec], rows: Sequence[tuple[str, PartitionSpec]]
) -> Iterator[tuple[str, PartitionSpec]]:
    """Whole paths, for the leaves that *rows* give another spec; keys may be anything, newlines included."""
    searches = [(re.compile(regex).search, spec) for regex, spec in rows]
    wrong: dict[PartitionSpec, list[str]] = {}
    for path, spec in asked.items():
        if next((value for search, value in searches if search(path)), None) != spec:
            wrong.setdefault(spec, []).append(path)
    for spec, paths in wrong.items():
        yield rf'\A({"|".join(map(escaped, paths))})\Z', spec


# --- Rows ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Found:
    """A run, and the groups that have it, as bits.

    Attributes:
        behind: how many names come behind it.
        touched: those with a leaf that has the run.
        covered: those of which every leaf has it.
    """

    run: Run
    behind: int
    touched: int
    covered: int

    @functools.cached_property
    def cost(self) -> float:
        """About how many keys there are to read."""
        nameless = self.run[0] is Mark.BEGIN and not is_name(self.run[1])
        cost = 6.0 if nameless else 0  # `mu|nu` says more than `^1`
        for key in self.run:
            if isinstance(key, str):
                cost += 1
            elif isinstance(key, Numbered):
                several = key.numbers is not None and len(key.numbers) > 1
                cost += 0.6 + 0.6 * bool(key.stem) + 0.3 * several * len(key_text(key))
            else:
                cost += _GAP_COST if key is Mark.GAP else 0.2
        return cost

    @property
    def weight(self) -> float:
        """The cost, and more for what is far from the end of the path: it says less about a leaf."""
        return self.cost + 3.5 * self.behind

    @functools.cached_property
    def head(self) -> Run:
        """The keys before a gap, if there is one."""
        return self.run[: self.run.index(Mark.GAP)] if Mark.GAP in self.run else ()

    def price(self, left: int, heads: set[Run]) -> float:
        """The weight for each of the groups that are *left*, where the *heads* are in the regex already."""
        count = (self.covered & left).bit_count()
        return (self.weight - _GAP_COST * (self.head in heads)) / count if count else math.inf


@dataclasses.dataclass(frozen=True)
class _Cover:
    """Alternatives of a regex, which together match some groups.

    Attributes:
        chosen: runs, and each as a regex.
        missing: how many of the groups no run can tell from others. Their leaves get exact rows.
    """

    chosen: list[tuple[_Found, Alternative]]
    missing: int

    @property
    def cost(self) -> float:
        return sum(found.cost for found, _ in self.chosen) + 10 * self.missing

    @property
    def weight(self) -> float:
        return sum(found.weight for found, _ in self.chosen) + 10 * self.missing

    @property
    def touched(self) -> int:
        return _union(found.touched for found, _ in self.chosen)

    @property
    def regex(self) -> str:
        return regex_of([alternative for _, alternative in self.chosen])


class _Row(NamedTuple):
    """A row, and as bits the groups that it decides about."""

    regex: str
    spec: PartitionSpec
    groups: int


def _length(rows: Iterable[_Row]) -> int:
    return sum(len(row.regex) + 10 for row in rows)


class _Table:
    """The search of the rows for some leaves."""

    def __init__(self, asked: Mapping[str, PartitionSpec]) -> None:
        self._groups = groups_of(asked)
        self._of_spec: dict[PartitionSpec, int] = {}
        for bit, group in enumerate(self._groups):
            self._of_spec[group.spec] = self._of_spec.get(group.spec, 0) | 1 << bit
        self._all = (1 << len(self._groups)) - 1
        self._found = self._find_runs()

    def rows(self) -> list[tuple[str, PartitionSpec]]:
        """Regexes and specs, of which the first match wins; the last row is for all other leaves."""
        rows = self._search(_Cover([], 0))
        # A part of the tree that is replicated, as the params of ZeRO-1, may be best said first.
        default = self._of_spec.get(REPLICATED, 0)
        parts = [found for found in self._found if found.covered and not found.touched & ~default]
        part = max(parts, key=lambda found: found.covered.bit_count(), default=None)
        if part is not None and len(rows) > 1:
            others = self._search(self._cover(part.covered, self._all & ~default))
            if _length(others) < _length(rows):
                rows = others
        ordered = self._ordered(rows)
        return [*ordered, ('.*', REPLICATED)] if default else ordered

    def _search(self, replicated: _Cover) -> list[_Row]:
        """The rows of all specs but the replicated one, the simplest spec first.

        Args:
            replicated: what has a row before them, if anything.
        """
        rows = [_Row(replicated.regex, REPLICATED, replicated.touched)]
        left = self._all & ~replicated.touched
        pending = dict(self._of_spec)
        default = pending.pop(REPLICATED, 0)
        alone = {spec: self._cover(mine, left & ~mine) for spec, mine in pending.items()}
        while pending:
            best = {spec: self._best(mine, left, default, alone[spec]) for spec, mine in pending.items()}
            spec = min(best, key=lambda spec: best[spec][1].cost)
            exceptions, cover = best[spec]
            rows.append(_Row(exceptions.regex, REPLICATED, exceptions.touched & left))
            left &= ~exceptions.touched
            mine = pending.pop(spec)
            several = mine == self._all or max(len(cover.chosen), len(alone[spec].chosen)) > 1
            last = left == mine and not default
            rows.append(_Row('.*' if last and several else cover.regex, spec, mine))
            left &= ~mine
        return [row for row in rows if row.regex]

    def _best(self, mine: int, left: int, default: int, alone: _Cover) -> tuple[_Cover, _Cover]:
        """The exceptions to be replicated by a row before, mostly none, and the cover of the groups *mine*.

        Rows that rely on those before them are harder to read: only if that saves much.
        """
        cover = self._cover(mine, left & ~mine)
        if cover.weight > _CLEARLY * alone.weight:
            cover = alone
        loose = self._cover(mine, left & ~mine & ~default)
        excepted = loose.touched & left & default
        if excepted:
            exceptions = self._cover(excepted, left & ~default)
            loose = self._cover(mine, left & ~mine & ~excepted)
            if loose.weight + exceptions.weight + _ROW_COST < _CLEARLY * cover.weight:
                return exceptions, loose
        return _Cover([], 0), cover

    def _ordered(self, rows: Sequence[_Row]) -> list[tuple[str, PartitionSpec]]:
        """The rows in the order of the leaves, but each behind those whose leaves it matches too."""
        samples = [self._samples(row.groups) for row in rows]
        before: list[set[int]] = []
        for index, row in enumerate(rows):
            search = re.compile(row.regex).search
            before.append({i for i in range(index) if any(map(search, samples[i]))})
        ordered: list[int] = []
        while len(ordered) < len(rows):
            ready = [i for i in range(len(rows)) if i not in ordered and before[i].issubset(ordered)]
            ordered.append(min(ready, key=lambda i: _lowest(rows[i].groups)))
        return [(rows[i].regex, rows[i].spec) for i in ordered]

    def _samples(self, bits: int) -> list[str]:
        return [path for bit, group in enumerate(self._groups) if bits >> bit & 1 for path in group.samples]

    def _find_runs(self) -> list[_Found]:
        paths = [group.keys for group in self._groups]
        idle = len(paths) > 1 and min(map(len, paths)) > 3 and len({keys[-2] for keys in paths}) == 1
        places: dict[Run, list[tuple[int, list[frozenset[int] | None]]]] = collections.defaultdict(list)
        least: dict[Run, int] = {}
        for bit, keys in enumerate(paths):
            for run, behind in runs_of(keys, idle):
                free = any_numbers(run)
                places[free].append((1 << bit, numbers_of(run)))
                for candidate in (run, free) if any(map(is_name, free)) else (run,):
                    least[candidate] = min(least.get(candidate, behind), behind)
        return [_found(run, behind, places[any_numbers(run)]) for run, behind in least.items()]

    def _cover(self, mine: int, others: int) -> _Cover:
        """Runs that the groups *mine* have and *others* lack, chosen greedily by cost per group."""
        usable = [found for found in self._found if found.covered & mine and not found.touched & others]
        theirs = self._samples(others)
        chosen: list[tuple[_Found, Alternative]] = []
        left = mine
        heads: set[Run] = set()
        queue = [(found.price(mine, heads), place) for place, found in enumerate(usable)]
        heapq.heapify(queue)
        while left and queue:
            price, place = heapq.heappop(queue)
            best = usable[place]
            now = best.price(left, heads)
            if now > price:  # some of its groups are covered by now
                if now < math.inf:
                    heapq.heappush(queue, (now, place))
                continue
            # Nor in keys that only hold it, such as `ed` in `embed`, even where these have the same spec.
            own, without = (self._samples(bits) for bits in (best.covered & mine, self._all & ~best.touched))
            alternative = anchored(best.run, own, without) or anchored(best.run, own, theirs)
            if alternative is None:
                continue
            chosen.append((best, alternative))
            left &= ~best.covered
            if best.head and best.head not in heads:
                heads.add(best.head)
                for place, found in enumerate(usable):
                    if found.head == best.head:
                        heapq.heappush(queue, (found.price(left, heads), place))
        for item in chosen[::-1]:
            rest = [other for other in chosen if other is not item]
            if not mine & item[0].covered & ~_union(found.covered for found, _ in rest):
                chosen = rest
        chosen.sort(key=lambda item: _lowest(item[0].covered & mine))
        return _Cover(chosen, left.bit_count())


_GAP_COST = 2.5  # in keys
_ROW_COST = 3
_CLEARLY = 0.7  # of the cost, to be clearly shorter


def _union(bits: Iterable[int]) -> int:
    return functools.reduce(int.__or__, bits, 0)


def _lowest(bits: int) -> int:
    return bits & -bits


def _found(run: Run, behind: int, places: Iterable[tuple[int, list[frozenset[int] | None]]]) -> _Found:
    touched = covered = 0
    wanted = numbers_of(run)
    for bit, numbers in places:
        pairs = list(zip(wanted, numbers, strict=True))
        if all(ours is None or theirs is None or ours & theirs for ours, theirs in pairs):
            touched |= bit
        if all(ours is None or (theirs is not None and theirs <= ours) for ours, theirs in pairs):
            covered |= bit
    return _Found(run, behind, touched, covered)
