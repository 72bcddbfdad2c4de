"""Merging two decisions about one leaf into one, as ``a & b`` does (`Overlay` in `_base`)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from scalax._tree import specs
from scalax._tree.paths import NamedTree
from scalax.errors import Problem
from scalax.rules._decisions import REPLICATED, Answer, AxisSizes, Decision


def occupied_spec(answer: Answer) -> PartitionSpec:
    """The spec that a decision occupies. A stack of layers is not free, though nothing shards it."""
    if not isinstance(answer, Decision) or answer.spec is None:
        return REPLICATED
    return block_dims(answer.spec, answer.stack) if answer.stack else answer.spec


def unoccupied(
    outers: Sequence[PartitionSpec], answers: Sequence[Answer], ranks: Sequence[int]
) -> list[Answer]:
    """The answers without the dimensions and mesh axes that outer rules have assigned already."""
    memo: dict[Any, Answer] = {}
    kept: list[Answer] = []
    for outer, answer, rank in zip(outers, answers, ranks, strict=True):
        if outer and isinstance(answer, Decision) and answer.spec is not None:
            key = id(answer), outer, rank
            if key not in memo:
                spec = unused_part(outer, answer.spec, rank)
                same = spec == specs.canonical(answer.spec)
                memo[key] = answer if same else _reduced(answer, spec, outer)
            answer = memo[key]
        kept.append(answer)
    return kept


def _reduced(answer: Decision, spec: PartitionSpec, outer: PartitionSpec) -> Decision:
    notes = (*answer.notes, *_lost(answer, spec, outer))
    clauses = answer.clauses if _is_sharded(spec) else ()  # a rule whose spec was not used did not decide
    return dataclasses.replace(answer, spec=spec, notes=notes, clauses=clauses)


def two_meshes(tree: NamedTree, index: int, first: Decision, second: Decision) -> Problem:
    """The problem of a leaf for which two NamedShardings are of different meshes."""
    return Problem(
        'other-mesh',
        tree.describe(index),
        f'the NamedShardings are of two meshes: {first.mesh} and {second.mesh}',
        rule=f'{first.origin} & {second.origin}',
        hint="give NamedShardings of the helper's own mesh, or PartitionSpecs.",
    )


def merged(first: Decision, second: Decision, shape: tuple[int, ...], axis_sizes: AxisSizes) -> Decision:
    """One decision made of two that have specs, about a leaf of this shape."""
    assert first.spec is not None and second.spec is not None
    free = unused_part(occupied_spec(first), second.spec, len(shape))
    filled = fill_free(first.spec, free)
    is_same = filled == specs.canonical(first.spec)
    # A rule whose spec was not used at all did not decide.
    counts = not is_same or not _is_sharded(second.spec) or (second.memory_kind and not first.memory_kind)
    both = dataclasses.replace(
        first,
        memory_kind=first.memory_kind or second.memory_kind,
        clauses=first.clauses + (second.clauses if counts else ()),
        mesh=first.mesh or second.mesh,
        reordered=first.reordered or second.reordered,
        stack=first.stack + tuple(dim for dim in second.stack if dim not in first.stack),
        notes=(*first.notes, *second.notes, *_lost(second, filled, first.spec)),
        passed=first.passed + second.passed,
    )
    if is_same:
        return both
    # A policy is about the dimensions that its rule placed: it counts if one of those does not divide.
    policies = [
        policy
        for answer, spec in ((first, first.spec), (second, free))
        if not _divides(shape, spec, axis_sizes)
        for policy in answer.policies
    ]
    return dataclasses.replace(
        both,
        spec=filled,
        origin=f'{first.origin} & {second.origin}',
        reason='; '.join(part for part in (first.reason, second.reason) if part),
        policies=tuple(policies) or first.policies,
    )


def unanswered(first: Decision, default: Decision | Problem) -> Decision:
    """The decision of *a* where *b* has no answer, with the reason of *b* as a note."""
    if isinstance(default, Problem) or not default.reason:
        return first
    return dataclasses.replace(first, notes=(*first.notes, default.reason))


def _lost(asked: Decision, placed: PartitionSpec, before: PartitionSpec) -> tuple[str, ...]:
    """Notes about the mesh axes that a decision asked for and did not get."""
    assert asked.spec is not None
    kept, used = specs.entries(placed), _used(before)
    notes = []
    for dim, entry in enumerate(specs.entries(asked.spec)):
        got = specs.entry_axes(kept[dim]) if dim < len(kept) else ()
        gone = [axis for axis in specs.entry_axes(entry) if axis not in got]
        if gone:
            why = 'in use' if used.issuperset(gone) else 'not free'
            notes.append(f'{asked.origin} asked for {", ".join(gone)} on dimension {dim}: {why}')
    return tuple(notes)


def _is_sharded(spec: PartitionSpec) -> bool:
    """Whether a spec shards anything."""
    return any(specs.entries(spec)) or bool(spec.unreduced or spec.reduced)


def _divides(shape: tuple[int, ...], spec: PartitionSpec, axis_sizes: AxisSizes) -> bool:
    """Whether every dimension divides by its axes, as far as these are known."""
    return not any(
        n % math.prod(axis_sizes.get(axis, 1) for axis in specs.entry_axes(entry))
        for n, entry in zip(shape, specs.entries(spec), strict=False)
    )


def fill(first: PartitionSpec, second: PartitionSpec, rank: int) -> PartitionSpec:
    """A spec whose free dimensions are filled from another, with axes that it does not use yet.

    Args:
        first: the spec.
        second: the other one.
        rank: the number of dimensions of the array.

    Example:
        >>> fill(PartitionSpec(None, 'tp'), PartitionSpec(('fsdp', 'tp'), 'dp'), 2)
        P('fsdp', 'tp')
    """
    return fill_free(first, unused_part(first, second, rank))


def fill_free(first: PartitionSpec, free: PartitionSpec) -> PartitionSpec:
    """A spec whose empty dimensions are filled from *free*, which `unused_part` gave."""
    pairs = itertools.zip_longest(specs.entries(first), specs.entries(free))
    filled = specs.replaced(first, [other if own is None else own for own, other in pairs])
    unreduced, reduced = free.unreduced - _used(first), free.reduced - _used(first)
    if unreduced or reduced:
        filled = filled.update(unreduced=first.unreduced | unreduced, reduced=first.reduced | reduced)
    return filled


def _used(spec: PartitionSpec) -> set[str]:
    """Every mesh axis of a spec, with the unreduced and reduced ones."""
    return {*specs.spec_axes(spec), *spec.unreduced, *spec.reduced}


def unused_part(outer: PartitionSpec, spec: PartitionSpec, rank: int) -> PartitionSpec:
    """A spec without the dimensions and axes that an outer rule occupies.

    Example:
        >>> unused_part(PartitionSpec('a', None), PartitionSpec('b', ('a', 'c')), 2)
        P(None, 'c')
    """
    unused = specs.only_axes(spec, set(specs.spec_axes(spec)) - _used(outer))
    pairs = itertools.zip_longest(specs.entries(unused), specs.entries(outer)[:rank])
    return specs.replaced(spec, [entry if occupied is None else None for entry, occupied in pairs])


def block_dims(spec: PartitionSpec, dims: Collection[int]) -> PartitionSpec:
    """The spec with UNCONSTRAINED in the empty ones of *dims*, so that they are never filled.

    Example:
        >>> block_dims(PartitionSpec('a'), (0, 1))
        P('a', UNCONSTRAINED)
    """
    entries = [*specs.entries(spec), *[None] * (max(dims, default=-1) + 1)]
    for dim in dims:
        entries[dim] = specs.UNCONSTRAINED if entries[dim] is None else entries[dim]
    return specs.replaced(spec, entries)


def occupied_by(outer: PartitionSpec, spec: PartitionSpec, rank: int) -> PartitionSpec:
    """What a rule and the rules around it occupy of a leaf of *rank* dimensions, for the next rule.

    Mesh axes that they use elsewhere, such as for a stack of layers, are in one more entry at the end.

    Example:
        >>> occupied_by(PartitionSpec(None, 'a'), PartitionSpec('b', 'c'), 3)
        P('b', 'a', None)
    """
    filled = specs.entries(fill(outer, spec, rank))
    beyond = dict.fromkeys(axis for entry in filled[rank:] for axis in specs.entry_axes(entry))
    beyond.update(dict.fromkeys(sorted(spec.unreduced | spec.reduced)))
    seen = [*filled, *[None] * rank][:rank]
    return PartitionSpec(*seen, tuple(beyond)) if beyond else PartitionSpec(*seen)
