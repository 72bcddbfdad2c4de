"""Answers of a rule about one leaf: `Decision`, `Problem` or `NoAnswer`; and problems that rules share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from scalax._core.pytree.paths import NamedTree, has_foreign_dtype, leaf_shape
from scalax.errors import Problem, module_advice
from scalax.rules._indivisible import OnIndivisible

AxisSizes = Mapping[str, int]
Clause = tuple[Any, int]
"""A rule, and the index of one of its clauses."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Decision:
    """A rule's decision about one leaf. It does not name the leaf, so many leaves may share one decision.

    Attributes:
        spec: the spec; None leaves the leaf to the compiler.
        origin: the rule, as messages and reports show it.
        reason: the reason, in a few words.
        policies: the policies, for dimensions that are not divisible, of the rules that sharded a dimension;
            None stands for the helper's policy. The strictest one applies.
        memory_kind: the requested memory, such as ``'pinned_host'``; None for the default memory.
        clauses: the rules that took part, each with the index of its clause, from the outermost inwards;
            reports find unused clauses by them.
        named_shardings: the NamedShardings that took part; `resolve` checks their meshes.
        stack_dims: the dimensions that stack layers, which ``&`` never shards.
        notes: requests that were not granted, each with the reason.
        warnings: dimensions from which the rule dropped mesh axes that do not divide them, to warn about.
    """

    spec: PartitionSpec | None
    origin: str
    reason: str = ''
    policies: tuple[OnIndivisible | None, ...] = (None,)
    memory_kind: str | None = None
    clauses: tuple[Clause, ...] = ()
    named_shardings: tuple[NamedSharding, ...] = ()
    stack_dims: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        value: PartitionSpec | NamedSharding | None,
        origin: str,
        reason: str,
        on_indivisible: OnIndivisible | None,
        clauses: tuple[Clause, ...] = (),
    ) -> Decision:
        """Returns the decision for a PartitionSpec, a NamedSharding, or None."""
        policies = (on_indivisible,)
        if not isinstance(value, NamedSharding):
            return cls(value, origin, reason, policies, clauses=clauses)
        # A NamedSharding without a memory kind reports the default one of its devices.
        default = NamedSharding(value.mesh, value.spec)
        memory_kind = None if value.memory_kind == default.memory_kind else value.memory_kind
        return cls(value.spec, origin, reason, policies, memory_kind, clauses, (value,))


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class NoAnswer:
    """A leaf that the rule leaves to the next rule of ``a | b`` or ``a & b``. Many leaves may share one.

    Attributes:
        default: applies if no rule follows: a decision, or a function that returns the problem to raise.
    """

    default: Decision | Callable[[], Problem]

    def apply_default(self) -> Decision | Problem:
        """Returns the decision or problem of the leaf if no rule follows."""
        return self.default if isinstance(self.default, Decision) else self.default()


Answer = Decision | Problem | NoAnswer
"""The answer of a rule about one leaf."""


def apply_defaults(answers: list[Answer]) -> list[Decision | Problem]:
    """Returns the answers with each `NoAnswer` replaced by its default."""
    return [answer.apply_default() if isinstance(answer, NoAnswer) else answer for answer in answers]


def map_decision(answer: Answer, change: Callable[[Decision], Decision]) -> Answer:
    """Applies *change* to the decision of an answer, or to its default decision."""
    if isinstance(answer, Decision):
        return change(answer)
    if isinstance(answer, NoAnswer) and isinstance(answer.default, Decision):
        return NoAnswer(change(answer.default))
    return answer


REPLICATED = PartitionSpec()
ONE_ELEMENT = 'one element'
"""The reason that decisions about arrays of one element give."""

_ARRAYS = (jax.Array, jax.ShapeDtypeStruct)
_ONLY_ARRAYS_HINT = 'shard trees of arrays, and take other leaves out (a function may close over them).'
_SWAPPED_HINT = ' Or are the tree and the rules the wrong way round?'


def non_array_problems(tree: NamedTree) -> list[Problem]:
    """Returns a problem for each leaf that JAX does not accept as an array."""
    if not [leaf_type for leaf_type in set(map(type, tree.leaves)) if not issubclass(leaf_type, _ARRAYS)]:
        return []
    hint = _ONLY_ARRAYS_HINT + module_advice(tree.leaves)
    if any(isinstance(leaf, PartitionSpec | NamedSharding) for leaf in tree.leaves):
        hint += _SWAPPED_HINT
    return [
        Problem(
            'not-an-array',
            tree.describe(index),
            f'{short_repr(leaf)} is not an array'
            if leaf_shape(leaf) is None
            else f'JAX has no arrays of dtype {leaf.dtype}',
            hint=hint,
        )
        for index, leaf in enumerate(tree.leaves)
        if leaf_shape(leaf) is None or has_foreign_dtype(leaf)
    ]


def short_repr(value: Any) -> str:
    """Returns the repr of a user's value on one line, shortened for messages."""
    text = ' '.join(repr(value).split())
    return text if len(text) <= 60 else f'{text[:57]}...'


def not_a_spec_problem(tree: NamedTree, index: int, rule: str, value: Any) -> Problem:
    """Returns the problem of a leaf for which the user's code returned something other than a spec."""
    return Problem(
        'not-a-spec',
        tree.describe(index),
        f'got {value!r} of type {type(value).__name__}, which is not a PartitionSpec',
        rule=rule,
        hint="return a jax.sharding.PartitionSpec, such as PartitionSpec('fsdp', None).",
    )
