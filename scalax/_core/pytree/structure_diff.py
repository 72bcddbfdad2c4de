"""Where two trees differ in their structure, and how messages say it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from scalax._core.pytree.paths import join, key_string
from scalax.errors import plural, shown_leaves

IsLeaf = Callable[[Any], bool]


def structure_differences(given: Any, wanted: Any, is_leaf: IsLeaf | None = None) -> str:
    """Lists where a tree has another structure than the one wanted, one place a line.

    Args:
        given: the tree.
        wanted: the tree whose structure is wanted, or one that has leaves in place of some of its subtrees.
        is_leaf: what is a leaf of *wanted* in addition, as in ``jax.tree.flatten``.

    Example:
        >>> print(
        ...     structure_differences({'layers': [{'w': 1}, {'v': 1}, {'v': 1}]}, {'layers': [{'w': 1}] * 3})
        ... )
          layers/{1,2}: 2 x a dict without 'w', with 'v'
    """
    found = [(path, _in_place_of(*nodes)) for path, *nodes in _differences(wanted, given, is_leaf)]
    if not found:  # the given tree has nodes where leaves are wanted
        found = [
            (path, f'{_node_text(mine)} in place of {_node_text(theirs)}')
            for path, mine, theirs in _differences(given, wanted)
        ]
    return shown_leaves(f'{path or "(the root)"}: {text}' for path, text in found)


def _differences(
    prefix: Any, tree: Any, is_leaf: IsLeaf | None = None, at: str | None = None
) -> Iterator[tuple[str | None, Any, Any]]:
    """The places where *prefix* is not a prefix of *tree*, with both nodes; nothing below such a place."""
    treedef: Any = jax.tree.structure(prefix, is_leaf=is_leaf)
    try:
        treedef.flatten_up_to(tree)
        return
    except ValueError:
        mine, theirs = dict(_children(prefix)), dict(_children(tree))
    found: list[tuple[str | None, Any, Any]] = []
    if type(prefix) is type(tree) and mine.keys() == theirs.keys():
        for key, child in mine.items():
            found.extend(_differences(child, theirs[key], is_leaf, join(at, key)))
    yield from found or [(at, prefix, tree)]


def _in_place_of(wanted: Any, given: Any) -> str:
    """What the second tree has in a place where the first one is wanted."""
    if type(given) is not type(wanted) or isinstance(given, list | tuple):
        return f'{_node_text(given)} in place of {_node_text(wanted)}'
    mine, theirs = dict(_children(wanted)), dict(_children(given))
    sides = {
        'without': [key for key in mine if key not in theirs],
        'with': [key for key in theirs if key not in mine],
    }
    parts = [f'{word} {first_ten(map(repr, keys))}' for word, keys in sides.items() if keys]
    return f'a {type(given).__name__} {", ".join(parts) or "that differs in its static fields"}'


def first_ten(items: Iterable[str]) -> str:
    """At most ten of them on one line, and how many more there are."""
    texts = list(items)
    return ', '.join(texts[:10]) + (f' and {len(texts) - 10} more' if len(texts) > 10 else '')


def _node_text(node: Any) -> str:
    """The kind and size of a node, as messages show it."""
    if node is None:
        return 'None'
    if jax.tree_util.all_leaves([node]):
        return 'a leaf'
    return f'a {type(node).__name__} with {plural(len(_children(node)), "child", "children")}'


def _children(tree: Any) -> list[tuple[str, Any]]:
    """The nodes right below the root of *tree*, with their keys; empty for a leaf."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    return [(key_string(path[0]), child) for path, child in flat if path]
