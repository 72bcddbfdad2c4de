"""Conversions between placements, on simulated devices: each ends in its target placement."""

import itertools

import numpy as np
import pytest

from scalax._spmd.placements.placement import (
    REPLICATE,
    SUM,
    Partial,
    RedistributeOp,
    Shard,
    join,
    redistribute,
)

SIZES = (2, 3)
VALUE = np.arange(144.0).reshape(12, 12)
DEVICES = [*itertools.product(*map(range, SIZES))]
STATE = Shard(1, is_state=True)


def held(placements):
    """Returns the local values of a value: for a sum, its terms."""
    blocks = {}
    for device in DEVICES:
        block = VALUE
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                block = np.split(block, SIZES[axis], placement.dim)[device[axis]]
            elif placement == SUM:
                block = block * (1 + device[axis]) / sum(range(1, SIZES[axis] + 1))
        blocks[device] = block
    return blocks


def group(device, axes):
    """Returns the devices that exchange blocks along axes, in the order of the axes."""
    return [other for other in DEVICES if all(other[i] == device[i] for i in range(2) if i not in axes)]


def after(step, blocks):
    """Returns the local values after a step."""
    results = {}
    for device, block in blocks.items():
        others = group(device, step.axes)
        position, count = others.index(device), len(others)
        every = [blocks[other] for other in others]
        if step.kind == 'all_gather':
            results[device] = np.concatenate(every, step.dim)
        elif step.kind == 'all_to_all':
            parts = [np.split(device_block, count, step.other_dim)[position] for device_block in every]
            results[device] = np.concatenate(parts, step.dim)
        elif step.kind == 'all_reduce':
            results[device] = sum(every)
        elif step.kind == 'reduce_scatter':
            results[device] = np.split(sum(every), count, step.dim)[position]
        elif step.kind == 'slice':
            results[device] = np.split(block, count, step.dim)[position]
        else:
            results[device] = block * (position == 0)
    return results


def is_held(blocks, placements):
    """Returns whether local values match a value in these placements."""
    for axis, placement in reversed([*enumerate(placements)]):
        kind = {REPLICATE: 'replicate', SUM: 'all_reduce'}.get(placement, 'all_gather')
        if kind == 'replicate':
            along = [[blocks[other] for other in group(device, (axis,))] for device in DEVICES]
            if not all(np.allclose(a, b) for a, *others in along for b in others):
                return False
        else:
            blocks = after(RedistributeOp(kind, (axis,), getattr(placement, 'dim', 0)), blocks)
    return all(np.allclose(block, VALUE) for block in blocks.values())


EVERY = [*itertools.product([Shard(0), Shard(1), REPLICATE, SUM], repeat=2)]


@pytest.mark.parametrize('source', EVERY, ids=str)
def test_conversions_end_in_their_targets(source):
    for target in EVERY:
        blocks = held(source)
        for step in redistribute(source, target):
            blocks = after(step, blocks)
        assert is_held(blocks, target), (source, target, redistribute(source, target))


X, R = Shard(0), REPLICATE
STEPS = [
    # FSDP
    ((X,), (R,), [RedistributeOp('all_gather', (0,), 0)]),
    ((SUM,), (STATE,), [RedistributeOp('reduce_scatter', (0,), 1)]),
    ((X,), (STATE,), [RedistributeOp('all_to_all', (0,), 0, 1)]),
    ((Shard(1),), (STATE,), []),
    # DDP over two axes
    ((SUM, SUM), (R, R), [RedistributeOp('all_reduce', (0, 1))]),
    # HSDP: reduce-scattered along the fast axis, and the shards all-reduced along the slow one
    ((SUM, SUM), (R, STATE), [RedistributeOp('reduce_scatter', (1,), 1), RedistributeOp('all_reduce', (0,))]),
    ((R, STATE), (R, R), [RedistributeOp('all_gather', (1,), 1)]),
    ((X, X), (R, R), [RedistributeOp('all_gather', (0, 1), 0)]),
    ((SUM, SUM), (X, X), [RedistributeOp('reduce_scatter', (0, 1), 0)]),
    # The minor blocks of a dimension are gathered before a major one changes.
    ((X, X), (R, X), [RedistributeOp('all_gather', (0, 1), 0), RedistributeOp('slice', (1,), 0)]),
    # Replicated values send nothing.
    ((R, R), (X, SUM), [RedistributeOp('slice', (0,), 0), RedistributeOp('mask', (1,))]),
    (
        (Partial('max'),),
        (X,),
        [RedistributeOp('all_reduce', (0,), 0, 0, 'max'), RedistributeOp('slice', (0,), 0)],
    ),
]


@pytest.mark.parametrize('source, target, steps', STEPS, ids=[f'{a}-{b}' for a, b, _ in STEPS])
def test_operations_of_conversions(source, target, steps):
    assert redistribute(source, target) == steps


JOINS = [
    (R, X, X),
    (R, SUM, SUM),
    (X, SUM, X),
    (SUM, STATE, STATE),
    (X, Shard(1), X),
    (STATE, Shard(1), Shard(1)),
    (SUM, Partial('max'), R),
]


@pytest.mark.parametrize('first, second, joined', JOINS, ids=str)
def test_join(first, second, joined):
    assert join(first, second) == joined


def test_axes_that_move_together_exchange_once():
    """If both mesh axes shard one dimension, one all-to-all exchanges it for another one."""
    [step] = redistribute((Shard(2), Shard(2)), (Shard(0), Shard(0)))
    assert (step.kind, step.axes, step.dim, step.other_dim) == ('all_to_all', (0, 1), 2, 0)
