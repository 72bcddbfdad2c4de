r"""Rules by leaf path as a person would write them, made from the spec of each leaf.

Each row names the ends of paths, in whole keys: the shortest ones that no leaf of another spec has, among
those that the rows above leave. The specs that are hardest to name come last, where few others are left.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from jax.sharding import PartitionSpec

from scalax._core.pytree import partition_specs as spec_forms
from scalax.rules import TreePathShardingRule

REPLICATED = PartitionSpec()
_BEGIN = '^'

Specs = Mapping[str, PartitionSpec]
Keys = tuple[str, ...]
Row = tuple[str, PartitionSpec]


def readable_rule(
    leaves: Mapping[str, tuple[tuple[int, ...], PartitionSpec]],
) -> TreePathShardingRule:
    """The short `TreePathShardingRule` that gives every leaf its spec.

    Specs are equal if they differ in trailing None only. Arrays of one element are left out: the rule
    replicates them whatever their path. The last row is for any leaf: it replicates, if some leaves are
    replicated.

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
    counts = collections.Counter(asked.values())
    default = REPLICATED if REPLICATED in counts or not counts else counts.most_common(1)[0][0]
    options = [
        [*first, *_rows(others, unnamed), ('.*', default)]
        for first, others in (([], asked), _apart(asked))
        # Where few of many leaves have the default, it is shorter to name them.
        for unnamed in ({default}, set[PartitionSpec]())
    ]
    rows = min(options, key=lambda rows: len(str(rows)))
    return TreePathShardingRule(*_exact_rows(asked, rows), *rows)


def _escaped(text: str) -> str:
    """`re.escape` for what means something in a regex; spaces and dashes stay as they are."""
    return re.sub(r'([\\.^$*+?{}\[\]|()])', r'\\\1', text)


def _exact_rows(asked: Specs, rows: Sequence[Row]) -> Iterator[Row]:
    """Whole paths, for the leaves that *rows* give another spec: ``$`` also stands before a last newline."""
    searches = [(re.compile(regex).search, spec) for regex, spec in rows]
    for path, spec in asked.items():
        if next(value for search, value in searches if search(path)) != spec:
            yield rf'\A{_escaped(path)}\Z', spec


def _apart(asked: Specs) -> tuple[list[Row], Specs]:
    """A row for the largest part of the tree that has one spec, such as params of ZeRO-1; and the rest."""
    parts: dict[str, list[PartitionSpec]] = {}
    for path, spec in asked.items():
        for part in itertools.accumulate(path.split('/')[:-1], '{}/{}'.format):
            parts.setdefault(f'{part}/', []).append(spec)
    alike = [part for part, specs in parts.items() if len(set(specs)) == 1]
    if not alike:
        return [], asked
    part = max(alike, key=lambda part: len(parts[part]))
    others = {path: spec for path, spec in asked.items() if not path.startswith(part)}
    return [(f'^{_escaped(part)}', parts[part][0])], others


def _rows(asked: Specs, unnamed: Collection[PartitionSpec]) -> list[Row]:
    """Regexes and specs, of which the first match wins; always the shortest regex of those that are left."""
    families: dict[PartitionSpec, dict[Keys, list[Keys]]] = {}
    ends: dict[PartitionSpec, set[Keys]] = {}
    for path, spec in asked.items():
        keys = tuple(map(_escaped, path.split('/')))
        family = tuple(re.sub(r'\d+', r'\\d+', key) for key in keys)
        families.setdefault(spec, {}).setdefault(family, []).append(keys)
        ends.setdefault(spec, set()).update(form[i:] for form in (keys, family) for i in range(len(form)))
    rows: list[Row] = []
    while todo := families.keys() - unnamed:
        regexes = {
            spec: _regex(_ends(members, [ends[other] for other in families if other != spec]))
            for spec, members in families.items()
            if spec in todo
        }
        spec = min(regexes, key=lambda spec: len(regexes[spec]))
        rows.append((regexes[spec], spec))
        del families[spec]
    return rows


def _ends(families: Mapping[Keys, Sequence[Keys]], others: Sequence[Collection[Keys]]) -> Sequence[Keys]:
    """The ends of some paths that no other leaf has, with any number if those of all numbers are these."""
    found: list[Keys] = []
    for family, members in families.items():
        end = _end(family, others)
        found += [end] if end else [_end(keys, others) or (_BEGIN + keys[0], *keys[1:]) for keys in members]
    return list(dict.fromkeys(found))


def _end(keys: Keys, others: Sequence[Collection[Keys]]) -> Keys | None:
    """The shortest end of a path that is none of others; it does not begin with a number."""
    for first in reversed(range(len(keys))):
        named = not first or not re.fullmatch(r'\d+|\\d\+', keys[first])
        if named and not any(keys[first:] in ends for ends in others):
            return keys[first:]
    return None


def _regex(ends: Sequence[Keys]) -> str:
    """One regex, in which ends that differ in one key are one."""
    paths = [*ends]
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
