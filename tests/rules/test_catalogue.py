"""The tables of the catalogue, name by name, and their rules. Entire models: test_catalogue_models.py."""

import math
import pickle
import re

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from benchmarks.unchanged import experts
from examples.llama.model import ModelConfig, forward, init_params
from scalax.errors import RuleError, ShardingError
from scalax.rules import catalogue
from scalax.rules._rule import looks_at_paths_only
from scalax.rules.catalogue import (
    EXPERT_PARALLEL,
    GEMMA,
    GPT,
    GPT2,
    LLAMA,
    MIXTRAL,
    SEQUENCE_PARALLEL,
    SPLIT_HEADS,
    T5,
    TENSOR_PARALLEL,
    VIT,
    ExactRankRule,
    activations,
    rule,
)
from scalax.sharding import FSDPShardingRule, MeshShardingHelper

HELPER = MeshShardingHelper.from_mesh(AbstractMesh((4, 2), ('fsdp', 'tp')))
TABLES = {'LLAMA': LLAMA, 'GEMMA': GEMMA, 'MIXTRAL': MIXTRAL, 'GPT': GPT, 'GPT2': GPT2, 'VIT': VIT, 'T5': T5}

COLUMN, ROW = P('fsdp', 'tp'), P('tp', 'fsdp')
MATRIX, HEADS, VECTOR = (64, 128), (64, 4, 16), (64,)

