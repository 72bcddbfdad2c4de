"""Runs of whole keys of leaf paths, and the regexes of these.

Leaves whose paths differ in layer numbers only are one group, which has one path of keys. A run is some
consecutive keys of it, perhaps with a gap, and may be found in the paths of other groups too.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from scalax._util.folding import runs as consecutive


class Mark(enum.Enum):
    """What stands beside the keys of a run."""

    BEGIN = '^'
    END = '$'
    GAP = '.*'  # any keys, also none


@dataclasses.dataclass(frozen=True)
class Numbered:
    """Keys that differ in one number: these numbers, or any."""

    stem: str
    tail: str
    numbers: tuple[int, ...] | None = None


Key = str | Numbered | Mark
Run = tuple[Key, ...]

# `3`, `layers_3`, `layers.3`, and in Haiku `h3_attn`. `conv2` may be something else than `conv1`.
_NUMBER = re.compile('([A-Za-z]+(?=[0-9]+_)|(?:.*[_.])?)(0|[1-9][0-9]{0,8})(_.*)?', re.ASCII | re.DOTALL)
_LONGEST = 5  # keys of a run; a whole path may have more
_ENDING = 3  # keys behind a gap


@dataclasses.dataclass(frozen=True)
class Group:
    """Leaves of one spec whose paths differ in numbers that do not tell one spec from another."""

    keys: Run
    spec: PartitionSpec
    paths: list[str]

    @functools.cached_property
    def samples(self) -> list[str]:
        """Paths to try a regex on. Of numbers that are all alike, the first and the last will do."""
        exact = any(isinstance(key, Numbered) and key.numbers is not None for key in self.keys)
        return self.paths if exact else [self.paths[0], self.paths[-1]]


def groups_of(asked: Mapping[str, PartitionSpec]) -> list[Group]:
    """The leaves that are asked for, in groups."""

    def parsed(key: str) -> tuple[str | Numbered, int | None]:
        found = _NUMBER.fullmatch(key)
        return (Numbered(found[1], found[3] or ''), int(found[2])) if found else (key, None)

    shapes: dict[tuple[str | Numbered, ...], dict[tuple[int, ...], str]] = {}
    for path in asked:
        keys = [parsed(key) for key in path.split('/')]
        numbers = tuple(number for _, number in keys if number is not None)
        shapes.setdefault(tuple(key for key, _ in keys), {})[numbers] = path
    groups: dict[Run, Group] = {}
    for shape, paths in shapes.items():
        places = _alike({numbers: asked[path] for numbers, path in paths.items()})
        for numbers, path in paths.items():
            kinds = iter([alike[number] for alike, number in zip(places, numbers, strict=True)])
            kept = [
                key if isinstance(key, str) else dataclasses.replace(key, numbers=next(kinds))
                for key in shape
            ]
            whole = (Mark.BEGIN, *kept, Mark.END)
            groups.setdefault(whole, Group(whole, asked[path], [])).paths.append(path)
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


def any_numbers(run: Run) -> Run:
    """The run with any numbers in place of its own."""
    return tuple(Numbered(key.stem, key.tail) if isinstance(key, Numbered) else key for key in run)


def numbers_of(run: Run) -> list[frozenset[int] | None]:
    """The numbers of each key that has some; None for any."""
    found = [key.numbers for key in run if isinstance(key, Numbered)]
    return [None if numbers is None else frozenset(numbers) for numbers in found]


def is_name(key: Key) -> bool:
    """Whether a key is more than a number, and not empty."""
    return bool(key) if isinstance(key, str) else isinstance(key, Numbered) and bool(key.stem + key.tail)


def runs_of(keys: Run, idle: bool) -> Iterator[tuple[Run, int]]:
    """The runs that could stand for a path, and how many names come behind each.

    Args:
        keys: those of the path, between BEGIN and END.
        idle: whether the last key is the same in all paths, as the ``value`` of flax's variables.
    """
    yield keys, 0
    stop = len(keys) - 1 - idle
    behind = [sum(map(is_name, keys[place:stop])) for place in range(len(keys) + 1)]
    for first in range(len(keys)):
        begins = keys[first] is Mark.BEGIN
        for last in range(first + 1 + begins, min(first + _LONGEST + begins, len(keys)) + 1):
            run = keys[first:last]
            if begins or is_name(run[0]):
                yield run, behind[last]
    heads = [(place + 1, keys[place : place + 1]) for place in range(1, stop) if is_name(keys[place])]
    for after, head in [(2, keys[:2]), *heads]:
        for first in range(max(after, stop - _ENDING), stop):
            if is_name(keys[first]):
                yield (*head, Mark.GAP, *keys[first:stop]), 0


# --- Regexes -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Alternative:
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


def anchored(run: Run, own: Sequence[str], others: Sequence[str]) -> Alternative | None:
    """The regex of a run with the fewest anchors that matches *own* paths and no *others*."""
    begins, ends = run[0] is Mark.BEGIN, run[-1] is Mark.END
    keys = [key for key in run if not isinstance(key, Mark)]
    # Where the tree is a part of another one, as the params of a state, the same rule will do.
    parts = own if begins else [*own, *(re.sub('^([0-9]+/)+', '', path) for path in own)]
    options = itertools.product(
        ['^'] if begins else ['', '/', '(^|/)'][_is_vague(keys[0], 'stem') :],
        ['.*', '.*/', '(.*/)?'] if Mark.GAP in run else [''],
        ['$', r'\Z'] if ends else ['', '$', '/', '(/|$)'][_is_vague(keys[-1], 'tail') :],
    )
    for begin, gap, end in sorted(options, key=lambda option: len(''.join(option))):
        found = Alternative(begin, tuple((key_text(key),) for key in keys), gap, end)
        search = re.compile(regex_of([found])).search
        if all(map(search, parts)) and not any(map(search, others)):
            return found
    return None


def _is_vague(key: Key, side: str) -> bool:
    """Whether a key is a part of many others: a single letter, or with its number on that *side*."""
    return not getattr(key, side) if isinstance(key, Numbered) else len(str(key)) < 2


def regex_of(alternatives: Sequence[Alternative]) -> str:
    """One regex: alternatives that differ in one key are one, and those with the same anchors share them."""
    for place in range(max((len(each.keys) for each in alternatives), default=0)):
        alike: dict[Any, list[Alternative]] = {}
        for each in alternatives:
            rest = (len(each.keys), each.keys[:place], each.keys[place + 1 :], each.begin, each.gap, each.end)
            alike.setdefault(rest if place < len(each.keys) else each, []).append(each)
        alternatives = [_merged(group, place) for group in alike.values()]
    shared: dict[tuple[str, str], list[str]] = {}
    for each in alternatives:
        shared.setdefault((each.left, each.end), []).extend(each.bodies)
    texts = []
    for (left, end), bodies in shared.items():
        text = '|'.join(bodies)
        texts.append(f'{left}({text}){end}' if len(bodies) > 1 and (left or end) else left + text + end)
    return '|'.join(texts)


def _merged(alternatives: Sequence[Alternative], place: int) -> Alternative:
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


def escaped(text: str) -> str:
    """`re.escape` for what means something in a regex; spaces and dashes stay as they are."""
    return re.sub(r'([\\.^$*+?{}\[\]|()])', r'\\\1', text)


def key_text(key: Key) -> str:
    """A key as a regex."""
    if isinstance(key, Numbered):
        number = r'\d+' if key.numbers is None else _numbers_text(key.numbers)
        return escaped(key.stem) + number + escaped(key.tail)
    return escaped(str(key))


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
        spans = [f'{a}-{b}' if b > a + 1 else f'{a}' if a == b else f'{a}{b}' for a, b in consecutive(ends)]
        digit = str(ends[0]) if len(ends) == 1 else r'\d' if len(ends) == 10 else f'[{"".join(spans)}]'
        if tens[0] == 0:
            texts.append(digit)
        if tens[-1] > 0:
            texts.append(_numbers_text([ten for ten in tens if ten]) + digit)
    return f'({"|".join(texts)})' if len(texts) > 1 else texts[0]
