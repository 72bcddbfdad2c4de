"""`ShardingRule`, the base class that users extend, and the rules that its operators create.

A built-in rule answers about all leaves of a `NamedTree` at once (`ShardingRule.answers`). A user's subclass
implements only `apply`, and thereby decides about every leaf. `_combine` has the answers of ``a | b`` and
``a & b``.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias, TypeGuard

import jax
from jax.sharding import NamedSharding, PartitionSpec

from scalax._core.pytree import partition_specs
from scalax._core.pytree.paths import NamedTree
from scalax._core.pytree.structure_diff import structure_differences
from scalax.errors import Problem, RuleError, ShardingError, StructureError, plural
from scalax.rules._answer import (
    REPLICATED,
    Answer,
    AxisSizes,
    Decision,
    apply_defaults,
    map_decision,
    non_array_problems,
    not_a_spec_problem,
)
from scalax.rules._combine import combined_occupancy, first_answers, overlay


class ShardingRule(abc.ABC):
    """Turns a pytree into PartitionSpecs. Subclasses implement only `apply`.

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

    by_path: ClassVar[bool] = False
    """Whether this rule, apart from its `parts`, looks at paths and ranks only."""

    @abc.abstractmethod
    def apply(self, pytree: Any) -> Any:
        """Returns a pytree of PartitionSpec with the structure of *pytree*.

        Args:
            pytree: a pytree whose leaves have a shape and a dtype.
        """

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer]:
        """Returns one answer for each leaf.

        Args:
            tree: the leaves to decide about.
            axis_sizes: mesh axis name -> size; None without a mesh.
        """
        root, indices = tree.root()
        name = type(self).__name__
        with jax.ensure_compile_time_eval():  # a rule may compute with shapes while JAX traces
            result = self.apply(root.tree)
        try:
            values = root.treedef.flatten_up_to(result)
        except ValueError:
            raise StructureError(
                f'{name}.apply() returned a tree of another structure than its argument:\n'
                f'{structure_differences(result, root.tree)}\n'
                'What to do: return one PartitionSpec for each leaf of the argument, as jax.tree.map does.'
            ) from None
        decisions: dict[Any, Decision] = {}
        answers: list[Answer] = []
        for index in indices:
            value = values[index]
            if value is not None and not isinstance(value, PartitionSpec | NamedSharding):
                answers.append(not_a_spec_problem(root, index, f'{name}.apply', value))
                continue
            if value not in decisions:
                decisions[value] = Decision.of(value, name, 'returned by apply()', 'error')
            answers.append(decisions[value])
        return answers

    @property
    def is_pure(self) -> bool:
        """Whether answers can be cached: equal trees always get the same answers, without warnings."""
        return False

    @property
    def parts(self) -> tuple[ShardingRule, ...]:
        """The rules that this one contains."""
        return ()

    def __or__(self, other: Rule) -> ShardingRule:
        """``a | b``: for each leaf, the first rule that answers decides.

        Example:
            FSDP has no answer for small arrays, and a regex has none for paths that it does not match:

            >>> import numpy as np
            >>> from scalax.sharding import FSDPShardingRule, TreePathShardingRule
            >>> params = {'up': np.zeros((8, 64)), 'down': np.zeros((64, 8)), 'norm': np.zeros(8)}
            >>> by_path = TreePathShardingRule(('up', PartitionSpec(None, 'tp')))
            >>> fsdp = FSDPShardingRule('fsdp', fsdp_axis_size=4, min_fsdp_size=64)
            >>> (by_path | fsdp).apply(params)
            {'down': P('fsdp', None), 'norm': P(), 'up': P(None, 'tp')}
        """
        return FirstAnswer.of(self, as_rule(other)) if is_rule(other) else NotImplemented

    def __ror__(self, other: Rule) -> ShardingRule:
        return FirstAnswer.of(as_rule(other), self) if is_rule(other) else NotImplemented

    def __and__(self, other: Rule) -> ShardingRule:
        """``a & b``: *b* fills the dimensions that *a* left free, with mesh axes *a* did not use.

        Example:
            The first dimension of ``up`` and all of ``down`` are free; ``norm`` is too small:

            >>> import numpy as np
            >>> from scalax.sharding import FSDPShardingRule, TreePathShardingRule
            >>> params = {'up': np.zeros((8, 64)), 'down': np.zeros((64, 8)), 'norm': np.zeros(8)}
            >>> by_path = TreePathShardingRule(('up', PartitionSpec(None, 'tp')), ('', PartitionSpec()))
            >>> fsdp = FSDPShardingRule('fsdp', fsdp_axis_size=4, min_fsdp_size=64)
            >>> (by_path & fsdp).apply(params)
            {'down': P('fsdp',), 'norm': P(), 'up': P('fsdp', 'tp')}
        """
        return Overlay(self, as_rule(other)) if is_rule(other) else NotImplemented

    def __rand__(self, other: Rule) -> ShardingRule:
        return Overlay(as_rule(other), self) if is_rule(other) else NotImplemented

    def stacked(self, dims: int = 1) -> ShardingRule:
        """Returns this rule for stacked layers, such as those of ``jax.lax.scan``.

        Args:
            dims: the number of leading dimensions that stack layers. The rule sees the arrays without them,
                and they are never sharded, not even by a rule after ``&``.
        """
        return Stacked(self, dims)

    def with_memory_kind(self, memory_kind: str) -> ShardingRule:
        """Returns a rule with the same specs in another memory, such as ``'pinned_host'``."""
        return InMemory(self, memory_kind)


