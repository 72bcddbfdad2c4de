"""Composed rules: the table of precedence, case by case, the laws of the operators, and rules as values."""

import functools
import itertools
import math
import os
import subprocess
import sys
import warnings

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalax.errors import IndivisibleWarning, RuleError, ShardingError
from scalax.rules._combine import fill_free_dims, without_occupied
from scalax.rules._rule import ConstantRule, FirstAnswer
from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    PolicyShardingRule,
    ShardingRule,
    TreePathShardingRule,
)
from tests.support import ROOT
from tests.support.random_examples import examples

U = P.UNCONSTRAINED
FSDP = FSDPShardingRule('fsdp', min_fsdp_size=64)


@functools.cache
def helper_of(**axes):
    sizes = tuple(axes.values())
    return MeshShardingHelper(sizes, tuple(axes), devices=jax.devices()[: math.prod(sizes)])


def mesh_4x2():
    return helper_of(fsdp=4, tp=2)


def leaf_w(*shape):
    return {'w': jax.ShapeDtypeStruct(shape, 'float32')}


def spec_of(rule, shape=(16, 8), path='w', helper=None):
    """Returns the spec of one leaf: None if the compiler decides, 'error' if the rule raises."""
    tree = {path: jax.ShapeDtypeStruct(shape, 'float32')}
    try:
        spec = (helper or mesh_4x2()).explain(tree, rule).rows[0].spec
    except ShardingError as error:
        assert {problem.kind for problem in error.problems} == {'unmatched'}
        return 'error'
    return spec


def by_path(value, **options):
    return TreePathShardingRule(('w', value), **options)


def last_on_tp(path, leaf):
    return P(*[None] * (len(leaf.shape) - 1), 'tp')


class FirstOnTp(ShardingRule):
    """A user's rule that has an answer for every leaf."""

    def __eq__(self, other):
        return type(other) is FirstOnTp

    def __hash__(self):
        return 7

    def __repr__(self):
        return 'FirstOnTp()'

    def apply(self, pytree):
        return jax.tree.map(lambda leaf: P('tp'), pytree)


class Inherited(TreePathShardingRule):
    """A subclass of a built-in rule that overrides `apply`, as in programs for 0.2.5."""

    def apply(self, pytree):
        return jax.tree.map(lambda leaf: P('tp'), pytree)


STRICT_MISS = TreePathShardingRule(('elsewhere', P('tp')))
NO_ANSWER = FSDPShardingRule('fsdp', min_fsdp_size=10**9)


# --- The table ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('first', 'either', 'both'),
    [
        # b = FSDP alone gives P('fsdp').
        pytest.param(by_path(P('tp')), P('tp'), P('tp', 'fsdp'), id='a spec'),
        pytest.param(by_path(P(None, 'tp')), P(None, 'tp'), P('fsdp', 'tp'), id='another dimension'),
        pytest.param(by_path(P('tp', 'fsdp')), P('tp', 'fsdp'), P('tp', 'fsdp'), id='full'),
        pytest.param(by_path(P('fsdp')), P('fsdp'), P('fsdp'), id='the same axis'),
        pytest.param(by_path(P(None, ('tp', 'fsdp'))), P(None, ('tp', 'fsdp')), P(None, ('tp', 'fsdp'))),
        pytest.param(by_path(P()), P(), P('fsdp'), id='P()'),
        pytest.param(by_path(P(None, None)), P(), P('fsdp'), id='P(None, None)'),
        pytest.param(by_path(None), None, None, id='None'),
        pytest.param(NO_ANSWER, P('fsdp'), P('fsdp'), id='no answer'),
        pytest.param(by_path(NO_ANSWER), P('fsdp'), P('fsdp'), id='a regex whose rule has no answer'),
        pytest.param(STRICT_MISS, P('fsdp'), 'error', id='strict miss'),
        pytest.param(TreePathShardingRule(strict=False), P(), P('fsdp'), id='strict=False miss'),
        pytest.param(PolicyShardingRule(last_on_tp), P(None, 'tp'), P('fsdp', 'tp'), id='policy'),
        pytest.param(PolicyShardingRule(lambda *_: None), None, None, id='policy: None'),
        pytest.param(PolicyShardingRule(lambda *_: NO_ANSWER), P(), P('fsdp'), id='policy: no answer'),
        pytest.param(FirstOnTp(), P('tp'), P('tp', 'fsdp'), id='a subclass'),
        pytest.param(Inherited(('x', P())), P('tp'), P('tp', 'fsdp'), id='a subclass of a built-in rule'),
        pytest.param(P('tp'), P('tp'), P('tp', 'fsdp'), id='a bare spec'),
        pytest.param(P(), P(), P('fsdp'), id='a bare P()'),
        pytest.param(None, None, None, id='a bare None'),
    ],
)
def test_precedence(first, either, both):
    assert spec_of(first | FSDP) == either
    assert spec_of(first & FSDP) == both


