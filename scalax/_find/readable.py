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
import itertools
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

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
        # Comma and all, so that formatters leave it in several lines.
        lines += (
            [line] if len(line) <= _WIDTH else ['    (', *(f'        {part},' for part in pair), '    ),']
        )
    if not rule.strict:
        lines.append('    strict=False,')
    if rule.on_indivisible != 'error':
        lines.append(f'    on_indivisible={rule.on_indivisible!r},')
    uses = 'P(' in ''.join(lines)
    head = ['import re', ''] if any(isinstance(regex, re.Pattern) for regex, _ in rule.rules) else []
    head += ['from scalax.sharding import PartitionSpec as P'] if uses else []
    head += [f'from scalax.sharding import {", ".join(sorted(_rule_names(rule)))}', '']
    return '\n'.join([*head, f'{name} = TreePathShardingRule(', *lines, ')', ''])


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
    """Keys that differ in the number at their end: these numbers, or any."""

    stem: str
    numbers: tuple[int, ...] | None = None


_Key = str | _Numbered | _Mark
_Run = tuple[_Key, ...]

_NUMBER = re.compile('((?:.*[_.])?)(0|[1-9][0-9]{0,8})', re.ASCII | re.DOTALL)
_LONGEST = 5  # keys of a run; a whole path may have more
_ENDING = 3  # keys behind a gap


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
        return (_Numbered(found[1]), int(found[2])) if found else (key, None)

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
            kept: _Run = tuple(
                _Numbered(key.stem, next(kinds)) if isinstance(key, _Numbered) else key for key in shape
            )
            whole = (_Mark.BEGIN, *kept, _Mark.END)
            groups.setdefault(whole, _Group(whole, asked[path], [])).paths.append(path)
    return list(groups.values())


def _alike(
    leaves: Mapping[tuple[int, ...], PartitionSpec],
) -> list[dict[int, tuple[int, ...] | None]]:
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
    return tuple(_Numbered(key.stem) if isinstance(key, _Numbered) else key for key in run)


def _numbers_of(run: _Run) -> list[frozenset[int] | None]:
    found = [key.numbers for key in run if isinstance(key, _Numbered)]
    return [None if numbers is None else frozenset(numbers) for numbers in found]


def _is_name(key: _Key) -> bool:
    return bool(key) if isinstance(key, str) else isinstance(key, _Numbered) and bool(key.stem)


def _runs(keys: _Run, idle: int) -> Iterator[tuple[_Run, float]]:
    """The runs that could stand for a path, and how many names come behind each.

    Args:
        keys: those of the path, between BEGIN and END.
        idle: how many last keys are the same in all paths, as the ``value`` of flax's variables.
    """
    yield keys, 0
    stop = len(keys) - 1 - idle
    behind = [sum(map(_is_name, keys[place:stop])) for place in range(len(keys) + 1)]
    for first in range(len(keys)):
        begins = keys[first] is _Mark.BEGIN
        for last in range(first + 1 + begins, min(first + _LONGEST + begins, len(keys)) + 1):
            run = keys[first:last]
            if begins or any(map(_is_name, run)):
                yield run, behind[last]
    heads = [(place + 1, keys[place : place + 1]) for place in range(1, stop) if _is_name(keys[place])]
    for after, head in [(2, keys[:2]), *heads]:
        for first in range(max(after, stop - _ENDING), stop):
            if any(map(_is_name, keys[first:stop])):
                yield (*head, _Mark.GAP, *keys[first:stop]), 0


def _cost(run: _Run, behind: float) -> float:
    """Keys, mostly; what is far from the end of the path says less about a leaf than its own name."""
    cost = 1.5 * behind
    for key in run:
        if isinstance(key, str):
            cost += 1
        elif isinstance(key, _Numbered):
            cost += 0.6 + 0.6 * bool(key.stem)
            cost += 0.1 * len(_numbers_text(key.numbers)) if key.numbers and len(key.numbers) > 1 else 0
        else:
            cost += 0.7 if key is _Mark.GAP else 0.2
    return cost


