"""What ``a & b`` makes of two decisions about one leaf, and what of them is lost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from scalax._tree import specs
from scalax._tree.paths import NamedTree
from scalax.errors import Problem
from scalax.rules._decisions import REPLICATED, Answer, AxisSizes, Decision


def claim(answer: Answer) -> PartitionSpec:
    """What a decision occupies of a leaf. A stack of layers is not free, though nothing shards it."""
    if not isinstance(answer, Decision) or answer.spec is None:
        return REPLICATED
    return close(answer.spec, answer.stack) if answer.stack else answer.spec


def unoccupied(
    outers: Sequence[PartitionSpec], answers: Sequence[Answer], shapes: Sequence[tuple[int, ...]]
) -> list[Answer]:
    """The answers without what outer rules occupy already: nested rules cannot use it again."""
    memo: dict[Any, Answer] = {}
    kept: list[Answer] = []
    for outer, answer, shape in zip(outers, answers, shapes, strict=True):
        if outer and isinstance(answer, Decision) and answer.spec is not None:
            key = id(answer), outer, len(shape)
            if key not in memo:
                spec = remainder(outer, answer.spec, len(shape))
                same = spec == specs.canonical(answer.spec)
                memo[key] = answer if same else _reduced(answer, spec, outer)
            answer = memo[key]
        kept.append(answer)
    return kept


def _reduced(answer: Decision, spec: PartitionSpec, outer: PartitionSpec) -> Decision:
    notes = (*answer.notes, *_lost(answer, spec, outer))
    clauses = answer.clauses if _asks(spec) else ()  # decides nothing if nothing is left
    return dataclasses.replace(answer, spec=spec, notes=notes, clauses=clauses)


def two_meshes(tree: NamedTree, index: int, below: Decision, above: Decision) -> Problem:
    """The problem of a leaf for which two NamedShardings are of different meshes."""
    return Problem(
        'other-mesh',
        tree.describe(index),
        f'the NamedShardings are of two meshes: {below.mesh} and {above.mesh}',
        rule=f'{below.origin} & {above.origin}',
        hint="give NamedShardings of the helper's own mesh, or PartitionSpecs.",
    )


def merged(below: Decision, above: Decision, shape: tuple[int, ...], axis_sizes: AxisSizes) -> Decision:
    """The decision of two with specs together, about a leaf of this shape."""
    assert below.spec is not None and above.spec is not None
    filled = fill(below.spec, above.spec, len(shape), below.stack)
    is_same = filled == specs.canonical(below.spec)
    # A rule that got nothing of what it asked for did not decide.
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


def unanswered(below: Decision, default: Decision | Problem) -> Decision:
    """The decision of *a* where *b* has no answer, with the reason of *b* for that."""
    if isinstance(default, Problem) or not default.reason:
        return below
    return dataclasses.replace(below, notes=(*below.notes, default.reason))


def _lost(asked: Decision, placed: PartitionSpec, before: PartitionSpec) -> tuple[str, ...]:
    """What a decision asked for and did not get, and why, in a few words."""
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


def fill(
    below: PartitionSpec, above: PartitionSpec, rank: int, closed: Collection[int] = ()
) -> PartitionSpec:
    """A spec whose free dimensions are filled from another, with axes that it does not use yet.

    Args:
        below: the spec.
        above: the other one.
        rank: the number of dimensions of the array.
        closed: dimensions that are not free, though nothing is placed there.

    Example:
        >>> fill(PartitionSpec(None, 'tp'), PartitionSpec(('fsdp', 'tp'), 'dp'), 2)
        P('fsdp', 'tp')
    """
    used = {*specs.spec_axes(below), *below.unreduced, *below.reduced}
    first, second = specs.entries(below), specs.entries(above)
    entries: list[Any] = []
    # A spec that is longer than the array stays so; validation reports it.
    for dim in range(max(rank, len(first), len(second))):
        entry = first[dim] if dim < len(first) else None
        if entry is None and dim < len(second) and dim not in closed:
            entry = second[dim]
            if entry is not specs.UNCONSTRAINED:
                # An axis that `above` uses twice stays too; validation reports it.
                entry = tuple(axis for axis in specs.entry_axes(entry) if axis not in used)
        entries.append(entry)
    filled = specs.replaced(below, entries)
    unreduced, reduced = above.unreduced - used, above.reduced - used
    if unreduced or reduced:
        filled = filled.update(unreduced=below.unreduced | unreduced, reduced=below.reduced | reduced)
    return filled


def remainder(outer: PartitionSpec, spec: PartitionSpec, rank: int) -> PartitionSpec:
    """A spec without the dimensions and axes that an outer rule occupies.

    Example:
        >>> remainder(PartitionSpec('a', None), PartitionSpec('b', ('a', 'c')), 2)
        P(None, 'c')
    """
    taken, used = specs.entries(outer), specs.spec_axes(outer)
    left: list[Any] = []
    for dim, entry in enumerate(specs.entries(spec)):
        if dim < min(rank, len(taken)) and taken[dim] is not None:
            entry = None
        elif entry is not specs.UNCONSTRAINED:
            entry = tuple(axis for axis in specs.entry_axes(entry) if axis not in used)
        left.append(entry)
    return specs.replaced(spec, left)


def close(spec: PartitionSpec, dims: Collection[int]) -> PartitionSpec:
    """The spec in which the empty ones of some dimensions are not free.

    Example:
        >>> close(PartitionSpec('a'), (0, 1))
        P('a', UNCONSTRAINED)
    """
    entries = [*specs.entries(spec), *[None] * (max(dims, default=-1) + 1)]
    for dim in dims:
        # UNCONSTRAINED is never filled.
        entries[dim] = specs.UNCONSTRAINED if entries[dim] is None else entries[dim]
    return specs.replaced(spec, entries)


def occupied_by(outer: PartitionSpec, spec: PartitionSpec, rank: int) -> PartitionSpec:
    """What a rule and the outer ones occupy of a leaf of *rank* dimensions, for the next rule to see.

    Axes that they use outside these dimensions come after the last one.

    Example:
        >>> occupied_by(PartitionSpec(None, 'a'), PartitionSpec('b', 'c'), 3)
        P('b', 'a', None)
    """
    filled = specs.entries(fill(outer, spec, rank))
    beyond = dict.fromkeys(axis for entry in filled[rank:] for axis in specs.entry_axes(entry))
    beyond.update(dict.fromkeys(sorted(spec.unreduced | spec.reduced)))
    seen = [*filled, *[None] * rank][:rank]
    return PartitionSpec(*seen, tuple(beyond)) if beyond else PartitionSpec(*seen)
