"""Mapping of leaves to the leaves of another tree: renames, transposes, stacked and split layers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from scalax._core.pytree.paths import NamedTree, dtype_on_devices, is_weakly_typed, leaf_text, type_text
from scalax._core.util.strict_json import printable
from scalax.errors import ArgumentError, near_names, shown_leaves
from scalax.rules._tree_path import checked_regex

Destination = str | tuple[str, Sequence[int]] | None
NameMapping = Mapping[str, Destination] | Sequence[tuple[Any, ...]] | Callable[[str], Destination] | None
MappedName = tuple[str, str, tuple[int, ...] | None]
"""The name of a leaf, its path in the target, and the axes of its transpose."""


@dataclasses.dataclass(frozen=True)
class LeafSource:
    """The leaf of the source that becomes a leaf of the target, or a part of one.

    Attributes:
        index: its index among the leaves of the source.
        axes: the transpose to apply first; None if there is none.
        layer: the index of a layer, if the source leaf is one layer of a stack in the target, or the target
            leaf is one layer of a stack in the source.
        is_stack: whether the source is the stack.
    """

    index: int
    axes: tuple[int, ...] | None = None
    layer: int | None = None
    is_stack: bool = False


@dataclasses.dataclass(frozen=True)
class TargetLeaf:
    """A leaf of the target.

    Attributes:
        path: its path.
        shape: its shape.
        dtype: its dtype.
        sources: the leaves of the source that it is made from: one, or one per layer of a stack.
        sharding: its sharding, once the rules are resolved.
        weak: whether its type is weak, as it is if the types of all sources are weak.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    sources: tuple[LeafSource, ...]
    sharding: Any = None
    weak: bool = False


def map_leaves(tree: NamedTree, mapping: NameMapping) -> tuple[list[TargetLeaf], Any]:
    """Returns the leaves of the target and their structure.

    The structure is nested dicts; without a mapping it is the structure of *tree*.

    Raises:
        ArgumentError: the mapping does not fit the tree; lists all leaves that it does not fit.
    """
    dtypes = [dtype_on_devices(leaf) for leaf in tree.leaves]
    weak = [is_weakly_typed(leaf) for leaf in tree.leaves]
    if mapping is None:
        types = zip(tree.paths, tree.shapes, dtypes, strict=True)
        targets = [TargetLeaf(*type_, (LeafSource(i),), weak=weak[i]) for i, type_ in enumerate(types)]
        return targets, tree.treedef
    indices = {path: i for i, path in enumerate(tree.paths)}
    mapped, problems = map_names(dict(zip(tree.paths, tree.leaves, strict=True)), mapping, '/')
    parts_by_path: dict[str, list[tuple[LeafSource, tuple[int, ...]]]] = {}
    for name, path, axes in mapped:
        i = indices[name]
        shape = tree.shapes[i] if axes is None else tuple(tree.shapes[i][axis] for axis in axes)
        if '*' in (keys := path.split('/')):
            if not shape:
                problems.append(f'{name}: {leaf_text(tree.leaves[i])} has no first dimension to split')
            for layer in range(*shape[:1] or [0]):
                layer_path = '/'.join(str(layer) if key == '*' else key for key in keys)
                source = LeafSource(i, axes, layer, is_stack=True)
                parts_by_path.setdefault(layer_path, []).append((source, shape[1:]))
        else:
            match = re.fullmatch(r'(.*)\[(\d+)\]', path)
            stack_path, layer_index = (match[1], int(match[2])) if match else (path, None)
            parts_by_path.setdefault(stack_path, []).append((LeafSource(i, axes, layer_index), shape))
    nested: dict[str, Any] = {}
    for path, parts in parts_by_path.items():
        parts.sort(key=lambda part: -1 if part[0].layer is None else part[0].layer)
        texts = [type_text(dtypes[source.index], shape) for source, shape in parts]
        layers = [source.layer for source, _ in parts if not source.is_stack and source.layer is not None]
        names = ', '.join(tree.paths[source.index] for source, _ in parts)
        if layers != [*range(len(parts))] if layers else len(parts) > 1:
            reason = f'whose layers would be {layers}' if layers else 'which is one leaf'
            problems.append(f'{names}: go to {path}, {reason}')
        elif len({*texts}) > 1:
            problems.append(f'{names}: go to {path}, one array, and are {", ".join(texts)}')
        else:
            shape, dtype = parts[0][1], dtypes[parts[0][0].index]
            target_shape = (len(parts), *shape) if layers else shape
            sources = tuple(source for source, _ in parts)
            all_weak = all(weak[source.index] for source in sources)
            target = TargetLeaf(path, target_shape, dtype, sources, weak=all_weak)
            if not insert_leaf(nested, path, target):
                problems.append(f'{names}: goes to {path}, which overlaps the path of another leaf')
    if problems:
        raise ArgumentError(
            f'the mapping does not fit the tree:\n{shown_leaves(problems)}\n'
            'What to do: give every leaf its own path, or path[0], path[1], ... in a stack, or a path with * '
            'for its layers, or None to leave it out.'
        )
    return jax.tree.flatten(nested)


