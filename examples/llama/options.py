"""The flags, and their values as one immutable object."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from examples.llama.model import ModelConfig
from examples.llama.strategies import STRATEGIES
from examples.llama.training import OptimizerConfig

_STEPS = flags.DEFINE_integer('steps', 600, 'Training steps.', lower_bound=0)
_BATCH_SIZE = flags.DEFINE_integer('batch_size', 16, 'Sequences in a batch, over all devices.', lower_bound=1)
_SEQUENCE_LENGTH = flags.DEFINE_integer('sequence_length', 128, 'Bytes in a sequence.', lower_bound=1)
_WIDTH = flags.DEFINE_integer('width', 128, 'Width of the residual stream.', lower_bound=1)
_LAYERS = flags.DEFINE_integer('layers', 4, 'Decoder layers.', lower_bound=1)
_HEADS = flags.DEFINE_integer('heads', 4, 'Query heads.', lower_bound=1)
_KV_HEADS = flags.DEFINE_integer('kv_heads', 2, 'Key/value heads, shared by the query heads.', lower_bound=1)
_DROPOUT = flags.DEFINE_float('dropout', 0.0, 'Dropout probability of the outputs of blocks.', lower_bound=0)
_LEARNING_RATE = flags.DEFINE_float('learning_rate', 3e-3, 'Peak learning rate.', lower_bound=0)
_WARMUP = flags.DEFINE_integer('warmup', 20, 'Steps until the learning rate peaks.', lower_bound=0)
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of the parameters, the batches and the sample.', lower_bound=0)
_STRATEGY = flags.DEFINE_enum(
    'strategy',
    'fsdp_tp',
    list(STRATEGIES),
    'How to shard. ' + '; '.join(f'{name}: {strategy.doc}' for name, strategy in STRATEGIES.items()),
)
_MESH = flags.DEFINE_string(
    'mesh',
    None,
    'Devices along each mesh axis of the strategy, as in fsdp=-1,tp=2; -1 uses all remaining devices. '
    'Or a table by the number of devices, as in "8: fsdp=4,tp=2; 6: fsdp=6"; or search: the mesh '
    "with the best plan. Default: the strategy's own mesh.",
)
_STAGES = flags.DEFINE_integer(
    'stages', 1, 'Run the layers as a pipeline of this many stages, under any strategy.', lower_bound=1
)
_MICROBATCHES = flags.DEFINE_integer(
    'microbatches',
    None,
    'Microbatches that pass through the pipeline one after the other. Default: twice the stages.',
    lower_bound=1,
)
_DEVICES = flags.DEFINE_integer(
    'devices',
    None,
    'The number of devices to use. A machine without accelerators simulates them, by default 8.',
    lower_bound=1,
)
_TEXT = flags.DEFINE_list('text', [], "Files to train on. Default: Python's own documentation.")
_CHECKPOINTS = flags.DEFINE_string(
    'checkpoints', None, 'Folder to save the run in, and to continue it from. Default: nothing is saved.'
)
_SAVE_EVERY = flags.DEFINE_integer('save_every', 100, 'Steps between two checkpoints.', lower_bound=1)
_PAUSE = flags.DEFINE_float(
    'pause', 0.0, 'Seconds to wait after each step, for tests that interrupt a small run.', lower_bound=0
)
_OUTPUT = flags.DEFINE_string('output', 'runs/llama', 'Folder for the results.')


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a run."""

    model: ModelConfig
    optimizer: OptimizerConfig
    batch_size: int
    sequence_length: int
    seed: int
    strategy: str
    mesh: str | None
    devices: int | None
    text: tuple[str, ...]
    output: str
    checkpoints: str | None
    save_every: int
    pause: float
    stages: int = 1
    microbatches: int | None = None

    @property
    def run(self) -> dict[str, Any]:
        """The options that determine the losses, as values for JSON. They identify a run."""
        return {
            'model': dataclasses.asdict(self.model),
            'optimizer': dataclasses.asdict(self.optimizer),
            'batch_size': self.batch_size,
            'sequence_length': self.sequence_length,
            'seed': self.seed,
            'text': list(self.text),
        }


def read_options(arguments: Sequence[str]) -> Options:
    """Returns the parsed flags.

    Args:
      arguments: the arguments that are not flags: further files after `--text`.
    """
    if arguments and not _TEXT.value:
        raise app.UsageError(
            f'{" ".join(arguments)}: not a flag. To train on a file, write --text {arguments[0]}'
        )
    return Options(
        model=ModelConfig(
            width=_WIDTH.value,
            layers=_LAYERS.value,
            heads=_HEADS.value,
            kv_heads=_KV_HEADS.value,
            dropout=_DROPOUT.value,
        ),
        optimizer=OptimizerConfig(
            steps=_STEPS.value, learning_rate=_LEARNING_RATE.value, warmup=_WARMUP.value
        ),
        batch_size=_BATCH_SIZE.value,
        sequence_length=_SEQUENCE_LENGTH.value,
        seed=_SEED.value,
        strategy=_STRATEGY.value,
        mesh=_MESH.value,
        devices=_DEVICES.value,
        text=(*_TEXT.value, *arguments),
        output=_OUTPUT.value,
        checkpoints=_CHECKPOINTS.value,
        save_every=_SAVE_EVERY.value,
        pause=_PAUSE.value,
        stages=_STAGES.value,
        microbatches=_MICROBATCHES.value,
    )
