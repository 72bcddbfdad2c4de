"""The optimizer state rule: the spec for each shape, the text of messages, the rule as a value."""

import copy
import dataclasses
import pickle
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalax._core.pytree.partition_specs import canonical
from scalax._core.pytree.paths import NamedTree
from scalax.errors import RuleError, ShardingError, StructureError
from scalax.rules._rule import decide
from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    OptimizerStateShardingRule,
    PolicyShardingRule,
    ShardingRule,
    TreePathShardingRule,
)

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
BY_PATH = TreePathShardingRule(('/w$', P('fsdp', 'tp')), ('', P()))


def struct(*shape, dtype='float32'):
    return jax.ShapeDtypeStruct(shape, dtype)


W = {'w': struct(8, 16)}
PARAMS = {'embed': jnp.zeros((16, 8)), 'layers': {'w': jnp.zeros((8, 16)), 'b': jnp.zeros(16)}, 'scale': 1.0}
SPECS = {'embed': P('tp', 'fsdp'), 'layers': {'w': P('fsdp', 'tp'), 'b': P('tp')}, 'scale': P()}


class TrainState(NamedTuple):
    step: Any
    params: Any
    opt_state: Any
    key: Any


def by_rank(path, leaf):
    return P('fsdp', 'tp') if len(leaf.shape) == 2 else P()


# --- Shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('path', 'shape', 'spec', 'reason'),
    [
        ('mu/w', (8, 16), P('a', 'b'), 'as its parameter'),
        ('w', (8, 16), P('a', 'b'), 'as its parameter'),
        ('rows/w', (8,), P('a'), 'keeps dimension 0 of its parameter'),
        ('columns/w', (16,), P('b'), 'keeps dimension 1 of its parameter'),
        ('rows/w', (8, 1), P('a'), 'keeps dimension 0 of its parameter'),
        ('columns/w', (1, 16), P(None, 'b'), 'keeps dimension 1 of its parameter'),
        ('history/w', (3, 8, 16), P(None, 'a', 'b'), 'a stack of copies of its parameter'),
        ('history/w', (8, 8, 16), P(None, 'a', 'b'), 'a stack of copies of its parameter'),
        ('v/w', (1,), P(), 'at most one element'),
        ('v/w', (), P(), 'at most one element'),
        ('v/w', (1, 1, 1), P(), 'at most one element'),
        ('v/w', (0, 0), P(), 'at most one element'),
        ('count', (), P(), 'at most one element'),
        ('table', (8,), P(), 'does not belong to a parameter'),
        ('table', (8, 4), P(), 'does not belong to a parameter'),
        ('mu/aw', (8,), P(), 'does not belong to a parameter'),  # entire keys are compared
        ('mu/w/codes', (128,), P(), 'does not belong to a parameter'),
        ('table', (2**20 - 1,), P(), 'does not belong to a parameter'),
    ],
)
def test_spec_and_reason_of_each_shape(path, shape, spec, reason):
    rule = OptimizerStateShardingRule(P('a', 'b'), W)
    tree = {'mirror': W, 'leaf': nested(path, struct(*shape))}  # the mirror: a state of these params
    named = NamedTree.of(tree)
    answer = dict(zip(named.paths, decide(rule, named, None), strict=True))[f'leaf/{path}']
    assert (canonical(answer.spec), answer.reason) == (spec, reason)


def nested(path, leaf):
    for key in reversed(path.split('/')):
        leaf = {key: leaf}
    return leaf


def test_a_later_rule_shards_leaves_below_a_parameter():
    params = {'kernel': struct(2048, 512)}
    rule = OptimizerStateShardingRule(P('a', 'b'), params)
    state = {'mu': {'kernel': {'q': struct(2048, 512, dtype='int8'), 'scale': struct(2048, 4)}}}
    with pytest.raises(ShardingError) as error:
        rule.apply(state)
    assert [problem.leaf for problem in error.value.problems] == [
        'mu/kernel/q: int8[2048, 512]',
        'mu/kernel/scale: float32[2048, 4]',
    ]
    either = rule | FSDPShardingRule('fsdp', 4, min_fsdp_size=0)
    assert either.apply(state)['mu']['kernel'] == {'q': P('fsdp', None), 'scale': P('fsdp', None)}


NO_PARAMETER = 'its path does not end with the path of a parameter'
LARGE = {'layers': [{'w': struct(64, 64)}, {'w': struct(4096, 4096)}], 'b': struct(64)}


