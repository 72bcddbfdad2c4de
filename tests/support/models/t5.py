"""T5 1.1 XXL (Raffel et al., arXiv:1910.10683; sizes: t5_1_1/xxl.gin of google-research/t5x).

Linen with the names of Hugging Face, and of T5X's scalable models, whose heads are a dimension. The relative
position biases are outside the layers, as in T5X.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from . import build
from .build import DTYPE, RMSNorm, dense, merge_heads, split_heads

D, FF, HEADS, HEAD_DIM, LAYERS, VOCAB, BUCKETS = 4096, 10240, 64, 64, 24, 32128, 32


class Attention(nn.Module):
    hugging_face: bool

    @nn.compact
    def __call__(self, x, others):
        if not self.hugging_face:
            q = split_heads(HEADS, HEAD_DIM, 'query')(x)
            k, v = (split_heads(HEADS, HEAD_DIM, name)(others) for name in ('key', 'value'))
            return merge_heads(D, 'out')(jax.nn.dot_product_attention(q, k, v))
        inner = HEADS * HEAD_DIM
        q, k, v = dense(inner, 'q')(x), dense(inner, 'k')(others), dense(inner, 'v')(others)
        q, k, v = (projection.reshape(*projection.shape[:-1], HEADS, HEAD_DIM) for projection in (q, k, v))
        y = jax.nn.dot_product_attention(q, k, v)
        return dense(D, 'o')(y.reshape(*y.shape[:-2], inner))


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return dense(D, 'wo')(nn.gelu(dense(FF, 'wi_0')(x)) * dense(FF, 'wi_1')(x))


class T5xLayer(nn.Module):
    config: bool  # whether it is a decoder's

    @nn.compact
    def __call__(self, x, encoded):
        attention_name = 'self_attention' if self.config else 'attention'
        y = RMSNorm(name=f'pre_{attention_name}_layer_norm')(x)
        x = x + Attention(False, name=attention_name)(y, y)
        if self.config:
            y = RMSNorm(name='pre_cross_attention_layer_norm')(x)
            x = x + Attention(False, name='encoder_decoder_attention')(y, encoded)
        return x + Mlp(name='mlp')(RMSNorm(name='pre_mlp_layer_norm')(x)), None


class Part(nn.Module):
    """A sub-layer of a Hugging Face layer: a norm, and the module after it."""

    inside: str

    @nn.compact
    def __call__(self, x, encoded=None):
        y = RMSNorm('weight', name='layer_norm')(x)
        if self.inside == 'DenseReluDense':
            return x + Mlp(name=self.inside)(y)
        return x + Attention(True, name=self.inside)(y, y if encoded is None else encoded)


class Parts(nn.Module):
    decoder: bool

    @nn.compact
    def __call__(self, x, encoded):
        x = Part('SelfAttention', name='0')(x)
        if self.decoder:
            x = Part('EncDecAttention', name='1')(x, encoded)
        return Part('DenseReluDense', name='2' if self.decoder else '1')(x)


class HuggingFaceLayer(nn.Module):
    config: bool  # whether it is a decoder's

    @nn.compact
    def __call__(self, x, encoded):
        return Parts(self.config, name='layer')(x, encoded), None


class Stack(nn.Module):
    hugging_face: bool
    stacked: bool
    decoder: bool

    @nn.compact
    def __call__(self, x, encoded):
        if self.hugging_face:
            layer, name, numbered, norm = HuggingFaceLayer, 'block', '{name}/{number}', 'final_layer_norm'
            positions = nn.Embed(BUCKETS, HEADS, param_dtype=DTYPE, name='relative_attention_bias')
            positions(jnp.zeros((1,), 'int32'))
        else:
            layer, name, numbered = T5xLayer, 'layers', '{name}_{number}'
            norm = 'decoder_norm' if self.decoder else 'encoder_norm'
            RelativePositions(name='relpos_bias')()
        x = build.linen_layers(layer, self.decoder, LAYERS, self.stacked, name, x, encoded, numbered=numbered)
        return RMSNorm('weight' if self.hugging_face else 'scale', name=norm)(x)


class RelativePositions(nn.Module):
    @nn.compact
    def __call__(self):
        return self.param('rel_embedding', nn.initializers.zeros, (HEADS, BUCKETS), DTYPE)


class T5(nn.Module):
    hugging_face: bool
    stacked: bool

    @nn.compact
    def __call__(self, tokens):
        name = 'shared' if self.hugging_face else 'token_embedder'
        x = nn.Embed(VOCAB, D, param_dtype=DTYPE, name=name)(tokens)
        encoded = Stack(self.hugging_face, self.stacked, False, name='encoder')(x, x)
        x = Stack(self.hugging_face, self.stacked, True, name='decoder')(x, encoded)
        return dense(VOCAB, 'lm_head' if self.hugging_face else 'logits_dense')(x)


def linen(hugging_face, stacked):
    return build.linen(T5(hugging_face, stacked), ((1, 8), 'int32'))
