"""An Equinox model of another project learns handwritten digits, sharded by FSDP.

    pip install equimo
    python -m examples.vit_equinox

`VisionTransformer` of the package equimo takes one image, and `jax.vmap` maps it over the batch. The model
and its step are those of one device; five lines of `main` run them on all devices.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

if __spec__ is None:  # run as a file, not with -m: import from the root of the clone
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import einops
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from examples.devices import choose_devices, quiet_logs
from examples.digits import load_data
from scalax.sharding import FSDPShardingRule, MeshShardingHelper
from scalax.sharding import PartitionSpec as P

State = dict[str, Any]
Batch = dict[str, jax.Array]

BATCH_SIZE = 64
LAYERS = 2
OPTIMIZER = optax.adamw(3e-3)


def main(
    steps: int = 200, devices: int | None = None, plan: bool = False, verify: bool = False
) -> list[float]:
    """Trains on four fifths of the digits, prints the accuracy on the last fifth, and returns the losses."""
    helper = MeshShardingHelper([-1], ['fsdp'], devices=choose_devices(devices))
    # The default, 2**20 elements, is for models of a useful size: it would replicate this one.
    rule = FSDPShardingRule(min_fsdp_size=2**10)
    state = helper.sjit(init, out_shardings=rule)(jax.random.key(0))
    shardings = {'in_shardings': (rule, P('fsdp')), 'out_shardings': (rule, P())}
    step = helper.sjit(train_step, **shardings, donate_argnums=0)
    count = helper.sjit(count_right, in_shardings=(rule, P()))

    train, test = (reshape(digits) for digits in load_data(seed=0))
    batches = np.random.default_rng(0).integers(len(train['label']), size=(steps, BATCH_SIZE))
    first = {name: values[batches[0]] for name, values in train.items()}
    print(str(step.explain_propagation(state, first)).partition('\n\n')[0])
    if plan:
        print(helper.plan(step, state, first))
    if verify:
        print(helper.verify(step, state, first))

    losses = []
    for indices in batches:
        state, loss = step(state, {name: values[indices] for name, values in train.items()})
        losses.append(float(loss))
    accuracy = int(count(state['model'], test)) / len(test['label'])
    print(f'loss {losses[0]:.2f} -> {losses[-1]:.2f}, accuracy on held-out digits {accuracy:.1%}')
    return losses


def reshape(digits: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the digits with images [N, 1, 8, 8]."""
    return {**digits, 'image': einops.rearrange(digits['image'], 'n (h w) -> n 1 h w', h=8)}


def make(key: jax.Array) -> eqx.Module:
    """Returns the model, for images of one channel."""
    import equimo.vision.models as em  # imported after `choose_devices`, because the import uses the devices

    sizes = {'img_size': 8, 'patch_size': 2, 'dim': 64, 'num_heads': [4], 'depths': [LAYERS]}
    return em.VisionTransformer(in_channels=1, num_classes=10, drop_path_rate=0.1, **sizes, key=key)


def with_arrays(arrays: Any) -> eqx.Module:
    """Returns the model with these arrays; its other leaves, such as dropout rates, are those of `make`."""
    shapes = eqx.filter_eval_shape(make, jax.random.key(0))
    static = eqx.filter(shapes, lambda leaf: not isinstance(leaf, jax.ShapeDtypeStruct))
    return eqx.combine(arrays, static)


def init(key: jax.Array) -> State:
    """Returns the arrays of the model, the state of the optimizer, and the key of dropout."""
    model_key, dropout_key = jax.random.split(key)
    arrays = eqx.filter(make(model_key), eqx.is_array)
    return {'model': arrays, 'optimizer': OPTIMIZER.init(arrays), 'key': dropout_key}


def train_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
    """Returns the state after one step, and the loss [] of the batch."""
    key, dropout_key = jax.random.split(state['key'])

    def mean_loss(arrays: Any) -> jax.Array:
        model = with_arrays(arrays)
        keys = jax.random.split(dropout_key, len(batch['label']))
        logits = jax.vmap(lambda image, key: model(image, key=key))(batch['image'], keys)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch['label']))

    loss, gradients = jax.value_and_grad(mean_loss)(state['model'])
    updates, optimizer = OPTIMIZER.update(gradients, state['optimizer'], state['model'])
    return {'model': eqx.apply_updates(state['model'], updates), 'optimizer': optimizer, 'key': key}, loss


def count_right(arrays: Any, batch: Batch) -> jax.Array:
    """Returns the number of digits that the model recognizes."""
    predict = functools.partial(with_arrays(arrays), key=jax.random.key(0), inference=True)
    logits = jax.vmap(predict)(batch['image'])
    return jnp.sum(jnp.argmax(logits, axis=-1) == batch['label'])


if __name__ == '__main__':
    STEPS = flags.DEFINE_integer('steps', 200, 'Training steps.', lower_bound=1)
    DEVICES = flags.DEFINE_integer('devices', None, 'How many devices to use, or to simulate.', lower_bound=1)
    PLAN = flags.DEFINE_bool('plan', False, 'Print the plan of the step.')
    VERIFY = flags.DEFINE_bool('verify', False, 'Compare the step with the same step on one device.')

    def run(_: list[str]) -> None:
        quiet_logs()
        main(STEPS.value, DEVICES.value, PLAN.value, VERIFY.value)

    app.run(run)
