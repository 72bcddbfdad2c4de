"""The ready tables on the parameter trees of published models, at full size: every axis is made use of."""

import math
import pickle
import re

import jax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from scalax.errors import RuleError, ShardingError
from scalax.rules import catalogue
from scalax.rules.catalogue import GEMMA, GPT, GPT2, LLAMA, MIXTRAL, SPLIT_HEADS, T5, VIT, ExactRankRule, rule
from scalax.sharding import FSDPShardingRule, MeshShardingHelper

MIB = 2**20
HELPER = MeshShardingHelper.from_mesh(AbstractMesh((64, 8), ('fsdp', 'tp')))
WITH_EXPERTS = MeshShardingHelper.from_mesh(AbstractMesh((16, 8, 4), ('fsdp', 'tp', 'expert')))


def tree(leaves):
    """{'a/b/kernel': (2, 3)} -> nested dicts of abstract arrays."""
    root = {}
    for path, shape in leaves.items():
        *above, last = path.split('/')
        node = root
        for key in above:
            node = node.setdefault(key, {})
        node[last] = jax.ShapeDtypeStruct(shape, 'float32')
    return root


def model(outside, layer, layers, at, stacked):
    """The leaves outside the layers and in each layer; `at` is where the layers lie ('h', 'block')."""
    leaves = dict(outside)
    for path, shape in layer.items():
        if stacked:
            leaves[f'{at}/{path}'] = (layers, *shape)
        else:
            leaves |= {f'{at}/{number}/{path}': shape for number in range(layers)}
    return tree(leaves)


# --- The models: (leaves outside the layers, leaves of a layer, number of layers, where they lie) ----


def named(layer, names):
    """A layer's leaves by other names."""
    return {names[path]: shape for path, shape in layer.items()}


def llama(d, ff, heads, kv, layers, vocab, head_dim=128, style='hf'):
    q, k = heads * head_dim, kv * head_dim
    shapes = {'q': (d, q), 'k': (d, k), 'v': (d, k), 'o': (q, d), 'gate': (d, ff), 'up': (d, ff)}
    shapes |= {'down': (ff, d), 'norm': (d,), 'norm2': (d,)}
    hf = {name: f'self_attn/{name}_proj/kernel' for name in 'qkvo'}
    hf |= {name: f'mlp/{name}_proj/kernel' for name in ('gate', 'up', 'down')}
    hf |= {'norm': 'input_layernorm/weight', 'norm2': 'post_attention_layernorm/weight'}
    easylm = {name: f'attention/w{name}/kernel' for name in 'qkvo'}
    easylm |= {'gate': 'feed_forward/w1/kernel', 'down': 'feed_forward/w2/kernel'}
    easylm |= {'up': 'feed_forward/w3/kernel', 'norm': 'attention_norm/kernel', 'norm2': 'ffn_norm/kernel'}
    bare = {'q': 'attention/query', 'k': 'attention/key', 'v': 'attention/value', 'o': 'attention/out'}
    bare |= {name: f'mlp/{name}' for name in ('gate', 'up', 'down')}
    bare |= {'norm': 'norm_1/scale', 'norm2': 'norm_2/scale'}
    maxtext = {'q': 'query', 'k': 'key', 'v': 'value', 'o': 'out'}
    maxtext = {name: f'self_attention/{path}/kernel' for name, path in maxtext.items()}
    maxtext |= {'gate': 'mlp/wi_0/kernel', 'up': 'mlp/wi_1/kernel', 'down': 'mlp/wo/kernel'}
    maxtext |= {
        'norm': 'pre_self_attention_layer_norm/scale',
        'norm2': 'post_self_attention_layer_norm/scale',
    }
    at, embed, head, norm = {
        'hf': ('model/layers', 'model/embed_tokens/embedding', 'lm_head/kernel', 'model/norm/weight'),
        'easylm': ('transformer/h', 'transformer/wte/embedding', 'lm_head/kernel', 'transformer/ln_f/kernel'),
        'bare': ('layers', 'embed/embedding', 'lm_head/kernel', 'final_norm/scale'),
        'maxtext': (
            'decoder/layers',
            'token_embedder/embedding',
            'decoder/logits_dense/kernel',
            'decoder/decoder_norm/scale',
        ),
    }[style]
    if style == 'maxtext':
        shapes |= {'q': (d, heads, head_dim), 'k': (d, kv, head_dim), 'v': (d, kv, head_dim)}
        shapes |= {'o': (heads, head_dim, d)}
    layer = named(shapes, {'hf': hf, 'easylm': easylm, 'bare': bare, 'maxtext': maxtext}[style])
    return {embed: (vocab, d), head: (d, vocab), norm: (d,)}, layer, layers, at


