"""An oracle for compositions of rules, for one leaf at a time, written from docs/rules.md.

It shares no class and no function with the library. The answer of a term about one leaf is a `Spec`, COMPILER
(None in the table), WRONG (an error), or `NoAnswer` with its default.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from tests.support import rule_language as language
from tests.support.rule_language import MeshSpec, axes_of, custom_value, is_term, named_leaves, shape_of

Axes = tuple[str, ...]
UNCONSTRAINED = ('UNCONSTRAINED',)  # the entry of a dimension; no mesh axis has this name
COMPILER, WRONG = 'left to the compiler', 'wrong'
STRICTEST = ['error', 'warn', 'replicate']


class ImpossibleRule(Exception):
    """A rule that is an error on this mesh for every leaf."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """A spec as an answer.

    Attributes:
        dims: the mesh axes of each dimension.
        policies: for each dimension, the policy of the rule that sharded it.
        memory: the memory kind.
        meshes: for each NamedSharding that took part, whether it is on the active mesh.
        warned: whether a rule itself warned about dimensions that are not divisible.
        stack: the dimensions of stacked layers, which later rules must not shard.
    """

    dims: tuple[Axes, ...] = ()
    policies: tuple[str | None, ...] = ()
    memory: str | None = None
    meshes: frozenset[bool] = frozenset()
    warned: bool = False
    stack: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class NoAnswer:
    """No answer. The default applies if no rule follows."""

    default: Spec | str = Spec()


Answer = Spec | NoAnswer | str


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf, the mesh axes of the dimensions that outer rules occupy, and all axes that they use."""

    path: str
    shape: tuple[int, ...]
    occupied: tuple[Axes, ...] = ()
    used: frozenset[str] = frozenset()

    def is_free(self, dim: int) -> bool:
        return dim >= len(self.occupied) or not self.occupied[dim]


def of_spec(spec: P, policy: str | None) -> Spec:
    dims = tuple(UNCONSTRAINED if entry is P.UNCONSTRAINED else axes_of(entry) for entry in spec)
    return Spec(dims, (policy,) * len(dims))


def with_default(answer: Answer) -> Spec | str:
    return answer.default if isinstance(answer, NoAnswer) else answer


def answer_of(term: Any, leaf: Leaf, mesh: MeshSpec, policy: str | None = None) -> Answer:
    """Returns the answer of a term about a leaf. `policy` is the policy of the rule that has a bare spec."""
    one_element = all(n == 1 for n in leaf.shape)
    match term:
        case None:
            return COMPILER
        case P():
            return of_spec(term, policy)
        case language.FixedSharding():
            answer = of_spec(term.spec, policy)
            return dataclasses.replace(answer, memory=term.memory, meshes=frozenset([term.is_on_mesh]))
        case language.Fsdp():
            return fsdp(term, leaf, mesh)
        case language.Paths():
            if one_element:
                return Spec()
            for regex, value in term.pairs:
                if re.search(regex, leaf.path):
                    return answer_of(value, leaf, mesh, term.policy)
            return NoAnswer(WRONG) if term.strict else Spec()
        case language.ByRank():
            value = term.table[len(leaf.shape)]
            return with_default(answer_of(value, leaf, mesh, term.policy)) if is_term(value) else WRONG
        case language.Custom():
            value = custom_value(term.table, leaf.shape, mesh.shape)
            return answer_of(value, leaf, mesh, 'error') if is_term(value) else WRONG
        case language.Logical():
            return Spec() if one_element else logical(term, leaf, mesh)
        case language.State():
            path = re.sub('^(mu|nu)/', '', leaf.path)
            if path == 'count':
                return Spec()
            return with_default(answer_of(term.rule, dataclasses.replace(leaf, path=path), mesh))
        case language.Or():
            first = answer_of(term.first, leaf, mesh)
            return answer_of(term.second, leaf, mesh) if isinstance(first, NoAnswer) else first
        case language.And():
            return overlay(term, leaf, mesh)
        case language.Stack():
            return stacked(term, leaf, mesh)
        case language.InMemory():
            answer = answer_of(term.rule, leaf, mesh)
            default = answer.default if isinstance(answer, NoAnswer) else answer
            if isinstance(default, Spec):
                default = dataclasses.replace(default, memory=term.kind)
            return NoAnswer(default) if isinstance(answer, NoAnswer) else default
    raise TypeError(term)


