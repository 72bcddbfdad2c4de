"""What is in a safetensors file, and where? Its header, and reading blocks of one tensor.

The format: eight bytes with the length of the header, the header (JSON: name -> dtype, shape, offsets), and
the tensors one after the other, row by row, little-endian. https://github.com/huggingface/safetensors#format

The library of that name maps a file into memory: a block of columns then brings the pages of all columns with
it, and float8 is unknown to it as NumPy. Here the bytes of a block are read, and no mapping is made.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from scalax._aligned import aligned
from scalax.errors import CheckpointError

_LENGTH = 8
_LARGEST_HEADER = 100_000_000  # bytes; what the format allows
_PAGE = 1 << 12  # bytes: what lies within a page of the next run is cheaper read than jumped over
_BAND = 1 << 20  # bytes that are then read at once
_MOST = 1024  # parts that one system call fills (IOV_MAX)
_SPARSE = 16  # where less than one byte of so many is wanted, seeking is cheaper than reading all

DTYPES: Mapping[str, Any] = {
    'BOOL': np.bool_,
    **{
        f'{kind}{bits}': f'{name}{bits}'
        for kind, name in (('I', 'int'), ('U', 'uint'))
        for bits in (8, 16, 32, 64)
    },
    'F16': np.float16,
    'F32': np.float32,
    'F64': np.float64,
    'C64': np.complex64,
    'BF16': ml_dtypes.bfloat16,
    'F8_E4M3': ml_dtypes.float8_e4m3fn,
    'F8_E5M2': ml_dtypes.float8_e5m2,
    'F8_E8M0': ml_dtypes.float8_e8m0fnu,
}

Box = Sequence[slice]
"""For each dimension, from where to where; without steps."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a tensor lies.

    Attributes:
        file: in which file.
        name: its name there.
        shape: its shape.
        dtype: its dtype.
        begin: the position of its first byte in the file.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    begin: int


def tensors_of(file: Path) -> list[Tensor]:
    """The tensors of a file, in the order in which they lie there.

    Raises:
        CheckpointError: it is no such file, or its end is missing.
    """
    try:
        size = file.stat().st_size
        with file.open('rb') as opened:
            length = int.from_bytes(opened.read(_LENGTH), 'little')
            if size < _LENGTH or not 0 < length <= _LARGEST_HEADER:
                raise CheckpointError(
                    f'{file} is no safetensors file: its header cannot be {length} bytes long'
                )
            text = opened.read(length)
    except OSError as error:
        raise CheckpointError(f'{file} cannot be read: {error.strerror or error}') from error
    if len(text) < length:
        raise CheckpointError(
            f'{file} is truncated: its header has {length} bytes, and {len(text)} are there'
        )
    try:
        header = json.loads(text)
        entries = [(name, entry) for name, entry in header.items() if name != '__metadata__']
        found = [_tensor(file, name, entry, _LENGTH + length) for name, entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f'{file} is no safetensors file: {type(error).__name__}: {error}') from error
    found.sort(key=lambda tensor: tensor.begin)
    end, last = 0, ''  # of the tensors so far
    for tensor in found:
        if tensor.begin < end and 0 not in tensor.shape:
            raise CheckpointError(f'{file} is damaged: {last} and {tensor.name} overlap')
        end, last = max((end, last), (tensor.begin + _bytes(tensor.shape, tensor.dtype), tensor.name))
    if size < end:
        raise CheckpointError(f'{file} is truncated: it has {size} bytes, and its tensors need {end}')
    return found


def _tensor(file: Path, name: str, entry: Mapping[str, Any], start: int) -> Tensor:
    if entry['dtype'] not in DTYPES:
        raise CheckpointError(f'{file}: {name} has the dtype {entry["dtype"]}, which JAX does not have')
    dtype = np.dtype(DTYPES[entry['dtype']])
    shape: tuple[int, ...] = tuple(entry['shape'])
    begin, end = entry['data_offsets']
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise CheckpointError(
            f'{file} is damaged: {name} has the shape {entry["shape"]} and the offsets '
            f'{entry["data_offsets"]}; both are whole numbers, at least 0'
        )
    if end - begin != _bytes(shape, dtype):
        raise CheckpointError(
            f'{file} is damaged: {name} is {dtype}{list(shape)}, which is {_bytes(shape, dtype)} bytes, and '
            f'has {end - begin}'
        )
    return Tensor(file, name, shape, dtype, start + begin)


