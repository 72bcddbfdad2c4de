"""The tables of the catalogue on real models at full size: every large leaf is sharded over fsdp and tp."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from scalax.errors import ShardingError
from scalax.rules.catalogue import GEMMA, GPT, GPT2, LLAMA, MIXTRAL, SPLIT_HEADS, T5, VIT, Table, rule
from scalax.sharding import MeshShardingHelper, OptimizerStateShardingRule
from scalax.utils import flatten_tree
from tests.support import ROOT
from tests.support.models import gemma, gpt2, llama, mixtral, t5, vit

MB = 10**6

POD = MeshShardingHelper.from_mesh(AbstractMesh((64, 8), ('fsdp', 'tp')))
LARGE_POD = MeshShardingHelper.from_mesh(AbstractMesh((512, 8), ('fsdp', 'tp')))
WITH_EXPERTS = MeshShardingHelper.from_mesh(AbstractMesh((64, 8, 8), ('fsdp', 'tp', 'expert')))

# Published counts: the first five by the metadata of the checkpoints on Hugging Face (meta-llama, mistralai,
# google); Gemma's padded vocabulary by table 2 of arXiv:2408.00118 (1,180,237,824 of embeddings and
# 26,047,480,320 others); GPT-2 XL as Hugging Face's openai-community/gpt2-xl has it; ViT-H/14 as in
# torchvision's vit_h_14; T5 1.1 XXL as in google/t5-v1_1-xxl.
LLAMA_PARAMETERS = {'8B': 8_030_261_248, '70B': 70_553_706_496, '405B': 405_853_388_800}
MIXTRAL_PARAMETERS = 46_702_792_704
GEMMA_PARAMETERS = 27_227_128_320
GEMMA_PADDED_PARAMETERS = 1_180_237_824 + 26_047_480_320
GPT2_PARAMETERS = 1_557_611_200
GPT2_PADDED_PARAMETERS = GPT2_PARAMETERS + (50304 - 50257) * 1600
VIT_PARAMETERS = 632_045_800
T5_PARAMETERS = 11_135_332_352


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its table, and the paths of its layers."""

    table: Table
    build: Callable[[bool], Any]  # of whether layers are stacked
    parameters: int
    layers: str  # unrolled ones have their number after this and one more character
    helper: MeshShardingHelper = POD


def linen_llama(size, names=llama.HUGGING_FACE):
    return functools.partial(llama.linen, dataclasses.replace(llama.SIZES[size], names=names))


CASES = {
    'llama 8B linen': Case(LLAMA, linen_llama('8B'), LLAMA_PARAMETERS['8B'], 'model/layers'),
    'llama 405B linen': Case(LLAMA, linen_llama('405B'), LLAMA_PARAMETERS['405B'], 'model/layers', LARGE_POD),
    **{
        f'llama {size} equinox': Case(
            LLAMA, functools.partial(llama.equinox, llama.SIZES[size]), count, 'layers'
        )
        for size, count in LLAMA_PARAMETERS.items()
    },
    'llama 8B nnx': Case(
        LLAMA, functools.partial(llama.flax_nnx, llama.SIZES['8B']), LLAMA_PARAMETERS['8B'], 'layers'
    ),
    'llama 70B maxtext': Case(
        (*SPLIT_HEADS, *LLAMA),
        linen_llama('70B', llama.MAXTEXT),
        LLAMA_PARAMETERS['70B'],
        'decoder/layers',
        LARGE_POD,
    ),
    'gemma 2 27B linen': Case(
        GEMMA, functools.partial(llama.linen, gemma.HUGGING_FACE), GEMMA_PARAMETERS, 'model/layers'
    ),
    'gemma 2 27B deepmind': Case(GEMMA, gemma.deepmind, GEMMA_PADDED_PARAMETERS, 'layer'),
    **{
        f'mixtral {name}': Case(table, build, MIXTRAL_PARAMETERS, layers, WITH_EXPERTS)
        for name, table, build, layers in [
            (
                'one by one',
                MIXTRAL,
                functools.partial(llama.linen, mixtral.ONE_BY_ONE),
                'model/layers',
            ),
            ('together', MIXTRAL, functools.partial(llama.linen, mixtral.TOGETHER), 'model/layers'),
            (
                'maxtext',
                (*SPLIT_HEADS, *MIXTRAL),
                functools.partial(llama.linen, mixtral.MAXTEXT),
                'decoder/layers',
            ),
            ('equinox', MIXTRAL, mixtral.equinox, 'layers'),
        ]
    },
    'gpt2 xl linen': Case(GPT, functools.partial(gpt2.linen, gpt2.dense), GPT2_PADDED_PARAMETERS, 'h'),
    'gpt2 xl conv1d': Case(GPT2, functools.partial(gpt2.linen, gpt2.Conv1D), GPT2_PADDED_PARAMETERS, 'h'),
    'gpt2 xl equinox': Case(GPT, gpt2.equinox, GPT2_PADDED_PARAMETERS, 'h'),
    'vit h/14 linen': Case(
        VIT, functools.partial(vit.linen, vit.HuggingFace), VIT_PARAMETERS, 'encoder/layer'
    ),
    'vit h/14 big_vision': Case(
        (*SPLIT_HEADS, *VIT),
        functools.partial(vit.linen, vit.BigVision),
        VIT_PARAMETERS,
        'Transformer/encoderblock',
    ),
    'vit h/14 equinox': Case(VIT, vit.equinox, VIT_PARAMETERS, 'blocks'),
    't5 1.1 xxl linen': Case(T5, functools.partial(t5.linen, True), T5_PARAMETERS, '(en|de)coder/block'),
    't5 1.1 xxl t5x': Case(
        (*SPLIT_HEADS, *T5), functools.partial(t5.linen, False), T5_PARAMETERS, '(en|de)coder/layers'
    ),
}

