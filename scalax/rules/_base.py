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
from typing import Any, ClassVar, cast

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from scalax._paths import NamedTree, has_foreign_dtype, leaf_shape
from scalax._spec import OnIndivisible
from scalax.errors import Problem, ShardingError, StructureError

AxisSizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Answer:
    """What a rule decided about one leaf. One answer may serve many leaves: it names none.

    Attributes:
        spec: the spec; None leaves the leaf to the compiler.
        origin: who said so, as messages and reports show it.
        reason: why, in a few words.
        policies: for dimensions that do not divide, those of the rules that placed some; None is the
            helper's. The strictest counts.
        memory_kind: the memory asked for, such as ``'pinned_host'``; None is the default one.
        clauses: each rule that had a say with the number of its clause, from the outermost inwards, for
            finding unused clauses.
        mesh: the mesh of the NamedSharding that was given, to be checked; None if a spec was.
        notes: what it did not get, or another rule did not add, and why, each in a few words.
        stack: the dimensions that are stacks of layers; ``&`` leaves them whole.
        reordered: whether a NamedSharding was given that orders the devices of its mesh anew.
    """

    spec: PartitionSpec | None
    origin: str
    reason: str = ''
    policies: tuple[OnIndivisible | None, ...] = (None,)
    memory_kind: str | None = None
    clauses: tuple[tuple[ShardingRule, int], ...] = ()
    mesh: Mesh | AbstractMesh | None = None
    stack: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    reordered: bool = False

    @classmethod
    def of(
        cls,
        value: PartitionSpec | NamedSharding | None,
        origin: str,
        reason: str,
        on_indivisible: OnIndivisible | None,
        clauses: tuple[tuple[ShardingRule, int], ...] = (),
    ) -> Answer:
        """The answer of a rule that holds *value* in place of a spec."""
        if isinstance(value, NamedSharding):
            # Left out, the memory kind reads as the default one of the devices.
            plain = NamedSharding(value.mesh, value.spec)
            kind = None if value.memory_kind == plain.memory_kind else value.memory_kind
            if kind is not None:
                plain = NamedSharding(value.mesh, value.spec, memory_kind=kind)
            # What else may be in one has no public name: JAX takes an order of the devices.
            return cls(
                value.spec,
                origin,
                reason,
                (on_indivisible,),
                kind,
                clauses,
                value.mesh,
                reordered=value != plain,
            )
        return cls(value, origin, reason, (on_indivisible,), clauses=clauses)


Said = Answer | Problem | None
"""What a rule says about one leaf: an answer, what is wrong with it, or nothing."""


