"""Resolution of rules on a mesh: from rules and a tree to the sharding of each leaf.

Everything in scalax that shards an array calls `resolve`. All specs are validated here, by
`_core/pytree/spec_validation`, and every decision is recorded (`Resolution.decisions`), so that reports
can show the reasons.
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
from scalax.rules._answer import Decision, non_array_problems
from scalax.rules._indivisible import OnIndivisible, apply_policy
from scalax.rules._mesh_match import matches_mesh
from scalax.rules._rule import Rule, decide, is_rule
from scalax.rules._rule_tree import RuleLike, match_subtrees


class ResolveMode(enum.Enum):
    """The use of the shardings, which determines the answers that a rule may give.

    Attributes:
        CONCRETE: arrays to place. Every leaf needs a sharding.
        BOUNDARY: arguments and outputs of a compiled function. None leaves the choice to the compiler.
        INTERMEDIATE: values inside a compiled function. Dimensions may be UNCONSTRAINED, and one that is
            not divisible is padded, so it only warns.
        EAGER: values inside the same function, run without compiling it. Nothing is padded.
    """

    CONCRETE = enum.auto()
    BOUNDARY = enum.auto()
    INTERMEDIATE = enum.auto()
    EAGER = enum.auto()


_VALUE_MODES = (ResolveMode.INTERMEDIATE, ResolveMode.EAGER)


@dataclasses.dataclass(frozen=True, eq=False)
class Resolution:
    """The result of `resolve`; sequences have one element for each leaf, in tree order.

    Attributes:
        tree: the leaves, with paths from the root of the tree.
        decisions: the decisions, with rule and reason.
        shardings: the NamedShardings; None for leaves left to the compiler.
        treedef: the structure of the tree.
        rule_paths: the leaf paths that the rules saw, from the root of the subtree of each rule.
        rules: the rule of the subtree that contains the leaf.
        any_replicated: whether any leaf is fully replicated.
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
    """Returns one NamedSharding object for equal arguments, because JAX compares identical objects faster."""
    return _cached_named_sharding(mesh, spec, memory_kind)


@functools.lru_cache(maxsize=65536)
def _valid_sharding(mesh: Mesh | AbstractMesh, spec: PartitionSpec, shape: Any) -> NamedSharding | None:
    """Returns the sharding of an array of *shape*, or None if the array cannot have this spec.

    Cached, because trees repeat specs and shapes.
    """
    axes = MeshAxes.of(mesh)
    if (
        partition_specs.UNCONSTRAINED in partition_specs.entries(spec)
        or spec_validation.faults(spec, shape, axes)
        or spec_validation.indivisible_dims(spec, shape, axes)
    ):
        return None
    return named_sharding(mesh, partition_specs.canonical(spec))


# Called with three positional arguments only, because f(a, b) and f(a, b, None) are two calls for the cache.
_cached_named_sharding = functools.lru_cache(maxsize=65536)(
    lambda mesh, spec, memory_kind: NamedSharding(mesh, spec, memory_kind=memory_kind)
)


