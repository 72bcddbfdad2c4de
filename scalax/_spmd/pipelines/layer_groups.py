"""The groups of layers that stages of a pipeline store, and those that they run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from scalax._spmd.pipelines.summary import pipeline_scope


def reorder_layer_groups(
    local: Any, axis: str, stages: int, rounds: int, line: str, *, dim: int = 0, back: bool = False
) -> Any:
    """Returns the layers that a stage runs, of those that stages store, in code of one device; or back.

    Args:
        local: the layers of a stage, in the dimension *dim*.
        axis: the mesh axis of the stages.
        stages: how many there are.
        rounds: how many groups of layers a stage holds.
        line: the line of the loop.
        dim: the dimension of the layers.
        back: whether the layers are those that the stage ran, and those that it stores are returned.
    """
    stage = jax.lax.axis_index(axis)
    groups = local.reshape(*local.shape[:dim], rounds, -1, *local.shape[dim + 1 :])
    found = jnp.zeros_like(groups)
    for moves in _steps(stages, rounds):
        way = [(each.end, each.start) if back else (each.start, each.end) for each in moves]
        stored = jnp.asarray([each.stored for each in moves])[stage]
        run = jnp.asarray([each.run for each in sorted(moves, key=lambda each: each.end)])[stage]
        sent, kept = (run, stored) if back else (stored, run)
        group = jax.lax.dynamic_index_in_dim(groups, sent, dim, keepdims=False)
        with pipeline_scope('layers change stages', line):
            group = jax.lax.ppermute(group, axis, way)
        found = jax.lax.dynamic_update_index_in_dim(found, group, kept, dim)
    return found.reshape(local.shape)


class _Move(NamedTuple):
    """A group of layers: stage *start* stores it as group *stored*, stage *end* runs it in round *run*."""

    start: int
    stored: int
    end: int
    run: int


def _steps(stages: int, rounds: int) -> Iterator[list[_Move]]:
    """All groups, in steps in each of which every stage sends one and gets one, by the stage that sends.

    Stage s stores the groups from ``s * rounds`` on, and group g runs on stage ``g % stages``. With q the
    greatest common divisor of both, the first groups of q stages run on one stage: ``stages / q`` apart, each
    of these stages begins with another one of its groups.
    """
    common = math.gcd(stages, rounds)
    for step in range(rounds):
        moves = []
        for start in range(stages):
            first, own = step // common * common, (step + start * common // stages) % common
            run, end = divmod(start * rounds + first + own, stages)
            moves.append(_Move(start, first + own, end, run))
        yield moves