@pytest.mark.parametrize(
    ('second', 'expected'),
    [
        pytest.param(NO_ANSWER, P('tp'), id='no answer'),
        pytest.param(STRICT_MISS, P('tp'), id='strict miss'),
        pytest.param(by_path(None), P('tp'), id='None'),
        pytest.param(None, P('tp'), id='a bare None'),
        pytest.param(P(), P('tp'), id='P()'),
        pytest.param(P('fsdp'), P('tp'), id='the dimension is occupied'),
        pytest.param(P(None, 'tp'), P('tp'), id='the axis is in use'),
        pytest.param(P(None, ('tp', 'fsdp')), P('tp', 'fsdp'), id='one of two axes is in use'),
        pytest.param(P(None, 'fsdp'), P('tp', 'fsdp'), id='free'),
        pytest.param(Inherited(('x', P())), P('tp'), id='a subclass of a built-in rule'),
        pytest.param(PolicyShardingRule(lambda *_: FSDP), P('tp', 'fsdp'), id='a policy that returns FSDP'),
    ],
)
def test_spec_after_and(second, expected):
    assert spec_of(by_path(P('tp')) & second) == expected


@pytest.mark.parametrize(
    ('rule', 'expected'),
    [
        (NO_ANSWER | STRICT_MISS, 'error'),  # no answer: the default of the last rule
        (STRICT_MISS | NO_ANSWER, P()),
        (NO_ANSWER & STRICT_MISS, 'error'),
        (NO_ANSWER & NO_ANSWER, P()),
        ((NO_ANSWER & STRICT_MISS) | P('tp'), P('tp')),  # no answer in the brackets
        ((STRICT_MISS & FSDP) | P('tp'), 'error'),  # strict before & is always an error
        ((STRICT_MISS | P('tp')) & FSDP, P('tp', 'fsdp')),
        (FSDP & (STRICT_MISS | P(None, 'tp')), P('fsdp', 'tp')),
        ((STRICT_MISS | NO_ANSWER) & P('tp'), P('tp')),
        ((NO_ANSWER | STRICT_MISS) & P('tp'), 'error'),
    ],
)
def test_defaults_inside_compositions(rule, expected):
    assert spec_of(rule) == expected


def test_scalars_are_answered_by_regexes():
    assert spec_of(by_path(P('tp')) | P('fsdp'), shape=()) == P()
    assert spec_of(by_path(P('tp')) & FSDP, shape=(1, 1)) == P()