REPLICATED = PartitionSpec()
ONE_ELEMENT = 'one element'
"""The reason of an answer about an array that there is nothing to decide about."""


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

    by_path: ClassVar[bool] = False
    """Whether it looks at paths and ranks alone; rules that it is made of may look at more."""
    by_shape: ClassVar[bool] = False
    """Whether it looks at shapes, and what is taken of them, alone."""

    @abc.abstractmethod
    def apply(self, pytree: Any) -> Any:
        """Returns a pytree of PartitionSpec with the structure of *pytree*.

        Args:
            pytree: a pytree whose leaves have a shape and a dtype.
        """

    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Said]:
        """One answer a leaf; None where this rule has none, a Problem where it went wrong.

        Args:
            tree: the leaves to decide about.
            axis_sizes: mesh axis name -> size; None when no mesh is known.
        """
        whole, indices = tree.root()
        name = type(self).__name__
        with jax.ensure_compile_time_eval():  # a rule may compute with shapes, also while JAX traces
            applied = self.apply(whole.tree)
        try:
            values = whole.treedef.flatten_up_to(applied)
        except ValueError:
            raise StructureError(
                f'{name}.apply() returned a tree of structure {jax.tree.structure(applied)} for a tree of '
                f'structure {whole.treedef}: it returns one PartitionSpec for each leaf of its argument'
            ) from None
        given: dict[Any, Answer] = {}
        said: list[Said] = []
        for index in indices:
            value = values[index]
            if value is not None and not isinstance(value, PartitionSpec | NamedSharding):
                said.append(not_a_spec(whole, index, f'{name}.apply', value))
                continue
            if value not in given:
                given[value] = Answer.of(value, name, 'said by apply()', 'error')
            said.append(given[value])
        return said

    def fallback(self, tree: NamedTree, index: int, axis_sizes: AxisSizes | None) -> Answer | Problem:
        """What a leaf gets that this rule does not answer: an answer, or the error to raise."""
        return Answer(REPLICATED, type(self).__name__, 'no answer')

    @property
    def is_pure(self) -> bool:
        """Whether a result may be reused: the same answers and no warnings for equal shapes, for ever."""
        return False

    @property
    def parts(self) -> tuple[ShardingRule, ...]:
        """The rules that this one is made of."""
        return ()

    # The classes behind the operators are built on this one, hence the imports inside.

    def __or__(self, other: Any) -> ShardingRule:
        """``a | b``: for each leaf the first that answers.

        Example:
            FSDP has no answer for small arrays, and a regex none for arrays that it does not match:

            >>> import numpy as np
            >>> from scalax.sharding import FSDPShardingRule, TreePathShardingRule
            >>> params = {'up': np.zeros((8, 64)), 'down': np.zeros((64, 8)), 'norm': np.zeros(8)}
            >>> by_path = TreePathShardingRule(('up', PartitionSpec(None, 'tp')))
            >>> fsdp = FSDPShardingRule('fsdp', fsdp_axis_size=4, min_fsdp_size=64)
            >>> (by_path | fsdp).apply(params)
            {'down': P('fsdp', None), 'norm': P(), 'up': P(None, 'tp')}
        """
        from scalax.rules._compose import FirstAnswer, as_rule

        rule = as_rule(other)
        return NotImplemented if rule is None else FirstAnswer.of(self, rule)

    def __ror__(self, other: Any) -> ShardingRule:
        from scalax.rules._compose import FirstAnswer, as_rule

        rule = as_rule(other)
        return NotImplemented if rule is None else FirstAnswer.of(rule, self)

    def __and__(self, other: Any) -> ShardingRule:
        """``a & b``: *b* fills the dimensions that *a* left free, with mesh axes *a* did not use.

        Example:
            Of ``up`` the first dimension is free; ``down`` is free as a whole, and ``norm`` is too small:

            >>> import numpy as np
            >>> from scalax.sharding import FSDPShardingRule, TreePathShardingRule
            >>> params = {'up': np.zeros((8, 64)), 'down': np.zeros((64, 8)), 'norm': np.zeros(8)}
            >>> by_path = TreePathShardingRule(('up', PartitionSpec(None, 'tp')), ('', PartitionSpec()))
            >>> fsdp = FSDPShardingRule('fsdp', fsdp_axis_size=4, min_fsdp_size=64)
            >>> (by_path & fsdp).apply(params)
            {'down': P('fsdp',), 'norm': P(), 'up': P('fsdp', 'tp')}
        """
        from scalax.rules._compose import Overlay, as_rule

        rule = as_rule(other)
        return NotImplemented if rule is None else Overlay(self, rule)

    def __rand__(self, other: Any) -> ShardingRule:
        from scalax.rules._compose import Overlay, as_rule

        rule = as_rule(other)
        return NotImplemented if rule is None else Overlay(rule, self)

    def stacked(self, dims: int = 1) -> ShardingRule:
        """This rule for layers that are stacked, as for ``jax.lax.scan``.

        Args:
            dims: how many first dimensions are stacks; they are never sharded, nor by what is behind
                ``&``, and the rule sees the arrays without them.
        """
        from scalax.rules._compose import Stacked

        return Stacked(self, dims)

    def with_memory_kind(self, memory_kind: str) -> ShardingRule:
        """The same specs, in another memory, such as ``'pinned_host'``."""
        from scalax.rules._compose import InMemory

        return InMemory(self, memory_kind)


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
        if problems := strangers(tree):
            raise ShardingError(problems)
        said = filled(self, self.answers(tree, None), tree, None)
        if problems := [one for one in said if isinstance(one, Problem)]:
            raise ShardingError(problems)
        return tree.treedef.unflatten([answer.spec for answer in cast(list[Answer], said)])

    @abc.abstractmethod
    def answers(self, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Said]:
        """See `ShardingRule.answers`."""