LLAMAS = {
    '8B': (4096, 14336, 32, 8, 32, 128256),
    '70B': (8192, 28672, 64, 8, 80, 128256),
    '405B': (16384, 53248, 128, 8, 126, 128256),
}


def qwen():
    """The biases of attention, and fused matrices."""
    outside, layer, layers, at = llama(4096, 14336, 32, 8, 32, 128256)
    layer = layer | {'self_attn/q_proj/bias': (4096,), 'self_attn/o_proj/bias': (4096,)}
    return outside, layer | {'self_attn/qkv_proj/kernel': (4096, 6144)}, layers, at


def gemma(style):
    if style == 'hf':
        return llama(4608, 36864, 32, 16, 46, 256000)
    layer = {
        'attn/q_einsum/w': (32, 4608, 128),
        'attn/kv_einsum/w': (2, 16, 4608, 128),
        'attn/attn_vec_einsum/w': (32, 128, 4608),
        'mlp/gating_einsum/w': (2, 36864, 4608),
        'mlp/linear/w': (36864, 4608),
        'pre_attention_norm/scale': (4608,),
    }
    return {'embedder/input_embedding': (256128, 4608), 'final_norm/scale': (4608,)}, layer, 46, 'layers'


def mixtral(style):
    outside, layer, layers, at = llama(4096, 14336, 32, 8, 32, 32000)
    layer = {path: shape for path, shape in layer.items() if not path.startswith('mlp/')}
    matrices = {'w1': (4096, 14336), 'w3': (4096, 14336), 'w2': (14336, 4096)}
    if style == 'one by one':
        layer |= {
            f'block_sparse_moe/experts/{n}/{name}/kernel': s for n in range(8) for name, s in matrices.items()
        }
        return outside, layer | {'block_sparse_moe/gate/kernel': (4096, 8)}, layers, at
    moe = 'block_sparse_moe/experts'
    if style == 'maxtext':
        moe = 'mlp/MoeBlock_0'
        matrices = {'wi_0': (4096, 14336), 'wi_1': (4096, 14336), 'wo': (14336, 4096)}
    layer |= {f'{moe}/{name}': (8, *shape) for name, shape in matrices.items()}
    router = 'block_sparse_moe/gate/kernel' if style == 'together' else 'mlp/MoeBlock_0/gate/kernel'
    return outside, layer | {router: (4096, 8)}, layers, at


def gpt2_xl(transposed, vocab=50304):  # 50257, padded as in Megatron-LM
    d = 1600
    matrices = {
        'attn/c_attn': (d, 3 * d),
        'attn/c_proj': (d, d),
        'mlp/c_fc': (d, 4 * d),
        'mlp/c_proj': (4 * d, d),
    }
    layer = {'ln_1/scale': (d,), 'ln_1/bias': (d,)}
    for name, shape in matrices.items():
        layer |= {f'{name}/kernel': shape[::-1] if transposed else shape, f'{name}/bias': shape[1:]}
    outside = {'wte/embedding': (vocab, d), 'wpe/embedding': (1024, d), 'ln_f/scale': (d,)}
    return {f'transformer/{path}': shape for path, shape in outside.items()}, layer, 48, 'transformer/h'


def gpt_neox_20b():
    d = 6144
    layer = {
        'attention/query_key_value/kernel': (d, 3 * d),
        'attention/dense/kernel': (d, d),
        'mlp/dense_h_to_4h/kernel': (d, 4 * d),
        'mlp/dense_4h_to_h/kernel': (4 * d, d),
        'input_layernorm/scale': (d,),
    }
    outside = {'embed_in/embedding': (50432, d), 'embed_out/kernel': (d, 50432), 'lm_head/bias': (50432,)}
    return outside, layer, 44, 'layers'


