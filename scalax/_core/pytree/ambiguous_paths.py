"""Tree structures that do not determine the leaf paths of their trees.

JAX's caches treat trees of equal structure as equal. The leaf paths of such trees are nearly always equal
too: equal keys of dicts have equal texts (`paths`), and most nodes name their children by fields of their
type. But a node may name its children by static data that its comparison ignores, and equal keys of dicts may
print differently. Rules that match leaf paths must not give such a tree the shardings of another one.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import FlattenedIndexKey, GetAttrKey, SequenceKey

from scalax._core.pytree.paths import path_string

_DICTS = (dict, OrderedDict, defaultdict)


Node = tuple[type, Any, int, list[int]]
"""A node whose static data may be equal to data that names children differently.

Its type, its static data, its depth, and the index of the first leaf of each child.
"""


def ambiguous_paths(tree: Any, nodes: Sequence[Node]) -> tuple[str, ...] | None:
    """Returns the leaf paths of a tree if a tree of equal structure may have other ones.

    Returns None if the structure determines the paths.

    Args:
        tree: the tree.
        nodes: the result of `ambiguous_nodes` for its structure.
    """
    if not nodes:
        return None
    keys = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    if all(
        _is_name_determined(kind, static, keys[leaf][depth])
        for kind, static, depth, leaves in nodes
        for leaf in leaves
    ):
        return None
    return tuple(map(path_string, keys))


def ambiguous_nodes(treedef: Any, depth: int = 0, start: int = 0) -> list[Node]:
    """Returns the nodes of a structure that may name their children differently in an equal structure.

    Args:
        treedef: the structure, or a part of one.
        depth: the depth of the part.
        start: the index of the first leaf of the part.
    """
    data, nodes = treedef.node_data(), list[Node]()
    if data is None:
        return nodes
    kind, static = data
    firsts = []
    for child in treedef.children():
        count = child.num_leaves
        if count:
            firsts.append(start)
            if count > 1 or child.num_nodes > 1:
                nodes += ambiguous_nodes(child, depth + 1, start)
        start += count
    # Lists, tuples and dicts with string keys, the common nodes, need no look at their data.
    is_determined = static is None or (kind in _DICTS and {str}.issuperset(map(type, static)))
    if not is_determined and not _equality_implies_same_text(static, are_keys=kind in _DICTS):
        nodes.append((kind, static, depth, firsts))
    return nodes


def _equality_implies_same_text(static: Any, are_keys: bool) -> bool:
    """Returns whether all values equal to *static* have the same text; equal numbers do if they are keys."""
    if isinstance(static, tuple | list):
        are_keys = are_keys and isinstance(static, list)
        return all(_equality_implies_same_text(item, are_keys) for item in static)
    if isinstance(static, bool | int | float | np.generic):
        return are_keys
    kind: Any = type(static)
    return isinstance(static, str | bytes | type | None) or kind.__eq__ is object.__eq__


def _is_name_determined(kind: type, static: Any, key: Any) -> bool:
    """Returns whether data that JAX compares, or the type of a node, determines the name of a child."""
    if isinstance(key, SequenceKey | FlattenedIndexKey):
        return True
    name: Any = getattr(key, 'name', getattr(key, 'key', None))
    if isinstance(key, GetAttrKey) and _has_field(kind, str(name)):
        return True
    return isinstance(name, bool | int | float | np.generic) or name in _strings(static)


def _has_field(kind: type, name: str) -> bool:
    return hasattr(kind, name) or name in getattr(kind, '__dataclass_fields__', ())


def _strings(static: Any) -> Iterator[str]:
    if isinstance(static, str):
        yield static
    elif isinstance(static, tuple | list | set | frozenset | dict):
        for item in static:
            yield from _strings(item)
