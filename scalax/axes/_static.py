"""Trees in two parts: arrays, which are data, and everything else, which is part of the compiled program."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from scalax._core.pytree.paths import describe_leaf, has_foreign_dtype, path_string
from scalax._core.util.lru_cache import type_key
from scalax._jax.tracing import is_abstract
from scalax.errors import ArgumentError, shown_leaves


def is_array(leaf: Any) -> bool:
    """Whether a leaf is data: an array of JAX or numpy, or what stands for one; Python numbers are not."""
    is_data = isinstance(leaf, jax.Array | np.ndarray | np.generic) or is_abstract(leaf)
    return is_data and not has_foreign_dtype(leaf)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class StaticPart:
    """A tree without its arrays: a node without leaves, which JAX compares when it looks up programs.

    Attributes:
        treedef: the structure of the whole tree.
        values: the leaves; None stands for an array.
        arrays: which leaves are arrays.
    """

    treedef: Any
    values: tuple[Any, ...]
    arrays: tuple[bool, ...]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, StaticPart)
            and self.arrays == other.arrays
            and self.treedef == other.treedef
            and list(map(type_key, self.values)) == list(map(type_key, other.values))
            and self.values == other.values
        )

    def __hash__(self) -> int:
        return hash((self.treedef, self.values, self.arrays))


def partition(tree: Any) -> tuple[Any, StaticPart]:
    """The tree with None in place of other leaves than arrays, and these leaves as a static part."""
    leaves, treedef = jax.tree.flatten(tree)
    arrays = tuple(map(is_array, leaves))
    data = [leaf if array else None for leaf, array in zip(leaves, arrays, strict=True)]
    values = tuple(None if array else leaf for leaf, array in zip(leaves, arrays, strict=True))
    return jax.tree.unflatten(treedef, data), StaticPart(treedef, values, arrays)


def combine(data: Any, static: StaticPart) -> Any:
    """The inverse of `partition`."""
    leaves = iter(jax.tree.leaves(data))
    whole = [
        next(leaves) if array else value for value, array in zip(static.values, static.arrays, strict=True)
    ]
    return jax.tree.unflatten(static.treedef, whole)


def keep_only(tree: Any, which: Sequence[bool]) -> Any:
    """The tree with None in place of the leaves for which *which* is False."""
    leaves, treedef = jax.tree.flatten(tree)
    taken = [leaf if take else None for leaf, take in zip(leaves, which, strict=True)]
    return jax.tree.unflatten(treedef, taken)


def require_hashable(static: StaticPart, tree: Any, what: str, remedy: str) -> None:
    """Raises ArgumentError about leaves that cannot be hashed.

    Args:
        static: the static part of the tree.
        tree: the tree.
        what: the beginning of the message.
        remedy: what to do, for the message.
    """
    if _is_hashable(static):
        return
    bad = [
        describe_leaf(path_string(path), leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        if not is_array(leaf) and not _is_hashable(leaf)
    ]
    leaves = f' leaves that are no arrays and cannot be hashed:\n{shown_leaves(bad)}'
    said = leaves if bad else ' a structure that cannot be hashed.'
    raise ArgumentError(
        f'{what}{said}\n'
        f'What to do: everything but arrays is part of the compiled program: {remedy}, or a pytree of arrays.'
    )


def reject_structs(tree: Any, name: str) -> None:
    """Raises ArgumentError about ``jax.ShapeDtypeStruct`` leaves in a call of the function *name*."""
    structs = [
        describe_leaf(path_string(path), leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        if isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    if structs:
        raise ArgumentError(
            f'{name} got shapes, which have no values to compute with:\n{shown_leaves(structs)}\n'
            'What to do: pass arrays; .lower(...) and jax.eval_shape take shapes.'
        )


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
