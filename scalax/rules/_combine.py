"""How two rules make one: what ``a | b`` and ``a & b`` answer, given the answers of *a* and of *b*.

Leaf by leaf:

==============================  ===========================  =======================================
answer of *a*                   ``a | b`` gives              ``a & b`` gives
==============================  ===========================  =======================================
a spec                          that spec                    that spec; *b* fills what it left free
``PartitionSpec()``             ``PartitionSpec()``          the answer of *b*
a spec, ``.stacked(n)``         that spec                    that spec; *b* fills what it left free,
                                                             but never the first *n* dimensions
None (leave to the compiler)    None                         None
no answer (FSDP: too small)     the answer of *b*            the answer of *b*
strict, and no regex matches    the answer of *b*            an error
==============================  ===========================  =======================================

Where *b* has no answer, or answers None, ``a & b`` gives the spec of *a* unchanged. A rule that has a choice,
like FSDP, chooses among the dimensions and the mesh axes that rules before it left free: it finds what they
occupy in `NamedTree.occupied`, and what a rule says about that is taken out of its answers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

from jax.sharding import PartitionSpec

from scalax._core.pytree import partition_specs
from scalax._core.pytree.paths import FREE, NamedTree
from scalax.errors import Problem
from scalax.rules._answer import Answer, AxisSizes, Decision, NoAnswer

Ask = Callable[[NamedTree], list[Answer]]
"""Gives the answers of a rule."""


def first_answers(tree: NamedTree, asks: Iterable[Ask]) -> list[Answer]:
    """``a | b | ...``: for each leaf the first answer, or the last rule's NoAnswer."""
    answers: list[Any] = [None] * len(tree)
    left = list(range(len(tree)))
    for ask in asks:
        for i, answer in zip(left, ask(tree.select(left)), strict=True):
            answers[i] = answer
        left = [i for i in left if isinstance(answers[i], NoAnswer)]
    return answers


def overlaid(tree: NamedTree, ask_first: Ask, ask_second: Ask, axis_sizes: AxisSizes | None) -> list[Answer]:
    """``a & b``: the second rule fills the dimensions that the first left free, with axes it did not use.

    Args:
        tree: the leaves.
        ask_first: gives the answers of *a*.
        ask_second: gives those of *b*; asked about the leaves that *a* leaves open.
        axis_sizes: mesh axis name -> size; None when no mesh is known.
    """
    answers = list(map(_without_strict, _unoccupied(tree, ask_first(tree))))
    open_leaves = [i for i, answer in enumerate(answers) if _is_open(answer)]
    part = tree.select(open_leaves)
    firsts = [answers[i] for i in open_leaves]
    ranks = map(len, part.shapes)
    occupied = map(functools.cache(occupied_by), part.occupied, map(_occupied_spec, firsts), ranks)
    part = part.with_occupied(list(occupied))
    seconds = _unoccupied(part, ask_second(part))
    merge = functools.partial(_merged, axis_sizes=axis_sizes or {})
    merged = map(functools.cache(merge), firsts, seconds, part.shapes)
    for i, answer in zip(open_leaves, merged, strict=True):
        answers[i] = answer
    return answers


def _without_strict(answer: Answer) -> Answer:
    """The answer of the first rule of ``a & b``: where a strict rule has none, that is an error."""
    settled = answer.settled() if isinstance(answer, NoAnswer) else answer
    return settled if isinstance(settled, Problem) else answer


def _is_open(answer: Answer) -> bool:
    """Whether another rule may add to an answer: not where the leaf is left to the compiler."""
    return isinstance(answer, NoAnswer) or (isinstance(answer, Decision) and answer.spec is not None)


def _occupied_spec(answer: Answer) -> PartitionSpec:
    """The spec that a decision occupies. A stack of layers is not free, though nothing shards it."""
    if not isinstance(answer, Decision) or answer.spec is None:
        return FREE
    return block_dims(answer.spec, answer.stack) if answer.stack else answer.spec


def _unoccupied(tree: NamedTree, answers: list[Answer]) -> list[Answer]:
    """The answers without the dimensions and mesh axes that rules before have occupied."""
    if tree.occupied.count(FREE) == len(answers):
        return answers
    return list(map(functools.cache(_reduced), answers, tree.occupied, map(len, tree.shapes)))


def _reduced(answer: Answer, occupied: PartitionSpec, rank: int) -> Answer:
    if not isinstance(answer, Decision) or answer.spec is None or not occupied:
        return answer
    spec = unused_part(occupied, answer.spec, rank)
    if spec == partition_specs.canonical(answer.spec):
        return answer
    notes = (*answer.notes, *_lost(answer.origin, answer.spec, spec, occupied))
    # A rule of which nothing was used did not decide.
    clauses = answer.clauses if _is_sharded(spec) or answer.memory_kind else ()
    return dataclasses.replace(answer, spec=spec, notes=notes, clauses=clauses)


def _merged(first: Answer, second: Answer, shape: tuple[int, ...], axis_sizes: AxisSizes) -> Answer:
    """One answer made of two about a leaf of this shape, which the first leaves open; they do not overlap."""
    if not isinstance(first, Decision) or isinstance(second, Problem):
        return second
    if isinstance(second, NoAnswer):
        # Reports show the reason. A strict rule without an answer is no error here.
        found = second.default
        if not isinstance(found, Decision) or not found.reason:
            return first
        return dataclasses.replace(
            first, notes=(*first.notes, found.reason), clauses=first.clauses + found.clauses
        )
    if second.spec is None:
        return first
    return _filled(first, second, shape, axis_sizes)


