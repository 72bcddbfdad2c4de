"""Third-party models as published, with random weights.

They come from Hugging Face's transformers, Google's tunix, mamba2-jax, equimo, Haiku and AlphaFold;
others.txt lists the releases.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.unchanged.model import Loss, Model, Size, Tree
from scalax.sharding import PartitionSpec as P
from scalax.sharding import TreePathShardingRule

Settings = Mapping[str, Any]
# The arrays of a batch: shapes without the batch dimension, and dtypes.
Inputs = Mapping[str, tuple[tuple[int, ...], str]]
DTYPES: Mapping[Size, str] = {'small': 'float32', 'large': 'bfloat16'}
# These have no published tensor parallelism, so they are planned without tp.
NO_TP = TreePathShardingRule(('', P()))


def ids(length: int, name: str = 'input_ids') -> Inputs:
    """Returns tokens and the labels of tokens."""
    return {name: ((length,), 'int32'), 'labels': ((length,), 'int32')}


def images(size: int) -> Inputs:
    """Returns images in Hugging Face's layout, and their classes."""
    return {'pixel_values': ((3, size, size), 'float32'), 'labels': ((), 'int32')}


def translated(source: int, target: int) -> Inputs:
    """Returns tokens of an encoder and of a decoder."""
    return {'input_ids': ((source,), 'int32'), **ids(target, 'decoder_input_ids')}


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """A Flax model of transformers.

    Attributes:
        name: the name in the table.
        kind: the class without 'Flax'.
        small: options of its configuration that differ from the defaults, for a model to run.
        large: the same, for a model to plan.
        inputs: the inputs of the small and of the large model.
        rows: the number of rows per device, in plans.
    """

    name: str
    kind: str
    small: Settings
    large: Settings
    inputs: tuple[Inputs, Inputs]
    rows: int = 1


def of_decoder(width: int, layers: int, heads: int, kv_heads: int, hidden: int, vocabulary: int) -> Settings:
    """Returns the options that most decoders share."""
    return {
        'hidden_size': width,
        'num_hidden_layers': layers,
        'num_attention_heads': heads,
        'num_key_value_heads': kv_heads,
        'intermediate_size': hidden,
        'vocab_size': vocabulary,
        'max_position_embeddings': 2048,
    }


def of_encoder(width: int, layers: int, heads: int, **more: Any) -> Settings:
    """Returns the options that most encoders share."""
    return {
        'hidden_size': width,
        'num_hidden_layers': layers,
        'num_attention_heads': heads,
        'intermediate_size': 4 * width,
        **more,
    }


def of_pair(width: int, layers: int, heads: int, **more: Any) -> Settings:
    """Returns the options of BART and its descendants."""
    sides = ('encoder', 'decoder')
    return {
        'd_model': width,
        **{f'{side}_layers': layers for side in sides},
        **{f'{side}_attention_heads': heads for side in sides},
        **{f'{side}_ffn_dim': 4 * width for side in sides},
        **more,
    }


SMALL_DECODER = of_decoder(32, 2, 4, 2, 64, 64)
SMALL_ENCODER = of_encoder(32, 2, 4, vocab_size=64, max_position_embeddings=16)
SMALL_IMAGES = of_encoder(32, 2, 4, image_size=16, patch_size=4)
SMALL_PAIR = of_pair(32, 2, 4, vocab_size=64, max_position_embeddings=16)
SHORT, LONG = ids(8), ids(2048)

