"""What are the property tests about? Meshes, and compositions of rules, as plain data.

A *term* is a composition of rules written down: `make` builds the rule that a user would have written,
and `rules_by_hand` says what it means without asking the library. A PartitionSpec and None are terms
themselves. Terms hold no devices, so that another process can read them.
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
class MeshOf:
    """A mesh: its sizes, the axis types as letters, in which order the devices lie (None: it has none)."""

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
def _helper(mesh: MeshOf) -> MeshShardingHelper:
    names, types = tuple(mesh.shape), tuple(KINDS[kind] for kind in mesh.kinds)
    if mesh.order is None:
        whole = AbstractMesh(mesh.sizes, names, axis_types=types)
        return MeshShardingHelper.from_mesh(whole, on_indivisible=mesh.policy)
    # As they come; backwards; in steps of three, from another one each.
    steps = [range(8), range(7, -1, -1), *(range(start, start + 24, 3) for start in (2, 3, 4))][mesh.order]
    devices = [jax.devices()[step % 8] for step in steps][: math.prod(mesh.sizes)]
    return MeshShardingHelper(
        mesh.sizes, names, devices=devices, axis_types=types, on_indivisible=mesh.policy
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Situation:
    """A mesh, a tree for it, and terms: a prefix of the tree, or several for the whole of it."""

    mesh: MeshOf
    tree: Any
    terms: Any

    def __repr__(self) -> str:
        return f'Situation({self.mesh}, {abstract(self.tree)}, {self.terms})'


# --- Terms ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Named:
    """A NamedSharding of the mesh, or (for mistakes) of another one."""

    spec: P
    memory: str | None = None
    own: bool = True


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
    """A policy: a term for each rank."""

    table: tuple[Any, ...]
    policy: str = 'error'


@dataclasses.dataclass(frozen=True)
class Logical:
    mapping: tuple[tuple[str, Entry], ...]
    names: tuple[tuple[Regex, str], ...]
    strict: bool = True
    policy: str = 'error'


@dataclasses.dataclass(frozen=True)
class Own:
    """A user's subclass: a spec (or what else `apply` may return) for each rank, where that divides."""

    table: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """The state of an optimizer of these params, which `rule` shards; see `state_of`."""

    rule: Any
    params: Any


@dataclasses.dataclass(frozen=True)
class Either:
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Both:
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


TERMS = (Named, Fsdp, Paths, ByRank, Logical, Own, State, Either, Both, Stack, InMemory)


def is_term(node: Any) -> bool:
    """Whether this is one term rather than a tree of them."""
    return node is None or isinstance(node, (P, *TERMS))


def parts(term: Any) -> list[Any]:
    """The terms that a term is made of."""
    match term:
        case Paths():
            return [value for _, value in term.pairs]
        case ByRank() | Own():
            return list(term.table)
        case Either() | Both():
            return [term.first, term.second]
        case Stack() | InMemory() | State():
            return [term.rule]
    return []


def mentions(term: Any, test: Callable[[Any], bool]) -> bool:
    """Whether a term, or one inside it, passes a test."""
    return test(term) or any(mentions(part, test) for part in parts(term))


def is_impossible(term: Any, mesh: MeshOf) -> bool:
    """Whether there is an FSDP rule in it that the mesh has no axis for, or one of another size."""

    def test(one: Any) -> bool:
        if not isinstance(one, Fsdp):
            return False
        sizes = [mesh.shape.get(axis, 0) for axis in one.axes]
        return 0 in sizes or one.size not in (None, math.prod(sizes))

    return mentions(term, test)


def state_of(params: Any) -> dict[str, Any]:
    """The state that an optimizer with two moments makes of params."""
    return {'count': 0, 'mu': params, 'nu': params}


# --- Rules ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy as a value: it compares, prints and pickles."""

    table: tuple[Any, ...]

    def __call__(self, path: str, leaf: Any) -> Any:
        return self.table[len(leaf.shape)]


@dataclasses.dataclass(frozen=True)
class OwnRule(ShardingRule):
    """A user's rule."""

    table: tuple[Any, ...]
    sizes: tuple[tuple[str, int], ...]

    def apply(self, pytree: Any) -> Any:
        return jax.tree.map(lambda leaf: own_value(self.table, leaf.shape, dict(self.sizes)), pytree)


def own_value(table: tuple[Any, ...], shape: tuple[int, ...], sizes: dict[str, int]) -> Any:
    """What a user's rule says about an array: its spec where that divides, else P()."""
    value = table[len(shape)]
    if not isinstance(value, P):
        return value
    for n, entry in zip(shape, value, strict=False):
        if n % math.prod(sizes.get(axis, 1) for axis in axes_of(entry)):
            return P()
    return value


def axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec."""
    if entry is None or entry is P.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def make(term: Any, mesh: MeshOf) -> Any:
    """The rule, spec, sharding or None that a user would have written for a term, or a tree of terms."""
    if not is_term(term):
        return jax.tree.map(lambda one: make(one, mesh), term, is_leaf=is_term)
    match term:
        case Named():
            on: Mesh | AbstractMesh = mesh.helper().mesh if term.own else _other_mesh()
            return NamedSharding(on, term.spec, memory_kind=term.memory)
        case Fsdp():
            return FSDPShardingRule(
                term.axes[0] if len(term.axes) == 1 else term.axes, term.size, term.minimum
            )
        case Paths():
            pairs = [(regex, make(value, mesh)) for regex, value in term.pairs]
            return TreePathShardingRule(*pairs, strict=term.strict, on_indivisible=term.policy)
        case ByRank():
            return PolicyShardingRule(Policy(tuple(_made(v, mesh) for v in term.table)), term.policy)
        case Logical():
            return LogicalAxisShardingRule(term.mapping, term.names, term.strict, term.policy)
        case Own():
            table = tuple(_made(value, mesh) for value in term.table)
            return OwnRule(table, tuple(mesh.shape.items()))
        case State():
            return OptimizerStateShardingRule(make(term.rule, mesh), term.params)
        case Either():
            return make(term.first, mesh) | make(term.second, mesh)
        case Both():
            return make(term.first, mesh) & make(term.second, mesh)
        case Stack():
            return make(term.rule, mesh).stacked(term.dims)
        case InMemory():
            return make(term.rule, mesh).with_memory_kind(term.kind)
    return term


def _made(value: Any, mesh: MeshOf) -> Any:
    """A value of a table; what is no term is a user's mistake, and stays."""
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
    """The leaves with their paths, as the guide writes them."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator='/'), leaf) for path, leaf in flat]


def shape_of(leaf: Any) -> tuple[int, ...]:
    return tuple(getattr(leaf, 'shape', ()))


def shown(path: str, leaf: Any) -> str:
    """A leaf as errors show it."""
    kind = f'{leaf.dtype}{list(leaf.shape)}' if hasattr(leaf, 'dtype') else f'Python {type(leaf).__name__}'
    return f'{path or "(the leaf itself)"}: {kind}'


def abstract(tree: Any) -> Any:
    """The tree without data: what another process needs of it, and what people want to read."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, 'dtype') else leaf, tree
    )
