"""Gemma 2 27B (Riviere et al., arXiv:2408.00118, tables 1 and 2), with Google DeepMind's names.

With Hugging Face's names it is a LLaMA with two more norms per layer and tied embeddings.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from . import build, llama
from .build import DTYPE, RMSNorm

HUGGING_FACE = llama.Config(
    4608,
    36864,
    32,
    16,
    46,
    256000,
    names=dataclasses.replace(llama.HUGGING_FACE, before=('input_layernorm', 'pre_feedforward_layernorm')),
    after=('post_attention_layernorm', 'post_feedforward_layernorm'),
    tied=True,
)
DEEPMIND = dataclasses.replace(HUGGING_FACE, vocab=256128)  # padded


class Einsum(nn.Module):
    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, equation, x):
        return jnp.einsum(equation, x, self.param('w', nn.initializers.normal(), self.shape, DTYPE))


class Attention(nn.Module):
    config: llama.Config

    @nn.compact
    def __call__(self, x):
        c = self.config
        q = Einsum((c.heads, c.d, c.head_dim), name='q_einsum')('BTD,NDH->BTNH', x)
        k, v = Einsum((2, c.kv, c.d, c.head_dim), name='kv_einsum')('BSD,CKDH->CBSKH', x)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return Einsum((c.heads, c.head_dim, c.d), name='attn_vec_einsum')('BTNH,NHD->BTD', y)


class FeedForward(nn.Module):
    config: llama.Config

    @nn.compact
    def __call__(self, x):
        d, ff, init = self.config.d, self.config.ff, nn.initializers.normal()
        gate, up = jnp.einsum('BTF,NHF->NBTH', x, self.param('gating_einsum', init, (2, ff, d), DTYPE))
        return nn.gelu(gate) * up @ self.param('linear', init, (ff, d), DTYPE)


class Layer(nn.Module):
    config: llama.Config

    @nn.compact
    def __call__(self, x):
        y = Attention(self.config, name='attn')(RMSNorm(name='pre_attention_norm')(x))
        x = x + RMSNorm(name='post_attention_norm')(y)
        y = FeedForward(self.config, name='mlp')(RMSNorm(name='pre_ffw_norm')(x))
        return x + RMSNorm(name='post_ffw_norm')(y), None


class Embedder(nn.Module):
    config: llama.Config

    @nn.compact
    def __call__(self, tokens):
        shape = (self.config.vocab, self.config.d)
        return self.param('input_embedding', nn.initializers.normal(), shape, DTYPE)[tokens]


class Gemma(nn.Module):
    config: llama.Config
    stacked: bool

    @nn.compact
    def __call__(self, tokens):
        config = self.config
        x = Embedder(config, name='embedder')(tokens)
        x = build.linen_layers(
            Layer, config, config.layers, self.stacked, 'layer', x, numbered='{name}_{number}'
        )
        return RMSNorm(name='final_norm')(x)


def deepmind(stacked):
    return build.linen(Gemma(DEEPMIND, stacked), ((1, 8), 'int32'))