Rule: TypeAlias = ShardingRule | PartitionSpec | NamedSharding | None
"""One rule."""


class BuiltinRule(ShardingRule):
    """A rule that implements `answers`, from which `apply` follows."""

    def apply(self, pytree: Any) -> Any:
        """Returns a pytree of PartitionSpec with the structure of *pytree*.

        Args:
            pytree: leaves may be arrays, ``jax.ShapeDtypeStruct``, numpy arrays or Python scalars.

        Raises:
            ShardingError: some leaves have no spec; all of them are named.
        """
        tree = NamedTree.of(pytree)
        if problems := non_array_problems(tree):
            raise ShardingError(problems)
        results = apply_defaults(self.answers(tree, None))
        if problems := [result for result in results if isinstance(result, Problem)]:
            raise ShardingError(problems)
        return tree.treedef.unflatten([result.spec for result in results if isinstance(result, Decision)])

    @abc.abstractmethod
    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer]: ...

    @property
    def is_pure(self) -> bool:
        # A cached answer would warn only once.
        return getattr(self, 'on_indivisible', 'error') != 'warn' and all(map(is_pure, self.parts))

    def _options(self, *names: str) -> list[str]:
        """Returns the named fields that differ from their defaults, as keyword arguments in code."""
        non_default = [name for name in names if getattr(self, name) != getattr(type(self), name)]
        return [f'{name}={getattr(self, name)!r}' for name in non_default]


def answers_of(rule: ShardingRule, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer]:
    """Returns the answers of any rule about every leaf. Does not call the rule if there are no leaves."""
    if not tree.leaves:
        return []
    method = ShardingRule.answers if _overrides_apply(rule) else type(rule).answers
    return method(rule, tree, axis_sizes)


def _overrides_apply(rule: ShardingRule) -> bool:
    """Whether a user's subclass of a built-in rule overrides `apply`, which then takes precedence."""
    return isinstance(rule, BuiltinRule) and type(rule).apply is not BuiltinRule.apply


def answers_by_leaf(
    rules: Mapping[int, ShardingRule], tree: NamedTree, axis_sizes: AxisSizes | None
) -> dict[int, Answer]:
    """Returns the answer for each leaf from its rule. Calls each rule once, for all of its leaves.

    Args:
        rules: leaf index -> its rule.
        tree: the tree that contains the leaves.
        axis_sizes: as in `ShardingRule.answers`.
    """
    groups: dict[int, list[int]] = {}
    for index, rule in rules.items():
        groups.setdefault(id(rule), []).append(index)
    answers: dict[int, Answer] = {}
    for indices in groups.values():
        group_answers = answers_of(rules[indices[0]], tree.select(indices), axis_sizes)
        answers.update(zip(indices, group_answers, strict=True))
    return answers


def decide(rule: Rule, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Decision | Problem]:
    """Returns the decision or problem of every leaf under one rule, which no rule follows."""
    return apply_defaults(answers_of(as_rule(rule), tree, axis_sizes))


def is_pure(rule: ShardingRule) -> bool:
    """Whether the answers of a rule may be reused; see `ShardingRule.is_pure`."""
    return rule.is_pure and not _overrides_apply(rule)


def looks_at_paths_only(rule: ShardingRule) -> bool:
    """Whether the answers of a rule depend on paths and ranks alone, not on the sizes of arrays."""
    return rule.by_path and not _overrides_apply(rule) and all(map(looks_at_paths_only, rule.parts))


# --- Rules that the operators create ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, repr=False)
class ConstantRule(BuiltinRule):
    """A PartitionSpec, a NamedSharding or None as a rule: the same answer for every leaf."""

    value: PartitionSpec | NamedSharding | None
    by_path: ClassVar[bool] = True

    def __repr__(self) -> str:
        return repr(self.value)

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer]:
        origins = {type(None): '', NamedSharding: 'the NamedSharding given'}
        origin = origins.get(type(self.value), 'the spec given')
        return [Decision.of(self.value, origin, '', None)] * len(tree.leaves)


def is_rule(value: Any) -> TypeGuard[Rule]:
    """Whether a value is one rule rather than a tree of rules."""
    return value is None or isinstance(value, ShardingRule | PartitionSpec | NamedSharding)


def as_rule(value: Rule) -> ShardingRule:
    """Converts one rule (see `is_rule`) to a `ShardingRule`."""
    return value if isinstance(value, ShardingRule) else ConstantRule(value)


