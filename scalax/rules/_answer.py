"""What a rule may answer about a leaf: a `Decision`, a problem, or `NoAnswer`; problems that rules share."""

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
"""A rule, and the number of one of its clauses."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Decision:
    """What a rule decided about one leaf. One decision may serve many leaves: it names none.

    Attributes:
        spec: the spec; None leaves the leaf to the compiler.
        origin: the rule, as messages and reports show it.
        reason: why, in a few words.
        policies: for dimensions that do not divide, the policies of the rules that placed some; None is
            the helper's. The strictest counts.
        memory_kind: the memory asked for, such as ``'pinned_host'``; None is the default one.
        clauses: the rules that took part, each with the number of its clause, from the outermost inwards;
            reports find unused clauses by them.
        given: the NamedShardings that took part, whose meshes are to be checked.
        notes: what was asked for and not given, each with the reason.
        passed: dimensions that do not divide, which the rule has left whole and warns about.
        stack: the dimensions that are stacks of layers, which ``&`` never shards.
    """

    spec: PartitionSpec | None
    origin: str
    reason: str = ''
    policies: tuple[OnIndivisible | None, ...] = (None,)
    memory_kind: str | None = None
    clauses: tuple[Clause, ...] = ()
    given: tuple[NamedSharding, ...] = ()
    stack: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        value: PartitionSpec | NamedSharding | None,
        origin: str,
        reason: str,
        on_indivisible: OnIndivisible | None,
        clauses: tuple[Clause, ...] = (),
    ) -> Decision:
        """The decision for a value: a PartitionSpec, a NamedSharding, or None."""
        policies = (on_indivisible,)
        if not isinstance(value, NamedSharding):
            return cls(value, origin, reason, policies, clauses=clauses)
        # Left out, the memory kind reads as the default one of the devices.
        plain = NamedSharding(value.mesh, value.spec)
        kind = None if value.memory_kind == plain.memory_kind else value.memory_kind
        return cls(value.spec, origin, reason, policies, kind, clauses, (value,))


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class NoAnswer:
    """The rule leaves a leaf to the next one of ``a | b`` or ``a & b``. It may serve many leaves.

    Attributes:
        default: what counts where no rule is next: a decision, or what makes the problem to raise.
    """

    default: Decision | Callable[[], Problem]

    def settled(self) -> Decision | Problem:
        """What the leaf gets where no rule is next."""
        return self.default if isinstance(self.default, Decision) else self.default()


Answer = Decision | Problem | NoAnswer
"""The answer of a rule about one leaf; a problem is what is wrong with the leaf."""


def settled(answers: list[Answer]) -> list[Decision | Problem]:
    """What leaves get where no rule is next."""
    return [answer.settled() if isinstance(answer, NoAnswer) else answer for answer in answers]


def changed(answer: Answer, change: Callable[[Decision], Decision]) -> Answer:
    """The answer with its decision changed, or its default."""
    if isinstance(answer, Decision):
        return change(answer)
    if isinstance(answer, NoAnswer) and isinstance(answer.default, Decision):
        return NoAnswer(change(answer.default))
    return answer


REPLICATED = PartitionSpec()
ONE_ELEMENT = 'one element'
"""The reason why arrays of one element are replicated."""

_ARRAYS = (jax.Array, jax.ShapeDtypeStruct)
_OF_LEAVES = 'shard trees of arrays, and take other leaves out (a function may close over them).'
_OF_RULES = ' Or are the tree and the rules the wrong way round?'


def non_arrays(tree: NamedTree) -> list[Problem]:
    """A problem for each leaf that JAX does not take as an array."""
    if not [kind for kind in set(map(type, tree.leaves)) if not issubclass(kind, _ARRAYS)]:
        return []
    hint = _OF_LEAVES + module_advice(tree.leaves)
    if any(isinstance(leaf, PartitionSpec | NamedSharding) for leaf in tree.leaves):
        hint += _OF_RULES
    return [
        Problem(
            'not-an-array',
            tree.describe(index),
            f'{short(leaf)} is not an array'
            if leaf_shape(leaf) is None
            else f'JAX has no arrays of dtype {leaf.dtype}',
            hint=hint,
        )
        for index, leaf in enumerate(tree.leaves)
        if leaf_shape(leaf) is None or has_foreign_dtype(leaf)
    ]


def short(value: Any) -> str:
    """A user's value as messages show it: on one line, shortened."""
    text = ' '.join(repr(value).split())
    return text if len(text) <= 60 else f'{text[:57]}...'


def not_a_spec(tree: NamedTree, index: int, rule: str, got: Any) -> Problem:
    """The problem of a leaf for which the user's code returned something that is not a spec."""
    return Problem(
        'not-a-spec',
        tree.describe(index),
        f'got {got!r} of type {type(got).__name__}, which is not a PartitionSpec',
        rule=rule,
        hint="return a jax.sharding.PartitionSpec, such as PartitionSpec('fsdp', None).",
    )
