"""Loading of Hugging Face's safetensors files into the shards of a mesh.

A file is mapped into memory, so that only the parts that are copied to devices are read. The safetensors
library does the same, but does not support float8 in NumPy.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import jax
import numpy as np

from scalax._core.mesh import meshes
from scalax._core.pytree.paths import canonical_dtype, leaf_text
from scalax._core.render.tables import human_bytes
from scalax._core.util import strict_json
from scalax._core.util.progress import progress
from scalax._core.util.strict_json import brief, printable
from scalax._data.reshard.leaf_mapping import NameMapping, insert_leaf, map_names
from scalax.checkpoint._safetensors_header import read_header
from scalax.errors import ArgumentError, CheckpointError, shown, shown_leaves

if TYPE_CHECKING:
    from scalax._helper import MeshShardingHelper
    from scalax.rules import RuleLike

_log = logging.getLogger('scalax.checkpoint')

_SUFFIX = '.safetensors'
_INDEX = '.index.json'
_MAX_KEYS = 100  # of a leaf path: models are not deeper, and JAX fails on very deep trees

Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def load_safetensors(
    helper: MeshShardingHelper, files: Files, rules: RuleLike, mapping: NameMapping = None
) -> Any:
    r"""Loads safetensors files, as on the Hugging Face Hub, into the shards of a mesh.

    Each process reads the shards of its own devices. Its host holds the shards of one tensor at a time.

    Args:
        helper: the helper of the mesh.
        files: a folder, an index (``model.safetensors.index.json``), a file, or several files.
        rules: as for `MeshShardingHelper.shard`, for the resulting tree.
        mapping: the leaf paths of the tensors. None keeps their names, split at the dots:
            ``tree['model']['norm']['weight']``. Otherwise a dict from names to leaf paths (``'norm/scale'``);
            a function from a name to a path; or pairs (regex, replacement), of which the first whose regex is
            found in a name is applied to it, as by ``re.sub``, and remaining dots become slashes. In place of
            a path, None leaves the tensor out, and (path, axes) transposes it, as ``numpy.transpose`` does;
            among pairs, write (regex, replacement, axes). Linear layers of PyTorch store weights as
            (out, in): the axes ``(1, 0)`` turn them into a kernel.

    Returns:
        Nested dicts of arrays, in the dtypes of the files.

    Raises:
        CheckpointError: missing, damaged or truncated files; an index that names files outside of its folder;
            names that the mapping does not cover; two tensors that go to the same path; dtypes that JAX would
            change.
        ArgumentError: *files* are not paths; the mapping is none of these, or a regex in it is invalid.
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
    tree = _apply_mapping(_read_tensors(files), mapping)
    tensors = jax.tree.leaves(tree)
    shardings = helper.match_sharding_rule(rules, tree)
    with progress(f'loading safetensors, {human_bytes(sum(tensor.nbytes for tensor in tensors))}', _log):
        return jax.tree.map(_load, tree, shardings)


def _load(tensor: np.ndarray, sharding: Any) -> jax.Array:
    """Copies a tensor of a file to devices. Without the copy, JAX on CPU would keep using the file."""

    def shard(index: Any) -> np.ndarray:
        if isinstance(tensor, _MappedArray):
            tensor.require_complete()
        return np.array(tensor[index])

    array = jax.make_array_from_callback(tensor.shape, sharding, shard, dtype=tensor.dtype)
    return jax.block_until_ready(array)


class _MappedArray(np.ndarray):
    """An array in a memory-mapped file.

    Attributes:
        path: the path of the file, for messages.
        memory: the memory of the file.
    """

    path: Path | None = None
    memory: mmap.mmap | None = None

    def __array_finalize__(self, other: Any) -> None:
        self.path, self.memory = getattr(other, 'path', None), getattr(other, 'memory', None)

    @classmethod
    def of(cls, path: Path, file: BinaryIO, size: int) -> _MappedArray:
        """Maps the first bytes of a file."""
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        array = np.frombuffer(memory, np.uint8).view(cls)
        array.path, array.memory = path, memory
        return array

    def require_complete(self) -> None:
        """Raises CheckpointError if the file has become shorter: reading past its end kills the process."""
        if self.memory is not None and self.memory.size() < len(self.memory):
            raise CheckpointError(
                f'{printable(str(self.path))} became shorter while it was loaded: another program writes to '
                'it. What to do: load it when it is complete; a program that replaces a file writes another '
                'one, and renames it.'
            )


