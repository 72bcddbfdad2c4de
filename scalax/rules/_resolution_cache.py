"""The shardings of the trees that were resolved last, remembered."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from scalax._tree.path_identity import uncertain_nodes, uncertain_paths
from scalax.rules._indivisible import OnIndivisible
from scalax.rules._prefix import RuleLike, are_pure, key_of
from scalax.rules._resolve import resolve
from scalax.rules._rule import is_rule


@dataclasses.dataclass(eq=False)
class KnownTree:
    """A tree that was resolved.

    Attributes:
        rules: what `key_of` gave for the rules.
        treedef: its structure.
        signature: the shapes and dtypes of its leaves; None where some have none, as Python scalars.
        shardings: those of its leaves.
        certain: whether trees of this structure have the same paths; None if not known yet.
    """

    rules: Any
    treedef: Any
    signature: list[Any] | None
    shardings: list[NamedSharding | None]
    certain: bool | None = None

    def serves(self, pytree: Any, treedef: Any, signature: list[Any] | None) -> bool:
        """Whether a tree has these shardings, for the same rules."""
        if self.treedef != treedef or self.signature != signature:
            return False
        if self.certain is None:
            self.certain = uncertain_paths(pytree, uncertain_nodes(treedef)) is None
        return self.certain


_REMEMBERED = 16  # trees


class ResolutionCache:
    """Remembers the shardings of the trees resolved last on a mesh, for rules whose answers never change.

    Entries are found by comparison, not by hash: comparing two equal lists of shapes costs a pointer
    comparison an item, hashing them costs several times that on a tree of 100,000 leaves. Trees whose
    structure does not determine their leaf paths are resolved each time.

    Args:
        mesh: the mesh.
        on_indivisible: the policy of bare specs.
    """

    def __init__(self, mesh: Mesh | AbstractMesh, on_indivisible: OnIndivisible) -> None:
        self._mesh, self._on_indivisible = mesh, on_indivisible
        self._entries: tuple[KnownTree, ...] = ()

    def find(self, rules: RuleLike, pytree: Any) -> KnownTree:
        """The shardings and the structure of a tree; from memory where rules, shapes and dtypes are known."""
        key = key_of(rules)
        # Objects that are not rules may have no usable ==; `resolve` raises about them.
        comparable = all(map(is_rule, jax.tree.leaves(rules, is_leaf=is_rule)))
        entries = [entry for entry in self._entries if comparable and entry.rules == key]
        if entries:
            leaves, treedef = jax.tree.flatten(pytree)
            signature = _signature(leaves)
            for entry in entries:
                if entry.serves(pytree, treedef, signature):
                    return entry
        found = resolve(rules, pytree, self._mesh, on_indivisible=self._on_indivisible)
        known = KnownTree(key, found.treedef, _signature(found.tree.leaves), found.shardings)
        if known.signature is not None and self._on_indivisible != 'warn' and are_pure(rules):
            # A new tuple each time: a reader in another thread sees the old one or the new one, whole.
            self._entries = (known, *self._entries[: _REMEMBERED - 1])
        return known


def _signature(leaves: Sequence[Any]) -> list[Any] | None:
    try:
        return list(map(operator.attrgetter('shape', 'dtype'), leaves))
    except AttributeError:
        return None
