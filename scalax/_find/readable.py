"""Rules by leaf path as a person would write them, made from the spec of each leaf.

Leaves whose paths differ in layer numbers only are one group. For each spec, a greedy cover finds the
shortest runs of whole keys that its groups have and those of other specs lack; the runs become the
alternatives of one regex, with anchors only where the text would match too much. A last check over all
leaves gives the exact path to any leaf that would still resolve wrongly.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import heapq
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from scalax import rules
from scalax._tree import specs as spec_forms
from scalax._util.folding import runs
from scalax.rules import ShardingRule, TreePathShardingRule

REPLICATED = PartitionSpec()


def readable_rule(
    leaves: Mapping[str, tuple[tuple[int, ...], PartitionSpec]],
    front: Sequence[tuple[str | re.Pattern[str], Any]] = (),
) -> TreePathShardingRule:
    """The short `TreePathShardingRule` that gives every leaf its spec.

    Specs are equal if they differ in trailing None only. Arrays of one element are left out: the rule
    replicates them whatever their path.

    Args:
        leaves: leaf path -> (shape, spec), in the order in which the rows should read.
        front: pairs that come first. They decide about the leaves that their regexes match.

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
        if any(size != 1 for size in shape) and not any(re.search(regex, path) for regex, _ in front)
    }
    rows = _Table(asked).rows() if asked else [] if front else [('.*', REPLICATED)]
    return TreePathShardingRule(*front, *_exact_rows(asked, rows), *rows)


def to_code(rule: TreePathShardingRule, name: str = 'rule') -> str:
    r"""Python source that makes *rule* again, one pair a line, in the style of ruff and black.

    Example:
        >>> print(to_code(TreePathShardingRule((r'layers/\d+/w', PartitionSpec('x')))))
        from scalax.sharding import PartitionSpec as P
        from scalax.sharding import TreePathShardingRule
        <BLANKLINE>
        rule = TreePathShardingRule(
            (r'layers/\d+/w', P('x')),
        )
        <BLANKLINE>
    """
    lines = []
    for regex, value in rule.rules:
        pair = _regex_code(regex), _value_code(value)
        line = f'    ({pair[0]}, {pair[1]}),'
        if len(line) > _WIDTH:
            line = f'    (\n        {pair[0]},\n        {pair[1]},\n    ),'
        lines.append(line)
    if not rule.strict:
        lines.append('    strict=False,')
    if rule.on_indivisible != 'error':
        lines.append(f'    on_indivisible={rule.on_indivisible!r},')
    names = ', '.join(sorted(_rule_names(rule).intersection(rules.__all__)))
    imports = [f'from scalax.sharding import {names}']
    if 'P(' in ''.join(lines):
        imports = sorted([*imports, 'from scalax.sharding import PartitionSpec as P'])
    if any(isinstance(regex, re.Pattern) for regex, _ in rule.rules):
        imports = ['import re', '', *imports]
    return '\n'.join([*imports, '', f'{name} = TreePathShardingRule(', *lines, ')', ''])


_WIDTH = 88  # of black, and of ruff unless told otherwise


def _regex_code(regex: str | re.Pattern[str]) -> str:
    if isinstance(regex, re.Pattern):
        flags = re.RegexFlag(regex.flags & ~re.UNICODE)
        return f're.compile({_regex_code(regex.pattern)}{f", {flags!r}" if flags else ""})'
    raw = '\\' in regex and regex.isprintable() and "'" not in regex and not regex.endswith('\\')
    return f"r'{regex}'" if raw else repr(regex)


def _value_code(value: Any) -> str:
    if not isinstance(value, PartitionSpec):
        return repr(value)
    text = re.sub(r'(?<=[(, ])UNCONSTRAINED\b', 'P.UNCONSTRAINED', spec_forms.text(value))
    return f'{text.removesuffix(",)")})' if text.endswith(',)') else text


def _rule_names(rule: ShardingRule) -> set[str]:
    return {type(rule).__name__}.union(*map(_rule_names, rule.parts))


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
        yield rf'\A({"|".join(map(_escaped, paths))})\Z', spec


# --- Paths as keys -------------------------------------------------------------------------------


class _Mark(enum.Enum):
    """What stands beside the keys of a run."""

    BEGIN = '^'
    END = '$'
    GAP = '.*'  # any keys, also none


@dataclasses.dataclass(frozen=True)
class _Numbered:
    """Keys that differ in one number: these numbers, or any."""

    stem: str
    tail: str
    numbers: tuple[int, ...] | None = None


_Key = str | _Numbered | _Mark
_Run = tuple[_Key, ...]

