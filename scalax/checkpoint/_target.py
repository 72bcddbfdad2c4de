"""What does a restore ask for? The leaves of `like`, each with the sharding that the rules give it here."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from scalax._tree.paths import NamedTree, canonical_dtype
from scalax.errors import ArgumentError, CheckpointError, shown
from scalax.rules._tree_path import checked_regex

if TYPE_CHECKING:
    from scalax._helper import MeshShardingHelper
    from scalax.rules._prefix import RuleLike


@dataclasses.dataclass(frozen=True)
class Target:
    """What is asked for.

    Attributes:
        wanted: by leaf path, a struct with a sharding, or the type of a Python number.
        rest: by leaf path, the leaves of `like` that are not to be restored.
        tree: `like`, laid flat.
    """

    wanted: dict[str, Any]
    rest: dict[str, Any]
    tree: NamedTree

    def filled(self, values: dict[str, Any]) -> Any:
        """`like` with values in place of what was asked for."""
        return self.tree.treedef.unflatten(
            [values[path] if path in self.wanted else self.rest[path] for path in self.tree.paths]
        )


def target_of(helper: MeshShardingHelper, rules: RuleLike, like: Any, only: str | None) -> Target:
    """Resolves rules for the tree that *like* is, or makes; nothing is computed.

    Raises:
        CheckpointError: two leaves have one path, or *only* chooses none.
        ArgumentError: *only* is no regex, or *like* a function with arguments.
        ShardingError: some leaves cannot be sharded as asked.
    """
    made = is_function(like)
    if made:
        _require_no_arguments(like)
    pytree = jax.eval_shape(like) if made else like
    tree = NamedTree.of(pytree)
    require_distinct(tree.paths, 'like')
    shardings = jax.tree.leaves(helper.match_sharding_rule(rules, pytree))
    if only is not None:
        checked_regex('only', only, ArgumentError)
        if tree.paths and not any(re.search(only, path) for path in tree.paths):
            raise CheckpointError(
                f'only={only!r} is found in no leaf path of like, so that nothing would be restored:\n'
                f'{shown(tree.paths)}'
            )
    wanted: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for path, leaf, sharding in zip(tree.paths, tree.leaves, shardings, strict=True):
        struct = _struct(leaf, sharding) if hasattr(leaf, 'dtype') else type(leaf)
        if only is None or re.search(only, path):
            wanted[path] = struct
        else:
            rest[path] = struct if made else leaf
    return Target(wanted, rest, tree)


def _require_no_arguments(function: Any) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of something built in, nothing is known
        return
    try:
        signature.bind()
    except TypeError as error:
        raise ArgumentError(
            f'restore: like is a function without arguments that makes the tree, and {error}. Bind arguments '
            'with functools.partial'
        ) from None


def _struct(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, canonical_dtype(leaf.dtype), sharding=sharding)


def is_function(like: Any) -> bool:
    """Whether *like* makes a tree, rather than being one; modules of equinox are trees that can be called."""
    return callable(like) and (
        isinstance(like, functools.partial) or jax.tree_util.treedef_is_leaf(jax.tree.structure(like))
    )


def require_distinct(paths: Sequence[str], what: str) -> None:
    """Raises CheckpointError if two leaves have one path: they could not be told apart on the disk."""
    if len(set(paths)) == len(paths):
        return
    twice = [path for path in dict.fromkeys(paths) if list(paths).count(path) > 1]
    raise CheckpointError(
        f'{what} has several leaves with one path: {", ".join(map(repr, twice[:10]))}. Rename some of their '
        'keys: a checkpoint finds leaves by their paths'
    )
