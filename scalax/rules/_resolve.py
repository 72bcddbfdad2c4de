"""Resolving: the sharding of each leaf of a tree on a mesh. The one place where rules meet both.

Everything in scalax that places an array comes through `resolve`: all validation is here, and every
decision is recorded (`Resolution.decisions`), so that reports can say why.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from scalax._tree import specs
from scalax._tree.path_identity import uncertain_paths
from scalax._tree.paths import NamedTree, join
from scalax._tree.specs import MeshAxes, OnIndivisible
from scalax.errors import IndivisibleWarning, Problem, ShardingError, shown_leaves, warn
from scalax.rules._base import Rule, RuleLike, ShardingRule, as_rule, decide, is_pure, is_rule
from scalax.rules._decisions import Decision, non_arrays
from scalax.rules._prefix import key_of, split


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
        seen: the leaf paths as the rules saw them: from the root of the subtree each decides about.
    """

    tree: NamedTree
    decisions: list[Decision]
    shardings: list[NamedSharding | None]
    treedef: Any
    seen: Sequence[str] = ()


def named_sharding(
    mesh: Mesh | AbstractMesh, spec: PartitionSpec, memory_kind: str | None = None
) -> NamedSharding:
    """The one NamedSharding object of this mesh, spec and memory: equal objects cost JAX a comparison."""
    return _named_sharding(mesh, spec, memory_kind)


@functools.lru_cache(maxsize=65536)
def _valid_sharding(mesh: Mesh | AbstractMesh, spec: PartitionSpec, shape: Any) -> NamedSharding | None:
    """The sharding of an array of *shape*, if it can have this spec; remembered, since trees repeat them."""
    axes = MeshAxes.of(mesh)
    open_dims = specs.UNCONSTRAINED in specs.entries(spec)
    if open_dims or specs.faults(spec, shape, axes) or specs.indivisible(spec, shape, axes):
        return None
    return named_sharding(mesh, specs.canonical(spec))


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
    task = _Task(mesh, mode, where, on_indivisible)
    parts = split(rules, pytree, f'{at!r} of {where}' if at and where else where)
    trees = [NamedTree.of(part.tree, join(at, part.path), as_leaf) for part in parts]
    for tree in trees:
        task.problems.extend(non_arrays(tree))
    if task.problems:
        task.finish()
    decisions, shardings = [], []
    for part, tree in zip(parts, trees, strict=True):
        decided = task.decide(part.rule, tree)
        decisions.extend(cast(list[Decision], decided))  # a Problem among them ends this resolve
        shardings.extend(task.shardings(tree, decided))
    task.finish()
    whole = trees[0] if is_rule(rules) else NamedTree.of(pytree, at, as_leaf)
    seen = [path for tree in trees for path in tree.paths]
    return Resolution(whole, decisions, shardings, whole.treedef, seen)


