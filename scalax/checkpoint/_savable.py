"""Can every leaf of a tree be saved? Asked before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from scalax._paths import NamedTree, has_foreign_dtype
from scalax.checkpoint._target import require_distinct
from scalax.errors import CheckpointError, shown


def require_savable(tree: NamedTree) -> None:
    """Raises CheckpointError, which names every leaf that cannot be saved."""
    require_distinct(tree.paths, 'the state')
    if tree.bare:
        raise CheckpointError("the state is a single leaf; give a tree, such as {'params': leaf}")
    found = [f'{tree.describe(i)}: {why}' for i, leaf in enumerate(tree.leaves) for why in _reasons(leaf)]
    found.extend(_same_name(tree))
    if found:
        raise CheckpointError(f'some leaves of the state cannot be saved:\n{shown(found)}')


def _reasons(leaf: Any) -> Iterator[str]:
    if isinstance(leaf, jax.core.Tracer):
        yield 'it is a value inside a traced function; save outside of it'
    elif isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            yield 'it was donated to a compiled function, and is gone; save what that returned'
        elif 0 in leaf.shape:
            yield 'Orbax does not write arrays without elements; leave it out'
        elif jax.process_count() > 1 and leaf.is_fully_addressable:
            yield 'it lies on this process alone; shard it over the mesh of all, or make it a numpy array'
    elif isinstance(leaf, np.ndarray | np.generic):
        if leaf.size == 0:
            yield 'Orbax does not write arrays without elements; leave it out'
        elif has_foreign_dtype(leaf):
            yield 'only numbers can be saved'
    elif not isinstance(leaf, bool | int | float):
        yield 'only arrays, typed keys and Python numbers can be saved'


def _same_name(tree: NamedTree) -> Iterator[str]:
    """Orbax joins keys with dots: leaves that it could not tell apart."""
    first: dict[str, str] = {}
    for path in tree.paths:
        name = path.replace('/', '.')
        if name in first:
            yield f'{path}: Orbax has one name for it and for {first[name]}: {name}; rename one of their keys'
        first.setdefault(name, path)
