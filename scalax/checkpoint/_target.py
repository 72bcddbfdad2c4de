"""The target of a restore: the leaves of `like`, their shardings, and whether a checkpoint has them."""

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
    """What a restore asks for.

    Attributes:
        wanted: by leaf path, a struct with a sharding, or the type of a Python number.
        tree: `like`, flattened, with structs in place of what a function would make.
    """

    wanted: dict[str, Any]
    tree: NamedTree

    def texts(self) -> Iterator[tuple[str, str]]:
        """By path, what has to be the same on every process."""
        return ((path, placed_text(leaf)) for path, leaf in self.wanted.items())

    def fill(self, values: Mapping[str, Any]) -> Any:
        """`like` with restored values, by path, in place of the leaves that were asked for."""
        leaves = zip(self.tree.paths, self.tree.leaves, strict=True)
        return self.tree.treedef.unflatten([values.get(path, leaf) for path, leaf in leaves])


def target_of(helper: MeshShardingHelper, rules: RuleLike, like: Any, only: str | None) -> Target:
    """Resolves rules for the tree that *like* is, or makes; nothing is computed.

    Raises:
        CheckpointError: two leaves have the same path, or *only* matches no leaf.
        ArgumentError: *only* is not a regex.
        ShardingError: some leaves cannot be sharded as asked.
    """
    made = is_function(like)
    pytree = jax.eval_shape(like) if made else like
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
    wanted = {
        path: struct
        for path, struct in zip(tree.paths, structs, strict=True)
        if only is None or re.search(only, path)
    }
    return Target(wanted, dataclasses.replace(tree, leaves=structs) if made else tree)


def is_function(like: Any) -> bool:
    """Whether *like* makes a tree, rather than being one: modules of equinox are trees that can be called."""
    return callable(like) and (
        isinstance(like, functools.partial) or jax.tree_util.treedef_is_leaf(jax.tree.structure(like))
    )


def require_distinct(paths: Sequence[str], what: str) -> None:
    """Raises CheckpointError if two leaves have the same path: a checkpoint could not tell them apart."""
    twice = [path for path, count in Counter(paths).items() if count > 1]
    if twice:
        raise CheckpointError(
            f'{what} has several leaves with the same path: {", ".join(map(repr, twice[:10]))}. Rename some '
            'of their keys: a checkpoint finds leaves by their paths'
        )


def renamed_paths(paths: Iterable[str], rename: Sequence[tuple[Any, ...]], where: str) -> dict[str, str]:
    """The path of each leaf in the checkpoint, by its new path: the first regex that is found is applied.

    Raises:
        CheckpointError: two leaves get the same path.
        ArgumentError: a replacement does not fit its regex.

    Example:
        >>> renamed_paths(['model/w', 'step'], [(re.compile('^model/'), 'params/')], '')
        {'params/w': 'model/w', 'step': 'step'}
    """
    old: dict[str, str] = {}
    for path in paths:
        renamed = (substitute('rename', regex, to, path) for regex, to in rename if regex.search(path))
        new = next(renamed, path)
        if new in old:
            raise CheckpointError(
                f'rename gives two leaves of {where} the same path: {old[new]!r} and {path!r} become {new!r}'
            )
        old[new] = path
    return old


def require_fit(
    wanted: Mapping[str, Any], saved: Mapping[str, Any], cast: bool, partial: bool, where: str
) -> None:
    """Checks that a checkpoint holds the tree that a restore asks for.

    Args:
        wanted: by path, structs, or the types of Python numbers.
        saved: the same of the checkpoint, of typed keys the data.
        cast: whether dtypes may differ.
        partial: whether the checkpoint may hold more.
        where: the checkpoint, for the message.

    Raises:
        CheckpointError: names every leaf that is missing, extra, or of another shape or dtype.
    """
    found = []
    for path, target in wanted.items():
        if path not in saved:
            found.append(f'{path}: {_text(target)} is missing')
            continue
        (shape, dtype), (saved_shape, saved_dtype) = _as_saved(target), _as_saved(saved[path])
        if shape != saved_shape or (dtype != saved_dtype and not cast):
            found.append(f'{path}: {_text(target)} was requested, but {_text(saved[path])} was saved')
    if not partial:
        found += [
            f'{path}: {_text(saved[path])} is only in the checkpoint' for path in saved if path not in wanted
        ]
    if found:
        raise CheckpointError(
            f'{where} does not match the requested tree:\n{shown_leaves(found)}\n'
            'What to do: give like as it was when the checkpoint was saved (describe(step) lists the '
            'leaves), or rename=[(regex, replacement)] for other paths, only=regex to restore '
            'some leaves, cast=True to convert dtypes.'
        )


def _text(leaf: Any) -> str:
    return f'Python {leaf.__name__}' if isinstance(leaf, type) else type_text(leaf.dtype, leaf.shape)


def _as_saved(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """The shape and the dtype in which Orbax has a leaf."""
    if isinstance(leaf, type):
        return (), canonical_dtype(leaf)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return leaf.shape, leaf.dtype
