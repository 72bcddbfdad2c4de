"""Meshes and compositions of rules as plain data, for property tests.

A *term* describes a composition of rules. `make` builds the rule that a user would write, and `rule_oracle`
computes its results independently of the library. A PartitionSpec and None are terms, too. Terms contain no
devices, so that another process can unpickle them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalax.sharding import (
    FSDPShardingRule,
    LogicalAxisShardingRule,
    MeshShardingHelper,
    OptimizerStateShardingRule,
    PolicyShardingRule,
    ShardingRule,
    TreePathShardingRule,
)

AXES = 'abcd'
MEMORIES = ('device', 'pinned_host', 'unpinned_host')
KINDS = {'A': AxisType.Auto, 'E': AxisType.Explicit}

Regex = str | re.Pattern[str]
Entry = str | tuple[str, ...] | None


# --- Meshes ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """A mesh: sizes, axis types as letters, order of the devices (None for an abstract mesh), and policy."""

    sizes: tuple[int, ...]
    kinds: str
    order: int | None = 0
    policy: str = 'error'

    @property
    def shape(self) -> dict[str, int]:
        return dict(zip(AXES, self.sizes, strict=False))

    def kind(self, axis: str) -> str:
        return self.kinds[AXES.index(axis)]

    def helper(self) -> MeshShardingHelper:
        return _helper(self)


@functools.cache
def _helper(mesh: MeshSpec) -> MeshShardingHelper:
    names, types = tuple(mesh.shape), tuple(KINDS[kind] for kind in mesh.kinds)
    if mesh.order is None:
        abstract_mesh = AbstractMesh(mesh.sizes, names, axis_types=types)
        return MeshShardingHelper.from_mesh(abstract_mesh, on_indivisible=mesh.policy)
    # In order of their ids, in reverse order, and in steps of three from different starts.
    steps = [range(8), range(7, -1, -1), *(range(start, start + 24, 3) for start in (2, 3, 4))][mesh.order]
    devices = [jax.devices()[step % 8] for step in steps][: math.prod(mesh.sizes)]
    return MeshShardingHelper(
        mesh.sizes, names, devices=devices, axis_types=types, on_indivisible=mesh.policy
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Situation:
    """A mesh, a tree, and terms: a prefix of the tree, or several terms for the entire tree."""

    mesh: MeshSpec
    tree: Any
    terms: Any

    def __repr__(self) -> str:
        return f'Situation({self.mesh}, {abstract(self.tree)}, {self.terms})'


# --- Terms ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FixedSharding:
    """A NamedSharding on the mesh, or (as a user's mistake) on another mesh."""

    spec: P
    memory: str | None = None
    is_on_mesh: bool = True


@dataclasses.dataclass(frozen=True)
class Fsdp:
    axes: tuple[str, ...]
    minimum: int
    size: int | None = None


@dataclasses.dataclass(frozen=True)
class Paths:
    pairs: tuple[tuple[Regex, Any], ...]
    strict: bool = True
    policy: str = 'error'


@dataclasses.dataclass(frozen=True)
class ByRank:
    """A policy function with a term for each rank."""

    table: tuple[Any, ...]
    policy: str = 'error'


@dataclasses.dataclass(frozen=True)
class Logical:
    mapping: tuple[tuple[str, Entry], ...]
    names: tuple[tuple[Regex, str], ...]
    strict: bool = True
    policy: str = 'error'


@dataclasses.dataclass(frozen=True)
class Custom:
    """A user's subclass: the value for each rank; a spec that is not divisible becomes P()."""

    table: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """The rule for the state of an optimizer of these params, which `rule` shards; see `state_of`."""

    rule: Any
    params: Any


@dataclasses.dataclass(frozen=True)
class Or:
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class And:
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Stack:
    rule: Any
    dims: int


@dataclasses.dataclass(frozen=True)
class InMemory:
    rule: Any
    kind: str


TERMS = (FixedSharding, Fsdp, Paths, ByRank, Logical, Custom, State, Or, And, Stack, InMemory)


def is_term(node: Any) -> bool:
    """Whether a node is one term rather than a tree of terms."""
    return node is None or isinstance(node, (P, *TERMS))


def parts(term: Any) -> list[Any]:
    """Returns the terms that a term contains."""
    match term:
        case Paths():
            return [value for _, value in term.pairs]
        case ByRank() | Custom():
            return list(term.table)
        case Or() | And():
            return [term.first, term.second]
        case Stack() | InMemory() | State():
            return [term.rule]
    return []


def mentions(term: Any, test: Callable[[Any], bool]) -> bool:
    """Whether a term, or a term inside it, passes a test."""
    return test(term) or any(mentions(part, test) for part in parts(term))


def is_impossible(term: Any, mesh: MeshSpec) -> bool:
    """Whether a term has an FSDP rule whose axis the mesh lacks, or whose size differs from the mesh's."""

    def test(part: Any) -> bool:
        if not isinstance(part, Fsdp):
            return False
        sizes = [mesh.shape.get(axis, 0) for axis in part.axes]
        return 0 in sizes or part.size not in (None, math.prod(sizes))

    return mentions(term, test)


def state_of(params: Any) -> dict[str, Any]:
    """Returns the state of an optimizer with two moments."""
    return {'count': 0, 'mu': params, 'nu': params}


# --- Rules ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy function as a value, with equality, repr and pickling."""

    table: tuple[Any, ...]

    def __call__(self, path: str, leaf: Any) -> Any:
        return self.table[len(leaf.shape)]


@dataclasses.dataclass(frozen=True)
class CustomRule(ShardingRule):
    """A user's rule."""

    table: tuple[Any, ...]
    sizes: tuple[tuple[str, int], ...]

    def apply(self, pytree: Any) -> Any:
        return jax.tree.map(lambda leaf: custom_value(self.table, leaf.shape, dict(self.sizes)), pytree)


def custom_value(table: tuple[Any, ...], shape: tuple[int, ...], sizes: dict[str, int]) -> Any:
    """Returns the value of a `Custom` rule for an array: P() in place of a spec that is not divisible."""
    value = table[len(shape)]
    if not isinstance(value, P):
        return value
    for n, entry in zip(shape, value, strict=False):
        if n % math.prod(sizes.get(axis, 1) for axis in axes_of(entry)):
            return P()
    return value


def axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a spec."""
    if entry is None or entry is P.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def make(term: Any, mesh: MeshSpec) -> Any:
    """Builds the rule, spec, sharding or None that a user would write for a term, or for a tree of terms."""
    if not is_term(term):
        return jax.tree.map(lambda node: make(node, mesh), term, is_leaf=is_term)
    match term:
        case FixedSharding():
            on: Mesh | AbstractMesh = mesh.helper().mesh if term.is_on_mesh else _other_mesh()
            return NamedSharding(on, term.spec, memory_kind=term.memory)
        case Fsdp():
            return FSDPShardingRule(
                term.axes[0] if len(term.axes) == 1 else term.axes, term.size, term.minimum
            )
        case Paths():
            pairs = [(regex, make(value, mesh)) for regex, value in term.pairs]
            return TreePathShardingRule(*pairs, strict=term.strict, on_indivisible=term.policy)
        case ByRank():
            return PolicyShardingRule(Policy(tuple(_make_value(v, mesh) for v in term.table)), term.policy)
        case Logical():
            return LogicalAxisShardingRule(term.mapping, term.names, term.strict, term.policy)
        case Custom():
            table = tuple(_make_value(value, mesh) for value in term.table)
            return CustomRule(table, tuple(mesh.shape.items()))
        case State():
            return OptimizerStateShardingRule(make(term.rule, mesh), term.params)
        case Or():
            return make(term.first, mesh) | make(term.second, mesh)
        case And():
            return make(term.first, mesh) & make(term.second, mesh)
        case Stack():
            return make(term.rule, mesh).stacked(term.dims)
        case InMemory():
            return make(term.rule, mesh).with_memory_kind(term.kind)
    return term


def _make_value(value: Any, mesh: MeshSpec) -> Any:
    """Builds a value of a table. A value that is not a term, as a user's mistake, is unchanged."""
    return make(value, mesh) if is_term(value) else value


def _other_mesh() -> AbstractMesh:
    sizes, names = (1,) * (len(AXES) + 1), (*AXES, 'other')
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))


# --- Trees ----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=['kernel', 'rest'], meta_fields=['name'])
@dataclasses.dataclass
class Module:
    """A dataclass that is a pytree, with a static field."""

    kernel: Any
    rest: Any
    name: str = 'module'


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Returns the leaves with their paths, as in the guide."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator='/'), leaf) for path, leaf in flat]


def shape_of(leaf: Any) -> tuple[int, ...]:
    return tuple(getattr(leaf, 'shape', ()))


def shown(path: str, leaf: Any) -> str:
    """Returns a leaf as errors describe it."""
    array = f'{leaf.dtype}{list(leaf.shape)}' if hasattr(leaf, 'dtype') else f'Python {type(leaf).__name__}'
    return f'{path or "(the leaf itself)"}: {array}'


def abstract(tree: Any) -> Any:
    """Returns the tree without data, for pickling and printing."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, 'dtype') else leaf, tree
    )