LAYOUTS = pytest.mark.parametrize('stacked', [False, True], ids=['unrolled', 'stacked'])
ALL_CASES = pytest.mark.parametrize('name', CASES)
# Models of eighty layers or more take long to build unrolled, so their layers are stacked.
DEEP = ('llama 405B linen', 'llama 70B maxtext')
CASES_UNROLLED = [pytest.param(name, marks=pytest.mark.slow) if name in DEEP else name for name in CASES]
IN_EACH_LAYOUT = pytest.mark.parametrize(
    ('name', 'stacked'),
    [
        pytest.param(
            name,
            layout == 'stacked',
            id=f'{name}-{layout}',
            marks=[pytest.mark.slow] if name in DEEP and layout == 'unrolled' else [],
        )
        for name in CASES
        for layout in ('unrolled', 'stacked')
    ],
)


@functools.cache
def built(name, stacked):
    return CASES[name].build(stacked)


def rule_of(name, stacked=False, **kwargs):
    case = CASES[name]
    return rule(case.table, stacked=f'^{case.layers}/' if stacked else '', **kwargs)


@functools.cache
def rows(name, stacked):
    return CASES[name].helper.explain(built(name, stacked), rule_of(name, stacked)).rows


def axes_of(spec):
    return {axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())}


@pytest.mark.medium
@pytest.mark.sampled(7)
@IN_EACH_LAYOUT
def test_the_model_is_the_published_one(name, stacked):
    leaves = jax.tree.leaves(built(name, stacked))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == CASES[name].parameters
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype('bfloat16')}


# Leaves above 1 MB that are not sharded over all of fsdp and tp: the axes that shard them, and the reason.
# docs/catalogue.md has the same table.
PATCHES = 'of (14, 14, 3, 1280) only the features are divisible, and fsdp has them'
NORMS = 'a stack of vectors, of which a layer uses 32 KiB at most'
ROUTER = 'every device routes its own tokens; a layer uses 64 KiB'
EXCEPTIONS = [
    ('llama 70B equinox', 'stacked', 'layers/input_layernorm/weight', set(), NORMS),
    ('llama 70B equinox', 'stacked', 'layers/post_attention_layernorm/weight', set(), NORMS),
    ('llama 70B maxtext', 'stacked', 'decoder/layers/pre_self_attention_layer_norm/scale', set(), NORMS),
    ('llama 70B maxtext', 'stacked', 'decoder/layers/post_self_attention_layer_norm/scale', set(), NORMS),
    ('llama 405B linen', 'stacked', 'model/layers/input_layernorm/weight', set(), NORMS),
    ('llama 405B linen', 'stacked', 'model/layers/post_attention_layernorm/weight', set(), NORMS),
    ('llama 405B equinox', 'stacked', 'layers/input_layernorm/weight', set(), NORMS),
    ('llama 405B equinox', 'stacked', 'layers/post_attention_layernorm/weight', set(), NORMS),
    ('mixtral one by one', 'stacked', 'model/layers/block_sparse_moe/gate/kernel', {'fsdp'}, ROUTER),
    ('mixtral together', 'stacked', 'model/layers/block_sparse_moe/gate/kernel', {'fsdp'}, ROUTER),
    ('mixtral maxtext', 'stacked', 'decoder/layers/MoeBlock_0/gate/kernel', {'fsdp'}, ROUTER),
    ('mixtral equinox', 'stacked', 'layers/mlp/gate/weight', {'fsdp'}, ROUTER),
    ('vit h/14 linen', 'both', 'embeddings/patch_embeddings/projection/kernel', {'fsdp'}, PATCHES),
    ('vit h/14 big_vision', 'both', 'embedding/kernel', {'fsdp'}, PATCHES),
    ('vit h/14 equinox', 'both', 'patch_embed/proj/weight', {'fsdp'}, PATCHES),
]