@pytest.mark.parametrize(
    ('below', 'above', 'rank', 'expected'),
    [
        (P(), P(), 2, P()),
        (P('a', None), P(None, 'b'), 2, P('a', 'b')),
        (P(None, 'a'), P(('b',)), 2, P('b', 'a')),
        (P('a'), P('b', ('a', 'c')), 2, P('a', 'c')),
        (P(U), P('b', 'c'), 2, P(U, 'c')),  # UNCONSTRAINED is not a free dimension
        (P('a'), P(U, U), 2, P('a', U)),
        (P(), P('a', 'b', 'c'), 2, P('a', 'b', 'c')),  # too long: validation reports it
        (P('a', 'b', 'c'), P(), 2, P('a', 'b', 'c')),
        (P(), P('a', 'a'), 2, P('a', 'a')),  # a mistake of `above` is not corrected silently
        (P('a', unreduced={'b'}), P(None, 'b'), 2, P('a', unreduced={'b'})),
        (P('a'), P(None, 'c', unreduced={'b', 'a'}), 2, P('a', 'c', unreduced={'b'})),
        (P('a'), P(reduced={'b'}), 2, P('a', reduced={'b'})),
    ],
)
def test_fill(below, above, rank, expected):
    assert fill_free_dims(below, without_occupied(below, above, rank)) == expected


# --- Dimensions that are not divisible ---------------------------------------------------------------


@pytest.mark.parametrize(
    ('shape', 'first', 'second', 'expected'),
    [
        ((8, 5), 'error', 'replicate', P('fsdp')),  # added by the second rule: its policy
        ((8, 5), 'replicate', 'error', 'error'),
        ((6, 8), 'error', 'replicate', 'error'),
        ((6, 8), 'replicate', 'error', P(None, 'tp')),
        ((6, 5), 'replicate', 'error', 'error'),  # by both rules: the stricter policy
        ((6, 5), 'error', 'replicate', 'error'),
        ((6, 5), 'replicate', 'replicate', P()),
        ((6, 5), 'replicate', 'warn', 'warning'),
        ((8, 5), 'replicate', 'warn', 'warning'),
        ((6, 8), 'replicate', 'warn', P(None, 'tp')),
    ],
)
def test_which_policy_applies(shape, first, second, expected):
    rule = by_path(P('fsdp'), on_indivisible=first) & by_path(P(None, 'tp'), on_indivisible=second)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        try:
            result = mesh_4x2().match_sharding_rule(rule, leaf_w(*shape))['w'].spec
        except ShardingError:
            result = 'error'
    drops = P('fsdp') if shape[0] % 4 == 0 else P()
    kinds = [warning.category for warning in caught]
    assert kinds == ([IndivisibleWarning] if expected == 'warning' else [])
    assert result == (drops if expected == 'warning' else expected)


@pytest.mark.parametrize('helpers', ['error', 'warn', 'replicate'])
@pytest.mark.parametrize('second', ['error', 'warn', 'replicate', "the helper's"])
@pytest.mark.parametrize('first', ['error', 'warn', 'replicate', "the helper's"])
@pytest.mark.parametrize('bracketed', [False, True])
def test_the_stricter_of_two_policies_applies(first, second, helpers, bracketed):
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'], on_indivisible=helpers)

    def placing(spec, policy):
        bare = policy == "the helper's"
        return P() & by_path(P()) & spec if bare else by_path(spec, on_indivisible=policy)

    rule = placing(P('fsdp'), first) & placing(P(None, 'tp'), second)
    if bracketed:
        rule = by_path(P(), on_indivisible='error') & (rule & FSDP)
    policies = {helpers if policy == "the helper's" else policy for policy in (first, second)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        if 'error' in policies:
            with pytest.raises(ShardingError, match='dimension 1 of size 7 is not divisible'):
                helper.match_sharding_rule(rule, leaf_w(7, 7))
        else:
            assert helper.match_sharding_rule(rule, leaf_w(7, 7))['w'].spec == P()
    expected = [IndivisibleWarning] if policies in ({'warn'}, {'warn', 'replicate'}) else []
    assert [warning.category for warning in caught] == expected


@pytest.mark.parametrize('policy', ['error', 'replicate'])
def test_a_bare_spec_has_the_policy_of_the_helper(policy):
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'], on_indivisible=policy)
    lenient = by_path(P(None, 'tp'), on_indivisible='replicate')
    for rule in (P('fsdp') & lenient, STRICT_MISS | P('fsdp'), P('fsdp') & FSDP):
        if policy == 'error':
            with pytest.raises(ShardingError, match='dimension 0 of size 6 is not divisible'):
                helper.match_sharding_rule(rule, leaf_w(6, 5))
        else:
            assert helper.match_sharding_rule(rule, leaf_w(6, 5))['w'].spec == P()


def test_a_rule_without_leaves_is_not_called():
    typo = FSDPShardingRule('fdsp')
    closed = by_path(None)
    assert spec_of(closed & typo) is None
    assert spec_of(closed | typo) is None
    assert spec_of(P('tp') | typo) == P('tp')
    assert spec_of(TreePathShardingRule(('elsewhere', typo), ('w', P('tp')))) == P('tp')
    for rule in (by_path(P()) & typo, STRICT_MISS | typo, by_path(typo)):
        with pytest.raises(RuleError, match="the mesh has no axis 'fdsp'"):
            spec_of(rule)


# --- Laws, over random meshes, shapes and specs -----------------------------------------------------

SIZES = [
    sizes
    for rank in range(1, 5)
    for sizes in itertools.product(range(1, 9), repeat=rank)
    if math.prod(sizes) <= 8
]
DIMENSIONS = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12, 14, 24, 30])
AXES = 'abcd'


