"""Trees of rules, and how they match the trees that they apply to.

A tree of rules is a *prefix* of the tree it applies to, as in JAX: a rule at a node decides about the entire
subtree below it. One rule is a ShardingRule, a PartitionSpec, a NamedSharding, or None.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Protocol, TypeAlias

import jax

from scalax._core.pytree.paths import leaf_shape, leaf_text, optional_path
from scalax._core.pytree.structure_diff import structure_differences
from scalax.errors import ScalaxError, StructureError
from scalax.rules._answer import short_repr
from scalax.rules._rule import Rule, ShardingRule, is_pure, is_rule

_FIRST_OF_A_PAIR = re.compile(r'\d+/0')  # the path of a regex in a sequence of (regex, rule) pairs


class SequenceNode(Protocol):
    """A list, a tuple or a named tuple of rules. A string, which contains only strings, does not match."""

    def __contains__(self, value: object, /) -> bool: ...

    def __reversed__(self) -> Iterator[RuleLike]: ...


class DataclassNode(Protocol):
    """A dataclass that is a pytree node, such as a train state, with rules in its fields."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


class FlattenedNode(Protocol):
    """A node of a class registered by ``jax.tree_util.register_pytree_node_class``."""

    def tree_flatten(self) -> Any: ...


RuleLike: TypeAlias = Rule | SequenceNode | Mapping[Any, 'RuleLike'] | DataclassNode | FlattenedNode
"""One rule, or a pytree of rules that is a prefix of the tree it applies to."""


@dataclasses.dataclass(frozen=True)
class Subtree:
    """A subtree and the one rule that decides about it.

    Attributes:
        rule: the rule.
        path: the path of the subtree; None for the root.
        tree: the subtree.
    """

    rule: Rule
    path: str | None
    tree: Any


def cache_key(rules: RuleLike) -> Any:
    """Returns a key for a tree of rules: equal for equal rules, and hashable if they are."""
    if is_rule(rules):
        return rules
    leaves, treedef = jax.tree.flatten(rules, is_leaf=is_rule)
    return tuple(leaves), treedef


def are_pure(rules: RuleLike) -> bool:
    """Whether all rules of a tree are pure; see `ShardingRule.is_pure`."""
    leaves = jax.tree.leaves(rules, is_leaf=is_rule)
    return all(map(is_pure, [rule for rule in leaves if isinstance(rule, ShardingRule)]))


def match_subtrees(
    rules: RuleLike, pytree: Any, where: str = '', error: type[ScalaxError] = StructureError
) -> list[Subtree]:
    """Pairs each rule of a prefix tree with its subtree of *pytree*.

    Args:
        rules: a rule or a pytree prefix of rules.
        pytree: the tree they apply to.
        where: the name of the tree in messages, such as ``"argument 'state'"``.
        error: the class of the error about a leaf of *rules* that is not a rule.

    Raises:
        StructureError: the trees differ, or a leaf of *rules* is not a rule; the message has the path.
    """
    if is_rule(rules):
        return [Subtree(rules, None, pytree)]
    flat_rules, treedef = _flatten_rules(rules, where, error)
    try:
        subtrees = treedef.flatten_up_to(pytree)
    except ValueError:
        raise StructureError(
            f'the rules{_of(where)} do not match the structure of the tree. Where they differ, '
            f'the tree has:\n{structure_differences(pytree, rules, is_rule)}\n'
            'What to do: give one rule for each subtree there, or one for all (in sjit, None leaves it to '
            'the compiler). Regexes on paths are for TreePathShardingRule((regex, rule), ...).'
        ) from None
    return [
        Subtree(rule, optional_path(path), subtree)
        for (path, rule), subtree in zip(flat_rules, subtrees, strict=True)
    ]


def checked_rules(rules: RuleLike, where: str = '') -> RuleLike:
    """Returns a copy of a tree of rules, so that later changes of its lists and dicts have no effect.

    Args:
        rules: a rule or a tree of rules.
        where: as for `match_subtrees`.

    Raises:
        StructureError: a leaf is not a rule.
    """
    flat_rules, treedef = _flatten_rules(rules, where, StructureError)
    copy: RuleLike = treedef.unflatten([rule for _, rule in flat_rules])
    return copy


def _flatten_rules(
    rules: RuleLike, where: str, error: type[ScalaxError]
) -> tuple[list[tuple[Any, Any]], Any]:
    """Returns the rules of a tree with their paths, and its structure; raises if a leaf is not a rule."""
    flat_rules, treedef = jax.tree_util.tree_flatten_with_path(rules, is_leaf=is_rule)
    for path, rule in flat_rules:
        if not is_rule(rule):
            raise error(_not_a_rule(rule, optional_path(path), where))
    return flat_rules, treedef


def _of(where: str) -> str:
    return f' of {where}' if where else ''


def _not_a_rule(value: Any, path: str | None, where: str) -> str:
    """Returns the message about a value that is not a rule, with a hint about the likely mistake."""
    hint, text = '', short_repr(value)
    if isinstance(value, str) and path is not None and _FIRST_OF_A_PAIR.fullmatch(path):
        hint = '; pairs of a regex and a rule are for TreePathShardingRule((regex, rule), ...)'
    elif isinstance(value, type) and issubclass(value, ShardingRule):
        hint = f'; this is the class: write {value.__name__}(...)'
    elif isinstance(value, str):
        hint = f'; write PartitionSpec({value!r})'
    elif hasattr(value, 'shape') and leaf_shape(value) is not None:
        text = leaf_text(value)
        hint = '; are the tree and the rules the wrong way round?'
    return (
        f'the rules{_of(where)} contain {text} of type {type(value).__name__}'
        f'{"" if path is None else f" at {path!r}"}, which is not a rule: give a ShardingRule, a '
        f'PartitionSpec, a NamedSharding or None{hint}'
    )
