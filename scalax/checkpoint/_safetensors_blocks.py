"""Reads of blocks of one tensor of a safetensors file: their own bytes, straight into their memory.

The library of that name maps a file into memory: a block of columns then brings in the pages of all columns,
a file that becomes shorter ends the process, and it does not know float8 as NumPy.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from scalax._hostdata.transfer import aligned_empty
from scalax._util import strict_json
from scalax.checkpoint._safetensors_header import Tensor, byte_count
from scalax.errors import CheckpointError

_PAGE = 1 << 12  # bytes: a gap of up to a page is cheaper to read than to skip
_BAND = 1 << 20  # bytes that are then read at once
_SPARSE = 16  # if less than one byte of so many is wanted, seeking is cheaper than reading all

Box = Sequence[slice]
"""For each dimension, from where to where; without steps."""


def read_block(descriptor: int, tensor: Tensor, box: Box) -> np.ndarray:
    """A block of a tensor. Only its own bytes are read, and gaps of less than a page between them.

    Args:
        descriptor: of the opened file.
        tensor: the tensor.
        box: the part of it.

    Raises:
        CheckpointError: the file cannot be read, or has become shorter.
    """
    block = aligned_empty([part.stop - part.start for part in box], tensor.dtype)
    if not block.size:
        return block
    strides = [byte_count(tensor.shape[dim + 1 :], tensor.dtype) for dim in range(len(box))]
    inner = max(len(box) - 1, 0)  # the first dimension whose slices are contiguous in the file
    while inner and box[inner] == slice(0, tensor.shape[inner]):
        inner -= 1
    starts: np.ndarray = np.asarray([tensor.begin + (box[inner].start * strides[inner] if box else 0)])
    for part, stride in zip(box[:inner], strides, strict=False):
        starts = (starts[:, None] + np.arange(part.start, part.stop) * stride).reshape(-1)
    runs = block.reshape(-1).view(np.uint8).reshape(len(starts), -1)
    try:
        if inner and strides[inner - 1] <= _PAGE:
            count = box[inner - 1].stop - box[inner - 1].start
            for i in range(0, len(starts), count):
                _read_rows(descriptor, tensor, runs[i : i + count], int(starts[i]), strides[inner - 1])
        else:
            for run, start in zip(runs, starts.tolist(), strict=True):
                _fill(descriptor, tensor, run, start)
    except OSError as error:
        raise CheckpointError(
            f'{tensor.file} cannot be read: {tensor.label}: {strict_json.reason(error)}'
        ) from error
    return block


def _read_rows(descriptor: int, tensor: Tensor, runs: np.ndarray, start: int, stride: int) -> None:
    """Reads runs that begin *stride* bytes apart, with the bytes between them, a bounded number at a time."""
    at_once = _BAND // stride
    buffer = np.empty(at_once * stride, np.uint8)
    for i in range(0, len(runs), at_once):
        part = runs[i : i + at_once]
        _fill(descriptor, tensor, buffer[: len(part) * stride - stride + part.shape[1]], start + i * stride)
        part[:] = buffer[: len(part) * stride].reshape(len(part), stride)[:, : part.shape[1]]


def _fill(descriptor: int, tensor: Tensor, target: np.ndarray, start: int) -> None:
    """Fills memory with the bytes of the file from a position on."""
    done = 0
    while done < target.size:
        count = os.preadv(descriptor, [target[done:]], start + done)
        if not count:
            raise CheckpointError(
                f'{tensor.file} became shorter while it was read: {tensor.label} ends early'
            )
        done += count


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
    wanted = sum(byte_count([part.stop - part.start for part in box], tensor.dtype) for box in boxes)
    if wanted * _SPARSE >= (last - first) * row:
        start = tensor.begin + first * row
        os.posix_fadvise(descriptor, start, (last - first) * row, os.POSIX_FADV_WILLNEED)