# (table, leaf path, shape, spec): every name that a row matches, at least once.
NAMES = [
    *[
        (LLAMA, path, MATRIX, COLUMN)
        for path in [
            'self_attn/q_proj/kernel',
            'self_attn/k_proj/kernel',
            'self_attn/v_proj/kernel',
            'self_attn/qkv_proj/kernel',
            'mlp/gate_proj/kernel',
            'mlp/up_proj/kernel',
            'mlp/gate_up_proj/kernel',
            'attention/wq/kernel',
            'attention/wk',
            'attention/wqkv',
            'feed_forward/w1',
            'feed_forward/w3',
            'attention/query',
            'attention/key',
            'attention/value',
            'self_attention/value',
            'attn/value',
            'attention/value/value',
            'attention/value/kernel/value',
            'attention/query_proj/kernel',
            'attn/qkv',
            'mlp/gate',
            'mlp/up/value',
            'mlp/wi_0/kernel',
            'mlp/wi_1/kernel',
            'lm_head/kernel',
            'decoder/logits_dense/kernel',
            # (out, in)
            'self_attn/o_proj/weight',
            'mlp/down_proj/weight',
            'attention/output_proj/weight',
        ]
    ],
    *[
        (LLAMA, path, MATRIX, ROW)
        for path in [
            'self_attn/o_proj/kernel',
            'attention/wo/kernel',
            'attention/out',
            'mlp/down_proj/kernel/value',
            'feed_forward/w2',
            'mlp/down',
            'mlp/wo/kernel',
            'embed_tokens/embedding',
            'wte/embedding/value',
            'token_embedder/embedding',
            'embed/weight',
            'opt/mu/embed_tokens/embedding',
            # (out, in)
            'self_attn/q_proj/weight',
            'attention/value_proj/weight',
            'attention/value/weight',
            'mlp/up_proj/weight',
            'lm_head/weight',
        ]
    ],
    *[
        (LLAMA, path, VECTOR, P(None))
        for path in [
            'self_attn/o_proj/bias',
            'mlp/down_proj/bias',
            'self_attn/q_norm/scale/value',
            'attention/query_ln/scale',
            'input_layernorm/weight',
            'LayerNorm_0/bias',
            'ln_f/kernel',
        ]
    ],
    (LLAMA, 'self_attn/q_proj/bias', VECTOR, P('tp')),
    (GEMMA, 'embedder/input_embedding', MATRIX, ROW),
    (GEMMA, 'attn/q_einsum/w', (4, 64, 16), P('tp', 'fsdp', None)),
    (GEMMA, 'attn/kv_einsum/w', (2, 4, 64, 16), P(None, 'tp', 'fsdp', None)),
    (GEMMA, 'attn/qkv_einsum/w', (3, 4, 64, 16), P(None, 'tp', 'fsdp', None)),
    (GEMMA, 'attn/attn_vec_einsum/w', (4, 16, 64), P('tp', None, 'fsdp')),
    (GEMMA, 'mlp/gating_einsum', (2, 256, 64), P(None, 'tp', 'fsdp')),
    (GEMMA, 'mlp/gating_einsum/w', (2, 256, 64), P(None, 'tp', 'fsdp')),
    (GEMMA, 'mlp/linear', MATRIX, ROW),
    (GEMMA, 'mlp/linear/w', MATRIX, ROW),
    (MIXTRAL, 'block_sparse_moe/gate/kernel', (64, 8), P('fsdp', None)),
    (MIXTRAL, 'mlp/gate/weight', (8, 64), P(None, 'fsdp')),
    (MIXTRAL, 'moe/router/kernel', (64, 8), P('fsdp', None)),
    (MIXTRAL, 'experts/0/w1/kernel', MATRIX, P(('expert', 'fsdp'), 'tp')),
    (MIXTRAL, 'experts/0/w3/weight', MATRIX, P('tp', ('expert', 'fsdp'))),
    (MIXTRAL, 'experts/0/down_proj/kernel', MATRIX, P('tp', ('expert', 'fsdp'))),
    (MIXTRAL, 'experts/0/w2/weight', MATRIX, P(('expert', 'fsdp'), 'tp')),
    (MIXTRAL, 'experts/w1', (8, 64, 128), P('expert', 'fsdp', 'tp')),
    (MIXTRAL, 'experts/gate_proj/weight', (8, 128, 64), P('expert', 'tp', 'fsdp')),
    (MIXTRAL, 'MoeBlock_0/wi_0', (8, 64, 128), P('expert', 'fsdp', 'tp')),
    (MIXTRAL, 'MoeBlock_0/wo', (8, 128, 64), P('expert', 'tp', 'fsdp')),
    (MIXTRAL, 'experts/down_proj/weight', (8, 64, 128), P('expert', 'fsdp', 'tp')),
    *[
        (GPT, path, MATRIX, COLUMN)
        for path in [
            'attn/c_attn/kernel',
            'attention/query_key_value/kernel',
            'attn/attention/q_proj/kernel',
            'mlp/c_fc/kernel',
            'mlp/fc_in/kernel',
            'mlp/dense_h_to_4h/kernel',
            'embed_out/kernel',
            'attn/c_proj/weight',
        ]
    ],
    *[
        (GPT, path, MATRIX, ROW)
        for path in [
            'attn/c_proj/kernel',
            'attn/out_proj/kernel',
            'attention/dense/kernel',
            'mlp/fc_out/kernel',
            'mlp/dense_4h_to_h/kernel',
            'wpe/embedding',
            'embed_in/embedding',
            'attn/c_attn/weight',
            'lm_head/weight',
        ]
    ],
    (GPT, 'attn/c_attn/bias', VECTOR, P('tp')),
    (GPT, 'attn/c_proj/bias', VECTOR, P(None)),
    (GPT, 'lm_head/bias', VECTOR, P('tp')),
    (GPT, 'ln_1/scale', VECTOR, P(None)),
    (GPT2, 'attn/c_attn/kernel', MATRIX, ROW),
    (GPT2, 'crossattention/q_attn/weight', MATRIX, COLUMN),
    (GPT2, 'mlp/c_proj/kernel', MATRIX, COLUMN),
    (GPT2, 'mlp/c_proj/weight', MATRIX, ROW),
    (VIT, 'patch_embeddings/projection/kernel', (14, 14, 3, 64), P(None, None, None, 'fsdp')),
    (VIT, 'patch_embed/proj/weight', (64, 3, 14, 14), P('fsdp', None, None, None)),
    (VIT, 'embedding/bias', VECTOR, P()),
    (VIT, 'Transformer/posembed_input/pos_embedding', (1, 257, 64), P(None, None, 'fsdp')),
    (VIT, 'pos_embed', (257, 64), P(None, 'fsdp')),
    (VIT, 'cls_token', (1, 1, 64), P()),
    (VIT, 'MAPHead_0/probe', (1, 1, 64), P()),
    (VIT, 'pooler/dense/kernel', MATRIX, COLUMN),
    (VIT, 'fc/weight', MATRIX, ROW),
    (VIT, 'head/bias', VECTOR, P('tp')),
    (VIT, 'attention/output/dense/kernel', MATRIX, ROW),
    (VIT, 'attn/qkv/weight', MATRIX, ROW),
    (VIT, 'mlp/fc2/weight', MATRIX, COLUMN),
    (VIT, 'MlpBlock_0/Dense_0/kernel', MATRIX, COLUMN),
    (VIT, 'MlpBlock_0/Dense_0/bias', VECTOR, P('tp')),
    (VIT, 'MlpBlock_0/Dense_1/bias', VECTOR, P(None)),
    (VIT, 'encoder_norm/scale', VECTOR, P(None)),
    (T5, 'shared/embedding', MATRIX, ROW),
    (T5, 'SelfAttention/relative_attention_bias/embedding', (32, 64), P()),
    (T5, 'decoder/relpos_bias/rel_embedding', (64, 32), P()),
    (T5, 'layer/0/SelfAttention/q/kernel', MATRIX, COLUMN),
    (T5, 'layer/1/EncDecAttention/o/kernel', MATRIX, ROW),
    (T5, 'encoder_decoder_attention/value/kernel', MATRIX, COLUMN),
    (T5, 'self_attention/out/kernel', MATRIX, ROW),
    (T5, 'DenseReluDense/wi/kernel', MATRIX, COLUMN),
    (T5, 'DenseReluDense/wi_0/weight', MATRIX, ROW),
    (T5, 'mlp/wo/weight', MATRIX, COLUMN),
    (T5, 'logits_dense/kernel', MATRIX, COLUMN),
    (T5, 'lm_head/weight', MATRIX, ROW),
    (T5, 'layer_norm/weight', VECTOR, P(None)),
    ((*SPLIT_HEADS, *LLAMA), 'self_attention/query/kernel', HEADS, P('fsdp', 'tp', None)),
    ((*SPLIT_HEADS, *LLAMA), 'self_attention/value/kernel/value', HEADS, P('fsdp', 'tp', None)),
    ((*SPLIT_HEADS, *VIT), 'MultiHeadDotProductAttention_0/query/bias', (4, 16), P('tp', None)),
    ((*SPLIT_HEADS, *LLAMA), 'self_attention/out/kernel', (4, 16, 64), P('tp', None, 'fsdp')),
]


