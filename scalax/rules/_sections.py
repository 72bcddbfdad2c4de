"""Which rule decides about each parameter of an optimizer? A tree of rules laid over the parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from scalax._tree.paths import NamedTree, describe_leaf, has_foreign_dtype, leaf_shape, optional_path
from scalax.errors import RuleError, StructureError
from scalax.rules._answers import short
from scalax.rules._base import ShardingRule, as_rule


@dataclasses.dataclass(frozen=True)
class Section:
    """The part of the parameters that one rule decides about, with shapes in place of the arrays."""

    rule: ShardingRule
    at: str | None
    treedef: Any
    # Hashed are structure and rule only: the hash of a large model's shapes would cost at every look-up.
    leaves: tuple[tuple[str, tuple[int, ...], Any], ...] = dataclasses.field(hash=False)

    def tree(self) -> NamedTree:
        """The parameters, as the rule sees them."""
        return NamedTree(
            [path for path, _, _ in self.leaves],
            [jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in self.leaves],
            [shape for _, shape, _ in self.leaves],
            self.treedef,
            self.at,
            bare=jax.tree_util.treedef_is_leaf(self.treedef),
        )


def sections(param_rule: Any, params: Any, name: str) -> Iterator[Section]:
    """Lays rules over parameters, and forgets the arrays.

    Args:
        param_rule: one rule, or a pytree prefix of rules.
        params: the parameters.
        name: what messages begin with.

    Raises:
        RuleError: something is not a rule, or not an array.
        StructureError: the rules are not a prefix of the parameters.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(
        param_rule, is_leaf=lambda node: as_rule(node) is not None
    )
    rules: list[tuple[str | None, ShardingRule]] = []
    for path, value in flat:
        at = optional_path(path)
        rule = as_rule(value)
        if rule is None:
            got = short(value) if leaf_shape(value) is None else describe_leaf('', value).partition(': ')[2]
            raise RuleError(
                f'{name}: param_rule holds {got} of type {type(value).__name__}'
                f'{"" if at is None else f" at {at!r}"}, which is not a rule: give a ShardingRule, a '
                'PartitionSpec, or a pytree prefix of these, and the params second'
            )
        rules.append((at, rule))
    treedef: Any = structure
    try:
        subtrees = treedef.flatten_up_to(params)
    except ValueError:
        raise _not_a_prefix([at or '' for at, _ in rules], NamedTree.of(params).paths, name) from None
    trees = [NamedTree.of(subtree, at) for (at, _), subtree in zip(rules, subtrees, strict=True)]
    if not any(map(len, trees)):
        raise RuleError(f'{name}: params has no leaves, so no state can be its')
    for (at, rule), tree in zip(rules, trees, strict=True):
        for i, leaf in enumerate(tree.leaves):
            if leaf_shape(leaf) is None or has_foreign_dtype(leaf):
                raise RuleError(
                    f'{name}: params holds {tree.describe(i)}, which is not an '
                    'array; give what the optimizer was initialised with'
                )
        dtypes = [getattr(leaf, 'dtype', None) or jax.dtypes.result_type(leaf) for leaf in tree.leaves]
        leaves = tuple(zip(tree.paths, map(tuple, tree.shapes), dtypes, strict=True))
        yield Section(rule, at, tree.treedef, leaves)


def _not_a_prefix(rules: Sequence[str], params: Sequence[str], name: str) -> StructureError:
    """Says where the rules at the paths *rules* and the parameters part ways."""
    missing = [path for path in params if not any(f'{path}/'.startswith(f'{at}/') for at in rules)]
    extra = [at for at in rules if not any(f'{path}/'.startswith(f'{at}/') for path in params)]
    parts = []
    if missing:
        parts.append(f'there is no rule for {_listed(missing)}')
    if extra:
        parts.append(f'params has nothing at {_listed(extra)}')
    return StructureError(
        f'{name}: param_rule does not have the structure of params: '
        f'{"; ".join(parts) or "their nodes are of different types"}. '
        'Give one rule for all parameters, or a tree of rules with the same nodes.'
    )


def _listed(paths: Sequence[str]) -> str:
    more = f' and {len(paths) - 10} more' if len(paths) > 10 else ''
    return ', '.join(map(repr, paths[:10])) + more
