"""Data parallelism on one page: a small network learns handwritten digits.

    python -m examples.digits

The functions are plain JAX for one device. Three lines of `main` run them on all devices: the mesh, the
compiled training step, and the batch that is sharded over the devices.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __spec__ is None:  # run as a file, not with -m: import from the root of the clone
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from examples.devices import choose_devices
from scalax.sharding import MeshShardingHelper, PartitionSpec

Params = dict[str, jax.Array]

PIXELS, HIDDEN, CLASSES = 64, 256, 10
BATCH_SIZE = 128
OPTIMIZER = optax.adam(1e-2)


def main(steps: int = 300, devices: int | None = None, seed: int = 0) -> float:
    """Trains on four fifths of the digits, and returns the accuracy on the last fifth."""
    helper = MeshShardingHelper([-1], ['dp'], devices=choose_devices(devices))
    step = helper.sjit(
        train_step,
        in_shardings=(PartitionSpec(), PartitionSpec(), PartitionSpec('dp')),
        out_shardings=PartitionSpec(),
        donate_argnums=(0, 1),
    )
    train, test = load_data(seed)
    params = helper.sjit(init_params, out_shardings=PartitionSpec())(jax.random.key(seed))
    opt_state = helper.sjit(OPTIMIZER.init, out_shardings=PartitionSpec())(params)

    rng = np.random.default_rng(seed)
    devices_in_mesh = helper.mesh.size
    batch_size = -(-BATCH_SIZE // devices_in_mesh) * devices_in_mesh  # a multiple of the number of devices
    for _ in range(steps):
        indices = rng.integers(len(train['label']), size=batch_size)
        batch = {name: values[indices] for name, values in train.items()}
        params, opt_state, loss = step(params, opt_state, helper.local_data_to_global_array(batch))
        # Without this, the host queues all steps at once. Simulated devices share a few threads, and a long
        # queue leaves no thread to finish a collective, so XLA times out.
        loss.block_until_ready()
    predictions = helper.sjit(predict, out_shardings=PartitionSpec())(params, test['image'])
    return float(np.mean(np.asarray(predictions) == test['label']))


def load_data(seed: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns the training and test digits, as {'image': [N, 64] in 0..1, 'label': [N]}."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(
        images.astype(np.float32) / 16, labels, test_size=0.2, random_state=seed, stratify=labels
    )
    train_images, test_images, train_labels, test_labels = split
    return (
        {'image': train_images, 'label': train_labels},
        {'image': test_images, 'label': test_labels},
    )


def init_params(key: jax.Array) -> Params:
    """Returns a network with one hidden layer."""
    first, second = jax.random.split(key)
    return {
        'hidden': jax.random.normal(first, (PIXELS, HIDDEN)) * np.sqrt(2 / PIXELS),
        'hidden_bias': jnp.zeros(HIDDEN),
        'output': jax.random.normal(second, (HIDDEN, CLASSES)) * np.sqrt(1 / HIDDEN),
        'output_bias': jnp.zeros(CLASSES),
    }


def logits(params: Params, images: jax.Array) -> jax.Array:
    """Returns [B, 10] for `images` [B, 64]."""
    hidden = jax.nn.relu(images @ params['hidden'] + params['hidden_bias'])
    return hidden @ params['output'] + params['output_bias']


def predict(params: Params, images: jax.Array) -> jax.Array:
    """Returns the most likely digit [B] for each of `images` [B, 64]."""
    return jnp.argmax(logits(params, images), axis=-1)


def train_step(
    params: Params, opt_state: optax.OptState, batch: dict[str, jax.Array]
) -> tuple[Params, optax.OptState, jax.Array]:
    """Returns the parameters and the optimizer state after one step, and the loss [] of the batch."""

    def mean_loss(params: Params) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits(params, batch['image']), batch['label']
        )
        return jnp.mean(losses)

    loss, gradients = jax.value_and_grad(mean_loss)(params)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


if __name__ == '__main__':
    STEPS = flags.DEFINE_integer('steps', 300, 'Training steps.', lower_bound=1)
    DEVICES = flags.DEFINE_integer(
        'devices', None, 'The number of devices to use, or to simulate.', lower_bound=1
    )
    app.run(lambda argv: print(f'test accuracy {main(STEPS.value, DEVICES.value):.2%}'))
