"""Checkpoints in the Hub's format: a folder with config.json, safetensors files and their index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from examples.lora.model import LORA_SCALE, Tree
from scalax.checkpoint import load_safetensors
from scalax.rules import catalogue
from scalax.rules.catalogue import Axis
from scalax.sharding import MeshShardingHelper, ShardingRule, TreePathShardingRule

INDEX = 'model.safetensors.index.json'

# The Hub has one tensor for each layer, (out, in). The model scans over stacks of kernels, (layers, in, out).
STACKED = [
    (r'^model/layers/(\d+)/(.+_proj)/weight$', r'layers/\2/kernel[\1]', (1, 0)),
    (r'^model/layers/(\d+)/(.+)$', r'layers/\2[\1]'),
    (r'^model/(.+)$', r'\1'),
    (r'^lm_head/weight$', 'lm_head/kernel', (1, 0)),
]


def weight_rule(fsdp: Axis, tp: Axis, kv: Axis, stacked: str = 'layers/') -> ShardingRule:
    """Returns the rule of the catalogue for LLaMA, with axes of their own for the heads of keys and values.

    Args:
      fsdp: the mesh axis of FSDP, or None if weights are not sharded over the axis of the batch.
      tp: the mesh axis (or axes) of tensor parallelism.
      kv: those of them that shard heads of keys and values: as many devices as divide the heads.
      stacked: as in `catalogue.rule`.
    """

    def table(tp: Axis) -> ShardingRule:
        return catalogue.rule(catalogue.LLAMA, fsdp=fsdp, tp=tp, stacked=stacked, on_indivisible='replicate')

    return TreePathShardingRule(('/[kv]_proj/', table(kv)), ('', table(tp)))


def load(helper: MeshShardingHelper, folder: str | Path, dtype: Any = 'bfloat16') -> Tree:
    """Loads a checkpoint into the shards of a mesh with the axes fsdp and tp, and stacks its layers.

    No host holds the entire model, and no device more than its shards of the files and of the result.
    """
    skipped = (r'rotary_emb\.inv_freq$', None)
    tensors = load_safetensors(
        helper, folder, weight_rule('fsdp', 'tp', 'tp', stacked=''), [skipped, ('^', '')]
    )
    rule = weight_rule('fsdp', 'tp', 'tp')
    return helper.reshard(tensors, rule, mapping=STACKED, dtype=dtype, donate=True)


def write_tiny(folder: str | Path, **sizes: Any) -> None:
    """Writes an untrained checkpoint of a tiny LLaMA, in two files, as the Hub has them."""
    config = {
        'model_type': 'llama',
        'hidden_size': 64,
        'intermediate_size': 128,
        'num_hidden_layers': 2,
        'num_attention_heads': 8,
        'num_key_value_heads': 2,
        'vocab_size': 256,
        'rms_norm_eps': 1e-5,
        'rope_theta': 10_000.0,
        'max_position_embeddings': 2048,
        'tie_word_embeddings': False,
        **sizes,
    }
    width, hidden, vocabulary = config['hidden_size'], config['intermediate_size'], config['vocab_size']
    head_size = config.get('head_dim', width // config['num_attention_heads'])
    query, kv = (head_size * config[f'num_{name}_heads'] for name in ('attention', 'key_value'))
    numbers = np.random.default_rng(0)

    def matrix(outputs: int, inputs: int) -> np.ndarray:
        return (numbers.normal(size=(outputs, inputs)) / np.sqrt(inputs)).astype(np.float32)

    ones = np.ones(width, np.float32)
    files: list[dict[str, np.ndarray]] = [{'model.embed_tokens.weight': matrix(vocabulary, width)}]
    for layer in range(config['num_hidden_layers']):
        projections = {
            'self_attn.q_proj': (query, width),
            'self_attn.k_proj': (kv, width),
            'self_attn.v_proj': (kv, width),
            'self_attn.o_proj': (width, query),
            'mlp.gate_proj': (hidden, width),
            'mlp.up_proj': (hidden, width),
            'mlp.down_proj': (width, hidden),
        }
        tensors = {f'{name}.weight': matrix(*shape) for name, shape in projections.items()}
        tensors |= {'input_layernorm.weight': ones, 'post_attention_layernorm.weight': ones}
        files[-1] |= {f'model.layers.{layer}.{name}': tensor for name, tensor in tensors.items()}
        if layer == 0:
            files.append({})
    files[-1] |= {'model.norm.weight': ones, 'lm_head.weight': matrix(vocabulary, width)}

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number, tensors in enumerate(files, 1):
        name = f'model-{number:05}-of-{len(files):05}.safetensors'
        save_file(tensors, folder / name, metadata={'format': 'pt'})
        weight_map |= dict.fromkeys(tensors, name)
    size = sum(tensor.nbytes for tensors in files for tensor in tensors.values())
    index = {'metadata': {'total_size': size}, 'weight_map': weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2), encoding='utf-8')
    (folder / 'config.json').write_text(json.dumps(config, indent=2), encoding='utf-8')


def export_adapters(folder: str | Path, adapters: Mapping[str, Any], base: str) -> None:
    """Writes adapters, as NumPy arrays, in the format of Hugging Face's `peft`, which other programs load."""
    tensors: dict[str, np.ndarray] = {}
    targets: dict[str, int] = {}
    for block, modules in adapters['layers'].items():
        for module, pair in modules.items():
            targets[module] = pair['lora_a'].shape[-1]
            for layer, (a, b) in enumerate(zip(pair['lora_a'], pair['lora_b'], strict=True)):
                name = f'base_model.model.model.layers.{layer}.{block}.{module}'
                tensors[f'{name}.lora_A.weight'] = np.ascontiguousarray(a.T, np.float32)
                tensors[f'{name}.lora_B.weight'] = np.ascontiguousarray(b.T, np.float32)
    [rank] = {*targets.values()}
    config = {
        'peft_type': 'LORA',
        'task_type': 'CAUSAL_LM',
        'base_model_name_or_path': base,
        'r': rank,
        'lora_alpha': LORA_SCALE * rank,
        'target_modules': sorted(targets),
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / 'adapter_model.safetensors', metadata={'format': 'pt'})
    (folder / 'adapter_config.json').write_text(json.dumps(config, indent=2), encoding='utf-8')
