r"""Short rules by leaf path, as a person would write them, from the spec of each leaf.

Each pair of a rule names path suffixes, in whole keys: the shortest suffixes that no leaf with another spec
has, among the leaves that earlier pairs do not match. The specs whose suffixes are longest come last, where
few other leaves are left.
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
Pair = tuple[str, PartitionSpec]
"""A regex and the spec of the leaves that it matches."""


def readable_rule(
    leaves: Mapping[str, tuple[tuple[int, ...], PartitionSpec]],
) -> TreePathShardingRule:
    """Returns a short `TreePathShardingRule` that gives each leaf its spec.

    Trailing None of specs is ignored, and so are arrays of one element, which any rule replicates. The last
    pair matches every leaf. It replicates, if some leaves are replicated.

    Args:
        leaves: leaf path -> (shape, spec), in the order in which the pairs should read.

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
    specs = {
        path: spec_forms.canonical(spec)
        for path, (shape, spec) in leaves.items()
        if any(size != 1 for size in shape)
    }
    counts = collections.Counter(specs.values())
    default = REPLICATED if REPLICATED in counts or not counts else counts.most_common(1)[0][0]
    options = [
        [*first, *_pairs(others, unnamed), ('.*', default)]
        for first, others in (([], specs), _split_off_subtree(specs))
        # If few of many leaves have the default, it is shorter to name them first.
        for unnamed in ({default}, set[PartitionSpec]())
    ]
    pairs = min(options, key=lambda pairs: len(str(pairs)))
    return TreePathShardingRule(*_exact_pairs(specs, pairs), *pairs)


def _escape(text: str) -> str:
    """Escapes only the special characters of regexes: unlike `re.escape`, leaves spaces and dashes."""
    return re.sub(r'([\\.^$*+?{}\[\]|()])', r'\\\1', text)


def _exact_pairs(specs: Specs, pairs: Sequence[Pair]) -> Iterator[Pair]:
    """Yields whole paths for the leaves that *pairs* give a wrong spec.

    This happens if a path ends with a newline: ``$`` also matches before it.
    """
    searches = [(re.compile(regex).search, spec) for regex, spec in pairs]
    for path, spec in specs.items():
        if next(value for search, value in searches if search(path)) != spec:
            yield rf'\A{_escape(path)}\Z', spec


def _split_off_subtree(specs: Specs) -> tuple[list[Pair], Specs]:
    """Returns a pair for the largest subtree with one spec, as the params of ZeRO-1; and the other leaves."""
    subtrees: dict[str, list[PartitionSpec]] = {}
    for path, spec in specs.items():
        for prefix in itertools.accumulate(path.split('/')[:-1], '{}/{}'.format):
            subtrees.setdefault(f'{prefix}/', []).append(spec)
    uniform = [prefix for prefix, subtree_specs in subtrees.items() if len(set(subtree_specs)) == 1]
    if not uniform:
        return [], specs
    largest = max(uniform, key=lambda prefix: len(subtrees[prefix]))
    others = {path: spec for path, spec in specs.items() if not path.startswith(largest)}
    return [(f'^{_escape(largest)}', subtrees[largest][0])], others


def _pairs(specs: Specs, unnamed: Collection[PartitionSpec]) -> list[Pair]:
    """Returns pairs whose first match wins, the shortest regex of the remaining specs first.

    Args:
        specs: leaf path -> spec.
        unnamed: the specs that need no pair.
    """
    families: dict[PartitionSpec, dict[Keys, list[Keys]]] = {}  # paths that differ in numbers only
    suffixes: dict[PartitionSpec, set[Keys]] = {}
    for path, spec in specs.items():
        keys = tuple(map(_escape, path.split('/')))
        family = tuple(re.sub(r'\d+', r'\\d+', key) for key in keys)
        families.setdefault(spec, {}).setdefault(family, []).append(keys)
        suffixes.setdefault(spec, set()).update(form[i:] for form in (keys, family) for i in range(len(form)))
    pairs: list[Pair] = []
    while todo := families.keys() - unnamed:
        regexes = {
            spec: _regex(_unique_suffixes(members, [suffixes[other] for other in families if other != spec]))
            for spec, members in families.items()
            if spec in todo
        }
        spec = min(regexes, key=lambda spec: len(regexes[spec]))
        pairs.append((regexes[spec], spec))
        del families[spec]
    return pairs


def _unique_suffixes(
    families: Mapping[Keys, Sequence[Keys]], others: Sequence[Collection[Keys]]
) -> Sequence[Keys]:
    """Returns suffixes of some paths that no other leaf has.

    A suffix may have the pattern of any number, if all leaves with such a suffix belong to these paths.

    Args:
        families: path with patterns of numbers -> its paths.
        others: the suffixes of all other leaves.
    """
    suffixes: list[Keys] = []
    for family, members in families.items():
        if suffix := _unique_suffix(family, others):
            suffixes.append(suffix)
        else:
            suffixes += [_unique_suffix(keys, others) or (_BEGIN + keys[0], *keys[1:]) for keys in members]
    return list(dict.fromkeys(suffixes))


def _unique_suffix(keys: Keys, others: Sequence[Collection[Keys]]) -> Keys | None:
    """Returns the shortest suffix of a path that no other leaf has, and that does not begin with a number."""
    for first in reversed(range(len(keys))):
        begins_with_name = not first or not re.fullmatch(r'\d+|\\d\+', keys[first])
        if begins_with_name and not any(keys[first:] in suffixes for suffixes in others):
            return keys[first:]
    return None


def _regex(suffixes: Sequence[Keys]) -> str:
    """Returns one regex for several suffixes. Merges suffixes that differ in one key."""
    paths = [*suffixes]
    for position in range(max(map(len, paths))):
        alternatives: dict[tuple[int, Keys, Keys], list[str]] = {}
        for keys in paths:
            other_keys = len(keys), keys[:position], keys[position + 1 :]
            alternatives.setdefault(other_keys, []).extend(keys[position : position + 1])
        paths = [(*before, *_alternation(keys), *after) for (_, before, after), keys in alternatives.items()]
    (text,) = _alternation(['/'.join(keys) for keys in paths])
    return text + '$' if text.startswith(_BEGIN) else f'(^|/){text}$'


def _alternation(texts: Sequence[str]) -> Sequence[str]:
    """Returns ``(a|b)`` for several texts, and otherwise the texts as they are."""
    return [f'({"|".join(texts)})'] if len(texts) > 1 else texts
