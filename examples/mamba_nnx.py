"""A Flax NNX model of another project learns handwritten digits, sharded by FSDP.

    pip install mamba2-jax
    python -m examples.mamba_nnx

`Mamba2Forecaster` of the package mamba2-jax reads a digit as a series of eight rows, and forecasts ten
logits. The model and its step are those of one device; five lines of `main` run them on all devices.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __spec__ is None:  # run as a file, not with -m: import from the root of the clone
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import einops
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from flax import nnx
from mamba2_jax import Mamba2Forecaster

from examples.devices import choose_devices, quiet_logs
from examples.digits import load_data
from scalax.interop.nnx import sjit
from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P

Batch = dict[str, jax.Array]

BATCH_SIZE = 64
LAYERS = 2
OPTIMIZER = optax.adamw(5e-3)


def main(
    steps: int = 100, devices: int | None = None, plan: bool = False, verify: bool = False
) -> list[float]:
    """Trains on four fifths of the digits, prints the accuracy on the last fifth, and returns the losses."""
    helper = MeshShardingHelper([-1], ['fsdp'], devices=choose_devices(devices))
    # The default, 2**20 elements, is for models of a useful size: it would replicate this one.
    rule = FSDPShardingRule(min_fsdp_size=2**10)
    model, optimizer = sjit(helper, make, out_shardings=rule)()
    step = sjit(helper, train_step, in_shardings=(rule, rule, P('fsdp')), donate_argnums=(0, 1))
    count = sjit(helper, count_right, in_shardings=(rule, P()))

    train, test = (reshape(digits) for digits in load_data(seed=0))
    batches = np.random.default_rng(0).integers(len(train['label']), size=(steps, BATCH_SIZE))
    first = {name: values[batches[0]] for name, values in train.items()}
    print(str(step.explain_propagation(model, optimizer, first)).partition('\n\n')[0])
    if plan:
        print(helper.plan(step, model, optimizer, first))
    if verify:
        print(helper.verify(step, model, optimizer, first))

    losses = []
    for indices in batches:
        loss = step(model, optimizer, {name: values[indices] for name, values in train.items()})
        losses.append(float(loss))
    accuracy = int(count(model, test)) / len(test['label'])
    print(f'loss {losses[0]:.2f} -> {losses[-1]:.2f}, accuracy on held-out digits {accuracy:.1%}')
    return losses


def reshape(digits: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the digits with images [N, 8, 8]."""
    return {**digits, 'image': einops.rearrange(digits['image'], 'n (row column) -> n row column', row=8)}


def make() -> tuple[Mamba2Forecaster, nnx.Optimizer]:
    """Returns the model and its optimizer."""
    sizes = {'d_model': 64, 'n_layers': LAYERS, 'd_state': 16, 'headdim': 16, 'chunk_size': 4}
    model = Mamba2Forecaster(input_dim=8, output_dim=10, forecast_horizon=1, **sizes, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)


def logits(model: Mamba2Forecaster, images: jax.Array) -> jax.Array:
    """Returns [B, 10] for `images` [B, 8, 8]."""
    return einops.rearrange(model(images), 'b 1 classes -> b classes')


def train_step(model: Mamba2Forecaster, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
    """Updates the model and the optimizer, and returns the loss [] of the batch."""

    def mean_loss(model: Mamba2Forecaster) -> jax.Array:
        predicted = logits(model, batch['image'])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(predicted, batch['label']))

    loss, gradients = nnx.value_and_grad(mean_loss)(model)
    optimizer.update(model, gradients)
    return loss


def count_right(model: Mamba2Forecaster, batch: Batch) -> jax.Array:
    """Returns the number of digits that the model recognizes."""
    return jnp.sum(jnp.argmax(logits(model, batch['image']), axis=-1) == batch['label'])


if __name__ == '__main__':
    STEPS = flags.DEFINE_integer('steps', 100, 'Training steps.', lower_bound=1)
    DEVICES = flags.DEFINE_integer('devices', None, 'How many devices to use, or to simulate.', lower_bound=1)
    PLAN = flags.DEFINE_bool('plan', False, 'Print the plan of the step.')
    VERIFY = flags.DEFINE_bool('verify', False, 'Compare the step with the same step on one device.')

    def run(_: list[str]) -> None:
        quiet_logs()
        main(STEPS.value, DEVICES.value, PLAN.value, VERIFY.value)

    app.run(run)
