"""The specs that each rule gives, and rules as values."""

import dataclasses
import math
import pickle
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalax.errors import ShardingError, StructureError
from scalax.sharding import (
    FSDPShardingRule,
    Mesh,
    MeshShardingHelper,
    PolicyShardingRule,
    ShardingRule,
    TreePathShardingRule,
)
from scalax.utils import named_tree_map
from tests.support.leaves import leaf

# --- FSDP -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('shape', 'size', 'spec'),
    [
        ((8, 16), 4, P(None, 'fsdp')),
        ((16, 8), 4, P('fsdp', None)),
        ((16, 16), 4, P('fsdp', None)),  # of equals the first
        ((3, 16, 16), 4, P(None, 'fsdp', None)),
        ((30, 8), 4, P(None, 'fsdp')),  # the largest is not divisible
        ((6, 9), 4, P()),
        ((7,), 7, P('fsdp')),
        ((7,), 1, P('fsdp')),
        ((0, 8), 4, P(None, 'fsdp')),
        ((0,), 4, P()),
        ((), 4, P()),
        ((1, 1), 4, P()),
        ((8, 16), None, P(None, 'fsdp')),
        ((48, 32), None, P(None, 'fsdp')),  # 48 = 3 * 16, 32 = 2 ** 5
        ((6, 10), None, P('fsdp', None)),  # both have one factor of two
        ((3, 6), None, P(None, 'fsdp')),
        ((3, 5), None, P()),
        ((1, 7), None, P()),
        ((0, 8), None, P(None, 'fsdp')),
        ((0,), None, P()),
        ((), None, P()),
    ],
)
def test_fsdp_without_a_mesh(shape, size, spec):
    rule = FSDPShardingRule(fsdp_axis_size=size, min_fsdp_size=0)
    result = rule.apply(leaf(*shape))
    assert result == spec
    assert len(result) == len(spec)  # one entry a dimension, as in 0.2.5


@pytest.mark.parametrize(
    ('shape', 'minimum', 'sharded'),
    [
        ((4, 4), 16, True),
        ((4, 4), 17, False),
        ((4, 4), 16.5, False),
        ((1024, 1024), 1048576, True),
        ((1024, 1023), 1048576, False),
        ((4, 0), 1, False),
    ],
)
def test_fsdp_replicates_small_arrays(shape, minimum, sharded):
    rule = FSDPShardingRule(fsdp_axis_size=4, min_fsdp_size=minimum)
    assert rule.apply(leaf(*shape)) == (P('fsdp', None) if sharded else P())


def test_fsdp_defaults():
    assert FSDPShardingRule().apply({'w': leaf(1024, 1024), 'b': leaf(1024)}) == {
        'w': P('fsdp', None),
        'b': P(),
    }


def test_fsdp_over_several_axes():
    rule = FSDPShardingRule(('replica', 'fsdp'), 8, 0)
    assert rule.apply(leaf(4, 16)) == P(None, ('replica', 'fsdp'))
    assert FSDPShardingRule(['replica', 'fsdp'], 8, 0) == rule


def test_fsdp_takes_the_size_from_the_mesh():
    helper = MeshShardingHelper([2, 4], ['replica', 'fsdp'])

    def shard_shape(rule, *shape):
        return helper.match_sharding_rule(rule, leaf(*shape)).shard_shape(shape)

    assert shard_shape(FSDPShardingRule(min_fsdp_size=0), 6, 12) == (6, 3)
    assert shard_shape(FSDPShardingRule(min_fsdp_size=0, fsdp_axis_size=4), 6, 12) == (6, 3)
    assert shard_shape(FSDPShardingRule(('replica', 'fsdp'), 8, 0), 12, 8) == (12, 1)
    assert shard_shape(FSDPShardingRule(min_fsdp_size=0), 6, 10) == (6, 10)
    # Without a mesh, only powers of two can guide the choice.
    assert FSDPShardingRule(min_fsdp_size=0).apply(leaf(6, 12)) == P(None, 'fsdp')


def fsdp_0_2_5(shape, axis_size, minimum):
    """Reimplements scalax 0.2.5, which is right if there is an axis size or an even dimension.

    Of equal dimensions it took whichever numpy's argsort put first, which depends on the processor.
    """
    if math.prod(shape) < minimum:
        return P()
    if axis_size is None:
        score = [max(2**k for k in range(40) if n % 2**k == 0) for n in shape]
    else:
        score = [n if n % axis_size == 0 else 0 for n in shape]
    if not shape or not max(score):
        return P()
    dim = score.index(max(score))
    return P(*['fsdp' if i == dim else None for i in range(len(shape))])


