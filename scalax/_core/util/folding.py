"""Folding of names that differ in numbers only: the same leaf in many layers, under one name.

``layers/0/w`` ... ``layers/79/w`` fold into ``layers/{0..79}/w``, and ``layers_0/w`` ... ``layers_79/w``
into ``layers_{0..79}/w``. Where paths have several numbers (layers and experts, say), folds that differ in
one of them only fold again: every fold is a full product of numbers, so that its name gives back exactly
the paths that it stands for.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Hashable, Iterable, Sequence

# A number is a whole key, or follows an underscore or a dot: `block12` and `block13` may be unrelated.
# Braces before it would look like folded numbers. Longer numbers do not count layers.
_NUMBERED = re.compile('((?:[^{}]*[_.])?)(0|[1-9][0-9]{0,17})', re.ASCII | re.DOTALL)
_DEEPEST = 100  # keys of a path that are folded: each costs a pass over all leaves


MOST_RUNS = 6  # between the braces of one folded path: layers may alternate


@dataclasses.dataclass(frozen=True)
class NumberedKeys:
    """Keys that differ in the number at their end only.

    Attributes:
        stem: what stands before the numbers; empty where they are the keys.
        numbers: all of them, in order.
    """

    stem: str
    numbers: tuple[int, ...]

    @property
    def keys(self) -> list[str]:
        """Each of the keys."""
        return [f'{self.stem}{number}' for number in self.numbers]

    def name(self, most: int | None) -> str:
        """The keys as one, with at most *most* runs of numbers: ``layers_{0..79}``."""
        return f'{self.stem}{braces(self.numbers, most)}'


@dataclasses.dataclass(frozen=True)
class Fold:
    """Leaves that differ in numbers in their paths only.

    Attributes:
        parts: the keys of the path; in one place there may be several.
        first: the index of the first of them.
        separator: what is between the keys.
    """

    parts: tuple[str | NumberedKeys, ...]
    first: int
    separator: str = '/'

    @property
    def count(self) -> int:
        """How many leaves these are."""
        return math.prod(len(part.numbers) for part in self.parts if isinstance(part, NumberedKeys))

    @property
    def name(self) -> str:
        """All their paths as one: ``layers/{0..79}/w``."""
        return self.short_name(None)

    @property
    def paths(self) -> tuple[str, ...]:
        """Each of their paths."""
        choices = [part.keys if isinstance(part, NumberedKeys) else [part] for part in self.parts]
        return tuple(self.separator.join(keys) for keys in itertools.product(*choices))

    def short_name(self, most: int | None, last: int = 0) -> str:
        """The name with at most *most* runs of numbers between braces; ``...`` stands for others.

        Args:
            most: how many runs.
            last: how many keys at the end of the path are named; 0 for all.
        """
        names = [part.name(most) if isinstance(part, NumberedKeys) else part for part in self.parts[-last:]]
        return self.separator.join(names)


def fold(leaves: Iterable[tuple[str, Hashable]], separator: str = '/') -> list[Fold]:
    """Folds leaves, given as (leaf path, what they must agree in), in the order of the first of each.

    Args:
        leaves: the leaves.
        separator: what is between the keys of a path.

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
        # Keys that hold a slash can give two leaves the same path; those never fold into one.
        item = Fold(tuple(path.split(separator)), index, separator)
        folds.append((item, (kind, repeats[path, kind])))
        repeats[path, kind] += 1
    for place in range(min(_DEEPEST, max((len(item.parts) for item, _ in folds), default=0))):
        folds = _fold_at(place, folds)
    return [item for item, _ in folds]


def _fold_at(place: int, folds: Sequence[tuple[Fold, Hashable]]) -> list[tuple[Fold, Hashable]]:
    """Folds what differs in the number at *place* only."""
    groups: dict[Hashable, tuple[Hashable, list[tuple[Fold, int]]]] = {}
    for alone, (item, kind) in enumerate(folds):
        key = item.parts[place] if place < len(item.parts) else ''
        found = _NUMBERED.fullmatch(key) if isinstance(key, str) else None
        number = -1
        group: Hashable = alone
        if found:
            number = int(found[2])
            group = found[1], item.parts[:place], item.parts[place + 1 :], kind
        groups.setdefault(group, (kind, []))[1].append((item, number))
    return [(_merged(place, group), kind) for kind, group in groups.values()]


def _merged(place: int, group: Sequence[tuple[Fold, int]]) -> Fold:
    first, number = group[0]
    if len(group) == 1:
        return first
    stem = str(first.parts[place]).removesuffix(str(number))
    numbered = NumberedKeys(stem, tuple(sorted(number for _, number in group)))
    parts = (*first.parts[:place], numbered, *first.parts[place + 1 :])
    return dataclasses.replace(first, parts=parts, first=min(item.first for item, _ in group))


def braces(numbers: Sequence[int], most: int | None) -> str:
    """Numbers as people write them, in order, in at most *most* runs.

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
    """The first and last of each run of consecutive numbers.

    Example:
        >>> runs([0, 1, 2, 5])
        [(0, 2), (5, 5)]
    """
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def count_prefix(count: int) -> str:
    """How many leaves a line stands for, in front of what each of them is; nothing for one."""
    return '' if count == 1 else f'{count} x '
