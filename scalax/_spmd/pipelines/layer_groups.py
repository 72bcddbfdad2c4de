"""Exchange of layer groups between the stages that store them and the stages that run them.

With several repeats, a stage runs several groups of layers that are not neighbors, but the rule stores
neighboring layers on a stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from scalax._spmd.pipelines.summary import pipeline_scope


def reorder_layer_groups(
    local_layers: Any,
    axis: str,
    num_stages: int,
    num_repeats: int,
    line: str,
    *,
    dim: int = 0,
    to_storage: bool = False,
) -> Any:
    """Returns the layers that a stage runs from the layers that it stores, in manual code.

    Args:
        local_layers: the layers of the stage.
        axis: the mesh axis of the stages.
        num_stages: the number of stages.
        num_repeats: the number of groups of layers on each stage.
        line: the source line of the loop.
        dim: the dimension of the layers.
        to_storage: whether the inverse is computed: *local_layers* are those that the stage ran.
    """
    stage = jax.lax.axis_index(axis)
    groups = local_layers.reshape(*local_layers.shape[:dim], num_repeats, -1, *local_layers.shape[dim + 1 :])
    reordered = jnp.zeros_like(groups)
    for transfers in _exchange_steps(num_stages, num_repeats):
        stored_groups = jnp.asarray([transfer.stored_group for transfer in transfers])[stage]
        by_runner = sorted(transfers, key=lambda transfer: transfer.runner)
        repeats = jnp.asarray([transfer.repeat for transfer in by_runner])[stage]
        if to_storage:
            permutation = [(transfer.runner, transfer.owner) for transfer in transfers]
            source, target = repeats, stored_groups
        else:
            permutation = [(transfer.owner, transfer.runner) for transfer in transfers]
            source, target = stored_groups, repeats
        group = jax.lax.dynamic_index_in_dim(groups, source, dim, keepdims=False)
        with pipeline_scope('layers change stages', line):
            group = jax.lax.ppermute(group, axis, permutation)
        reordered = jax.lax.dynamic_update_index_in_dim(reordered, group, target, dim)
    return reordered.reshape(local_layers.shape)


class _Transfer(NamedTuple):
    """The transfer of a group of layers.

    Attributes:
        owner: the stage that stores the group.
        stored_group: the index of the group among those that the owner stores.
        runner: the stage that runs the group.
        repeat: the repeat in which it does.
    """

    owner: int
    stored_group: int
    runner: int
    repeat: int


def _exchange_steps(num_stages: int, num_repeats: int) -> Iterator[list[_Transfer]]:
    """Yields the transfers of all groups, in steps in which every stage sends one group and receives one.

    The transfers of a step are in the order of their owners.

    Stage s stores the groups from ``s * num_repeats`` on, and group g runs on stage ``g % num_stages``. With
    q the greatest common divisor of both numbers, the first groups of q stages run on the same stage. These
    stages are ``num_stages / q`` apart, and each of them begins with a different one of its groups.
    """
    common = math.gcd(num_stages, num_repeats)
    for step in range(num_repeats):
        transfers = []
        for owner in range(num_stages):
            first = step // common * common
            stored_group = first + (step + owner * common // num_stages) % common
            repeat, runner = divmod(owner * num_repeats + stored_group, num_stages)
            transfers.append(_Transfer(owner, stored_group, runner, repeat))
        yield transfers
