"""Loading of Hugging Face's safetensors files, straight into the shards of a mesh.

A file has eight bytes with the length of its header, the header (JSON: name -> dtype, shape, offsets), and
the tensors one after the other, row by row. https://github.com/huggingface/safetensors#format
It is mapped into memory, so that the system reads the parts that are copied to devices. The library of that
name does so too, but it does not give NumPy float8.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import ml_dtypes
import numpy as np

from scalax._mesh import meshes
from scalax._report.tables import human_bytes
from scalax._reshard.names import NameMapping, locate, put
from scalax._tree.paths import canonical_dtype, leaf_text
from scalax._util.progress import progress
from scalax.errors import CheckpointError, shown, shown_leaves

if TYPE_CHECKING:
    from scalax._helper import MeshShardingHelper
    from scalax.rules import RuleLike

_log = logging.getLogger('scalax.checkpoint')

_SUFFIX = '.safetensors'
_INDEX = '.index.json'
_LENGTH = 8  # bytes with the length of the header

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

Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def load_safetensors(
    helper: MeshShardingHelper, files: Files, rules: RuleLike, mapping: NameMapping = None
) -> Any:
    r"""Loads safetensors files, as on the Hugging Face Hub, straight into the shards of a mesh.

    Each process reads the shards of its own devices; its host holds those of one tensor at a time.

    Args:
        helper: the mesh.
        files: a folder, an index (``model.safetensors.index.json``), a file, or several files.
        rules: as for `MeshShardingHelper.shard`, for the tree that results.
        mapping: where the tensors go. None keeps their names, split at the dots:
            ``tree['model']['norm']['weight']``. Otherwise a dict from names to leaf paths (``'norm/scale'``);
            or a function from a name to a path; or pairs (regex, replacement): the first whose regex is found
            in a name is applied to it, as by ``re.sub``, and remaining dots become slashes. In place of a
            path, None leaves the tensor out, and (path, axes) transposes it, as ``numpy.transpose`` does; in
            pairs: (regex, replacement, axes). Linear layers of PyTorch store weights as (out, in): the axes
            ``(1, 0)`` turn them into a kernel.

    Returns:
        Nested dicts of arrays, in the dtypes of the files.

    Raises:
        CheckpointError: missing, damaged or truncated files; names that the mapping does not cover; two
            tensors that go to the same path; dtypes that JAX would change.
        ArgumentError: the mapping is none of these, or a regex in it is invalid.
        ShardingError: the rules do not fit the tree.

    Example:
        >>> import pathlib, tempfile, numpy as np
        >>> from safetensors.numpy import save_file
        >>> from scalax.sharding import MeshShardingHelper, PartitionSpec
        >>> helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
        >>> file = pathlib.Path(tempfile.mkdtemp(), 'model.safetensors')
        >>> save_file({'layers.0.up.weight': np.ones((8, 4), np.float32)}, file)
        >>> mapping = [(r'^layers.(\d+).up.weight', r'layers/\1/up/kernel', (1, 0))]
        >>> tree = load_safetensors(helper, file, PartitionSpec('fsdp', 'tp'), mapping)
        >>> tree['layers']['0']['up']['kernel'].shape
        (4, 8)
    """
    meshes.require_devices(helper.mesh, 'load_safetensors')
    tree = _arranged(_tensors(files), mapping)
    tensors = jax.tree.leaves(tree)
    shardings = helper.match_sharding_rule(rules, tree)
    with progress(f'loading safetensors, {human_bytes(sum(one.nbytes for one in tensors))}', _log):
        return jax.tree.map(_load, tree, shardings)


def _load(tensor: np.ndarray, sharding: Any) -> jax.Array:
    """A tensor in the memory of a file as an array; copied, because on CPU JAX would go on using the file."""
    array = jax.make_array_from_callback(
        tensor.shape, sharding, lambda index: np.array(tensor[index]), dtype=tensor.dtype
    )
    return jax.block_until_ready(array)


def _tensors(files: Files) -> dict[str, np.ndarray]:
    """The tensors of all files, in the memory of the files.

    Raises:
        CheckpointError: a file is missing or damaged, the files do not fit together, or JAX would change a
            dtype.
    """
    found: dict[str, np.ndarray] = {}
    listed, indexed = _listed(files)
    for file in listed:
        tensors = _tensors_of(file)
        if twice := [*filter(found.__contains__, tensors)]:
            raise CheckpointError(f'tensors of {file} are also in another file:\n{shown(twice)}')
        found |= tensors
    if missing := [name for name in indexed if name not in found]:
        raise CheckpointError(f'tensors named in the index are in none of its files:\n{shown(missing)}')
    return found


def _listed(files: Files) -> tuple[list[Path], Iterable[str]]:
    """The files to load, and the tensors that an index says are in them."""
    if not isinstance(files, str | os.PathLike):
        return [Path(file) for file in files], ()
    path = Path(files)
    if path.is_dir():
        indices, found = (sorted(path.glob(f'*{_SUFFIX}{end}')) for end in (_INDEX, ''))
        if len(indices) > 1 or not (indices or found):
            what = f'{len(indices)} indices' if indices else f'no {_SUFFIX} files'
            raise CheckpointError(f'{path} has {what}; name the file, the files or the index')
        if not indices:
            return found, ()
        [path] = indices
    if not path.name.endswith(_INDEX):
        return [path], ()
    try:
        places = json.loads(path.read_bytes())['weight_map']
        return [path.parent / file for file in sorted({*places.values()})], places
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f'{path} is not an index of {_SUFFIX} files: {error!r}') from error


def _tensors_of(file: Path) -> dict[str, np.ndarray]:
    try:
        mapped = np.memmap(file, np.uint8, 'r')
        length = int.from_bytes(mapped[:_LENGTH].tobytes(), 'little')
        if length > mapped.size:
            raise ValueError(f'its header would have {length:,} bytes, but the file has {mapped.size:,}')
        header, data = mapped[_LENGTH : _LENGTH + length], mapped[_LENGTH + length :]
        entries = json.loads(header.tobytes())
        entries.pop('__metadata__', None)
        return {name: _tensor(data, name, **entry) for name, entry in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f'{file} is not a safetensors file, or is damaged: {error}') from error


def _tensor(data: np.ndarray, name: str, dtype: str, shape: list[int], data_offsets: list[int]) -> np.ndarray:
    if dtype not in DTYPES:
        raise ValueError(f'{name!r} has the dtype {dtype!r}, which cannot be loaded')
    begin, end = data_offsets
    kind = np.dtype(DTYPES[dtype])
    if begin < 0 or end > data.size or end - begin != kind.itemsize * np.prod(shape, dtype=object):
        raise ValueError(f'{name!r} is {kind}{shape}, but its data is bytes {begin} to {end} of {data.size}')
    return data[begin:end].view(kind).reshape(shape)


def _arranged(tensors: Mapping[str, np.ndarray], mapping: NameMapping) -> dict[str, Any]:
    """The tensors as the tree that a mapping makes of them.

    Raises:
        CheckpointError: it does not cover all of them, two go to one path, or JAX would change a dtype.
    """
    located, problems = locate(tensors, mapping, '.')
    tree: dict[str, Any] = {}
    for name, path, axes in located:
        tensor = tensors[name]
        if not put(tree, path, tensor if axes is None else tensor.transpose(axes)):
            problems.append(f'{name}: goes to {path}, which overlaps the path of another tensor')
        elif canonical_dtype(tensor.dtype) != tensor.dtype:
            problems.append(f'{name}: JAX supports {leaf_text(tensor)} only with jax_enable_x64')
    if problems:
        raise CheckpointError(
            f'the mapping does not fit the tensors of the files:\n{shown_leaves(problems, ".")}\n'
            'What to do: give every tensor its own path, or None to leave it out.'
        )
    return tree
