"""Safetensors files: the header, which says where each tensor is, and reads of blocks of one tensor.

The format: eight bytes with the length of the header, the header (JSON: name -> dtype, shape, offsets), and
the tensors one after the other, row by row, little-endian. https://github.com/huggingface/safetensors#format

What the library of that name refuses is refused here. It also accepts some things that are refused here:
an entry written as a list, or its dtype as an object, which the format does not allow; a repeated key, of
which it takes the last; dtypes of less than a byte, and shapes that no NumPy array has.

That library maps a file into memory: a block of columns then brings in the pages of all columns, and it does
not know float8 as NumPy. Here the bytes of a block are read, and nothing is mapped.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from scalax._hostdata.transfer import aligned_empty
from scalax._util import strict_json
from scalax.errors import CheckpointError

LENGTH = 8
_MOST_BYTES = (1 << 63) - 1  # of an array, not counting dimensions of size 0
_MOST_DIMENSIONS = 64
_NAME = 200  # characters of a name that messages show in full
_METADATA = '__metadata__'
_PAGE = 1 << 12  # bytes: a gap of up to a page is cheaper to read than to skip
_BAND = 1 << 20  # bytes that are then read at once
_MOST_PARTS = 1024  # parts that one system call fills (IOV_MAX)
_SPARSE = 16  # if less than one byte of so many is wanted, seeking is cheaper than reading all

Box = Sequence[slice]
"""For each dimension, from where to where; without steps."""

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
    'F8_E4M3FNUZ': ml_dtypes.float8_e4m3fnuz,
    'F8_E5M2FNUZ': ml_dtypes.float8_e5m2fnuz,
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file.

    Attributes:
        file: the path of the file.
        name: its name in the file.
        shape: its shape.
        dtype: its dtype.
        begin: the position of its first byte in the file.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    begin: int

    @property
    def label(self) -> str:
        """Its name, as messages show it."""
        return in_message(self.name)

    @property
    def size(self) -> int:
        """Its bytes."""
        return byte_count(self.shape, self.dtype)


def tensors_of(file: Path, opened: io.FileIO) -> list[Tensor]:
    """The tensors of a file, in the order of the file.

    Args:
        file: its path.
        opened: the file itself.

    Raises:
        CheckpointError: it is not a safetensors file, or is damaged.
    """
    try:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(strict_json.exactly(opened, min(LENGTH, size), 0), 'little')
        if size < LENGTH or not 0 < length <= strict_json.LARGEST:
            raise CheckpointError(f'{file} is no safetensors file: its header cannot have {length:,} bytes')
        if size - LENGTH < length:
            raise CheckpointError(
                f'{file} is truncated: its header has {length:,} bytes, and {size - LENGTH:,} are there'
            )
        header = strict_json.exactly(opened, length, LENGTH)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f'{file} cannot be read: {strict_json.reason(error)}') from error
    return parse_header(file, header, size)


def parse_header(file: Path, header: bytes | bytearray, size: int) -> list[Tensor]:
    """The tensors that a header lists, in the order of the file.

    Args:
        file: the path of the file.
        header: the JSON.
        size: the size of the whole file.

    Raises:
        CheckpointError: it is not a header, or does not fit the size of the file.
    """
    try:
        entries = strict_json.parse(header)
        _require(isinstance(entries, dict), 'its header is no object of tensors')
        _require(_is_valid_metadata(entries.pop(_METADATA, None)), f'{_METADATA} is not from text to text')
        found = [_tensor(file, name, entry, LENGTH + len(header)) for name, entry in entries.items()]
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f'{file} is no safetensors file: {error}') from error
    found.sort(key=lambda tensor: (tensor.begin, tensor.size))
    end, last = LENGTH + len(header), 'the header'
    for tensor in found:
        if tensor.begin < end:
            raise CheckpointError(f'{file} is damaged: {last} and {tensor.label} overlap')
        if tensor.begin > end:
            between = f'{tensor.begin - end} bytes between {last} and {tensor.label}'
            raise CheckpointError(f'{file} is damaged: {between} belong to no tensor')
        end, last = tensor.begin + tensor.size, tensor.label
    if size < end:
        raise CheckpointError(f'{file} is truncated: it has {size} bytes, and its tensors need {end}')
    if size > end:
        raise CheckpointError(f'{file} is damaged: {size - end} bytes behind {last} belong to no tensor')
    return found


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _is_valid_metadata(value: Any) -> bool:
    """Whether the format allows it: None, or strings by name."""
    strings = isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
    return value is None or strings


def _tensor(file: Path, name: str, entry: Any, start: int) -> Tensor:
    called = in_message(name)
    keys = ('dtype', 'shape', 'data_offsets')
    if not isinstance(entry, dict) or not all(key in entry for key in keys):
        raise ValueError(f'{called} is not an object with {", ".join(keys)}, but {strict_json.brief(entry)}')
    code, shape, offsets = (entry[key] for key in keys)
    _require(isinstance(code, str), f'{called} has the dtype {strict_json.brief(code)}')
    if code not in DTYPES:
        raise CheckpointError(f'{file}: {called} has the dtype {in_message(code)}, which cannot be loaded')
    dtype = np.dtype(DTYPES[code])
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f'{file} is damaged: {called} has the shape {strict_json.brief(shape)} and the offsets '
            f'{strict_json.brief(offsets)}; both are lists of whole numbers, at least 0, and offsets are two'
        )
    too_many = len(shape) > _MOST_DIMENSIONS
    if too_many or math.prod(size for size in shape if size) * dtype.itemsize > _MOST_BYTES:
        raise CheckpointError(
            f'{file}: {called} has the shape {strict_json.brief(shape)}, which no array of {dtype} can have'
        )
    tensor = Tensor(file, name, tuple(shape), dtype, start + offsets[0])
    if offsets[1] - offsets[0] != tensor.size:
        raise CheckpointError(
            f'{file} is damaged: {called} is {dtype}{shape}, which is {tensor.size} bytes, and has '
            f'{offsets[1] - offsets[0]}'
        )
    return tensor


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def byte_count(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    """The bytes of an array."""
    return math.prod(shape) * dtype.itemsize


def in_message(name: str) -> str:
    """A name from a file, as messages show it."""
    return name if name.isprintable() and len(name) <= _NAME else strict_json.brief(name)


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
