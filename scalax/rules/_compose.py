"""How do rules combine? ``a | b``, ``a & b``, ``rule.stacked(n)``, ``rule.with_memory_kind(kind)``.

Users write the operators; these classes are what they make. The precedence, leaf by leaf:

==============================  ===========================  =======================================
what *a* says                   ``a | b`` gives              ``a & b`` gives
==============================  ===========================  =======================================
a spec                          that spec                    that spec; *b* fills what it left free
``PartitionSpec()``             ``PartitionSpec()``          what *b* says
a spec, ``.stacked(n)``         that spec                    that spec; *b* fills what it left free,
                                                             but never the first *n* dimensions
None (leave to the compiler)    None                         None
no answer (FSDP: too small)     what *b* says                what *b* says
strict, and no regex matches    what *b* says                an error
==============================  ===========================  =======================================

Where *b* has no answer, or says None, ``a & b`` leaves a spec of *a* as it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jax.sharding import NamedSharding, PartitionSpec

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
from scalax.rules._free import taken_by
from scalax.rules._merge import left, merged, spec_of, two_meshes, unanswered


@dataclasses.dataclass(frozen=True, repr=False)
class Everywhere(BuiltinRule):
    """A PartitionSpec, a NamedSharding or None where a rule is wanted: it answers every leaf."""

    value: PartitionSpec | NamedSharding | None
    by_path: ClassVar[bool] = True

    def __repr__(self) -> str:
        return repr(self.value)

    @property
    def is_pure(self) -> bool:
        """See `ShardingRule.is_pure`."""
        return True

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Said]:
        """See `ShardingRule.answers`."""
        names = {type(None): '', NamedSharding: 'the NamedSharding given'}
        origin = names.get(type(self.value), 'the spec given')
        return [Answer.of(self.value, origin, '', None)] * len(tree)


def as_rule(value: Any) -> ShardingRule | None:
    """What stands beside an operator, as a rule; None for what is none."""
    if value is None or isinstance(value, PartitionSpec | NamedSharding):
        return Everywhere(value)
    return value if isinstance(value, ShardingRule) else None


@dataclasses.dataclass(frozen=True, repr=False)
class FirstAnswer(BuiltinRule):
    """``a | b``: for each leaf the first rule that answers; see the table of this module."""

    rules: tuple[ShardingRule, ...]
    by_path: ClassVar[bool] = True

    @classmethod
    def of(cls, *rules: ShardingRule) -> FirstAnswer:
        """Flattens nested ones: ``|`` is associative."""
        flat: list[ShardingRule] = []
        for rule in rules:
            flat.extend(rule.rules if isinstance(rule, FirstAnswer) else [rule])
        return cls(tuple(flat))

    def __repr__(self) -> str:
        # Specs have no `|` of their own: each of those in front stands beside a rule in brackets.
        specs = 0
        while specs < len(self.rules) - 1 and isinstance(self.rules[specs], Everywhere):
            specs += 1
        first = max(specs - 1, 0)
        text = f'({" | ".join(map(repr, self.rules[first:]))})'
        for spec in reversed(self.rules[:first]):
            text = f'({spec!r} | {text})'
        return text

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
    by_path: ClassVar[bool] = True

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
        part = tree.select(open_)
        outers = part.taken or [REPLICATED] * len(part)
        first = left(outers, [below[i] for i in open_], part.shapes)
        keys = [
            (outer, spec_of(said), len(shape))
            for outer, said, shape in zip(outers, first, part.shapes, strict=True)
        ]
        known = {key: taken_by(*key) for key in dict.fromkeys(keys)}
        taken = [known[key] for key in keys]
        part = part.with_taken(taken)
        above = left(outers, ask(self.second, part, axis_sizes), part.shapes)
        answers = list(below)
        # One answer for equal leaves, as each rule gives: what is equal is then validated once.
        memo: dict[Any, Answer] = {}
        for j, (i, mine, said) in enumerate(zip(open_, first, above, strict=True)):
            answers[i] = mine
            if not isinstance(mine, Answer) or isinstance(said, Problem):
                answers[i] = said
            elif said is None:
                alike = (part.shapes[j], id(taken[j])) if self.second.by_shape else j
                asked = id(mine), alike
                if asked not in memo:
                    default = self.second.fallback(part, j, axis_sizes)
                    # Reports show the reason; an error of a strict rule is none here.
                    same = id(mine), default.reason if isinstance(default, Answer) else ''
                    memo[asked] = memo.setdefault(same, unanswered(mine, default))
                answers[i] = memo[asked]
            elif said.spec is not None:
                if None not in (mine.mesh, said.mesh) and mine.mesh != said.mesh:
                    answers[i] = two_meshes(tree, i, mine, said)
                    continue
                key = id(mine), id(said), tree.shapes[i]
                if key not in memo:
                    memo[key] = merged(mine, said, tree.shapes[i], axis_sizes or {})
                answers[i] = memo[key]
        return answers

    def fallback(self, tree: NamedTree, index: int, axis_sizes: AxisSizes | None) -> Answer | Problem:
        """The default of the second rule: the first one had no answer either."""
        return self.second.fallback(tree, index, axis_sizes)


def _is_open(said: Said) -> bool:
    """Whether another rule may still say something: not where the compiler was given the choice."""
    return not (isinstance(said, Answer) and said.spec is None)


@dataclasses.dataclass(frozen=True, repr=False)
class _Around(BuiltinRule):
    """A rule that changes what one other rule says."""

    rule: ShardingRule
    by_path: ClassVar[bool] = True

    @property
    def parts(self) -> tuple[ShardingRule, ...]:
        """See `ShardingRule.parts`."""
        return (self.rule,)

    @property
    def is_pure(self) -> bool:
        """See `ShardingRule.is_pure`."""
        return is_pure(self.rule)


@dataclasses.dataclass(frozen=True, repr=False)
class Stacked(_Around):
    """``rule.stacked(n)``: the first *n* dimensions are stacks of layers, which the rule does not see."""

    dims: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.dims, bool) or not isinstance(self.dims, int) or self.dims < 1:
            raise RuleError(f'stacked() takes a positive number of dimensions, got {self.dims!r}')

    def __repr__(self) -> str:
        return f'{self.rule!r}.stacked({self.dims})'

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Said]:
        """See `ShardingRule.answers`."""
        memo: dict[int, Answer] = {}
        layer = self._layer(tree)
        return [
            self._restacked(said, shape, memo) if isinstance(said, Answer) else said
            for said, shape in zip(ask(self.rule, layer, axis_sizes), tree.shapes, strict=True)
        ]

    def _layer(self, tree: NamedTree) -> NamedTree:
        layer = tree.without_first(self.dims)
        taken = list(map(self._taken, tree.taken, layer.shapes))
        return layer.with_taken(taken) if taken else layer

    def _taken(self, taken: PartitionSpec, shape: tuple[int, ...]) -> PartitionSpec:
        """What was taken of one layer; the axes of the stack are in use all the same."""
        stack, layer = PartitionSpec(*taken[: self.dims]), PartitionSpec(*taken[self.dims :])
        return taken_by(layer, PartitionSpec(*[None] * len(shape), _spec.spec_axes(stack)), len(shape))

    def fallback(self, tree: NamedTree, index: int, axis_sizes: AxisSizes | None) -> Answer | Problem:
        """The default of the rule for one layer."""
        # This leaf alone: the whole tree once for each leaf would take the square of its size.
        one = self._layer(dataclasses.replace(tree.select([index]), parent=None))
        default = self.rule.fallback(one, 0, axis_sizes)
        return default if isinstance(default, Problem) else self._restacked(default, tree.shapes[index], {})

    def _restacked(self, said: Answer, shape: tuple[int, ...], memo: dict[int, Answer]) -> Answer:
        """What was said of one layer, for the stack. Arrays without the stacked dimensions stay whole."""
        if said.spec is None:
            return said
        if len(shape) < self.dims:
            reason = f'fewer than {self.dims} dimension{"" if self.dims == 1 else "s"}: no stack'
            return dataclasses.replace(said, spec=REPLICATED, reason=reason, stack=())
        if id(said) not in memo:
            spec = _spec.replaced(said.spec, [*[None] * self.dims, *_spec.entries(said.spec)])
            stack = (*range(self.dims), *(dim + self.dims for dim in said.stack))
            memo[id(said)] = dataclasses.replace(said, spec=spec, stack=stack)
        return memo[id(said)]


@dataclasses.dataclass(frozen=True, repr=False)
class InMemory(_Around):
    """``rule.with_memory_kind(kind)``: the same specs, in another memory."""

    memory_kind: str

    def __post_init__(self) -> None:
        if not isinstance(self.memory_kind, str) or not self.memory_kind:
            raise RuleError(f"a memory kind is a name such as 'pinned_host', got {self.memory_kind!r}")

    def __repr__(self) -> str:
        return f'{self.rule!r}.with_memory_kind({self.memory_kind!r})'

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Said]:
        """See `ShardingRule.answers`."""
        memo: dict[int, Answer] = {}
        return [
            self._placed(said, memo) if isinstance(said, Answer) else said
            for said in ask(self.rule, tree, axis_sizes)
        ]

    def fallback(self, tree: NamedTree, index: int, axis_sizes: AxisSizes | None) -> Answer | Problem:
        """The default of the rule, in this memory."""
        default = self.rule.fallback(tree, index, axis_sizes)
        return default if isinstance(default, Problem) else self._placed(default, {})

    def _placed(self, said: Answer, memo: dict[int, Answer]) -> Answer:
        if said.spec is None:
            return said
        if id(said) not in memo:
            memo[id(said)] = dataclasses.replace(said, memory_kind=self.memory_kind)
        return memo[id(said)]