@dataclasses.dataclass
class _Task:
    """One resolve: collects problems until all leaves have been seen."""

    mesh: Mesh | AbstractMesh
    mode: ResolveMode
    where: str
    on_indivisible: OnIndivisible
    problems: list[Problem] = dataclasses.field(default_factory=list)
    # Dimensions that do not divide, and may by the policy.
    passed: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.axes = MeshAxes.of(self.mesh)

    def decide(self, rule: Rule, tree: NamedTree) -> list[Decision | Problem]:
        """What the rule decides about every leaf of *tree*; an empty list where it raised."""
        try:
            return decide(as_rule(rule), tree, self.axes.sizes)
        except ShardingError as error:
            # Raised by a user's rule. The other subtrees are checked too, to report all problems at once.
            self.problems.extend(error.problems)
            return []

    def shardings(self, tree: NamedTree, answers: list[Decision | Problem]) -> list[NamedSharding | None]:
        """Validates each answer for its leaf; equal answers for equal shapes are checked once."""
        if not answers:
            return []
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
        spec, shape = answer.spec, tree.shapes[index]
        if spec is None:
            if self.mode is ResolveMode.CONCRETE:
                self._add(tree, index, answer, _NO_SHARDING)
            return None
        self.passed += [f'{tree.describe(index)}, {answer.origin}: {text}' for text in answer.passed]
        if AxisType.Manual in self.axes.types.values():
            spec = specs.without_manual(spec, self.axes)
        is_own = self._is_own(answer.mesh)
        if is_own and not answer.reordered and answer.memory_kind is None:
            valid = _valid_sharding(self.mesh, spec, shape)
            if valid is not None:
                return valid
        # Other faults follow from the wrong mesh, which has to be fixed first.
        wrong = specs.faults(spec, shape, self.axes) if is_own else [_other_mesh(answer.mesh, self.mesh)]
        if answer.reordered:
            wrong.append(_REORDERED)
        if specs.UNCONSTRAINED in specs.entries(spec) and self.mode not in _VALUE_MODES:
            wrong.append(_NOT_CONSTRAINED)
        default = None, 'device', named_sharding(self.mesh, PartitionSpec()).memory_kind
        if self.mode in _VALUE_MODES and answer.memory_kind not in default:
            wrong.append(_stays_in_memory(answer.memory_kind))
        if wrong:
            self._add(tree, index, answer, *wrong)
            return None
        uneven = specs.indivisible(spec, shape, self.axes)
        if uneven:
            spec = self._uneven(tree, index, answer, spec, uneven)
        try:
            return named_sharding(self.mesh, specs.canonical(spec), answer.memory_kind)
        except ValueError as error:
            if answer.memory_kind is None:
                raise
            self._add(tree, index, answer, _no_such_memory(answer.memory_kind, error))
            return None

    def _is_own(self, given: Mesh | AbstractMesh | None) -> bool:
        """Whether a NamedSharding's mesh is the one in force, in which its axes may have other types."""
        if given is None or given == self.mesh:
            return True
        other = MeshAxes.of(given)
        if [*other.sizes.items()] != [*self.axes.sizes.items()]:
            return False
        if isinstance(given, Mesh) and isinstance(self.mesh, Mesh):
            # A constraint is one on axes of any type, as JAX takes it without a mesh in force.
            return self.mode in _VALUE_MODES and [*given.devices.flat] == [*self.mesh.devices.flat]
        manual, ambient = AxisType.Manual, jax.sharding.get_abstract_mesh()
        return all(
            kind is other.types[name] or manual in (kind, other.types[name]) or self.mesh == ambient
            for name, kind in self.axes.types.items()
        )

    def _uneven(
        self,
        tree: NamedTree,
        index: int,
        answer: Decision,
        spec: PartitionSpec,
        uneven: list[tuple[int, tuple[str, ...]]],
    ) -> PartitionSpec:
        """Applies the policy for dimensions that do not divide; returns the spec to use."""
        shape = tree.shapes[index]
        policy = specs.strictest(policy or self.on_indivisible for policy in answer.policies)
        found = [specs.divisibility_fault(dim, names, shape, self.axes) for dim, names in uneven]
        explicit = any(self.axes.types[name] is AxisType.Explicit for _, names in uneven for name in names)
        if policy == 'error' and (self.mode is not ResolveMode.INTERMEDIATE or explicit):
            self._add(tree, index, answer, *found)
            return spec
        said = f'{specs.text(spec)} from {answer.origin}: {"; ".join(fault.detail for fault in found)}'
        if policy == 'error':
            self.passed.append(f'{tree.describe(index)}, {said}; the compiler will pad, and may replicate')
            return spec
        reduced = specs.drop_indivisible(spec, shape, self.axes)
        if policy == 'warn':
            self.passed.append(f'{tree.describe(index)}, {said}; {specs.text(reduced)} is used')
        return reduced

    def _add(self, tree: NamedTree, index: int, answer: Decision, *faults: specs.Fault) -> None:
        """Collects what is wrong with a leaf."""
        spec = '' if answer.spec is None else specs.text(answer.spec)
        self.problems.extend(
            Problem(fault.kind, tree.describe(index), fault.detail, spec, answer.origin, fault.hint)
            for fault in faults
        )

    def finish(self) -> None:
        """Raises about all problems, or warns about dimensions that do not divide and may."""
        if self.problems:
            raise ShardingError(self.problems, str(self.axes), self.where)
        if self.passed:
            of = f' of {self.where}' if self.where else ''
            warn(
                f'dimensions{of} that do not divide (mesh: {self.axes}):\n{shown_leaves(self.passed)}',
                IndivisibleWarning,
            )


def _typed(answer: Decision | Problem, leaf: Any) -> Decision | Problem:
    if isinstance(answer, Problem) or answer.spec is None:
        return answer
    if specs.UNCONSTRAINED not in specs.entries(answer.spec):
        return answer
    spec = specs.replaced(answer.spec, with_types(answer.spec, leaf))
    return dataclasses.replace(answer, spec=spec)


def with_types(spec: PartitionSpec, leaf: Any) -> list[Any]:
    """The entries of *spec*, and for UNCONSTRAINED ones the Explicit axes that the leaf's type has there.

    An axis that the spec names for another dimension is left out here.
    """
    now = [*specs.entries(jax.typeof(leaf).sharding.spec), *[None] * len(spec)]
    used = specs.spec_axes(spec)
    return [
        tuple(axis for axis in specs.entry_axes(now[dim]) if axis not in used)
        if entry is specs.UNCONSTRAINED
        else entry
        for dim, entry in enumerate(specs.entries(spec))
    ]


_NO_SHARDING = specs.Fault(
    'no-sharding',
    'the rule leaves this leaf to the compiler (None), but there is no compiler here',
    'None is for sjit, constraints and annotations; give PartitionSpec() to replicate.',
)
_NOT_CONSTRAINED = specs.Fault(
    'unconstrained',
    'an UNCONSTRAINED dimension does not say where an array is placed',
    'UNCONSTRAINED is for constraints and annotations inside a compiled function.',
)


def _no_such_memory(kind: str, error: ValueError) -> specs.Fault:
    return specs.Fault(
        'memory-kind',
        f'the devices have no memory {kind!r}; JAX says: {error}',
        "name a memory kind of the devices, such as 'device' or 'pinned_host'.",
    )