# --- Rows ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Found:
    """A run, and the groups that have it, as bits.

    Attributes:
        touched: those with a leaf that has the run.
        covered: those of which every leaf has it.
    """

    run: _Run
    cost: float
    touched: int
    covered: int


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
    def touched(self) -> int:
        return _union(found.touched for found, _ in self.chosen)

    @property
    def regex(self) -> str:
        return _regex([alternative for _, alternative in self.chosen])


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
        pending = dict(self._of_spec)
        default = pending.pop(REPLICATED, 0)
        alone = {spec: self._cover(mine, self._all & ~mine) for spec, mine in pending.items()}
        rows: list[tuple[str, PartitionSpec, int]] = []
        left = self._all
        while pending:
            best: dict[PartitionSpec, tuple[float, _Cover | None, _Cover]] = {}
            for spec, mine in pending.items():
                cover = self._cover(mine, left & ~mine)
                # Rows that rely on those before them are harder to read: only if that saves much.
                if cover.cost > _CLEARLY * alone[spec].cost:
                    cover = alone[spec]
                best[spec] = min(
                    (cover.cost, None, cover),
                    self._with_exceptions(mine, left, default),
                    key=operator.itemgetter(0),
                )
            spec = min(best, key=lambda spec: best[spec][0])
            _, exceptions, cover = best[spec]
            mine = pending.pop(spec)
            if exceptions is not None:
                excepted = exceptions.touched & default
                rows.append((exceptions.regex, REPLICATED, excepted))
                default, left = default & ~excepted, left & ~excepted
            if (
                not pending
                and not self._of_spec.get(REPLICATED)
                and (not rows or len(alone[spec].chosen) > 1)
            ):
                rows.append(('.*', spec, mine))
            elif cover.chosen:
                rows.append((cover.regex, spec, mine))
            left &= ~mine
        ordered = self._ordered(rows)
        return [*ordered, ('.*', REPLICATED)] if REPLICATED in self._of_spec else ordered

    def _with_exceptions(self, mine: int, left: int, default: int) -> tuple[float, _Cover | None, _Cover]:
        """A cover that may match replicated leaves too, for which there is a row before it."""
        loose = self._cover(mine, left & ~mine & ~default)
        excepted = loose.touched & default
        if not excepted:
            return math.inf, None, loose
        exceptions = self._cover(excepted, left & ~default)
        loose = self._cover(mine, left & ~mine & ~excepted)
        return (loose.cost + exceptions.cost + 1) / _CLEARLY, exceptions, loose

    def _ordered(self, rows: list[tuple[str, PartitionSpec, int]]) -> list[tuple[str, PartitionSpec]]:
        """The rows in the order of the leaves, but each behind those whose leaves it matches too."""
        before: list[set[int]] = []
        for index, (regex, _, _) in enumerate(rows):
            search = re.compile(regex).search
            before.append(
                {
                    other
                    for other, (_, _, mine) in enumerate(rows[:index])
                    if any(search(path) for group in self._groups_of(mine) for path in group.samples)
                }
            )
        ordered: list[int] = []
        while len(ordered) < len(rows):
            ready = [i for i in range(len(rows)) if i not in ordered and before[i].issubset(ordered)]
            ordered.append(min(ready, key=lambda i: _lowest(rows[i][2])))
        return [rows[i][:2] for i in ordered]

    def _groups_of(self, bits: int) -> list[_Group]:
        return [group for bit, group in enumerate(self._groups) if bits >> bit & 1]

    def _find_runs(self) -> list[_Found]:
        paths = [group.keys for group in self._groups]
        idle = 0
        while (
            len(paths) > 1
            and min(map(len, paths)) > idle + 3
            and len({keys[-2 - idle] for keys in paths}) == 1
        ):
            idle += 1
        places: dict[_Run, list[tuple[int, list[frozenset[int] | None]]]] = collections.defaultdict(list)
        costs: dict[_Run, float] = {}
        for bit, keys in enumerate(paths):
            for run, behind in _runs(keys, idle):
                free = _any_numbers(run)
                places[free].append((1 << bit, _numbers_of(run)))
                for candidate in (run, free) if any(map(_is_name, free)) else (run,):
                    costs[candidate] = min(costs.get(candidate, math.inf), _cost(candidate, behind))
        return [_found(run, cost, places[_any_numbers(run)]) for run, cost in costs.items()]

    def _cover(self, mine: int, others: int) -> _Cover:
        """Runs that the groups *mine* have and *others* lack, chosen greedily by cost per group."""
        usable = [found for found in self._found if found.covered & mine and not found.touched & others]
        theirs = [path for group in self._groups_of(others) for path in group.samples]
        chosen: list[tuple[_Found, _Alternative]] = []
        left = mine
        while usable := [found for found in usable if found.covered & left]:
            best = min(usable, key=lambda found: found.cost / (found.covered & left).bit_count())
            own = [path for group in self._groups_of(best.covered & mine) for path in group.samples]
            alternative = _anchored(best.run, own, theirs)
            if alternative is None:
                usable.remove(best)
                continue
            chosen.append((best, alternative))
            left &= ~best.covered
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


