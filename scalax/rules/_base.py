"""What is a rule? The base class that users extend, and the answers that built-in rules give.

A built-in rule decides about the leaves of a `NamedTree` in one go (`ShardingRule.answers`): for each
leaf an `Answer`, or None for "no answer", which lets a composition ask the next rule. What a leaf that
nobody answered gets is the rule's own default (`ShardingRule.fallback`). A user's subclass writes
`apply` only, and so answers everything.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from scalax._paths import NamedTree
from scalax._spec import OnIndivisible
from scalax.errors import Problem, ShardingError

AxisSizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Answer:
    """What a rule decided about one leaf. One answer may serve many leaves: it names none.

    Attributes:
        spec: the spec; None leaves the leaf to the compiler.
        origin: who said so, as messages and reports show it.
        reason: why, in a few words.
        on_indivisible: the policy of the rule that answered; None takes the helper's.
        memory_kind: the memory asked for, such as ``'pinned_host'``; None is the default one.
        clause: the rule and the number of its clause that answered, for finding unused clauses.
    """

    spec: PartitionSpec | None
    origin: str
    reason: str = ''
    on_indivisible: OnIndivisible | None = None
    memory_kind: str | None = None
    clause: tuple[ShardingRule, int] | None = None


REPLICATED = PartitionSpec()


class ShardingRule(abc.ABC):
    """Turns a pytree into PartitionSpecs. Subclasses write `apply`, and nothing else.

    Example:
        A rule that shards the last dimension of every matrix:

        >>> import numpy as np
        >>> class LastDimension(ShardingRule):
        ...     def apply(self, pytree):
        ...         return jax.tree.map(
        ...             lambda x: PartitionSpec(None, 'tp') if x.ndim == 2 else PartitionSpec(), pytree
        ...         )
        >>> LastDimension().apply({'w': np.zeros((4, 8)), 'b': np.zeros(8)})
        {'b': P(), 'w': P(None, 'tp')}
    """

    @abc.abstractmethod
    def apply(self, pytree: Any) -> Any:
        """Returns a pytree of PartitionSpec with the structure of *pytree*.

        Args:
            pytree: a pytree whose leaves have a shape and a dtype.
        """

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer | None]:
        """One answer a leaf; None where this rule has none.

        Args:
            tree: the leaves to decide about.
            axis_sizes: mesh axis name -> size; None when no mesh is known.
        """
        whole, indices = tree, list(range(len(tree)))
        while whole.parent is not None:
            indices = [whole.indices[i] for i in indices]
            whole = whole.parent
        specs = self._specs_of(whole)
        given: dict[Any, Answer] = {}
        origin = type(self).__name__
        for spec in (specs[i] for i in indices):
            if spec not in given:
                given[spec] = Answer(spec, origin, 'said by apply()', 'error')
        return [given[specs[i]] for i in indices]

    def _specs_of(self, whole: NamedTree) -> list[PartitionSpec | None]:
        """What a user's `apply` said, one entry a leaf."""
        applied = self.apply(whole.tree)
        leaves, treedef = jax.tree.flatten(applied, is_leaf=lambda x: x is None)
        if treedef != whole.treedef:
            raise ShardingError(
                [
                    Problem(
                        'structure',
                        f'{type(self).__name__}.apply',
                        f'returned a tree of structure {treedef} for a tree of structure {whole.treedef}',
                        hint='apply() returns one PartitionSpec for each leaf of its argument.',
                    )
                ]
            )
        specs: list[PartitionSpec | None] = []
        problems = []
        for index, leaf in enumerate(leaves):
            spec = leaf.spec if isinstance(leaf, NamedSharding) else leaf
            if spec is not None and not isinstance(spec, PartitionSpec):
                problems.append(not_a_spec(whole, index, f'{type(self).__name__}.apply', spec))
            specs.append(spec)
        if problems:
            raise ShardingError(problems)
        return specs

    def fallback(self, tree: NamedTree, index: int, axis_sizes: AxisSizes | None) -> Answer | Problem:
        """What a leaf gets that this rule does not answer: an answer, or the error to raise."""
        return Answer(REPLICATED, type(self).__name__, 'no answer')

    @property
    def is_pure(self) -> bool:
        """Whether a result may be reused: the same answers and no warnings for equal shapes, for ever."""
        return False


class BuiltinRule(ShardingRule):
    """A rule that answers leaf by leaf; `apply` follows from its answers."""

    def apply(self, pytree: Any) -> Any:
        """Returns a pytree of PartitionSpec with the structure of *pytree*.

        Args:
            pytree: leaves may be arrays, ``jax.ShapeDtypeStruct``, numpy arrays or Python scalars.

        Raises:
            ShardingError: some leaves have no spec; all of them are named.
        """
        tree = NamedTree.of(pytree)
        return tree.treedef.unflatten([answer.spec for answer in settled(self, tree, None)])

    @abc.abstractmethod
    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer | None]:
        """See `ShardingRule.answers`."""


def settled(rule: ShardingRule, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer]:
    """One answer for every leaf, with the rule's own default where it has none.

    Raises:
        ShardingError: the rule's default is an error for some leaves; all of them are named.
    """
    answers = rule.answers(tree, axis_sizes)
    problems: list[Problem] = []
    for index, answer in enumerate(answers):
        if answer is None:
            default = rule.fallback(tree, index, axis_sizes)
            if isinstance(default, Problem):
                problems.append(default)
            else:
                answers[index] = default
    if problems:
        raise ShardingError(problems)
    return answers  # type: ignore[return-value]  # every None was filled or raised about


def split_sharding(
    value: PartitionSpec | NamedSharding | None,
) -> tuple[PartitionSpec | None, str | None]:
    """The spec and the memory kind of what a rule may hold in place of a spec."""
    return (value.spec, value.memory_kind) if isinstance(value, NamedSharding) else (value, None)


def not_a_spec(tree: NamedTree, index: int, rule: str, got: Any) -> Problem:
    """The problem of a leaf for which a user's code returned something that is no spec."""
    return Problem(
        'not-a-spec',
        tree.describe(index),
        f'got {got!r} of type {type(got).__name__}, which is not a PartitionSpec',
        rule=rule,
        hint="return a jax.sharding.PartitionSpec, such as PartitionSpec('fsdp', None).",
    )