def tree(leaves):
    """Converts {'a/b/kernel': (2, 3)} to a flat dict of abstract arrays, whose leaf paths are its keys."""
    return {path: jax.ShapeDtypeStruct(shape, 'float32') for path, shape in leaves.items()}


@pytest.mark.parametrize(('table', 'path', 'shape', 'expected'), NAMES)
def test_spec_of_each_name(table, path, shape, expected):
    assert spec_of(table, path, *shape) == expected


# GEMMA and MIXTRAL end with LLAMA, and GPT2 with GPT.
ENDS = {GEMMA: LLAMA, MIXTRAL: LLAMA, GPT2: GPT}


@pytest.mark.parametrize('name', TABLES)
def test_every_row_is_used(name):
    table = TABLES[name]
    paths = [path for of, path, _, _ in NAMES if of in (table, ENDS.get(table))]
    if name == 'GPT2':  # names in GPT that GPT-2 does not have
        paths += [f'attn/{key}_proj/weight' for key in ('key', 'out')]
    first = {next(n for n, (regex, _) in enumerate(table) if re.search(regex, path)) for path in paths}
    assert [regex for n, (regex, _) in enumerate(table) if n not in first] == []


@pytest.mark.parametrize('name', TABLES)
def test_reports_list_only_the_users_unused_rows(name):
    leaves = {'layers/norm/scale': (4, 64)}
    for stacked in ('', 'layers/'):
        shapes = leaves if stacked else {'norm/scale': (64,)}
        report = HELPER.explain(tree(shapes), rule(TABLES[name], stacked=stacked, expert=None))
        assert (report.unused_rules, report.shadowed_rules) == ((), ())
    table = (('wrong_name', P()), *TABLES[name], ('norm/scale', P()))
    report = HELPER.explain(tree(leaves), rule(table, stacked='layers/'))
    assert (report.unused_rules, report.shadowed_rules) == (('wrong_name',), ('norm/scale',))
    report = HELPER.explain(tree({'norm/scale': (64,)}), rule(TABLES[name], stacked='layer/'))
    assert report.unused_rules == ('layer/',)


