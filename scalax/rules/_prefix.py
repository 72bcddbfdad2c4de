"""Trees of rules, matched with the trees that they are for.

A tree of rules is a *prefix* of the tree it is for, as in JAX: a rule at a node decides about the whole
subtree below. One rule is a ShardingRule, a PartitionSpec, a NamedSharding, or None.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Protocol, TypeAlias

import jax

from scalax._tree.paths import leaf_shape, leaf_text, optional_path
from scalax._tree.structures import Difference, children, differences, first_ten, folded, node_text
from scalax.errors import ScalaxError, StructureError, did_you_mean
from scalax.rules._answer import short
from scalax.rules._rule import Rule, ShardingRule, is_pure, is_rule

_REGEX = re.compile(r'[*+?^$|\\()\[\]]')


class SequenceNode(Protocol):
    """A list, a tuple or a named tuple of rules; not a string, which contains nothing but strings."""

    def __contains__(self, value: object, /) -> bool: ...

    def __reversed__(self) -> Iterator[RuleLike]: ...


class DataclassNode(Protocol):
    """A dataclass that is a pytree node, such as a train state, with rules in its fields."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


class FlattenedNode(Protocol):
    """A node of a class registered by ``jax.tree_util.register_pytree_node_class``."""

    def tree_flatten(self) -> Any: ...


RuleLike: TypeAlias = Rule | SequenceNode | Mapping[Any, 'RuleLike'] | DataclassNode | FlattenedNode
"""One rule, or a pytree of rules, which is a prefix of the tree that they are for."""


@dataclasses.dataclass(frozen=True)
class Subtree:
    """A subtree and the one rule that decides about it.

    Attributes:
        rule: the rule.
        path: the path of the subtree; None is the root.
        tree: the subtree itself.
    """

    rule: Rule
    path: str | None
    tree: Any


def key_of(rules: RuleLike) -> Any:
    """A hashable stand-in for a tree of rules: equal for equal rules."""
    if is_rule(rules):
        return rules
    leaves, treedef = jax.tree.flatten(rules, is_leaf=is_rule)
    return tuple(leaves), treedef


def are_pure(rules: RuleLike) -> bool:
    """Whether rules always give the same answers."""
    leaves = jax.tree.leaves(rules, is_leaf=is_rule)
    return all(map(is_pure, [rule for rule in leaves if isinstance(rule, ShardingRule)]))


def split(
    rules: RuleLike, pytree: Any, where: str = '', error: type[ScalaxError] = StructureError
) -> list[Subtree]:
    """Pairs each rule of a prefix tree with its subtree of *pytree*.

    Args:
        rules: a rule or a pytree prefix of rules.
        pytree: the tree they are for.
        where: what the tree is called in messages, such as ``"argument 'state'"``.
        error: what is raised about a leaf of *rules* that is not a rule.

    Raises:
        StructureError: the trees differ, or a leaf of *rules* is not a rule; the message has the path.
    """
    if is_rule(rules):
        return [Subtree(rules, None, pytree)]
    flat = check(rules, where, error)
    treedef: Any = jax.tree.structure(rules, is_leaf=is_rule)
    try:
        subtrees = treedef.flatten_up_to(pytree)
    except ValueError:
        _explain(rules, pytree, where)
        raise
    return [
        Subtree(rule, optional_path(path), subtree)
        for (path, rule), subtree in zip(flat, subtrees, strict=True)
    ]


def check(
    rules: RuleLike, where: str = '', error: type[ScalaxError] = StructureError
) -> list[tuple[Any, Any]]:
    """The leaves of a tree of rules with their paths.

    Raises:
        StructureError: a leaf is not a rule.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(rules, is_leaf=is_rule)
    for path, rule in flat:
        if not is_rule(rule):
            raise error(_not_a_rule(rule, optional_path(path), where, in_pairs=_are_pairs(rules)))
    return flat


def _are_pairs(rules: Any) -> bool:
    """Whether pairs of a regex and a rule stand where rules should."""
    return isinstance(rules, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str) and is_rule(pair[1])
        for pair in rules
    )


def _of(where: str) -> str:
    return f' of {where}' if where else ''


def _not_a_rule(value: Any, path: str | None, where: str, in_pairs: bool) -> str:
    """The message about a value that is not a rule, with a hint about what was meant."""
    hint, got = '', short(value)
    if in_pairs:
        hint = '; pairs of a regex and a rule are for TreePathShardingRule((regex, rule), ...)'
    elif isinstance(value, type) and issubclass(value, ShardingRule):
        hint = f'; this is the class: write {value.__name__}(...)'
    elif isinstance(value, str):
        hint = f'; write PartitionSpec({value!r})'
    elif inspect.isfunction(value):
        hint = '; a function of leaf path and leaf is for PolicyShardingRule(function)'
    elif type(value).__name__ in ('Format', 'Layout'):  # of jax.experimental.layout
        hint = '; memory layouts are for jax.jit, around the function that sjit returns'
    elif isinstance(value, jax.sharding.Sharding):
        hint = "; only NamedShardings of the helper's mesh are taken"
    elif hasattr(value, 'shape') and leaf_shape(value) is not None:
        got = leaf_text(value)
        hint = '; are the tree and the rules the wrong way round?'
    return (
        f'the rules{_of(where)} hold {got} of type {type(value).__name__}'
        f'{"" if path is None else f" at {path!r}"}, which is not a rule: give a ShardingRule, a '
        f'PartitionSpec, a NamedSharding or None{hint}'
    )


def _explain(rules: Any, tree: Any, where: str) -> None:
    """Raises about the places where the two trees differ."""
    places = folded((found, _why(found)) for found in differences(rules, tree, is_rule))
    if not places:
        return
    place, why = places[0]
    others = f'\nThey also differ {first_ten(place for place, _ in places[1:])}.' if places[1:] else ''
    of = _of(where) or ' of the tree'
    raise StructureError(f'the rules do not have the structure{of} {place}: {why}{others}')


def _why(found: Difference) -> str:
    """What differs in a place, and what to do about it."""
    if type(found.prefix) is not type(found.tree):
        return (
            f'the rules hold {node_text(found.prefix)} there, the tree holds {node_text(found.tree)}. '
            'Give one rule for the whole subtree, or a tree of rules with the same nodes.'
        )
    if not found.missing and not found.extra:
        return (
            f'the {type(found.prefix).__name__} there differs in its static fields{found.fields}. '
            'Give one rule for the whole subtree, or make the tree of rules of the tree itself '
            '(jax.tree.map, tree.replace).'
        )
    parts = [f'there is no rule for {first_ten(map(repr, found.missing))}'] if found.missing else []
    if found.extra:
        known = dict(children(found.tree))
        near = (f'{key!r} ({did_you_mean(key, known)})' for key in found.extra)
        parts.append(f'the tree has nothing called {first_ten(near)}')
    why = f'{"; ".join(parts)}. Give one rule for each subtree (in sjit, None leaves one to the compiler).'
    if any(_REGEX.search(key) for key in found.extra):
        why += ' Regexes on paths are for TreePathShardingRule((regex, rule), ...).'
    return why
