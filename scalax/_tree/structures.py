"""Where two trees differ in their structure, and how messages say it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from scalax._tree.paths import join, key_string
from scalax._util.folding import MOST_RUNS, Fold, fold
from scalax.errors import plural, shown_leaves

IsLeaf = Callable[[Any], bool]


@dataclasses.dataclass(frozen=True, eq=False)
class Difference:
    """A place where two trees differ, though the nodes above it are the same.

    Attributes:
        path: where it is; None is the root.
        prefix: the node of the first tree.
        tree: the node of the second tree.
        missing: keys of the second node that the first has not.
        extra: keys of the first node that the second has not.
    """

    path: str | None
    prefix: Any
    tree: Any
    missing: tuple[str, ...]
    extra: tuple[str, ...]

    @property
    def fields(self) -> str:
        """The fields of the two nodes that differ and are no children, in brackets, where they compare."""
        nodes = self.prefix, self.tree
        known = dataclasses.fields(self.prefix) if dataclasses.is_dataclass(self.prefix) else ()
        names = [field.name for field in known if field.name not in dict(children(self.prefix))]
        found = [name for name in names if _differ(*(getattr(node, name, None) for node in nodes))]
        return f' ({", ".join(found)})' if found else ''


def differences(
    prefix: Any, tree: Any, is_leaf: IsLeaf | None = None, at: str | None = None
) -> Iterator[Difference]:
    """The places where *prefix* is not a prefix of *tree*, in order; nothing below such a place.

    Args:
        prefix: a tree. Each of its leaves stands for any subtree of the other.
        tree: the other tree.
        is_leaf: what is a leaf of *prefix* in addition, as in ``jax.tree.flatten``.
        at: the path of both in larger trees.

    Example:
        >>> [found.path for found in differences({'a': 1, 'b': (1, 2)}, {'a': [1], 'b': [1, 2]})]
        ['b']
    """
    treedef: Any = jax.tree.structure(prefix, is_leaf=is_leaf)
    try:
        treedef.flatten_up_to(tree)
        return
    except ValueError:
        mine, theirs = dict(children(prefix)), dict(children(tree))
    missing = tuple(key for key in theirs if key not in mine)
    extra = tuple(key for key in mine if key not in theirs)
    found: list[Difference] = []
    if type(prefix) is type(tree) and not missing and not extra:
        for key, child in mine.items():
            found.extend(differences(child, theirs[key], is_leaf, join(at, key)))
    yield from found or [Difference(at, prefix, tree, missing, extra)]


def folded(found: Iterable[tuple[Difference, str]]) -> list[tuple[str, str]]:
    """Differences, each with a text, as (place, text); one for those that are alike in many layers.

    Example:
        >>> found = differences({'layers': [{'w': 1}, {'w': 1}]}, {'layers': [{'v': 1}, {'v': 1}]})
        >>> folded((each, 'another key') for each in found)
        [("at 'layers/{0,1}' (2 places)", 'another key')]
    """
    rows = list(found)
    # The root has no path, and an empty key has an empty one.
    folds = fold((each.path or '', (each.path is None, text)) for each, text in rows)
    return [(_place(item, rows[item.first][0]), rows[item.first][1]) for item in folds]


def _place(item: Fold, first: Difference) -> str:
    if first.path is None:
        return 'at its root'
    many = f' ({plural(item.count, "place")})' if item.count > 1 else ''
    return f'at {item.short_name(MOST_RUNS)!r}{many}'


def shown_differences(given: Any, wanted: Any) -> str:
    """Lists where a tree has another structure than the one wanted, one place a line.

    Example:
        >>> print(shown_differences({'layers': [{'w': 1}, {'v': 1}, {'v': 1}]}, {'layers': [{'w': 1}] * 3}))
          layers/{1,2}: 2 x a dict without 'w', with 'v'
    """
    found = [(each.path, _in_place_of(each)) for each in differences(wanted, given)]
    if not found:  # the given tree has nodes where leaves are wanted
        found = [
            (each.path, f'{node_text(each.prefix)} in place of {node_text(each.tree)}')
            for each in differences(given, wanted)
        ]
    return shown_leaves(f'{path or "(the root)"}: {text}' for path, text in found)


def _in_place_of(found: Difference) -> str:
    """What the second tree has in a place where the first one is wanted."""
    wanted, given = found.prefix, found.tree
    if type(given) is not type(wanted) or isinstance(given, list | tuple):
        return f'{node_text(given)} in place of {node_text(wanted)}'
    kind = f'a {type(given).__name__}'
    if found.missing or found.extra:
        sides = (('without', found.extra), ('with', found.missing))
        return f'{kind} {", ".join(f"{word} {first_ten(map(repr, keys))}" for word, keys in sides if keys)}'
    return f'{kind} that differs in its static fields{found.fields}'


def first_ten(items: Iterable[str]) -> str:
    """At most ten of them on one line, and how many more there are."""
    texts = list(items)
    return ', '.join(texts[:10]) + (f' and {len(texts) - 10} more' if len(texts) > 10 else '')


def node_text(node: Any) -> str:
    """The kind and size of a node, as messages show it."""
    if node is None:
        return 'None'
    if jax.tree_util.all_leaves([node]):
        return 'a leaf'
    return f'a {type(node).__name__} with {plural(len(children(node)), "child", "children")}'


def children(tree: Any) -> list[tuple[str, Any]]:
    """The nodes right below the root of *tree*, with their keys; empty for a leaf."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    return [(key_string(path[0]), child) for path, child in flat if path]


def _differ(one: Any, other: Any) -> bool:
    try:
        return bool(one != other)
    except Exception:  # noqa: BLE001 - a user's comparison
        return one is not other