@pytest.mark.medium
@pytest.mark.sampled(11)
@IN_EACH_LAYOUT
def test_every_large_leaf_uses_all_of_fsdp_and_tp(name, stacked):
    exceptions = {
        row.path: axes_of(row.spec)
        for row in rows(name, stacked)
        if math.prod(row.shape) * 2 > MB and not axes_of(row.spec) >= {'fsdp', 'tp'}
    }
    layouts = ('both', 'stacked' if stacked else 'unrolled')
    assert exceptions == {
        path: axes for of, layout, path, axes, _ in EXCEPTIONS if of == name and layout in layouts
    }


def test_the_exceptions_are_of_models_that_are_tested_and_in_the_docs():
    docs = (ROOT / 'docs' / 'catalogue.md').read_text(encoding='utf-8')
    for name, _, path, _, _ in EXCEPTIONS:
        assert name in CASES
        assert '`{}/{}`'.format(*path.split('/')[-2:]) in docs, path


@pytest.mark.medium
@LAYOUTS
@pytest.mark.parametrize('name', [name for name in CASES if name.startswith('mixtral')])
def test_experts_are_sharded_over_their_own_axis(name, stacked):
    experts = [row for row in rows(name, stacked) if re.search('/experts/|MoeBlock_0/w', row.path)]
    assert sum(math.prod(row.shape) for row in experts) == 32 * 8 * 3 * 4096 * 14336
    for row in experts:
        assert axes_of(row.spec) == {'fsdp', 'tp', 'expert'}, row


@pytest.mark.medium
@pytest.mark.sampled(7)
@IN_EACH_LAYOUT
def test_replicated_leaves_are_small(name, stacked):
    replicated = sum(math.prod(row.shape) * 2 for row in rows(name, stacked) if not axes_of(row.spec))
    assert replicated < 10 * MB


def in_layers(name, path):
    return re.match(rf'{CASES[name].layers}/', path)


@pytest.mark.medium
@pytest.mark.sampled(7)
@pytest.mark.parametrize('name', CASES_UNROLLED)
def test_stacked_layers_have_the_specs_of_unrolled_layers(name):
    number = re.compile(rf'^({CASES[name].layers})[/_]\d+/')
    unrolled = {}
    for row in rows(name, False):
        unrolled.setdefault(number.sub(lambda match: f'{match[1]}/', row.path), set()).add(row.spec)
    stacked = {
        row.path: {P(*row.spec[1:]) if in_layers(name, row.path) else row.spec} for row in rows(name, True)
    }
    assert stacked == unrolled
    of_layers = [row for row in rows(name, True) if in_layers(name, row.path)]
    assert of_layers and not any(row.spec and row.spec[0] for row in of_layers)


def stack_of(name):
    """Returns the stacked leaves, by their paths."""
    return {
        path: leaf for path, leaf in flatten_tree(built(name, True), sep='/').items() if in_layers(name, path)
    }


@pytest.mark.medium
@ALL_CASES
def test_stacked_by_regex_is_stacked_by_method(name):
    specs = rule(CASES[name].table).stacked(1).apply(stack_of(name))
    assert specs == rule_of(name, stacked=True).apply(stack_of(name))