def vit_h(style):
    d, ff = 1280, 5120
    if style == 'hf':
        shapes = {f'attention/attention/{name}': (d, d) for name in ('query', 'key', 'value')}
        shapes |= {'attention/output/dense': (d, d), 'intermediate/dense': (d, ff), 'output/dense': (ff, d)}
        layer = {f'{name}/kernel': shape for name, shape in shapes.items()}
        layer |= {f'{name}/bias': shape[-1:] for name, shape in shapes.items()}
        outside = {
            'vit/embeddings/cls_token': (1, 1, d),
            'vit/embeddings/position_embeddings': (1, 257, d),
            'vit/embeddings/patch_embeddings/projection/kernel': (14, 14, 3, d),
            'vit/embeddings/patch_embeddings/projection/bias': (d,),
            'classifier/kernel': (d, 1000),
            'classifier/bias': (1000,),
        }
        return outside, layer | {'layernorm_before/scale': (d,)}, 32, 'vit/encoder/layer'
    attention = 'MultiHeadDotProductAttention_0'
    layer = {f'{attention}/{name}/kernel': (d, 16, 80) for name in ('query', 'key', 'value')}
    layer |= {f'{attention}/query/bias': (16, 80), f'{attention}/out/kernel': (16, 80, d)}
    layer |= {'MlpBlock_0/Dense_0/kernel': (d, ff), 'MlpBlock_0/Dense_0/bias': (ff,)}
    layer |= {'MlpBlock_0/Dense_1/kernel': (ff, d), 'MlpBlock_0/Dense_1/bias': (d,)}
    layer |= {f'{attention}/out/bias': (d,), 'LayerNorm_0/scale': (d,)}
    outside = {'embedding/kernel': (14, 14, 3, d), 'embedding/bias': (d,), 'cls': (1, 1, d)}
    outside |= {'Transformer/posembed_input/pos_embedding': (1, 257, d), 'head/kernel': (d, 1000)}
    return outside, layer, 32, 'Transformer/encoderblock'


def t5_11b(style):
    d, inner, ff = 1024, 16384, 65536
    if style == 'hf':
        layer = {f'layer/0/SelfAttention/{name}/kernel': (d, inner) for name in 'qkv'}
        layer |= {f'layer/1/EncDecAttention/{name}/kernel': (d, inner) for name in 'qkv'}
        layer |= {
            'layer/0/SelfAttention/o/kernel': (inner, d),
            'layer/1/EncDecAttention/o/kernel': (inner, d),
        }
        layer |= {'layer/2/DenseReluDense/wi/kernel': (d, ff), 'layer/2/DenseReluDense/wo/kernel': (ff, d)}
        layer |= {'layer/0/layer_norm/weight': (d,)}
        outside = {'shared/embedding': (32128, d), 'lm_head/kernel': (d, 32128)}
        bias = {'decoder/relative_attention_bias/embedding': (32, 128)}
        return outside | bias, layer, 24, 'decoder/block'
    layer = {f'self_attention/{name}/kernel': (d, inner) for name in ('query', 'key', 'value')}
    layer |= {'self_attention/out/kernel': (inner, d), 'mlp/wi_0/kernel': (d, ff), 'mlp/wo/kernel': (ff, d)}
    outside = {'token_embedder/embedding': (32128, d), 'decoder/relpos_bias/rel_embedding': (128, 32)}
    return outside | {'decoder/logits_dense/kernel': (d, 32128)}, layer, 24, 'decoder/layers'


CASES = {
    f'llama {size} {style}': (
        (*SPLIT_HEADS, *LLAMA) if style == 'maxtext' else LLAMA,
        llama(*LLAMAS[size], style=style),
    )
    for size in LLAMAS
    for style in ('hf', 'easylm', 'bare', 'maxtext')
} | {
    'qwen': (LLAMA, qwen()),
    'gemma 2 27B hf': (GEMMA, gemma('hf')),
    'gemma 2 27B deepmind': (GEMMA, gemma('deepmind')),
    'mixtral one by one': (MIXTRAL, mixtral('one by one')),
    'mixtral together': (MIXTRAL, mixtral('together')),
    'mixtral maxtext': (MIXTRAL, mixtral('maxtext')),
    'gpt2 xl': (GPT, gpt2_xl(transposed=False)),
    'gpt2 xl hf': (GPT2, gpt2_xl(transposed=True)),
    'gpt-neox 20B': (GPT, gpt_neox_20b()),
    'vit-h hf': (VIT, vit_h('hf')),
    'vit-h google': ((*SPLIT_HEADS, *VIT), vit_h('google')),
    't5 11B hf': (T5, t5_11b('hf')),
    't5 11B t5x': (T5, t5_11b('t5x')),
}

