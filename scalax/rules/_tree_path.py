"""Which spec does a leaf get by its path? Regexes on tree paths, the first match wins."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from scalax._paths import NamedTree
from scalax._spec import OnIndivisible, checked_policy
from scalax.errors import Problem, RuleError, did_you_mean
from scalax.rules._base import REPLICATED, Answer, AxisSizes, BuiltinRule, ShardingRule, split_sharding

Value = PartitionSpec | ShardingRule | NamedSharding | None


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class TreePathShardingRule(BuiltinRule):
    """Chooses by leaf path: the first pair whose regex is found (``re.search``) in the path wins.

    Scalars and arrays of one element are replicated whatever their path.

    Args:
        *rules: pairs of a regex and a value. A value is a PartitionSpec; another rule, which then
            decides about the leaves of that pair; or None, which leaves them to the compiler.
        strict: a leaf that no regex matches is an error; with False it is replicated.
        on_indivisible: what to do where a dimension does not divide: ``'error'``, ``'replicate'``
            (drop axes from the right until it divides) or ``'warn'`` (the same, with a warning).

    Raises:
        RuleError: an invalid regex, or a value that is none of the above.

    Example:
        >>> import numpy as np
        >>> rule = TreePathShardingRule(
        ...     ('attention/.*/kernel', PartitionSpec('fsdp', 'tp')),
        ...     ('.*', PartitionSpec()),
        ... )
        >>> rule.apply({'attention': {'q': {'kernel': np.zeros((8, 8))}}, 'norm': np.zeros(8)})
        {'attention': {'q': {'kernel': P('fsdp', 'tp')}}, 'norm': P()}
    """

    rules: tuple[tuple[str | re.Pattern[str], Value], ...]
    strict: bool = True
    on_indivisible: OnIndivisible = 'error'

    def __init__(
        self,
        *rules: tuple[str | re.Pattern[str], Value],
        strict: bool = True,
        on_indivisible: OnIndivisible = 'error',
    ) -> None:
        pairs = tuple(_checked_pair(number, rule) for number, rule in enumerate(rules))
        for name, value in (
            ('rules', pairs),
            ('strict', bool(strict)),
            ('on_indivisible', checked_policy(on_indivisible)),
        ):
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        parts = [f'({_pattern_text(pattern)}, {value!r})' for pattern, value in self.rules]
        if not self.strict:
            parts.append('strict=False')
        if self.on_indivisible != 'error':
            parts.append(f'on_indivisible={self.on_indivisible!r}')
        return f'TreePathShardingRule({", ".join(parts)})'

    @property
    def is_pure(self) -> bool:
        """See `ShardingRule.is_pure`."""
        nested = (value for _, value in self.rules if isinstance(value, ShardingRule))
        return self.on_indivisible != 'warn' and all(rule.is_pure for rule in nested)

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer | None]:
        """See `ShardingRule.answers`."""
        scalar = Answer(REPLICATED, 'TreePathShardingRule', 'one element')
        miss = Answer(REPLICATED, 'TreePathShardingRule', 'no regex matches, strict=False')
        fixed = [self._clause_answer(number) for number in range(len(self.rules))]
        searches = [re.compile(pattern).search for pattern, _ in self.rules]
        nested: dict[int, list[int]] = {}
        answers: list[Answer | None] = []
        for index, path in enumerate(tree.paths):
            shape = tree.shapes[index]
            answer: Answer | None = None if self.strict else miss
            if not shape or _one_element(shape):
                answer = scalar
            else:
                for number, search in enumerate(searches):
                    if search(path):
                        answer = fixed[number]
                        if answer is None:
                            nested.setdefault(number, []).append(index)
                        break
            answers.append(answer)
        for number, indices in nested.items():
            rule = self.rules[number][1]
            assert isinstance(rule, ShardingRule)
            inner = rule.answers(tree.select(indices), axis_sizes)
            for index, answer in zip(indices, inner, strict=True):
                answers[index] = answer and self._by_clause(number, answer)
        return answers

    def fallback(self, tree: NamedTree, index: int, axis_sizes: AxisSizes | None) -> Answer | Problem:
        """A leaf of a nested rule gets that rule's default; an unmatched one is an error."""
        path = tree.paths[index]
        for number, (pattern, value) in enumerate(self.rules):
            if re.search(pattern, path):
                assert isinstance(value, ShardingRule)
                default = value.fallback(tree, index, axis_sizes)
                return default if isinstance(default, Problem) else self._by_clause(number, default)
        literal = [re.sub(r'[^\w/]', '', _text(pattern)) for pattern, _ in self.rules]
        near = did_you_mean(path, [text for text in literal if text])
        return Problem(
            'unmatched',
            tree.describe(index),
            f'no regex of the rule matches the path {path!r}'
            + (f' ({near})' if near.startswith('did') else ''),
            rule=f'TreePathShardingRule of {len(self.rules)} regexes',
            hint="add a pair for these leaves, end with ('.*', PartitionSpec()), or pass strict=False "
            'to replicate what nothing matches.',
        )

    def _clause_answer(self, number: int) -> Answer | None:
        """The answer of a clause that decides by itself; None if a nested rule decides."""
        pattern, value = self.rules[number]
        origin = f'TreePathShardingRule regex {_pattern_text(pattern)}'
        if isinstance(value, ShardingRule):
            return None
        spec, memory_kind = split_sharding(value)
        return Answer(spec, origin, 'path matches', self.on_indivisible, memory_kind, (self, number))

    def _by_clause(self, number: int, answer: Answer) -> Answer:
        origin = f'TreePathShardingRule regex {_pattern_text(self.rules[number][0])}'
        return dataclasses.replace(answer, origin=f'{origin} -> {answer.origin}', clause=(self, number))


def _one_element(shape: tuple[int, ...]) -> bool:
    return all(size == 1 for size in shape)


def _text(pattern: str | re.Pattern[str]) -> str:
    return pattern if isinstance(pattern, str) else pattern.pattern


def _pattern_text(pattern: str | re.Pattern[str]) -> str:
    return repr(pattern)


def _checked_pair(number: int, rule: Any) -> tuple[str | re.Pattern[str], Value]:
    where = f'TreePathShardingRule, pair {number}'
    if not isinstance(rule, tuple | list) or len(rule) != 2:
        raise RuleError(f'{where}: expected a pair (regex, PartitionSpec), got {rule!r}')
    pattern, value = rule
    if not isinstance(pattern, str | re.Pattern):
        raise RuleError(f'{where}: the regex is a string, got {pattern!r}')
    try:
        re.compile(pattern)
    except re.error as error:
        raise RuleError(f'{where}: invalid regex {pattern!r}: {error.msg} (position {error.pos})') from None
    if value is not None and not isinstance(value, PartitionSpec | ShardingRule | NamedSharding):
        hint = f'; write PartitionSpec{value!r}' if isinstance(value, tuple) else ''
        raise RuleError(
            f'{where} ({_text(pattern)!r}): the value is a PartitionSpec, a rule or None, got {value!r}{hint}'
        )
    return pattern, value
