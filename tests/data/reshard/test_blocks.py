"""Schedules of random blocks, executed with NumPy instead of devices."""

import itertools
import math
from collections import Counter

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from scalax._data.host.boxes import box_shape, boxes_of, volume
from scalax._data.reshard.block_schedule import Piece, make_schedule


def schedule_for(shape, source, target, **options):
    """Returns the schedule between blocks given as slices."""
    return make_schedule(boxes_of(shape, source), boxes_of(shape, target), **options)


def slices_in(box, block):
    """Returns the slices of a box within a block that contains it."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(box, block, strict=True))


@st.composite
def layouts(draw, shape, devices):
    """Draws device -> one cell of a grid; one or several devices hold each cell."""
    names = draw(st.permutations(devices))[: draw(st.integers(1, len(devices)))]
    cuts = []
    for size in shape:
        edges = draw(st.lists(st.integers(1, max(size - 1, 1)), max_size=3, unique=True))
        bounds = [0, *sorted(edge for edge in edges if edge < size), size]
        cuts.append([*map(slice, bounds, bounds[1:])])
    while math.prod(map(len, cuts)) > len(names):
        max(cuts, key=len).clear()
        cuts = [along or [slice(None)] for along in cuts]
    cells = [tuple(cut[i] for cut, i in zip(cuts, at, strict=True)) for at in np.ndindex(*map(len, cuts))]
    return {name: cells[i % len(cells)] for i, name in enumerate(names)}


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    return (
        shape,
        draw(layouts(shape, 'abcdefgh')),
        draw(layouts(shape, draw(st.sampled_from(['abcdefgh', 'efghijkl', 'stuvwxyz'])))),
        draw(st.none() | st.integers(1, 9)),
        draw(st.integers(1, 8)),
    )


def carried_out(shape, schedule, array):
    """Executes a schedule; returns the target blocks, and the number of writes of each element."""
    have = {device: array[slices_in(box, [(0, n) for n in shape])] for device, box in schedule.source.items()}
    blocks = {device: np.zeros([b - a for a, b in box], int) for device, box in schedule.target.items()}
    written = {device: np.zeros_like(block) for device, block in blocks.items()}
    for pieces in [*schedule.local_rounds, *schedule.transfer_rounds]:
        values = []
        for piece in pieces:
            block = schedule.source[piece.source]
            values.append(have[piece.source][slices_in(piece.box, block)])
        for piece, value in zip(pieces, values, strict=True):
            at = slices_in(piece.box, schedule.target[piece.target])
            blocks[piece.target][at] = value
            written[piece.target][at] += 1
    return blocks, written


@hypothesis.given(cases())
def test_schedules_between_random_layouts(case):
    shape, source, target, most, group = case
    schedule = schedule_for(
        shape, source, target, max_elements=most, locality=lambda device: ord(device) // group
    )
    array = np.arange(1, math.prod(shape) + 1).reshape(shape)
    blocks, written = carried_out(shape, schedule, array)
    assert [*blocks] == [*target]
    for device, index in target.items():
        np.testing.assert_array_equal(blocks[device], array[index])
        assert (written[device] == 1).all()
    for pieces in [*schedule.local_rounds, *schedule.transfer_rounds]:
        assert len({box_shape(piece.box) for piece in pieces}) == 1
        assert max(Counter(piece.source for piece in pieces).values()) == 1
        assert max(Counter(piece.target for piece in pieces).values()) == 1
    for piece in itertools.chain(*schedule.transfer_rounds):
        assert piece.source != piece.target
    for piece in itertools.chain(*schedule.local_rounds, *schedule.transfer_rounds):
        assert 1 <= volume(piece.box) <= (most or math.inf)


def test_local_pieces_are_not_sent():
    blocks = {device: (slice(device, device + 1),) for device in range(4)}
    schedule = schedule_for((4,), blocks, blocks)
    assert schedule.transfer_rounds == []
    assert schedule.local_rounds == [[Piece(device, device, ((device, device + 1),)) for device in range(4)]]


def test_replicas_share_the_sending():
    source = {f's{i}': (slice(None),) for i in range(4)}
    target = {f't{i}': (slice(i, i + 1),) for i in range(8)}
    schedule = schedule_for((8,), source, target)
    assert [len(pieces) for pieces in schedule.transfer_rounds] == [4, 4]
    sent = Counter(piece.source for pieces in schedule.transfer_rounds for piece in pieces)
    assert sent == dict.fromkeys(source, 2)


def test_devices_receive_from_their_own_group():
    source = {f'{host}{i}': (slice(i, i + 1),) for host in 'ab' for i in range(2)}
    target = {f'{host}{i}': (slice(None),) for host in 'abc' for i in range(2, 4)}
    schedule = schedule_for((2,), source, target, locality=lambda device: device[0])
    pieces = [piece for pieces in schedule.transfer_rounds for piece in pieces]
    assert len(pieces) == 12
    assert all(piece.source[0] == piece.target[0] for piece in pieces if piece.target[0] != 'c')


def test_transposed_sharding_needs_one_round_per_device():
    n = 64
    rows = {i: (slice(i, i + 1), slice(None)) for i in range(n)}
    columns = {n + i: (slice(None), slice(i, i + 1)) for i in range(n)}
    assert len(schedule_for((n, n), rows, columns).transfer_rounds) == n


def test_missing_and_overlapping_blocks():
    with pytest.raises(ValueError) as missing:
        schedule_for((4,), {0: (slice(0, 2),)}, {0: (slice(None),)})
    assert str(missing.value) == 'the blocks of the source have 2 of the 4 elements of ((0, 4),)'
    with pytest.raises(ValueError) as overlapping:
        schedule_for((4,), {0: (slice(0, 3),), 1: (slice(2, 4),)}, {0: (slice(None),)})
    assert str(overlapping.value) == 'the blocks of the source overlap: [(0, 3), (2, 4)]'