# Leaves above 1 MB that are not split over all of fsdp and tp: (path, the axes they use, why).
PATCHES = 'of (14, 14, 3, 1280) only the features divide, and 1280 does not by 512'
POSITIONS = '257 positions do not divide, and 1280 features do not by 512'
NORMS = 'a stack of vectors: no dimension that a layer uses is large'
ROUTER = 'every device routes its own tokens; a layer of the stack is 128 KiB'
EXCEPTIONS = [
    (r'patch_embeddings/projection/kernel$|^embedding/kernel$', {'fsdp'}, PATCHES),
    (r'position_embeddings$|pos_embedding$', {'fsdp'}, POSITIONS),
]
STACKED_EXCEPTIONS = [
    *EXCEPTIONS,
    (r'norm\w*/(weight|scale|kernel)$', set(), NORMS),
    (r'gate/kernel$', {'fsdp'}, ROUTER),
    (r'/self_attn/o_proj/bias$|/mlp/c_proj/bias$|/attn/c_proj/bias$', set(), NORMS),
    (r'/self_attn/q_proj/bias$|/(c_fc|c_attn)/bias$', {'tp'}, NORMS),
]


def axes_of(spec):
    return {axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())}


def stacks_of(at):
    return rf'^{at}/'


@pytest.mark.parametrize('stacked', [False, True], ids=['unrolled', 'stacked'])
@pytest.mark.parametrize('case', CASES)
def test_every_large_leaf_uses_all_of_fsdp_and_tp(case, stacked):
    table, (outside, layer, layers, at) = CASES[case]
    helper = WITH_EXPERTS if table is MIXTRAL else HELPER
    report = helper.explain(
        model(outside, layer, layers, at, stacked), rule(table, stacked=stacks_of(at) if stacked else '')
    )
    exceptions = STACKED_EXCEPTIONS if stacked else EXCEPTIONS
    for row in report.rows:
        used = axes_of(row.spec)
        if stacked and re.search(stacks_of(at), row.path):
            assert not row.spec or row.spec[0] is None, f'the layers are sharded: {row}'
        if math.prod(row.shape) * 4 <= MIB or used >= {'fsdp', 'tp'}:
            continue
        assert [axes for regex, axes, _ in exceptions if re.search(regex, row.path)] == [used], row
    experts = [row for row in report.rows if re.search(r'experts/|MoeBlock_0/w', row.path)]
    assert all('expert' in axes_of(row.spec) for row in experts)
    assert bool(experts) == (table is MIXTRAL)


@pytest.mark.parametrize('case', CASES)
def test_stacking_changes_nothing_else(case):
    table, (outside, layer, _, at) = CASES[case]
    helper = WITH_EXPERTS if table is MIXTRAL else HELPER
    one = helper.match_sharding_rule(rule(table), model(outside, layer, 1, at, False))
    many = helper.match_sharding_rule(rule(table).stacked(1), tree({p: (80, *s) for p, s in layer.items()}))
    for key in at.split('/'):
        one = one[key]
    one, many = (jax.tree.leaves(shardings) for shardings in (one['0'], many))
    assert [tuple(s.spec) for s in many] == [(None, *s.spec) if s.spec else () for s in one]


@pytest.mark.parametrize('case', CASES)
def test_layers_are_never_sharded_by_accident(case):
    # Without `stacked`, on sizes that divide by everything: an error for each leaf with a spec.
    table, (_, layer, _, at) = CASES[case]
    helper = WITH_EXPERTS if table is MIXTRAL else HELPER
    stack = tree({f'{at}/{path}': (512, *shape) for path, shape in layer.items()})
    with pytest.raises(ShardingError) as caught:
        helper.match_sharding_rule(rule(table), stack)
    one = rule(table).apply(tree({f'{at}/{path}': shape for path, shape in layer.items()}))
    assert {problem.kind for problem in caught.value.problems} == {'rank'}
    assert len(caught.value.problems) == sum(map(bool, jax.tree.leaves(one)))


