"""Mixtral 8x7B (Jiang et al., arXiv:2401.04088, table 1): each MLP of LLaMA is a mixture of experts.

Linen with Hugging Face's names (one array per expert), with experts stacked by ``nn.vmap``, and with
MaxText's names (``MoeBlock_0``); equinox with experts stacked by ``filter_vmap``.
"""

import dataclasses

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp

from . import llama
from .build import DTYPE, dense

EXPERTS = 8


def mixed(logits, outputs):
    """Combines the top two experts of the router; outputs are (experts, ..., features)."""
    best = jax.lax.top_k(logits, 2)[0][..., -1:]
    weights = jax.nn.softmax(jnp.where(logits >= best, logits, -jnp.inf), axis=-1)
    return jnp.einsum('...e,e...d->...d', weights, outputs)


EXPERT_NAMES = dataclasses.replace(llama.HUGGING_FACE, gate='w1', up='w3', down='w2')


class ExpertsOneByOne(nn.Module):
    config: llama.Config

    @nn.compact
    def __call__(self, x):
        config = dataclasses.replace(self.config, names=EXPERT_NAMES)
        return jnp.stack([llama.Mlp(config, name=str(number))(x) for number in range(EXPERTS)])


class MoeOneByOne(nn.Module):
    config: llama.Config

    @nn.compact
    def __call__(self, x):
        return mixed(dense(EXPERTS, 'gate')(x), ExpertsOneByOne(self.config, name='experts')(x))


class MoeTogether(nn.Module):
    config: llama.Config

    @nn.compact
    def __call__(self, x):
        config = dataclasses.replace(self.config, names=EXPERT_NAMES)
        experts = nn.vmap(
            llama.Mlp,
            variable_axes={'params': 0},
            split_rngs={'params': True},
            in_axes=None,
            axis_size=EXPERTS,
        )
        return mixed(dense(EXPERTS, 'gate')(x), experts(config, name='experts')(x))


class MoeBlock(nn.Module):
    config: llama.Config

    @nn.compact
    def __call__(self, x):
        def experts(name, inputs, outputs):
            return self.param(name, nn.initializers.lecun_normal(), (EXPERTS, inputs, outputs), DTYPE)

        d, ff = self.config.d, self.config.ff
        gate = jnp.einsum('...d,edf->e...f', x, experts('wi_0', d, ff))
        up = jnp.einsum('...d,edf->e...f', x, experts('wi_1', d, ff))
        outputs = jnp.einsum('e...f,efd->e...d', nn.silu(gate) * up, experts('wo', ff, d))
        return mixed(dense(EXPERTS, 'gate')(x), outputs)


BASE = llama.Config(4096, 14336, 32, 8, 32, 32000)
ONE_BY_ONE = dataclasses.replace(
    BASE, names=dataclasses.replace(llama.HUGGING_FACE, mlp='block_sparse_moe'), mlp=MoeOneByOne
)
TOGETHER = dataclasses.replace(ONE_BY_ONE, mlp=MoeTogether)
MAXTEXT = dataclasses.replace(BASE, names=dataclasses.replace(llama.MAXTEXT, mlp='MoeBlock_0'), mlp=MoeBlock)


class EquinoxMoe(eqx.Module):
    gate: eqx.nn.Linear
    experts: llama.EquinoxMlp

    def __init__(self, config, key):
        self.gate = llama.equinox_linear(config.d, EXPERTS, key)
        keys = jax.random.split(key, EXPERTS)
        self.experts = eqx.filter_vmap(lambda key: llama.EquinoxMlp(config, key))(keys)


def equinox(stacked):
    return llama.equinox(BASE, stacked, EquinoxMoe)
