"""Names of leaves in another tree: mappings of names, with layers that are stacked or split."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from scalax._core.pytree.paths import NamedTree, dtype_on_devices, is_weakly_typed, leaf_text, type_text
from scalax._core.util.strict_json import printable
from scalax.errors import ArgumentError, near_names, shown_leaves
from scalax.rules._tree_path import checked_regex

Destination = str | tuple[str, Sequence[int]] | None
NameMapping = Mapping[str, Destination] | Sequence[tuple[Any, ...]] | Callable[[str], Destination] | None
Located = tuple[str, str, tuple[int, ...] | None]  # name, path and axes


class Move(NamedTuple):
    """How a leaf becomes one of the target, or a part of one.

    Attributes:
        source: its number among the leaves of the source.
        axes: how its dimensions are transposed first; None if they are not.
        layer: if the leaf is one layer of a stack in the target, or the other way round: which; else None.
        splits: whether the stack is the leaf of the source.
    """

    source: int
    axes: tuple[int, ...] | None = None
    layer: int | None = None
    splits: bool = False


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A leaf of the target: its path, shape and dtype, what it is made of, and its sharding, once chosen.

    Attributes:
        weak: whether its type is weak, as it is if those of all leaves are that it is made of.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    moves: tuple[Move, ...]
    sharding: Any = None
    weak: bool = False


def arrivals_of(tree: NamedTree, mapping: NameMapping) -> tuple[list[Arrival], Any]:
    """The leaves that a mapping makes of a tree, and their structure: that of the tree, or nested dicts.

    Raises:
        ArgumentError: the mapping does not fit the tree; names all leaves that are not right.
    """
    dtypes = [dtype_on_devices(leaf) for leaf in tree.leaves]
    weak = [is_weakly_typed(leaf) for leaf in tree.leaves]
    if mapping is None:
        rows = zip(tree.paths, tree.shapes, dtypes, strict=True)
        return [Arrival(*row, (Move(i),), weak=weak[i]) for i, row in enumerate(rows)], tree.treedef
    numbers = {path: i for i, path in enumerate(tree.paths)}
    located, problems = locate(dict(zip(tree.paths, tree.leaves, strict=True)), mapping, '/')
    parts: dict[str, list[tuple[Move, tuple[int, ...]]]] = {}
    for name, path, axes in located:
        i = numbers[name]
        shape = tree.shapes[i] if axes is None else tuple(tree.shapes[i][axis] for axis in axes)
        if '*' in (keys := path.split('/')):
            if not shape:
                problems.append(f'{name}: {leaf_text(tree.leaves[i])} has no first dimension to split')
            for layer in range(*shape[:1] or [0]):
                at = '/'.join(str(layer) if key == '*' else key for key in keys)
                parts.setdefault(at, []).append((Move(i, axes, layer, splits=True), shape[1:]))
        else:
            found = re.fullmatch(r'(.*)\[(\d+)\]', path)
            at, layer_here = (found[1], int(found[2])) if found else (path, None)
            parts.setdefault(at, []).append((Move(i, axes, layer_here), shape))
    nested: dict[str, Any] = {}
    for path, made in parts.items():
        made.sort(key=lambda part: -1 if part[0].layer is None else part[0].layer)
        types = [type_text(dtypes[move.source], shape) for move, shape in made]
        stacked = [move.layer for move, _ in made if not move.splits and move.layer is not None]
        names = ', '.join(tree.paths[move.source] for move, _ in made)
        if stacked != [*range(len(made))] if stacked else len(made) > 1:
            why = f'whose layers would be {stacked}' if stacked else 'which is one leaf'
            problems.append(f'{names}: go to {path}, {why}')
        elif len({*types}) > 1:
            problems.append(f'{names}: go to {path}, one array, and are {", ".join(types)}')
        else:
            shape, dtype = made[0][1], dtypes[made[0][0].source]
            whole = (len(made), *shape) if stacked else shape
            moves = tuple(move for move, _ in made)
            all_weak = all(weak[move.source] for move in moves)
            if not put(nested, path, Arrival(path, whole, dtype, moves, weak=all_weak)):
                problems.append(f'{names}: goes to {path}, which overlaps the path of another leaf')
    if problems:
        raise ArgumentError(
            f'the mapping does not fit the tree:\n{shown_leaves(problems)}\n'
            'What to do: give every leaf its own path, or path[0], path[1], ... in a stack, or a path with * '
            'for its layers, or None to leave it out.'
        )
    return jax.tree.flatten(nested)


def locate(
    leaves: Mapping[str, Any], mapping: NameMapping, separator: str
) -> tuple[list[Located], list[str]]:
    """Where a mapping puts leaves: name, path and axes of each; and what is wrong with it, by name.

    Args:
        leaves: by name.
        mapping: as for `load_safetensors`.
        separator: what is between the keys of a name.

    Raises:
        ArgumentError: the mapping is invalid, or gives something else than a path for a name.
    """
    destination_of = _as_function(mapping, separator)
    located: list[Located] = []
    problems: list[str] = []
    wrong: list[str] = []
    unused = [key for key in mapping if key not in leaves] if isinstance(mapping, Mapping) else []
    for name, leaf in leaves.items():
        try:
            destination = destination_of(name)
        except KeyError as error:
            if error.args != (name,):  # a mistake in a function of the user
                raise
            # Messages show ten, and a search goes through all names.
            hint = _misspelt(name, unused) if len(problems) < 10 else ''
            problems.append(f'{name}: not in the mapping{hint}')
            continue
        if destination is None:
            continue
        checked = _checked_destination(destination)
        if checked is None:
            wrong.append(f'{name}: {destination!r}')
            continue
        path, axes = checked
        if axes is not None and sorted(axes) != [*range(np.ndim(leaf))]:
            problems.append(f'{name}: {leaf_text(leaf)} does not have the axes {axes!r}')
        else:
            located.append((name, path, axes))
    if wrong:
        raise ArgumentError(
            f'mapping: these destinations are not paths:\n{shown_leaves(map(printable, wrong), separator)}\n'
            "What to do: give a path ('norm/scale'), a path and axes for a transpose ('norm/scale', (1, 0)), "
            'or None to leave the leaf out.'
        )
    return located, problems


def _checked_destination(destination: Any) -> tuple[str, tuple[int, ...] | None] | None:
    """A path and axes, if there are any; None if *destination* is neither a path nor both."""
    if isinstance(destination, str):
        return destination, None
    if not isinstance(destination, tuple | list) or len(destination) != 2:
        return None
    path, axes = destination
    if not isinstance(path, str) or not isinstance(axes, Sequence | np.ndarray) or isinstance(axes, str):
        return None
    if not all(isinstance(axis, int | np.integer) and not isinstance(axis, bool) for axis in axes):
        return None
    return path, tuple(map(int, axes))


def _misspelt(name: str, unused: Sequence[Any]) -> str:
    """A hint at a key of the mapping that no leaf has, and that looks like a misspelt *name*."""
    near = near_names(name, [key for key in unused if isinstance(key, str)])
    return f', whose name {near[0]!r} no leaf has' if near else ''


def put(tree: dict[str, Any], path: str, leaf: Any) -> bool:
    """Puts a leaf into nested dicts, if its place is free."""
    *above, last = path.split('/')
    for key in above:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            return False
    return tree.setdefault(last, leaf) is leaf


def _as_function(mapping: NameMapping, separator: str) -> Callable[[str], Destination]:
    if mapping is None:
        return lambda name: name.replace(separator, '/')
    if isinstance(mapping, Mapping):
        return mapping.__getitem__
    if callable(mapping):
        return mapping
    pairs = checked_pairs('mapping', mapping, most=3)

    def by_regex(name: str) -> Destination:
        for regex, replacement, *axes in pairs:
            if regex.search(name):
                if replacement is None:
                    return None
                path = substitute('mapping', regex, replacement, name).replace(separator, '/')
                return (path, axes[0]) if axes else path
        raise KeyError(name)

    return by_regex


def checked_pairs(where: str, pairs: Iterable[Any], most: int = 2) -> list[tuple[Any, ...]]:
    """Compiles the regexes of tuples (regex, replacement, ...); messages begin with *where*.

    Raises:
        ArgumentError: one is not a tuple of two to *most* values, or its regex or replacement is invalid.
    """
    compiled = []
    if isinstance(pairs, str | Mapping) or not isinstance(pairs, Iterable):
        raise ArgumentError(f'{where}: expected a list of pairs (regex, replacement), got {pairs!r}')
    for pair in pairs:
        is_pair = isinstance(pair, tuple | list) and 2 <= len(pair) <= most
        if not is_pair or not (isinstance(pair[1], str | None) or callable(pair[1])):
            raise ArgumentError(f'{where}: expected a list of pairs (regex, replacement), got {pair!r} in it')
        checked_regex(where, pair[0], ArgumentError)
        compiled.append((re.compile(pair[0]), *pair[1:]))
    return compiled


def substitute(where: str, regex: re.Pattern[str], replacement: Any, name: str) -> str:
    """Returns ``regex.sub(replacement, name)``; messages begin with *where*.

    Raises:
        ArgumentError: the replacement has a group that the regex lacks, or is a function that returns
            something else than a string.
    """

    def checked(match: re.Match[str]) -> str:
        text = replacement(match)
        if not isinstance(text, str):
            raise ArgumentError(
                f'{where}: the replacement for {regex.pattern!r} has to return a string, and returned '
                f'{text!r}'
            )
        return text

    if callable(replacement):
        return regex.sub(checked, name)
    try:
        return regex.sub(replacement, name)
    except (re.error, IndexError) as error:  # IndexError: the regex has no group of this name
        raise ArgumentError(
            f'{where}: the replacement {replacement!r} does not fit the regex {regex.pattern!r}: {error}'
        ) from None
