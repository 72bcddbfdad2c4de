"""Composition of two rules: the answers of ``a | b`` and ``a & b``, given the answers of *a* and of *b*.

For each leaf:

==============================  ===========================  =======================================
answer of *a*                   ``a | b`` gives              ``a & b`` gives
==============================  ===========================  =======================================
a spec                          that spec                    that spec; *b* fills its free dimensions
``PartitionSpec()``             ``PartitionSpec()``          the answer of *b*
a spec, ``.stacked(n)``         that spec                    that spec; *b* fills its free dimensions,
                                                             but never the first *n*
None (leave to the compiler)    None                         None
no answer (FSDP: too small)     the answer of *b*            the answer of *b*
strict, and no regex matches    the answer of *b*            an error
==============================  ===========================  =======================================

If *b* has no answer, or answers None, ``a & b`` gives the spec of *a* unchanged. A rule with a choice, such
as FSDP, chooses among the dimensions and the mesh axes that earlier rules left free: `NamedTree.occupied`
lists the occupied ones. If a rule shards occupied dimensions or uses occupied axes anyway, they are removed
from its answers.
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

AnswersFn = Callable[[NamedTree], list[Answer]]
"""A function that returns the answers of a rule."""


def first_answers(tree: NamedTree, answers_fns: Iterable[AnswersFn]) -> list[Answer]:
    """Returns the answers of ``a | b | ...``: for each leaf the first one, or the last rule's NoAnswer."""
    answers: list[Any] = [None] * len(tree)
    unanswered = list(range(len(tree)))
    for answers_fn in answers_fns:
        for i, answer in zip(unanswered, answers_fn(tree.select(unanswered)), strict=True):
            answers[i] = answer
        unanswered = [i for i in unanswered if isinstance(answers[i], NoAnswer)]
    return answers


def overlay(
    tree: NamedTree, first: AnswersFn, second: AnswersFn, axis_sizes: AxisSizes | None
) -> list[Answer]:
    """Returns the answers of ``a & b``: *b* fills the dimensions that *a* left free, with other mesh axes.

    Args:
        tree: the leaves.
        first: returns the answers of *a*.
        second: returns the answers of *b*; called for the leaves that *a* leaves open.
        axis_sizes: mesh axis name -> size; None without a mesh.
    """
    answers = list(map(_or_strict_problem, _drop_occupied(tree, first(tree))))
    open_leaves = [i for i, answer in enumerate(answers) if _is_open(answer)]
    open_tree = tree.select(open_leaves)
    firsts = [answers[i] for i in open_leaves]
    first_specs, ranks = map(_occupied_spec, firsts), map(len, open_tree.shapes)
    occupied = map(functools.cache(combined_occupancy), open_tree.occupied, first_specs, ranks)
    open_tree = open_tree.with_occupied(list(occupied))
    seconds = _drop_occupied(open_tree, second(open_tree))
    merge = functools.partial(_merge_answers, axis_sizes=axis_sizes or {})
    merged = map(functools.cache(merge), firsts, seconds, open_tree.shapes)
    for i, answer in zip(open_leaves, merged, strict=True):
        answers[i] = answer
    return answers


def _or_strict_problem(answer: Answer) -> Answer:
    """Returns the answer, or the problem if a strict first rule of ``a & b`` has no answer."""
    default = answer.apply_default() if isinstance(answer, NoAnswer) else answer
    return default if isinstance(default, Problem) else answer


def _is_open(answer: Answer) -> bool:
    """Whether another rule may add to an answer. None, which leaves the leaf to the compiler, is final."""
    return isinstance(answer, NoAnswer) or (isinstance(answer, Decision) and answer.spec is not None)


def _occupied_spec(answer: Answer) -> PartitionSpec:
    """Returns the spec that a decision occupies. The dimensions that stack layers count, though unsharded."""
    if not isinstance(answer, Decision) or answer.spec is None:
        return FREE
    return block_dims(answer.spec, answer.stack_dims) if answer.stack_dims else answer.spec