def resolve(
    rules: RuleLike,
    pytree: Any,
    mesh: Mesh | AbstractMesh,
    *,
    mode: ResolveMode = ResolveMode.CONCRETE,
    where: str = '',
    prefix: str | None = None,
    on_indivisible: OnIndivisible = 'error',
    as_leaf: Callable[[Any], Any] | None = None,
) -> Resolution:
    """Decides the sharding of every leaf of *pytree*.

    Args:
        rules: a rule, a PartitionSpec, a NamedSharding of this mesh, None, or a pytree prefix of these.
        pytree: a pytree whose leaves have a shape and a dtype, or are Python numbers.
        mesh: the mesh; an AbstractMesh is enough.
        mode: the use of the shardings.
        where: the name of the tree in messages, such as ``"the arguments of 'step'"``.
        prefix: the path of the tree in a larger one, if any; precedes leaf paths in messages.
        on_indivisible: the policy for bare specs. Rules have their own.
        as_leaf: converts each leaf to the value that rules see.

    Raises:
        StructureError: *rules* is not a prefix of *pytree*.
        ShardingError: some leaves cannot be sharded as requested; the message names all of them.
    """
    task = _Task(mesh, MeshAxes.of(mesh), mode, where, on_indivisible)
    is_single_rule = is_rule(rules)
    parts: list[tuple[Rule, NamedTree]]
    if is_single_rule:
        parts = [(cast(Rule, rules), NamedTree.of(pytree, prefix, as_leaf))]
    else:
        subtrees = match_subtrees(rules, pytree, f'{prefix!r} of {where}' if prefix and where else where)
        parts = [
            (subtree.rule, NamedTree.of(subtree.tree, join(prefix, subtree.path), as_leaf))
            for subtree in subtrees
        ]
    task.problems = [problem for _, tree in parts for problem in non_array_problems(tree)]
    if task.problems:
        task.report()
    decisions: list[Any] = []  # a Problem among them ends this resolve
    shardings: list[NamedSharding | None] = []
    for rule, tree in parts:
        try:
            answers = decide(rule, tree, task.axes.sizes)
        except ShardingError as error:
            # A user's rule raised it. The loop goes on, to report the problems of all subtrees at once.
            task.problems.extend(error.problems)
        else:
            decisions.extend(answers)
            shardings.extend(task.shardings(tree, answers))
    if task.problems or task.warnings:
        task.report()
    named_tree = parts[0][1] if is_single_rule else NamedTree.of(pytree, prefix, as_leaf)
    rule_paths = [path for _, tree in parts for path in tree.paths]
    rule_of_leaf = [rule for rule, tree in parts for _ in tree.paths]
    any_replicated = True in [
        sharding is not None and sharding.is_fully_replicated for sharding in {*shardings}
    ]
    return Resolution(
        named_tree, decisions, shardings, named_tree.treedef, rule_paths, rule_of_leaf, any_replicated
    )


@dataclasses.dataclass
class _Task:
    """One call of `resolve`, which collects the problems of all leaves."""

    mesh: Mesh | AbstractMesh
    axes: MeshAxes
    mode: ResolveMode
    where: str
    on_indivisible: OnIndivisible
    problems: list[Problem] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)  # about indivisible dimensions

    def shardings(self, tree: NamedTree, answers: list[Decision | Problem]) -> list[NamedSharding | None]:
        """Validates the answer for each leaf, once for equal answers and shapes; returns the shardings."""
        if self.mode in _VALUE_MODES and AxisType.Auto not in self.axes.types.values():
            # JAX accepts UNCONSTRAINED only with an Auto axis; elsewhere the value's type has the axes.
            answers = [
                _with_filled_spec(answer, leaf) for answer, leaf in zip(answers, tree.leaves, strict=True)
            ]
        keys = list(zip(map(id, answers), tree.shapes, strict=True))
        first_leaves = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
        counts = len(self.problems), len(self.warnings)
        shardings = {key: self._sharding(tree, i, answers[i]) for key, i in first_leaves.items()}
        if counts != (len(self.problems), len(self.warnings)):
            # Report each problem for every leaf that has it, in tree order.
            del self.problems[counts[0] :], self.warnings[counts[1] :]
            for i, answer in enumerate(answers):
                self._sharding(tree, i, answer)
        return [shardings[key] for key in keys]

    def _sharding(self, tree: NamedTree, index: int, answer: Decision | Problem) -> NamedSharding | None:
        """Returns the sharding of one leaf; collects its problems and warnings."""
        if isinstance(answer, Problem):
            self.problems.append(answer)
            return None
        spec, shape, memory_kind = answer.spec, tree.shapes[index], answer.memory_kind
        if spec is None:
            if self.mode is ResolveMode.CONCRETE:
                self._add_problems(tree, index, answer, [_NO_SHARDING])
            return None
        if answer.warnings:
            self.warnings += [f'{tree.describe(index)}, {answer.origin}: {text}' for text in answer.warnings]
        if AxisType.Manual in self.axes.types.values():
            spec = partition_specs.without_manual_axes(spec, self.axes)
        of_values = self.mode in _VALUE_MODES
        faults = [
            _other_mesh_fault(sharding)
            for sharding in answer.named_shardings
            if not matches_mesh(sharding, self.mesh, of_values)
        ]
        if not faults and memory_kind is None:
            valid_sharding = _valid_sharding(self.mesh, spec, shape)
            if valid_sharding is not None:
                return valid_sharding
        # A wrong mesh causes other faults, so it has to be fixed first.
        faults = faults or spec_validation.faults(spec, shape, self.axes)
        if partition_specs.UNCONSTRAINED in partition_specs.entries(spec) and not of_values:
            faults.append(_NOT_CONSTRAINED)
        default_kinds = None, 'device', named_sharding(self.mesh, PartitionSpec()).memory_kind
        if of_values and memory_kind not in default_kinds:
            faults.append(_constraint_memory_fault(memory_kind))
        if faults:
            self._add_problems(tree, index, answer, faults)
            return None
        policies = [policy or self.on_indivisible for policy in answer.policies]
        pads = self.mode is ResolveMode.INTERMEDIATE
        spec, faults, warnings = apply_policy(spec, shape, self.axes, policies, answer.origin, pads)
        self._add_problems(tree, index, answer, faults)
        self.warnings += [f'{tree.describe(index)}, {text}' for text in warnings]
        try:
            return named_sharding(self.mesh, partition_specs.canonical(spec), memory_kind)
        except ValueError as error:
            if memory_kind is None:
                raise
            self._add_problems(tree, index, answer, [_unknown_memory_fault(memory_kind, error)])
            return None

    def _add_problems(
        self, tree: NamedTree, index: int, answer: Decision, faults: list[spec_validation.Fault]
    ) -> None:
        """Collects the faults of the spec of a leaf."""
        spec = '' if answer.spec is None else partition_specs.text(answer.spec)
        self.problems.extend(
            Problem(fault.kind, tree.describe(index), fault.detail, spec, answer.origin, fault.hint)
            for fault in faults
        )

    def report(self) -> None:
        """Raises about all problems; without problems, issues the warnings."""
        if self.problems:
            raise ShardingError(self.problems, str(self.axes), self.where)
        of = f' of {self.where}' if self.where else ''
        warn(
            f'dimensions{of} that are not divisible (mesh: {self.axes}):\n{shown_leaves(self.warnings)}',
            IndivisibleWarning,
        )


