"""Fine-tunes a LLaMA or Qwen from the Hugging Face Hub by LoRA, and samples from it on another mesh.

    python -m examples.lora.finetune                     # a tiny untrained model, which the program writes
    hf download Qwen/Qwen3-0.6B --local-dir=qwen3
    python -m examples.lora.finetune --checkpoint=qwen3 --text=notes.txt --learning_rate=2e-4

The weights are frozen, in bfloat16, and sharded by FSDP and tensor parallelism. Only the adapters have
gradients, optimizer state and checkpoints. Run it again with more steps to continue. The `tokenizer.json`
of the checkpoint tokenizes the text (`pip install tokenizers`); without that file, tokens are bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __spec__ is None:  # run as a file, not with -m: import from the root of the clone
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from collections.abc import Iterator, Sequence

import jax
import numpy as np
import optax
from absl import app, flags
from jax.experimental import multihost_utils

from examples.devices import choose_devices, quiet_logs
from examples.llama.data import documentation, read_file, windows
from examples.lora.hub import export_adapters, load, weight_rule, write_tiny
from examples.lora.model import DecoderConfig, Tree
from examples.lora.steps import make_decode, make_init, make_step, new_cache
from scalax import distributed
from scalax.checkpoint import Checkpointer
from scalax.sharding import MeshShardingHelper, PartitionSpec

P = PartitionSpec

_CHECKPOINT = flags.DEFINE_string(
    'checkpoint', None, 'Folder with config.json and safetensors files. Default: a tiny untrained model.'
)
_TEXT = flags.DEFINE_list('text', [], "Files to train on. Default: Python's own documentation.")
_OUTPUT = flags.DEFINE_string('output', 'runs/lora', 'Folder for the adapters.')
_STEPS = flags.DEFINE_integer('steps', 100, 'Training steps, with those of an earlier run.', lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer('batch_size', 16, 'Sequences in a batch.', lower_bound=1)
_SEQUENCE_LENGTH = flags.DEFINE_integer('sequence_length', 64, 'Tokens in a sequence.', lower_bound=1)
_RANK = flags.DEFINE_integer('rank', 8, 'Rank of the adapters.', lower_bound=1)
_TARGETS = flags.DEFINE_list('targets', ['q_proj', 'v_proj'], 'Linear layers that get an adapter.')
_LEARNING_RATE = flags.DEFINE_float(
    'learning_rate', 1e-2, 'Learning rate; trained models need less, such as 2e-4.', lower_bound=0
)
_MESH = flags.DEFINE_list('mesh', ['-1', '2'], 'Sizes of the mesh axes fsdp and tp, for training.')
_SAMPLE_MESH = flags.DEFINE_list(
    'sample_mesh', ['-1', '2', '2'], 'Sizes of the mesh axes data, kv and q, for sampling.'
)
_SAMPLE_LENGTH = flags.DEFINE_integer('sample_length', 16, 'Tokens to sample.', lower_bound=1)


class Text:
    """The tokens of a text, by the tokenizer of a checkpoint, or as bytes if it has none."""

    def __init__(self, folder: str | Path, paths: Sequence[str]) -> None:
        text = b'\n'.join(read_file(Path(path)) for path in paths) if paths else documentation().encode()
        file = Path(folder) / 'tokenizer.json'
        if file.exists():
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_file(str(file))
            tokens = self.tokenizer.encode(text.decode(), add_special_tokens=False).ids
        else:
            self.tokenizer, tokens = None, np.frombuffer(text, np.uint8)
        self.tokens = np.asarray(tokens, np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        if self.tokenizer is not None:
            return self.tokenizer.decode(tokens.tolist())
        return bytes(tokens.astype(np.uint8)).decode(errors='replace')

    def batches(self, helper: MeshShardingHelper, size: int, length: int, first: int) -> Iterator[np.ndarray]:
        """Yields this process's examples of the batches [size, length + 1] from step `first` on."""
        examples = helper.process_examples(size, mesh_axis_subset='fsdp')
        step = first
        while True:
            starts = np.random.default_rng(step).integers(len(self.tokens) - length, size=size)
            yield windows(self.tokens, starts[examples], length + 1)
            step += 1


