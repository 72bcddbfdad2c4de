"""How do rules combine? ``a | b``, ``a & b``, ``rule.stacked(n)``, ``rule.with_memory_kind(kind)``.

Users write the operators; these classes are what they make. The precedence, leaf by leaf:

==============================  ===========================  =======================================
what *a* says                   ``a | b`` gives              ``a & b`` gives
==============================  ===========================  =======================================
a spec                          that spec                    that spec; *b* fills what it left free
``PartitionSpec()``             ``PartitionSpec()``          what *b* says
None (leave to the compiler)    None                         None
no answer (FSDP: too small)     what *b* says                what *b* says
strict, and no regex matches    what *b* says                an error
==============================  ===========================  =======================================
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import PartitionSpec

from scalax import _spec
from scalax._paths import NamedTree
from scalax.errors import Problem, RuleError
from scalax.rules._base import (
    REPLICATED,
    Answer,
    AxisSizes,
    BuiltinRule,
    Said,
    ShardingRule,
    ask,
    is_pure,
)

_STRICTEST: tuple[_spec.OnIndivisible | None, ...] = ('error', 'warn', 'replicate', None)


@dataclasses.dataclass(frozen=True, repr=False)
class Everywhere(BuiltinRule):
    """A PartitionSpec where a rule is wanted: it answers every leaf."""

    spec: PartitionSpec

    def __repr__(self) -> str:
        return f'Partition{_call(self.spec)}'

    @property
    def is_pure(self) -> bool:
        """See `ShardingRule.is_pure`."""
        return True

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Said]:
        """See `ShardingRule.answers`."""
        return [Answer(self.spec, 'the spec given')] * len(tree)


def _call(spec: PartitionSpec) -> str:
    return f'Spec({", ".join(map(repr, _spec.entries(spec)))})'


def as_rule(value: Any) -> ShardingRule | None:
    """What stands beside an operator, as a rule; None for what is none."""
    if isinstance(value, PartitionSpec):
        return Everywhere(value)
    return value if isinstance(value, ShardingRule) else None


@dataclasses.dataclass(frozen=True, repr=False)
class FirstAnswer(BuiltinRule):
    """``a | b``: for each leaf the first rule that answers; see the table of this module."""

    rules: tuple[ShardingRule, ...]

    @classmethod
    def of(cls, *rules: ShardingRule) -> FirstAnswer:
        """Flattens nested ones: ``|`` is associative."""
        flat: list[ShardingRule] = []
        for rule in rules:
            flat.extend(rule.rules if isinstance(rule, FirstAnswer) else [rule])
        return cls(tuple(flat))

    def __repr__(self) -> str:
        return f'({" | ".join(map(repr, self.rules))})'

    @property
    def parts(self) -> tuple[ShardingRule, ...]:
        """See `ShardingRule.parts`."""
        return self.rules

    @property
    def is_pure(self) -> bool:
        """See `ShardingRule.is_pure`."""
        return all(map(is_pure, self.rules))

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Said]:
        """See `ShardingRule.answers`."""
        answers: list[Said] = [None] * len(tree)
        left = list(range(len(tree)))
        for rule in self.rules:
            if not left:
                break
            for i, said in zip(left, ask(rule, tree.select(left), axis_sizes), strict=True):
                answers[i] = said
            left = [i for i in left if answers[i] is None]
        return answers

    def fallback(self, tree: NamedTree, index: int, axis_sizes: AxisSizes | None) -> Answer | Problem:
        """The default of the last rule."""
        return self.rules[-1].fallback(tree, index, axis_sizes)


@dataclasses.dataclass(frozen=True, repr=False)
class Overlay(BuiltinRule):
    """``a & b``: *b* fills the dimensions that *a* left free; see the table of this module.

    It uses only mesh axes that *a* did not use. A rule that has a choice, like FSDP, chooses among the
    free dimensions.
    """

    first: ShardingRule
    second: ShardingRule

    def __repr__(self) -> str:
        return f'({self.first!r} & {self.second!r})'

    @property
    def parts(self) -> tuple[ShardingRule, ...]:
        """See `ShardingRule.parts`."""
        return self.first, self.second

    @property
    def is_pure(self) -> bool:
        """See `ShardingRule.is_pure`."""
        return is_pure(self.first) and is_pure(self.second)

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Said]:
        """See `ShardingRule.answers`."""
        below = ask(self.first, tree, axis_sizes)
        for i, said in enumerate(below):
            if said is None:
                default = self.first.fallback(tree, i, axis_sizes)
                # No answer of a strict rule is its error; of any other it leaves the leaf to `second`.
                below[i] = default if isinstance(default, Problem) else None
        open_ = [i for i, said in enumerate(below) if not isinstance(said, Problem) and _is_open(said)]
        taken = [_spec_of(below[i]) for i in open_]
        above = ask(self.second, tree.select(open_).with_taken(taken), axis_sizes)
        for i, said in zip(open_, above, strict=True):
            below[i] = _merged(below[i], said, len(tree.shapes[i]))
        return below

    def fallback(self, tree: NamedTree, index: int, axis_sizes: AxisSizes | None) -> Answer | Problem:
        """The default of the second rule: the first one had no answer either."""
        return self.second.fallback(tree, index, axis_sizes)


def _spec_of(said: Said) -> PartitionSpec:
    return said.spec if isinstance(said, Answer) and said.spec is not None else REPLICATED


def _is_open(said: Said) -> bool:
    """Whether another rule may still say something: not where the compiler was given the choice."""
    return not (isinstance(said, Answer) and said.spec is None)


def _merged(below: Said, above: Said, rank: int) -> Said:
    """What two rules say together about one leaf."""
    if not isinstance(below, Answer):
        return above
    if not isinstance(above, Answer) or above.spec is None:
        return above if isinstance(above, Problem) else below
    assert below.spec is not None
    filled = fill(below.spec, above.spec, rank)
    if filled == below.spec:
        return dataclasses.replace(below, clauses=below.clauses + above.clauses)
    policies = (below.on_indivisible, above.on_indivisible)
    return Answer(
        filled,
        f'{below.origin} & {above.origin}',
        '; '.join(part for part in (below.reason, above.reason) if part),
        min(policies, key=_STRICTEST.index),
        below.memory_kind or above.memory_kind,
        below.clauses + above.clauses,
        below.mesh or above.mesh,
    )


def fill(below: PartitionSpec, above: PartitionSpec, rank: int) -> PartitionSpec:
    """A spec whose free dimensions are filled from another, with axes that it does not use yet.

    Example:
        >>> fill(PartitionSpec(None, 'tp'), PartitionSpec(('fsdp', 'tp'), 'fsdp'), 2)
        P('fsdp', 'tp')
    """
    used = set(_spec.spec_axes(below))
    first, second = _spec.entries(below), _spec.entries(above)
    entries: list[Any] = []
    # A spec that is longer than the array stays so: validation names the leaf.
    for dim in range(max(rank, len(first), len(second))):
        entry = first[dim] if dim < len(first) else None
        if entry is None and dim < len(second):
            entry = second[dim]
            if entry is not _spec.UNCONSTRAINED:
                entry = tuple(axis for axis in _spec.entry_axes(entry) if axis not in used)
                used.update(entry)
        entries.append(entry)
    return _spec.replaced(below, entries)


@dataclasses.dataclass(frozen=True, repr=False)
class Stacked(BuiltinRule):
    """``rule.stacked(n)``: the first *n* dimensions are stacks of layers, which the rule does not see."""

    rule: ShardingRule
    dims: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.dims, bool) or not isinstance(self.dims, int) or self.dims < 1:
            raise RuleError(f'stacked() takes a positive number of dimensions, got {self.dims!r}')

    def __repr__(self) -> str:
        return f'{self.rule!r}.stacked({self.dims})'

    @property
    def parts(self) -> tuple[ShardingRule, ...]:
        """See `ShardingRule.parts`."""
        return (self.rule,)

    @property
    def is_pure(self) -> bool:
        """See `ShardingRule.is_pure`."""
        return is_pure(self.rule)

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Said]:
        """See `ShardingRule.answers`."""
        said = ask(self.rule, self._layer(tree), axis_sizes)
        memo: dict[int, Answer] = {}
        return [self._restacked(one, shape, memo) for one, shape in zip(said, tree.shapes, strict=True)]

    def fallback(self, tree: NamedTree, index: int, axis_sizes: AxisSizes | None) -> Answer | Problem:
        """The default of the rule for one layer."""
        default = self.rule.fallback(self._layer(tree), index, axis_sizes)
        restacked = self._restacked(default, tree.shapes[index], {})
        assert restacked is not None
        return restacked

    def _restacked(self, said: Said, shape: tuple[int, ...], memo: dict[int, Answer]) -> Said:
        """What was said of one layer, for the stack. Arrays without the stacked dimensions stay whole."""
        if not isinstance(said, Answer) or said.spec is None:
            return said
        if len(shape) < self.dims:
            return Answer(REPLICATED, said.origin, f'fewer than {self.dims} dimensions: no stack')
        if id(said) not in memo:
            spec = _spec.replaced(said.spec, [*[None] * self.dims, *_spec.entries(said.spec)])
            memo[id(said)] = dataclasses.replace(said, spec=spec)
        return memo[id(said)]

    def _layer(self, tree: NamedTree) -> NamedTree:
        """The tree of one layer: every leaf without the stacked dimensions."""
        return tree.without_first(self.dims)


@dataclasses.dataclass(frozen=True, repr=False)
class InMemory(BuiltinRule):
    """``rule.with_memory_kind(kind)``: the same specs, in another memory."""

    rule: ShardingRule
    memory_kind: str

    def __repr__(self) -> str:
        return f'{self.rule!r}.with_memory_kind({self.memory_kind!r})'

    @property
    def parts(self) -> tuple[ShardingRule, ...]:
        """See `ShardingRule.parts`."""
        return (self.rule,)

    @property
    def is_pure(self) -> bool:
        """See `ShardingRule.is_pure`."""
        return is_pure(self.rule)

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Said]:
        """See `ShardingRule.answers`."""
        memo: dict[int, Answer] = {}
        return [self._placed(said, memo) for said in ask(self.rule, tree, axis_sizes)]

    def fallback(self, tree: NamedTree, index: int, axis_sizes: AxisSizes | None) -> Answer | Problem:
        """The default of the rule, in this memory."""
        default = self.rule.fallback(tree, index, axis_sizes)
        return default if isinstance(default, Problem) else self._placed(default, {})  # type: ignore[return-value]

    def _placed(self, said: Said, memo: dict[int, Answer]) -> Said:
        if not isinstance(said, Answer) or said.spec is None:
            return said
        if id(said) not in memo:
            memo[id(said)] = dataclasses.replace(said, memory_kind=self.memory_kind)
        return memo[id(said)]