def _found(run: _Run, cost: float, places: Iterable[tuple[int, list[frozenset[int] | None]]]) -> _Found:
    touched = covered = 0
    wanted = _numbers_of(run)
    for bit, numbers in places:
        pairs = list(zip(wanted, numbers, strict=True))
        if all(ours is None or theirs is None or ours & theirs for ours, theirs in pairs):
            touched |= bit
        if all(ours is None or (theirs is not None and theirs <= ours) for ours, theirs in pairs):
            covered |= bit
    return _Found(run, cost, touched, covered)


# --- Regexes -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Alternative:
    """A run as a regex.

    Attributes:
        left: what anchors its begin.
        keys: for each key the texts that may stand there; a gap is None.
        right: what anchors its end.
        gap: the regex of the gap.
    """

    left: str
    keys: tuple[tuple[str, ...] | None, ...]
    right: str
    gap: str

    @property
    def body(self) -> str:
        """The regex between the anchors."""
        text = ''.join(self.gap if key is None else f'{_one_of(key)}/' for key in self.keys)
        return text[:-1]


def _anchored(run: _Run, own: Sequence[str], others: Sequence[str]) -> _Alternative | None:
    """The regex of a run with the fewest anchors that matches *own* paths and no *others*."""
    keys = [key for key in run if key not in (_Mark.BEGIN, _Mark.END)]
    texts = tuple(None if key is _Mark.GAP else (_key_text(key),) for key in keys)
    # Where the tree is a part of another one, as the params of a state, the same rule will do.
    parts = own if run[0] is _Mark.BEGIN else [*own, *(re.sub('^([0-9]+/)+', '', path) for path in own)]
    lefts = ['^'] if run[0] is _Mark.BEGIN else ['', '/', '(^|/)'][_is_short(keys[0]) :]
    rights = (
        ['$', r'\Z'] if run[-1] is _Mark.END else ['', '$', '/', '(/|$)'][_is_short(keys[-1], at_end=True) :]
    )
    gaps = ['.*', '.*/', '(.*/)?'] if _Mark.GAP in run else ['']
    for left, right, gap in sorted(
        itertools.product(lefts, rights, gaps), key=lambda option: len(''.join(option))
    ):
        found = _Alternative(left, texts, right, gap)
        search = re.compile(left + found.body + right).search
        if all(map(search, parts)) and not any(map(search, others)):
            return found
    return None


def _is_short(key: _Key, at_end: bool = False) -> bool:
    """Whether the text of a key is a part of many others: a single letter, or a number."""
    return len(key) < 2 if isinstance(key, str) else isinstance(key, _Numbered) and (at_end or not key.stem)


