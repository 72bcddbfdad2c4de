"""Mappings of tensors in safetensors files to leaf paths and transpositions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from scalax.checkpoint._safetensors_header import in_message
from scalax.checkpoint._target import checked_pairs, substitute
from scalax.errors import ArgumentError, CheckpointError, near_names, shown_leaves

Destination = str | tuple[str, tuple[int, ...]] | None
NameMapping = Mapping[str, Destination] | Sequence[tuple[Any, ...]] | Callable[[str], Destination] | None

_MOST_KEYS = 100  # of a path: models are not deeper, and JAX fails on very deep trees


def destinations(names: Sequence[str], mapping: NameMapping) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Where each tensor goes: name -> (path, axes). Tensors that are left out are not in it.

    Args:
        names: of all tensors.
        mapping: see `scalax.checkpoint.load_safetensors`.

    Raises:
        CheckpointError: a tensor that the mapping does not cover, or a name in it that no tensor has; two
            tensors with one path, or one whose path is inside that of another.
        ArgumentError: the mapping is invalid, or gives something else than a path for a name.
    """
    problems: list[str] = []
    wrong: list[str] = []
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    if isinstance(mapping, Mapping):
        problems.extend(_unknown_names(mapping, dict.fromkeys(names)))
    destination_of = _as_function(mapping)
    for name in names:
        try:
            destination = destination_of(name)
        except KeyError as error:
            if error.args != (name,):  # a mistake in a function of the user
                error.add_note(f'mapping was asked about {in_message(name)}')
                raise
            problems.append(f'{in_message(name)}: not in the mapping')
            continue
        if destination is None:
            continue
        checked = _checked_destination(destination)
        if checked is None:
            wrong.append(f'{in_message(name)}: {destination!r}')
        else:
            found[name] = checked
    if wrong:
        raise ArgumentError(
            f'mapping: these destinations of tensors are not paths:\n{shown_leaves(wrong, ".")}\n'
            "What to do: give a path ('norm/scale'), (path, axes) with the axes as whole numbers, or None to "
            'leave the tensor out.'
        )
    problems.extend(_collisions(found))
    if problems:
        raise CheckpointError(
            f'the mapping does not fit the tensors of the files:\n{shown_leaves(problems, ".")}\n'
            'What to do: give every tensor one path of its own, or None to leave it out.'
        )
    return found


def _checked_destination(given: Any) -> tuple[str, tuple[int, ...]] | None:
    """A path and axes; None if *given* is neither a path nor both."""
    path, axes = given if isinstance(given, tuple | list) and len(given) == 2 else (given, ())
    whole = isinstance(axes, Sequence) and all(
        isinstance(axis, int | np.integer) and not isinstance(axis, bool) for axis in axes
    )
    return (path, tuple(map(int, axes))) if isinstance(path, str) and whole else None


def _as_function(mapping: NameMapping) -> Callable[[str], Destination]:
    if mapping is None:
        return lambda name: name.replace('.', '/')
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
                path = substitute('mapping', regex, replacement, name).replace('.', '/')
                return (path, axes[0]) if axes else path
        raise KeyError(name)

    return by_regex


def _unknown_names(mapping: Mapping[str, Any], names: Mapping[str, Any]) -> Iterator[str]:
    absent = [name for name in mapping if name not in names]
    for i, name in enumerate(absent):
        # Messages show ten, and each search goes through all names.
        near = near_names(str(name), names) if i < 10 else []
        hint = f'; did you mean {in_message(near[0])}?' if near else ''
        yield f'{in_message(str(name))}: not in the files{hint}'


def _collisions(found: Mapping[str, tuple[str, tuple[int, ...]]]) -> Iterator[str]:
    first: dict[str, str] = {}
    for name, (path, _) in found.items():
        if path in first:
            yield f'{in_message(name)} and {in_message(first[path])} both go to {in_message(path)}'
        first.setdefault(path, name)
    for path, name in first.items():
        keys = path.split('/', _MOST_KEYS)
        if len(keys) > _MOST_KEYS:
            yield f'{in_message(name)} goes to a path of more than {_MOST_KEYS} keys'
        for end in range(1, len(keys)):
            above = '/'.join(keys[:end])
            if above in first:
                yield (
                    f'{in_message(name)} goes to {in_message(path)}, which is inside {in_message(above)}, '
                    f'where {in_message(first[above])} goes'
                )
