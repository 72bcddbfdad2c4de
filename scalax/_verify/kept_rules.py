"""Rules for a small step that answer as they did about the large one: a rule may leave small arrays whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax

from scalax._transforms.sjit import SjitFunction
from scalax._tree.paths import NamedTree, path_string
from scalax._verify.alike import stem
from scalax.rules._answer import Answer, AxisSizes, Decision, settled
from scalax.rules._prefix import is_rule
from scalax.rules._rule import BuiltinRule, ShardingRule, answers_of

_OPTIONS = 'in_shardings', 'out_shardings', 'args_sharding_constraint', 'annotation_shardings'


class KeptRules:
    """The decisions of rules about the arrays of a large step.

    Args:
        large: the sizes of the axes of its mesh.
    """

    def __init__(self, large: Mapping[str, int]) -> None:
        self._large = dict(large)
        self._decisions: dict[Hashable, Decision | None] = {}
        self._otherwise: dict[str, None] = {}

    def in_step(self, step: Any) -> Any:
        """The step with rules that answer by what was decided first, if `sjit` made it."""
        if not isinstance(step, SjitFunction):
            return step
        make, (helper, function) = step.__reduce__()
        options = {name: self._kept(name, make.keywords[name]) for name in _OPTIONS if name in make.keywords}
        return make(helper, function, **options)

    def decided_otherwise(self, step: Any, args: Sequence[Any]) -> list[str]:
        """The paths of the arrays of a small step about which rules, by their sizes, decide otherwise."""
        self._otherwise.clear()
        if isinstance(step, SjitFunction):
            step.shardings_for(*args)
        return [*self._otherwise]

    def _kept(self, option: str, rules: Any) -> Any:
        return jax.tree.map_with_path(
            lambda path, rule: (
                _Kept(rule, self, (option, stem(path_string(path))))
                if isinstance(rule, ShardingRule)
                else rule
            ),
            rules,
            is_leaf=is_rule,
        )

    def answer(self, key: Hashable, path: str, now: Answer, axis_sizes: AxisSizes | None) -> Answer:
        """The answer about an array.

        Args:
            key: the rule.
            path: the path of the array; those of all layers are alike.
            now: what the rule says.
            axis_sizes: the mesh for which it says so.
        """
        [decided] = settled([now])
        if not isinstance(decided, Decision):
            return now
        place = key, stem(path)
        if axis_sizes is not None and dict(axis_sizes) == self._large:
            before = self._decisions.setdefault(place, decided)
            if before is not None and before.spec != decided.spec:  # no one answer for all layers
                self._decisions[place] = None
            return now
        before = self._decisions.get(place)
        if before is None or before.spec == decided.spec:
            return now
        self._otherwise[path] = None
        return before


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Kept(BuiltinRule):
    rule: ShardingRule
    rules: KeptRules
    key: Hashable

    def __repr__(self) -> str:
        return repr(self.rule)

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer]:
        found = answers_of(self.rule, tree, axis_sizes)
        pairs = zip(tree.paths, found, strict=True)
        return [self.rules.answer(self.key, path, now, axis_sizes) for path, now in pairs]

    @property
    def is_pure(self) -> bool:
        return False