def _bytes(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    return math.prod(shape) * dtype.itemsize


def bytes_of(tensor: Tensor, box: Box) -> int:
    """The size of a block."""
    return _bytes([part.stop - part.start for part in box], tensor.dtype)


def read_boxes(descriptor: int, tensor: Tensor, boxes: Sequence[Box]) -> list[np.ndarray]:
    """Blocks of a tensor, each in memory of its own.

    Exactly their own bytes are read; only where parts of a block lie less than a page apart, what is between
    them is read with them. What follows one another in the file is read at once, whichever blocks it goes to:
    system calls are what short runs cost.

    Args:
        descriptor: of the opened file.
        tensor: which.
        boxes: which parts of it; they do not meet.

    Raises:
        CheckpointError: the file has become shorter.
    """
    blocks = [aligned(tuple(part.stop - part.start for part in box), tensor.dtype) for box in boxes]
    far = []
    for box, block in zip(boxes, blocks, strict=True):
        if block.size:
            runs = _runs(tensor, box)
            flat = block.reshape(-1).view(np.uint8)
            if runs.size < runs.stride <= _PAGE:
                _read_close(descriptor, tensor, runs, flat)
            else:
                far.append((runs, flat))
    if far:
        _read_far(descriptor, tensor, far)
    return blocks


def _read_close(descriptor: int, tensor: Tensor, runs: _Runs, flat: np.ndarray) -> None:
    """Reads what is between the runs too, a bounded number of bytes at a time."""
    target = flat.reshape(len(runs.starts), runs.size)
    at_once = _BAND // runs.stride
    buffer = np.empty(at_once * runs.stride, np.uint8)
    for first in range(0, len(target), runs.count):
        for i in range(first, first + runs.count, at_once):
            rows = target[i : min(i + at_once, first + runs.count)]
            span = (len(rows) - 1) * runs.stride + runs.size
            _fill(descriptor, [buffer[:span]], int(runs.starts[i]), tensor)
            rows[:] = buffer[: len(rows) * runs.stride].reshape(len(rows), -1)[:, : runs.size]


def _read_far(descriptor: int, tensor: Tensor, blocks: Sequence[tuple[_Runs, np.ndarray]]) -> None:
    """Reads the runs of several blocks in the order of the file, as many at once as follow one another."""
    views = [flat.data for _, flat in blocks]
    sizes = np.asarray([runs.size for runs, _ in blocks])
    firsts = np.cumsum([0, *(len(runs.starts) for runs, _ in blocks)])
    starts = np.concatenate([runs.starts for runs, _ in blocks])
    order = np.argsort(starts, kind='stable')
    # All that is more than a number or two of each run is made for some runs at a time: there may be many.
    for i in range(0, len(order), _MOST):
        now = order[i : i + _MOST]
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
        # Short runs are many: the loop over them is one of C.
        counts = map(os.preadv, itertools.repeat(descriptor), parts, begins.tolist())
        for part in np.flatnonzero(np.fromiter(counts, np.int64, len(parts)) < wanted).tolist():
            _fill(descriptor, parts[part], int(begins[part]), tensor)


def read_ahead(descriptor: int, tensor: Tensor, boxes: Sequence[Box]) -> None:
    """Has the system read from the disk what will be wanted soon, in one piece, if much of that piece will.

    Short runs that are far apart are read one by one otherwise, each when it is asked for.

    Args:
        descriptor: of the opened file.
        tensor: which.
        boxes: the blocks of it that will be read.
    """
    if not boxes or not tensor.shape or not hasattr(os, 'posix_fadvise'):
        return
    row = _bytes(tensor.shape[1:], tensor.dtype)
    first, last = min(box[0].start for box in boxes), max(box[0].stop for box in boxes)
    wanted = sum(bytes_of(tensor, box) for box in boxes)
    if wanted * _SPARSE >= (last - first) * row:
        start = tensor.begin + first * row
        os.posix_fadvise(descriptor, start, (last - first) * row, os.POSIX_FADV_WILLNEED)


@dataclasses.dataclass(frozen=True)
class _Runs:
    """The parts of a block whose bytes follow one another in the file.

    Attributes:
        size: how many bytes each has.
        starts: where each begins in the file, in ascending order.
        count: so many of them lie at equal distances, again and again.
        stride: that distance.
    """

    size: int
    starts: np.ndarray
    count: int
    stride: int


def _runs(tensor: Tensor, box: Box) -> _Runs:
    strides = [tensor.dtype.itemsize * math.prod(tensor.shape[dim + 1 :]) for dim in range(len(box))]
    inner = max(len(box) - 1, 0)  # the dimension whose rows follow one another
    while inner and box[inner] == slice(0, tensor.shape[inner]):
        inner -= 1
    size = tensor.dtype.itemsize * math.prod(part.stop - part.start for part in box[inner:])
    starts = np.asarray([tensor.begin + (box[inner].start * strides[inner] if box else 0)])
    for part, stride in zip(box[:inner], strides, strict=False):
        starts = (starts[:, None] + np.arange(part.start, part.stop) * stride).reshape(-1)
    if not inner:
        return _Runs(size, starts, 1, size)
    return _Runs(size, starts, box[inner - 1].stop - box[inner - 1].start, strides[inner - 1])


def _fill(descriptor: int, targets: list[Any], start: int, tensor: Tensor) -> None:
    """Reads as many bytes as *targets* have, one target after the other."""
    wanted = sum(target.nbytes for target in targets)
    done = os.preadv(descriptor, targets, start)
    while done < wanted:
        rest = [*targets]
        left = done
        while left >= rest[0].nbytes:
            left -= rest.pop(0).nbytes
        count = os.preadv(descriptor, [memoryview(rest[0])[left:], *rest[1:]], start + done)
        if not count:
            raise CheckpointError(f'{tensor.file} became shorter while it was read: {tensor.name} ends early')
        done += count
