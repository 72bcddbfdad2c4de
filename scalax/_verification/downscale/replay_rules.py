"""Rules for a small step that answer as they did about the large one: a rule may replicate small arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax

from scalax._compile.sjit.function import SjitFunction
from scalax._core.pytree.paths import NamedTree, path_string
from scalax.rules._answer import Answer, AxisSizes
from scalax.rules._rule import BuiltinRule, ShardingRule, answers_of
from scalax.rules._rule_tree import is_rule

_OPTIONS = 'in_shardings', 'out_shardings', 'args_sharding_constraint', 'annotation_shardings'


Answers = dict[Hashable, Answer]
"""The answer of each rule about each path."""


def with_replayed_rules(step: Any, kept: Answers, are_known: bool) -> Any:
    """A step with rules that note their answers, or repeat those that are known, if `sjit` made it."""
    if not isinstance(step, SjitFunction):
        return step

    def rules_of(option: str, rules: Any) -> Any:
        def with_rule(path: Any, rule: Any) -> Any:
            key = option, path_string(path)
            return _ReplayedRule(rule, key, kept, are_known) if isinstance(rule, ShardingRule) else rule

        return jax.tree.map_with_path(with_rule, rules, is_leaf=is_rule)

    make, (helper, function) = step.__reduce__()
    given = {name: rules for name, rules in make.keywords.items() if name in _OPTIONS}
    return make(helper, function, **{name: rules_of(name, rules) for name, rules in given.items()})


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _ReplayedRule(BuiltinRule):
    rule: ShardingRule
    key: Hashable
    kept: Answers
    are_known: bool

    def __repr__(self) -> str:
        return repr(self.rule)

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer]:
        found = answers_of(self.rule, tree, axis_sizes)
        keys = [(self.key, path) for path in tree.paths]
        if not self.are_known:
            self.kept.update(zip(keys, found, strict=True))
        return [self.kept.get(key, now) for key, now in zip(keys, found, strict=True)]

    @property
    def is_pure(self) -> bool:
        return False
