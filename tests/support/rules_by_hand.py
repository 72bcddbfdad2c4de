"""What does a composition of rules mean? An oracle for one leaf at a time, written from docs/rules.md.

It shares nothing with the library: no class, no function, and none of its ways of saying things. For one
leaf a term says a `Spec`, COMPILER (None in the table), WRONG (an error), or `Nothing` with its default.
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
from tests.support.rule_language import MeshOf, axes_of, is_term, named_leaves, own_value, shape_of

Axes = tuple[str, ...]
UNCONSTRAINED = ('UNCONSTRAINED',)  # of a dimension; no axis is called so
COMPILER, WRONG = 'left to the compiler', 'wrong'
STRICTEST = ['error', 'warn', 'replicate']


class RuleIsWrong(Exception):
    """A rule that is an error on this mesh, whatever the leaf."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """An answer: the mesh axes of each dimension, and the policy of the rule that placed them."""

    dims: tuple[Axes, ...] = ()
    policies: tuple[str | None, ...] = ()
    memory: str | None = None
    meshes: frozenset[bool] = frozenset()  # of NamedShardings: whether it is the mesh in force
    warned: bool = False  # by the rule itself, about dimensions that do not divide
    stack: frozenset[int] = frozenset()  # dimensions of layers, which stay whole unless it says otherwise


@dataclasses.dataclass(frozen=True)
class Nothing:
    """No answer. Alone, the leaf gets the default."""

    default: Spec | str = Spec()


Said = Spec | Nothing | str


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf, and what a rule further out has placed of it: axes of dimensions, and all that it used."""

    path: str
    shape: tuple[int, ...]
    taken: tuple[Axes, ...] = ()
    used: frozenset[str] = frozenset()

    def is_free(self, dim: int) -> bool:
        return dim >= len(self.taken) or not self.taken[dim]


def of_spec(spec: P, policy: str | None) -> Spec:
    dims = tuple(UNCONSTRAINED if entry is P.UNCONSTRAINED else axes_of(entry) for entry in spec)
    return Spec(dims, (policy,) * len(dims))


def settled(said: Said) -> Spec | str:
    return said.default if isinstance(said, Nothing) else said


def ask(term: Any, leaf: Leaf, mesh: MeshOf, policy: str | None = None) -> Said:
    """What a term says about a leaf. `policy` is that of the rule that holds a bare spec."""
    one_element = all(n == 1 for n in leaf.shape)
    match term:
        case None:
            return COMPILER
        case P():
            return of_spec(term, policy)
        case language.Named():
            said = of_spec(term.spec, policy)
            return dataclasses.replace(said, memory=term.memory, meshes=frozenset([term.own]))
        case language.Fsdp():
            return fsdp(term, leaf, mesh)
        case language.Paths():
            if one_element:
                return Spec()
            for regex, value in term.pairs:
                if re.search(regex, leaf.path):
                    return ask(value, leaf, mesh, term.policy)
            return Nothing(WRONG) if term.strict else Spec()
        case language.ByRank():
            value = term.table[len(leaf.shape)]
            return settled(ask(value, leaf, mesh, term.policy)) if is_term(value) else WRONG
        case language.Own():
            value = own_value(term.table, leaf.shape, mesh.shape)
            return ask(value, leaf, mesh, 'error') if is_term(value) else WRONG
        case language.Logical():
            return Spec() if one_element else logical(term, leaf, mesh)
        case language.State():
            path = re.sub('^(mu|nu)/', '', leaf.path)
            if path == 'count':
                return Spec()
            return settled(ask(term.rule, dataclasses.replace(leaf, path=path), mesh))
        case language.Either():
            first = ask(term.first, leaf, mesh)
            return ask(term.second, leaf, mesh) if isinstance(first, Nothing) else first
        case language.Both():
            return overlay(term, leaf, mesh)
        case language.Stack():
            return stacked(term, leaf, mesh)
        case language.InMemory():
            said = ask(term.rule, leaf, mesh)
            default = said.default if isinstance(said, Nothing) else said
            if isinstance(default, Spec):
                default = dataclasses.replace(default, memory=term.kind)
            return Nothing(default) if isinstance(said, Nothing) else default
    raise TypeError(term)