class _File(NamedTuple):
    """A file to load.

    Attributes:
        path: its path in the list of the user or in the index, for messages.
        target: the path that is opened.
        tensors: the names of its tensors according to the index.
    """

    path: Path
    target: Path
    tensors: Sequence[str] = ()


def _read_tensors(files: Files) -> dict[str, np.ndarray]:
    """Returns the tensors of all files by name, as memory-mapped arrays.

    Raises:
        CheckpointError: a file is missing or damaged, or the files contradict one another or the index.
        ArgumentError: *files* are not paths.
    """
    tensors: dict[str, np.ndarray] = {}
    paths: dict[str, str] = {}
    problems: list[str] = []
    for file in _list_files(files):
        file_tensors, path = _tensors_of(file), printable(str(file.path))
        absent = [name for name in file.tensors if name not in file_tensors]
        problems.extend(f'{printable(name)} is not in {path}, where the index says it is' for name in absent)
        repeated = [name for name in file_tensors if name in tensors]
        problems.extend(f'{printable(name)} is in {paths[name]} and in {path}' for name in repeated)
        tensors |= file_tensors
        paths |= dict.fromkeys(file_tensors, path)
    if problems:
        raise CheckpointError(f'the files do not fit together:\n{shown(problems)}')
    return tensors


def _list_files(files: Files) -> list[_File]:
    """Returns the files to load."""
    if not isinstance(files, str | os.PathLike):
        if isinstance(files, bytes) or not isinstance(files, Iterable):
            raise ArgumentError(f'load_safetensors: files has to be a path or a list of paths, got {files!r}')
        paths = list(files)
        for path in paths:
            if not isinstance(path, str | os.PathLike):
                raise ArgumentError(
                    f'load_safetensors: files has to be a list of paths, and {path!r} in it is not a path'
                )
        if not paths:
            raise CheckpointError('load_safetensors: the list of files is empty')
        for path in map(Path, paths):
            if path.name.endswith(_INDEX):
                raise ArgumentError(
                    f'load_safetensors: {path} in the list of files is an index: give it alone, in place of '
                    'the list, or list the files that it names'
                )
        return [_File(Path(path), Path(path)) for path in paths]
    if not str(files):
        raise ArgumentError("load_safetensors: files is an empty path; the current folder is '.'")
    path = Path(files)
    if os.path.isdir(path):
        indices, in_folder = (sorted(path.glob(f'*{_SUFFIX}{end}')) for end in (_INDEX, ''))
        if len(indices) > 1 or not (indices or in_folder):
            count = f'{len(indices)} indices' if indices else f'no {_SUFFIX} files'
            raise CheckpointError(f'{path} has {count}; name the file, the files or the index')
        return _files_of_index(indices[0]) if indices else [_File(file, file) for file in in_folder]
    return _files_of_index(path) if path.name.endswith(_INDEX) else [_File(path, path)]


def _files_of_index(index: Path) -> list[_File]:
    """Returns the files that an index lists, which have to be in its folder.

    Raises:
        CheckpointError: it is not an index, or lists files outside of its folder.
    """
    head = f'{index} is not an index of {_SUFFIX} files'
    try:
        values = strict_json.parse(strict_json.read(index))
    except (OSError, ValueError) as error:
        raise CheckpointError(f'{head}: {strict_json.error_reason(error)}') from error
    file_names = values.get('weight_map') if isinstance(values, dict) else None
    if not file_names or not isinstance(file_names, dict):
        raise CheckpointError(f'{head}: it has no weight_map, an object with the file of each tensor')
    invalid = [
        f'{printable(name)}: {brief(file)} is not the name of a file'
        for name, file in file_names.items()
        if not isinstance(file, str)
    ]
    if invalid:
        raise CheckpointError(f'{head}:\n{shown(invalid)}')
    tensors: dict[str, list[str]] = {}
    for name, file in file_names.items():
        tensors.setdefault(file, []).append(name)
    folder = Path(os.path.realpath(index.parent))
    listed: list[_File] = []
    outside: list[str] = []
    for file, names in tensors.items():
        fault, target = _resolve(folder, file)
        outside.extend(f'{printable(name)}: {brief(file)}{fault}' for name in names if fault is not None)
        listed.append(_File(index.parent / file, target, names))
    if outside:
        raise CheckpointError(
            f'{index} names files outside of its folder:\n{shown(outside)}\n'
            'What to do: if these are the files that you want, give load_safetensors a list of the files in '
            'place of the index.'
        )
    return listed


