"""Rules of a downscaled step that repeat the answers of the full-size step.

Without them, a rule such as FSDP would replicate arrays that are small only because of the downscaling.
"""

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
"""(option of `sjit`, path of the rule), path of the leaf -> the answer of the rule."""


def with_replayed_rules(step: Any, answers: Answers, record: bool) -> Any:
    """Returns a step of `sjit` with rules that record their answers, or replay recorded ones.

    Other steps are returned as they are.

    Args:
        step: the step.
        answers: the recorded answers.
        record: whether to record; otherwise the rules replay.
    """
    if not isinstance(step, SjitFunction):
        return step

    def wrap(option: str, rules: Any) -> Any:
        def wrap_rule(path: Any, rule: Any) -> Any:
            key = option, path_string(path)
            return _ReplayedRule(rule, key, answers, record) if isinstance(rule, ShardingRule) else rule

        return jax.tree.map_with_path(wrap_rule, rules, is_leaf=is_rule)

    make, (helper, function) = step.__reduce__()
    options = {name: rules for name, rules in make.keywords.items() if name in _OPTIONS}
    return make(helper, function, **{name: wrap(name, rules) for name, rules in options.items()})


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _ReplayedRule(BuiltinRule):
    rule: ShardingRule
    key: Hashable
    recorded: Answers
    record: bool

    def __repr__(self) -> str:
        return repr(self.rule)

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer]:
        answers = answers_of(self.rule, tree, axis_sizes)
        keys = [(self.key, path) for path in tree.paths]
        if self.record:
            self.recorded.update(zip(keys, answers, strict=True))
        return [self.recorded.get(key, answer) for key, answer in zip(keys, answers, strict=True)]

    @property
    def is_pure(self) -> bool:
        return False
