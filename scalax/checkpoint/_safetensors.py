"""Loading of Hugging Face's safetensors files, straight into the shards of a mesh.

A file is mapped into memory, so that the system reads the parts that are copied to devices. The library of
that name does so too, but it does not give NumPy float8.
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
_MOST_KEYS = 100  # of a leaf path: models are not deeper, and JAX fails on very deep trees

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
    tree = _arranged(_tensors(files), mapping)
    tensors = jax.tree.leaves(tree)
    shardings = helper.match_sharding_rule(rules, tree)
    with progress(f'loading safetensors, {human_bytes(sum(one.nbytes for one in tensors))}', _log):
        return jax.tree.map(_load, tree, shardings)


def _load(tensor: np.ndarray, sharding: Any) -> jax.Array:
    """A tensor in the memory of a file as an array; copied, because on CPU JAX would go on using the file."""

    def copied(index: Any) -> np.ndarray:
        if isinstance(tensor, _Mapped):
            tensor.require_file()
        return np.array(tensor[index])

    array = jax.make_array_from_callback(tensor.shape, sharding, copied, dtype=tensor.dtype)
    return jax.block_until_ready(array)


class _Mapped(np.ndarray):
    """An array in the memory of a file.

    Attributes:
        path: of the file, for messages.
        memory: of the file.
    """

    path: Path | None = None
    memory: mmap.mmap | None = None

    def __array_finalize__(self, other: Any) -> None:
        self.path, self.memory = getattr(other, 'path', None), getattr(other, 'memory', None)

    @classmethod
    def of(cls, path: Path, opened: BinaryIO, size: int) -> _Mapped:
        """The first bytes of a file."""
        memory = mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_READ)
        array = np.frombuffer(memory, np.uint8).view(cls)
        array.path, array.memory = path, memory
        return array

    def require_file(self) -> None:
        """Raises CheckpointError if the file has become shorter: reading past its end ends the process."""
        if self.memory is not None and self.memory.size() < len(self.memory):
            raise CheckpointError(
                f'{printable(str(self.path))} became shorter while it was loaded: another program writes to '
                'it. What to do: load it when it is complete; a program that replaces a file writes another '
                'one, and renames it.'
            )


class _File(NamedTuple):
    """A file to load.

    Attributes:
        path: its path as the user or the index names it, for messages.
        target: the path that is opened.
        tensors: the names of the tensors that an index says are in it.
    """

    path: Path
    target: Path
    tensors: Sequence[str] = ()


def _tensors(files: Files) -> dict[str, np.ndarray]:
    """The tensors of all files, in the memory of the files.

    Raises:
        CheckpointError: a file is missing or damaged, or the files do not fit together.
        ArgumentError: *files* are not paths.
    """
    tensors: dict[str, np.ndarray] = {}
    paths: dict[str, str] = {}
    problems: list[str] = []
    for file in _listed(files):
        of_file, path = _tensors_of(file), printable(str(file.path))
        absent = [name for name in file.tensors if name not in of_file]
        problems.extend(f'{printable(name)} is not in {path}, where the index says it is' for name in absent)
        repeated = [name for name in of_file if name in tensors]
        problems.extend(f'{printable(name)} is in {paths[name]} and in {path}' for name in repeated)
        tensors |= of_file
        paths |= dict.fromkeys(of_file, path)
    if problems:
        raise CheckpointError(f'the files do not fit together:\n{shown(problems)}')
    return tensors


def _listed(files: Files) -> list[_File]:
    """The files to load."""
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
        indices, found = (sorted(path.glob(f'*{_SUFFIX}{end}')) for end in (_INDEX, ''))
        if len(indices) > 1 or not (indices or found):
            what = f'{len(indices)} indices' if indices else f'no {_SUFFIX} files'
            raise CheckpointError(f'{path} has {what}; name the file, the files or the index')
        return _indexed(indices[0]) if indices else [_File(file, file) for file in found]
    return _indexed(path) if path.name.endswith(_INDEX) else [_File(path, path)]


def _indexed(index: Path) -> list[_File]:
    """The files that an index names, all of which have to be in its folder.

    Raises:
        CheckpointError: it is not an index, or names other files.
    """
    head = f'{index} is not an index of {_SUFFIX} files'
    try:
        values = strict_json.parse(strict_json.read(index))
    except (OSError, ValueError) as error:
        raise CheckpointError(f'{head}: {strict_json.error_reason(error)}') from error
    places = values.get('weight_map') if isinstance(values, dict) else None
    if not places or not isinstance(places, dict):
        raise CheckpointError(f'{head}: it has no weight_map, an object with the file of each tensor')
    no_names = [
        f'{printable(name)}: {brief(file)} is not the name of a file'
        for name, file in places.items()
        if not isinstance(file, str)
    ]
    if no_names:
        raise CheckpointError(f'{head}:\n{shown(no_names)}')
    tensors: dict[str, list[str]] = {}
    for name, file in places.items():
        tensors.setdefault(file, []).append(name)
    folder = Path(os.path.realpath(index.parent))
    listed: list[_File] = []
    outside: list[str] = []
    for file, names in tensors.items():
        why, target = _resolved(folder, file)
        outside.extend(f'{printable(name)}: {brief(file)}{why}' for name in names if why is not None)
        listed.append(_File(index.parent / file, target, names))
    if outside:
        raise CheckpointError(
            f'{index} names files outside of its folder:\n{shown(outside)}\n'
            'What to do: if these are the files that you want, give load_safetensors a list of the files in '
            'place of the index.'
        )
    return listed


def _resolved(folder: Path, name: str) -> tuple[str | None, Path]:
    """The file that *name* is in a folder, without links; and, if it is outside of the folder, why.

    In the cache of the Hugging Face Hub, each file of ``snapshots/<revision>/`` is a link into ``blobs/``
    beside ``snapshots``. These links are made by the Hub's library, not by the author of a model, and end in
    the cache of the same repository. They are the only ones that may leave the folder.

    Args:
        folder: the folder, without links.
        name: the name that an index gives.
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
        above.parents[1] / 'blobs' for above in (folder, *folder.parents) if above.parent.name == 'snapshots'
    ]
    is_inside = target.is_relative_to(folder) or target.parent in blobs
    return None if is_inside else f' is a link to {printable(str(target))}', target


