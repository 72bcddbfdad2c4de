"""Random compositions of rules on random trees and meshes follow the table of docs/rules.md.

`rule_strategies` draws them, and `rule_oracle` computes the expected results. The suite draws the same
examples every time; `make fuzz` draws more, and different ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest

from scalax.errors import RuleError, ScalaxError, ShardingError
from scalax.sharding import MeshShardingHelper, ShardingReport
from tests.support.random_examples import examples
from tests.support.rule_examples import attempt
from tests.support.rule_language import (
    Situation,
    State,
    is_impossible,
    is_term,
    make,
    mentions,
    named_leaves,
    shown,
)
from tests.support.rule_oracle import COMPILER, WRONG, Outcome, expected_outcomes
from tests.support.rule_strategies import situations

LARGEST = 40_000  # elements of a tree that is placed


def assert_names(error: ScalaxError | None, tree: Any, expected: list[Outcome], bad: Sequence[Any]) -> bool:
    """Asserts that an error names exactly the wrong leaves, and returns whether there was an error."""
    names = [shown(path, leaf) for path, leaf in named_leaves(tree)]
    wrong = [name for name, result in zip(names, expected, strict=True) if result.spec in bad]
    if not wrong:
        assert error is None, error
        return False
    assert isinstance(error, ShardingError)
    named = list(dict.fromkeys(problem.leaf for problem in error.problems))
    assert named == list(dict.fromkeys(wrong))
    lines = [name for line in str(error).splitlines() for name in unfolded(line)]
    assert all(f'  {name}' in lines for name in named[:10])
    return True


def unfolded(line: str) -> list[str]:
    """Returns the leaves that one line of an error stands for: ``rest/{0,2..4}: 4 x int32[8]``."""
    folded = re.fullmatch(r'(.*)\{([\d,.]+)\}(.*: )\d+ x (.*)', line)
    if folded is None:
        return [line]
    runs = [run.partition('..') for run in folded[2].split(',')]
    numbers = [number for first, _, last in runs for number in range(int(first), int(last or first) + 1)]
    return [f'{folded[1]}{number}{folded[3]}{folded[4]}' for number in numbers]


def assert_placed(helper: MeshShardingHelper, tree: Any, shardings: Any, report: ShardingReport) -> None:
    """Asserts that arrays take the shardings, use the bytes of the report, and keep their values."""
    placed = jax.device_put(tree, shardings)
    for leaf, sharding, row in zip(*map(jax.tree.leaves, (placed, shardings)), report.rows, strict=True):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        # JAX reports the specs of PRNG keys in another form.
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim) if is_key else leaf.sharding == sharding
        shards = [shard.data for shard in leaf.addressable_shards]
        assert len(shards) == helper.mesh.size
        assert {shard.shape for shard in shards} == {sharding.shard_shape(leaf.shape)}
        data = map(jax.random.key_data, shards) if is_key else shards
        assert {shard.nbytes for shard in data} == {row.bytes_per_device}
    for leaf, back in zip(*map(jax.tree.leaves, (tree, helper.gather(placed))), strict=True):
        if isinstance(back, jax.Array):  # keys
            leaf, back = jax.random.key_data(leaf), jax.random.key_data(back)
        np.testing.assert_array_equal(np.asarray(back), np.asarray(leaf).astype(back.dtype))


@pytest.mark.slow
@examples(1300)
@hypothesis.given(situations())
def test_shardings_follow_the_table(situation: Situation) -> None:
    mesh, tree = situation.mesh, situation.tree
    helper, rules = mesh.helper(), make(situation.terms, mesh)
    report, error, warned = attempt(helper.explain, tree, rules)
    shardings, refused, _ = attempt(helper.match_sharding_rule, rules, tree)
    terms = jax.tree.leaves(situation.terms, is_leaf=is_term)
    if isinstance(error, RuleError):
        assert str(refused) == str(error)
        assert any(is_impossible(term, mesh) for term in terms)
        return
    expected = expected_outcomes(situation.terms, tree, mesh)
    if assert_names(error, tree, expected, [WRONG]):
        hypothesis.event('an error')
        assert isinstance(refused, ShardingError)
        return
    # An optimizer state rule also resolves parameters without occupied axes, which may warn more.
    more = any(mentions(term, lambda result: isinstance(result, State)) for term in terms)
    assert any(result.warns for result in expected) == warned or (warned and more)

    assert [row.spec if row.spec is not None else COMPILER for row in report.rows] == [
        result.spec for result in expected
    ]
    assert [row.memory_kind for row in report.rows] == [result.memory for result in expected]
    assert [row.path for row in report.rows] == [path for path, _ in named_leaves(tree)]
    assert ShardingReport.load(report.to_json()) == report

    if assert_names(refused, tree, expected, [WRONG, COMPILER]):
        return
    assert jax.tree.structure(shardings) == jax.tree.structure(tree)
    assert all(s.mesh == helper.mesh for s in jax.tree.leaves(shardings))
    assert [s.spec for s in jax.tree.leaves(shardings)] == [result.spec for result in expected]
    again, _, _ = attempt(helper.match_sharding_rule, rules, tree)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (shardings, again)), strict=True))
    if mesh.order is not None and sum(map(np.size, jax.tree.leaves(tree))) <= LARGEST:
        hypothesis.event(f'{min(len(report.rows), 3)} leaves or more placed')
        assert_placed(helper, tree, shardings, report)