@st.composite
def specs(draw, shape, helper):
    """Draws a valid spec: each mesh axis shards a dimension that is still divisible by it, or none."""
    entries = [()] * len(shape)
    for axis in draw(st.permutations(helper.axis_names)):
        dim = draw(st.integers(-1, len(shape) - 1))
        names = (*entries[dim], axis) if dim >= 0 else ()
        if dim >= 0 and shape[dim] % math.prod(helper.mesh.shape[name] for name in names) == 0:
            entries[dim] = names
    return P(*entries)


@st.composite
def rules(draw, shape, helper, depth=2):
    """Draws nested rules of all kinds."""
    inner = rules(shape, helper, depth - 1)
    kind = draw(st.integers(0, 8 if depth else 5))
    if kind <= 1:
        names = draw(st.permutations(helper.axis_names))[: draw(st.integers(1, 2))]
        return FSDPShardingRule(tuple(names), min_fsdp_size=draw(st.sampled_from([1, 64])))
    spec = draw(specs(shape, helper))
    if kind == 2:
        return ConstantRule(spec)
    if kind <= 4:
        return TreePathShardingRule((draw(st.sampled_from(['w', 'x'])), spec), strict=kind == 4)
    if kind == 5:
        return PolicyShardingRule(lambda *_: spec)
    if kind == 6:
        return by_path(draw(inner))
    first, second = draw(inner), draw(inner)
    return first | second if kind == 7 else first & second


@st.composite
def situations(draw, count=2):
    sizes = draw(st.sampled_from(SIZES))
    helper = helper_of(**dict(zip(AXES, sizes, strict=False)))
    shape = tuple(draw(st.lists(DIMENSIONS, min_size=1, max_size=4)))
    return helper, shape, [draw(rules(shape, helper)) for _ in range(count)]


def entries_of(spec, rank):
    entries = [*spec, *[None] * rank][:rank]
    return [entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in entries]


@examples(200)
@hypothesis.given(situations(count=3))
def test_or_is_associative_and_takes_the_first_answer(situation):
    helper, shape, (a, b, c) = situation
    assert (a | b) | c == a | (b | c)
    assert hash((a | b) | c) == hash(a | (b | c))
    # The constructors do not flatten, so this tests the law itself.
    left, right = FirstAnswer((FirstAnswer((a, b)), c)), FirstAnswer((a, FirstAnswer((b, c))))
    results = [spec_of(rule, shape, helper=helper) for rule in (left, right, a | b | c)]
    assert results[0] == results[1] == results[2]


