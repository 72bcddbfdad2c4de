"""Hypothesis strategies for meshes, trees and compositions of rules.

Everything is drawn from a `random.Random`. Hypothesis either steers it, and can shrink a failure, or only
seeds it, which is faster and covers more rare cases.

Most situations are drawn with *care*: they are usually valid, so that arrays are placed and the laws of the
operators apply. The others may be invalid in any way, and end in errors.
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
    And,
    ByRank,
    Custom,
    FixedSharding,
    Fsdp,
    InMemory,
    Logical,
    MeshSpec,
    Module,
    Or,
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
# Patterns of names, with the lowest rank that they match.
_NAMES = (('...', 0), ('e ...', 1), ('... m', 1), ('... (m e)', 1), ('e ... m', 2), ('... (h k) e', 2))
_RISKY_NAMES = (*_NAMES, ('e m', 2), ('e', 1), ('(h k)', 1), ('2 ...', 1), ('... m _ e', 3))


def situations(count: int | None = None, values: bool = False) -> st.SearchStrategy[Situation]:
    """Returns a strategy for situations.

    Args:
        count: the number of terms for the entire tree; None for a tree of terms.
        values: whether the repr of all rules recreates them.
    """
    return _situations(count, values)


@st.composite
def _situations(draw: Callable[..., Any], count: int | None, values: bool) -> Situation:
    # Drawn here instead of with st.map, so that a failure shows the situation and not the seed.
    steered = st.randoms(note_method_calls=False, use_true_random=False)
    seeded = st.integers(0, 2**64).map(Random)
    return _situation(draw(st.one_of(seeded, seeded, seeded, steered)), count, values)


def _chance(rnd: Random, one_in: int) -> bool:
    return rnd.randrange(one_in) == 0


# --- Meshes ---------------------------------------------------------------------------------------

_SIZES = [s for rank in range(1, 5) for s in itertools.product(range(1, 9), repeat=rank) if math.prod(s) <= 8]
# Meshes with an axis of size 1, which shards nothing, are drawn least often; several axes most often.
_WITH_DEVICES = [s for s in _SIZES for _ in range(1 if 1 in s else 4 if len(s) == 1 else 16)]
_DENSE = [(2, 2), (2, 3), (2, 4), (2, 2, 2), (2, 2, 3), (2, 2, 2, 2)]


def _mesh(rnd: Random) -> MeshSpec:
    """Draws a mesh of one to four axes over one to eight devices, or a larger abstract mesh."""
    devices = not _chance(rnd, 4)
    if devices:
        sizes = rnd.choice(_WITH_DEVICES)
    else:
        sizes = tuple(rnd.randint(1, 8) for _ in range(rnd.randint(1, 4)))
    kinds = rnd.choice(['AAAA', 'AAAA', 'EEEE', 'AEAE', 'EAAE'])[: len(sizes)]
    return MeshSpec(sizes, kinds, rnd.randrange(5) if devices else None)


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
    """Draws trees of arrays, with or without data, that have at least *floor* dimensions."""

    rnd: Random
    floor: int
    has_data: bool
    keys: Sequence[str] = _KEYS

    def leaf(self) -> Any:
        """Draws an array, or a Python number or PRNG keys if *floor* allows their ranks."""
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
        """Draws a tree of all kinds of nodes, which may be empty."""
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
    """Draws terms for a mesh. With *care*, they are mostly valid.

    Attributes:
        floor: the lowest rank of the arrays.
        params: the parameters, if the tree is the state of an optimizer.
        values: whether to exclude NamedShardings, which contain devices.
        dense: whether terms are nested as deep as allowed.
    """

    rnd: Random
    mesh: MeshSpec
    floor: int
    care: bool
    params: Any = None
    values: bool = False
    dense: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.mesh.shape)

    def spec(self, rank: int, care: bool) -> P:
        """Draws a spec of at most *rank* entries, in which each mesh axis is used once."""
        rnd, free = self.rnd, list(self.axes)
        entries: list[Any] = []
        for _ in range(rank):
            axes: tuple[str, ...] = ()
            if free and not _chance(rnd, 3):
                axes = (free.pop(rnd.randrange(len(free))),)
                # With care, the mesh axes of one dimension have the same type.
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
        """Draws the value of a regex or policy for a rank: a spec, None, a NamedSharding or a rule."""
        rank = self.floor if rank is None else rank
        kind = self.rnd.randrange(12)
        if kind >= 9 and depth > 0:
            return self.rule(depth - 1)
        if kind == 8 and (not self.care or _chance(self.rnd, 4)):
            return None
        if kind == 7 and not self.values:
            is_on_mesh = self.care or not _chance(self.rnd, 4)
            memory = self.rnd.choice([None, 'pinned_host']) if is_on_mesh else None
            return FixedSharding(self.spec(rank, care=True), memory, is_on_mesh)
        return self.spec(rank, self.care)

    def table(self, depth: int) -> tuple[Any, ...]:
        """Draws one value for each rank."""
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

    def custom(self, depth: int) -> Custom:
        return Custom(self.table(0))

    def logical(self, depth: int) -> Logical:
        rnd, axes = self.rnd, self.axes
        entries = [*axes, axes[:2], ('absent', axes[-1]), 'absent', None]
        names = [*'emhk', *rnd.choices('emh', k=rnd.randrange(4))]
        mapping = tuple((name, rnd.choice(entries)) for name in rnd.sample(names, len(names)))
        texts = [
            text
            for text, rank in (_NAMES if self.care else _RISKY_NAMES)
            if not self.care or rank <= self.floor
        ]
        pairs = tuple((rnd.choice(_REGEXES), rnd.choice(texts)) for _ in range(rnd.randint(1, 2)))
        return Logical(mapping, pairs, self.strict(), self.policy())

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
        """Draws ``a | b`` or ``a & b``, of which one operand may be a spec, a NamedSharding or None."""
        sides = [
            self.rule(depth - 1),
            self.value(depth - 1) if _chance(self.rnd, 3) else self.rule(depth - 1),
        ]
        return self.rnd.choice([Or, And, And])(*self.rnd.sample(sides, 2))

    def nested_and(self) -> And:
        """Draws ``a & (b & c)``, or `&` with a stack, where free dimensions depend on outer rules."""
        chooser = self.rnd.choice([self.fsdp, self.fsdp, self.logical, self.paths])
        if _chance(self.rnd, 2):
            sides = [self.rnd.choice([self.paths, self.fsdp])(0), Stack(chooser(0), 1)]
            return And(*self.rnd.sample(sides, 2))
        return And(self.paths(0), And(self.paths(0), chooser(0)))

    def rule(self, depth: int) -> Any:
        """Draws a term that is a rule, with nested terms."""
        simple = (
            *(self.fsdp, self.fsdp, self.paths, self.paths, self.by_rank, self.custom),
            *(self.logical, self.logical, self.state),
        )
        composed = (*[self.operator] * 7, *[self.stack] * 2, self.in_memory)
        if depth == 0 or (not self.dense and _chance(self.rnd, 3)):
            return self.rnd.choice(simple)(depth)
        return self.rnd.choice(composed)(depth)

    def prefix(self, tree: Any, depth: int = 2) -> Any:
        """Draws a tree of terms that is a prefix of the tree."""
        if depth == 0 or _chance(self.rnd, 2) or jax.tree_util.all_leaves([tree]) or tree is None:
            return self.value(2)
        children, treedef = jax.tree.flatten(tree, is_leaf=lambda node: node is not tree)
        return treedef.unflatten([self.prefix(child, depth - 1) for child in children])


# --- Situations -----------------------------------------------------------------------------------


def _situation(rnd: Random, count: int | None, values: bool) -> Situation:
    care, kind = not _chance(rnd, 4), rnd.randrange(16)
    prefixed = params = None
    if kind < 8:
        # Two arrays on several mesh axes, so that two rules of a composition often use the same axes.
        sizes = rnd.choice(_DENSE)
        mesh = MeshSpec(sizes, 'A' * len(sizes), 0 if math.prod(sizes) <= 8 else None)
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
        drawn = terms.nested_and() if _chance(rnd, 3) else terms.rule(2)
    else:
        drawn = terms.prefix(tree) if prefixed else terms.rule(3)
    flat_terms = drawn if count is not None else jax.tree.leaves(drawn, is_leaf=is_term)
    # With rules that warn, the policy of the helper must not be 'replicate', which is less strict.
    warns = any(mentions(term, lambda part: getattr(part, 'policy', '') == 'warn') for term in flat_terms)
    policies = ['warn', *['replicate', 'replicate'] * (not warns), *['error'] * (not care)]
    return Situation(dataclasses.replace(mesh, policy=rnd.choice(policies)), tree, drawn)
