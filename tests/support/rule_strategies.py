"""How are meshes, trees and compositions of rules drawn at random?

All is drawn from a `random.Random`. Hypothesis gives one of two kinds: one that it steers, and shrinks to
the simplest failure, and one that it only seeds, which is fast and reaches what few examples have.

Most situations are drawn with care: what they ask for is possible, so that arrays are placed and laws have
something to hold for. The others may ask for anything, and end in errors.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import jax
import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from tests.support.rule_language import (
    Both,
    ByRank,
    Either,
    Fsdp,
    InMemory,
    Logical,
    MeshOf,
    Module,
    Named,
    Own,
    Pair,
    Paths,
    Situation,
    Stack,
    State,
    abstract,
    is_term,
    mentions,
    state_of,
)

_MEMORIES = ('pinned_host', 'device')
_REGEXES = (
    *[''] * 4,
    'w',
    '^b',
    'layers',
    'w$|0',
    '/',
    '[0-9]',
    'größe',
    'a/b',
    'kernel',
    re.compile('W', re.I),
)
_KEYS = ('w', 'b', 'layers', 'a/b', '0', 'größe', 'W')
_PLAIN_KEYS = ('w', 'bias', 'attn', 'mlp')
# Patterns of names, with the least rank that they fit.
_NAMES = (('...', 0), ('e ...', 1), ('... m', 1), ('... (m e)', 1), ('e ... m', 2), ('... (h k) e', 2))
_RISKY_NAMES = (*_NAMES, ('e m', 2), ('e', 1), ('(h k)', 1), ('2 ...', 1), ('... m _ e', 3))


def situations(count: int | None = None, values: bool = False) -> st.SearchStrategy[Situation]:
    """Random situations.

    Args:
        count: that many terms for the whole tree, in place of a tree of terms.
        values: only terms whose rules print as they are written.
    """
    return _situations(count, values)


@st.composite
def _situations(draw: Callable[..., Any], count: int | None, values: bool) -> Situation:
    # Not mapped, so that a failure shows the situation and not the seed.
    steered = st.randoms(note_method_calls=False, use_true_random=False)
    seeded = st.integers(0, 2**64).map(Random)
    return _situation(draw(st.one_of(seeded, seeded, seeded, steered)), count, values)


def _chance(rnd: Random, one_in: int) -> bool:
    return rnd.randrange(one_in) == 0


# --- Meshes ---------------------------------------------------------------------------------------

_SIZES = [s for rank in range(1, 5) for s in itertools.product(range(1, 9), repeat=rank) if math.prod(s) <= 8]
# Axes of size 1 shard nothing: meshes without them are drawn more often, those of several axes most often.
_WITH_DEVICES = [s for s in _SIZES for _ in range(1 if 1 in s else 4 if len(s) == 1 else 16)]
_DENSE = [(2, 2), (2, 3), (2, 4), (2, 2, 2), (2, 2, 3), (2, 2, 2, 2)]


def _mesh(rnd: Random) -> MeshOf:
    """Meshes of one to four axes over one to eight devices, or without devices and larger."""
    devices = not _chance(rnd, 4)
    if devices:
        sizes = rnd.choice(_WITH_DEVICES)
    else:
        sizes = tuple(rnd.randint(1, 8) for _ in range(rnd.randint(1, 4)))
    kinds = rnd.choice(['AAAA', 'AAAA', 'EEEE', 'AEAE', 'EAAE'])[: len(sizes)]
    return MeshOf(sizes, kinds, rnd.randrange(5) if devices else None)


# --- Trees ----------------------------------------------------------------------------------------

_SMALL = (1, 2, 3, 4, 6, 8, 8)
_ANY = (0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 12, 24, 24, 30)
_LARGE = (1, 7, 8, 12, 30, 60, 120, 840)
_DTYPES = (np.float32, np.int16, ml_dtypes.bfloat16, np.bool_, np.float64)


@functools.cache
def _array(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return (np.arange(math.prod(shape)) % 7).astype(dtype).reshape(shape)


@functools.cache
def _jax_array(shape: tuple[int, ...]) -> jax.Array:
    return jax.device_put(_array(shape, np.int32))


@functools.cache
def _keys() -> jax.Array:
    return jax.random.split(jax.random.key(0), 4)


@dataclasses.dataclass(frozen=True)
class _Trees:
    """Trees of arrays of at least *floor* dimensions, with data or without."""

    rnd: Random
    floor: int
    has_data: bool
    keys: Sequence[str] = _KEYS

    def leaf(self) -> Any:
        """An array; Python numbers and keys too, where these have dimensions enough."""
        rank = self.rnd.randint(self.floor, 4 if self.floor > 2 else self.floor + 2)
        sizes = _LARGE if not self.has_data else _ANY if rank < 3 else _SMALL
        shape = tuple(self.rnd.choice(sizes) for _ in range(rank))
        kind = self.rnd.randrange(10)
        if not self.has_data:
            return jax.ShapeDtypeStruct(shape, _DTYPES[kind % 5])
        if kind == 9:
            return self.rnd.choice([3, 2.5, True]) if self.floor == 0 else _jax_array(shape)
        if kind == 8:
            return _keys() if self.floor <= 1 else _jax_array(shape)
        return _array(shape, _DTYPES[kind % 5])

    def tree(self, depth: int = 3) -> Any:
        """Trees of all kinds of nodes, empty ones too."""
        kind = self.rnd.randrange(10)
        if depth == 0 or (depth < 3 and kind <= 3) or _chance(self.rnd, 20):
            return self.leaf()
        if kind <= 5 or self.keys is _PLAIN_KEYS:
            at_least = self.keys is _PLAIN_KEYS or depth == 3
            keys = self.rnd.sample(self.keys, self.rnd.randint(at_least, 3))
            return {key: self.tree(depth - 1) for key in keys}
        some, others = self.tree(depth - 1), [self.tree(depth - 1) for _ in range(self.rnd.randrange(3))]
        if kind <= 8:
            return [[some, *others], Pair(some, others), Module(some, others)][kind - 6]
        return self.rnd.choice([{7: some, -1: others}, {'': some}, (some, None), (some,), None, (), {}])


# --- Terms ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Terms:
    """Terms for a mesh. With *care*, what they ask for is mostly possible.

    Attributes:
        floor: the dimensions that every array has.
        params: the parameters, where the tree is the state of an optimizer.
        values: whether there are no NamedShardings, which hold devices.
        dense: whether terms are composed all the way down.
    """

    rnd: Random
    mesh: MeshOf
    floor: int
    care: bool
    params: Any = None
    values: bool = False
    dense: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.mesh.shape)

    def spec(self, rank: int, care: bool) -> P:
        """A spec of at most *rank* entries, in which each mesh axis is used once."""
        rnd, free = self.rnd, list(self.axes)
        entries: list[Any] = []
        for _ in range(rank):
            axes: tuple[str, ...] = ()
            if free and not _chance(rnd, 3):
                axes = (free.pop(rnd.randrange(len(free))),)
                # Care keeps the axes of one dimension of one type.
                more = [a for a in free if not care or self.mesh.kind(a) == self.mesh.kind(axes[0])]
                if more and _chance(rnd, 4):
                    axes += (rnd.choice(more),)
                    free.remove(axes[1])
            entries.append(axes or None)
        if not care and _chance(rnd, 8):
            entries.append(rnd.choice(['z', self.axes[0], ('a', 'a'), P.UNCONSTRAINED]))
        while entries and entries[-1] is None:
            entries.pop()
        return P(*entries)

    def value(self, depth: int, rank: int | None = None) -> Any:
        """What a regex or a policy may say of arrays of this rank: a spec, None, a NamedSharding, a rule."""
        rank = self.floor if rank is None else rank
        kind = self.rnd.randrange(12)
        if kind >= 9 and depth > 0:
            return self.rule(depth - 1)
        if kind == 8 and (not self.care or _chance(self.rnd, 4)):
            return None
        if kind == 7 and not self.values:
            own = self.care or not _chance(self.rnd, 4)
            memory = self.rnd.choice([None, 'pinned_host']) if own else None
            return Named(self.spec(rank, care=True), memory, own)
        return self.spec(rank, self.care)

    def table(self, depth: int) -> tuple[Any, ...]:
        """One value for each rank."""
        table = [self.value(depth, rank) for rank in range(5)]
        if not self.care and _chance(self.rnd, 8):
            table[self.rnd.randrange(5)] = self.rnd.choice(['a', ('a', None), 0])
        return tuple(table)

    def policy(self) -> str:
        return self.rnd.choice(['replicate', 'replicate' if self.care else 'error', 'warn'])

    def strict(self) -> bool:
        return _chance(self.rnd, 8 if self.care else 3)

    def fsdp(self, depth: int) -> Fsdp:
        axes = self.rnd.choice([(self.rnd.choice(self.axes),), self.axes[:2], self.axes[-2:]])
        if self.care and len({self.mesh.kind(axis) for axis in axes}) > 1:
            axes = axes[:1]
        size = math.prod(self.mesh.shape[axis] for axis in axes)
        if not self.care and _chance(self.rnd, 16):
            axes, size = self.rnd.choice([(('z',), size), (axes, size + 1)])
        return Fsdp(axes, self.rnd.choice([0, 0, 1, 8, 50, 10**6]), self.rnd.choice([None, size]))

    def paths(self, depth: int) -> Paths:
        count = self.rnd.randint(1, 3)
        pairs = [(self.rnd.choice(_REGEXES), self.value(depth)) for _ in range(count)]
        return Paths(tuple(pairs), self.strict(), self.policy())

    def by_rank(self, depth: int) -> ByRank:
        return ByRank(self.table(depth), self.policy())

    def own(self, depth: int) -> Own:
        return Own(self.table(0))

    def logical(self, depth: int) -> Logical:
        rnd, axes = self.rnd, self.axes
        entries = [*axes, axes[:2], ('absent', axes[-1]), 'absent', None]
        names = [*'emhk', *rnd.choices('emh', k=rnd.randrange(4))]
        mapping = tuple((name, rnd.choice(entries)) for name in rnd.sample(names, len(names)))
        patterns = [one for one in _NAMES if one[1] <= self.floor] if self.care else _RISKY_NAMES
        texts = [text for text, _ in patterns]
        found = tuple((rnd.choice(_REGEXES), rnd.choice(texts)) for _ in range(rnd.randint(1, 2)))
        return Logical(mapping, found, self.strict(), self.policy())

    def state(self, depth: int) -> Any:
        if self.params is None:
            return self.paths(depth)
        return State(dataclasses.replace(self, params=None).rule(depth), self.params)

    def stack(self, depth: int) -> Stack:
        # Params are not stacked, and the rule sees arrays without the stack.
        inside = dataclasses.replace(self, params=None, floor=max(self.floor - 1, 0))
        dims = 1 if self.care else self.rnd.randint(1, 2)
        return Stack(inside.rule(0 if self.dense else depth - 1), dims)

    def in_memory(self, depth: int) -> InMemory:
        unknown = not self.care and _chance(self.rnd, 4)
        return InMemory(self.rule(depth - 1), 'nowhere' if unknown else self.rnd.choice(_MEMORIES))

    def operator(self, depth: int) -> Any:
        """``a | b`` or ``a & b``, of which one side may be what is no rule by itself."""
        sides = [
            self.rule(depth - 1),
            self.value(depth - 1) if _chance(self.rnd, 3) else self.rule(depth - 1),
        ]
        return self.rnd.choice([Either, Both, Both])(*self.rnd.sample(sides, 2))

    def brackets(self) -> Both:
        """``a & (b & c)``, or a stack on one side of `&`: what is free is for the innermost rule to know."""
        chooser = self.rnd.choice([self.fsdp, self.fsdp, self.logical, self.paths])
        if _chance(self.rnd, 2):
            sides = [self.rnd.choice([self.paths, self.fsdp])(0), Stack(chooser(0), 1)]
            return Both(*self.rnd.sample(sides, 2))
        return Both(self.paths(0), Both(self.paths(0), chooser(0)))

    def rule(self, depth: int) -> Any:
        """A term that is a rule, with others inside."""
        simple = (
            *(self.fsdp, self.fsdp, self.paths, self.paths, self.by_rank, self.own),
            *(self.logical, self.logical, self.state),
        )
        composed = (*[self.operator] * 7, *[self.stack] * 2, self.in_memory)
        if depth == 0 or (not self.dense and _chance(self.rnd, 3)):
            return self.rnd.choice(simple)(depth)
        return self.rnd.choice(composed)(depth)

    def prefix(self, tree: Any, depth: int = 2) -> Any:
        """A tree of terms: a prefix of the tree."""
        if depth == 0 or _chance(self.rnd, 2) or jax.tree_util.all_leaves([tree]) or tree is None:
            return self.value(2)
        children, treedef = jax.tree.flatten(tree, is_leaf=lambda node: node is not tree)
        return treedef.unflatten([self.prefix(child, depth - 1) for child in children])


# --- All together ---------------------------------------------------------------------------------


def _situation(rnd: Random, count: int | None, values: bool) -> Situation:
    care, kind = not _chance(rnd, 4), rnd.randrange(16)
    prefixed = params = None
    if kind < 8:
        # Two arrays on several axes: nothing is as likely to bring two rules of a composition together.
        sizes = rnd.choice(_DENSE)
        mesh = MeshOf(sizes, 'A' * len(sizes), 0 if math.prod(sizes) <= 8 else None)
        floor = rnd.randint(1, 3)
        trees = _Trees(rnd, floor, mesh.order is not None)
        tree: Any = {'w': trees.leaf(), 'b': trees.leaf()}
    else:
        mesh, floor = _mesh(rnd), rnd.randrange(4)
        keys = _PLAIN_KEYS if kind == 8 else _KEYS
        tree = _Trees(rnd, floor, mesh.order is not None, keys).tree()
        if kind == 8 and isinstance(tree, dict) and not values:
            params, tree = abstract(tree), state_of(tree)
        prefixed = count is None and kind in (9, 10)
    terms = _Terms(rnd, mesh, floor, care, params, values, dense=kind < 8)
    if count is not None:
        drawn: Any = tuple(terms.rule(1 if terms.dense else 2) for _ in range(count))
    elif terms.dense:
        drawn = terms.brackets() if _chance(rnd, 3) else terms.rule(2)
    else:
        drawn = terms.prefix(tree) if prefixed else terms.rule(3)
    listed = drawn if count is not None else jax.tree.leaves(drawn, is_leaf=is_term)
    # Beside rules that warn, a helper that keeps silent would leave open what is the stricter.
    warns = any(mentions(term, lambda one: getattr(one, 'policy', '') == 'warn') for term in listed)
    policies = ['warn', *['replicate', 'replicate'] * (not warns), *['error'] * (not care)]
    return Situation(dataclasses.replace(mesh, policy=rnd.choice(policies)), tree, drawn)
