"""The functions of the model and its training, compiled for a mesh."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import jax
import numpy as np

from examples.llama.generate import make_generate
from examples.llama.model import ModelConfig
from examples.llama.strategies import Strategy
from examples.llama.training import (
    OptimizerConfig,
    make_init,
    make_optimizer,
    make_train_step,
    sequence_losses,
)
from scalax.sharding import MeshShardingHelper, PartitionSpec, Prefetch

REPLICATED = PartitionSpec()


class Trainer:
    """The functions of `training.py` and `generate.py`, compiled for a mesh under a strategy.

    - `init(key) -> state`; `abstract_state()` returns its shapes and dtypes without computing it
    - `train_step(state, tokens [B, S + 1]) -> (state, loss [])`
    - `sequence_losses(params, tokens [B, S + 1]) -> losses [B]`
    - `generate(params, prompts [B, S], key) -> bytes [B, length]`
    """

    def __init__(
        self,
        helper: MeshShardingHelper,
        strategy: Strategy,
        model: ModelConfig,
        optimizer: OptimizerConfig,
    ) -> None:
        self.helper, self.strategy = helper, strategy
        transformation = make_optimizer(optimizer)
        # The state is created sharded: no device ever holds all of it.
        init = make_init(model, transformation)
        self.init = helper.sjit(init, out_shardings=strategy.state)
        self.abstract_state = functools.partial(jax.eval_shape, init, jax.random.key(0))
        # Each function is partitioned along its batch: examples stay on their devices.
        self.train_step = helper.sjit(
            make_train_step(model, transformation),
            in_shardings=(strategy.state, strategy.batch),
            out_shardings=(strategy.state, REPLICATED),
            donate_argnums=(0,),
            batch_argnums=1,
            annotation_shardings=strategy.train_annotations,
            pipeline=strategy.pipeline,
        )
        # The parameters are part of the state, and the rule for the state also applies to the part.
        self.sequence_losses = helper.sjit(
            functools.partial(sequence_losses, model=model),
            in_shardings=(strategy.state, strategy.batch),
            out_shardings=REPLICATED,
            batch_argnums=1,
            annotation_shardings=strategy.activations,
            pipeline=strategy.pipeline,
        )
        self.generate = helper.sjit(
            make_generate(model),
            in_shardings=(strategy.state, strategy.batch, REPLICATED),
            out_shardings=REPLICATED,
            batch_argnums=1,
            annotation_shardings=strategy.activations,
        )

    def process_examples(self, size: int) -> slice | np.ndarray:
        """Returns the examples of a batch of `size` that the devices of this process need."""
        return self.helper.process_examples(size, mesh_axis_subset=self.strategy.data_axes)

    def to_devices(self, batch: np.ndarray) -> jax.Array:
        """Shards a batch [B, ...], which every process has, over the devices."""
        local_batch = batch[self.process_examples(len(batch))]
        return self.helper.local_data_to_global_array(
            local_batch, mesh_axis_subset=self.strategy.data_axes, local_batch='addressable'
        )

    def prefetch(self, batches: Iterable[np.ndarray]) -> Prefetch:
        """Prefetches batches of `process_examples`, sharded over the devices like in `to_devices`."""
        return self.helper.prefetch(
            batches, mesh_axis_subset=self.strategy.data_axes, local_batch='addressable'
        )
