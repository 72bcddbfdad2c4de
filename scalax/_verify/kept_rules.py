"""Rules for a small step that answer as they did about the large one: a rule may leave small arrays whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax

from scalax._transforms.sjit import SjitFunction
from scalax._tree.paths import NamedTree, path_string
from scalax.rules._answer import Answer, AxisSizes
from scalax.rules._prefix import is_rule
from scalax.rules._rule import BuiltinRule, ShardingRule, answers_of

_OPTIONS = 'in_shardings', 'out_shardings', 'args_sharding_constraint', 'annotation_shardings'


class KeptRules:
    """What rules answered about the arrays of a large step, by their paths.

    Attributes:
        are_known: whether the large step was traced; from then on the rules answer by that.
    """

    def __init__(self) -> None:
        self.are_known = False
        self._answers: dict[Hashable, Answer] = {}

    def in_step(self, step: Any) -> Any:
        """The step with rules that take note of their answers, or repeat them, if `sjit` made it."""
        if not isinstance(step, SjitFunction):
            return step
        make, (helper, function) = step.__reduce__()
        options = {name: self._kept(name, make.keywords[name]) for name in _OPTIONS if name in make.keywords}
        return make(helper, function, **options)

    def _kept(self, option: str, rules: Any) -> Any:
        def kept(path: Any, rule: Any) -> Any:
            key = option, path_string(path)
            return _Kept(rule, self, key) if isinstance(rule, ShardingRule) else rule

        return jax.tree.map_with_path(kept, rules, is_leaf=is_rule)

    def answer(self, key: Hashable, now: Answer) -> Answer:
        """The answer about an array: what the rule says now, or what it said about the large step."""
        if self.are_known:
            return self._answers.get(key, now)
        self._answers[key] = now
        return now


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Kept(BuiltinRule):
    rule: ShardingRule
    rules: KeptRules
    key: Hashable

    def __repr__(self) -> str:
        return repr(self.rule)

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer]:
        found = answers_of(self.rule, tree, axis_sizes)
        return [self.rules.answer((self.key, path), now) for path, now in zip(tree.paths, found, strict=True)]

    @property
    def is_pure(self) -> bool:
        return False
