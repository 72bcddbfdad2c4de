"""Header of a safetensors file, which lists the position of each tensor.

The format is eight bytes with the length of the header, the header (JSON: name -> dtype, shape, offsets), and
the tensors one after the other, in row-major order, little-endian.
https://github.com/huggingface/safetensors#format

This parser rejects every header that the safetensors library rejects. It does not use the library, because
most of the library's errors do not name the entry, and because it need not be installed. The library accepts
some headers that this parser rejects: with a repeated key, of which the library takes the last; with other
keys in an entry; with an entry written as a list, or a dtype written as an object; with dtypes of less than a
byte; and with shapes that no NumPy array can have.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from scalax._core.util import strict_json
from scalax._core.util.strict_json import brief, printable
from scalax.errors import CheckpointError, shown

LENGTH = 8
"""The number of bytes before the header, which contain its length."""

_MAX_BYTES = (1 << 63) - 1  # of an array, ignoring dimensions of size 0
_MAX_DIMENSIONS = 64  # of a NumPy array
_LFS = b'version https://git-lfs.github.com/spec/'  # as the length of a header: more than a file can have
_METADATA = '__metadata__'
_KEYS = ('dtype', 'shape', 'data_offsets')

DTYPES: Mapping[str, Any] = {
    'BOOL': np.bool_,
    'I8': np.int8,
    'I16': np.int16,
    'I32': np.int32,
    'I64': np.int64,
    'U8': np.uint8,
    'U16': np.uint16,
    'U32': np.uint32,
    'U64': np.uint64,
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


class Tensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        name: its name.
        dtype: its dtype.
        shape: its shape.
        begin: the position of its first byte in the data, which follow the header.
        end: the position after its last byte.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path, file: BinaryIO) -> tuple[list[Tensor], int]:
    """Returns the tensors that the header of a file lists, and the position at which their data begin.

    Args:
        path: the path of the file, for messages.
        file: the open file, at its beginning.

    Raises:
        CheckpointError: it is not a safetensors file, or is damaged.
        OSError: it cannot be read.
        ValueError: it becomes shorter while it is read.
    """
    size = os.fstat(file.fileno()).st_size
    if size < LENGTH:
        raise _damaged(path, [f'it has {size} bytes, but the length of the header alone has {LENGTH}'])
    start_of_file = strict_json.read_exactly(file, LENGTH)
    if start_of_file == _LFS[:LENGTH]:
        raise CheckpointError(
            f'{printable(str(path))} is a pointer of Git LFS, which stands for the file. What to do: run '
            '`git lfs pull` in the repository, or download the file.'
        )
    length = int.from_bytes(start_of_file, 'little')
    if length > strict_json.MAX_BYTES:
        raise _damaged(
            path, [f'its header would have {length:,} bytes; the limit is {strict_json.MAX_BYTES:,}']
        )
    if length > size - LENGTH:
        raise _damaged(
            path, [f'its header has {length:,} bytes, but the file ends after {size - LENGTH:,} of them']
        )
    start = LENGTH + length
    return parse_header(path, strict_json.read_exactly(file, length), size - start), start


def parse_header(path: Path, header: bytes, size: int) -> list[Tensor]:
    """Returns the tensors that a header lists, in the order of their data.

    Args:
        path: the path of the file, for messages.
        header: the JSON text.
        size: the number of bytes of data after the header.

    Raises:
        CheckpointError: it is not a header, or does not fit the data.
    """
    try:
        entries = strict_json.parse(header)
    except ValueError as error:
        raise _damaged(path, [f'its header is not valid: {error}']) from error
    if not isinstance(entries, dict):
        raise _damaged(path, ['its header is not an object with an entry for each tensor'])
    problems: list[str] = []
    tensors: list[Tensor] = []
    metadata = entries.pop(_METADATA, None)
    if not _is_metadata(metadata):
        problems.append(f'{_METADATA}: {brief(metadata)} is not an object of strings')
    for name, entry in entries.items():
        tensor = _tensor(name, entry, size)
        if isinstance(tensor, str):
            problems.append(f'{printable(name)}: {tensor}')
        else:
            tensors.append(tensor)
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    problems = problems or _position_faults(tensors, size)
    if problems:
        raise _damaged(path, problems)
    return tensors


def _damaged(path: Path, problems: Iterable[str]) -> CheckpointError:
    return CheckpointError(
        f'{printable(str(path))} is not a safetensors file, or is damaged:\n{shown([*problems])}\n'
        'What to do: download or save the file again.'
    )


def _is_metadata(value: Any) -> bool:
    """Returns whether *value* is valid as ``__metadata__``: an object of strings, or null."""
    return value is None or (
        isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
    )


def _tensor(name: str, entry: Any, size: int) -> Tensor | str:
    """Returns the tensor of an entry, or the fault of the entry as text."""
    if not isinstance(entry, dict):
        return f'{brief(entry)} is not an object with {", ".join(_KEYS)}'
    if sorted(entry) != sorted(_KEYS):
        return f'has the keys {brief([*entry])}, but an entry has {", ".join(_KEYS)}'
    code, shape, offsets = (entry[key] for key in _KEYS)
    if not isinstance(code, str) or code not in DTYPES:
        return f'has the dtype {brief(code)}, which cannot be loaded'
    if not _are_sizes(shape):
        return f'has the shape {brief(shape)}, which is not a list of non-negative integers'
    if not _are_sizes(offsets) or len(offsets) != 2:
        return f'has the data_offsets {brief(offsets)}, which are not two non-negative integers'
    if len(shape) > _MAX_DIMENSIONS:  # checked first: the product of very many sizes takes long
        return f'has {len(shape)} dimensions; an array has at most {_MAX_DIMENSIONS}'
    dtype = np.dtype(DTYPES[code])
    if math.prod(filter(None, shape)) * dtype.itemsize > _MAX_BYTES:
        return f'has the shape {brief(shape)}, which no array of {dtype} can have'
    begin, end = offsets
    if begin > end:
        return f'has the data_offsets {brief(offsets)}, which end before they begin'
    if end > size:
        return f'has the data_offsets {brief(offsets)}, but the file has only {size} bytes of data'
    expected = math.prod(shape) * dtype.itemsize
    if end - begin != expected:
        return f'is {dtype}{brief(shape)}, which has {expected} bytes, but has the data_offsets {offsets}'
    return Tensor(name, dtype, tuple(shape), begin, end)


def _are_sizes(values: Any) -> bool:
    # bool is a subclass of int.
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _position_faults(tensors: Sequence[Tensor], size: int) -> list[str]:
    """Returns the gaps and overlaps between tensors, which have to fill the data."""
    problems: list[str] = []
    end, previous = 0, 'the header'
    for tensor in tensors:
        name = printable(tensor.name)
        if tensor.begin < end:
            problems.append(
                f'{name}: begins at byte {tensor.begin}, and {previous} ends at byte {end}: they overlap'
            )
        elif tensor.begin > end:
            problems.append(
                f'{name}: {tensor.begin - end} bytes between {previous} and it belong to no tensor'
            )
        if tensor.end >= end:
            end, previous = tensor.end, name
    if end < size:
        problems.append(f'{previous}: {size - end} bytes after it belong to no tensor')
    return problems