def _drop_occupied(tree: NamedTree, answers: list[Answer]) -> list[Answer]:
    """Drops the dimensions and mesh axes that earlier rules have occupied from each answer."""
    if tree.occupied.count(FREE) == len(answers):
        return answers
    return list(map(functools.cache(_drop_occupied_dims), answers, tree.occupied, map(len, tree.shapes)))


def _drop_occupied_dims(answer: Answer, occupied: PartitionSpec, rank: int) -> Answer:
    if not isinstance(answer, Decision) or answer.spec is None or not occupied:
        return answer
    spec = without_occupied(occupied, answer.spec, rank)
    if spec == partition_specs.canonical(answer.spec):
        return answer
    notes = (*answer.notes, *_notes_on_dropped(answer.origin, answer.spec, spec, occupied))
    # If nothing of a rule's answer is used, the rule did not decide.
    clauses = answer.clauses if _is_sharded(spec) or answer.memory_kind else ()
    return dataclasses.replace(answer, spec=spec, notes=notes, clauses=clauses)


def _merge_answers(first: Answer, second: Answer, shape: tuple[int, ...], axis_sizes: AxisSizes) -> Answer:
    """Merges two answers, which do not overlap, about a leaf of this shape that the first leaves open."""
    if not isinstance(first, Decision) or isinstance(second, Problem):
        return second
    if isinstance(second, NoAnswer):
        # The default's reason is kept for reports. A strict second rule need not have an answer.
        default = second.default
        if not isinstance(default, Decision) or not default.reason:
            return first
        return dataclasses.replace(
            first, notes=(*first.notes, default.reason), clauses=first.clauses + default.clauses
        )
    if second.spec is None:
        return first
    return _merge_decisions(first, second, shape, axis_sizes)


def _merge_decisions(
    first: Decision, second: Decision, shape: tuple[int, ...], axis_sizes: AxisSizes
) -> Decision:
    """Merges two decisions that have specs."""
    assert first.spec is not None and second.spec is not None
    filled_spec = fill_free_dims(first.spec, second.spec)
    merged = dataclasses.replace(
        first,
        memory_kind=first.memory_kind or second.memory_kind,
        clauses=first.clauses + second.clauses,
        named_shardings=first.named_shardings + second.named_shardings,
        stack_dims=first.stack_dims + tuple(dim for dim in second.stack_dims if dim not in first.stack_dims),
        notes=first.notes + second.notes,
        warnings=first.warnings + second.warnings,
    )
    if filled_spec == partition_specs.canonical(first.spec):
        return merged
    # A policy concerns the dimensions that its rule sharded, so it applies if one of those is not divisible.
    policies = [
        policy
        for decision in (first, second)
        if not _divides(shape, decision.spec, axis_sizes)
        for policy in decision.policies
    ]
    return dataclasses.replace(
        merged,
        spec=filled_spec,
        origin=f'{first.origin} & {second.origin}',
        reason='; '.join(part for part in (first.reason, second.reason) if part),
        policies=tuple(policies) or first.policies,
    )


def _notes_on_dropped(
    origin: str, requested: PartitionSpec, granted: PartitionSpec, occupied: PartitionSpec
) -> tuple[str, ...]:
    """Returns notes about the mesh axes that a rule requested for a dimension that did not get them."""
    used, notes = _used(occupied), []
    entries = itertools.zip_longest(*map(partition_specs.entries, (requested, granted, occupied)))
    for dim, (requested_entry, *actual_entries) in enumerate(entries):
        actual = [axis for entry in actual_entries for axis in partition_specs.entry_axes(entry)]
        dropped = [axis for axis in partition_specs.entry_axes(requested_entry) if axis not in actual]
        if dropped:
            reason = 'in use' if used.issuperset(dropped) else 'not free'
            notes.append(f'{origin} asked for {", ".join(dropped)} on dimension {dim}: {reason}')
    return tuple(notes)