def train(helper: MeshShardingHelper, config: DecoderConfig, params: Tree, text: Text, output: Path) -> Tree:
    """Trains adapters, or continues an earlier training, and returns them."""
    optimizer = optax.adamw(_LEARNING_RATE.value)
    init = make_init(params, optimizer, _TARGETS.value, _RANK.value)
    step = helper.sjit(
        make_step(config, optimizer),
        in_shardings=(P(), weight_rule('fsdp', 'tp', 'tp'), P('fsdp')),
        out_shardings=P(),
        donate_argnums=0,
        batch_argnums=2,
    )
    with Checkpointer(output / 'checkpoints', keep=1) as checkpoints:
        if checkpoints.latest_step() is None:
            state = helper.sjit(init, out_shardings=P())(jax.random.key(0))
        else:
            state = checkpoints.restore(helper, P(), jax.eval_shape(init, jax.random.key(0)))
        first, loss = int(state['step']), None
        source = text.batches(helper, _BATCH_SIZE.value, _SEQUENCE_LENGTH.value, first)
        with helper.prefetch(source, mesh_axis_subset='fsdp', local_batch='addressable') as batches:
            for number in range(first + 1, _STEPS.value + 1):
                state, loss = step(state, params, next(batches))
                if number % 20 == 0 or number == first + 1:
                    log(f'step {number:<4} loss {loss:.3f}')
        if loss is not None:
            checkpoints.save(_STEPS.value, state)
    return state['adapters']


def sample(
    helper: MeshShardingHelper,
    config: DecoderConfig,
    params: Tree,
    adapters: Tree,
    prompts: np.ndarray,
    length: int,
) -> np.ndarray:
    """Returns the `length` most likely tokens [B, length] after `prompts` [B, S].

    Query heads are sharded over kv and q; heads of keys and values over kv alone, so that the devices along q
    have copies of the same heads in the cache.
    """
    cache_spec = P(None, None, 'data', None, 'kv')
    decode = helper.sjit(
        make_decode(config),
        in_shardings=(weight_rule(None, ('kv', 'q'), 'kv'), P(), cache_spec, P('data'), None),
        out_shardings=(P('data'), cache_spec),
        donate_argnums=2,
        batch_argnums=3,
    )
    count, start = prompts.shape
    dtype = params['norm']['weight'].dtype
    cache = helper.sjit(new_cache, static_argnums=(0, 1, 2, 3), out_shardings=cache_spec)(
        config, count, start + length, dtype
    )
    token, cache = decode(params, adapters, cache, helper.shard(prompts, P('data')), 0)
    written = [token]
    for position in range(start, start + length - 1):  # tokens stay on the devices
        token, cache = decode(params, adapters, cache, token, position)
        written.append(token)
    return np.concatenate(helper.gather(written), axis=1)


def main(_: Sequence[str]) -> None:
    quiet_logs()
    distributed.initialize()
    devices = choose_devices()
    trainer = MeshShardingHelper([int(size) for size in _MESH.value], ['fsdp', 'tp'], devices=devices)
    sampler = MeshShardingHelper(
        [int(size) for size in _SAMPLE_MESH.value], ['data', 'kv', 'q'], devices=devices
    )
    output = Path(_OUTPUT.value)
    folder = Path(_CHECKPOINT.value or output / 'tiny')
    if _CHECKPOINT.value is None and jax.process_index() == 0:
        write_tiny(folder)
    multihost_utils.sync_global_devices('tiny model')  # is written
    config = DecoderConfig.read(folder)
    text = Text(folder, _TEXT.value)
    params = load(trainer, folder)
    log(f'loaded {count_parameters(params):,} parameters onto {trainer}')

    adapters = train(trainer, config, params, text, output)
    log(f'trained {count_parameters(adapters):,} parameters')
    export_adapters(output / 'peft', trainer.gather(adapters), str(folder))

    params = sampler.reshard(params, weight_rule(None, ('kv', 'q'), 'kv'), donate=True)
    adapters = sampler.reshard(adapters, P())
    count = 2 * sampler.mesh.shape['data']
    prompts = windows(text.tokens, np.linspace(0, len(text.tokens) // 2, count).astype(int), 16)
    continued = sample(sampler, config, params, adapters, prompts, _SAMPLE_LENGTH.value)
    log(f'sampled on {sampler}')
    for prompt, tokens in zip(prompts[:2], continued[:2], strict=True):
        log(repr(text.decode(prompt)), '->', repr(text.decode(tokens)))


def count_parameters(tree: Tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def log(*message: object) -> None:
    """Prints on the first process."""
    if jax.process_index() == 0:
        print(*message, flush=True)


if __name__ == '__main__':
    app.run(main)
