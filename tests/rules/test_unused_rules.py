"""Warnings about rules that unexpectedly shard nothing, and the cases without a warning."""

import warnings

import jax
import numpy as np
import pytest

from scalax.errors import UnshardedWarning
from scalax.sharding import (
    FSDPShardingRule,
    LogicalAxisShardingRule,
    MeshShardingHelper,
    OptimizerStateShardingRule,
    TreePathShardingRule,
)
from scalax.sharding import PartitionSpec as P

HELPER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
LAYER = {
    'attention': {'q': np.zeros((64, 64), 'f')},
    'mlp': {'up': np.zeros((64, 256), 'f'), 'bias': np.zeros(256, 'f')},
}
PARAMS = {'layers': [LAYER, LAYER], 'embedding': np.zeros((512, 64), 'f'), 'step': np.zeros((), 'f')}
STATE = {'count': np.zeros((), 'i'), 'mu': PARAMS, 'nu': PARAMS}
NORMS = {'norm': np.zeros(64, 'f'), 'scale': np.zeros(64, 'f')}
FSDP = FSDPShardingRule()
SMALL = FSDPShardingRule(min_fsdp_size=2**12)


def by_path(*pairs):
    return TreePathShardingRule(*pairs, ('.*', P()))


def warnings_of(function, *args):
    """Returns the warnings of a call, which must all point to lines of this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        function(*args)
    assert {warning.category for warning in caught} <= {UnshardedWarning}
    assert {warning.filename for warning in caught} <= {__file__}
    return [str(warning.message) for warning in caught]


def in_shard(rules, tree=PARAMS, helper=HELPER):
    return warnings_of(lambda: helper.shard(tree, rules))


def in_sjit(in_shardings, *args, out_shardings=None, helper=HELPER):
    """Returns the warnings of the first call of a function; later calls must not warn."""
    step = helper.sjit(lambda *args: args[0], in_shardings, out_shardings)
    first = warnings_of(step, *args)
    assert (
        warnings_of(step, *args)
        == warnings_of(step, *jax.tree.map(lambda x: x[:0] if np.ndim(x) else x, args))
        == []
    )
    return first


ALL_REPLICATED = (
    "FSDPShardingRule('fsdp') shards nothing: 7 arrays replicated over the 4 devices "
    'along fsdp. The largest, {}embedding: float32[512, 64], has 32,768 elements, and min_fsdp_size is '
    '1,048,576.\n'
    'What to do: pass min_fsdp_size=32768, or less to shard more of them. To replicate them on purpose, give '
    'PartitionSpec() in place of the rule.'
)


@pytest.mark.parametrize(
    'rule',
    [
        FSDP,
        P() & FSDP,
        TreePathShardingRule(('embedding', FSDP), ('', FSDP)),
        {**dict.fromkeys(PARAMS, FSDP)},
    ],
    ids=['alone', 'after &', 'inside', 'in a tree'],
)
def test_all_arrays_are_too_small(rule):
    assert in_shard(rule) == [f'shard: {ALL_REPLICATED.format("")}']
    assert in_sjit((rule,), PARAMS) == [f'<lambda>: {ALL_REPLICATED.format("args[0]/")}']


def test_arguments_and_outputs_count_together():
    step = HELPER.sjit(lambda: PARAMS, out_shardings=FSDP)
    assert warnings_of(step) == [f'<lambda>: {ALL_REPLICATED.format("")}'] and warnings_of(step) == []
    [message] = in_sjit((FSDP, P('fsdp')), PARAMS, np.ones((8, 2), 'f'), out_shardings=FSDP)
    assert message == f'<lambda>: {ALL_REPLICATED.format("args[0]/")}'
    [message] = warnings_of(HELPER.sjit(lambda p: p, args_sharding_constraint=FSDP), PARAMS)
    assert message == f'<lambda>: {ALL_REPLICATED.format("p/")}'


def test_no_dimension_is_divisible():
    [message] = in_shard(SMALL, {'w': np.zeros((99, 101), 'f'), 'b': np.zeros(4, 'f')})
    assert (
        '2 arrays replicated' in message
        and 'The largest, w: float32[99, 101], has no free dimension' in message
    )
    assert 'What to do: choose sizes that are divisible, or a mesh axis of another size.' in message


ONE = MeshShardingHelper([1], ['fsdp'], devices=jax.devices()[:1])
ALONG_TP = MeshShardingHelper([1, 8], ['fsdp', 'tp'])


@pytest.mark.medium
@pytest.mark.parametrize(
    ('rules', 'tree', 'helper'),
    [
        (SMALL, PARAMS, HELPER),
        (FSDP, PARAMS, ONE),
        (FSDP, PARAMS, ALONG_TP),
        (FSDP, NORMS, HELPER),  # such as the factored statistics of an optimizer
        (FSDP, {'count': 1}, HELPER),
        (P() | FSDP, PARAMS, HELPER),
        (P(), PARAMS, HELPER),
        (by_path(('mlp/up', P(None, 'tp'))) & FSDP, PARAMS, HELPER),
        (by_path(('bias', P())), PARAMS, HELPER),
        (OptimizerStateShardingRule(SMALL, PARAMS), STATE, HELPER),
        (by_path(('opt_state/.*(mu|nu)/', P('fsdp'))), {'params': PARAMS}, HELPER),  # ZeRO, in an evaluation
        (LogicalAxisShardingRule({'embed': 'data'}, [('', '... embed')]), PARAMS, HELPER),
    ],
    ids=lambda value: None,
)
def test_no_warnings_for_correct_rules(rules, tree, helper):
    assert in_shard(rules, tree, helper) == in_sjit((rules,), tree, helper=helper) == []


def test_one_of_the_trees_of_a_call_is_enough():
    assert in_sjit((SMALL, SMALL), PARAMS, {'ema': np.zeros((8, 8), 'f')}) == []
    rule = by_path(('attention', P('fsdp')), ('mlp', P('tp')), ('embedding', P('fsdp')))
    parts = {'mlp': LAYER['mlp'], 'embeding': np.zeros((512, 512), 'f')}
    assert len(in_sjit((rule,), parts)) == 1
    assert in_sjit((rule, rule), PARAMS, parts) == []


# --- Regexes ------------------------------------------------------------------------------------------

HEAD = ' regexes that match no path:\n'
REMEDY = (
    '\nWhat to do: correct or remove them; helper.explain(tree, rules) shows which rule decides about each '
    'leaf. To replicate such arrays on purpose, give them a regex of their own with PartitionSpec().'
)
Q = 'layers/1/attention/q: float32[64, 64]'


@pytest.mark.parametrize(
    ('rule', 'line'),
    [
        (
            by_path(('atention/q', P('fsdp')), ('mlp', P('tp'))),
            f"'atention/q': 'atention' is in no path, did you mean 'attention', as in {Q}?",
        ),
        (  # the arrays are sharded, but not by this rule
            by_path((r'layers/\d+/attn/q', P(None, 'tp'))) & SMALL,
            rf"'layers/\\d+/attn/q': 'attn' is in no path, did you mean 'attention', as in {Q}?",
        ),
        (
            TreePathShardingRule(('mlq', SMALL), strict=False),
            "'mlq': 'mlq' is in no path, did you mean 'mlp', as in layers/1/mlp/up: float32[64, 256]?",
        ),
    ],
)
def test_a_regex_that_matches_nothing(rule, line):
    assert in_shard(rule) == [f'shard:{HEAD}  {line}{REMEDY}']
    [message] = in_sjit((rule,), PARAMS)
    assert message.startswith(f'<lambda>:{HEAD}')


def test_in_the_rule_of_an_optimizer_s_state():
    rule = by_path(('atention', P('fsdp')), ('mlp', P('tp')))
    [message] = in_shard(OptimizerStateShardingRule(rule, PARAMS), STATE)
    assert "'atention' is in no path, did you mean 'attention'" in message
    [message] = in_sjit((rule, OptimizerStateShardingRule(rule, PARAMS)), PARAMS, STATE)
    assert message.count('atention/') == 0 and message.count("'atention':") == 1


ROUTER = {'router': np.zeros((8, 8), 'f')}
TABLE = (
    *(('embedding', P('tp')), ('attention/q', P(None, 'tp')), ('attention/o', P('tp')), ('mlp', P('tp'))),
    *(('lm_head', P(None, 'tp')), ('norm', P())),
)


@pytest.mark.parametrize(
    'tree',
    [PARAMS, LAYER, {'embedding': PARAMS['embedding']}, LAYER['attention'], ROUTER, {**LAYER, **ROUTER}],
    ids=['all', 'layer', 'embedding', 'inside', 'router', 'layer with a router'],
)
def test_a_table_may_be_for_more_than_one_tree(tree):
    rule = by_path(*TABLE)
    assert in_shard(rule, tree) == in_sjit((rule,), tree) == []


def test_a_regex_that_replicates_silences_the_warning():
    pairs = ('atention', P('fsdp')), ('mlp', P('tp'))
    assert len(in_shard(by_path(*pairs))) == 1
    assert in_shard(by_path(*pairs, ('attention', P()))) == []
