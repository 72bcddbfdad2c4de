"""The rule that calls a user's function for each leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from scalax._core.pytree.paths import NamedTree, with_shape
from scalax.errors import RuleError
from scalax.rules._answer import Answer, AxisSizes, Decision, NoAnswer, not_a_spec
from scalax.rules._indivisible import OnIndivisible, checked_policy
from scalax.rules._rule import BuiltinRule, Rule, ShardingRule, answers_of_each

Policy = Callable[[str, Any], Rule]


@dataclasses.dataclass(frozen=True)
class PolicyShardingRule(BuiltinRule):
    """Asks a function ``policy(path, leaf)`` about every leaf.

    Args:
        policy: gets the leaf path and the leaf (anything with ``shape`` and ``dtype``); returns a
            PartitionSpec, a rule that decides about this leaf, or None to leave it to the compiler.
            It should look at shapes and dtypes only: while a function is traced there are no values.
        on_indivisible: what to do where a dimension does not divide: ``'error'``, ``'replicate'``
            (drop axes from the right until it divides) or ``'warn'`` (the same, with a warning).

    Raises:
        RuleError: `policy` is not callable.

    Example:
        >>> import numpy as np
        >>> def policy(path, leaf):
        ...     return PartitionSpec('tp') if path.endswith('bias') else PartitionSpec(None, 'tp')
        >>> PolicyShardingRule(policy).apply({'bias': np.zeros(8), 'kernel': np.zeros((8, 8))})
        {'bias': P('tp',), 'kernel': P(None, 'tp')}
    """

    policy: Policy
    on_indivisible: OnIndivisible = 'error'

    def __post_init__(self) -> None:
        if not callable(self.policy):
            raise RuleError(f'policy is a function of (path, leaf), got {self.policy!r}')
        checked_policy(self.on_indivisible)

    @property
    def is_pure(self) -> bool:
        """Never: a function may answer differently each time."""
        return False

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer]:
        origin = f'PolicyShardingRule({getattr(self.policy, "__qualname__", repr(self.policy))})'
        answers: list[Any] = []
        nested: dict[int, ShardingRule] = {}
        for index, (path, leaf) in enumerate(zip(tree.paths, tree.leaves, strict=True)):
            try:
                value = self.policy(path, with_shape(leaf))
            except Exception as error:
                error.add_note(f'{origin} was asked about {tree.describe(index)}')
                raise
            if isinstance(value, ShardingRule):
                nested[index] = value
                answers.append(None)  # filled below
            elif value is None or isinstance(value, PartitionSpec | NamedSharding):
                answers.append(Decision.of(value, origin, 'returned by the policy', self.on_indivisible))
            else:
                answers.append(not_a_spec(tree, index, origin, value))
        for index, answer in answers_of_each(nested, tree, axis_sizes).items():
            decided = answer.settled() if isinstance(answer, NoAnswer) else answer  # the policy has decided
            if isinstance(decided, Decision):
                decided = dataclasses.replace(decided, origin=f'{origin} -> {decided.origin}')
            answers[index] = decided
        return answers
