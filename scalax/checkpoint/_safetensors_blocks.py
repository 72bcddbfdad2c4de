"""Reads of blocks of one tensor of a safetensors file: their own bytes, in as few system calls as possible.

The library of that name maps a file into memory: a block of columns then brings in the pages of all columns,
and it does not know float8 as NumPy. Here the bytes of a block are read, and nothing is mapped.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from scalax._hostdata.transfer import aligned_empty
from scalax._util import strict_json
from scalax.checkpoint._safetensors_header import Tensor, byte_count
from scalax.errors import CheckpointError

_PAGE = 1 << 12  # bytes: a gap of up to a page is cheaper to read than to skip
_BAND = 1 << 20  # bytes that are then read at once
_MOST_PARTS = 1024  # parts that one system call fills (IOV_MAX)
_SPARSE = 16  # if less than one byte of so many is wanted, seeking is cheaper than reading all

Box = Sequence[slice]
"""For each dimension, from where to where; without steps."""


def box_bytes(tensor: Tensor, box: Box) -> int:
    """The size of a block."""
    return byte_count([part.stop - part.start for part in box], tensor.dtype)


def read_blocks(descriptor: int, tensor: Tensor, boxes: Sequence[Box]) -> list[np.ndarray]:
    """Blocks of a tensor, each in memory of its own.

    Exactly their own bytes are read, except that where parts of a block are less than a page apart, the bytes
    between them are read as well. Bytes that are adjacent in the file are read at once, even if they go to
    several blocks: the cost of short runs is that of the system calls.

    Args:
        descriptor: of the opened file.
        tensor: the tensor.
        boxes: the parts of it; they do not overlap.

    Raises:
        CheckpointError: the file cannot be read, or has become shorter.
    """
    try:
        return _read_blocks(descriptor, tensor, boxes)
    except OSError as error:
        raise CheckpointError(
            f'{tensor.file} cannot be read: {tensor.label}: {strict_json.reason(error)}'
        ) from error


def _read_blocks(descriptor: int, tensor: Tensor, boxes: Sequence[Box]) -> list[np.ndarray]:
    blocks = [aligned_empty(tuple(part.stop - part.start for part in box), tensor.dtype) for box in boxes]
    sparse = []
    for box, block in zip(boxes, blocks, strict=True):
        if block.size:
            runs = _runs(tensor, box)
            flat = block.reshape(-1).view(np.uint8)
            if runs.size < runs.stride <= _PAGE:
                _read_dense(descriptor, tensor, runs, flat)
            else:
                sparse.append((runs, flat))
    if sparse:
        _read_sparse(descriptor, tensor, sparse)
    return blocks


def _read_dense(descriptor: int, tensor: Tensor, runs: _Runs, flat: np.ndarray) -> None:
    """Reads the bytes between the runs too, a bounded number at a time."""
    target = flat.reshape(len(runs.starts), runs.size)
    at_once = _BAND // runs.stride
    buffer = np.empty(at_once * runs.stride, np.uint8)
    for first in range(0, len(target), runs.count):
        for i in range(first, first + runs.count, at_once):
            rows = target[i : min(i + at_once, first + runs.count)]
            span = (len(rows) - 1) * runs.stride + runs.size
            _fill(descriptor, [buffer[:span]], int(runs.starts[i]), tensor)
            rows[:] = buffer[: len(rows) * runs.stride].reshape(len(rows), -1)[:, : runs.size]


def _read_sparse(descriptor: int, tensor: Tensor, blocks: Sequence[tuple[_Runs, np.ndarray]]) -> None:
    """Reads the runs of several blocks in the order of the file, adjacent ones at once."""
    views = [flat.data for _, flat in blocks]
    sizes = np.asarray([runs.size for runs, _ in blocks])
    firsts = np.cumsum([0, *(len(runs.starts) for runs, _ in blocks)])
    starts = np.concatenate([runs.starts for runs, _ in blocks])
    order = np.argsort(starts, kind='stable')
    # There may be many runs: all but a few numbers of each is computed for some runs at a time.
    for i in range(0, len(order), _MOST_PARTS):
        now = order[i : i + _MOST_PARTS]
        owners = np.searchsorted(firsts, now, 'right') - 1
        places = (now - firsts[owners]) * sizes[owners]
        begin, end = starts[now], starts[now] + sizes[owners]
        spans = zip(owners.tolist(), places.tolist(), sizes[owners].tolist(), strict=True)
        targets = [views[owner][place : place + size] for owner, place, size in spans]
        jumps = np.flatnonzero(begin[1:] != end[:-1]) + 1
        edges = np.asarray([0, *jumps, len(targets)])
        parts = [targets[first:last] for first, last in itertools.pairwise(edges.tolist())]
        begins = begin[edges[:-1]]
        wanted = end[edges[1:] - 1] - begins
        # There may be many short runs, so the loop over them runs in C.
        counts = map(os.preadv, itertools.repeat(descriptor), parts, begins.tolist())
        done = np.fromiter(counts, np.int64, len(parts))
        for part in np.flatnonzero(done < wanted).tolist():
            _fill(descriptor, parts[part], int(begins[part]), tensor, int(done[part]))


def read_ahead(descriptor: int, tensor: Tensor, boxes: Sequence[Box]) -> None:
    """Asks the system to read what will be wanted soon from the disk, as one piece if most of it will be.

    Otherwise short runs that are far apart are read one by one, each when it is asked for.

    Args:
        descriptor: of the opened file.
        tensor: the tensor.
        boxes: the blocks of it that will be read.
    """
    if not boxes or not tensor.shape or not hasattr(os, 'posix_fadvise'):
        return
    row = byte_count(tensor.shape[1:], tensor.dtype)
    first, last = min(box[0].start for box in boxes), max(box[0].stop for box in boxes)
    wanted = sum(box_bytes(tensor, box) for box in boxes)
    if wanted * _SPARSE >= (last - first) * row:
        start = tensor.begin + first * row
        os.posix_fadvise(descriptor, start, (last - first) * row, os.POSIX_FADV_WILLNEED)


@dataclasses.dataclass(frozen=True)
class _Runs:
    """The parts of a block that are contiguous in the file.

    Attributes:
        size: how many bytes each has.
        starts: where each begins in the file, in ascending order.
        count: the length of the groups of runs that have equal distances.
        stride: that distance.
    """

    size: int
    starts: np.ndarray
    count: int
    stride: int


def _runs(tensor: Tensor, box: Box) -> _Runs:
    strides = [tensor.dtype.itemsize * math.prod(tensor.shape[dim + 1 :]) for dim in range(len(box))]
    inner = max(len(box) - 1, 0)  # the first dimension whose slices are contiguous
    while inner and box[inner] == slice(0, tensor.shape[inner]):
        inner -= 1
    size = tensor.dtype.itemsize * math.prod(part.stop - part.start for part in box[inner:])
    starts = np.asarray([tensor.begin + (box[inner].start * strides[inner] if box else 0)])
    for part, stride in zip(box[:inner], strides, strict=False):
        starts = (starts[:, None] + np.arange(part.start, part.stop) * stride).reshape(-1)
    if not inner:
        return _Runs(size, starts, 1, size)
    return _Runs(size, starts, box[inner - 1].stop - box[inner - 1].start, strides[inner - 1])


def _fill(descriptor: int, targets: list[Any], start: int, tensor: Tensor, done: int = 0) -> None:
    """Fills *targets*, one after the other, from a position on; their first *done* bytes are read already."""
    wanted = sum(target.nbytes for target in targets)
    while done < wanted:
        rest = [*targets]
        left = done
        while left >= rest[0].nbytes:
            left -= rest.pop(0).nbytes
        count = os.preadv(descriptor, [memoryview(rest[0])[left:], *rest[1:]], start + done)
        if not count:
            raise CheckpointError(
                f'{tensor.file} became shorter while it was read: {tensor.label} ends early'
            )
        done += count