HUGGING_FACE = (
    HuggingFace(
        'GPT-2 medium',
        'GPT2LMHeadModel',
        {'n_embd': 32, 'n_layer': 2, 'n_head': 4, 'vocab_size': 64},
        {'n_embd': 1024, 'n_layer': 24, 'n_head': 16},
        (SHORT, ids(1024)),
        rows=4,
    ),
    HuggingFace(
        'LLaMA-2 7B, 8 layers',
        'LlamaForCausalLM',
        SMALL_DECODER,
        of_decoder(4096, 8, 32, 32, 11008, 32000),
        (SHORT, LONG),
        rows=2,
    ),
    HuggingFace(
        'Mistral 7B, 8 layers',
        'MistralForCausalLM',
        SMALL_DECODER,
        of_decoder(4096, 8, 32, 8, 14336, 32000),
        (SHORT, LONG),
        rows=2,
    ),
    HuggingFace(
        'Gemma 2B',
        'GemmaForCausalLM',
        {**SMALL_DECODER, 'head_dim': 8},
        {**of_decoder(2048, 18, 8, 1, 16384, 256000), 'head_dim': 256},
        (SHORT, LONG),
    ),
    HuggingFace(
        'Bloom 560M',
        'BloomForCausalLM',
        {'hidden_size': 32, 'n_layer': 2, 'n_head': 4, 'vocab_size': 64},
        {'hidden_size': 1024, 'n_layer': 24, 'n_head': 16},
        (SHORT, LONG),
    ),
    HuggingFace(
        'XGLM 564M',
        'XGLMForCausalLM',
        {'d_model': 32, 'num_layers': 2, 'attention_heads': 4, 'ffn_dim': 64, 'vocab_size': 64},
        {'d_model': 1024, 'num_layers': 24, 'attention_heads': 16, 'ffn_dim': 4096},
        (SHORT, LONG),
    ),
    HuggingFace(
        'BERT base',
        'BertForMaskedLM',
        SMALL_ENCODER,
        of_encoder(768, 12, 12),
        (SHORT, ids(512)),
        rows=8,
    ),
    HuggingFace(
        'ALBERT base',
        'AlbertForMaskedLM',
        {**SMALL_ENCODER, 'embedding_size': 16},
        of_encoder(768, 12, 12),
        (SHORT, ids(512)),
        rows=8,
    ),
    HuggingFace(
        'BART base',
        'BartForConditionalGeneration',
        SMALL_PAIR,
        of_pair(768, 6, 12),
        (translated(8, 8), translated(1024, 1024)),
        rows=4,
    ),
    HuggingFace(
        'Whisper small',
        'WhisperForConditionalGeneration',
        {**SMALL_PAIR, 'num_mel_bins': 8, 'max_source_positions': 8, 'pad_token_id': 0, 'eos_token_id': 0},
        of_pair(768, 12, 12),
        (
            {'input_features': ((8, 16), 'float32'), **ids(8, 'decoder_input_ids')},
            {'input_features': ((80, 3000), 'float32'), **ids(448, 'decoder_input_ids')},
        ),
        rows=2,
    ),
    HuggingFace(
        'Wav2Vec2, 12 layers',
        'Wav2Vec2ForCTC',
        {
            **of_encoder(32, 2, 4, conv_dim=(16, 16), conv_stride=(4, 2), conv_kernel=(8, 2)),
            'num_conv_pos_embeddings': 4,
            'num_conv_pos_embedding_groups': 4,
            'do_stable_layer_norm': True,
            'feat_extract_norm': 'layer',
        },
        of_encoder(768, 12, 12, do_stable_layer_norm=True, feat_extract_norm='layer', conv_bias=True),
        (
            {'input_values': ((128,), 'float32'), 'labels': ((4,), 'int32')},
            {'input_values': ((160_000,), 'float32'), 'labels': ((128,), 'int32')},
        ),
        rows=2,
    ),
    HuggingFace(
        'ViT base',
        'ViTForImageClassification',
        SMALL_IMAGES,
        of_encoder(768, 12, 12, num_labels=1000),
        (images(16), images(224)),
        rows=16,
    ),
    HuggingFace(
        'DINOv2 base',
        'Dinov2ForImageClassification',
        SMALL_IMAGES,
        of_encoder(768, 12, 12, patch_size=14, num_labels=1000, mlp_ratio=4),
        (images(16), images(224)),
        rows=16,
    ),
    HuggingFace(
        'CLIP base',
        'CLIPModel',
        {
            'text_config': {**SMALL_ENCODER, 'eos_token_id': 7},
            'vision_config': SMALL_IMAGES,
            'projection_dim': 16,
        },
        {
            'text_config': of_encoder(512, 12, 8, max_position_embeddings=77),
            'vision_config': of_encoder(768, 12, 12, patch_size=16),
            'projection_dim': 512,
        },
        (
            {'input_ids': ((8,), 'int32'), 'pixel_values': ((3, 16, 16), 'float32')},
            {'input_ids': ((77,), 'int32'), 'pixel_values': ((3, 224, 224), 'float32')},
        ),
        rows=16,
    ),
    HuggingFace(
        'ResNet-50',
        'ResNetForImageClassification',
        {'embedding_size': 8, 'hidden_sizes': [16, 32], 'depths': [1, 1]},
        {'num_labels': 1000},
        (images(32), images(224)),
        rows=32,
    ),
    HuggingFace(
        'RegNet-Y 4GF',
        'RegNetForImageClassification',
        {'embedding_size': 8, 'hidden_sizes': [16, 32], 'depths': [1, 1], 'groups_width': 8},
        {
            'embedding_size': 32,
            'hidden_sizes': [128, 192, 512, 1088],
            'depths': [2, 6, 12, 2],
            'groups_width': 64,
            'num_labels': 1000,
        },
        (images(32), images(224)),
        rows=32,
    ),
)