@dataclasses.dataclass(frozen=True, repr=False)
class FirstAnswer(BuiltinRule):
    """``a | b``: for each leaf, the first rule that answers decides."""

    rules: tuple[ShardingRule, ...]
    by_path: ClassVar[bool] = True

    @classmethod
    def of(cls, *rules: ShardingRule) -> FirstAnswer:
        """Flattens nested rules of this class, because ``|`` is associative."""
        flat_rules: list[ShardingRule] = []
        for rule in rules:
            flat_rules.extend(rule.rules if isinstance(rule, FirstAnswer) else [rule])
        return cls(tuple(flat_rules))

    def __repr__(self) -> str:
        return f'({" | ".join(map(repr, self.rules))})'

    @property
    def parts(self) -> tuple[ShardingRule, ...]:
        return self.rules

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer]:
        return first_answers(tree, [_answers_fn(rule, axis_sizes) for rule in self.rules])


@dataclasses.dataclass(frozen=True, repr=False)
class Overlay(BuiltinRule):
    """``a & b``: *b* fills the dimensions that *a* left free."""

    first: ShardingRule
    second: ShardingRule
    by_path: ClassVar[bool] = True

    def __repr__(self) -> str:
        return f'({self.first!r} & {self.second!r})'

    @property
    def parts(self) -> tuple[ShardingRule, ...]:
        return self.first, self.second

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer]:
        first, second = _answers_fn(self.first, axis_sizes), _answers_fn(self.second, axis_sizes)
        return overlay(tree, first, second, axis_sizes)


def _answers_fn(rule: ShardingRule, axis_sizes: AxisSizes | None) -> Callable[[NamedTree], list[Answer]]:
    return functools.partial(answers_of, rule, axis_sizes=axis_sizes)


@dataclasses.dataclass(frozen=True, repr=False)
class _Wrapper(BuiltinRule):
    """A rule that changes the decisions of another rule."""

    rule: ShardingRule
    by_path: ClassVar[bool] = True

    @property
    def parts(self) -> tuple[ShardingRule, ...]:
        return (self.rule,)

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer]:
        answers = answers_of(self.rule, self._inner_tree(tree), axis_sizes)
        return list(map(functools.cache(self._wrap_answer), answers, map(len, tree.shapes)))

    def _inner_tree(self, tree: NamedTree) -> NamedTree:
        """Returns the tree that the wrapped rule sees."""
        return tree

    def _wrap_answer(self, answer: Answer, rank: int) -> Answer:
        return map_decision(
            answer, lambda decision: decision if decision.spec is None else self._change(decision, rank)
        )

    @abc.abstractmethod
    def _change(self, decision: Decision, rank: int) -> Decision:
        """Changes a decision of the wrapped rule, which has a spec, for an array of this rank."""


@dataclasses.dataclass(frozen=True, repr=False)
class Stacked(_Wrapper):
    """``rule.stacked(n)``: the first *n* dimensions stack layers, and the rule does not see them."""

    dims: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.dims, bool) or not isinstance(self.dims, int) or self.dims < 1:
            raise RuleError(f'stacked() takes a positive number of dimensions, got {self.dims!r}')

    def __repr__(self) -> str:
        return f'{self.rule!r}.stacked({self.dims})'

    def _inner_tree(self, tree: NamedTree) -> NamedTree:
        layer = tree.without_leading_dims(self.dims)
        occupied = map(functools.cache(self._occupied), tree.occupied, map(len, layer.shapes))
        return layer.with_occupied(list(occupied))

    def _occupied(self, occupied: PartitionSpec, rank: int) -> PartitionSpec:
        """Returns what is occupied of one layer. The mesh axes of the stack are in use too."""
        stack, layer = PartitionSpec(*occupied[: self.dims]), PartitionSpec(*occupied[self.dims :])
        return combined_occupancy(
            layer, PartitionSpec(*[None] * rank, partition_specs.spec_axes(stack)), rank
        )

    def _change(self, decision: Decision, rank: int) -> Decision:
        """Extends the decision about one layer to the stack. Arrays of too low a rank are replicated."""
        if rank < self.dims:
            reason = f'fewer than {plural(self.dims, "dimension")}: no stack'
            return dataclasses.replace(decision, spec=REPLICATED, reason=reason, stack_dims=())
        assert decision.spec is not None
        spec = partition_specs.with_entries(
            decision.spec, [*[None] * self.dims, *partition_specs.entries(decision.spec)]
        )
        stack_dims = (*range(self.dims), *(dim + self.dims for dim in decision.stack_dims))
        return dataclasses.replace(decision, spec=spec, stack_dims=stack_dims)


@dataclasses.dataclass(frozen=True, repr=False)
class InMemory(_Wrapper):
    """``rule.with_memory_kind(kind)``: the same specs in another memory."""

    memory_kind: str

    def __post_init__(self) -> None:
        if not isinstance(self.memory_kind, str) or not self.memory_kind:
            raise RuleError(f"a memory kind is a name such as 'pinned_host', got {self.memory_kind!r}")

    def __repr__(self) -> str:
        return f'{self.rule!r}.with_memory_kind({self.memory_kind!r})'

    def _change(self, decision: Decision, rank: int) -> Decision:
        return dataclasses.replace(decision, memory_kind=self.memory_kind)
