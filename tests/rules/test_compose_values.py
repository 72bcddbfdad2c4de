"""Composed rules as values: operands of the operators, equality, repr, pickling."""

import copy
import pickle

import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalax._core.pytree.paths import NamedTree
from scalax.errors import RuleError
from scalax.rules._rule import decide
from scalax.sharding import (
    FSDPShardingRule,
    MeshShardingHelper,
    PolicyShardingRule,
    TreePathShardingRule,
)
from tests.support.compose_cases import FSDP, STRICT_MISS, FirstOnTp, last_on_tp, specs
from tests.support.leaves import leaf


@pytest.fixture(scope='module')
def helper():
    return MeshShardingHelper([4, 2], ['fsdp', 'tp'])


def by_path(value, **options):
    return TreePathShardingRule(('w', value), **options)


# --- Operands --------------------------------------------------------------------------------------


def test_a_named_sharding_may_be_either_operand(helper):
    sharding = NamedSharding(helper.mesh, P('tp'))
    tree = {'w': leaf(16, 8)}
    assert (
        specs(helper, sharding | FSDP, tree) == specs(helper, STRICT_MISS | sharding, tree) == {'w': P('tp')}
    )
    assert specs(helper, sharding & FSDP, tree) == {'w': P('tp', 'fsdp')}
    assert specs(helper, FSDP & NamedSharding(helper.mesh, P(None, 'tp')), tree) == {'w': P('fsdp', 'tp')}
    pinned = NamedSharding(helper.mesh, P('tp'), memory_kind='pinned_host')
    assert helper.match_sharding_rule(pinned & FSDP, tree)['w'].memory_kind == 'pinned_host'
    assert sharding | FSDP == NamedSharding(helper.mesh, P('tp')) | FSDP


@pytest.mark.parametrize('operand', [1, 'fsdp', ('fsdp',), ['fsdp'], {'w': FSDP}, int, np.zeros(2), object()])
@pytest.mark.parametrize('operator', [lambda a, b: a | b, lambda a, b: a & b])
def test_other_operands_are_type_errors(operator, operand):
    with pytest.raises(TypeError, match='unsupported operand'):
        operator(FSDP, operand)
    with pytest.raises(TypeError, match='unsupported operand'):
        operator(operand, FSDP)


@pytest.mark.parametrize('dims', [0, -1, True, 1.0, '1', None])
def test_stacked_needs_a_positive_number(dims):
    with pytest.raises(RuleError) as caught:
        FSDP.stacked(dims)
    assert str(caught.value) == f'stacked() takes a positive number of dimensions, got {dims!r}'


@pytest.mark.parametrize('kind', [None, '', 1])
def test_a_memory_kind_is_a_name(kind):
    with pytest.raises(RuleError) as caught:
        FSDP.with_memory_kind(kind)
    assert str(caught.value) == f"a memory kind is a name such as 'pinned_host', got {kind!r}"


# --- Values ---------------------------------------------------------------------------------------

VALUES = [
    lambda: FSDP | P('tp'),
    lambda: P('tp', None) | FSDP,
    lambda: P() | FSDP | by_path(None) | P(),
    lambda: by_path(P(None, 'tp')) & FSDP,
    lambda: P('a') & (P('b') & FSDP),
    lambda: (FSDP | P('tp')) & (by_path(FSDP & P('tp'), strict=False) | FSDP),
    lambda: FSDP.stacked(),
    lambda: (P('tp') & FSDP).stacked(2) | FSDP.stacked(1).stacked(1),
    lambda: (P('tp') & FSDP.with_memory_kind('device')).with_memory_kind('pinned_host'),
    lambda: PolicyShardingRule(last_on_tp) & (FirstOnTp() | FSDP),
]
NAMES = {'P': P, 'PartitionSpec': P, **{kind.__name__: kind for kind in (FSDPShardingRule, FirstOnTp)}}


@pytest.mark.parametrize('number', range(len(VALUES)))
def test_compositions_are_values(number):
    rule, same = VALUES[number](), VALUES[number]()
    assert rule == same and hash(rule) == hash(same) and rule is not same
    assert all((rule == make()) is (i == number) for i, make in enumerate(VALUES))
    assert pickle.loads(pickle.dumps(rule)) == copy.deepcopy(rule) == copy.copy(rule) == rule
    with pytest.raises(AttributeError):
        rule.dims = 1
    if 'function' not in repr(rule):
        assert eval(repr(rule), {**NAMES, 'TreePathShardingRule': TreePathShardingRule}) == rule


def test_repr():
    rule = (P('tp') & FSDPShardingRule()).stacked(1) | FSDPShardingRule('dp')
    p = repr(P('tp'))
    assert repr(rule) == f"(({p} & FSDPShardingRule('fsdp')).stacked(1) | FSDPShardingRule('dp'))"


def test_equal_leaves_share_one_answer():
    tree = NamedTree.of([np.zeros((16, 8), np.float32)] * 5 + [np.zeros((8, 16), np.float32)] * 5)
    rule = (TreePathShardingRule(('.*', P('tp'))) & FSDP).stacked(1).with_memory_kind('device')
    for part in (rule, rule.parts[0], rule.parts[0].parts[0]):
        assert len({id(answer) for answer in decide(part, tree, {'fsdp': 4, 'tp': 2})}) <= 2