@pytest.mark.medium
@ALL_CASES
def test_layers_are_never_sharded_by_accident(name):
    # Without `stacked` every leaf of the stack is an error, even if its dimensions are divisible.
    case = CASES[name]
    with pytest.raises(ShardingError) as caught:
        case.helper.match_sharding_rule(rule(case.table, on_indivisible='replicate'), built(name, True))
    assert {problem.kind for problem in caught.value.problems} == {'rank'}
    assert {problem.leaf.split(':')[0] for problem in caught.value.problems} == set(stack_of(name))


def test_rows_of_split_heads_do_not_hide_a_forgotten_stack():
    # A stack of (in, out) has the rank of (in, heads, head_dim), but the matrices of the MLP show the error.
    table = (*SPLIT_HEADS, *LLAMA)
    with pytest.raises(ShardingError) as caught:
        POD.match_sharding_rule(rule(table, on_indivisible='replicate'), built('llama 8B linen', True))
    assert 'model/layers/mlp/up_proj/kernel' in str(caught.value)


def test_boxes_of_nnx_have_no_effect():
    state = built('llama 8B nnx', True)
    paths = {row.path.removesuffix('/value'): row.spec for row in rows('llama 8B nnx', True)}
    assert len(paths) == len(jax.tree.leaves(state)) == 12
    assert all(row.path.endswith('/value') for row in rows('llama 8B nnx', True))
    plain = POD.explain(nnx.to_pure_dict(state), rule_of('llama 8B nnx', stacked=True)).rows
    assert {row.path: row.spec for row in plain} == paths


@pytest.mark.parametrize('name', ['llama 8B linen', 'llama 70B equinox', 'llama 8B nnx', 'mixtral together'])
def test_optimizer_state_is_sharded_like_the_parameters(name):
    params, helper = built(name, True), CASES[name].helper
    state = jax.eval_shape(optax.adamw(1e-3, mu_dtype='float32').init, params)
    of_params = rule_of(name, stacked=True)
    specs = jax.tree.map(
        lambda sharding: sharding.spec,
        helper.match_sharding_rule(OptimizerStateShardingRule(of_params, params), state),
    )
    expected = [sharding.spec for sharding in jax.tree.leaves(helper.match_sharding_rule(of_params, params))]
    assert jax.tree.leaves(specs[0].mu) == jax.tree.leaves(specs[0].nu) == expected
    assert specs[0].count == P()


def test_gpt2_without_padding():
    words = gpt2.linen(gpt2.Conv1D, True, vocab=50257)
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(words)) == GPT2_PARAMETERS
    with pytest.raises(ShardingError, match='50257') as caught:
        POD.match_sharding_rule(rule(GPT2, stacked='^h/'), words)
    assert len(caught.value.problems) == 1
    lenient = POD.match_sharding_rule(rule(GPT2, stacked='^h/', on_indivisible='replicate'), words)
    assert lenient['wte']['embedding'].spec == P(None, 'fsdp')


@pytest.mark.slow
@pytest.mark.parametrize(
    ('table', 'layer'),
    [
        (LLAMA, llama.linen_layer),
        ((*SPLIT_HEADS, *LLAMA), functools.partial(llama.linen_layer, names=llama.MAXTEXT)),
        (LLAMA, llama.equinox_layer),
        (GEMMA, functools.partial(llama.linen_layer, gemma.Layer)),
    ],
    ids=['linen', 'maxtext', 'equinox', 'deepmind'],
)
def test_a_layer_needs_two_all_reduces_over_tp(table, layer):
    """Megatron-LM (arXiv:1909.08053, figure 4): one all-reduce after attention, one after the MLP."""
    params, function = layer()
    x = np.linspace(-1, 1, 8 * 64, dtype=np.float32).reshape(8, 64)
    helper = MeshShardingHelper([8], ['tp'])
    parallel = helper.sjit(function, in_shardings=(rule(table, fsdp=None), P()), out_shardings=P())
    program = parallel.lower(params, x).compile().as_text()
    collectives = re.findall(r' (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(', program)
    assert collectives == ['all-reduce'] * 2
    actual, expected = (np.asarray(run(params, x), 'float32') for run in (parallel, jax.jit(function)))
    np.testing.assert_allclose(actual, expected, rtol=0.1, atol=0.1)  # bfloat16