# `3`, `layers_3`, `layers.3`, and in Haiku `h3_attn`. `conv2` may be something else than `conv1`.
_NUMBER = re.compile('([A-Za-z]+(?=[0-9]+_)|(?:.*[_.])?)(0|[1-9][0-9]{0,8})(_.*)?', re.ASCII | re.DOTALL)
_LONGEST = 5  # keys of a run; a whole path may have more
_ENDING = 3  # keys behind a gap
_GAP_COST = 2.5  # in keys
_ROW_COST = 3


@dataclasses.dataclass(frozen=True)
class _Group:
    """Leaves of one spec whose paths differ in numbers that do not tell one spec from another."""

    keys: _Run
    spec: PartitionSpec
    paths: list[str]

    @functools.cached_property
    def samples(self) -> list[str]:
        """Paths to try a regex on. Of numbers that are all alike, the first and the last will do."""
        exact = any(isinstance(key, _Numbered) and key.numbers is not None for key in self.keys)
        return self.paths if exact else [self.paths[0], self.paths[-1]]


def _groups(asked: Mapping[str, PartitionSpec]) -> list[_Group]:
    @functools.cache
    def parsed(key: str) -> tuple[str | _Numbered, int | None]:
        found = _NUMBER.fullmatch(key)
        return (_Numbered(found[1], found[3] or ''), int(found[2])) if found else (key, None)

    shapes: dict[tuple[str | _Numbered, ...], dict[tuple[int, ...], str]] = {}
    for path in asked:
        keys = [parsed(key) for key in path.split('/')]
        numbers = tuple(number for _, number in keys if number is not None)
        shapes.setdefault(tuple(key for key, _ in keys), {})[numbers] = path
    groups: dict[_Run, _Group] = {}
    for shape, paths in shapes.items():
        places = _alike({numbers: asked[path] for numbers, path in paths.items()})
        for numbers, path in paths.items():
            kinds = iter([alike[number] for alike, number in zip(places, numbers, strict=True)])
            kept = [
                key if isinstance(key, str) else dataclasses.replace(key, numbers=next(kinds))
                for key in shape
            ]
            whole = (_Mark.BEGIN, *kept, _Mark.END)
            groups.setdefault(whole, _Group(whole, asked[path], [])).paths.append(path)
    return list(groups.values())


def _alike(leaves: Mapping[tuple[int, ...], PartitionSpec]) -> list[dict[int, tuple[int, ...] | None]]:
    """For each place of numbers: number -> those that could stand for it with the same specs; None if all."""
    places: list[dict[int, tuple[int, ...] | None]] = []
    one_spec = len(set(leaves.values())) == 1
    for place in range(len(next(iter(leaves)))):
        others: dict[int, set[Any]] = collections.defaultdict(set)
        for numbers, spec in leaves.items():
            other = None if one_spec else (numbers[:place], numbers[place + 1 :], spec)
            others[numbers[place]].add(other)
        classes: dict[frozenset[Any], list[int]] = {}
        for number in sorted(others):
            classes.setdefault(frozenset(others[number]), []).append(number)
        every = len(classes) == 1 and len(others) > 1  # one number alone may be part of a name
        places.append({n: None if every else tuple(alike) for alike in classes.values() for n in alike})
    return places


def _any_numbers(run: _Run) -> _Run:
    return tuple(_Numbered(key.stem, key.tail) if isinstance(key, _Numbered) else key for key in run)


def _numbers_of(run: _Run) -> list[frozenset[int] | None]:
    found = [key.numbers for key in run if isinstance(key, _Numbered)]
    return [None if numbers is None else frozenset(numbers) for numbers in found]


def _is_name(key: _Key) -> bool:
    return bool(key) if isinstance(key, str) else isinstance(key, _Numbered) and bool(key.stem)


def _runs(keys: _Run, idle: bool) -> Iterator[tuple[_Run, int]]:
    """The runs that could stand for a path, and how many names come behind each.

    Args:
        keys: those of the path, between BEGIN and END.
        idle: whether the last key is the same in all paths, as the ``value`` of flax's variables.
    """
    yield keys, 0
    stop = len(keys) - 1 - idle
    behind = [sum(map(_is_name, keys[place:stop])) for place in range(len(keys) + 1)]
    for first in range(len(keys)):
        begins = keys[first] is _Mark.BEGIN
        for last in range(first + 1 + begins, min(first + _LONGEST + begins, len(keys)) + 1):
            run = keys[first:last]
            if begins or _is_name(run[0]):
                yield run, behind[last]
    heads = [(place + 1, keys[place : place + 1]) for place in range(1, stop) if _is_name(keys[place])]
    for after, head in [(2, keys[:2]), *heads]:
        for first in range(max(after, stop - _ENDING), stop):
            if _is_name(keys[first]):
                yield (*head, _Mark.GAP, *keys[first:stop]), 0