@pytest.mark.parametrize(
    ('params', 'path', 'leaf', 'detail'),
    [
        (LARGE, '0/mu/new', struct(4096, 4096), NO_PARAMETER),
        ({'n': struct(8, 16), 'm': struct(8)}, 'nu', struct(8, 16), NO_PARAMETER),
        (
            [struct(64, 64), struct(4096, 4096)],
            'mu/1',
            struct(4096, 2048),
            "the parameter '1' has shape [4096, 4096]; this is neither a copy, nor a stack of copies, nor a "
            'subset of its dimensions',
        ),
        (LARGE, '0/mu/flat', struct(2**20), NO_PARAMETER),
        (LARGE, '0/mu/codes', struct(2**20, dtype='int8'), NO_PARAMETER),
    ],
)
def test_params_that_fit_only_some_leaves_are_an_error(params, path, leaf, detail):
    rule = OptimizerStateShardingRule(P(), params)
    state = {'mirror': params, 'leaf': nested(path, leaf)}
    for of_all in (rule, rule & FSDPShardingRule('fsdp', min_fsdp_size=0)):
        with pytest.raises(ShardingError) as error:
            HELPER.match_sharding_rule(of_all, state)
        assert [(problem.kind, problem.detail) for problem in error.value.problems] == [
            ('params-mismatch', detail)
        ]
    # The rule after `|` answers first.
    either = rule | TreePathShardingRule(('', P('fsdp')))
    assert jax.tree.leaves(HELPER.match_sharding_rule(either, state)['leaf'])[0].spec == P('fsdp')


def test_a_train_state_with_other_leaves():
    state = TrainState(
        struct(), LARGE, {'mu': LARGE, 'coefficients': struct(5, 3)}, struct(2, dtype='uint32')
    )
    extra = {'state': state, 'batch_stats': {'mean': struct(4096)}, 'seen': struct(64, 64, dtype='int32')}
    specs = OptimizerStateShardingRule(P(), LARGE).apply(extra)
    assert set(jax.tree.leaves(specs)) == {P()}


# --- Rules of the parameters ----------------------------------------------------------------------


class LastDimension(ShardingRule):
    def apply(self, pytree):
        return jax.tree.map(lambda x: P(*[None] * (x.ndim - 1), 'tp') if x.ndim else P(), pytree)


@pytest.mark.parametrize(
    'param_rule',
    [
        BY_PATH,
        SPECS,
        P(),
        {**SPECS, 'embed': FSDPShardingRule(min_fsdp_size=0), 'layers': LastDimension()},
        FSDPShardingRule(min_fsdp_size=16),
        FSDPShardingRule(min_fsdp_size=0).stacked(1),
        TreePathShardingRule(('embed', P('tp')), strict=False) & FSDPShardingRule(min_fsdp_size=0),
        TreePathShardingRule(('embed', P('tp'))) | FSDPShardingRule(min_fsdp_size=0),
        PolicyShardingRule(by_rank),
        LastDimension(),
    ],
    ids=[
        'by path',
        'specs',
        'one spec',
        'rules in a tree',
        'fsdp',
        'stacked',
        'both',
        'either',
        'policy',
        "a user's rule",
    ],
)
def test_moments_have_the_specs_of_every_kind_of_rule(param_rule):
    params = jax.eval_shape(lambda: PARAMS)
    state = jax.eval_shape(optax.adamw(1e-3).init, params)
    specs = HELPER.match_sharding_rule(param_rule, params)
    shardings = HELPER.match_sharding_rule(OptimizerStateShardingRule(param_rule, params), state)
    assert shardings[0].mu == shardings[0].nu == specs


def test_the_rule_is_called_once_for_all_parameters():
    trees = []

    class Counting(ShardingRule):
        def apply(self, pytree):
            trees.append(pytree)
            return jax.tree.map(lambda _: P(), pytree)

    rule = OptimizerStateShardingRule(Counting(), PARAMS)
    rule.apply(jax.eval_shape(optax.adamw(1e-3).init, PARAMS))
    assert trees == [jax.tree.map(lambda x: struct(*np.shape(x)), PARAMS)]


