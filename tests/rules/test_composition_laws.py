"""Random compositions of rules: the laws of the operators, rules as values, and other processes."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import re
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest
from jax.sharding import PartitionSpec as P

import scalax.sharding
from scalax.errors import ShardingError
from scalax.sharding import FSDPShardingRule, ShardingRule, TreePathShardingRule
from tests.support.random_examples import examples
from tests.support.rule_examples import attempt, told, told_by_another_process
from tests.support.rule_language import (
    Both,
    ByRank,
    Fsdp,
    Logical,
    MeshOf,
    OwnRule,
    Paths,
    Policy,
    Situation,
    Stack,
    State,
    axes_of,
    is_impossible,
    make,
    mentions,
    shape_of,
)
from tests.support.rule_strategies import situations
from tests.support.rules_by_hand import by_hand

Row = tuple[P | None, str | None]
# Nothing that is drawn asks for this memory, and none of these rules has no answer.
OTHER_MEMORY = 'unpinned_host'
EVERYWHERE = TreePathShardingRule(('', P())).with_memory_kind(OTHER_MEMORY)


@dataclasses.dataclass(frozen=True)
class Asked:
    """What rules come to on one mesh and tree: a row for each leaf, or whom the error is about."""

    mesh: MeshOf
    tree: Any

    def __call__(self, rule: Any) -> list[Row] | tuple[str, ...]:
        report, error, _ = attempt(self.mesh.helper().explain, self.tree, rule)
        if isinstance(error, ShardingError):
            return tuple(dict.fromkeys(problem.leaf for problem in error.problems))
        return [(row.spec, row.memory_kind) for row in report.rows] if error is None else (str(error),)

    def own(self, rule: Any) -> list[Row | None] | None:
        """What a rule answers by itself: None for leaves that it has no answer for; None if it is wrong."""
        rows = self(rule | EVERYWHERE)
        if isinstance(rows, tuple):
            return None
        return [None if memory == OTHER_MEMORY else (spec, memory) for spec, memory in rows]


def dims(spec: P | None, rank: int) -> list[tuple[str, ...]]:
    return [axes_of(entry) for entry in [*(spec or ()), *[None] * rank][:rank]]


def rules_of(situation: Situation) -> list[Any]:
    """The rules; none that are an error whatever they are asked, and none where nobody asks them."""
    hypothesis.assume(not any(is_impossible(term, situation.mesh) for term in situation.terms))
    return [make(term, situation.mesh) for term in situation.terms]


@pytest.mark.medium
@examples(300)
@hypothesis.given(situations(count=3))
def test_or_takes_the_first_answer(situation: Situation) -> None:
    a, b, c = rules_of(situation)
    asked = Asked(situation.mesh, situation.tree)
    assert (a | b) | c == a | (b | c)
    assert hash((a | b) | c) == hash(a | (b | c))
    # A term in brackets that `|` cannot look into.
    grouped = TreePathShardingRule(('', b | c)) if one_element_free(situation.tree) else b | c
    assert asked((a | b) | c) == asked(a | grouped)

    never = FSDPShardingRule(a_mesh_axis(situation), min_fsdp_size=10**12)
    assert asked(never | a) == asked(a)
    assert asked(never | a | never | b) == asked(a | b)
    own = asked.own(a)
    if own is None:
        return
    assert asked(a | P()) == asked(a | never) == [row or (P(), None) for row in own]
    assert set(asked(P() | a)) <= {(P(), None)}
    assert set(asked(None | a)) <= {(None, None)}
    either, second = asked(a | b), asked(b)
    if isinstance(either, list) and isinstance(second, list):
        assert either == [mine or theirs for mine, theirs in zip(own, second, strict=True)]


@pytest.mark.medium
@examples(400)
@hypothesis.given(situations(count=2))
def test_and_fills_what_is_free(situation: Situation) -> None:
    a, b = rules_of(situation)
    asked = Asked(situation.mesh, situation.tree)
    never = FSDPShardingRule(a_mesh_axis(situation), min_fsdp_size=10**12)
    alone, own, second = asked(a), asked.own(a), asked(b)
    if isinstance(alone, list):
        assert own is not None
        assert asked(a & never) == asked(a & P()) == [row or (P(), None) for row in own]
    elif own is None:  # what it answers is wrong, and `&` mends nothing
        assert isinstance(asked(a & never), tuple)
        assert isinstance(asked(a & P()), tuple)
    assert asked(P() & never) == [(P(), None)] * len(jax.tree.leaves(situation.tree))
    if own is not None:
        # P() leaves everything free, and None fills nothing.
        assert asked(P() & a) == [(row[0] or P(), row[1]) if row else (P(), None) for row in own]
        if isinstance(alone, list):
            assert asked(a & None) == [row or (None, None) for row in own]
    both = asked(a & b)
    if not isinstance(both, list) or own is None:
        return
    hypothesis.event('both answer')
    for leaf, mine, got, theirs in zip(
        jax.tree.leaves(situation.tree),
        own,
        both,
        second if isinstance(second, list) else [None] * len(own),
        strict=True,
    ):
        shape = shape_of(leaf)
        if mine is None:
            assert theirs in (None, got)
            continue
        if mine[0] is None:
            assert got[0] is None
            continue
        placed = dims(got[0], len(shape))
        used = [axis for dim in placed for axis in dim]
        assert len(used) == len(set(used))
        assert all(first in ((), dim) for first, dim in zip(dims(mine[0], len(shape)), placed, strict=True))
        sizes = [math.prod(situation.mesh.shape[axis] for axis in dim) for dim in placed]
        assert all(n % size == 0 for n, size in zip(shape, sizes, strict=True))
        assert got[1] == mine[1] or mine[1] is None


def a_mesh_axis(situation: Situation) -> str:
    return next(iter(situation.mesh.shape))


def one_element_free(tree: Any) -> bool:
    """Whether a regex decides about every leaf: about arrays of one element it does not."""
    return all(math.prod(shape_of(leaf)) != 1 for leaf in jax.tree.leaves(tree))


FIRST_ON_A = Paths((('', P('a')),), policy='replicate')
SECOND_ON_C = Paths((('', P(None, 'c')),), policy='replicate')


@pytest.mark.parametrize(
    ('term', 'shape', 'expected'),
    [
        # An axis that is taken in the dimension of the stack is in use for the rule of one layer too.
        (Both(P('a'), Stack(Fsdp(('a', 'b'), 0), 1)), (8, 8, 8), P('a')),
        (Both(P('a'), Stack(Logical((('e', 'a'), ('e', 'b')), (('', 'e ...'),)), 1)), (8, 8, 8), P('a', 'b')),
        (Both(P(None, 'a'), Stack(Stack(Fsdp(('a', 'b'), 0), 1), 1)), (8, 8, 8), P(None, 'a')),
        # What a rule further out took is not placed, and so is not in use either,
        (Both(P('b'), Both(P('d', 'a', 'b'), Fsdp(('c', 'd'), 0))), (8, 8, 8), P('b', 'a', ('c', 'd'))),
        # and whether that would have divided is nobody's matter.
        (
            Both(FIRST_ON_A, Both(Paths((('', P('b')),)), SECOND_ON_C)),
            (7, 7),
            P(),
        ),
        (Both(FIRST_ON_A, Both(SECOND_ON_C, Paths((('', P('b')),)))), (7, 7), P()),
        (Both(FIRST_ON_A, Both(SECOND_ON_C, Paths((('', P('b')),)))), (7, 8), P(None, 'c')),
    ],
)
def test_what_is_free_in_brackets(term: Any, shape: tuple[int, ...], expected: P) -> None:
    mesh = MeshOf((2, 2, 2, 2), 'AAAA', None)
    tree = {'w': jax.ShapeDtypeStruct(shape, 'float32')}
    assert Asked(mesh, tree)(make(term, mesh)) == [(expected, None)]
    assert [one.spec for one in by_hand(term, tree, mesh)] == [expected]


def test_an_unreduced_axis_is_in_use() -> None:
    mesh, below = MeshOf((2, 2, 2, 2), 'EEEE', None), P('a', unreduced={'b'})
    asked = Asked(mesh, {'w': jax.ShapeDtypeStruct((8, 8), 'float32')})
    assert asked(make(Both(below, Fsdp(('b', 'c'), 0)), mesh)) == [(below, None)]


@pytest.mark.medium
@examples(200)
@hypothesis.given(situations(count=3))
def test_and_may_be_grouped_either_way(situation: Situation) -> None:
    a, b, c = rules_of(situation)
    asked = Asked(situation.mesh, situation.tree)
    # None ends `&` where it stands first: there the brackets matter.
    hypothesis.assume(not mentions(situation.terms[1], lambda term: term is None))
    left, right = asked((a & b) & c), asked(a & (b & c))
    if isinstance(left, list) and isinstance(right, list):
        hypothesis.event('both answer')
        assert left == right


@pytest.mark.medium
@examples(300)
@hypothesis.given(situations(count=1))
def test_rules_inside_others(situation: Situation) -> None:
    mesh, (term,) = situation.mesh, situation.terms
    (rule,) = rules_of(situation)
    tree = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(shape_of(leaf), 'float32'), situation.tree)
    asked = Asked(mesh, tree)
    rows = asked(rule)

    def same(other: Any, expected: Any) -> None:
        if isinstance(rows, list):
            assert other == expected
        else:
            assert isinstance(other, tuple)

    same(asked(make(ByRank((term,) * 5), mesh)), rows)
    ones = [math.prod(leaf.shape) == 1 for leaf in jax.tree.leaves(tree)]
    if isinstance(rows, list):
        nested = [(P(), None) if one else row for one, row in zip(ones, rows, strict=True)]
        assert asked(TreePathShardingRule(('', rule))) == nested
        moved = [(spec, None if spec is None else OTHER_MEMORY) for spec, _ in rows]
        assert asked(rule.with_memory_kind(OTHER_MEMORY)) == moved
    same(Asked(mesh, {'x': tree})({'x': rule}), rows)
    if not mentions(term, lambda one: isinstance(one, State)):
        stack = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((5, *leaf.shape), 'float32'), tree)
        if isinstance(rows, list):
            expected = [(P(None, *spec) if spec else spec, memory) for spec, memory in rows]
            assert Asked(mesh, stack)(rule.stacked(1)) == expected
        else:
            assert isinstance(Asked(mesh, stack)(rule.stacked(1)), tuple)


@pytest.mark.medium
@examples(300)
@hypothesis.given(situations(count=1, values=True))
def test_rules_are_values(situation: Situation) -> None:
    rule = make(situation.terms[0], situation.mesh)
    names = {**vars(scalax.sharding), **{one.__name__: one for one in (Policy, OwnRule)}}
    names |= {'re': re, 'P': P, 'UNCONSTRAINED': P.UNCONSTRAINED}
    asked = Asked(situation.mesh, situation.tree)
    for again in (
        eval(repr(rule), names),
        pickle.loads(pickle.dumps(rule)),
        copy.deepcopy(rule),
        make(situation.terms[0], situation.mesh),
    ):
        assert isinstance(again, ShardingRule)
        assert again == rule
        assert hash(again) == hash(rule)
        assert repr(again) == repr(rule)
        assert asked(again) == asked(rule)


@pytest.mark.medium
def test_every_process_decides_the_same(tmp_path: Path) -> None:
    drawn: list[Situation] = []

    @examples(200)
    @hypothesis.given(situations())
    def collect(situation: Situation) -> None:
        drawn.append(situation)

    collect()
    here = list(map(told, drawn))
    for seed in ('1', '2'):
        for situation, mine, theirs in zip(
            drawn, here, told_by_another_process(drawn, tmp_path, seed), strict=True
        ):
            assert theirs == mine, situation