def _is_sharded(spec: PartitionSpec) -> bool:
    """Whether a spec shards anything."""
    return any(partition_specs.entries(spec)) or bool(spec.unreduced or spec.reduced)


def _divides(shape: tuple[int, ...], spec: PartitionSpec | None, axis_sizes: AxisSizes) -> bool:
    """Whether every dimension is divisible by its mesh axes; axes of unknown size count as 1."""
    return not any(
        n % math.prod(axis_sizes.get(axis, 1) for axis in partition_specs.entry_axes(entry))
        for n, entry in zip(shape, partition_specs.entries(spec or FREE), strict=False)
    )


# --- Specs ------------------------------------------------------------------------------------------


def _used(spec: PartitionSpec) -> set[str]:
    """Returns every mesh axis of a spec, including the unreduced and reduced ones."""
    return {*partition_specs.spec_axes(spec), *spec.unreduced, *spec.reduced}


def without_occupied(occupied: PartitionSpec, spec: PartitionSpec, rank: int) -> PartitionSpec:
    """Returns a spec without the dimensions and mesh axes that *occupied* has.

    Example:
        >>> without_occupied(PartitionSpec('a', None), PartitionSpec('b', ('a', 'c')), 2)
        P(None, 'c')
    """
    unused = partition_specs.only_axes(spec, set(partition_specs.spec_axes(spec)) - _used(occupied))
    pairs = itertools.zip_longest(partition_specs.entries(unused), partition_specs.entries(occupied)[:rank])
    return partition_specs.with_entries(spec, [entry if outer is None else None for entry, outer in pairs])


def fill_free_dims(first: PartitionSpec, free: PartitionSpec) -> PartitionSpec:
    """Fills the empty dimensions of a spec from *free*, a result of `without_occupied`.

    Example:
        >>> fill_free_dims(PartitionSpec(None, 'tp'), PartitionSpec('fsdp', None))
        P('fsdp', 'tp')
    """
    pairs = itertools.zip_longest(partition_specs.entries(first), partition_specs.entries(free))
    filled = partition_specs.with_entries(
        first, [filler if entry is None else entry for entry, filler in pairs]
    )
    unreduced, reduced = free.unreduced - _used(first), free.reduced - _used(first)
    if unreduced or reduced:
        filled = filled.update(unreduced=first.unreduced | unreduced, reduced=first.reduced | reduced)
    return filled


def block_dims(spec: PartitionSpec, dims: Collection[int]) -> PartitionSpec:
    """Puts UNCONSTRAINED into the empty entries among *dims*, so that no rule fills them.

    Example:
        >>> block_dims(PartitionSpec('a'), (0, 1))
        P('a', UNCONSTRAINED)
    """
    entries = [*partition_specs.entries(spec), *[None] * (max(dims, default=-1) + 1)]
    for dim in dims:
        entries[dim] = partition_specs.UNCONSTRAINED if entries[dim] is None else entries[dim]
    return partition_specs.with_entries(spec, entries)


def combined_occupancy(outer: PartitionSpec, spec: PartitionSpec, rank: int) -> PartitionSpec:
    """Returns what a rule and its outer rules occupy of a leaf of *rank* dimensions, for the next rule.

    One more entry at the end has the mesh axes that they use elsewhere, such as for the stack of layers.

    Example:
        >>> combined_occupancy(PartitionSpec(None, 'a'), PartitionSpec('b', 'c'), 3)
        P('b', 'a', None)
    """
    filled = partition_specs.entries(fill_free_dims(outer, without_occupied(outer, spec, rank)))
    elsewhere = dict.fromkeys(axis for entry in filled[rank:] for axis in partition_specs.entry_axes(entry))
    elsewhere.update(dict.fromkeys(sorted(spec.unreduced | spec.reduced)))
    entries = [*filled, *[None] * rank][:rank]
    return PartitionSpec(*entries, tuple(elsewhere)) if elsewhere else PartitionSpec(*entries)
