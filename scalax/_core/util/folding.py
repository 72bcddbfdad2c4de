"""Folding of leaf paths that differ only in numbers: the same leaf in many layers gets one name.

``layers/0/w`` ... ``layers/79/w`` fold into ``layers/{0..79}/w``, and ``layers_0/w`` ... ``layers_79/w``
into ``layers_{0..79}/w``. If paths have several numbers (layers and experts, say), folds that differ in only
one of them are folded again. Every fold is a full Cartesian product of numbers, so its name stands for
exactly the paths that were folded.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Hashable, Iterable, Sequence

# A number is an entire key, or follows an underscore or a dot: `block12` and `block13` may be unrelated.
# Braces before it would look like folded numbers. Longer numbers are not layer indices.
_NUMBERED = re.compile('((?:[^{}]*[_.])?)(0|[1-9][0-9]{0,17})', re.ASCII | re.DOTALL)
_MAX_DEPTH = 100  # each key of a path that may be folded costs a pass over all leaves


MOST_RUNS = 6  # runs of numbers between the braces of a folded path: layers may alternate


@dataclasses.dataclass(frozen=True)
class NumberedKeys:
    """Keys that differ only in the number at their end.

    Attributes:
        stem: the text before the numbers; empty where the keys are numbers.
        numbers: the numbers, in order.
    """

    stem: str
    numbers: tuple[int, ...]

    @property
    def keys(self) -> list[str]:
        """The keys, in order."""
        return [f'{self.stem}{number}' for number in self.numbers]

    def name(self, most: int | None) -> str:
        """Returns one name for the keys, with at most *most* runs of numbers: ``layers_{0..79}``."""
        return f'{self.stem}{braces(self.numbers, most)}'


@dataclasses.dataclass(frozen=True)
class Fold:
    """Leaves whose paths differ only in numbers.

    Attributes:
        parts: the parts of the path: a key, or the keys that differ in a number.
        first: the index of the first leaf.
        separator: the separator of keys in a path.
    """

    parts: tuple[str | NumberedKeys, ...]
    first: int
    separator: str = '/'

    @property
    def count(self) -> int:
        """The number of leaves."""
        return math.prod(len(part.numbers) for part in self.parts if isinstance(part, NumberedKeys))

    @property
    def name(self) -> str:
        """One name for all paths: ``layers/{0..79}/w``."""
        return self.short_name(None)

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each leaf."""
        choices = [part.keys if isinstance(part, NumberedKeys) else [part] for part in self.parts]
        return tuple(self.separator.join(keys) for keys in itertools.product(*choices))

    def short_name(self, most: int | None, last: int = 0) -> str:
        """Returns the name with at most *most* runs of numbers between braces; ``...`` stands for others.

        Args:
            most: the largest number of runs; None for all.
            last: the number of keys at the end of the path that are named; 0 for all.
        """
        names = [part.name(most) if isinstance(part, NumberedKeys) else part for part in self.parts[-last:]]
        return self.separator.join(names)


def fold(leaves: Iterable[tuple[str, Hashable]], separator: str = '/') -> list[Fold]:
    """Folds leaves, in the order of the first leaf of each fold.

    Args:
        leaves: (leaf path, kind) of each leaf. Only leaves of equal kind are folded together.
        separator: the separator of keys in a path.

    Example:
        >>> leaves = [('0/w', 'a'), ('0/b', 'b'), ('1/w', 'a'), ('1/b', 'b'), ('2/w', 'c')]
        >>> [(fold.name, fold.count) for fold in fold(leaves)]
        [('{0,1}/w', 2), ('{0,1}/b', 2), ('2/w', 1)]
    """
    kinds: dict[Hashable, int] = {}
    repeats: collections.Counter[Hashable] = collections.Counter()
    folds: list[tuple[Fold, Hashable]] = []
    for index, (path, key) in enumerate(leaves):
        kind = kinds.setdefault(key, len(kinds))
        # Keys that contain a slash can give two leaves the same path; those are never folded into one.
        item = Fold(tuple(path.split(separator)), index, separator)
        folds.append((item, (kind, repeats[path, kind])))
        repeats[path, kind] += 1
    for depth in range(min(_MAX_DEPTH, max((len(item.parts) for item, _ in folds), default=0))):
        folds = _fold_at(depth, folds)
    return [item for item, _ in folds]


def _fold_at(depth: int, folds: Sequence[tuple[Fold, Hashable]]) -> list[tuple[Fold, Hashable]]:
    """Merges folds that differ only in the number of the key at *depth*."""
    groups: dict[Hashable, tuple[Hashable, list[tuple[Fold, int]]]] = {}
    for index, (item, kind) in enumerate(folds):
        key = item.parts[depth] if depth < len(item.parts) else ''
        match = _NUMBERED.fullmatch(key) if isinstance(key, str) else None
        number = -1
        group: Hashable = index
        if match:
            number = int(match[2])
            group = match[1], item.parts[:depth], item.parts[depth + 1 :], kind
        groups.setdefault(group, (kind, []))[1].append((item, number))
    return [(_merge(depth, group), kind) for kind, group in groups.values()]


def _merge(depth: int, group: Sequence[tuple[Fold, int]]) -> Fold:
    """Merges folds, given with the number of their key at *depth*."""
    first, number = group[0]
    if len(group) == 1:
        return first
    stem = str(first.parts[depth]).removesuffix(str(number))
    numbered = NumberedKeys(stem, tuple(sorted(number for _, number in group)))
    parts = (*first.parts[:depth], numbered, *first.parts[depth + 1 :])
    return dataclasses.replace(first, parts=parts, first=min(item.first for item, _ in group))


def braces(numbers: Sequence[int], most: int | None) -> str:
    """Returns numbers between braces, in order, in at most *most* runs.

    Example:
        >>> braces([0, 2, 5, 6, 7, 8, 9], None), braces([3, 4], None)
        ('{0,2,5..9}', '{3,4}')
        >>> braces(range(0, 80, 3), 3)
        '{0,3,...,78}'
    """
    texts = [
        str(first) if first == last else f'{first}{".." if last > first + 1 else ","}{last}'
        for first, last in runs(numbers)
    ]
    if most is not None and len(texts) > most:
        texts = [*texts[: most - 1], '...', texts[-1]]
    return f'{{{",".join(texts)}}}'


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the first and last number of each run of consecutive numbers.

    Example:
        >>> runs([0, 1, 2, 5])
        [(0, 2), (5, 5)]
    """
    result: list[tuple[int, int]] = []
    for number in numbers:
        if result and number == result[-1][1] + 1:
            result[-1] = (result[-1][0], number)
        else:
            result.append((number, number))
    return result


def count_prefix(count: int) -> str:
    """Returns the prefix of a line that stands for *count* leaves: ``'80 x '``; empty for one leaf."""
    return '' if count == 1 else f'{count} x '
