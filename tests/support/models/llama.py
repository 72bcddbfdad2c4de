"""LLaMA-3 (Grattafiori et al., arXiv:2407.21783, table 3), and options for related decoders.

Linen with Hugging Face's names, and with MaxText's, whose heads are a dimension; nnx and equinox with Hugging
Face's.
"""

import dataclasses

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from . import build
from .build import DTYPE, RMSNorm, dense, merge_heads, split_heads


@dataclasses.dataclass(frozen=True)
class Names:
    """A library's names of the modules."""

    attention: str
    q: str
    k: str
    v: str
    o: str
    mlp: str
    gate: str
    up: str
    down: str
    before: tuple[str, str]
    decoder: str
    embed: str
    layers: str
    norm: str
    head: str
    norm_key: str = 'scale'
    numbered: str = '{name}/{number}'
    heads_split: bool = False


HUGGING_FACE = Names(
    attention='self_attn',
    q='q_proj',
    k='k_proj',
    v='v_proj',
    o='o_proj',
    mlp='mlp',
    gate='gate_proj',
    up='up_proj',
    down='down_proj',
    before=('input_layernorm', 'post_attention_layernorm'),
    decoder='model',
    embed='embed_tokens',
    layers='layers',
    norm='norm',
    head='lm_head',
    norm_key='weight',
)
MAXTEXT = Names(
    attention='self_attention',
    q='query',
    k='key',
    v='value',
    o='out',
    mlp='mlp',
    gate='wi_0',
    up='wi_1',
    down='wo',
    before=('pre_self_attention_layer_norm', 'post_self_attention_layer_norm'),
    decoder='decoder',
    embed='token_embedder',
    layers='layers',
    norm='decoder_norm',
    head='logits_dense',
    numbered='{name}_{number}',
    heads_split=True,
)


class Attention(nn.Module):
    config: 'Config'

    @nn.compact
    def __call__(self, x):
        config, names = self.config, self.config.names

        def heads(count, name):
            if names.heads_split:
                return split_heads(count, config.head_dim, name)(x)
            y = dense(count * config.head_dim, name)(x)
            return y.reshape(*y.shape[:-1], count, config.head_dim)

        q, k, v = heads(config.heads, names.q), heads(config.kv, names.k), heads(config.kv, names.v)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        if names.heads_split:
            return merge_heads(config.d, names.o)(y)
        return dense(config.d, names.o)(y.reshape(*y.shape[:-2], -1))


class Mlp(nn.Module):
    config: 'Config'

    @nn.compact
    def __call__(self, x):
        config, names = self.config, self.config.names
        hidden = nn.silu(dense(config.ff, names.gate)(x)) * dense(config.ff, names.up)(x)
        return dense(config.d, names.down)(hidden)


@dataclasses.dataclass(frozen=True)
class Config:
    d: int
    ff: int
    heads: int
    kv: int
    layers: int
    vocab: int
    head_dim: int = 128
    names: Names = HUGGING_FACE
    mlp: type[nn.Module] = Mlp  # or a mixture of experts
    after: tuple[str, str] | None = None  # Gemma 2's norms after attention and after the MLP
    tied: bool = False  # tied embeddings


SIZES = {
    '8B': Config(4096, 14336, 32, 8, 32, 128256),
    '70B': Config(8192, 28672, 64, 8, 80, 128256),
    '405B': Config(16384, 53248, 128, 8, 126, 128256),
    'tiny': Config(64, 128, 8, 8, 2, 256, head_dim=8),
}


