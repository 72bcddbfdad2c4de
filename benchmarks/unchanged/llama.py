"""LLaMA-3 with the functions of examples/llama and the catalogue's rule.

The expert program uses the catalogue's tensor parallelism, with a replicated residual stream between blocks,
or MaxText's, which shards its width over tp.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from benchmarks.unchanged.model import Model, Size, Tree
from examples.llama.model import ModelConfig, init_params
from examples.llama.training import sequence_losses
from examples.plan_llama import LLAMA_8B, LLAMA_70B, SEQUENCE
from scalax.rules import catalogue
from scalax.sharding import PartitionSpec as P

# Names of parameters that only this model has.
OWN: catalogue.Table = (
    ('layers/value$', P('fsdp', 'tp')),
    ('layers/output$', P('tp', 'fsdp')),
    ('unembed$', P('fsdp', 'tp')),
    ('embed$', P('tp', 'fsdp')),
    ('norm$', P(None)),
    ('ns_coeffs$', P(None)),  # of Muon
)
# Shards the width of embeddings over tp, and so the width of the residual stream.
WIDTH: catalogue.Table = (('/embed$', P('fsdp', 'tp')),)

# `logical_axis_rules` in src/maxtext/configs/base.yml of AI-Hypercomputer/maxtext, commit 000b810, without
# mesh axes of size 1: its data and fsdp are the batch axes, its tensor is tp.
MAXTEXT_RULES: Mapping[str, str | None] = {
    'activation_batch': 'batch',
    'activation_kv_batch': 'batch',
    'activation_embed_and_logits_batch': 'batch',
    'activation_norm_length': None,
    'activation_length': None,
    'activation_length_attn': None,
    'activation_embed': 'tp',
    'activation_kv_heads': 'tp',
    'activation_kv_head_dim': None,  # also tensor, which the heads use first
    'activation_mlp': 'tp',
    'activation_vocab': 'tp',
}
# The names of dimensions in MaxText's decoder: models/llama2.py, layers/attentions.py, linears.py and
# decoders.py.
_RESIDUAL = ('activation_batch', 'activation_norm_length', 'activation_embed')
_HEADS = (
    *('activation_kv_batch', 'activation_length_attn'),
    *('activation_kv_heads', 'activation_kv_head_dim'),
)
MAXTEXT_NAMES: Mapping[str, tuple[str, ...]] = {
    'residual': _RESIDUAL,
    'block_input': _RESIDUAL,
    'query': _HEADS,
    'key_value': _HEADS,
    'hidden': ('activation_batch', 'activation_length', 'activation_mlp'),
    'logits': ('activation_embed_and_logits_batch', 'activation_length', 'activation_vocab'),
}
MAXTEXT: catalogue.ActivationSpecs = {
    name: P(*(MAXTEXT_RULES[dimension] for dimension in dimensions))
    for name, dimensions in MAXTEXT_NAMES.items()
}


def llama(
    name: str,
    config: ModelConfig,
    sequence: int,
    hand: catalogue.ActivationSpecs = catalogue.TENSOR_PARALLEL,
    front: catalogue.Table = (),
    dtype: str = 'bfloat16',
) -> Model:
    table = (*OWN, *catalogue.LLAMA)

    def init(key: jax.Array) -> Tree:
        return jax.tree.map(lambda leaf: leaf.astype(dtype), init_params(key, config))

    def loss(params: Tree, batch: Tree, key: jax.Array) -> jax.Array:
        return jnp.mean(sequence_losses(params, batch['tokens'], config))

    return Model(
        name,
        init=init,
        batch=lambda rows: {'tokens': jax.ShapeDtypeStruct((rows, sequence + 1), 'int32')},
        loss=loss,
        columns_and_rows=catalogue.rule((*front, *table), stacked='layers/'),
        fsdp_rule=catalogue.rule(table, stacked='layers/', tp=None),
        hand=hand,
    )


def models(size: Size) -> list[Model]:
    """Returns 8B and 70B, and both with MaxText's rules, also with the width of the embedding over tp."""
    if size == 'small':
        config = ModelConfig(width=32, layers=2, heads=4, kv_heads=2)
        return [llama('LLaMA-3 8B', config, 16, dtype='float32')]
    variants = []
    for name, config in (('LLaMA-3 8B', LLAMA_8B), ('LLaMA-3 70B', LLAMA_70B)):
        variants += [
            llama(name, config, SEQUENCE),
            llama(f'{name}, by MaxText', config, SEQUENCE, MAXTEXT),
            llama(f'{name}, by MaxText, width over tp', config, SEQUENCE, MAXTEXT, WIDTH),
        ]
    return variants
