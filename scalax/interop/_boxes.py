"""Boxes of other libraries in a tree, and their names for the dimensions of arrays."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec

from scalax._core.pytree.paths import NamedTree
from scalax._jax.flax import is_box, names_of_box

DimensionNames = tuple[str | tuple[str, ...] | None, ...]
"""One entry for each dimension: its name, the names that it fuses, or None."""


def axis_names(tree: Any) -> dict[str, DimensionNames]:
    """Returns the dimension names that a tree contains, by leaf path. Leaves without names are left out.

    Args:
        tree: a tree that may contain flax linen boxes, flax nnx variables and haliax NamedArrays.

    Example:
        >>> import pytest
        >>> nn = pytest.importorskip('flax.linen', reason='flax is not installed')
        >>> import numpy as np
        >>> kernel = nn.Partitioned(np.zeros((4, 8)), names=('embed', 'mlp'))
        >>> axis_names({'params': {'kernel': kernel, 'bias': np.zeros(8)}})
        {'params/kernel/value': ('embed', 'mlp')}
    """
    pairs = zip(NamedTree.of(tree).paths, names_by_leaf(tree), strict=True)
    return {path: names for path, names in pairs if names is not None}


def unbox(tree: Any) -> Any:
    """Returns the tree with values in place of their boxes.

    Leaf paths lose the key of the box: ``params/kernel/value`` becomes ``params/kernel``. Unlike flax's
    ``unbox`` under a mesh, this function does not apply a sharding constraint.

    Args:
        tree: a tree that may contain flax linen boxes, flax nnx variables and haliax NamedArrays.

    Example:
        >>> import pytest
        >>> nn = pytest.importorskip('flax.linen', reason='flax is not installed')
        >>> unbox({'kernel': nn.Partitioned(1.0, names=()), 'bias': 2.0})
        {'bias': 2.0, 'kernel': 1.0}
    """
    return jax.tree.map(lambda node: unbox(_content(node)) if is_box(node) else node, tree, is_leaf=is_box)


def names_by_leaf(tree: Any) -> list[DimensionNames | None]:
    """Returns the dimension names of every leaf, in tree order; None for leaves without names."""
    result: list[DimensionNames | None] = []
    for node in jax.tree.leaves(tree, is_leaf=is_box):
        if is_box(node):
            names = _names(node)
            result.extend(names if inner is None else inner for inner in names_by_leaf(_content(node)))
        else:
            result.append(None)
    return result


def _content(box: Any) -> Any:
    # The attribute differs between libraries and versions, but the pytree node has exactly one child.
    (content,) = jax.tree.leaves(box, is_leaf=lambda node: node is not box)
    return content


def _names(box: Any) -> DimensionNames | None:
    names = names_of_box(box)
    # flax treats empty names like no names.
    return tuple(map(_entry, names)) if names else None


def _entry(entry: Any) -> str | tuple[str, ...] | None:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return None
    return tuple(entry) if isinstance(entry, tuple | list) else str(entry)
