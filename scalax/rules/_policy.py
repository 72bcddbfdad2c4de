"""The policy rule, which calls a user's function for each leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from scalax._core.pytree.paths import NamedTree, with_shape
from scalax.errors import RuleError
from scalax.rules._answer import Answer, AxisSizes, Decision, NoAnswer, not_a_spec_problem
from scalax.rules._indivisible import OnIndivisible, checked_policy
from scalax.rules._rule import BuiltinRule, Rule, ShardingRule, answers_by_leaf

Policy = Callable[[str, Any], Rule]


@dataclasses.dataclass(frozen=True)
class PolicyShardingRule(BuiltinRule):
    """Calls a function ``policy(path, leaf)`` for every leaf.

    Args:
        policy: receives the leaf path and the leaf (anything with ``shape`` and ``dtype``); returns a
            PartitionSpec, a rule that decides about this leaf, or None to leave it to the compiler.
            It should look at shapes and dtypes only, because traced leaves have no values.
        on_indivisible: what to do if a dimension is not divisible: ``'error'``, ``'replicate'``
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
        """Always False, because a function may answer differently each time."""
        return False

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer]:
        origin = f'PolicyShardingRule({getattr(self.policy, "__qualname__", repr(self.policy))})'
        answers: list[Any] = []
        nested: dict[int, ShardingRule] = {}
        for index, (path, leaf) in enumerate(zip(tree.paths, tree.leaves, strict=True)):
            try:
                value = self.policy(path, with_shape(leaf))
            except Exception as error:
                error.add_note(f'{origin} was called for {tree.describe(index)}')
                raise
            if isinstance(value, ShardingRule):
                nested[index] = value
                answers.append(None)  # filled below
            elif value is None or isinstance(value, PartitionSpec | NamedSharding):
                answers.append(Decision.of(value, origin, 'returned by the policy', self.on_indivisible))
            else:
                answers.append(not_a_spec_problem(tree, index, origin, value))
        for index, answer in answers_by_leaf(nested, tree, axis_sizes).items():
            # A policy answers every leaf, so no rule follows.
            result = answer.apply_default() if isinstance(answer, NoAnswer) else answer
            if isinstance(result, Decision):
                result = dataclasses.replace(result, origin=f'{origin} -> {result.origin}')
            answers[index] = result
        return answers