def fsdp(term: language.Fsdp, leaf: Leaf, mesh: MeshOf) -> Said:
    if not set(term.axes) <= set(mesh.shape):
        raise RuleIsWrong(term)
    size = math.prod(mesh.shape[axis] for axis in term.axes)
    if term.size not in (None, size):
        raise RuleIsWrong(term)
    dims = [d for d, n in enumerate(leaf.shape) if leaf.is_free(d) and n > 0 and n % size == 0]
    if math.prod(leaf.shape) < term.minimum or leaf.used & set(term.axes) or not dims:
        return Nothing()
    best = min(dims, key=lambda d: (-leaf.shape[d], d))
    return Spec(((),) * best + (term.axes,), ('error',) * (best + 1))


def overlay(term: language.Both, leaf: Leaf, mesh: MeshOf) -> Said:
    first = ask(term.first, leaf, mesh)
    if isinstance(first, Nothing):
        return WRONG if first.default == WRONG else ask(term.second, leaf, mesh)
    if not isinstance(first, Spec):
        return first
    # What rules further out took is not placed, and so is not in use either.
    first = left_by(leaf, first)
    inside = fill(Spec(leaf.taken), with_stack_closed(first), len(leaf.shape), leaf.used)
    used = leaf.used | axes_used(first.dims)
    second = ask(term.second, dataclasses.replace(leaf, taken=inside.dims, used=used), mesh)
    if second == WRONG:
        return WRONG
    if not isinstance(second, Spec):
        return first
    second = left_by(leaf, second)
    if len(first.meshes | second.meshes) == 2:
        return WRONG  # NamedShardings of two meshes
    layers = first.stack
    second = dataclasses.replace(
        second, dims=tuple(() if d in layers else dim for d, dim in enumerate(second.dims))
    )
    both = fill(first, second, len(leaf.shape), axes_used(first.dims))
    meshes, memory = first.meshes | second.meshes, first.memory or second.memory
    return dataclasses.replace(both, memory=memory, meshes=meshes, stack=layers | second.stack)


def with_stack_closed(spec: Spec) -> Spec:
    dims = [*spec.dims, *[()] * (max(spec.stack, default=-1) + 1 - len(spec.dims))]
    closed = (UNCONSTRAINED if d in spec.stack and not dim else dim for d, dim in enumerate(dims))
    return dataclasses.replace(spec, dims=tuple(closed))


def left_by(leaf: Leaf, spec: Spec) -> Spec:
    dims = [tuple(axis for axis in dim if axis not in leaf.used) for dim in spec.dims]
    return dataclasses.replace(spec, dims=tuple(dim if leaf.is_free(d) else () for d, dim in enumerate(dims)))


def axes_used(dims: Sequence[Axes]) -> frozenset[str]:
    return frozenset(axis for dim in dims for axis in dim if dim != UNCONSTRAINED)


def fill(first: Spec, second: Spec, rank: int, used: frozenset[str]) -> Spec:
    """The dimensions of the first, and where it has none, those of the second without axes in use."""
    dims: list[Axes] = []
    policies: list[str | None] = []
    for d in range(max(rank, len(first.dims), len(second.dims))):
        mine = first.dims[d] if d < len(first.dims) else ()
        theirs = second.dims[d] if d < len(second.dims) else ()
        dims.append(mine or tuple(axis for axis in theirs if axis not in used))
        owner = first if mine else second
        policies.append(owner.policies[d] if d < len(owner.policies) else None)
    warned = first.warned or second.warned
    return dataclasses.replace(first, dims=tuple(dims), policies=tuple(policies), warned=warned)