def _stays_in_memory(kind: str | None) -> specs.Fault:
    return specs.Fault(
        'memory-kind',
        f'a constraint moves no value to {kind!r}: JAX drops the memory kind of one',
        'give a rule without a memory kind here, and move arrays outside, or by out_shardings.',
    )


_REORDERED = specs.Fault(
    'other-mesh',
    'the NamedSharding orders the devices of its mesh anew (_logical_device_ids)',
    'build the mesh of the devices in that order: MeshShardingHelper.from_mesh(Mesh(devices, names)).',
)


def _other_mesh(given: Any, own: Mesh | AbstractMesh) -> specs.Fault:
    """How another mesh differs. Only meshes with devices can differ in their order."""
    detail = f'the NamedSharding is of another mesh: {given}'
    hint = "give NamedShardings of the helper's own mesh, or PartitionSpecs."
    theirs, ours = MeshAxes.of(given), MeshAxes.of(own)
    if list(theirs.sizes.items()) == list(ours.sizes.items()):
        both = isinstance(given, Mesh) and isinstance(own, Mesh)
        devices = [list(mesh.devices.flat) if both else [] for mesh in (given, own)]
        if devices[0] == devices[1]:
            types = ', '.join(f'{name}={kind.name}' for name, kind in theirs.types.items())
            detail = f'the NamedSharding is of this mesh with axes of other types: {types}'
            hint = 'give the PartitionSpec, which is for axes of any type, or make the helper of that mesh.'
        elif set(devices[0]) == set(devices[1]):
            ids = [device.id for device in devices[0]]
            detail = (
                'the NamedSharding is of a mesh with the devices of this one in another order: '
                f'ids {ids[:16]}{" ..." if len(ids) > 16 else ""}'
            )
            hint = 'give the PartitionSpec, or make the helper of that mesh (MeshShardingHelper.from_mesh).'
    return specs.Fault('other-mesh', detail, hint)


@dataclasses.dataclass(eq=False)
class _Known:
    """A tree that was resolved.

    Attributes:
        rules: what `key_of` gave for the rules.
        treedef: its structure.
        signature: the shapes and dtypes of its leaves.
        shardings: those of its leaves.
        certain: whether trees of this structure have the same paths; None if not known yet.
    """

    rules: Any
    treedef: Any
    signature: list[Any]
    shardings: list[NamedSharding | None]
    certain: bool | None = None

    def serves(self, pytree: Any, treedef: Any, signature: list[Any] | None) -> bool:
        """Whether a tree has these shardings, for the same rules."""
        if self.treedef != treedef or self.signature != signature:
            return False
        if self.certain is None:
            self.certain = uncertain_paths(pytree, treedef) is None
        return self.certain


_REMEMBERED = 16  # trees


class ResolutionCache:
    """Remembers the shardings of the trees resolved last, for rules whose answers never change.

    Entries are found by comparison, not by hash: comparing two equal lists of shapes costs a pointer
    comparison an item, hashing them costs several times that on a tree of 100,000 leaves. Trees whose
    structure does not determine their leaf paths are resolved each time.
    """

    def __init__(self) -> None:
        self._entries: tuple[_Known, ...] = ()

    def shardings(
        self,
        rules: RuleLike,
        pytree: Any,
        mesh: Mesh | AbstractMesh,
        on_indivisible: OnIndivisible,
    ) -> tuple[list[NamedSharding | None], Any]:
        """The shardings and the structure of a tree; from memory where rules, shapes and dtypes are known."""
        rules_key = key_of(rules)
        # Objects that are not rules may have no usable ==; `resolve` raises about them.
        comparable = all(map(is_rule, jax.tree.leaves(rules, is_leaf=is_rule)))
        entries = [entry for entry in self._entries if comparable and entry.rules == rules_key]
        if entries:
            leaves, treedef = jax.tree.flatten(pytree)
            signature = _signature(leaves)
            for entry in entries:
                if entry.serves(pytree, treedef, signature):
                    return entry.shardings, treedef
        resolution = resolve(rules, pytree, mesh, on_indivisible=on_indivisible)
        signature = _signature(resolution.tree.leaves)
        if signature is not None and on_indivisible != 'warn' and are_pure(rules):
            # A new tuple each time: a reader in another thread sees the old one or the new one, whole.
            known = _Known(rules_key, resolution.treedef, signature, resolution.shardings)
            self._entries = (known, *self._entries[: _REMEMBERED - 1])
        return resolution.shardings, resolution.treedef


def _signature(leaves: Sequence[Any]) -> list[Any] | None:
    """The shapes and dtypes of leaves; None where some have none, as Python scalars."""
    try:
        return list(map(_SHAPE_AND_DTYPE, leaves))
    except AttributeError:
        return None


_SHAPE_AND_DTYPE = operator.attrgetter('shape', 'dtype')


def are_pure(rules: RuleLike) -> bool:
    """Whether rules always give the same answers."""
    leaves = jax.tree.leaves(rules, is_leaf=lambda x: isinstance(x, ShardingRule | PartitionSpec))
    return all(is_pure(rule) for rule in leaves if isinstance(rule, ShardingRule))