def models(size: Size) -> list[Model]:
    """Returns all models."""
    return [
        *(hugging_face(entry, size) for entry in HUGGING_FACE),
        *tunix(size),
        mamba(size),
        equimo(size),
        resnet(size),
        evoformer(size),
    ]


def hugging_face(entry: HuggingFace, size: Size) -> Model:
    """Returns a model of transformers."""
    kind = getattr(importlib.import_module('transformers'), f'Flax{entry.kind}')
    config = kind.config_class(**(entry.small if size == 'small' else entry.large))
    inputs = entry.inputs[size == 'large']
    options: dict[str, Any] = {}
    if 'input_features' in inputs:
        options['input_shape'] = (1, *inputs['input_features'][0])
    elif 'input_ids' not in inputs and 'pixel_values' in inputs:
        options['input_shape'] = (1, *inputs['pixel_values'][0][1:], 3)
    model = kind(config, dtype=jnp.dtype(DTYPES[size]), _do_init=False, **options)

    def variables(key: jax.Array) -> Tree:
        return model.init_weights(key, model.input_shape)

    # BatchNorm in training mode returns its running statistics without using them.
    stats = jax.eval_shape(variables, jax.random.key(0)).get('batch_stats')

    def loss(params: Tree, batch: Tree, key: jax.Array) -> Any:
        arrays = {name: x for name, x in batch.items() if name != 'labels'}
        if stats is None:
            outputs = model(**arrays, params=params, dropout_rng=key, train=True)
            return mean_loss(outputs, batch.get('labels'))
        before = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), stats)
        outputs, after = model(**arrays, params={'params': params, 'batch_stats': before}, train=True)
        return mean_loss(outputs, batch['labels']), after

    return model_of(
        entry.name,
        size,
        init=lambda key: variables(key) if stats is None else variables(key)['params'],
        inputs=inputs,
        loss=loss,
        rows=entry.rows,
        has_aux=stats is not None,
    )


def mean_loss(outputs: Any, labels: jax.Array | None) -> jax.Array:
    """Returns the training loss of a model of transformers."""
    if labels is None:  # pairs of an image and a text
        similar = outputs.logits_per_image
        pairs = jnp.arange(len(similar))
        return (cross_entropy(similar, pairs) + cross_entropy(similar.T, pairs)) / 2
    if outputs.logits.ndim == labels.ndim + 1 and outputs.logits.shape[:-1] == labels.shape:
        return cross_entropy(outputs.logits, labels)
    shape = outputs.logits.shape[:2]  # speech, and letters without alignment
    losses = optax.ctc_loss(
        outputs.logits.astype('float32'), jnp.zeros(shape), labels, jnp.zeros(labels.shape)
    )
    return jnp.mean(losses) / shape[1]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean over all labels."""
    logits = logits.astype('float32')
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def tunix(size: Size) -> Iterator[Model]:
    """Yields LLaMA, Qwen and Gemma of Google's tunix."""
    from flax import nnx

    def module(name: str) -> Any:
        return importlib.import_module(f'tunix.models.{name}.model')

    small_config = {
        'num_layers': 2,
        'embed_dim': 32,
        'hidden_dim': 64,
        'num_heads': 4,
        'head_dim': 8,
        'num_kv_heads': 2,
    }
    llama, qwen, gemma = module('llama3'), module('qwen3'), module('gemma3')
    for name, kind, config, vocabulary in (
        ('LLaMA-3.2 1B, tunix', llama.Llama3, llama.ModelConfig.llama3p2_1b(), 'vocab_size'),
        ('Qwen3 0.6B, tunix', qwen.Qwen3, qwen.ModelConfig.qwen3_0p6b(), 'vocab_size'),
        ('Gemma-3 270M, tunix', gemma.Gemma3, gemma.ModelConfig.gemma3_270m(), 'num_embed'),
    ):
        if size == 'small':
            config = dataclasses.replace(config, **small_config, **{vocabulary: 64})
        yield of_nnx(nnx, name, size, functools.partial(kind, config))