def random_shapes(rng, count):
    sizes = [2, 3, 4, 6, 7, 8, 12, 16, 24, 30, 64]
    return [tuple(int(n) for n in rng.choice(sizes, rng.integers(1, 5))) for _ in range(count)]


@pytest.mark.parametrize('axis_size', [None, 1, 2, 3, 4, 8])
@pytest.mark.parametrize('minimum', [0, 64, 1000])
def test_fsdp_agrees_with_0_2_5(rng, axis_size, minimum):
    shapes = [s for s in random_shapes(rng, 300) if axis_size or any(n % 2 == 0 for n in s)]
    rule = FSDPShardingRule('fsdp', axis_size, minimum)
    expected = [fsdp_0_2_5(shape, axis_size, minimum) for shape in shapes]
    assert rule.apply([leaf(*shape) for shape in shapes]) == expected
    assert len(set(expected)) > 3


# --- Tree paths -----------------------------------------------------------------------------------

TREE = {
    'attention': {'query': {'kernel': leaf(8, 8)}, 'scale': leaf()},
    'layers': [{'kernel': leaf(4, 8), 'bias': leaf(8)}],
    'ones': leaf(1, 1),
    'nothing': None,
}


def path_specs(*rules, **options):
    specs = TreePathShardingRule(*rules, **options).apply(TREE)
    return {
        'query': specs['attention']['query']['kernel'],
        'scale': specs['attention']['scale'],
        'kernel': specs['layers'][0]['kernel'],
        'bias': specs['layers'][0]['bias'],
        'ones': specs['ones'],
    }


@pytest.mark.parametrize(
    ('rules', 'specs'),
    [
        ([('.*', P('tp'))], {'query': P('tp'), 'kernel': P('tp'), 'bias': P('tp')}),
        (
            [('query', P('tp')), ('kernel', P(None, 'tp')), ('bias$', P())],
            {'query': P('tp'), 'kernel': P(None, 'tp'), 'bias': P()},
        ),
        # The first match wins, and it is a search, not a match from the start.
        (
            [('kernel$', P('a')), ('query', P('b')), ('', P())],
            {'query': P('a'), 'kernel': P('a'), 'bias': P()},
        ),
        (
            [('^layers/0/.*l$', P('a')), ('[0-9]/b', P('b')), (re.compile('QUERY', re.I), P('c'))],
            {'query': P('c'), 'kernel': P('a'), 'bias': P('b')},
        ),
        ([('kernel|bias', None)], {'query': None, 'kernel': None, 'bias': None}),
        (
            [('layers', FSDPShardingRule('x', 4, 16)), ('', P('b'))],
            {'query': P('b'), 'kernel': P(None, 'x'), 'bias': P()},
        ),
        (
            [('layers', TreePathShardingRule(('bias', P('a')), ('layers/0', P('b')))), ('', P())],
            {'query': P(), 'kernel': P('b'), 'bias': P('a')},
        ),
        (
            [('kernel', PolicyShardingRule(lambda path, x: P(path.split('/')[0]))), ('', P())],
            {'query': P('attention'), 'kernel': P('layers'), 'bias': P()},
        ),
    ],
)
def test_tree_paths(rules, specs):
    assert path_specs(*rules) == {**specs, 'scale': P(), 'ones': P()}


def test_unmatched_leaves_are_replicated_if_not_strict():
    assert path_specs(('query', P('tp')), strict=False) == {
        'query': P('tp'),
        **dict.fromkeys(['scale', 'kernel', 'bias', 'ones'], P()),
    }


def test_unmatched_leaves_of_a_strict_rule_are_all_named():
    nested = TreePathShardingRule(('kernel', P('tp')))
    with pytest.raises(ShardingError) as error:
        path_specs(('query', P()), ('layers', nested))
    assert [problem.leaf for problem in error.value.problems] == ['layers/0/bias: float32[8]']


def tree_path_0_2_5(rules, strict):
    """Reimplements scalax 0.2.5."""

    def spec(path, x):
        if math.prod(x.shape) == 1:
            return P()
        values = [value for regex, value in rules if re.search(regex, path)]
        assert values or not strict
        return [*values, P()][0]

    return spec


@pytest.mark.parametrize('strict', [True, False])
def test_tree_paths_agree_with_0_2_5(rng, strict):
    keys = ['kernel', 'bias', 'a.b', 'layers', 'w/x', 'Q']
    for _ in range(30):
        tree = {
            str(key): {
                str(inner): leaf(*shape) for inner, shape in zip(keys, random_shapes(rng, 4), strict=False)
            }
            for key in rng.choice(keys, 3)
        }
        chosen = rng.permutation(['kernel$', 'bias', 'a.b', '^layers/', 'Q.*w/x', r'\.', '[QW]', 'w/x'])
        rules = [(str(regex), P(None, str(number))) for number, regex in enumerate(chosen[:5])]
        rules += [('.*', P('rest'))] if strict else []
        expected = named_tree_map(tree_path_0_2_5(rules, strict), tree, sep='/')
        assert TreePathShardingRule(*rules, strict=strict).apply(tree) == expected