def test_copies_cannot_use_axes_of_outer_rules():
    params = {'w': struct(64, 32), 'b': struct(64)}
    fsdp = FSDPShardingRule('fsdp', min_fsdp_size=1)
    rule = OptimizerStateShardingRule(fsdp, params)

    def specs(rule, tree):
        return jax.tree.map(lambda sharding: sharding.spec, HELPER.match_sharding_rule(rule, tree))

    for first in (P('tp'), P(None, 'tp'), P('fsdp'), P(None, ('fsdp', 'tp')), P()):
        mu = {'w': params['w']}
        assert specs(first & rule, {'mu': mu}) == {'mu': specs(first & fsdp, mu)}
        assert specs(first & (P() & rule), {'mu': mu}) == {'mu': specs(first & fsdp, mu)}
    # The free dimensions differ between the copies.
    first = TreePathShardingRule(('mu/w', P('tp')), ('nu/w', P(None, 'tp')), ('', P()))
    state = {'count': struct(), 'mu': params, 'nu': params, 'ema': params, 'v_row': {'w': struct(64)}}
    assert specs(first & rule, state) == {
        'count': P(),
        'mu': {'w': P('tp', 'fsdp'), 'b': P('fsdp')},
        'nu': {'w': P('fsdp', 'tp'), 'b': P('fsdp')},
        'ema': {'w': P('fsdp'), 'b': P('fsdp')},
        'v_row': {'w': P('fsdp')},
    }
    stack = {'mu': {'w': struct(8, 64, 32)}}
    assert specs(P('fsdp') & rule.stacked(1), stack) == {'mu': {'w': P('fsdp')}}
    assert specs(P(None, 'tp') & rule.stacked(1), stack) == {'mu': {'w': P(None, 'tp', 'fsdp')}}


def test_params_whose_key_is_empty():
    params = {'w': {'': struct(8, 16)}, 'b': struct(16)}
    state = {'mu': params}
    for param_rule in (P('tp'), {'w': P('tp'), 'b': P('tp')}):
        rule = OptimizerStateShardingRule(param_rule, params)
        assert rule.apply(state) == {'mu': {'w': {'': P('tp')}, 'b': P('tp')}}
        with pytest.raises(ShardingError, match="the parameter 'w/' has shape"):
            rule.apply({'mu': {'w': {'': struct(7)}, 'b': struct(16)}})


def test_memory_kinds_and_none_are_passed_on():
    params = {'w': struct(8, 16)}
    state = {'mu': params, 'count': struct()}
    hosted = OptimizerStateShardingRule(P('fsdp'), params).with_memory_kind('pinned_host')
    assert HELPER.match_sharding_rule(hosted, state)['mu']['w'].memory_kind == 'pinned_host'
    inner = OptimizerStateShardingRule(
        FSDPShardingRule(min_fsdp_size=0).with_memory_kind('pinned_host'), params
    )
    shardings = HELPER.match_sharding_rule(inner, state)
    assert shardings['mu']['w'].memory_kind == 'pinned_host'
    assert shardings['count'].memory_kind != 'pinned_host'
    left = OptimizerStateShardingRule(TreePathShardingRule(('w', None)), params).apply(
        {'mu': params, 'v': {'w': struct(8)}}
    )
    assert left == {'mu': {'w': None}, 'v': {'w': None}}
    sharding = NamedSharding(HELPER.mesh, P('fsdp'))
    assert (
        HELPER.match_sharding_rule(OptimizerStateShardingRule(sharding, params), state)['mu']['w'] == sharding
    )


def test_the_policy_of_the_parameters_applies():
    params = {'w': struct(6, 16)}
    strict = TreePathShardingRule(('w', P('fsdp', 'tp')))
    loose = TreePathShardingRule(('w', P('fsdp', 'tp')), on_indivisible='replicate')
    with pytest.raises(ShardingError, match='is not divisible'):
        HELPER.match_sharding_rule(OptimizerStateShardingRule(strict, params), {'mu': params})
    shardings = HELPER.match_sharding_rule(
        OptimizerStateShardingRule(loose, params), {'mu': params, 'v_col': {'w': struct(6)}}
    )
    assert shardings['mu']['w'].spec == P(None, 'tp')
    assert shardings['v_col']['w'].spec == P()


def test_explain_finds_unused_clauses_of_the_parameters():
    rule = OptimizerStateShardingRule(
        TreePathShardingRule(('^w$', P('fsdp')), ('typo', P('tp')), ('.*', P())),
        {'w': struct(8, 16), 'b': struct(8)},
    )
    report = HELPER.explain({'mu': {'w': struct(8, 16), 'b': struct(8)}, 'count': struct()}, rule)
    assert report.unused_rules == ('typo',)
    assert [row.rule for row in report.rows] == [
        'OptimizerStateShardingRule',
        "OptimizerStateShardingRule -> regex '.*'",
        "OptimizerStateShardingRule -> regex '^w$'",
    ]