def _with_filled_spec(answer: Decision | Problem, leaf: Any) -> Decision | Problem:
    if isinstance(answer, Problem) or answer.spec is None:
        return answer
    if partition_specs.UNCONSTRAINED not in partition_specs.entries(answer.spec):
        return answer
    spec = partition_specs.with_entries(answer.spec, fill_unconstrained(answer.spec, leaf))
    return dataclasses.replace(answer, spec=spec)


def fill_unconstrained(spec: PartitionSpec, leaf: Any) -> list[Any]:
    """Returns the entries of *spec*, with Explicit axes of the leaf's type in place of UNCONSTRAINED.

    Axes that the spec uses for another dimension are left out.
    """
    typed_entries = [*partition_specs.entries(jax.typeof(leaf).sharding.spec), *[None] * len(spec)]
    used = partition_specs.spec_axes(spec)
    return [
        tuple(axis for axis in partition_specs.entry_axes(typed_entries[dim]) if axis not in used)
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


def _other_mesh_fault(sharding: NamedSharding) -> spec_validation.Fault:
    return spec_validation.Fault(
        'other-mesh',
        f'the NamedSharding is for another mesh: {sharding.mesh}',
        "give PartitionSpecs, or NamedShardings on the helper's mesh: the same devices in the same order, "
        'with axes of the same types.',
    )


def _unknown_memory_fault(memory_kind: str, error: ValueError) -> spec_validation.Fault:
    return spec_validation.Fault(
        'memory-kind',
        f'the devices have no memory {memory_kind!r}; JAX reports: {error}',
        "name a memory kind of the devices, such as 'device' or 'pinned_host'.",
    )


def _constraint_memory_fault(memory_kind: str | None) -> spec_validation.Fault:
    return spec_validation.Fault(
        'memory-kind',
        f'a constraint cannot move a value to {memory_kind!r}: JAX ignores its memory kind',
        'give a rule without a memory kind here, and move arrays outside, or with out_shardings.',
    )
