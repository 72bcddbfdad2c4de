"""Target of a restore: the leaves of *like* with their shardings, and checks against a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from scalax._core.pytree.paths import NamedTree, canonical_dtype, is_weakly_typed, type_text
from scalax._data.host.agreement import placed_text
from scalax._data.reshard.leaf_mapping import substitute
from scalax.errors import ArgumentError, CheckpointError, shown_leaves
from scalax.rules._tree_path import checked_regex

if TYPE_CHECKING:
    from scalax._helper import MeshShardingHelper
    from scalax.rules import RuleLike


@dataclasses.dataclass(frozen=True)
class Target:
    """The tree to restore.

    Attributes:
        leaves: leaf path -> a struct with a sharding, or the type of a Python number; only the leaves to
            restore.
        tree: the flattened tree *like*. If *like* is a function, its leaves are structs.
    """

    leaves: dict[str, Any]
    tree: NamedTree

    def agreement_texts(self) -> Iterator[tuple[str, str]]:
        """Returns (leaf path, text that must be the same on every process) for each leaf."""
        return ((path, placed_text(leaf)) for path, leaf in self.leaves.items())

    def fill(self, values: Mapping[str, Any]) -> Any:
        """Returns the tree *like*, with leaves replaced by the restored values (by path)."""
        leaves = zip(self.tree.paths, self.tree.leaves, strict=True)
        return self.tree.treedef.unflatten([values.get(path, leaf) for path, leaf in leaves])


def target_of(helper: MeshShardingHelper, rules: RuleLike, like: Any, only: str | None) -> Target:
    """Resolves rules for the tree *like*, or for the tree that the function *like* returns.

    Raises:
        CheckpointError: two leaves have the same path, or *only* matches no leaf.
        ArgumentError: *only* is not a regex.
        ShardingError: some leaves cannot be sharded by the rules.
    """
    from_function = is_function(like)
    pytree = jax.eval_shape(like) if from_function else like
    tree = NamedTree.of(pytree)
    require_distinct(tree.paths, 'like')
    shardings = jax.tree.leaves(helper.match_sharding_rule(rules, pytree))
    if only is not None:
        checked_regex('only', only, ArgumentError)
        if tree.paths and not any(re.search(only, path) for path in tree.paths):
            raise CheckpointError(
                f'only={only!r} matches no leaf path of like, so nothing would be restored:\n'
                f'{shown_leaves(tree.paths)}'
            )
    structs = [
        jax.ShapeDtypeStruct(
            leaf.shape, canonical_dtype(leaf.dtype), sharding=sharding, weak_type=is_weakly_typed(leaf)
        )
        if hasattr(leaf, 'dtype')
        else type(leaf)
        for leaf, sharding in zip(tree.leaves, shardings, strict=True)
    ]
    leaves = {
        path: struct
        for path, struct in zip(tree.paths, structs, strict=True)
        if only is None or re.search(only, path)
    }
    return Target(leaves, dataclasses.replace(tree, leaves=structs) if from_function else tree)


def is_function(like: Any) -> bool:
    """Returns whether *like* is a function, and not a callable tree such as a module of equinox."""
    return callable(like) and (
        isinstance(like, functools.partial) or jax.tree_util.treedef_is_leaf(jax.tree.structure(like))
    )


def require_distinct(paths: Sequence[str], noun: str) -> None:
    """Raises CheckpointError if two leaves have the same path, which a checkpoint cannot distinguish."""
    repeated = [path for path, count in Counter(paths).items() if count > 1]
    if repeated:
        raise CheckpointError(
            f'{noun} has several leaves with the same path: {", ".join(map(repr, repeated[:10]))}. '
            'Rename some of their keys: a checkpoint finds leaves by their paths'
        )


def renamed_paths(paths: Iterable[str], rename: Sequence[tuple[Any, ...]], where: str) -> dict[str, str]:
    """Returns new path -> path in the checkpoint; the first regex that is found in a path is applied to it.

    Raises:
        CheckpointError: two leaves get the same path.
        ArgumentError: a replacement does not fit its regex.

    Example:
        >>> renamed_paths(['model/w', 'step'], [(re.compile('^model/'), 'params/')], '')
        {'params/w': 'model/w', 'step': 'step'}
    """
    old_paths: dict[str, str] = {}
    for path in paths:
        matches = (
            substitute('rename', regex, replacement, path)
            for regex, replacement in rename
            if regex.search(path)
        )
        new_path = next(matches, path)
        if new_path in old_paths:
            raise CheckpointError(
                f'rename gives two leaves of {where} the same path: {old_paths[new_path]!r} and {path!r} '
                f'become {new_path!r}'
            )
        old_paths[new_path] = path
    return old_paths


def require_fit(
    targets: Mapping[str, Any], saved: Mapping[str, Any], cast: bool, partial: bool, where: str
) -> None:
    """Checks that a checkpoint has the leaves of a target.

    Args:
        targets: leaf path -> a struct, or the type of a Python number.
        saved: the same for the leaves of the checkpoint, where typed keys are structs of their data.
        cast: whether dtypes may differ.
        partial: whether the checkpoint may have other leaves.
        where: the name of the checkpoint, for the message.

    Raises:
        CheckpointError: lists all leaves that are missing, extra, or of another shape or dtype.
    """
    faults = []
    for path, target in targets.items():
        if path not in saved:
            faults.append(f'{path}: {_text(target)} is missing')
            continue
        (shape, dtype), (saved_shape, saved_dtype) = _saved_type(target), _saved_type(saved[path])
        if shape != saved_shape or (dtype != saved_dtype and not cast):
            faults.append(f'{path}: {_text(target)} was requested, but {_text(saved[path])} was saved')
    if not partial:
        faults += [
            f'{path}: {_text(saved[path])} is only in the checkpoint' for path in saved if path not in targets
        ]
    if faults:
        raise CheckpointError(
            f'{where} does not match the requested tree:\n{shown_leaves(faults)}\n'
            'What to do: give like as it was when the checkpoint was saved (describe(step) lists the '
            'leaves), or rename=[(regex, replacement)] for other paths, only=regex to restore '
            'some leaves, cast=True to convert dtypes.'
        )


def _text(leaf: Any) -> str:
    return f'Python {leaf.__name__}' if isinstance(leaf, type) else type_text(leaf.dtype, leaf.shape)


def _saved_type(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Returns the shape and dtype with which Orbax saves a leaf."""
    if isinstance(leaf, type):
        return (), canonical_dtype(leaf)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return leaf.shape, leaf.dtype
