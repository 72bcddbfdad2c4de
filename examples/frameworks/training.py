"""Training of any of the models on any mesh, which continues from the last checkpoint."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from examples.frameworks.model import Program
from examples.frameworks.sizes import SEQUENCE
from examples.llama.data import Corpus
from scalax.checkpoint import Checkpointer
from scalax.sharding import MeshShardingHelper, PartitionSpec

BATCH_SIZE = 32
BATCH = PartitionSpec('fsdp')


def train(
    program: Program,
    helper: MeshShardingHelper,
    corpus: Corpus,
    steps: int,
    folder: str | Path | None = None,
) -> tuple[list[float], Any]:
    """Trains on a mesh, and returns the losses of the steps and the state."""
    init = helper.sjit(program.init, out_shardings=program.rule)  # created in shards
    step = helper.sjit(
        program.train_step,
        in_shardings=(program.rule, BATCH),
        out_shardings=(program.rule, None),
        donate_argnums=0,
    )
    key = jax.random.key(0)
    losses = []
    with contextlib.ExitStack() as stack:
        saved = stack.enter_context(Checkpointer(folder)) if folder else None
        first = saved and saved.latest_step()
        if saved and first is not None:
            state = saved.restore(helper, program.rule, jax.eval_shape(program.init, key))
        else:
            state = init(key)
        load = (corpus.batch(BATCH_SIZE, SEQUENCE, 0, i) for i in range(first or 0, steps))
        for tokens in stack.enter_context(helper.prefetch(load, mesh_axis_subset='fsdp')):
            state, loss = step(state, tokens)
            losses.append(float(loss))
        if saved and losses:
            saved.save(steps, state)
    return losses, state


def write(program: Program, helper: MeshShardingHelper, state: Any, corpus: Corpus, length: int = 32) -> str:
    """Returns the continuation of a text by the model, with greedy decoding."""
    logits = helper.sjit(program.logits, in_shardings=(program.rule, BATCH), batch_argnums=1)
    batch_size = helper.mesh.shape['fsdp']
    tokens = np.repeat(corpus.prompts(1, SEQUENCE), batch_size, 0)
    for _ in range(length):
        last = np.asarray(logits(state, tokens[:, -SEQUENCE:]))[:, -1].argmax(-1)
        tokens = np.concatenate([tokens, last[:, None].astype(tokens.dtype)], 1)
    return bytes(tokens[0].astype(np.uint8)).decode(errors='replace')
