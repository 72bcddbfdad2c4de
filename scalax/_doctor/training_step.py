"""A small training step on all devices of a process, beside the same step on one of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from scalax._helper import MeshShardingHelper
from scalax._verify.verified import Verified

_RATE = 1e-3


def train_step(params: Any, batch: Any) -> Any:
    """Two layers, and a step down their gradient."""
    loss, gradients = jax.value_and_grad(_loss)(params, batch)
    return {'params': jax.tree.map(lambda p, g: p - _RATE * g, params, gradients), 'loss': loss}


def _loss(params: Any, batch: Any) -> Any:
    hidden = jax.nn.gelu(batch['x'] @ params['up'] + params['bias'])
    return jnp.mean((hidden @ params['down'] - batch['y']) ** 2)


def verified() -> Verified | None:
    """Whether the step is the same on all devices of this process and on one; None if there is only one.

    The batch is split over one mesh axis, the weights over both.
    """
    devices = jax.local_devices()
    count = len(devices)
    if count == 1:
        return None
    columns = 2 if count > 2 and count % 2 == 0 else 1
    helper = MeshShardingHelper([count // columns, columns], ['fsdp', 'tp'], devices=devices)

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, 'float32')

    width, hidden, rows = 4 * count, 8 * count, 2 * count
    params = {'up': array(width, hidden), 'bias': array(hidden), 'down': array(hidden, width)}
    split = {'up': P('fsdp', 'tp'), 'bias': P('tp'), 'down': P('tp', 'fsdp')}
    step = helper.sjit(
        train_step,
        in_shardings=(split, P('fsdp')),
        out_shardings={'params': split, 'loss': P()},
        donate_argnums=0,
    )
    batch = {'x': array(rows, width), 'y': array(rows, width)}
    # Products of less precision than float32 has are others where XLA takes another kernel.
    with jax.default_matmul_precision('highest'):
        return helper.verify(step, params, batch)