def _regex(alternatives: Sequence[_Alternative]) -> str:
    """One regex: alternatives that differ in one key are one, and those with the same anchors share them."""
    merged = list(dict.fromkeys(alternatives))
    for place in range(max((len(each.keys) for each in merged), default=0)):
        alike: dict[Any, _Alternative] = {}
        for each in merged:
            here = each.keys[place] if place < len(each.keys) else None
            rest = (
                each
                if here is None
                else (each.left, each.right, each.gap, each.keys[:place], each.keys[place + 1 :])
            )
            if rest in alike and here is not None:
                here = (*(alike[rest].keys[place] or ()), *here)
                each = dataclasses.replace(each, keys=(*each.keys[:place], here, *each.keys[place + 1 :]))
            alike[rest] = each
        merged = list(alike.values())
    anchors: dict[tuple[str, str], list[_Alternative]] = {}
    for each in merged:
        anchors.setdefault((each.left, each.right), []).append(each)
    texts = []
    for (left, right), group in anchors.items():
        bodies = [each.body for each in group]
        if left or right:
            texts.append(
                f'{left}({"|".join(bodies)}){right}' if len(bodies) > 1 else f'{left}{bodies[0]}{right}'
            )
            continue
        # Outside, alternatives need no parentheses.
        texts += [
            _joined(each.keys[0]) if len(each.keys) == 1 and each.keys[0] else each.body for each in group
        ]
    return '|'.join(texts)


def _one_of(texts: Sequence[str]) -> str:
    """``(query|key)``, and ``a`` if it is one."""
    joined = _joined(texts)
    return f'({joined})' if '|' in joined and len(texts) > 1 else joined


def _joined(texts: Sequence[str]) -> str:
    """``query|key``; what words have in common is written once: ``(gate|up)_proj|conv[12]``."""
    families: dict[tuple[str, str | None], list[str]] = {}
    for text in dict.fromkeys(texts):
        found = _FAMILY.fullmatch(text)
        if found is None:
            families[text, None] = ['']
        elif found['digit']:
            families.setdefault((found['stem'], ''), []).append(found['digit'])
        else:
            families.setdefault(('', found['ending']), []).append(found['word'])
    pieces = []
    for (before, after), words in families.items():
        text = '|'.join(words)
        if len(words) > 1:
            text = f'[{"".join(words)}]' if all(len(word) == 1 for word in words) else f'({text})'
        pieces.append(f'{before}{text}{after or ""}')
    return '|'.join(pieces)


_FAMILY = re.compile(r'(?P<stem>\w*[^\W\d_])(?P<digit>[0-9])|(?P<word>\w+)(?P<ending>_[^\W_]+)')


def _escaped(text: str) -> str:
    """`re.escape` for what means something in a regex; spaces and dashes stay as they are."""
    return re.sub(r'([\\.^$*+?{}\[\]|()])', r'\\\1', text)


def _key_text(key: _Key) -> str:
    if isinstance(key, _Numbered):
        return _escaped(key.stem) + (r'\d+' if key.numbers is None else _numbers_text(key.numbers))
    return _escaped(str(key))


def _numbers_text(numbers: Sequence[int]) -> str:
    r"""A regex of some numbers: ``[0-5]``, ``(\d|1[0-7])``."""
    digits: dict[int, list[int]] = {}
    for number in numbers:
        digits.setdefault(number // 10, []).append(number % 10)
    tens: dict[tuple[int, ...], list[int]] = {}
    for ten, last in digits.items():
        tens.setdefault(tuple(last), []).append(ten)
    texts = []
    for last, before in tens.items():
        spans = [f'{a}-{b}' if b > a + 1 else f'{a}' if a == b else f'{a}{b}' for a, b in runs(last)]
        digit = str(last[0]) if len(last) == 1 else r'\d' if len(last) == 10 else f'[{"".join(spans)}]'
        if before[0] == 0:
            texts.append(digit)
        if before[-1] > 0:
            texts.append(_numbers_text([ten for ten in before if ten]) + digit)
    return f'({"|".join(texts)})' if len(texts) > 1 else texts[0]
