r"""Trains a model of one of the libraries on any mesh.

Usage: ``python -m examples.frameworks.train --framework=nnx --mesh=4,2 --steps=100 --checkpoints=runs/nnx``.
Run it again with more steps, or on another mesh, to continue.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __spec__ is None:  # run as a file, not with -m: import from the root of the clone
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import importlib
from collections.abc import Sequence

from absl import app, flags

from examples.devices import choose_devices, quiet_logs
from examples.frameworks.model import FRAMEWORKS
from examples.frameworks.sizes import SEQUENCE
from examples.frameworks.training import train, write
from examples.llama.data import load_corpus
from scalax.sharding import MeshShardingHelper

_FRAMEWORK = flags.DEFINE_enum('framework', 'plain', FRAMEWORKS, 'The library that the model is written in.')
_MESH = flags.DEFINE_list('mesh', ['-1', '1'], 'The sizes of the mesh axes fsdp and tp.')
_STEPS = flags.DEFINE_integer(
    'steps', 100, 'The number of training steps, including those of an earlier run.', lower_bound=1
)
_CHECKPOINTS = flags.DEFINE_string('checkpoints', None, 'The folder to save to, and to continue from.')


def main(_: Sequence[str]) -> None:
    choose_devices()
    quiet_logs()
    program = importlib.import_module(f'examples.frameworks.{_FRAMEWORK.value}').PROGRAM
    helper = MeshShardingHelper([int(size) for size in _MESH.value], ['fsdp', 'tp'])
    corpus = load_corpus([], SEQUENCE)
    losses, state = train(program, helper, corpus, _STEPS.value, _CHECKPOINTS.value)
    if losses:
        print(f'{len(losses)} steps: loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte')
    print(write(program, helper, state, corpus))


if __name__ == '__main__':
    app.run(main)
