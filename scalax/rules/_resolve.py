"""Resolving: the sharding of each leaf of a tree on a mesh. The one place where rules meet both.

Everything in scalax that places an array comes through `resolve`: all validation is here, and every
decision is recorded (`Resolution.decisions`), so that reports can show why.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from scalax._core.pytree import partition_specs, spec_validation
from scalax._core.pytree.partition_specs import MeshAxes
from scalax._core.pytree.paths import NamedTree, join
from scalax.errors import IndivisibleWarning, Problem, ShardingError, shown_leaves, warn
from scalax.rules._answer import Decision, non_arrays
from scalax.rules._indivisible import OnIndivisible, apply_policy
from scalax.rules._mesh_match import matches_mesh
from scalax.rules._rule import Rule, decide, is_rule
from scalax.rules._rule_tree import RuleLike, match_subtrees


class ResolveMode(enum.Enum):
    """What the shardings are for, which decides what a rule may answer.

    CONCRETE: arrays are placed: every leaf needs a sharding. BOUNDARY: arguments and outputs of a
    compiled function: None leaves the choice to the compiler. INTERMEDIATE: values inside a compiled
    function: UNCONSTRAINED dimensions are fine, and one that does not divide is padded, so it only warns.
    EAGER: the same function, run without being compiled: nothing is padded.
    """

    CONCRETE = enum.auto()
    BOUNDARY = enum.auto()
    INTERMEDIATE = enum.auto()
    EAGER = enum.auto()


_VALUE_MODES = (ResolveMode.INTERMEDIATE, ResolveMode.EAGER)


@dataclasses.dataclass(frozen=True, eq=False)
class Resolution:
    """The outcome of one resolve, leaf by leaf in tree order.

    Attributes:
        tree: the leaves, with paths from the root of the tree that was given.
        decisions: what was decided, by which rule and why.
        shardings: the NamedShardings; None where the compiler decides.
        treedef: the structure of the tree.
        rule_paths: the leaf paths as the rules saw them: from the root of the subtree each decides about.
        rules: the rule of the subtree of each leaf.
        any_replicated: whether each device holds all of some leaf.
    """

    tree: NamedTree
    decisions: list[Decision]
    shardings: list[NamedSharding | None]
    treedef: Any
    rule_paths: Sequence[str]
    rules: Sequence[Rule]
    any_replicated: bool


def named_sharding(
    mesh: Mesh | AbstractMesh, spec: PartitionSpec, memory_kind: str | None = None
) -> NamedSharding:
    """The one NamedSharding object of this mesh, spec and memory: equal objects cost JAX a comparison."""
    return _named_sharding(mesh, spec, memory_kind)


@functools.lru_cache(maxsize=65536)
def _valid_sharding(mesh: Mesh | AbstractMesh, spec: PartitionSpec, shape: Any) -> NamedSharding | None:
    """The sharding of an array of *shape*, if it can have this spec; remembered, since trees repeat them."""
    axes = MeshAxes.of(mesh)
    open_dims = partition_specs.UNCONSTRAINED in partition_specs.entries(spec)
    if (
        open_dims
        or spec_validation.faults(spec, shape, axes)
        or spec_validation.indivisible_dims(spec, shape, axes)
    ):
        return None
    return named_sharding(mesh, partition_specs.canonical(spec))


# Inside, because the cache takes f(a, b) and f(a, b, None) for different calls.
_named_sharding = functools.lru_cache(maxsize=65536)(
    lambda mesh, spec, memory_kind: NamedSharding(mesh, spec, memory_kind=memory_kind)
)


def resolve(
    rules: RuleLike,
    pytree: Any,
    mesh: Mesh | AbstractMesh,
    *,
    mode: ResolveMode = ResolveMode.CONCRETE,
    where: str = '',
    at: str | None = None,
    on_indivisible: OnIndivisible = 'error',
    as_leaf: Callable[[Any], Any] | None = None,
) -> Resolution:
    """Decides the sharding of every leaf of *pytree*.

    Args:
        rules: a rule, a PartitionSpec, a NamedSharding of this mesh, None, or a pytree prefix of these.
        pytree: the leaves are anything with a shape and a dtype, or Python numbers.
        mesh: the mesh; an AbstractMesh is enough.
        mode: what the shardings are for.
        where: what the tree is called in messages, such as ``"the arguments of 'step'"``.
        at: the path of the tree in a larger one, if any; prefixed to leaf paths in messages.
        on_indivisible: the policy of bare specs. Rules carry their own.
        as_leaf: what rules see in place of each leaf.

    Raises:
        StructureError: *rules* is not a prefix of *pytree*.
        ShardingError: some leaves cannot be sharded as asked; every one of them is named.
    """
    task = _Task(mesh, MeshAxes.of(mesh), mode, where, on_indivisible)
    alone = is_rule(rules)
    parts: list[tuple[Rule, NamedTree]]
    if alone:
        parts = [(cast(Rule, rules), NamedTree.of(pytree, at, as_leaf))]
    else:
        subtrees = match_subtrees(rules, pytree, f'{at!r} of {where}' if at and where else where)
        parts = [(each.rule, NamedTree.of(each.tree, join(at, each.path), as_leaf)) for each in subtrees]
    task.problems = [problem for _, tree in parts for problem in non_arrays(tree)]
    if task.problems:
        task.report()
    decisions: list[Any] = []  # a Problem among them ends this resolve
    shardings: list[NamedSharding | None] = []
    for rule, tree in parts:
        try:
            answers = decide(rule, tree, task.axes.sizes)
        except ShardingError as error:
            # Raised by a user's rule. The other subtrees are checked too, to report all problems at once.
            task.problems.extend(error.problems)
        else:
            decisions.extend(answers)
            shardings.extend(task.shardings(tree, answers))
    if task.problems or task.passed:
        task.report()
    whole = parts[0][1] if alone else NamedTree.of(pytree, at, as_leaf)
    seen = [path for _, tree in parts for path in tree.paths]
    each = [rule for rule, tree in parts for _ in tree.paths]
    any_whole = True in [placed is not None and placed.is_fully_replicated for placed in {*shardings}]
    return Resolution(whole, decisions, shardings, whole.treedef, seen, each, any_whole)


@dataclasses.dataclass
class _Task:
    """One resolve: collects problems until all leaves have been seen."""

    mesh: Mesh | AbstractMesh
    axes: MeshAxes
    mode: ResolveMode
    where: str
    on_indivisible: OnIndivisible
    problems: list[Problem] = dataclasses.field(default_factory=list)
    # Dimensions that do not divide, and may by the policy.
    passed: list[str] = dataclasses.field(default_factory=list)

    def shardings(self, tree: NamedTree, answers: list[Decision | Problem]) -> list[NamedSharding | None]:
        """Validates each answer for its leaf; equal answers for equal shapes are checked once."""
        if self.mode in _VALUE_MODES and AxisType.Auto not in self.axes.types.values():
            # Without an Auto axis JAX has no UNCONSTRAINED; the axes of the type take its place.
            answers = [_typed(answer, leaf) for answer, leaf in zip(answers, tree.leaves, strict=True)]
        keys = list(zip(map(id, answers), tree.shapes, strict=True))
        first = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
        before = len(self.problems), len(self.passed)
        checked = {key: self._checked(tree, i, answers[i]) for key, i in first.items()}
        if before != (len(self.problems), len(self.passed)):
            # Report each problem for every leaf that has it, in tree order.
            del self.problems[before[0] :], self.passed[before[1] :]
            for i, answer in enumerate(answers):
                self._checked(tree, i, answer)
        return [checked[key] for key in keys]

    def _checked(self, tree: NamedTree, index: int, answer: Decision | Problem) -> NamedSharding | None:
        """The sharding of one leaf; collects what is wrong with it."""
        if isinstance(answer, Problem):
            self.problems.append(answer)
            return None
        spec, shape, kind = answer.spec, tree.shapes[index], answer.memory_kind
        if spec is None:
            if self.mode is ResolveMode.CONCRETE:
                self._add(tree, index, answer, [_NO_SHARDING])
            return None
        if answer.passed:
            self.passed += [f'{tree.describe(index)}, {answer.origin}: {text}' for text in answer.passed]
        if AxisType.Manual in self.axes.types.values():
            spec = partition_specs.without_manual_axes(spec, self.axes)
        of_values = self.mode in _VALUE_MODES
        faults = [
            _of_another_mesh(given) for given in answer.given if not matches_mesh(given, self.mesh, of_values)
        ]
        if not faults and kind is None:
            valid = _valid_sharding(self.mesh, spec, shape)
            if valid is not None:
                return valid
        # Other faults follow from a wrong mesh, which has to be fixed first.
        faults = faults or spec_validation.faults(spec, shape, self.axes)
        if partition_specs.UNCONSTRAINED in partition_specs.entries(spec) and not of_values:
            faults.append(_NOT_CONSTRAINED)
        default = None, 'device', named_sharding(self.mesh, PartitionSpec()).memory_kind
        if of_values and kind not in default:
            faults.append(_stays_in_memory(kind))
        if faults:
            self._add(tree, index, answer, faults)
            return None
        policies = [policy or self.on_indivisible for policy in answer.policies]
        pads = self.mode is ResolveMode.INTERMEDIATE
        spec, uneven, warned = apply_policy(spec, shape, self.axes, policies, answer.origin, pads)
        self._add(tree, index, answer, uneven)
        self.passed += [f'{tree.describe(index)}, {text}' for text in warned]
        try:
            return named_sharding(self.mesh, partition_specs.canonical(spec), kind)
        except ValueError as error:
            if kind is None:
                raise
            self._add(tree, index, answer, [_no_such_memory(kind, error)])
            return None

    def _add(
        self, tree: NamedTree, index: int, answer: Decision, faults: list[spec_validation.Fault]
    ) -> None:
        """Collects what is wrong with a leaf."""
        spec = '' if answer.spec is None else partition_specs.text(answer.spec)
        self.problems.extend(
            Problem(fault.kind, tree.describe(index), fault.detail, spec, answer.origin, fault.hint)
            for fault in faults
        )

    def report(self) -> None:
        """Raises about all problems, or warns about dimensions that do not divide and may."""
        if self.problems:
            raise ShardingError(self.problems, str(self.axes), self.where)
        of = f' of {self.where}' if self.where else ''
        warn(
            f'dimensions{of} that do not divide (mesh: {self.axes}):\n{shown_leaves(self.passed)}',
            IndivisibleWarning,
        )


def _typed(answer: Decision | Problem, leaf: Any) -> Decision | Problem:
    if isinstance(answer, Problem) or answer.spec is None:
        return answer
    if partition_specs.UNCONSTRAINED not in partition_specs.entries(answer.spec):
        return answer
    spec = partition_specs.with_entries(answer.spec, fill_unconstrained(answer.spec, leaf))
    return dataclasses.replace(answer, spec=spec)


def fill_unconstrained(spec: PartitionSpec, leaf: Any) -> list[Any]:
    """The entries of *spec*, and for UNCONSTRAINED ones the Explicit axes that the leaf's type has there.

    An axis that the spec names for another dimension is left out here.
    """
    now = [*partition_specs.entries(jax.typeof(leaf).sharding.spec), *[None] * len(spec)]
    used = partition_specs.spec_axes(spec)
    return [
        tuple(axis for axis in partition_specs.entry_axes(now[dim]) if axis not in used)
        if entry is partition_specs.UNCONSTRAINED
        else entry
        for dim, entry in enumerate(partition_specs.entries(spec))
    ]


_NO_SHARDING = spec_validation.Fault(
    'no-sharding',
    'the rule leaves this leaf to the compiler (None), but there is no compiler here',
    'None is for sjit, constraints and annotations; give PartitionSpec() to replicate.',
)
_NOT_CONSTRAINED = spec_validation.Fault(
    'unconstrained',
    'an UNCONSTRAINED dimension does not determine where an array is placed',
    'UNCONSTRAINED is for constraints and annotations inside a compiled function.',
)


def _of_another_mesh(sharding: NamedSharding) -> spec_validation.Fault:
    return spec_validation.Fault(
        'other-mesh',
        f'the NamedSharding is of another mesh: {sharding.mesh}',
        "give PartitionSpecs, or NamedShardings of the helper's own mesh: of the same devices in the same "
        'order, with axes of the same types.',
    )


def _no_such_memory(kind: str, error: ValueError) -> spec_validation.Fault:
    return spec_validation.Fault(
        'memory-kind',
        f'the devices have no memory {kind!r}; JAX reports: {error}',
        "name a memory kind of the devices, such as 'device' or 'pinned_host'.",
    )


def _stays_in_memory(kind: str | None) -> spec_validation.Fault:
    return spec_validation.Fault(
        'memory-kind',
        f'a constraint moves no value to {kind!r}: JAX drops the memory kind of one',
        'give a rule without a memory kind here, and move arrays outside, or by out_shardings.',
    )
