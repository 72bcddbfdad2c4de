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
from tests.support.rule_examples import attempt, outcome_text, outcome_texts_of_another_process
from tests.support.rule_language import (
    And,
    ByRank,
    CustomRule,
    Fsdp,
    Logical,
    MeshSpec,
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
from tests.support.rule_oracle import expected_outcomes
from tests.support.rule_strategies import situations

Row = tuple[P | None, str | None]
# No drawn rule requests this memory, so it marks leaves that only the last rule answers.
OTHER_MEMORY = 'unpinned_host'
EVERYWHERE = TreePathShardingRule(('', P())).with_memory_kind(OTHER_MEMORY)


@dataclasses.dataclass(frozen=True)
class Resolver:
    """Resolves rules on one mesh and tree: to a row for each leaf, or to the leaves that the error names."""

    mesh: MeshSpec
    tree: Any

    def __call__(self, rule: Any) -> list[Row] | tuple[str, ...]:
        report, error, _ = attempt(self.mesh.helper().explain, self.tree, rule)
        if isinstance(error, ShardingError):
            return tuple(dict.fromkeys(problem.leaf for problem in error.problems))
        return [(row.spec, row.memory_kind) for row in report.rows] if error is None else (str(error),)

    def own_rows(self, rule: Any) -> list[Row | None] | None:
        """Returns the rows of a rule on its own: None for leaves without an answer, or if it raises."""
        rows = self(rule | EVERYWHERE)
        if isinstance(rows, tuple):
            return None
        return [None if memory == OTHER_MEMORY else (spec, memory) for spec, memory in rows]


def dims(spec: P | None, rank: int) -> list[tuple[str, ...]]:
    return [axes_of(entry) for entry in [*(spec or ()), *[None] * rank][:rank]]


def rules_of(situation: Situation) -> list[Any]:
    """Returns the rules of a situation. Skips situations with a rule that raises for every tree."""
    hypothesis.assume(not any(is_impossible(term, situation.mesh) for term in situation.terms))
    return [make(term, situation.mesh) for term in situation.terms]


@pytest.mark.medium
@examples(300)
@hypothesis.given(situations(count=3))
def test_or_takes_the_first_answer(situation: Situation) -> None:
    a, b, c = rules_of(situation)
    resolve = Resolver(situation.mesh, situation.tree)
    assert (a | b) | c == a | (b | c)
    assert hash((a | b) | c) == hash(a | (b | c))
    # A nested rule that `|` does not flatten.
    grouped = TreePathShardingRule(('', b | c)) if one_element_free(situation.tree) else b | c
    assert resolve((a | b) | c) == resolve(a | grouped)

    never = FSDPShardingRule(a_mesh_axis(situation), min_fsdp_size=10**12)
    assert resolve(never | a) == resolve(a)
    assert resolve(never | a | never | b) == resolve(a | b)
    own_rows = resolve.own_rows(a)
    if own_rows is None:
        return
    assert resolve(a | P()) == resolve(a | never) == [row or (P(), None) for row in own_rows]
    assert set(resolve(P() | a)) <= {(P(), None)}
    assert set(resolve(None | a)) <= {(None, None)}
    either, second = resolve(a | b), resolve(b)
    if isinstance(either, list) and isinstance(second, list):
        assert either == [row or second_row for row, second_row in zip(own_rows, second, strict=True)]


@pytest.mark.medium
@examples(400)
@hypothesis.given(situations(count=2))
def test_and_fills_free_dimensions(situation: Situation) -> None:
    a, b = rules_of(situation)
    resolve = Resolver(situation.mesh, situation.tree)
    never = FSDPShardingRule(a_mesh_axis(situation), min_fsdp_size=10**12)
    alone, own_rows, second = resolve(a), resolve.own_rows(a), resolve(b)
    if isinstance(alone, list):
        assert own_rows is not None
        assert resolve(a & never) == resolve(a & P()) == [row or (P(), None) for row in own_rows]
    elif own_rows is None:  # a raises, and so does `a & b`
        assert isinstance(resolve(a & never), tuple)
        assert isinstance(resolve(a & P()), tuple)
    assert resolve(P() & never) == [(P(), None)] * len(jax.tree.leaves(situation.tree))
    if own_rows is not None:
        # P() leaves everything free, and None fills nothing.
        assert resolve(P() & a) == [(row[0] or P(), row[1]) if row else (P(), None) for row in own_rows]
        if isinstance(alone, list):
            assert resolve(a & None) == [row or (None, None) for row in own_rows]
    both = resolve(a & b)
    if not isinstance(both, list) or own_rows is None:
        return
    hypothesis.event('both answer')
    for leaf, own_row, row, second_row in zip(
        jax.tree.leaves(situation.tree),
        own_rows,
        both,
        second if isinstance(second, list) else [None] * len(own_rows),
        strict=True,
    ):
        shape = shape_of(leaf)
        if own_row is None:
            assert second_row in (None, row)
            continue
        if own_row[0] is None:
            assert row[0] is None
            continue
        placed = dims(row[0], len(shape))
        used = [axis for dim in placed for axis in dim]
        assert len(used) == len(set(used))
        assert all(
            first in ((), dim) for first, dim in zip(dims(own_row[0], len(shape)), placed, strict=True)
        )
        sizes = [math.prod(situation.mesh.shape[axis] for axis in dim) for dim in placed]
        assert all(n % size == 0 for n, size in zip(shape, sizes, strict=True))
        assert row[1] == own_row[1] or own_row[1] is None


def a_mesh_axis(situation: Situation) -> str:
    return next(iter(situation.mesh.shape))


def one_element_free(tree: Any) -> bool:
    """Whether no leaf has only one element: regexes do not decide about such arrays."""
    return all(math.prod(shape_of(leaf)) != 1 for leaf in jax.tree.leaves(tree))


FIRST_ON_A = Paths((('', P('a')),), policy='replicate')
SECOND_ON_C = Paths((('', P(None, 'c')),), policy='replicate')


@pytest.mark.parametrize(
    ('term', 'shape', 'expected'),
    [
        # A mesh axis of the stack dimension is in use for the rule of one layer too.
        (And(P('a'), Stack(Fsdp(('a', 'b'), 0), 1)), (8, 8, 8), P('a')),
        (And(P('a'), Stack(Logical((('e', 'a'), ('e', 'b')), (('', 'e ...'),)), 1)), (8, 8, 8), P('a', 'b')),
        (And(P(None, 'a'), Stack(Stack(Fsdp(('a', 'b'), 0), 1), 1)), (8, 8, 8), P(None, 'a')),
        # Axes that an outer rule prevents from being used are not in use,
        (And(P('b'), And(P('d', 'a', 'b'), Fsdp(('c', 'd'), 0))), (8, 8, 8), P('b', 'a', ('c', 'd'))),
        # and need not be divisible.
        (
            And(FIRST_ON_A, And(Paths((('', P('b')),)), SECOND_ON_C)),
            (7, 7),
            P(),
        ),
        (And(FIRST_ON_A, And(SECOND_ON_C, Paths((('', P('b')),)))), (7, 7), P()),
        (And(FIRST_ON_A, And(SECOND_ON_C, Paths((('', P('b')),)))), (7, 8), P(None, 'c')),
    ],
)
def test_free_dimensions_in_nested_compositions(term: Any, shape: tuple[int, ...], expected: P) -> None:
    mesh = MeshSpec((2, 2, 2, 2), 'AAAA', None)
    tree = {'w': jax.ShapeDtypeStruct(shape, 'float32')}
    assert Resolver(mesh, tree)(make(term, mesh)) == [(expected, None)]
    assert [result.spec for result in expected_outcomes(term, tree, mesh)] == [expected]


def test_an_unreduced_axis_is_in_use() -> None:
    mesh, below = MeshSpec((2, 2, 2, 2), 'EEEE', None), P('a', unreduced={'b'})
    resolve = Resolver(mesh, {'w': jax.ShapeDtypeStruct((8, 8), 'float32')})
    assert resolve(make(And(below, Fsdp(('b', 'c'), 0)), mesh)) == [(below, None)]


@pytest.mark.medium
@examples(200)
@hypothesis.given(situations(count=3))
def test_and_is_associative(situation: Situation) -> None:
    a, b, c = rules_of(situation)
    resolve = Resolver(situation.mesh, situation.tree)
    # As a first operand None ends `&`, so that the brackets matter.
    hypothesis.assume(not mentions(situation.terms[1], lambda term: term is None))
    left, right = resolve((a & b) & c), resolve(a & (b & c))
    if isinstance(left, list) and isinstance(right, list):
        hypothesis.event('both answer')
        assert left == right


@pytest.mark.medium
@examples(300)
@hypothesis.given(situations(count=1))
def test_nested_rules(situation: Situation) -> None:
    mesh, (term,) = situation.mesh, situation.terms
    (rule,) = rules_of(situation)
    tree = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(shape_of(leaf), 'float32'), situation.tree)
    resolve = Resolver(mesh, tree)
    rows = resolve(rule)

    def same(other: Any, expected: Any) -> None:
        if isinstance(rows, list):
            assert other == expected
        else:
            assert isinstance(other, tuple)

    same(resolve(make(ByRank((term,) * 5), mesh)), rows)
    is_scalar = [math.prod(leaf.shape) == 1 for leaf in jax.tree.leaves(tree)]
    if isinstance(rows, list):
        nested = [(P(), None) if scalar else row for scalar, row in zip(is_scalar, rows, strict=True)]
        assert resolve(TreePathShardingRule(('', rule))) == nested
        in_other_memory = [(spec, None if spec is None else OTHER_MEMORY) for spec, _ in rows]
        assert resolve(rule.with_memory_kind(OTHER_MEMORY)) == in_other_memory
    same(Resolver(mesh, {'x': tree})({'x': rule}), rows)
    if not mentions(term, lambda part: isinstance(part, State)):
        stack = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((5, *leaf.shape), 'float32'), tree)
        if isinstance(rows, list):
            expected = [(P(None, *spec) if spec else spec, memory) for spec, memory in rows]
            assert Resolver(mesh, stack)(rule.stacked(1)) == expected
        else:
            assert isinstance(Resolver(mesh, stack)(rule.stacked(1)), tuple)


@pytest.mark.medium
@examples(300)
@hypothesis.given(situations(count=1, values=True))
def test_rules_are_values(situation: Situation) -> None:
    rule = make(situation.terms[0], situation.mesh)
    names = {**vars(scalax.sharding), **{cls.__name__: cls for cls in (Policy, CustomRule)}}
    names |= {'re': re, 'P': P, 'UNCONSTRAINED': P.UNCONSTRAINED}
    resolve = Resolver(situation.mesh, situation.tree)
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
        assert resolve(again) == resolve(rule)


@pytest.mark.medium
def test_every_process_decides_the_same(tmp_path: Path) -> None:
    examples_drawn: list[Situation] = []

    @examples(200)
    @hypothesis.given(situations())
    def collect(situation: Situation) -> None:
        examples_drawn.append(situation)

    collect()
    results = list(map(outcome_text, examples_drawn))
    for seed in ('1', '2'):
        other_results = outcome_texts_of_another_process(examples_drawn, tmp_path, seed)
        for situation, result, other_result in zip(examples_drawn, results, other_results, strict=True):
            assert other_result == result, situation
