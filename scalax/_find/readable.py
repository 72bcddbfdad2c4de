r"""Rules by leaf path as a person would write them, made from the spec of each leaf.

Each row names the ends of paths, in whole keys, and rows with longer ends stand above those that they are
exceptions from. These ends are found in the tree of all paths, read from their last keys. Bottom up, each end
gets the spec that most of the longer ends need, so that there are as few rows as can be; top down, those that
need another spec than the next shorter end become alternatives of a regex.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jax.sharding import PartitionSpec

from scalax._tree import specs as spec_forms
from scalax.rules import TreePathShardingRule

REPLICATED = PartitionSpec()
_BEGIN = '^'

Keys = tuple[str, ...]
Row = tuple[str, PartitionSpec]


def readable_rule(
    leaves: Mapping[str, tuple[tuple[int, ...], PartitionSpec]],
) -> TreePathShardingRule:
    """The short `TreePathShardingRule` that gives every leaf its spec.

    Specs are equal if they differ in trailing None only. Arrays of one element are left out: the rule
    replicates them whatever their path. The last row is for any leaf: it replicates, if some leaves are
    replicated and those that no row before it takes are not all of one other spec.

    Args:
        leaves: leaf path -> (shape, spec), in the order in which the rows should read.

    Example:
        >>> P = PartitionSpec
        >>> readable_rule(
        ...     {
        ...         '0/layers/0/attn/query/kernel': ((8, 8), P('fsdp')),
        ...         '0/layers/0/mlp/up/kernel': ((8, 32), P('fsdp')),
        ...         '0/layers/0/mlp/down/kernel': ((32, 8), P('tp')),
        ...         '0/layers/0/norm/scale': ((8,), P()),
        ...     }
        ... )
        TreePathShardingRule(('(^|/)down/kernel$', P('tp',)), ('(^|/)kernel$', P('fsdp',)), ('.*', P()))
    """
    asked = {
        path: spec_forms.canonical(spec)
        for path, (shape, spec) in leaves.items()
        if any(size != 1 for size in shape)
    }
    by_keys = {tuple(map(_escaped, path.split('/'))): spec for path, spec in asked.items()}
    counts = collections.Counter(asked.values())
    default = REPLICATED if REPLICATED in counts or not counts else counts.most_common(1)[0][0]
    options = _rows(by_keys, default), _rows_after_a_part(by_keys, default)
    rows = min(options, key=lambda rows: len(str(rows)))
    return TreePathShardingRule(*_exact_rows(asked, rows), *rows)


def _escaped(text: str) -> str:
    """`re.escape` for what means something in a regex; spaces and dashes stay as they are."""
    return re.sub(r'([\\.^$*+?{}\[\]|()])', r'\\\1', text)


def _exact_rows(asked: Mapping[str, PartitionSpec], rows: Sequence[Row]) -> Iterator[Row]:
    """Whole paths, for the leaves that *rows* give another spec: ``$`` also stands before a last newline."""
    searches = [(re.compile(regex).search, spec) for regex, spec in rows]
    for path, spec in asked.items():
        if next(value for search, value in searches if search(path)) != spec:
            yield rf'\A{_escaped(path)}\Z', spec


def _rows_after_a_part(leaves: Mapping[Keys, PartitionSpec], default: PartitionSpec) -> list[Row]:
    """The same, below a row for the largest part of the tree that has one spec, such as params of ZeRO-1."""
    parts: dict[Keys, list[PartitionSpec]] = {}
    for keys, spec in leaves.items():
        for last in range(1, len(keys)):
            parts.setdefault(keys[:last], []).append(spec)
    alike = [part for part, specs in parts.items() if len(set(specs)) == 1]
    if not alike:
        return _rows(leaves, default)
    part = max(alike, key=lambda part: len(parts[part]))
    others = {keys: spec for keys, spec in leaves.items() if keys[:-1][: len(part)] != part}
    return [(f'^{"/".join(part)}/', parts[part][0]), *_rows(others, default)]


def _rows(leaves: Mapping[Keys, PartitionSpec], default: PartitionSpec) -> list[Row]:
    """Regexes and specs, of which the first match wins; the last row is for all other leaves."""
    root = _tree({(*keys[::-1], _BEGIN): spec for keys, spec in leaves.items()})
    ends: list[tuple[PartitionSpec, list[Keys]]] = []
    for key, child in root.children.items():
        _add_ends((key,), child, default, ends)
    last = default if root.children else next(iter(root.votes), default)
    return [*((_regex(suffixes), spec) for spec, suffixes in ends), ('.*', last)]


class _Node(NamedTuple):
    """An end of paths.

    Attributes:
        votes: spec -> how many of the ends that are a key longer need no row if this one has it.
        children: these longer ends.
        before: the key before it, where all of its paths have the same.
    """

    votes: Mapping[PartitionSpec, int]
    children: Mapping[str, _Node]
    before: Keys

    @property
    def specs(self) -> list[PartitionSpec]:
        """The specs with which it needs the fewest rows."""
        return [spec for spec, count in self.votes.items() if count == max(self.votes.values())]


def _tree(leaves: Mapping[Keys, PartitionSpec]) -> _Node:
    """The node of some leaves, whose keys that are left come last key first."""
    before = {keys[:1] for keys in leaves}
    only = before.pop() if len(before) == 1 else ()
    if len(set(leaves.values())) < 2:
        return _Node(dict.fromkeys(leaves.values(), 1), {}, only)
    families: dict[str, dict[str, dict[Keys, PartitionSpec]]] = {}
    for (key, *rest), spec in leaves.items():
        family = families.setdefault(re.sub(r'\d+', r'\\d+', key), {})
        family.setdefault(key, {})[tuple(rest)] = spec
    children: dict[str, _Node] = {}
    for name, members in families.items():
        # Numbers that tell no spec from another are all one key.
        merged: dict[Keys, PartitionSpec] = {}
        pairs = [pair for member in members.values() for pair in member.items()]
        alike = len(members) > 1 and all(merged.setdefault(rest, spec) == spec for rest, spec in pairs)
        children |= {key: _tree(each) for key, each in ({name: merged} if alike else members).items()}
    votes = collections.Counter(spec for child in children.values() for spec in child.specs)
    return _Node(votes, children, only)


def _add_ends(
    suffix: Keys, node: _Node, given: PartitionSpec, ends: list[tuple[PartitionSpec, list[Keys]]]
) -> int:
    """Adds a suffix and longer ones to the rows where they need other specs than *given* by rows below.

    Returns:
        How many rows at least must stay above those of shorter suffixes.
    """
    # A row that is an exception from this one is as hard to read as two ends more.
    keeps = node.children and 2 * node.votes.get(given, 0) + 1 >= max(node.votes.values())
    spec = given if keeps or given in node.specs else node.specs[0]
    above = 0
    for key, child in node.children.items():
        above = max(above, _add_ends((key, *suffix), child, spec, ends))
    if spec == given:
        return above
    row = next((i for i in range(above, len(ends)) if ends[i][0] == spec), len(ends))
    if row == len(ends):
        ends.append((spec, []))
    nameless = re.fullmatch(r'\d+|\\d\+', suffix[0])
    ends[row][1].append(node.before + suffix if nameless else suffix)
    return row + 1


def _regex(suffixes: Sequence[Keys]) -> str:
    """One regex, in which suffixes that differ in one key are one."""
    paths = [(_BEGIN + keys[1], *keys[2:]) if keys[0] == _BEGIN else keys for keys in suffixes]
    for place in range(max(map(len, paths))):
        alike: dict[tuple[int, Keys, Keys], list[str]] = {}
        for keys in paths:
            others = len(keys), keys[:place], keys[place + 1 :]
            alike.setdefault(others, []).extend(keys[place : place + 1])
        paths = [(*before, *_one_of(here), *after) for (_, before, after), here in alike.items()]
    (text,) = _one_of(['/'.join(keys) for keys in paths])
    return text + '$' if text.startswith(_BEGIN) else f'(^|/){text}$'


def _one_of(texts: Sequence[str]) -> Sequence[str]:
    """``(query|key)``, ``a`` if it is one, and none if there is none."""
    return [f'({"|".join(texts)})'] if len(texts) > 1 else texts