# --- Rows ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Found:
    """A run, and the groups that have it, as bits.

    Attributes:
        behind: how many names come behind it.
        touched: those with a leaf that has the run.
        covered: those of which every leaf has it.
    """

    run: _Run
    behind: int
    touched: int
    covered: int

    @functools.cached_property
    def cost(self) -> float:
        """About how many keys there are to read."""
        nameless = self.run[0] is _Mark.BEGIN and not _is_name(self.run[1])
        cost = 6.0 if nameless else 0  # `mu|nu` says more than `^1`
        for key in self.run:
            if isinstance(key, str):
                cost += 1
            elif isinstance(key, _Numbered):
                several = key.numbers is not None and len(key.numbers) > 1
                cost += 0.6 + 0.6 * bool(key.stem) + 0.3 * several * len(_key_text(key))
            else:
                cost += _GAP_COST if key is _Mark.GAP else 0.2
        return cost

    @property
    def weight(self) -> float:
        """The cost, and more for what is far from the end of the path: it says less about a leaf."""
        return self.cost + 3.5 * self.behind

    @functools.cached_property
    def head(self) -> _Run:
        """The keys before a gap, if there is one."""
        return self.run[: self.run.index(_Mark.GAP)] if _Mark.GAP in self.run else ()

    def price(self, left: int, heads: set[_Run]) -> float:
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

    chosen: list[tuple[_Found, _Alternative]]
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
        return _regex([alternative for _, alternative in self.chosen])


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
        self._groups = _groups(asked)
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
            several = left == mine == self._all or max(len(cover.chosen), len(alone[spec].chosen)) > 1
            rows.append(_Row('.*' if several and left == mine else cover.regex, spec, mine))
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
        places: dict[_Run, list[tuple[int, list[frozenset[int] | None]]]] = collections.defaultdict(list)
        least: dict[_Run, int] = {}
        for bit, keys in enumerate(paths):
            for run, behind in _runs(keys, idle):
                free = _any_numbers(run)
                places[free].append((1 << bit, _numbers_of(run)))
                for candidate in (run, free) if any(map(_is_name, free)) else (run,):
                    least[candidate] = min(least.get(candidate, behind), behind)
        return [_found(run, behind, places[_any_numbers(run)]) for run, behind in least.items()]

    def _cover(self, mine: int, others: int) -> _Cover:
        """Runs that the groups *mine* have and *others* lack, chosen greedily by cost per group."""
        usable = [found for found in self._found if found.covered & mine and not found.touched & others]
        theirs = self._samples(others)
        chosen: list[tuple[_Found, _Alternative]] = []
        left = mine
        heads: set[_Run] = set()
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
            alternative = _anchored(best.run, self._samples(best.covered & mine), theirs)
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


_CLEARLY = 0.7  # of the cost, to be clearly shorter


def _union(bits: Iterable[int]) -> int:
    return functools.reduce(int.__or__, bits, 0)


def _lowest(bits: int) -> int:
    return bits & -bits


def _found(run: _Run, behind: int, places: Iterable[tuple[int, list[frozenset[int] | None]]]) -> _Found:
    touched = covered = 0
    wanted = _numbers_of(run)
    for bit, numbers in places:
        pairs = list(zip(wanted, numbers, strict=True))
        if all(ours is None or theirs is None or ours & theirs for ours, theirs in pairs):
            touched |= bit
        if all(ours is None or (theirs is not None and theirs <= ours) for ours, theirs in pairs):
            covered |= bit
    return _Found(run, behind, touched, covered)


# --- Regexes -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Alternative:
    """A run as a regex.

    Attributes:
        begin: what anchors its begin.
        keys: for each key the texts that may stand there.
        gap: the regex of the gap behind the first key, or nothing.
        end: what anchors its end.
    """

    begin: str
    keys: tuple[tuple[str, ...], ...]
    gap: str
    end: str

    @property
    def left(self) -> str:
        """What stands before the keys that do not differ from those of other alternatives."""
        return self.begin + (f'{_one_of(self.keys[0])}/{self.gap}' if self.gap else '')

    @property
    def bodies(self) -> list[str]:
        """The keys themselves."""
        keys = self.keys[bool(self.gap) :]
        return _joined(keys[0]) if len(keys) == 1 else ['/'.join(map(_one_of, keys))]


def _anchored(run: _Run, own: Sequence[str], others: Sequence[str]) -> _Alternative | None:
    """The regex of a run with the fewest anchors that matches *own* paths and no *others*."""
    begins, ends = run[0] is _Mark.BEGIN, run[-1] is _Mark.END
    keys = [key for key in run if not isinstance(key, _Mark)]
    # Where the tree is a part of another one, as the params of a state, the same rule will do.
    parts = own if begins else [*own, *(re.sub('^([0-9]+/)+', '', path) for path in own)]
    options = itertools.product(
        ['^'] if begins else ['', '/', '(^|/)'][_is_short(keys[0]) :],
        ['.*', '.*/', '(.*/)?'] if _Mark.GAP in run else [''],
        ['$', r'\Z'] if ends else ['', '$', '/', '(/|$)'][_is_short(keys[-1], at_end=True) :],
    )
    for begin, gap, end in sorted(options, key=lambda option: len(''.join(option))):
        found = _Alternative(begin, tuple((_key_text(key),) for key in keys), gap, end)
        search = re.compile(_regex([found])).search
        if all(map(search, parts)) and not any(map(search, others)):
            return found
    return None