def of_nnx(nnx: Any, name: str, size: Size, make: Callable[..., Any]) -> Model:
    """Returns a decoder of tunix."""
    graph, *states = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))), nnx.Param, ...)
    _, rest = states

    def loss(params: Tree, batch: Tree, key: jax.Array) -> jax.Array:
        rows, length = batch['tokens'].shape
        positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
        logits, _ = nnx.merge(graph, params, rest)(
            batch['tokens'], positions, cache=None, attention_mask=mask
        )
        return cross_entropy(logits, batch['labels'])

    return model_of(
        name,
        size,
        init=lambda key: nnx.split(make(rngs=nnx.Rngs(key)), nnx.Param, ...)[1],
        inputs=ids(8 if size == 'small' else 2048, 'tokens'),
        loss=loss,
    )


def mamba(size: Size) -> Model:
    """Returns Mamba-2 of mamba2-jax, in Flax NNX."""
    from flax import nnx

    mamba2: Any = importlib.import_module('mamba2_jax')
    small = mamba2.Mamba2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8, head_dim=8, chunk_size=4
    )
    make = functools.partial(mamba2.Mamba2ForCausalLM, small if size == 'small' else mamba2.Mamba2Config())
    graph, *states = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))), nnx.Param, ...)
    _, rest = states

    def loss(params: Tree, batch: Tree, key: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params, rest)(batch['tokens'])['logits']
        return cross_entropy(logits, batch['labels'])

    return model_of(
        'Mamba-2 130M',
        size,
        init=lambda key: nnx.split(make(rngs=nnx.Rngs(key)), nnx.Param, ...)[1],
        inputs=ids(8 if size == 'small' else 1024, 'tokens'),
        loss=loss,
        rows=4,
    )


def equimo(size: Size) -> Model:
    """Returns the vision transformer of equimo, an Equinox model for one image, mapped over a batch."""
    eqx: Any = importlib.import_module('equinox')
    vision: Any = importlib.import_module('equimo.vision.models')
    small = {'img_size': 16, 'in_channels': 3, 'dim': 32, 'patch_size': 4, 'num_heads': [4], 'depths': [2]}
    side = 16 if size == 'small' else 224

    def make(key: jax.Array) -> Any:
        if size == 'small':
            return vision.VisionTransformer(**small, key=key)
        return vision.vit_base_patch16_224(key=key)

    shapes = eqx.filter_eval_shape(make, jax.random.key(0))
    static = eqx.filter(shapes, lambda leaf: not isinstance(leaf, jax.ShapeDtypeStruct))

    def loss(params: Tree, batch: Tree, key: jax.Array) -> jax.Array:
        model, images = eqx.combine(params, static), batch['images'].astype(DTYPES[size])
        keys = jax.random.split(key, len(images))
        logits = jax.vmap(lambda image, key: model(image, key=key))(images, keys)
        return cross_entropy(logits, batch['labels'])

    return model_of(
        'ViT-B/16, equimo',
        size,
        init=lambda key: eqx.filter(make(key), eqx.is_array),
        inputs={'images': ((3, side, side), 'float32'), 'labels': ((), 'int32')},
        loss=loss,
        rows=32,
    )