@pytest.mark.parametrize('stacked', ['', 'layers/'])
def test_outputs_of_shard_map_take_a_table(stacked):
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
    table = rule(LLAMA, stacked=stacked)
    assert looks_at_paths_only(table)
    shape = (3, 8, 8) if stacked else (8, 8)
    leaves = {'layers/up_proj/kernel': np.arange(math.prod(shape), dtype='f').reshape(shape)}
    twice = helper.shard_map(lambda x: jax.tree.map(lambda block: 2 * block, x), table, table)
    out = twice(leaves)['layers/up_proj/kernel']
    assert out.sharding.spec == (P(None, *COLUMN) if stacked else COLUMN)
    np.testing.assert_array_equal(out, 2 * leaves['layers/up_proj/kernel'])


def spec_of(table, path, *shape, **axes):
    (spec,) = jax.tree.leaves(rule(table, **axes).apply(tree({path: shape})))
    return spec


@pytest.mark.parametrize(
    ('axes', 'expected'),
    [
        ({'fsdp': 'data', 'tp': 'model', 'expert': 'ep'}, P(('ep', 'data'), 'model')),
        ({'fsdp': ('replica', 'data')}, P(('expert', 'replica', 'data'), 'tp')),
        ({'expert': None}, P('fsdp', 'tp')),
        ({'expert': None, 'fsdp': None}, P(None, 'tp')),
    ],
)
def test_axes_are_renamed(axes, expected):
    assert spec_of(MIXTRAL, 'experts/0/w1/kernel', 64, 128, **axes) == expected


ROW_0 = 'catalogue.rule, row 0 of the table: '
NO_TABLE = (
    'catalogue.rule: the table is a tuple of rows (regex, PartitionSpec), such as catalogue.LLAMA, got '
)
STAR = '; unpack a list of pairs: *pairs'


@pytest.mark.parametrize(
    ('table', 'arguments', 'message'),
    [
        ('LLAMA', {}, f"{NO_TABLE}'LLAMA'"),
        (None, {}, f'{NO_TABLE}None'),
        (('w', P('fsdp')), {}, f"{ROW_0}expected a pair (regex, PartitionSpec), got 'w'{STAR}"),
        (
            (SPLIT_HEADS, LLAMA),
            {},
            f'{ROW_0}expected a pair (regex, PartitionSpec), got {repr(SPLIT_HEADS)[:57]}...{STAR}',
        ),
        (
            (('(', P()),),
            {},
            f"{ROW_0}invalid regex '(': missing ), unterminated subpattern (position 0)",
        ),
        (
            (('w', 'fsdp'),),
            {},
            "catalogue.rule, row 0 of the table ('w'): the value is a PartitionSpec, a rule or None, got "
            "'fsdp'",
        ),
        (
            (('w', P(None, 'fdsp')),),
            {},
            f"{ROW_0}{P(None, 'fdsp')} names 'fdsp'; the axes of a table are fsdp, "
            'tp, expert, and the arguments with these names map them to mesh axes',
        ),
        (LLAMA, {'fsdp': 3}, 'catalogue.rule: fsdp is a mesh axis, a tuple of them or None, got 3'),
        (
            LLAMA,
            {'tp': ('tp', '')},
            "catalogue.rule: tp is a mesh axis, a tuple of them or None, got ('tp', '')",
        ),
        (
            LLAMA,
            {'stage': 'stage'},
            "catalogue.rule: stage='stage' shards stacked layers, so pass a regex that finds them, such as "
            "stacked='layers/'",
        ),
        (
            LLAMA,
            {'stacked': True},
            'catalogue.rule, stacked: the regex is a string, got True',
        ),
        (
            LLAMA,
            {'stacked': 'layers/('},
            "catalogue.rule, stacked: invalid regex 'layers/(': missing ), unterminated subpattern "
            '(position 7)',
        ),
        (LLAMA, {'on_indivisible': 'pad'}, "on_indivisible is 'error', 'replicate' or 'warn', got 'pad'"),
    ],
)
def test_wrong_arguments(table, arguments, message):
    with pytest.raises(RuleError) as caught:
        rule(table, **arguments)
    assert str(caught.value) == message


