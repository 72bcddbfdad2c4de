"""Differences between the structures of two trees, as text for messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from scalax._core.pytree.paths import join, key_string
from scalax.errors import plural, shown_leaves

IsLeaf = Callable[[Any], bool]


def structure_differences(tree: Any, expected: Any, is_leaf: IsLeaf | None = None) -> str:
    """Lists the nodes at which the structure of a tree differs from the expected one, one per line.

    Args:
        tree: the tree.
        expected: a tree with the expected structure, or a prefix of one.
        is_leaf: marks further leaves of *expected*, as in ``jax.tree.flatten``.

    Example:
        >>> print(
        ...     structure_differences({'layers': [{'w': 1}, {'v': 1}, {'v': 1}]}, {'layers': [{'w': 1}] * 3})
        ... )
          layers/{1,2}: 2 x a dict without 'w', with 'v'
    """
    lines = [(path, _difference_text(*nodes)) for path, *nodes in _differences(expected, tree, is_leaf)]
    if not lines:  # the tree has nodes where leaves are expected
        lines = [
            (path, f'{_node_text(node)} in place of {_node_text(expected_node)}')
            for path, node, expected_node in _differences(tree, expected)
        ]
    return shown_leaves(f'{path or "(the root)"}: {text}' for path, text in lines)


def _differences(
    prefix: Any, tree: Any, is_leaf: IsLeaf | None = None, at: str | None = None
) -> Iterator[tuple[str | None, Any, Any]]:
    """Yields the path and both nodes where *prefix* is not a prefix of *tree*; nothing below such a node."""
    treedef: Any = jax.tree.structure(prefix, is_leaf=is_leaf)
    try:
        treedef.flatten_up_to(tree)
        return
    except ValueError:
        prefixes, subtrees = dict(_children(prefix)), dict(_children(tree))
    differences: list[tuple[str | None, Any, Any]] = []
    if type(prefix) is type(tree) and prefixes.keys() == subtrees.keys():
        for key, child in prefixes.items():
            differences.extend(_differences(child, subtrees[key], is_leaf, join(at, key)))
    yield from differences or [(at, prefix, tree)]


def _difference_text(expected: Any, node: Any) -> str:
    """Describes a node that differs from the expected one."""
    if type(node) is not type(expected) or isinstance(node, list | tuple):
        return f'{_node_text(node)} in place of {_node_text(expected)}'
    expected_keys, keys = dict(_children(expected)), dict(_children(node))
    sides = {
        'without': [key for key in expected_keys if key not in keys],
        'with': [key for key in keys if key not in expected_keys],
    }
    parts = [f'{word} {first_ten(map(repr, names))}' for word, names in sides.items() if names]
    return f'a {type(node).__name__} {", ".join(parts) or "that differs in its static fields"}'


def first_ten(items: Iterable[str]) -> str:
    """Lists at most ten items on one line, and counts the rest."""
    texts = list(items)
    return ', '.join(texts[:10]) + (f' and {len(texts) - 10} more' if len(texts) > 10 else '')


def _node_text(node: Any) -> str:
    """Describes the type and size of a node."""
    if node is None:
        return 'None'
    if jax.tree_util.all_leaves([node]):
        return 'a leaf'
    return f'a {type(node).__name__} with {plural(len(_children(node)), "child", "children")}'


def _children(tree: Any) -> list[tuple[str, Any]]:
    """Returns the keys and values of the direct children of the root of *tree*; empty for a leaf."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    return [(key_string(path[0]), child) for path, child in flat if path]
