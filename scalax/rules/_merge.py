"""What do two answers say together about one leaf, and what of them is lost? For ``a & b``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from scalax._tree import specs
from scalax._tree.paths import NamedTree
from scalax.errors import Problem
from scalax.rules._answers import REPLICATED, Answer, AxisSizes, Said
from scalax.rules._free import close, fill, left_by


def spec_of(said: Said) -> PartitionSpec:
    """What an answer takes of a leaf: a stack of layers is not free, though nothing is placed there."""
    if not isinstance(said, Answer) or said.spec is None:
        return REPLICATED
    return close(said.spec, said.stack) if said.stack else said.spec


def left(
    outers: Sequence[PartitionSpec], answers: Sequence[Said], shapes: Sequence[tuple[int, ...]]
) -> list[Said]:
    """What rules further out leave of each answer, which is all of it that will be placed."""
    memo: dict[Any, Said] = {}
    kept: list[Said] = []
    for outer, said, shape in zip(outers, answers, shapes, strict=True):
        if outer and isinstance(said, Answer) and said.spec is not None:
            key = id(said), outer, len(shape)
            if key not in memo:
                spec = left_by(outer, said.spec, len(shape))
                same = spec == specs.canonical(said.spec)
                memo[key] = said if same else _reduced(said, spec, outer)
            said = memo[key]
        kept.append(said)
    return kept


def _reduced(said: Answer, spec: PartitionSpec, outer: PartitionSpec) -> Answer:
    notes = (*said.notes, *_lost(said, spec, outer))
    clauses = said.clauses if _asks(spec) else ()  # of which nothing is left decides nothing
    return dataclasses.replace(said, spec=spec, notes=notes, clauses=clauses)


def two_meshes(tree: NamedTree, index: int, below: Answer, above: Answer) -> Problem:
    """The problem of a leaf for which two NamedShardings are of different meshes."""
    return Problem(
        'other-mesh',
        tree.describe(index),
        f'the NamedShardings are of two meshes: {below.mesh} and {above.mesh}',
        rule=f'{below.origin} & {above.origin}',
        hint="give NamedShardings of the helper's own mesh, or PartitionSpecs.",
    )


def merged(below: Answer, above: Answer, shape: tuple[int, ...], axis_sizes: AxisSizes) -> Answer:
    """What two answers with specs say together about a leaf of this shape."""
    assert below.spec is not None and above.spec is not None
    filled = fill(below.spec, above.spec, len(shape), below.stack)
    is_same = filled == specs.canonical(below.spec)
    # Who asked for something and got nothing did not decide.
    counts = not is_same or not _asks(above.spec) or (above.memory_kind and not below.memory_kind)
    both = dataclasses.replace(
        below,
        memory_kind=below.memory_kind or above.memory_kind,
        clauses=below.clauses + (above.clauses if counts else ()),
        mesh=below.mesh or above.mesh,
        reordered=below.reordered or above.reordered,
        stack=below.stack + tuple(dim for dim in above.stack if dim not in below.stack),
        notes=(*below.notes, *above.notes, *_lost(above, filled, below.spec)),
    )
    if is_same:
        return both
    own = specs.entries(below.spec)
    added = [
        None if dim < len(own) and own[dim] is not None else entry
        for dim, entry in enumerate(specs.entries(filled))
    ]
    # A policy is about the dimensions that its rule placed: it counts if one of those does not divide.
    policies = [
        policy
        for answer, entries in ((below, own), (above, added))
        if not _divides(shape, entries, axis_sizes)
        for policy in answer.policies
    ]
    return dataclasses.replace(
        both,
        spec=filled,
        origin=f'{below.origin} & {above.origin}',
        reason='; '.join(part for part in (below.reason, above.reason) if part),
        policies=tuple(policies) or below.policies,
    )


def unanswered(below: Answer, default: Answer | Problem) -> Answer:
    """The answer of *a* where *b* has none, with the reason that *b* has for that."""
    if isinstance(default, Problem) or not default.reason:
        return below
    return dataclasses.replace(below, notes=(*below.notes, default.reason))


def _lost(asked: Answer, placed: PartitionSpec, before: PartitionSpec) -> tuple[str, ...]:
    """What an answer asked for and did not get, and why, in a few words."""
    assert asked.spec is not None
    kept, used = specs.entries(placed), {*specs.spec_axes(before), *before.unreduced, *before.reduced}
    notes = []
    for dim, entry in enumerate(specs.entries(asked.spec)):
        got = specs.entry_axes(kept[dim]) if dim < len(kept) else ()
        gone = [axis for axis in specs.entry_axes(entry) if axis not in got]
        if gone:
            why = 'in use' if used.issuperset(gone) else 'not free'
            notes.append(f'{asked.origin} asked for {", ".join(gone)} on dimension {dim}: {why}')
    return tuple(notes)


def _asks(spec: PartitionSpec) -> bool:
    """Whether a spec says anything."""
    return any(specs.entries(spec)) or bool(spec.unreduced or spec.reduced)


def _divides(shape: tuple[int, ...], entries: Sequence[Any], axis_sizes: AxisSizes) -> bool:
    """Whether every dimension divides by its axes, as far as these are known."""
    return not any(
        n % math.prod(axis_sizes.get(axis, 1) for axis in specs.entry_axes(entry))
        for n, entry in zip(shape, entries, strict=False)
    )