def ask(rule: ShardingRule, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Said]:
    """What any rule says about every leaf; see `ShardingRule.answers`.

    A subclass of a built-in rule that writes an `apply` of its own means that one to count. A rule that has
    no leaf to decide about is not asked, wherever it stands.
    """
    if not len(tree):
        return []
    if _applies_itself(rule):
        return ShardingRule.answers(rule, tree, axis_sizes)
    return rule.answers(tree, axis_sizes)


def ask_each(
    rules: Mapping[int, ShardingRule], tree: NamedTree, axis_sizes: AxisSizes | None
) -> dict[int, Said]:
    """What rules say about the leaves that each is to decide about; a rule is asked once, about all of its.

    Args:
        rules: leaf number -> its rule.
        tree: the leaves, and perhaps others.
        axis_sizes: as in `ask`.
    """
    groups: dict[int, tuple[ShardingRule, list[int]]] = {}
    for index, rule in rules.items():
        groups.setdefault(id(rule), (rule, []))[1].append(index)
    said: dict[int, Said] = {}
    for rule, mine in groups.values():
        said.update(zip(mine, ask(rule, tree.select(mine), axis_sizes), strict=True))
    return said


def is_pure(rule: ShardingRule) -> bool:
    """Whether what `ask` gives may be reused; see `ShardingRule.is_pure`."""
    return rule.is_pure and not _applies_itself(rule)


def looks_at_paths_only(rule: ShardingRule) -> bool:
    """Whether what `ask` gives depends on paths and ranks alone, not on the sizes of arrays."""
    return rule.by_path and not _applies_itself(rule) and all(map(looks_at_paths_only, rule.parts))


def _applies_itself(rule: ShardingRule) -> bool:
    return isinstance(rule, BuiltinRule) and type(rule).apply is not BuiltinRule.apply


def settled(rule: ShardingRule, tree: NamedTree, axis_sizes: AxisSizes | None) -> list[Answer | Problem]:
    """What a rule says about every leaf, with its own default where it has no answer."""
    return filled(rule, ask(rule, tree, axis_sizes), tree, axis_sizes)


def filled(
    rule: ShardingRule, answers: list[Said], tree: NamedTree, axis_sizes: AxisSizes | None
) -> list[Answer | Problem]:
    """The answers with the rule's default in place of None."""
    for index, said in enumerate(answers):
        if said is None:
            answers[index] = rule.fallback(tree, index, axis_sizes)
    return cast(list[Answer | Problem], answers)  # every None was filled


_ARRAYS = (jax.Array, jax.ShapeDtypeStruct)


def strangers(tree: NamedTree) -> list[Problem]:
    """A problem for each leaf that JAX does not take as an array."""
    if all(issubclass(kind, _ARRAYS) for kind in set(map(type, tree.leaves))):
        return []
    return [
        Problem(
            'not-an-array',
            tree.describe(index),
            f'{short(leaf)} is not an array'
            if leaf_shape(leaf) is None
            else f'JAX has no arrays of dtype {leaf.dtype}',
            hint='shard trees of arrays, and take other leaves out (a function may close over them).',
        )
        for index, leaf in enumerate(tree.leaves)
        if leaf_shape(leaf) is None or has_foreign_dtype(leaf)
    ]


def short(value: Any) -> str:
    """What somebody gave, as messages show it: on one line."""
    text = ' '.join(repr(value).split())
    return text if len(text) <= 60 else f'{text[:57]}...'


def not_a_spec(tree: NamedTree, index: int, rule: str, got: Any) -> Problem:
    """The problem of a leaf for which a user's code returned something that is no spec."""
    return Problem(
        'not-a-spec',
        tree.describe(index),
        f'got {got!r} of type {type(got).__name__}, which is not a PartitionSpec',
        rule=rule,
        hint="return a jax.sharding.PartitionSpec, such as PartitionSpec('fsdp', None).",
    )
