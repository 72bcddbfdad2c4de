"""The LoRA example: its loader, its decoder and the program, on a tiny checkpoint in the Hub's format."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from examples.lora.hub import INDEX, export_adapters, load, weight_rule, write_tiny
from examples.lora.model import LORA_SCALE, DecoderConfig, forward, init_adapters, merge
from examples.lora.steps import make_decode, new_cache
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support import ROOT
from tests.support.processes import compiled

TRAINER = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
SAMPLER = MeshShardingHelper([2, 2, 2], ['data', 'kv', 'q'])
SAMPLE_RULE = weight_rule(None, ('kv', 'q'), 'kv')
TOKENS = np.random.default_rng(0).integers(0, 256, (8, 64))

# Logits of LlamaForCausalLM in transformers 5.24, float32, for TOKENS[0, [0, 31, 63]] and four bytes.
TRANSFORMERS_LOGITS = [
    [-0.5652, 0.3995, -2.1294, -1.8974],
    [1.0685, -0.3118, 1.6523, -0.3856],
    [0.5950, -1.4485, -0.2708, -1.0401],
]


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('tiny')
    write_tiny(folder)
    return folder


@pytest.mark.medium
def test_load_stacks_and_transposes_the_tensors_of_all_files(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())['weight_map']
    assert len({*index.values()}) == 2
    tensors = {name: load_file(folder / file)[name] for name, file in index.items()}
    params = load(TRAINER, folder, dtype=None)
    for block, name in (('self_attn', 'k_proj'), ('mlp', 'down_proj')):
        kernel = params['layers'][block][name]['kernel']
        names = [f'model.layers.{layer}.{block}.{name}.weight' for layer in range(2)]
        np.testing.assert_array_equal(kernel, np.stack([tensors[name].T for name in names]))
    np.testing.assert_array_equal(params['lm_head']['kernel'], tensors['lm_head.weight'].T)
    assert params['layers']['self_attn']['q_proj']['kernel'].sharding.spec == P(None, 'fsdp', 'tp')
    assert params['layers']['mlp']['down_proj']['kernel'].sharding.spec == P(None, 'tp', 'fsdp')


@pytest.mark.medium
def test_logits_match_transformers(folder: Path) -> None:
    params = load(TRAINER, folder, dtype=None)
    config = DecoderConfig.read(folder)
    logits = TRAINER.sjit(
        lambda params, tokens: forward(params, {}, tokens, config)[0],
        in_shardings=(weight_rule('fsdp', 'tp', 'tp'), P('fsdp')),
        batch_argnums=1,
    )(params, TOKENS)
    np.testing.assert_allclose(np.asarray(logits)[0, [0, 31, 63], :4], TRANSFORMERS_LOGITS, atol=2e-4)


@pytest.mark.medium
def test_decoding_with_a_cache_of_few_heads_writes_the_tokens_of_the_merged_model(folder: Path) -> None:
    config = DecoderConfig.read(folder)
    params = SAMPLER.reshard(load(TRAINER, folder, dtype=None), SAMPLE_RULE)
    adapters = init_adapters(jax.random.key(0), params['layers'], ['q_proj', 'v_proj', 'up_proj'], rank=4)
    adapters = jax.tree.map(lambda leaf: leaf + 0.1, adapters)  # B is zero at first
    cache_spec = P(None, None, 'data', None, 'kv')
    decode = SAMPLER.sjit(
        make_decode(config),
        in_shardings=(SAMPLE_RULE, P(), cache_spec, P('data'), None),
        out_shardings=(P('data'), cache_spec),
        donate_argnums=2,
        batch_argnums=3,
    )
    tokens = TOKENS[:4, :12]
    cache = SAMPLER.shard(new_cache(config, 4, 16, 'float32'), cache_spec)
    token, cache = decode(params, adapters, cache, tokens, 0)
    sequence = np.concatenate([tokens, token], axis=1)
    totals = SAMPLER.plan(decode, params, adapters, cache, token, 12).totals
    # An all-reduce after each pair of matrices and the embedding, of [2, 1, 64] float32. No keys are sent.
    assert totals.keys() == {('kv', 'q')}
    assert totals['kv', 'q'].pop('all-reduce') == 5 * 2 * 64 * 4
    assert sum(totals['kv', 'q'].values()) < 128
    for position in range(12, 15):
        token, cache = decode(params, adapters, cache, token, position)
        sequence = np.concatenate([sequence, token], axis=1)

    merged = merge(SAMPLER.gather(params), adapters)
    logits, _ = jax.jit(forward, static_argnums=3)(merged, {}, sequence[:, :-1], config)
    np.testing.assert_array_equal(jnp.argmax(logits, -1)[:, 11:], sequence[:, 12:])


def test_export_writes_the_files_of_peft(tmp_path: Path) -> None:
    pair = {'lora_a': np.ones((2, 8, 4), np.float32), 'lora_b': np.ones((2, 4, 16), np.float32)}
    export_adapters(tmp_path, {'layers': {'self_attn': {'q_proj': pair}}}, 'meta-llama/tiny')
    tensors = load_file(tmp_path / 'adapter_model.safetensors')
    prefix = 'base_model.model.model.layers.1.self_attn.q_proj'
    assert len(tensors) == 4
    assert tensors[f'{prefix}.lora_A.weight'].shape == (4, 8)
    assert tensors[f'{prefix}.lora_B.weight'].shape == (16, 4)
    config = json.loads((tmp_path / 'adapter_config.json').read_text())
    assert (config['r'], config['lora_alpha']) == (4, 4 * LORA_SCALE)


@pytest.mark.parametrize(
    ('setting', 'message'),
    [
        ({'model_type': 'gemma2'}, "model_type 'gemma2' is not supported, only llama, mistral, qwen2, qwen3"),
        ({'hidden_act': 'gelu'}, "hidden_act 'gelu'"),
        ({'rope_scaling': {'type': 'linear', 'factor': 2}}, "rope_type 'linear'"),
        ({'sliding_window': 4096}, 'sliding_window 4096'),
    ],
)
def test_unsupported_models_are_named(folder: Path, tmp_path: Path, setting: dict, message: str) -> None:
    values = json.loads((folder / 'config.json').read_text()) | setting
    (tmp_path / 'config.json').write_text(json.dumps(values))
    with pytest.raises(ValueError, match=re.escape(message)):
        DecoderConfig.read(tmp_path)


@pytest.mark.slow
def test_program_trains_resumes_and_samples(tmp_path: Path) -> None:
    for steps in (4, 20):
        command = ['-m', 'examples.lora.finetune', f'--steps={steps}', '--sample_length=4']
        ended = subprocess.run(
            [sys.executable, *command, f'--output={tmp_path}'],
            cwd=ROOT,
            env={**os.environ, **compiled()},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert ended.returncode == 0, ended.stderr
        assert 'Warning' not in ended.stderr, ended.stderr
    losses = {int(step): float(loss) for step, loss in re.findall(r'step (\d+) +loss (\S+)', ended.stdout)}
    assert losses.keys() == {5, 20}
    assert losses[20] < losses[5] - 0.3
    assert len(load_file(tmp_path / 'peft' / 'adapter_model.safetensors')) == 8
    assert (tmp_path / 'checkpoints' / '20').exists()
