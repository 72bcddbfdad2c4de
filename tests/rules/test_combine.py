"""A mesh axis used twice, by one rule or two: an error, or a line of a report, names the rules."""

import pytest
from jax.sharding import PartitionSpec as P

from scalax.errors import ShardingError
from scalax.sharding import (
    FSDPShardingRule,
    LogicalAxisShardingRule,
    MeshShardingHelper,
    OptimizerStateShardingRule,
    PolicyShardingRule,
    TreePathShardingRule,
)
from tests.support.compose_cases import last_on_tp
from tests.support.leaves import leaf

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
TWICE = P('tp', 'tp')


def twice(path, leaf):
    return TWICE


@pytest.mark.parametrize(
    ('rule', 'origin'),
    [
        ({'w': TWICE}, 'the spec given'),
        (TreePathShardingRule(('w', TreePathShardingRule(('.*', TWICE)))), "regex 'w' -> regex '.*'"),
        (TreePathShardingRule(('w', P())) & TWICE, "regex 'w' & the spec given"),
        (TWICE & TreePathShardingRule(('w', P('fsdp'))), 'the spec given'),
        (FSDPShardingRule('fsdp') | PolicyShardingRule(twice), 'PolicyShardingRule(twice)'),
        (
            OptimizerStateShardingRule(TWICE, {'w': leaf(8, 8)}),
            'OptimizerStateShardingRule -> the spec given',
        ),
    ],
)
def test_an_axis_used_twice_is_an_error_that_names_all_rules(rule, origin):
    with pytest.raises(ShardingError) as caught:
        HELPER.match_sharding_rule(rule, {'w': leaf(8, 8)})
    assert str(caught.value) == (
        'One leaf cannot be sharded as asked (mesh: fsdp=4, tp=2):\n'
        '  w: float32[8, 8]\n'
        "    mesh axis 'tp' is used more than once (dimensions 0, 1)\n"
        f'    asked for: {TWICE} from {origin}\n'
        'What to do: use each mesh axis at most once in a spec.'
    )


NAMES = "regex 'w': 'f e'"


@pytest.mark.parametrize(
    ('second', 'reason'),
    [
        (P(None, 'tp'), 'the spec given asked for tp on dimension 1: in use'),
        (TreePathShardingRule(('.*', P(None, 'tp'))), "regex '.*' asked for tp on dimension 1: in use"),
        (
            PolicyShardingRule(last_on_tp),
            'PolicyShardingRule(last_on_tp) asked for tp on dimension 1: in use',
        ),
        (
            OptimizerStateShardingRule(P(None, 'tp'), {'w': leaf(8, 8)}),
            'OptimizerStateShardingRule -> the spec given asked for tp on dimension 1: in use',
        ),
        (
            LogicalAxisShardingRule({'f': 'fsdp', 'e': 'tp'}, [('w', 'f e')]),
            f'{NAMES} asked for tp on dimension 1: in use; {NAMES} asked for fsdp on dimension 0: not free',
        ),
        (
            TreePathShardingRule(('', LogicalAxisShardingRule({'f': 'tp', 'e': 'tp'}, [('w', 'f e')]))),
            f'{NAMES} asked for tp on dimension 1: in use',
        ),
        (FSDPShardingRule('tp', min_fsdp_size=1), 'FSDP: tp in use'),
    ],
)
def test_an_axis_in_use_is_dropped_and_reported(second, reason):
    (row,) = HELPER.explain({'w': leaf(8, 8)}, TreePathShardingRule(('^w$', P('tp'))) & second).rows
    assert (row.path, row.spec, row.rule, row.reason) == ('w', P('tp'), "regex '^w$'", reason)


def test_some_named_dimensions_find_their_axes_in_use():
    named = LogicalAxisShardingRule({'e': 'tp', 'f': ('fsdp', 'tp')}, [('w', 'f _ e')])
    rule = TreePathShardingRule(('^w$', P(None, 'tp'))) & named
    (row,) = HELPER.explain({'w': leaf(8, 8, 8)}, rule).rows
    assert (row.spec, row.rule) == (P('fsdp', 'tp'), "regex '^w$' & regex 'w': 'f _ e'")
    assert row.reason == "f -> fsdp (tp in use); regex 'w': 'f _ e' asked for tp on dimension 2: in use"


ON_TP = TreePathShardingRule(('', P('tp')))


@pytest.mark.parametrize('rule', [P('tp') & ON_TP, ON_TP & (ON_TP & P()), ON_TP & (P() & ON_TP)])
def test_no_note_if_the_dimension_already_has_the_axis(rule):
    (row,) = HELPER.explain({'w': leaf(8, 8)}, rule).rows
    assert (row.spec, row.reason) == (P('tp'), '')