def _filled(first: Decision, second: Decision, shape: tuple[int, ...], axis_sizes: AxisSizes) -> Decision:
    """One decision made of two that have specs."""
    assert first.spec is not None and second.spec is not None
    filled = fill_free(first.spec, second.spec)
    both = dataclasses.replace(
        first,
        memory_kind=first.memory_kind or second.memory_kind,
        clauses=first.clauses + second.clauses,
        given=first.given + second.given,
        stack=first.stack + tuple(dim for dim in second.stack if dim not in first.stack),
        notes=first.notes + second.notes,
        passed=first.passed + second.passed,
    )
    if filled == partition_specs.canonical(first.spec):
        return both
    # A policy is about the dimensions that its rule placed: it counts if one of those does not divide.
    policies = [
        policy
        for one in (first, second)
        if not _divides(shape, one.spec, axis_sizes)
        for policy in one.policies
    ]
    return dataclasses.replace(
        both,
        spec=filled,
        origin=f'{first.origin} & {second.origin}',
        reason='; '.join(part for part in (first.reason, second.reason) if part),
        policies=tuple(policies) or first.policies,
    )


def _lost(origin: str, asked: PartitionSpec, kept: PartitionSpec, occupied: PartitionSpec) -> tuple[str, ...]:
    """Notes about the mesh axes that a rule asked for in dimensions that do not have them."""
    used, notes = _used(occupied), []
    columns = itertools.zip_longest(*map(partition_specs.entries, (asked, kept, occupied)))
    for dim, (entry, *given) in enumerate(columns):
        has = [axis for each in given for axis in partition_specs.entry_axes(each)]
        gone = [axis for axis in partition_specs.entry_axes(entry) if axis not in has]
        if gone:
            why = 'in use' if used.issuperset(gone) else 'not free'
            notes.append(f'{origin} asked for {", ".join(gone)} on dimension {dim}: {why}')
    return tuple(notes)


def _is_sharded(spec: PartitionSpec) -> bool:
    """Whether a spec shards anything."""
    return any(partition_specs.entries(spec)) or bool(spec.unreduced or spec.reduced)


def _divides(shape: tuple[int, ...], spec: PartitionSpec | None, axis_sizes: AxisSizes) -> bool:
    """Whether every dimension divides by its axes, as far as these are known."""
    return not any(
        n % math.prod(axis_sizes.get(axis, 1) for axis in partition_specs.entry_axes(entry))
        for n, entry in zip(shape, partition_specs.entries(spec or FREE), strict=False)
    )


# --- Specs ------------------------------------------------------------------------------------------


def _used(spec: PartitionSpec) -> set[str]:
    """Every mesh axis of a spec, with the unreduced and reduced ones."""
    return {*partition_specs.spec_axes(spec), *spec.unreduced, *spec.reduced}


def unused_part(outer: PartitionSpec, spec: PartitionSpec, rank: int) -> PartitionSpec:
    """A spec without the dimensions and axes that an outer rule occupies.

    Example:
        >>> unused_part(PartitionSpec('a', None), PartitionSpec('b', ('a', 'c')), 2)
        P(None, 'c')
    """
    unused = partition_specs.only_axes(spec, set(partition_specs.spec_axes(spec)) - _used(outer))
    pairs = itertools.zip_longest(partition_specs.entries(unused), partition_specs.entries(outer)[:rank])
    return partition_specs.with_entries(
        spec, [entry if occupied is None else None for entry, occupied in pairs]
    )


def fill_free(first: PartitionSpec, free: PartitionSpec) -> PartitionSpec:
    """A spec whose empty dimensions are filled from *free*, which `unused_part` gave.

    Example:
        >>> fill_free(PartitionSpec(None, 'tp'), PartitionSpec('fsdp', None))
        P('fsdp', 'tp')
    """
    pairs = itertools.zip_longest(partition_specs.entries(first), partition_specs.entries(free))
    filled = partition_specs.with_entries(first, [other if own is None else own for own, other in pairs])
    unreduced, reduced = free.unreduced - _used(first), free.reduced - _used(first)
    if unreduced or reduced:
        filled = filled.update(unreduced=first.unreduced | unreduced, reduced=first.reduced | reduced)
    return filled


def block_dims(spec: PartitionSpec, dims: Collection[int]) -> PartitionSpec:
    """The spec with UNCONSTRAINED in the empty ones of *dims*, so that they are never filled.

    Example:
        >>> block_dims(PartitionSpec('a'), (0, 1))
        P('a', UNCONSTRAINED)
    """
    entries = [*partition_specs.entries(spec), *[None] * (max(dims, default=-1) + 1)]
    for dim in dims:
        entries[dim] = partition_specs.UNCONSTRAINED if entries[dim] is None else entries[dim]
    return partition_specs.with_entries(spec, entries)


def occupied_by(outer: PartitionSpec, spec: PartitionSpec, rank: int) -> PartitionSpec:
    """What a rule and the rules around it occupy of a leaf of *rank* dimensions, for the next rule.

    Mesh axes that they use elsewhere, such as for a stack of layers, are in one more entry at the end.

    Example:
        >>> occupied_by(PartitionSpec(None, 'a'), PartitionSpec('b', 'c'), 3)
        P('b', 'a', None)
    """
    filled = partition_specs.entries(fill_free(outer, unused_part(outer, spec, rank)))
    beyond = dict.fromkeys(axis for entry in filled[rank:] for axis in partition_specs.entry_axes(entry))
    beyond.update(dict.fromkeys(sorted(spec.unreduced | spec.reduced)))
    seen = [*filled, *[None] * rank][:rank]
    return PartitionSpec(*seen, tuple(beyond)) if beyond else PartitionSpec(*seen)
