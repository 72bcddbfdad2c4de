"""GPT-2 XL (Radford et al., 2019, table 2) with Hugging Face's names and both layouts of its matrices.

Linen with Hugging Face's FlaxConv1D, whose kernels are (out, in), and with nn.Dense; equinox with
MultiheadAttention.
"""

import dataclasses

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp

from . import build
from .build import DTYPE
from .llama import equinox_linear


class Conv1D(nn.Module):
    """A linear layer that stores its kernel as (out, in)."""

    features: int
    name: str | None = None

    @nn.compact
    def __call__(self, x):
        shape = (self.features, x.shape[-1])
        kernel = self.param('kernel', nn.initializers.normal(), shape, DTYPE)
        return x @ kernel.T + self.param('bias', nn.initializers.zeros, (self.features,), DTYPE)


def dense(features, name):
    return build.dense(features, name, bias=True)


@dataclasses.dataclass(frozen=True)
class Config:
    linear: object = dense
    vocab: int = 50304  # 50257, padded as in Megatron-LM
    d: int = 1600
    heads: int = 25
    layers: int = 48
    positions: int = 1024


class Attention(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        c = self.config
        q, k, v = (
            part.reshape(*part.shape[:-1], c.heads, -1)
            for part in jnp.split(c.linear(3 * c.d, name='c_attn')(x), 3, axis=-1)
        )
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return c.linear(c.d, name='c_proj')(y.reshape(x.shape))


class Mlp(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        c = self.config
        return c.linear(c.d, name='c_proj')(nn.gelu(c.linear(4 * c.d, name='c_fc')(x)))


class Layer(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        x = x + Attention(self.config, name='attn')(nn.LayerNorm(param_dtype=DTYPE, name='ln_1')(x))
        return x + Mlp(self.config, name='mlp')(nn.LayerNorm(param_dtype=DTYPE, name='ln_2')(x)), None


class Gpt2(nn.Module):
    config: Config
    stacked: bool

    @nn.compact
    def __call__(self, tokens):
        c = self.config
        x = nn.Embed(c.vocab, c.d, param_dtype=DTYPE, name='wte')(tokens)
        x = x + nn.Embed(c.positions, c.d, param_dtype=DTYPE, name='wpe')(jnp.arange(tokens.shape[-1]))
        x = build.linen_layers(Layer, c, c.layers, self.stacked, 'h', x)
        return nn.LayerNorm(param_dtype=DTYPE, name='ln_f')(x)


def linen(linear, stacked, vocab=50304):
    return build.linen(Gpt2(Config(linear, vocab), stacked), ((1, 8), 'int32'))


class EquinoxMlp(eqx.Module):
    c_fc: eqx.nn.Linear
    c_proj: eqx.nn.Linear

    def __init__(self, d, key):
        self.c_fc = equinox_linear(d, 4 * d, key, bias=True)
        self.c_proj = equinox_linear(4 * d, d, key, bias=True)


def equinox_norm(d):
    return eqx.nn.LayerNorm(d, dtype=DTYPE)


class EquinoxLayer(eqx.Module):
    ln_1: eqx.nn.LayerNorm
    attn: eqx.nn.MultiheadAttention
    ln_2: eqx.nn.LayerNorm
    mlp: EquinoxMlp

    def __init__(self, config, key):
        d, biases = config.d, {f'use_{name}_bias': True for name in ('query', 'key', 'value', 'output')}
        self.ln_1, self.ln_2, self.mlp = equinox_norm(d), equinox_norm(d), EquinoxMlp(d, key)
        self.attn = eqx.nn.MultiheadAttention(config.heads, d, dtype=DTYPE, key=key, **biases)


class EquinoxGpt2(eqx.Module):
    wte: eqx.nn.Embedding
    wpe: eqx.nn.Embedding
    h: list[EquinoxLayer] | EquinoxLayer
    ln_f: eqx.nn.LayerNorm

    def __init__(self, config, stacked, key):
        self.wte = eqx.nn.Embedding(config.vocab, config.d, dtype=DTYPE, key=key)
        self.wpe = eqx.nn.Embedding(config.positions, config.d, dtype=DTYPE, key=key)
        self.h = build.equinox_layers(lambda key: EquinoxLayer(config, key), config.layers, stacked, key)
        self.ln_f = equinox_norm(config.d)


def equinox(stacked):
    return build.equinox(lambda key: EquinoxGpt2(Config(), stacked, key))