def _is_short(key: _Key, at_end: bool = False) -> bool:
    """Whether the text of a key is a part of many others: a single letter, or a number."""
    return len(key) < 2 if isinstance(key, str) else isinstance(key, _Numbered) and (at_end or not key.stem)


def _regex(alternatives: Sequence[_Alternative]) -> str:
    """One regex: alternatives that differ in one key are one, and those with the same anchors share them."""
    for place in range(max((len(each.keys) for each in alternatives), default=0)):
        alike: dict[Any, list[_Alternative]] = {}
        for each in alternatives:
            rest = (len(each.keys), each.keys[:place], each.keys[place + 1 :], each.begin, each.gap, each.end)
            alike.setdefault(rest if place < len(each.keys) else each, []).append(each)
        alternatives = [_merged(group, place) for group in alike.values()]
    anchored: dict[tuple[str, str], list[str]] = {}
    for each in alternatives:
        anchored.setdefault((each.left, each.end), []).extend(each.bodies)
    texts = []
    for (left, end), bodies in anchored.items():
        text = '|'.join(bodies)
        texts.append(f'{left}({text}){end}' if len(bodies) > 1 and (left or end) else left + text + end)
    return '|'.join(texts)


def _merged(alternatives: Sequence[_Alternative], place: int) -> _Alternative:
    """Alternatives that differ at *place* only, as one."""
    first = alternatives[0]
    if len(alternatives) == 1:
        return first
    here = tuple(text for each in alternatives for text in each.keys[place])
    return dataclasses.replace(first, keys=(*first.keys[:place], here, *first.keys[place + 1 :]))


def _one_of(texts: Sequence[str]) -> str:
    """``(query|key)``, and ``a`` if it is one."""
    joined = _joined(texts)
    return f'({"|".join(joined)})' if len(joined) > 1 else joined[0]


def _joined(texts: Sequence[str]) -> list[str]:
    """Alternatives; what words have in common is written once: ``(gate|up)_proj``, ``conv[12]``."""
    families: dict[tuple[str, str | None], list[str]] = {}
    for text in dict.fromkeys(texts):
        found = _FAMILY.fullmatch(text)
        if found is None:
            families[text, None] = ['']
        elif found['digit']:
            families.setdefault((found['stem'], ''), []).append(found['digit'])
        else:
            families.setdefault(('', found['ending']), []).append(found['word'])
    joined = []
    for (before, after), words in families.items():
        text = '|'.join(words)
        if len(words) > 1:
            text = f'[{"".join(words)}]' if all(len(word) == 1 for word in words) else f'({text})'
        joined.append(f'{before}{text}{after or ""}')
    return joined


_FAMILY = re.compile(r'(?P<stem>\w*[^\W\d_])(?P<digit>[0-9])|(?P<word>\w+)(?P<ending>_[^\W_]+)')


def _escaped(text: str) -> str:
    """`re.escape` for what means something in a regex; spaces and dashes stay as they are."""
    return re.sub(r'([\\.^$*+?{}\[\]|()])', r'\\\1', text)


def _key_text(key: _Key) -> str:
    if isinstance(key, _Numbered):
        number = r'\d+' if key.numbers is None else _numbers_text(key.numbers)
        return _escaped(key.stem) + number + _escaped(key.tail)
    return _escaped(str(key))


def _numbers_text(numbers: Sequence[int]) -> str:
    r"""A regex of some numbers: ``[0-5]``, ``(\d|1[0-7])``."""
    digits: dict[int, list[int]] = {}  # by what stands before the last one
    for number in numbers:
        digits.setdefault(number // 10, []).append(number % 10)
    alike: dict[tuple[int, ...], list[int]] = {}
    for before, last in digits.items():
        alike.setdefault(tuple(last), []).append(before)
    texts = []
    for ends, tens in alike.items():
        spans = [f'{a}-{b}' if b > a + 1 else f'{a}' if a == b else f'{a}{b}' for a, b in runs(ends)]
        digit = str(ends[0]) if len(ends) == 1 else r'\d' if len(ends) == 10 else f'[{"".join(spans)}]'
        if tens[0] == 0:
            texts.append(digit)
        if tens[-1] > 0:
            texts.append(_numbers_text([ten for ten in tens if ten]) + digit)
    return f'({"|".join(texts)})' if len(texts) > 1 else texts[0]