def fsdp(term: language.Fsdp, leaf: Leaf, mesh: MeshSpec) -> Answer:
    if not set(term.axes) <= set(mesh.shape):
        raise ImpossibleRule(term)
    size = math.prod(mesh.shape[axis] for axis in term.axes)
    if term.size not in (None, size):
        raise ImpossibleRule(term)
    dims = [d for d, n in enumerate(leaf.shape) if leaf.is_free(d) and n > 0 and n % size == 0]
    if math.prod(leaf.shape) < term.minimum or leaf.used & set(term.axes) or not dims:
        return NoAnswer()
    best = min(dims, key=lambda d: (-leaf.shape[d], d))
    return Spec(((),) * best + (term.axes,), ('error',) * (best + 1))


def overlay(term: language.And, leaf: Leaf, mesh: MeshSpec) -> Answer:
    first = answer_of(term.first, leaf, mesh)
    if isinstance(first, NoAnswer):
        return WRONG if first.default == WRONG else answer_of(term.second, leaf, mesh)
    if not isinstance(first, Spec):
        return first
    # Axes that outer rules prevent from being used are not in use.
    first = without_occupied(leaf, first)
    occupied = fill(Spec(leaf.occupied), with_blocked_stack(first), len(leaf.shape), leaf.used)
    used = leaf.used | axes_used(first.dims)
    second = answer_of(term.second, dataclasses.replace(leaf, occupied=occupied.dims, used=used), mesh)
    if second == WRONG:
        return WRONG
    if not isinstance(second, Spec):
        return first
    second = without_occupied(leaf, second)
    if len(first.meshes | second.meshes) == 2:
        return WRONG  # NamedShardings of two meshes
    layers = first.stack
    second = dataclasses.replace(
        second, dims=tuple(() if d in layers else dim for d, dim in enumerate(second.dims))
    )
    both = fill(first, second, len(leaf.shape), axes_used(first.dims))
    meshes, memory = first.meshes | second.meshes, first.memory or second.memory
    return dataclasses.replace(both, memory=memory, meshes=meshes, stack=layers | second.stack)


def with_blocked_stack(spec: Spec) -> Spec:
    dims = [*spec.dims, *[()] * (max(spec.stack, default=-1) + 1 - len(spec.dims))]
    closed = (UNCONSTRAINED if d in spec.stack and not dim else dim for d, dim in enumerate(dims))
    return dataclasses.replace(spec, dims=tuple(closed))


def without_occupied(leaf: Leaf, spec: Spec) -> Spec:
    dims = [tuple(axis for axis in dim if axis not in leaf.used) for dim in spec.dims]
    return dataclasses.replace(spec, dims=tuple(dim if leaf.is_free(d) else () for d, dim in enumerate(dims)))


def axes_used(dims: Sequence[Axes]) -> frozenset[str]:
    return frozenset(axis for dim in dims for axis in dim if dim != UNCONSTRAINED)


def fill(first: Spec, second: Spec, rank: int, used: frozenset[str]) -> Spec:
    """Fills the empty dimensions of the first spec from the second, without the axes in use."""
    dims: list[Axes] = []
    policies: list[str | None] = []
    for d in range(max(rank, len(first.dims), len(second.dims))):
        first_axes = first.dims[d] if d < len(first.dims) else ()
        second_axes = second.dims[d] if d < len(second.dims) else ()
        dims.append(first_axes or tuple(axis for axis in second_axes if axis not in used))
        owner = first if first_axes else second
        policies.append(owner.policies[d] if d < len(owner.policies) else None)
    warned = first.warned or second.warned
    return dataclasses.replace(first, dims=tuple(dims), policies=tuple(policies), warned=warned)


def stacked(term: language.Stack, leaf: Leaf, mesh: MeshSpec) -> Answer:
    n = term.dims
    answer = answer_of(
        term.rule, dataclasses.replace(leaf, shape=leaf.shape[n:], occupied=leaf.occupied[n:]), mesh
    )
    default = with_default(answer)
    if isinstance(default, Spec):
        dims, policies = ((),) * n + default.dims, (None,) * n + default.policies
        layers = frozenset(range(n)) | {d + n for d in default.stack}
        if len(leaf.shape) < n:
            dims, policies, layers = (), (), frozenset()
        default = dataclasses.replace(default, dims=dims, policies=policies, stack=layers)
    return NoAnswer(default) if isinstance(answer, NoAnswer) else default