def stacked(term: language.Stack, leaf: Leaf, mesh: MeshOf) -> Said:
    n = term.dims
    said = ask(term.rule, dataclasses.replace(leaf, shape=leaf.shape[n:], taken=leaf.taken[n:]), mesh)
    default = settled(said)
    if isinstance(default, Spec):
        dims, policies = ((),) * n + default.dims, (None,) * n + default.policies
        layers = frozenset(range(n)) | {d + n for d in default.stack}
        if len(leaf.shape) < n:
            dims, policies, layers = (), (), frozenset()
        default = dataclasses.replace(default, dims=dims, policies=policies, stack=layers)
    return Nothing(default) if isinstance(said, Nothing) else default


# --- Named dimensions -----------------------------------------------------------------------------


def logical(term: language.Logical, leaf: Leaf, mesh: MeshOf) -> Said:
    text = next((text for regex, text in term.names if re.search(regex, leaf.path)), None)
    if text is None:
        return Nothing(WRONG if term.strict else Spec())
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
        if term.policy != 'error':  # what becomes of others is not the rule's affair
            while n % math.prod(mesh.shape[axis] for axis in axes):
                axes, dropped = axes[:-1], True
        used |= set(axes)
        dims.append(axes)
    return Spec(tuple(dims), (term.policy,) * len(dims), warned=dropped and term.policy == 'warn')


def choose(term: language.Logical, name: str, used: set[str], mesh: MeshOf) -> Axes:
    """The first pair of which the mesh has an axis and none is in use, or None; else what is left of one."""
    left: list[Axes] = []
    for other, entry in term.mapping:
        if other == name:
            here = tuple(axis for axis in axes_of(entry) if axis in mesh.shape)
            free = tuple(axis for axis in here if axis not in used)
            if entry is None:
                return ()
            if here and free == here:
                return here
            left.append(free)
    return next((axes for axes in left if axes), ())


# --- Whole trees ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one leaf gets: a canonical spec and a memory, COMPILER, or WRONG."""

    spec: P | str
    memory: str | None = None
    warns: bool = False


def outcome(said: Spec | str, shape: tuple[int, ...], mesh: MeshOf) -> Outcome:
    if not isinstance(said, Spec):
        return Outcome(said)
    axes = [axis for dim in said.dims for axis in dim]
    mixed = any(len({mesh.kind(axis) for axis in dim if axis in mesh.shape}) > 1 for dim in said.dims)
    too_long = any(said.dims[len(shape) :])
    if not set(axes) <= set(mesh.shape) or len(set(axes)) < len(axes) or mixed or too_long:
        return Outcome(WRONG)
    unknown = said.memory not in (None, *language.MEMORIES)
    if False in said.meshes or unknown:
        return Outcome(WRONG)
    kept: list[Axes] = []
    policies: set[str] = set()
    for n, dim, policy in zip(shape, said.dims, said.policies, strict=False):
        while n % math.prod(mesh.shape[axis] for axis in dim):
            policies.add(policy or mesh.policy)
            dim = dim[:-1]
        kept.append(dim)
    if 'error' in policies:
        return Outcome(WRONG)
    while kept and not kept[-1]:
        kept.pop()
    spec = P(*(dim[0] if len(dim) == 1 else dim or None for dim in kept))
    return Outcome(spec, said.memory, warns='warn' in policies or said.warned)


def by_hand(terms: Any, tree: Any, mesh: MeshOf) -> list[Outcome]:
    """What each leaf gets."""
    flat, treedef = jax.tree.flatten(terms, is_leaf=is_term)
    return [
        outcome(settled(ask(term, Leaf(path, shape_of(leaf)), mesh)), shape_of(leaf), mesh)
        for term, subtree in zip(flat, treedef.flatten_up_to(tree), strict=True)
        for path, leaf in named_leaves(subtree)
    ]
