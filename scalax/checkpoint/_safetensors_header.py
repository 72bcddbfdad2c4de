"""The header of a safetensors file, which says where each tensor is.

The format: eight bytes with the length of the header, the header (JSON: name -> dtype, shape, offsets), and
the tensors one after the other, row by row, little-endian. https://github.com/huggingface/safetensors#format

What the library of that name refuses is refused here. It also accepts some things that are refused here:
an entry written as a list, or its dtype as an object, which the format does not allow; a repeated key, of
which it takes the last; dtypes of less than a byte, and shapes that no NumPy array has.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from scalax._util import strict_json
from scalax.errors import CheckpointError

LENGTH = 8
_MOST_BYTES = (1 << 63) - 1  # of an array, not counting dimensions of size 0
_MOST_DIMENSIONS = 64
_NAME = 200  # characters of a name that messages show in full
_METADATA = '__metadata__'

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


def tensors_of(file: Path, opened: BinaryIO) -> list[Tensor]:
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


def parse_header(file: Path, header: bytes, size: int) -> list[Tensor]:
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
