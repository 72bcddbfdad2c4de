"""Which leaves are the same thing in many layers? Paths that differ in integer keys, as one name.

``layers/0/w`` ... ``layers/79/w`` fold into ``layers/{0..79}/w``. Where paths have several integer keys
(layers and experts, say), folds that differ in one key only fold again: every fold is a full product of
numbers, so that its name gives back exactly the paths that it stands for.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Hashable, Iterable, Sequence

_INTEGER = re.compile('0|[1-9][0-9]*', re.ASCII)


@dataclasses.dataclass(frozen=True)
class Fold:
    """Leaves that differ in integer keys of their paths only.

    Attributes:
        parts: the keys of the path; a tuple of numbers where there are several.
        first: the index of the first of them.
    """

    parts: tuple[str | tuple[int, ...], ...]
    first: int

    @property
    def count(self) -> int:
        """How many leaves these are."""
        return math.prod(len(part) for part in self.parts if isinstance(part, tuple))

    @property
    def name(self) -> str:
        """All their paths as one: ``layers/{0..79}/w``."""
        return self.short_name(None)

    @property
    def paths(self) -> tuple[str, ...]:
        """Each of their paths."""
        choices = [map(str, part) if isinstance(part, tuple) else [part] for part in self.parts]
        return tuple('/'.join(keys) for keys in itertools.product(*choices))

    def short_name(self, most: int | None) -> str:
        """The name with at most *most* runs of numbers between braces; ``...`` stands for others."""
        return '/'.join(_braces(part, most) if isinstance(part, tuple) else part for part in self.parts)


def fold(leaves: Iterable[tuple[str, Hashable]]) -> list[Fold]:
    """Folds leaves, given as (leaf path, what they must agree in), in the order of the first of each.

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
        folds.append((Fold(tuple(path.split('/')), index), (kind, repeats[path, kind])))
        repeats[path, kind] += 1
    for place in range(max((len(item.parts) for item, _ in folds), default=0)):
        folds = _fold_at(place, folds)
    return [item for item, _ in folds]


def _fold_at(place: int, folds: Sequence[tuple[Fold, Hashable]]) -> list[tuple[Fold, Hashable]]:
    """Folds what differs in the key at *place* only."""
    groups: dict[Hashable, list[tuple[Fold, Hashable]]] = {}
    for number, (item, kind) in enumerate(folds):
        parts = item.parts
        key = parts[place] if place < len(parts) else ''
        is_number = isinstance(key, str) and _INTEGER.fullmatch(key)
        group = (parts[:place], parts[place + 1 :], kind) if is_number else number
        groups.setdefault(group, []).append((item, kind))
    return [(_merged(place, [item for item, _ in group]), group[0][1]) for group in groups.values()]


def _merged(place: int, group: Sequence[Fold]) -> Fold:
    first = group[0]
    if len(group) == 1:
        return first
    numbers = tuple(sorted(int(str(item.parts[place])) for item in group))
    parts = (*first.parts[:place], numbers, *first.parts[place + 1 :])
    return Fold(parts, min(item.first for item in group))


def _braces(numbers: Sequence[int], most: int | None) -> str:
    """Numbers as people write them, in order.

    Example:
        >>> _braces([0, 2, 5, 6, 7, 8, 9], None), _braces([3, 4], None)
        ('{0,2,5..9}', '{3,4}')
        >>> _braces(range(0, 80, 3), 3)
        '{0,3,...,78}'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    texts = [
        ('..' if run[-1] > run[0] + 1 else ',').join(map(str, run)) if len(run) > 1 else str(run[0])
        for run in runs
    ]
    if most is not None and len(texts) > most:
        texts = [*texts[: most - 1], '...', texts[-1]]
    return f'{{{",".join(texts)}}}'