def resnet(size: Size) -> Model:
    """Returns Haiku's ResNet."""
    hk: Any = importlib.import_module('haiku')

    small = {
        'blocks_per_group': (1, 1, 1, 1),
        'channels_per_group': (16, 16, 32, 32),
        'num_classes': 16,
        'bottleneck': False,
    }

    def network(x: jax.Array) -> jax.Array:
        net = hk.nets.ResNet(**small) if size == 'small' else hk.nets.ResNet50(1000)
        return net(x.astype(DTYPES[size]), is_training=True)

    module = hk.transform_with_state(network)
    side = 32 if size == 'small' else 224
    image = jax.ShapeDtypeStruct((1, side, side, 3), 'float32')
    _, stats = jax.eval_shape(module.init, jax.random.key(0), image)

    def loss(params: Tree, batch: Tree, key: jax.Array) -> tuple[jax.Array, Tree]:
        before = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), stats)
        logits, after = module.apply(params, before, None, batch['images'])
        return cross_entropy(logits, batch['labels']), after

    return model_of(
        'ResNet-50, Haiku',
        size,
        init=lambda key: module.init(key, jnp.zeros(image.shape))[0],
        inputs={'images': (image.shape[1:], 'float32'), 'labels': ((), 'int32')},
        loss=loss,
        rows=32,
        has_aux=True,
    )


def evoformer(size: Size) -> Model:
    """Returns the Evoformer of AlphaFold, a model for one protein, mapped over a batch."""
    hk: Any = importlib.import_module('haiku')
    config, layer_stack, modules, prng = (
        importlib.import_module(f'alphafold.model.{name}')
        for name in ('config', 'layer_stack', 'modules', 'prng')
    )
    module_config = config.model_config('model_1').model
    stack, shared = module_config.embeddings_and_evoformer, module_config.global_config
    shared.deterministic = False
    shared.subbatch_size = None  # it saves memory in inference only
    amino_acids = 23
    if size == 'small':
        sequences, residues, width, pair_width, blocks = 4, 8, 32, 16, 2
    else:
        sequences, residues, width, pair_width, blocks = 128, 256, 256, 128, 48

    def network(x: jax.Array, distances: jax.Array) -> jax.Array:
        block = modules.EvoformerIteration(stack.evoformer, shared, is_extra_msa=False)
        masks = {'msa': jnp.ones(x.shape, DTYPES[size]), 'pair': jnp.ones(distances.shape, DTYPES[size])}

        def once(state: tuple[Tree, Any]) -> tuple[Tree, Any]:
            activations, key = state
            key, module_config = key.split()
            return block(activations, masks, is_training=True, safe_key=module_config), key

        def one_hot(x: jax.Array) -> jax.Array:
            return jax.nn.one_hot(x, amino_acids, dtype=DTYPES[size])

        first = {
            'msa': hk.Linear(width, name='msa')(one_hot(x)),
            'pair': hk.Linear(pair_width, name='pair')(one_hot(distances)),
        }
        key = prng.SafeKey(hk.next_rng_key())
        last, _ = layer_stack.layer_stack(blocks)(hk.remat(once))((first, key))
        return hk.Linear(amino_acids, name='masked')(last['msa'])

    module = hk.transform(network)
    shapes = (sequences, residues), (residues, residues)

    def loss(params: Tree, batch: Tree, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, len(batch['msa']))
        of_example = functools.partial(module.apply, params)
        return cross_entropy(jax.vmap(of_example)(keys, batch['msa'], batch['pair']), batch['labels'])

    return model_of(
        'Evoformer, AlphaFold',
        size,
        init=lambda key: module.init(key, *(jnp.zeros(shape, 'int32') for shape in shapes)),
        inputs={'msa': (shapes[0], 'int32'), 'pair': (shapes[1], 'int32'), 'labels': (shapes[0], 'int32')},
        loss=loss,
    )


def model_of(
    name: str,
    size: Size,
    *,
    init: Callable[[jax.Array], Tree],
    inputs: Inputs,
    loss: Loss,
    rows: int = 1,
    has_aux: bool = False,
) -> Model:
    """Returns a model whose parameters have the dtype of its size."""

    def cast(leaf: jax.Array) -> jax.Array:
        return leaf.astype(DTYPES[size]) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    def batch(rows: int) -> Tree:
        return {key: jax.ShapeDtypeStruct((rows, *shape), kind) for key, (shape, kind) in inputs.items()}

    return Model(
        name,
        init=lambda key: jax.tree.map(cast, init(key)),
        batch=batch,
        loss=loss,
        columns_and_rows=NO_TP,
        hand={},
        rows=4 if size == 'small' else rows,  # with fewer rows, activations would move instead of weights
        has_aux=has_aux,
    )
