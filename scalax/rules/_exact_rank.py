"""The rule of the catalogue's tables: by leaf path, for arrays of one rank a row."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jax.sharding import NamedSharding, PartitionSpec

from scalax._tree.paths import NamedTree
from scalax._tree.specs import entries, no_axis, spec_axes
from scalax.errors import Problem
from scalax.rules._answer import Answer, AxisSizes, Decision
from scalax.rules._tree_path import TreePathShardingRule

TABLE_AXES = ('fsdp', 'tp', 'expert')
"""The axes that the tables of the catalogue are over."""

_STACKED = "stacked layers take rule.stacked(1), or catalogue.rule(table, stacked='layers/')"
_NOT_STACKED = (
    'layers that are not stacked take the rule without .stacked(), and a stacked= that does not match'
)


class ExactRankRule(TreePathShardingRule):
    """A `TreePathShardingRule` whose specs are for arrays of exactly as many dimensions as they have entries.

    Arrays of another rank are an error, so that layers that were stacked are not sharded by accident.
    ``PartitionSpec()``, rules and None are for arrays of any rank.

    Args:
        *rules: as in `TreePathShardingRule`.
        strict: as there.
        on_indivisible: as there.

    Example:
        >>> import numpy as np
        >>> exact = ExactRankRule(('kernel', PartitionSpec('fsdp', None)), ('bias', PartitionSpec()))
        >>> exact.apply({'kernel': np.zeros((8, 8)), 'bias': np.zeros(8)})
        {'bias': P(), 'kernel': P('fsdp', None)}
        >>> exact.stacked(1).apply({'kernel': np.zeros((80, 8, 8))})
        {'kernel': P(None, 'fsdp')}
    """

    _unmatched_hint: ClassVar[str] = (
        'put a row for these leaves in front, as in catalogue.rule((row, *table)), or replicate what no row '
        'matches with rule | PartitionSpec().'
    )

    def __repr__(self) -> str:
        return 'ExactRankRule' + super().__repr__().removeprefix('TreePathShardingRule')

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer]:
        answers = super().answers(tree, axis_sizes)
        # One decision serves all leaves of a clause; it is checked once for each rank.
        wrong: dict[tuple[int, int, int], Problem | None] = {}
        for index, (answer, shape) in enumerate(zip(answers, tree.shapes, strict=True)):
            key = id(answer), len(shape), tree.stacked(index)
            if key not in wrong:
                wrong[key] = self._wrong(answer, *key[1:], axis_sizes)
            problem = wrong[key]
            if problem is not None:
                answers[index] = dataclasses.replace(problem, leaf=tree.describe(index))
        return answers

    def _wrong(self, answer: Answer, rank: int, stacked: int, axis_sizes: AxisSizes | None) -> Problem | None:
        """What is wrong with an answer of this rule about a leaf of that rank, without its stack."""
        # Decisions about arrays of one element have no clauses; those of other rules are not checked.
        if not isinstance(answer, Decision) or not answer.clauses or answer.clauses[0][0] is not self:
            return None
        value = self.rules[answer.clauses[0][1]][1]
        spec = value.spec if isinstance(value, NamedSharding) else value
        if not isinstance(spec, PartitionSpec):
            return None
        expected = len(entries(spec))
        if expected not in (0, rank):
            return _problem(
                'rank',
                answer,
                f'the spec is for an array of rank {expected}, and this one is of rank {rank}'
                + (' without its stack of layers' if stacked else ''),
                f'{_NOT_STACKED if stacked else _STACKED}; heads that are a dimension take '
                'catalogue.SPLIT_HEADS in front; others a row of your own.',
            )
        absent = [axis for axis in spec_axes(spec) if axis_sizes is not None and axis not in axis_sizes]
        # The hint is about the axes of the catalogue.
        for_tables = [f'{axis}=None' for axis in absent if axis in TABLE_AXES]
        if axis_sizes is None or not for_tables:
            return None
        return _problem(
            'unknown-axis',
            answer,
            '; '.join(no_axis(axis, axis_sizes) for axis in absent),
            f'give {", ".join(for_tables)} to catalogue.rule to leave out what the mesh lacks, or the name '
            'that it has there.',
        )


def _problem(kind: str, answer: Decision, detail: str, hint: str) -> Problem:
    """A problem whose leaf is filled in later."""
    return Problem(kind, '', detail, spec=str(answer.spec), rule=answer.origin, hint=hint)
