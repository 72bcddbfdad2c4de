"""ViT-H/14 at 224 pixels (Dosovitskiy et al., arXiv:2010.11929, table 1).

Linen with the names of big_vision, whose heads are a dimension, and of Hugging Face; equinox with
eqxvision's.
"""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp

from . import build
from .build import DTYPE, dense
from .gpt2 import equinox_norm
from .llama import equinox_linear

D, FF, HEADS, LAYERS, CLASSES, PATCH, POSITIONS = 1280, 5120, 16, 32, 1000, 14, 257


def patches(name):
    return nn.Conv(D, (PATCH, PATCH), (PATCH, PATCH), padding='VALID', param_dtype=DTYPE, name=name)


def norm(name=None):
    return nn.LayerNorm(param_dtype=DTYPE, name=name)


def with_positions(module, image, cls, positions):
    zeros = nn.initializers.zeros
    cls = jnp.tile(module.param(cls, zeros, (1, 1, D), DTYPE), (len(image), 1, 1))
    x = jnp.concatenate([cls, image.reshape(len(image), -1, D)], axis=1)
    return x + module.param(positions, zeros, (1, POSITIONS, D), DTYPE)


class MlpBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(D, param_dtype=DTYPE)(nn.gelu(nn.Dense(FF, param_dtype=DTYPE)(x)))


class Encoder1DBlock(nn.Module):
    config: None

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(param_dtype=DTYPE)(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, param_dtype=DTYPE)(y)
        return x + MlpBlock()(nn.LayerNorm(param_dtype=DTYPE)(x)), None


class Encoder(nn.Module):
    stacked: bool

    @nn.compact
    def __call__(self, x):
        x = build.linen_layers(
            Encoder1DBlock, None, LAYERS, self.stacked, 'encoderblock', x, numbered='{name}_{number}'
        )
        return norm('encoder_norm')(x)


class BigVision(nn.Module):
    stacked: bool

    @nn.compact
    def __call__(self, image):
        x = with_positions(self, patches('embedding')(image), 'cls', 'pos_embedding')
        return dense(CLASSES, 'head', bias=True)(Encoder(self.stacked, name='Transformer')(x)[:, 0])


class Scope(nn.Module):
    """A module that only contains others, like most of Hugging Face's."""

    inside: object

    @nn.compact
    def __call__(self, *inputs):
        return self.inside(*inputs)


def heads_of(x):
    q, k, v = (dense(D, name, bias=True)(x) for name in ('query', 'key', 'value'))
    q, k, v = (projection.reshape(*x.shape[:-1], HEADS, -1) for projection in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v).reshape(x.shape)


def output(x):
    return dense(D, 'dense', bias=True)(x)


def attention(x):
    return Scope(output, name='output')(Scope(heads_of, name='attention')(x))


def intermediate(x):
    return nn.gelu(dense(FF, 'dense', bias=True)(x))


class HuggingFaceLayer(nn.Module):
    config: None

    @nn.compact
    def __call__(self, x):
        x = x + Scope(attention, name='attention')(norm('layernorm_before')(x))
        y = Scope(intermediate, name='intermediate')(norm('layernorm_after')(x))
        return x + Scope(output, name='output')(y), None


class HuggingFaceEmbeddings(nn.Module):
    @nn.compact
    def __call__(self, image):
        x = Scope(lambda image: patches('projection')(image), name='patch_embeddings')(image)
        return with_positions(self, x, 'cls_token', 'position_embeddings')


class HuggingFace(nn.Module):
    stacked: bool

    @nn.compact
    def __call__(self, image):
        def encoder(x):
            return build.linen_layers(HuggingFaceLayer, None, LAYERS, self.stacked, 'layer', x)

        x = HuggingFaceEmbeddings(name='embeddings')(image)
        x = norm('layernorm')(Scope(encoder, name='encoder')(x))
        return dense(CLASSES, 'classifier', bias=True)(x[:, 0])


def linen(module, stacked):
    return build.linen(module(stacked), ((1, 224, 224, 3), DTYPE))


class PatchEmbed(eqx.Module):
    proj: eqx.nn.Conv2d

    def __init__(self, key):
        self.proj = eqx.nn.Conv2d(3, D, PATCH, PATCH, dtype=DTYPE, key=key)


class EquinoxAttention(eqx.Module):
    qkv: eqx.nn.Linear
    proj: eqx.nn.Linear

    def __init__(self, key):
        self.qkv = equinox_linear(D, 3 * D, key, bias=True)
        self.proj = equinox_linear(D, D, key, bias=True)


class EquinoxMlp(eqx.Module):
    fc1: eqx.nn.Linear
    fc2: eqx.nn.Linear

    def __init__(self, key):
        self.fc1 = equinox_linear(D, FF, key, bias=True)
        self.fc2 = equinox_linear(FF, D, key, bias=True)


class EquinoxLayer(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attn: EquinoxAttention
    norm2: eqx.nn.LayerNorm
    mlp: EquinoxMlp

    def __init__(self, key):
        self.norm1, self.norm2 = equinox_norm(D), equinox_norm(D)
        self.attn, self.mlp = EquinoxAttention(key), EquinoxMlp(key)


class EquinoxVit(eqx.Module):
    patch_embed: PatchEmbed
    cls_token: jax.Array
    pos_embed: jax.Array
    blocks: list[EquinoxLayer] | EquinoxLayer
    norm: eqx.nn.LayerNorm
    fc: eqx.nn.Linear

    def __init__(self, stacked, key):
        self.patch_embed = PatchEmbed(key)
        self.cls_token, self.pos_embed = jnp.zeros((1, D), DTYPE), jnp.zeros((POSITIONS, D), DTYPE)
        self.blocks = build.equinox_layers(EquinoxLayer, LAYERS, stacked, key)
        self.norm, self.fc = equinox_norm(D), equinox_linear(D, CLASSES, key, bias=True)


def equinox(stacked):
    return build.equinox(lambda key: EquinoxVit(stacked, key))