# --- FixedSharding dimensions -----------------------------------------------------------------------------


def logical(term: language.Logical, leaf: Leaf, mesh: MeshSpec) -> Answer:
    text = next((text for regex, text in term.names if re.search(regex, leaf.path)), None)
    if text is None:
        return NoAnswer(WRONG if term.strict else Spec())
    groups = [group.strip('()').split() for group in re.findall(r'\(.*?\)|\S+', text)]
    if ['...'] in groups:
        at, more = groups.index(['...']), len(leaf.shape) - len(groups) + 1
        groups[at : at + 1] = [['_']] * more
        if more < 0:
            return WRONG
    if len(groups) != len(leaf.shape):
        return WRONG
    used = set(leaf.used)
    dims: list[Axes] = []
    dropped = False
    for dim, (group, n) in enumerate(zip(groups, leaf.shape, strict=True)):
        numbers = [int(name) for name in group if name.isdigit()]
        if n % math.prod(numbers) or (len(numbers) == len(group) and n != math.prod(numbers)):
            return WRONG
        axes: Axes = ()
        if leaf.is_free(dim):
            for name in group:
                axes += choose(term, name, used | set(axes), mesh)
        if term.policy != 'error':  # otherwise resolving raises the error later
            while n % math.prod(mesh.shape[axis] for axis in axes):
                axes, dropped = axes[:-1], True
        used |= set(axes)
        dims.append(axes)
    return Spec(tuple(dims), (term.policy,) * len(dims), warned=dropped and term.policy == 'warn')


def choose(term: language.Logical, name: str, used: set[str], mesh: MeshSpec) -> Axes:
    """Returns the axes of the first pair with only free axes, or None; else the free axes of another."""
    partly_free: list[Axes] = []
    for other, entry in term.mapping:
        if other == name:
            here = tuple(axis for axis in axes_of(entry) if axis in mesh.shape)
            free = tuple(axis for axis in here if axis not in used)
            if entry is None:
                return ()
            if here and free == here:
                return here
            partly_free.append(free)
    return next((axes for axes in partly_free if axes), ())


# --- Trees ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result for one leaf: a canonical spec and a memory, COMPILER, or WRONG."""

    spec: P | str
    memory: str | None = None
    warns: bool = False


def outcome(answer: Spec | str, shape: tuple[int, ...], mesh: MeshSpec) -> Outcome:
    if not isinstance(answer, Spec):
        return Outcome(answer)
    axes = [axis for dim in answer.dims for axis in dim]
    mixed = any(len({mesh.kind(axis) for axis in dim if axis in mesh.shape}) > 1 for dim in answer.dims)
    too_long = any(answer.dims[len(shape) :])
    if not set(axes) <= set(mesh.shape) or len(set(axes)) < len(axes) or mixed or too_long:
        return Outcome(WRONG)
    unknown = answer.memory not in (None, *language.MEMORIES)
    if False in answer.meshes or unknown:
        return Outcome(WRONG)
    divisible: list[Axes] = []
    policies: set[str] = set()
    for n, dim, policy in zip(shape, answer.dims, answer.policies, strict=False):
        while n % math.prod(mesh.shape[axis] for axis in dim):
            policies.add(policy or mesh.policy)
            dim = dim[:-1]
        divisible.append(dim)
    if 'error' in policies:
        return Outcome(WRONG)
    while divisible and not divisible[-1]:
        divisible.pop()
    spec = P(*(dim[0] if len(dim) == 1 else dim or None for dim in divisible))
    return Outcome(spec, answer.memory, warns='warn' in policies or answer.warned)


def expected_outcomes(terms: Any, tree: Any, mesh: MeshSpec) -> list[Outcome]:
    """Returns the expected outcome for each leaf."""
    flat, treedef = jax.tree.flatten(terms, is_leaf=is_term)
    return [
        outcome(with_default(answer_of(term, Leaf(path, shape_of(leaf)), mesh)), shape_of(leaf), mesh)
        for term, subtree in zip(flat, treedef.flatten_up_to(tree), strict=True)
        for path, leaf in named_leaves(subtree)
    ]
