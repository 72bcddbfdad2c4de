"""Can every leaf of a tree be saved, and as what? Asked before anything is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from scalax._tree.paths import NamedTree, canonical_dtype, has_foreign_dtype, key_string
from scalax.checkpoint._target import require_distinct
from scalax.errors import CheckpointError, shown


def savable(tree: NamedTree) -> NamedTree:
    """The tree as it is saved: numpy arrays in the dtypes that JAX gives them, in which they are restored.

    Raises:
        CheckpointError: names every leaf that cannot be saved.
    """
    require_distinct(tree.paths, 'the state')
    if not tree.leaves:
        raise CheckpointError('the state has no leaves: there is nothing to save')
    if tree.bare:
        raise CheckpointError("the state is a single leaf; give a tree, such as {'params': leaf}")
    leaves = [_as_held(leaf) for leaf in tree.leaves]
    found = [
        f'{tree.describe(i)}: {why}'
        for i, leaf in enumerate(tree.leaves)
        for why in _reasons(leaf, leaves[i])
    ]
    found.extend(_same_name(tree))
    if found:
        raise CheckpointError(f'some leaves of the state cannot be saved:\n{shown(found)}')
    changed = any(leaf is not given for leaf, given in zip(leaves, tree.leaves, strict=True))
    return dataclasses.replace(tree, leaves=leaves) if changed else tree


def as_orbax_takes_it(state: Any) -> Any:
    """The state, or dicts by leaf paths where Orbax could save it and not restore it.

    Orbax sorts the children of each node by their keys when it reads a tree, and those of a node that has
    indices beside names, as lists of modules in flax's nnx do, cannot be sorted.
    """
    nodes: list[Any] = []

    def is_leaf(node: Any) -> bool:
        if type(node) not in _PLAIN and not isinstance(node, jax.Array | np.ndarray):
            nodes.append(node)
        return False

    jax.tree.leaves(state, is_leaf=is_leaf)
    if not any(map(_has_indices_and_names, nodes)):
        return state
    tree: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        *parents, last = map(key_string, path)
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = leaf
    return tree


_PLAIN = {dict, list, tuple, type(None), bool, int, float}


def _has_indices_and_names(node: Any) -> bool:
    children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
    keys = [path[0] for path, _ in children if path]
    indices = [isinstance(getattr(key, 'idx', getattr(key, 'key', '')), int) for key in keys]
    return any(indices) and not all(indices)


def _as_held(leaf: Any) -> Any:
    """A leaf as JAX holds it: without x64, a numpy array of 64 bits has 32."""
    if not isinstance(leaf, np.ndarray | np.generic) or has_foreign_dtype(leaf):
        return leaf
    dtype = canonical_dtype(leaf.dtype)
    with np.errstate(over='ignore'):  # what does not fit is found by its value
        return leaf if leaf.dtype == dtype else leaf.astype(dtype)


def _fits(leaf: Any, held: Any) -> bool:
    """Whether the values of a numpy array fit in the dtype that JAX gives it; digits may be lost."""
    if held is leaf:
        return True
    if leaf.dtype.kind in 'iu':
        return bool((held == leaf).all())
    return bool((np.isfinite(held) == np.isfinite(leaf)).all())


def _reasons(leaf: Any, held: Any) -> Iterator[str]:
    if isinstance(leaf, jax.core.Tracer):
        yield 'it is a value inside a traced function; save outside of it'
    elif isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            yield 'it was donated to a compiled function, and is gone; save what that returned'
        elif 0 in leaf.shape:
            yield 'Orbax does not write arrays without elements; leave it out'
        elif jax.process_count() > 1 and leaf.is_fully_addressable:
            yield 'it lies on this process alone; shard it over the mesh of all, or make it a numpy array'
    elif isinstance(leaf, np.ma.MaskedArray):
        yield 'its mask would be lost'
    elif isinstance(leaf, np.ndarray | np.generic):
        if leaf.size == 0:
            yield 'Orbax does not write arrays without elements; leave it out'
        elif has_foreign_dtype(leaf):
            yield f'JAX has no arrays of dtype {leaf.dtype}'
        elif not _fits(leaf, held):
            yield (
                f'it holds values that do not fit in {held.dtype}, which JAX makes of '
                f'{leaf.dtype}; set jax_enable_x64, or save a Python number'
            )
    elif isinstance(leaf, int) and not -(2**63) <= leaf < 2**64:
        yield 'it has more than 64 bits'
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