TABLES = {'LLAMA': LLAMA, 'GEMMA': GEMMA, 'MIXTRAL': MIXTRAL, 'GPT': GPT, 'GPT2': GPT2, 'VIT': VIT, 'T5': T5}


@pytest.mark.parametrize('name', TABLES)
def test_no_row_is_for_nothing(name):
    table = TABLES[name]
    trees = {
        case: model(outside, layer, 1, at, False)
        for case, (of, (outside, layer, _, at)) in CASES.items()
        if of is table
        or (name in ('GEMMA', 'MIXTRAL') and of is LLAMA)  # which they end with
        or (name == 'GPT2' and of is GPT and case != 'gpt2 xl')
    }
    if name == 'GPT2':
        trees['gpt-j'] = tree({'attn/out_proj/kernel': (64, 64), 'mlp/fc_in/kernel': (64, 128)})
    helper = MeshShardingHelper.from_mesh(AbstractMesh((8, 8, 2), ('fsdp', 'tp', 'expert')))
    report = helper.explain(trees, rule(table))
    assert report.unused_rules == () and report.shadowed_rules == ()


def spec_of(table, path, *shape, **axes):
    (spec,) = jax.tree.leaves(rule(table, **axes).apply(tree({path: shape})))
    return spec


@pytest.mark.parametrize(
    ('table', 'path', 'shape', 'expected'),
    [
        (LLAMA, 'self_attn/k_proj/kernel', (64, 64), P('fsdp', 'tp')),
        (LLAMA, 'self_attn/o_proj/kernel', (64, 64), P('tp', 'fsdp')),
        (LLAMA, 'self_attn/qkv_proj/kernel', (64, 96), P('fsdp', 'tp')),
        (LLAMA, 'mlp/gate_up_proj/kernel', (64, 256), P('fsdp', 'tp')),
        (LLAMA, 'attention/wo/kernel', (64, 64), P('tp', 'fsdp')),
        (LLAMA, 'feed_forward/w1', (64, 128), P('fsdp', 'tp')),
        (LLAMA, 'feed_forward/w2', (128, 64), P('tp', 'fsdp')),
        (LLAMA, 'self_attn/q_proj/bias', (64,), P('tp')),
        (LLAMA, 'self_attn/o_proj/bias', (64,), P()),
        (LLAMA, 'self_attn/q_norm/scale', (16,), P()),
        (LLAMA, 'opt/mu/embed_tokens/embedding', (512, 64), P('tp', 'fsdp')),
        (LLAMA, 'lm_head/kernel', (64, 512), P('fsdp', 'tp')),
        (GEMMA, 'attn/kv_einsum/w', (2, 16, 64, 8), P(None, 'tp', 'fsdp', None)),
        (GPT, 'attn/c_proj/kernel', (64, 64), P('tp', 'fsdp')),
        (GPT2, 'attn/c_proj/kernel', (64, 64), P('fsdp', 'tp')),
        (GPT2, 'attn/c_attn/kernel', (192, 64), P('tp', 'fsdp')),
        (GPT2, 'attn/c_attn/bias', (192,), P('tp')),
        (MIXTRAL, 'moe/experts/w2', (8, 128, 64), P('expert', 'tp', 'fsdp')),
        (MIXTRAL, 'moe/experts/0/w1/kernel', (64, 128), P(('expert', 'fsdp'), 'tp')),
        (MIXTRAL, 'block_sparse_moe/gate/kernel', (64, 8), P('fsdp', None)),
        (T5, 'layer/0/SelfAttention/o/kernel', (64, 64), P('tp', 'fsdp')),
        (VIT, 'attention/output/dense/kernel', (64, 64), P('tp', 'fsdp')),
        ((*SPLIT_HEADS, *LLAMA), 'self_attention/out/kernel', (4, 16, 64), P('tp', None, 'fsdp')),
    ],
)
def test_the_layout_of_a_name(table, path, shape, expected):
    assert spec_of(table, path, *shape) == expected


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


def test_a_table_over_other_axes_is_an_error():
    message = "in a table: the axes of a table are 'fsdp', 'tp', 'expert', got 'model'"
    with pytest.raises(RuleError, match=message):
        rule((('w', P(None, 'model')),))