def _resolve(folder: Path, name: str) -> tuple[str | None, Path]:
    """Returns a fault if a file of an index is outside of a folder (otherwise None), and its resolved path.

    In the cache of the Hugging Face Hub, each file of ``snapshots/<revision>/`` is a link into ``blobs/``
    beside ``snapshots``. The Hub's library makes these links, not the author of a model, and they end in the
    cache of the same repository. They are the only links that may leave the folder.

    Args:
        folder: the resolved path of the folder.
        name: the name of the file in the index.
    """
    path = PurePath(name)
    if path.anchor or '..' in path.parts:
        return '', folder / name
    try:
        target = Path(os.path.realpath(folder / name))
    except ValueError:  # a null byte, which is an error again when the file is opened
        return None, folder / name
    except OSError as error:
        return f' ({error.strerror})', folder / name
    blobs = [
        parent.parents[1] / 'blobs'
        for parent in (folder, *folder.parents)
        if parent.parent.name == 'snapshots'
    ]
    is_inside = target.is_relative_to(folder) or target.parent in blobs
    return None if is_inside else f' is a link to {printable(str(target))}', target


def _tensors_of(file: _File) -> dict[str, np.ndarray]:
    """Returns the tensors of a file by name, as memory-mapped arrays.

    Raises:
        CheckpointError: it cannot be read, is not a safetensors file, or is damaged.
    """
    try:
        with strict_json.open_regular_file(file.target) as data:
            tensors, start = read_header(file.path, data)
            # Mapped from the opened file: its path may be another file by now.
            size = max((tensor.end for tensor in tensors), default=0)
            mapped = _MappedArray.of(file.path, data, start + size)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        reason = f'{strict_json.error_reason(error)}{_hint(file.path, error)}'
        raise CheckpointError(f'{printable(str(file.path))} cannot be read: {reason}') from error
    return {
        tensor.name: mapped[start + tensor.begin : start + tensor.end]
        .view(tensor.dtype)
        .reshape(tensor.shape)
        for tensor in tensors
    }


def _hint(path: Path, error: OSError | ValueError) -> str:
    """Returns a hint about a missing file with a relative path."""
    if not isinstance(error, FileNotFoundError) or path.is_absolute():
        return ''
    if path.parts[:1] and path.parts[0].startswith('~'):
        return '. What to do: give os.path.expanduser(path); ~ is not expanded'
    return f' in {printable(os.getcwd())}'


def _apply_mapping(tensors: Mapping[str, np.ndarray], mapping: NameMapping) -> dict[str, Any]:
    """Returns the tree into which a mapping places the tensors.

    Raises:
        CheckpointError: the mapping lacks some tensors, two tensors go to one path, or JAX would change a
            dtype.
    """
    mapped, problems = map_names(tensors, mapping, '.')
    tree: dict[str, Any] = {}
    for name, path, axes in mapped:
        tensor = tensors[name]
        if path.count('/') >= _MAX_KEYS:
            problems.append(f'{name}: goes to a path of more than {_MAX_KEYS} keys')
        elif not insert_leaf(tree, path, tensor if axes is None else tensor.transpose(axes)):
            problems.append(f'{name}: goes to {path}, which overlaps the path of another tensor')
        elif canonical_dtype(tensor.dtype) != tensor.dtype:
            problems.append(f'{name}: JAX supports {leaf_text(tensor)} only with jax_enable_x64')
    if problems:
        raise CheckpointError(
            'the mapping does not fit the tensors of the files:\n'
            f'{shown_leaves(map(printable, problems), ".")}\n'
            'What to do: give every tensor its own path, or None to leave it out.'
        )
    return tree