def test_axes_that_a_table_does_not_use_may_be_the_same():
    assert spec_of(LLAMA, 'mlp/up', 8, 8, fsdp='expert') == P('expert', 'tp')


def test_a_users_rows_come_first():
    assert spec_of((('q_proj', P('tp', None)), *LLAMA), 'q_proj/kernel', 8, 8) == P('tp', None)


def test_an_unknown_name_is_an_error_and_its_remedies_work(snapshot):
    params = tree({'adapter/kernel': (64, 64)})
    with pytest.raises(ShardingError) as caught:
        HELPER.match_sharding_rule(rule(LLAMA), params)
    (problem,) = caught.value.problems
    assert problem.detail == "no regex of the rule matches the path 'adapter/kernel'"
    snapshot(problem.hint)
    row = ('adapter', P('fsdp', 'tp'))
    assert HELPER.match_sharding_rule(rule((row, *LLAMA)), params)['adapter/kernel'].spec == row[1]
    assert HELPER.match_sharding_rule(rule(LLAMA) | P(), params)['adapter/kernel'].spec == P()


def test_a_matrix_with_a_norm_in_its_name_is_not_replicated():
    with pytest.raises(ShardingError, match='the spec is for arrays of rank 1, but this array has rank 2'):
        HELPER.match_sharding_rule(rule(LLAMA), tree({'norm_mlp/kernel': MATRIX}))


def test_wrong_rank(snapshot):
    with pytest.raises(ShardingError) as caught:
        HELPER.match_sharding_rule(rule(LLAMA), tree({'layers/q_proj/kernel': (80, 8192, 1024)}))
    (problem,) = caught.value.problems
    assert problem.kind == 'rank'
    assert problem.leaf == 'layers/q_proj/kernel: float32[80, 8192, 1024]'
    assert problem.detail == 'the spec is for arrays of rank 2, but this array has rank 3'
    assert problem.rule.startswith("regex '(^|/)([qkv]_proj|")
    snapshot(problem.hint)


def test_stacks_over_stages():
    staged = rule(LLAMA, stacked='layers/', stage='stage')
    shapes = {
        'layers/up_proj/kernel': (8, 64, 256),
        'layers/norm/scale': (8, 64),
        'lm_head/kernel': (64, 512),
    }
    helper = MeshShardingHelper.from_mesh(AbstractMesh((2, 4, 2), ('stage', 'fsdp', 'tp')))
    shardings = helper.match_sharding_rule(staged, tree(shapes))
    assert {path: sharding.spec for path, sharding in shardings.items()} == {
        'layers/up_proj/kernel': P('stage', *COLUMN),
        'layers/norm/scale': P('stage'),
        'lm_head/kernel': COLUMN,
    }
    with pytest.raises(ShardingError, match=r'dimension 0 of size 7 is not divisible by 2 \(stage=2\)'):
        helper.match_sharding_rule(staged, tree({'layers/up_proj/kernel': (7, 64, 256)}))
    with pytest.raises(ShardingError, match='rank 1 without its stack of layers'):
        helper.match_sharding_rule(staged, tree({'layers/up_proj/kernel': (64, 256)}))


@pytest.mark.parametrize('stacks', [rule(LLAMA, stacked='layers/'), rule(LLAMA).stacked(1)])
def test_wrong_rank_without_a_stack(stacks, snapshot):
    with pytest.raises(ShardingError) as caught:
        HELPER.match_sharding_rule(stacks, tree({'layers/0/q_proj/kernel': (64, 64)}))
    (problem,) = caught.value.problems
    assert problem.leaf == 'layers/0/q_proj/kernel: float32[64, 64]'
    assert problem.detail == (
        'the spec is for arrays of rank 2, but this array has rank 1 without its stack of layers'
    )
    snapshot(problem.hint)