def map_names(
    leaves: Mapping[str, Any], mapping: NameMapping, separator: str
) -> tuple[list[MappedName], list[str]]:
    """Applies a mapping to the names of leaves.

    Args:
        leaves: name -> leaf.
        mapping: as for `load_safetensors`.
        separator: the separator of the keys in a name.

    Returns:
        The mapped names, and one line per name that the mapping does not fit.

    Raises:
        ArgumentError: the mapping is invalid, or some destinations are not paths.
    """
    destination_of = _as_function(mapping, separator)
    mapped: list[MappedName] = []
    problems: list[str] = []
    not_paths: list[str] = []
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
            not_paths.append(f'{name}: {destination!r}')
            continue
        path, axes = checked
        if axes is not None and sorted(axes) != [*range(np.ndim(leaf))]:
            problems.append(f'{name}: {leaf_text(leaf)} does not have the axes {axes!r}')
        else:
            mapped.append((name, path, axes))
    if not_paths:
        raise ArgumentError(
            'mapping: these destinations are not paths:\n'
            f'{shown_leaves(map(printable, not_paths), separator)}\n'
            "What to do: give a path ('norm/scale'), a path and axes for a transpose ('norm/scale', (1, 0)), "
            'or None to leave the leaf out.'
        )
    return mapped, problems


def _checked_destination(destination: Any) -> tuple[str, tuple[int, ...] | None] | None:
    """Returns a path, and the axes of a transpose if there is one.

    Returns None if *destination* is neither a path nor a pair of a path and axes.
    """
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
    """Returns a hint at an unused key of the mapping that looks like a misspelt *name*."""
    near = near_names(name, [key for key in unused if isinstance(key, str)])
    return f', whose name {near[0]!r} no leaf has' if near else ''


def insert_leaf(tree: dict[str, Any], path: str, leaf: Any) -> bool:
    """Inserts a leaf into nested dicts; returns False if its path overlaps the path of another leaf."""
    *parents, key_of_leaf = path.split('/')
    for key in parents:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            return False
    return tree.setdefault(key_of_leaf, leaf) is leaf


def _as_function(mapping: NameMapping, separator: str) -> Callable[[str], Destination]:
    if mapping is None:
        return lambda name: name.replace(separator, '/')
    if isinstance(mapping, Mapping):
        return mapping.__getitem__
    if callable(mapping):
        return mapping
    pairs = checked_pairs('mapping', mapping, max_length=3)

    def by_regex(name: str) -> Destination:
        for regex, replacement, *axes in pairs:
            if regex.search(name):
                if replacement is None:
                    return None
                path = substitute('mapping', regex, replacement, name).replace(separator, '/')
                return (path, axes[0]) if axes else path
        raise KeyError(name)

    return by_regex


def checked_pairs(where: str, pairs: Iterable[Any], max_length: int = 2) -> list[tuple[Any, ...]]:
    """Compiles the regexes of tuples (regex, replacement, ...); messages begin with *where*.

    Raises:
        ArgumentError: a pair is not a tuple of two to *max_length* values, or its regex or replacement is
            invalid.
    """
    compiled = []
    if isinstance(pairs, str | Mapping) or not isinstance(pairs, Iterable):
        raise ArgumentError(f'{where}: expected a list of pairs (regex, replacement), got {pairs!r}')
    for pair in pairs:
        is_pair = isinstance(pair, tuple | list) and 2 <= len(pair) <= max_length
        if not is_pair or not (isinstance(pair[1], str | None) or callable(pair[1])):
            raise ArgumentError(f'{where}: expected a list of pairs (regex, replacement), got {pair!r} in it')
        checked_regex(where, pair[0], ArgumentError)
        compiled.append((re.compile(pair[0]), *pair[1:]))
    return compiled


def substitute(where: str, regex: re.Pattern[str], replacement: Any, name: str) -> str:
    """Returns ``regex.sub(replacement, name)``; messages begin with *where*.

    Raises:
        ArgumentError: the replacement uses a group that the regex lacks, or is a function that does not
            return a string.
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
