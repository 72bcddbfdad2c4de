"""Partitions of trees into arrays, which are data, and other leaves, which become part of the program."""

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
    """Whether a leaf is data: a concrete or abstract array of JAX or numpy. Python numbers are not."""
    is_data = isinstance(leaf, jax.Array | np.ndarray | np.generic) or is_abstract(leaf)
    return is_data and not has_foreign_dtype(leaf)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class StaticPart:
    """A tree without its arrays: a static pytree node, which JAX compares when it looks up programs.

    Attributes:
        treedef: the structure of the entire tree.
        values: the leaves; None in place of each array.
        is_array: whether each leaf is an array.
    """

    treedef: Any
    values: tuple[Any, ...]
    is_array: tuple[bool, ...]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, StaticPart)
            and self.is_array == other.is_array
            and self.treedef == other.treedef
            and list(map(type_key, self.values)) == list(map(type_key, other.values))
            and self.values == other.values
        )

    def __hash__(self) -> int:
        return hash((self.treedef, self.values, self.is_array))


def partition(tree: Any) -> tuple[Any, StaticPart]:
    """Splits a tree into its arrays, with None in place of other leaves, and its static part."""
    leaves, treedef = jax.tree.flatten(tree)
    mask = tuple(map(is_array, leaves))
    static_mask = [not flag for flag in mask]
    values = tuple(_masked(leaves, static_mask))
    return jax.tree.unflatten(treedef, _masked(leaves, mask)), StaticPart(treedef, values, mask)


def combine(data: Any, static: StaticPart) -> Any:
    """Returns the tree that `partition` has split."""
    arrays = iter(jax.tree.leaves(data))
    leaves = [
        next(arrays) if flag else value for value, flag in zip(static.values, static.is_array, strict=True)
    ]
    return jax.tree.unflatten(static.treedef, leaves)


def keep_only(tree: Any, mask: Sequence[bool]) -> Any:
    """Replaces the leaves for which *mask* is False by None."""
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, _masked(leaves, mask))


def _masked(leaves: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    return [leaf if flag else None for leaf, flag in zip(leaves, mask, strict=True)]


def require_hashable(static: StaticPart, tree: Any, subject: str, remedy: str) -> None:
    """Raises ArgumentError if the static part of a tree cannot be hashed.

    Args:
        static: the static part of the tree.
        tree: the tree.
        subject: the beginning of the message.
        remedy: the advice, for the message.
    """
    if _is_hashable(static):
        return
    unhashable = [
        describe_leaf(path_string(path), leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        if not is_array(leaf) and not _is_hashable(leaf)
    ]
    problem = (
        f'leaves that are not arrays and cannot be hashed:\n{shown_leaves(unhashable)}'
        if unhashable
        else 'a structure that cannot be hashed.'
    )
    raise ArgumentError(
        f'{subject} {problem}\n'
        f'What to do: everything but arrays is part of the compiled program: {remedy}, or a pytree of arrays.'
    )


def reject_structs(tree: Any, name: str) -> None:
    """Raises ArgumentError if a call of the function *name* has ``jax.ShapeDtypeStruct`` leaves."""
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