class Layer(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        config, names = self.config, self.config.names
        parts = (Attention(config, name=names.attention), config.mlp(config, name=names.mlp))
        for part, before, after in zip(parts, names.before, config.after or (None, None), strict=True):
            y = part(RMSNorm(names.norm_key, name=before)(x))
            x = x + (RMSNorm(names.norm_key, name=after)(y) if after else y)
        return x, None


class Decoder(nn.Module):
    config: Config
    stacked: bool

    @nn.compact
    def __call__(self, tokens):
        config, names = self.config, self.config.names
        x = nn.Embed(config.vocab, config.d, param_dtype=DTYPE, name=names.embed)(tokens)
        x = build.linen_layers(
            Layer, config, config.layers, self.stacked, names.layers, x, numbered=names.numbered
        )
        return RMSNorm(names.norm_key, name=names.norm)(x)


class LinenLlama(nn.Module):
    config: Config
    stacked: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = Decoder(self.config, self.stacked, name=self.config.names.decoder)(tokens)
        return x if self.config.tied else dense(self.config.vocab, self.config.names.head)(x)


def linen(config, stacked):
    return build.linen(LinenLlama(config, stacked), ((1, 8), 'int32'))


def flax_nnx(config, stacked):
    """Returns the nnx.State of a model with Hugging Face's names."""
    q, k = config.heads * config.head_dim, config.kv * config.head_dim

    def linear(inputs, outputs, rngs):
        return nnx.Linear(inputs, outputs, use_bias=False, param_dtype=DTYPE, rngs=rngs)

    def norm(rngs):
        return nnx.RMSNorm(config.d, param_dtype=DTYPE, rngs=rngs)

    class Attention(nnx.Module):
        def __init__(self, rngs):
            self.q_proj, self.o_proj = linear(config.d, q, rngs), linear(q, config.d, rngs)
            self.k_proj, self.v_proj = linear(config.d, k, rngs), linear(config.d, k, rngs)

    class Mlp(nnx.Module):
        def __init__(self, rngs):
            self.gate_proj, self.up_proj = (linear(config.d, config.ff, rngs) for _ in range(2))
            self.down_proj = linear(config.ff, config.d, rngs)

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.self_attn, self.mlp = Attention(rngs), Mlp(rngs)
            self.input_layernorm, self.post_attention_layernorm = norm(rngs), norm(rngs)

    class Llama(nnx.Module):
        def __init__(self, rngs):
            self.embed_tokens = nnx.Embed(config.vocab, config.d, param_dtype=DTYPE, rngs=rngs)
            self.layers = build.nnx_layers(Layer, config.layers, stacked, rngs)
            self.norm, self.lm_head = norm(rngs), linear(config.d, config.vocab, rngs)

    return build.nnx_state(Llama)


def equinox_linear(inputs, outputs, key, bias=False):
    """Returns a linear layer; Equinox stores weights as (out, in)."""
    return eqx.nn.Linear(inputs, outputs, use_bias=bias, dtype=DTYPE, key=key)


def equinox_norm(config):
    return eqx.nn.RMSNorm(config.d, use_bias=False, dtype=DTYPE)


class EquinoxAttention(eqx.Module):
    q_proj: eqx.nn.Linear
    k_proj: eqx.nn.Linear
    v_proj: eqx.nn.Linear
    o_proj: eqx.nn.Linear
    head_dim: int = eqx.field(static=True)

    def __init__(self, config, key):
        q, k = config.heads * config.head_dim, config.kv * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = equinox_linear(config.d, q, key)
        self.k_proj = equinox_linear(config.d, k, key)
        self.v_proj = equinox_linear(config.d, k, key)
        self.o_proj = equinox_linear(q, config.d, key)

    def __call__(self, x):
        q, k, v = (
            jax.vmap(linear)(x).reshape(len(x), -1, self.head_dim)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return jax.vmap(self.o_proj)(y.reshape(len(x), -1))


class EquinoxMlp(eqx.Module):
    gate_proj: eqx.nn.Linear
    up_proj: eqx.nn.Linear
    down_proj: eqx.nn.Linear

    def __init__(self, config, key):
        self.gate_proj = equinox_linear(config.d, config.ff, key)
        self.up_proj = equinox_linear(config.d, config.ff, key)
        self.down_proj = equinox_linear(config.ff, config.d, key)

    def __call__(self, x):
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class EquinoxLayer(eqx.Module):
    self_attn: EquinoxAttention
    mlp: eqx.Module
    input_layernorm: eqx.nn.RMSNorm
    post_attention_layernorm: eqx.nn.RMSNorm

    def __init__(self, config, mlp, key):
        self.self_attn, self.mlp = EquinoxAttention(config, key), mlp(config, key)
        self.input_layernorm, self.post_attention_layernorm = equinox_norm(config), equinox_norm(config)

    def __call__(self, x):
        x = x + self.self_attn(jax.vmap(self.input_layernorm)(x))
        return x + jax.vmap(self.mlp)(jax.vmap(self.post_attention_layernorm)(x))


class EquinoxLlama(eqx.Module):
    embed_tokens: eqx.nn.Embedding
    layers: list[EquinoxLayer] | EquinoxLayer
    norm: eqx.nn.RMSNorm
    lm_head: eqx.nn.Linear

    def __init__(self, config, stacked, mlp, key):
        self.embed_tokens = eqx.nn.Embedding(config.vocab, config.d, dtype=DTYPE, key=key)
        self.layers = build.equinox_layers(
            lambda key: EquinoxLayer(config, mlp, key), config.layers, stacked, key
        )
        self.norm, self.lm_head = equinox_norm(config), equinox_linear(config.d, config.vocab, key)


def equinox(config, stacked, mlp=EquinoxMlp):
    return build.equinox(lambda key: EquinoxLlama(config, stacked, mlp, key))


def linen_layer(layer=Layer, names=HUGGING_FACE):
    """Returns (parameters, function of them and x) of a small layer; x is (sequence, features)."""
    layer = layer(dataclasses.replace(SIZES['tiny'], names=names))
    params = jax.jit(layer.init)(jax.random.key(0), jnp.zeros((1, 8, SIZES['tiny'].d)))['params']
    return params, lambda params, x: layer.apply({'params': params}, x[None])[0][0]


def equinox_layer():
    layer = eqx.filter_jit(EquinoxLayer)(SIZES['tiny'], EquinoxMlp, jax.random.key(0))
    params, static = eqx.partition(layer, eqx.is_array)
    return params, lambda params, x: eqx.combine(params, static)(x)