def test_own_rows_go_first():
    assert spec_of((('q_proj', P('tp', None)), *LLAMA), 'q_proj/kernel', 8, 8) == P('tp', None)


def test_an_unknown_name_is_an_error():
    with pytest.raises(ShardingError, match="no regex of the rule matches the path 'adapter/kernel'"):
        spec_of(LLAMA, 'adapter/kernel', 64, 64)


def test_pytorch_weights_are_not_taken_for_kernels():
    with pytest.raises(ShardingError, match='no regex'):
        spec_of(LLAMA, 'self_attn/q_proj/weight', 64, 64)


def test_a_rank_that_is_not_the_row_s():
    with pytest.raises(ShardingError) as caught:
        HELPER.match_sharding_rule(rule(LLAMA), tree({'layers/q_proj/kernel': (80, 8192, 1024)}))
    (problem,) = caught.value.problems
    assert problem.kind == 'rank'
    assert problem.leaf == 'layers/q_proj/kernel: float32[80, 8192, 1024]'
    assert problem.detail == 'the spec is for 2 dimensions, and the array has 3'
    assert problem.rule.startswith("regex '(^|/)([qkv]_proj|qkv_proj|")
    assert problem.hint == (
        "stacked layers take rule.stacked(1), or catalogue.rule(table, stacked='layers/'); heads that are a "
        'dimension take catalogue.SPLIT_HEADS in front; others a row of your own.'
    )


def test_another_rule_behind_it_does_not_hide_a_rank():
    composed = rule(LLAMA) | FSDPShardingRule()
    with pytest.raises(ShardingError, match='the spec is for 2 dimensions'):
        HELPER.match_sharding_rule(composed, tree({'layers/q_proj/kernel': (80, 8192, 1024)}))


def test_a_vocabulary_that_is_not_padded():
    words = model(*gpt2_xl(transposed=True, vocab=50257), stacked=False)
    with pytest.raises(ShardingError, match='50257'):
        HELPER.match_sharding_rule(rule(GPT2), words)
    lenient = HELPER.match_sharding_rule(rule(GPT2, on_indivisible='replicate'), words)
    assert lenient['transformer']['wte']['embedding'].spec == P(None, 'fsdp')


def test_values():
    one = ExactRankRule(('w', P('fsdp', None)), strict=False)
    assert repr(one) == f"ExactRankRule(('w', {P('fsdp', None)!r}), strict=False)"
    assert pickle.loads(pickle.dumps(rule(LLAMA))) == rule(LLAMA)
    assert hash(rule(T5)) == hash(rule(T5)) and rule(LLAMA) != rule(GEMMA)
    assert rule(LLAMA) != rule(LLAMA, tp='model')


def test_public_names_are_documented():
    assert set(catalogue.__all__) >= set(TABLES)
    assert all(f'`{name}`' in catalogue.__doc__ for name in (*TABLES, 'SPLIT_HEADS'))


def test_flax_modules():
    nn = pytest.importorskip('flax.linen')

    class MlpBlock(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(64)(nn.gelu(nn.Dense(256)(x)))

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x + nn.MultiHeadDotProductAttention(num_heads=8)(nn.LayerNorm()(x))
            return nn.Dense(16, name='head')(x + MlpBlock()(nn.LayerNorm()(x)))

    shapes = jax.eval_shape(Encoder().init, jax.random.key(0), jax.ShapeDtypeStruct((1, 4, 64), 'float32'))
    helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
    params = helper.match_sharding_rule(rule((*SPLIT_HEADS, *VIT)), shapes)['params']
    specs = jax.tree.map(lambda sharding: sharding.spec, params)
    assert specs['MultiHeadDotProductAttention_0'] == {
        **{name: {'kernel': P('fsdp', 'tp'), 'bias': P('tp')} for name in ('query', 'key', 'value')},
        'out': {'kernel': P('tp', None, 'fsdp'), 'bias': P()},
    }
    assert specs['MlpBlock_0']['Dense_0'] == {'kernel': P('fsdp', 'tp'), 'bias': P('tp')}
    assert specs['MlpBlock_0']['Dense_1'] == {'kernel': P('tp', 'fsdp'), 'bias': P()}
    assert specs['LayerNorm_0'] == {'scale': P(), 'bias': P()}