def _tensors_of(file: _File) -> dict[str, np.ndarray]:
    """The tensors of a file, in its memory.

    Raises:
        CheckpointError: it cannot be read, is not a safetensors file, or is damaged.
    """
    try:
        with strict_json.open_regular_file(file.target) as opened:
            tensors, start = read_header(file.path, opened)
            # The data is that of the opened file, even if another file has its path by now.
            size = max((tensor.end for tensor in tensors), default=0)
            mapped = _Mapped.of(file.path, opened, start + size)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        why = f'{strict_json.error_reason(error)}{_hint(file.path, error)}'
        raise CheckpointError(f'{printable(str(file.path))} cannot be read: {why}') from error
    return {
        tensor.name: mapped[start + tensor.begin : start + tensor.end]
        .view(tensor.dtype)
        .reshape(tensor.shape)
        for tensor in tensors
    }


def _hint(path: Path, error: OSError | ValueError) -> str:
    """What to do about a file that is not there, as far as its path tells."""
    if not isinstance(error, FileNotFoundError) or path.is_absolute():
        return ''
    if path.parts[:1] and path.parts[0].startswith('~'):
        return '. What to do: give os.path.expanduser(path); ~ is not expanded'
    return f' in {printable(os.getcwd())}'


def _arranged(tensors: Mapping[str, np.ndarray], mapping: NameMapping) -> dict[str, Any]:
    """The tensors as the tree that a mapping makes of them.

    Raises:
        CheckpointError: it does not cover all of them, two go to one path, or JAX would change a dtype.
    """
    located, problems = map_names(tensors, mapping, '.')
    tree: dict[str, Any] = {}
    for name, path, axes in located:
        tensor = tensors[name]
        if path.count('/') >= _MOST_KEYS:
            problems.append(f'{name}: goes to a path of more than {_MOST_KEYS} keys')
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