# --- Policies -------------------------------------------------------------------------------------


def test_policies_see_paths_and_leaves():
    seen = {}

    def policy(path, x):
        seen[path] = (x.shape, str(x.dtype))
        return P('tp') if path.endswith('bias') else None

    tree = {'w': np.zeros((2, 3), np.float16), 'bias': leaf(4), 'step': 3, 'rate': 0.1, 'on': True}
    specs = PolicyShardingRule(policy).apply(tree)
    assert specs == {'w': None, 'bias': P('tp'), 'step': None, 'rate': None, 'on': None}
    assert seen == {
        'w': ((2, 3), 'float16'),
        'bias': ((4,), 'float32'),
        'step': ((), 'int32'),  # as JAX accepts it
        'rate': ((), 'float32'),
        'on': ((), 'bool'),
    }


def test_policies_may_return_rules():
    fsdp = FSDPShardingRule('x', 4, 16)
    strict = TreePathShardingRule(('kernel', P('tp')))
    rule = PolicyShardingRule(lambda path, x: fsdp if 'query' in path else strict)
    tree = {'query': leaf(8, 8), 'query_bias': leaf(8), 'kernel': leaf(8)}
    assert rule.apply(tree) == {'query': P('x', None), 'query_bias': P(), 'kernel': P('tp')}
    with pytest.raises(ShardingError) as error:
        rule.apply({'bias': leaf(8), 'norm': leaf(8)})
    assert [problem.leaf for problem in error.value.problems] == ['bias: float32[8]', 'norm: float32[8]']


# --- Rules of users -------------------------------------------------------------------------------


class Counting(ShardingRule):
    """Counts its calls."""

    def __init__(self):
        self.count = 0

    def apply(self, pytree):
        self.count += 1
        return jax.tree.map(lambda x: P('tp'), pytree)


@pytest.mark.parametrize(
    'around',
    [
        lambda rule: PolicyShardingRule(lambda path, x: rule),
        lambda rule: TreePathShardingRule(*((f'k{i}$', rule) for i in range(20))),
        lambda rule: TreePathShardingRule(('k1', rule), ('k[23]', P('data')), ('k', rule)),
    ],
)
def test_a_rule_is_called_once_for_all_of_its_leaves(around):
    rule, other = Counting(), Counting()
    tree = {f'k{i}': leaf(8) for i in range(20)}
    specs = around(rule).apply(tree)
    assert rule.count == 1
    assert {path for path, spec in specs.items() if spec == P('tp')} >= set(tree) - {'k2', 'k3'}
    # The report still names the clause of each answer.
    helper = MeshShardingHelper([2, 4], ['data', 'tp'])
    rows = helper.explain(tree, TreePathShardingRule(('k[0-4]$', rule), ('k5', other), ('k', rule))).rows
    origins = {row.path: row.rule for row in rows}
    assert (origins['k3'], origins['k5'], origins['k7']) == tuple(
        f"regex '{regex}' -> Counting" for regex in ('k[0-4]$', 'k5', 'k')
    )
    assert other.count == 1


class LastDimension(ShardingRule):
    def apply(self, pytree):
        return jax.tree.map(lambda x: P(*[None] * (x.ndim - 1), 'tp') if x.ndim else P(), pytree)


def test_a_users_rule_works_alone_nested_and_with_none_nodes():
    tree = {'w': np.zeros((2, 4)), 'none': None, 'b': np.zeros(4), 'step': 0}
    helper = MeshShardingHelper([2, 4], ['dp', 'tp'])
    expected = {'w': (2, 1), 'b': (1,), 'step': ()}
    for rule in (
        LastDimension(),
        TreePathShardingRule(('.*', LastDimension())),
        PolicyShardingRule(lambda path, x: LastDimension()),
        {'w': LastDimension(), 'none': None, 'b': LastDimension(), 'step': LastDimension()},
    ):
        shardings = helper.match_sharding_rule(rule, tree)
        assert shardings.pop('none') is None
        assert {k: s.shard_shape(np.shape(tree[k])) for k, s in shardings.items()} == expected


def test_a_nested_users_rule_sees_the_entire_tree():
    class Spy(ShardingRule):
        def apply(self, pytree):
            seen.append(sorted(pytree))
            return jax.tree.map(lambda x: P('a'), pytree)

    seen = []
    rule = TreePathShardingRule(('w', Spy()), ('', P()))
    assert rule.apply({'w': leaf(4), 'b': leaf(4)}) == {'w': P('a'), 'b': P()}
    assert seen == [['b', 'w']]