@pytest.mark.medium
@pytest.mark.filterwarnings('ignore::scalax.errors.UnshardedWarning')  # some of the drawn rules shard nothing
@examples(300)
@hypothesis.given(situations())
def test_and_keeps_the_first_spec_and_its_result_is_valid(situation):
    helper, shape, (a, b) = situation
    alone, both = spec_of(a, shape, helper=helper), spec_of(a & b, shape, helper=helper)
    if both == 'error':
        return
    assert alone != 'error' or not isinstance(a, TreePathShardingRule)
    together = entries_of(both, len(shape))
    used = [axis for entry in together for axis in entry]
    assert len(used) == len(set(used))
    if alone != 'error':
        for own_entry, entry in zip(entries_of(alone, len(shape)), together, strict=True):
            assert not own_entry or own_entry == entry
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    placed = helper.shard({'w': array}, a & b)['w']
    np.testing.assert_array_equal(placed, array)
    assert placed.sharding.is_equivalent_to(NamedSharding(helper.mesh, both), len(shape))


@pytest.mark.medium
@examples(300)
@hypothesis.given(situations(count=0), st.data())
def test_fsdp_after_a_spec_shards_the_largest_free_dimension_that_divides(situation, data):
    helper, shape, _ = situation
    axis = data.draw(st.sampled_from(helper.axis_names))
    below = data.draw(specs(shape, helper))
    expected = entries_of(below, len(shape))
    used = [name for entry in expected for name in entry]
    free = [d for d, entry in enumerate(expected) if not entry and shape[d] % helper.mesh.shape[axis] == 0]
    if axis not in used and free:
        expected[max(free, key=lambda d: (shape[d], -d))] = (axis,)
    fsdp = FSDPShardingRule(axis, min_fsdp_size=1)
    by_policy = PolicyShardingRule(lambda *_: fsdp)
    for rule in (below & fsdp, P() & (below & fsdp), below & (P() & fsdp), below & by_policy):
        assert entries_of(spec_of(rule, shape, helper=helper), len(shape)) == expected


def test_axes_of_all_outer_rules_are_in_use():
    helper = helper_of(a=2, b=2, c=2)
    c = FSDPShardingRule('c', min_fsdp_size=1)
    assert spec_of(P('a') & (P(None, 'b') & c), (32, 16, 8), helper=helper) == P('a', 'b', 'c')
    assert spec_of((by_path(P('a')) & P(None, 'b')) & c, (32, 16, 8), helper=helper) == P('a', 'b', 'c')
    nested = P('a') & (by_path(P(None, 'b')) & PolicyShardingRule(lambda *_: STRICT_MISS | c))
    assert spec_of(nested, (32, 16, 8), helper=helper) == P('a', 'b', 'c')


PROGRAM = """
import numpy as np
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
from scalax.sharding import FSDPShardingRule, MeshShardingHelper, TreePathShardingRule

def answer():
    mesh = AbstractMesh((2, 3, 4, 5), ('dp', 'pp', 'tp', 'ep'), axis_types=(AxisType.Auto,) * 4)
    helper = MeshShardingHelper.from_mesh(mesh)
    rule = TreePathShardingRule(('a', P('tp')), ('b', P(('ep', 'tp')))) | P()
    rule = rule & FSDPShardingRule(('pp', 'dp'), min_fsdp_size=1) & P(('ep', 'tp'))
    shapes = [(120, 60, 60), (60, 120), (60, 240), (7, 60, 120)]
    tree = {name: [np.zeros(shape) for shape in shapes] for name in 'abc'}
    return helper.explain(tree, rule.stacked(1)).to_text(200) + repr(rule)
"""


@pytest.mark.slow
@pytest.mark.parametrize('seed', ['1', '2'])
def test_every_process_decides_the_same(seed):
    here = {}
    exec(PROGRAM, here)
    there = subprocess.run(
        [sys.executable, '-c', f'{PROGRAM}\nprint(answer())'],
        env={**os.environ, 'PYTHONHASHSEED': seed},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout == here['answer']() + '\n'