def test_unused_regexes_depend_on_the_parameters_not_the_state():
    params = {'embed': struct(8, 16), 'w': struct(8, 16), 'mu': struct(8, 16)}
    table = TreePathShardingRule(
        ('embed', P('fsdp')), ('^mu', P('tp')), ('w', P('fsdp')), ('nu', P()), ('^w$', P()), strict=False
    )
    rule = OptimizerStateShardingRule(table, params)
    # embed and mu are frozen, so the state lacks them; its own mu and nu are not parameters.
    state = {'mu': {'w': struct(8, 16)}, 'nu': {'w': struct(8, 16)}, 'count': struct()}
    for of_all, tree in (
        (rule, state),
        (rule & FSDPShardingRule('tp', min_fsdp_size=0), state),
        ({'params': table, 'state': rule}, {'params': {'w': struct(8, 16)}, 'state': state}),
    ):
        report = HELPER.explain(tree, of_all)
        assert report.shadowed_rules == ('^w$',)
        if of_all is rule:
            assert report.unused_rules == ('nu',)


# --- Messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('param_rule', 'params', 'state'),
    [
        pytest.param(
            P(),
            {'w': struct(8, 16), 'b': struct(16)},
            {'mu': {'w': struct(4, 16), 'b': struct(8)}, 'count': struct()},
            id='params of another size',
        ),
        pytest.param(
            P(),
            {'params': {'dense': {'w': struct(8, 16)}}},
            {'mu': {'dense': {'w': struct(8, 16)}}, 'count': struct(), 'key': struct(2, dtype='uint32')},
            id='params with other paths',
        ),
        pytest.param(
            P(),
            struct(8, 16),
            {'mu': struct(8, 8)},
            id='one bare array',
        ),
        pytest.param(
            TreePathShardingRule(('b', P())),
            {'w': struct(8, 16), 'b': struct(16)},
            {'mu': {'w': struct(8, 16), 'b': struct(16)}},
            id='a parameter without a spec',
        ),
        pytest.param(
            P('model'),
            {'w': struct(8, 16)},
            {'v_row': {'w': struct(8)}},
            id='a spec that the mesh refuses',
        ),
    ],
)
def test_messages(param_rule, params, state, snapshot):
    with snapshot.raises(ShardingError):
        HELPER.match_sharding_rule(OptimizerStateShardingRule(param_rule, params), state)


@pytest.mark.parametrize(
    ('param_rule', 'params', 'kind'),
    [
        ('fsdp', W, RuleError),
        ({'w': np.zeros((8, 16), np.float32)}, P(), RuleError),
        (P(), {}, RuleError),
        (P(), {'w': np.tanh, 'b': struct(8)}, RuleError),
        ({'w': P(), 'typo': P()}, {'w': struct(8), 'b': {'c': struct(8)}}, StructureError),
        ([P()], (struct(8),), StructureError),
    ],
)
def test_messages_of_the_constructor(param_rule, params, kind, snapshot):
    with snapshot.raises(kind):
        OptimizerStateShardingRule(param_rule, params)


# --- Values ---------------------------------------------------------------------------------------

RULES = [
    OptimizerStateShardingRule(BY_PATH, PARAMS),
    OptimizerStateShardingRule(SPECS, PARAMS),
    OptimizerStateShardingRule(P(), PARAMS),
    OptimizerStateShardingRule(P(), W),
    OptimizerStateShardingRule(P(), {'w': struct(8, 8)}),
    OptimizerStateShardingRule(P(), {'w': struct(8, 16, dtype='bfloat16')}),
    OptimizerStateShardingRule(P(), TrainState(1, struct(8), None, jax.random.key(0))),
]


@pytest.mark.parametrize('rule', RULES, ids=repr)
def test_rules_are_values(rule):
    for same in (pickle.loads(pickle.dumps(rule)), copy.deepcopy(rule)):
        assert same == rule
        assert hash(same) == hash(rule)
        assert repr(same) == repr(rule)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.param_groups = ()
    assert rule.is_pure


def test_different_rules_differ():
    assert len(set(RULES)) == len(RULES)
    assert all((a == b) == (a is b) for a in RULES for b in RULES)
    assert OptimizerStateShardingRule(BY_PATH, jax.eval_shape(lambda: PARAMS)) == RULES[0]
    assert not OptimizerStateShardingRule(PolicyShardingRule(by_rank), PARAMS).is_pure


def test_the_repr_is_short():
    assert repr(RULES[3]) == 'OptimizerStateShardingRule(P(), <1 parameter, 128 elements>)'
    assert repr(RULES[1]) == 'OptimizerStateShardingRule(<4 rules>, <4 parameters, 273 elements>)'


def test_no_array_is_kept_alive():
    array = jnp.zeros((8, 16))
    rule = OptimizerStateShardingRule(P(), {'w': array})
    array.delete()
    assert rule.apply({'mu': W}) == {'mu': {'w': P()}}
    assert not any(isinstance(part, jax.Array) for part in jax.tree.leaves(dataclasses.astuple(rule)))