def test_a_users_rule_may_return_named_shardings():
    mesh = Mesh(np.array(jax.devices()), ('tp',))

    class Host(ShardingRule):
        def apply(self, pytree):
            return jax.tree.map(lambda _: NamedSharding(mesh, P('tp'), memory_kind='pinned_host'), pytree)

    sharding = MeshShardingHelper.from_mesh(mesh).match_sharding_rule(Host(), leaf(8))
    assert sharding == NamedSharding(mesh, P('tp'), memory_kind='pinned_host')


class Wrong(ShardingRule):
    def __init__(self, value):
        self.value = value

    def apply(self, pytree):
        return self.value


def test_a_users_rule_that_returns_another_tree(snapshot):
    with snapshot.raises(StructureError):
        TreePathShardingRule(('', Wrong({'v': P()}))).apply({'w': leaf(4)})


# --- Rules as values ------------------------------------------------------------------------------


def policy_of_this_module(path, x):
    return P('tp')


RULES = [
    FSDPShardingRule(),
    FSDPShardingRule('data', 4, 16),
    FSDPShardingRule(('replica', 'data')),
    TreePathShardingRule(),
    TreePathShardingRule(('a', P('x', None)), ('b', None), (re.compile('c'), P(('x', 'y')))),
    TreePathShardingRule(('a', FSDPShardingRule('data')), strict=False),
    TreePathShardingRule(('a', TreePathShardingRule(('b', P())))),
    TreePathShardingRule(('a', P()), on_indivisible='warn'),
    PolicyShardingRule(policy_of_this_module),
    PolicyShardingRule(policy_of_this_module, on_indivisible='replicate'),
]


def repr_id(rule):
    return re.sub(' at 0x.*?>', '>', repr(rule))


@pytest.mark.parametrize('rule', RULES, ids=repr_id)
def test_pickling_gives_an_equal_rule(rule):
    copy = pickle.loads(pickle.dumps(rule))
    assert copy == rule
    assert hash(copy) == hash(rule)
    assert repr(copy) == repr(rule)


@pytest.mark.parametrize(
    'rule', [rule for rule in RULES if not isinstance(rule, PolicyShardingRule)], ids=repr_id
)
def test_the_repr_recreates_the_rule(rule):
    names = {
        'FSDPShardingRule': FSDPShardingRule,
        'TreePathShardingRule': TreePathShardingRule,
        'P': P,
        're': re,
    }
    assert eval(repr(rule), names) == rule


@pytest.mark.parametrize('flags', [0, re.ASCII, re.IGNORECASE | re.MULTILINE])
def test_the_repr_of_a_long_regex_recreates_the_rule(flags):
    regex = re.compile("it's|" + 'a' * 300, flags)
    rule = TreePathShardingRule((regex, P('x')), ('b', P()))
    assert eval(repr(rule), {'TreePathShardingRule': TreePathShardingRule, 'P': P, 're': re}) == rule
    short = re.compile('a b', flags)
    assert repr(TreePathShardingRule((short, None))) == f'TreePathShardingRule(({short!r}, None))'


def test_different_rules_differ():
    assert len(set(RULES)) == len(RULES)
    assert all((a == b) == (a is b) for a in RULES for b in RULES)


@pytest.mark.parametrize('rule', RULES, ids=repr_id)
def test_rules_are_immutable(rule):
    for field in dataclasses.fields(rule):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(rule, field.name, None)


def test_an_error_of_a_policy_names_the_leaf():
    def divide(path, leaf):
        return P() if path != 'w' else 1 / 0

    with pytest.raises(ZeroDivisionError) as error:
        PolicyShardingRule(divide).apply({'b': np.ones(3), 'w': np.ones((2, 3))})
    name = 'test_an_error_of_a_policy_names_the_leaf.<locals>.divide'
    assert error.value.__notes__ == [f'PolicyShardingRule({name}) was called for w: float64[2, 3]']


@pytest.mark.parametrize(
    'rule',
    [
        TreePathShardingRule(('x', P()), strict=False),
        FSDPShardingRule(),
        PolicyShardingRule(lambda path, leaf: P()),
    ],
)
def test_rules_refuse_leaves_that_are_not_arrays(rule):
    with pytest.raises(ShardingError) as error:
        rule.apply({'dtype': 'float32', 'act': len, 'w': leaf(8)})
    assert [problem.leaf for problem in error.value.problems] == [
        'act: builtin_function_or_method',
        'dtype: str',
    ]