def test_a_later_rule_does_not_hide_a_wrong_rank():
    composed = rule(LLAMA) | FSDPShardingRule()
    with pytest.raises(ShardingError, match='the spec is for arrays of rank 2'):
        HELPER.match_sharding_rule(composed, tree({'layers/q_proj/kernel': (80, 8192, 1024)}))


def test_values():
    exact = ExactRankRule(('w', P('fsdp', None)), strict=False)
    assert repr(exact) == f"ExactRankRule(('w', {P('fsdp', None)!r}), strict=False)"
    assert pickle.loads(pickle.dumps(rule(LLAMA))) == rule(LLAMA)
    assert hash(rule(T5)) == hash(rule(T5)) and rule(LLAMA) != rule(GEMMA)
    assert rule(LLAMA) != rule(LLAMA, tp='model')


def test_public_names_are_documented():
    assert set(catalogue.__all__) >= set(TABLES)
    assert all(f'`{name}`' in catalogue.__doc__ for name in (*TABLES, 'SPLIT_HEADS', *LAYOUTS))


LAYOUTS = {
    'TENSOR_PARALLEL': TENSOR_PARALLEL,
    'SEQUENCE_PARALLEL': SEQUENCE_PARALLEL,
    'EXPERT_PARALLEL': EXPERT_PARALLEL,
}


def test_activations():
    assert activations({**TENSOR_PARALLEL, **SEQUENCE_PARALLEL}, batch=('data', 'fsdp'), tp='model') == {
        'residual': P(('data', 'fsdp'), 'model'),
        'block_input': P(('data', 'fsdp')),
        'query': P(('data', 'fsdp'), None, 'model'),
        'key_value': P(('data', 'fsdp'), None, 'model'),
        'hidden': P(('data', 'fsdp'), None, 'model'),
        'logits': P(('data', 'fsdp'), None, 'model'),
    }
    assert activations(EXPERT_PARALLEL) == {
        'taken': P(None, ('fsdp', 'expert')),
        'arrived': P('expert', 'fsdp'),
        'out': P('expert', 'fsdp'),
        'returned': P(None, ('fsdp', 'expert')),
    }
    assert activations({'own': P('tp')}, tp=None) == {'own': P(None)}


@pytest.mark.parametrize(
    ('layout', 'arguments', 'message'),
    [
        (
            {'x': P('fsdp')},
            {},
            f"catalogue.activations, 'x': {P('fsdp')} names 'fsdp'; the axes of a table are "
            'batch, tp, expert, and the arguments with these names map them to mesh axes',
        ),
        *[
            (
                layout,
                {},
                'catalogue.activations: a layout is a dict of names and PartitionSpecs, such as '
                f'catalogue.SEQUENCE_PARALLEL, got {layout!r}',
            )
            for layout in ('SEQUENCE_PARALLEL', {'x': ('batch', 'tp')}, {'x': None})
        ],
        ({}, {'tp': 3}, 'catalogue.activations: tp is a mesh axis, a tuple of them or None, got 3'),
    ],
)
def test_wrong_arguments_of_activations(layout, arguments, message):
    with pytest.raises(RuleError) as caught:
        activations(layout, **arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize('layout', [TENSOR_PARALLEL, SEQUENCE_PARALLEL])
def test_the_names_of_a_layout_match_the_example(layout):
    """A name that the model does not use would warn, and a warning or a wrong rank is an error."""
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
    config = ModelConfig(width=32, layers=2, heads=4, kv_heads=2)
    step = helper.sjit(
        lambda params, tokens: forward(params, tokens, config),
        in_shardings=(None, P('fsdp')),
        annotation_shardings=activations(layout),
        batch_argnums=1,
    )
    params = jax.eval_shape(lambda key: init_params(key, config), jax.random.key(0))
    step.trace(params, jax.ShapeDtypeStruct((8, 16), 'int32'))


def test_the_names_of_experts():
    helper = MeshShardingHelper([2, 4], ['fsdp', 'expert'])
    model = experts.models('small')[0]
    step = helper.sjit(
        model.loss,
        in_shardings=(None, P(('fsdp', 'expert')), None),
        annotation_shardings=activations(EXPERT_PARALLEL),
        batch_argnums=1,
    )
    step.trace(jax.eval_shape(model.init, jax.random.key(0)), model.batch(8), jax.random.key(0))
