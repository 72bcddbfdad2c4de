"""Loading of Hugging Face's safetensors files, straight into the shards of a mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, BinaryIO

import jax

from scalax._mesh import meshes
from scalax._report.tables import human_bytes
from scalax._tree.paths import canonical_dtype, leaf_text
from scalax._util import strict_json
from scalax._util.progress import progress
from scalax.checkpoint._safetensors_blocks import Box, read_ahead, read_block
from scalax.checkpoint._safetensors_header import Tensor, in_message, tensors_of
from scalax.checkpoint._safetensors_names import NameMapping, destinations
from scalax.errors import ArgumentError, CheckpointError, shown, shown_leaves

if TYPE_CHECKING:
    from scalax._helper import MeshShardingHelper
    from scalax.rules import RuleLike

_log = logging.getLogger('scalax.checkpoint')


_SUFFIX = '.safetensors'
_INDEX = '.index.json'
Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def load_safetensors(
    helper: MeshShardingHelper, files: Files, rules: RuleLike, mapping: NameMapping = None
) -> Any:
    r"""Loads safetensors files, as on the Hugging Face Hub, straight into the shards of a mesh.

    Each process reads the bytes that its devices need, block by block. The host never holds more than the
    largest block.

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
            tensors that go to one path; dtypes that JAX would change.
        ArgumentError: the mapping is none of these, or a regex, replacement or path in it is invalid;
            *files* are not paths.
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
    listed = _list_files(files)
    with contextlib.ExitStack() as stack:
        opened = _open_files(stack, listed)
        tensors = _all_tensors(listed, opened)
        wanted = destinations([tensor.name for tensor in tensors], mapping)
        tensors = [tensor for tensor in tensors if tensor.name in wanted]
        _require_dtypes(tensors)
        loads = [_Load(opened[tensor.file].fileno(), tensor, *wanted[tensor.name]) for tensor in tensors]
        tree: dict[str, Any] = {}
        for load in loads:
            _set_leaf(tree, load.path, jax.ShapeDtypeStruct(load.shape, load.tensor.dtype))
        shardings = helper.match_sharding_rule(rules, tree)
        size, done = human_bytes(sum(tensor.size for tensor in tensors)), 0
        with progress('loading safetensors', _log) as note:
            for i, load in enumerate(loads):
                for coming in loads[i : i + 2]:
                    boxes = [box for box, _ in coming.blocks(shardings)]
                    read_ahead(coming.descriptor, coming.tensor, boxes)
                _set_leaf(tree, load.path, load.array(shardings))
                done += load.tensor.size
                note(f'{human_bytes(done)} of {size}')
        return tree


@dataclasses.dataclass(frozen=True)
class _Load:
    """The load of one tensor onto the devices of this process.

    Attributes:
        descriptor: the descriptor of its file.
        tensor: the tensor in the file.
        path: its leaf path.
        axes: the order of its axes in the array; empty if it is not transposed.
    """

    descriptor: int
    tensor: Tensor
    path: str
    axes: Sequence[int]

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array.

        Raises:
            CheckpointError: the tensor does not have these axes.
        """
        shape, axes = self.tensor.shape, self.axes
        if axes and sorted(axes) != list(range(len(shape))):
            raise CheckpointError(
                f'{self.tensor.label} is {leaf_text(self.tensor)}, and the mapping gives it the axes '
                f'{tuple(axes)}: they are the numbers 0 to {len(shape) - 1} in another order'
            )
        return tuple(shape[axis] for axis in axes) if axes else shape

    def sharding(self, shardings: Any) -> Any:
        """The sharding of the array, in the tree of all."""
        return functools.reduce(operator.getitem, self.path.split('/'), shardings)

    def blocks(self, shardings: Any) -> list[tuple[Box, list[Any]]]:
        """The blocks that devices of this process hold, with these devices, in the order of the file."""
        indices = self.sharding(shardings).addressable_devices_indices_map(self.shape)
        holders: dict[tuple[tuple[int, int], ...], list[Any]] = {}
        for device, index in indices.items():
            bounds = [part.indices(size)[:2] for part, size in zip(index, self.shape, strict=True)]
            if self.axes:
                bounds = [bounds[self.axes.index(dim)] for dim in range(len(bounds))]
            holders.setdefault(tuple(bounds), []).append(device)
        return [([slice(*part) for part in bounds], holders[bounds]) for bounds in sorted(holders)]

    def array(self, shardings: Any) -> jax.Array:
        """The array. Each block is read once the previous one is on its devices."""
        sharding, parts = self.sharding(shardings), []
        for box, devices in self.blocks(shardings):
            block = read_block(self.descriptor, self.tensor, box)
            for device in devices:
                place = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
                part = jax.device_put(block, place)
                parts.append(part.transpose(self.axes) if self.axes else part)
            jax.block_until_ready(parts)
            del block
        dtype = self.tensor.dtype
        return jax.make_array_from_single_device_arrays(self.shape, sharding, parts, dtype=dtype)


def _require_dtypes(tensors: Iterable[Tensor]) -> None:
    changed = [
        f'{tensor.label}: {leaf_text(tensor)} would become {canonical_dtype(tensor.dtype)}'
        for tensor in tensors
        if canonical_dtype(tensor.dtype) != tensor.dtype
    ]
    if changed:
        raise CheckpointError(
            f'JAX has no 64-bit numbers as it is set up:\n{shown_leaves(changed, ".")}\n'
            'What to do: set jax_enable_x64, or leave these tensors out of the mapping.'
        )


def _list_files(files: Files) -> dict[Path, list[str]]:
    """The files to load, each with the tensors that an index says are in it."""
    if not isinstance(files, str | os.PathLike):
        if isinstance(files, bytes) or not isinstance(files, Iterable):
            raise ArgumentError(f'load_safetensors: files has to be a path or a list of paths, got {files!r}')
        given = list(files)
        for file in given:
            if not isinstance(file, str | os.PathLike):
                raise ArgumentError(
                    f'load_safetensors: files has to be a list of paths, and {file!r} in it is not a path'
                )
        if not given:
            raise CheckpointError('load_safetensors: the list of files is empty')
        return {Path(file): [] for file in given}
    path = Path(files)
    if os.path.isdir(path):
        indices = sorted(path.glob(f'*{_SUFFIX}{_INDEX}'))
        found = sorted(path.glob(f'*{_SUFFIX}'))
        if len(indices) > 1 or not (indices or found):
            what = f'{len(indices)} indices' if indices else f'no {_SUFFIX} files'
            raise CheckpointError(f'{path} has {what}; name the file, the files or the index')
        return _list_indexed(indices[0]) if indices else {file: [] for file in found}
    return _list_indexed(path) if path.name.endswith(_INDEX) else {path: []}


def _list_indexed(index: Path) -> dict[Path, list[str]]:
    """The files that an index names, all of which have to be in its folder or below it."""
    try:
        values = strict_json.parse(strict_json.read(index))
    except (OSError, ValueError) as error:
        raise CheckpointError(f'{index} is no index: {strict_json.reason(error)}') from error
    places = values.get('weight_map') if isinstance(values, dict) else None
    if (
        not places
        or not isinstance(places, dict)
        or not all(isinstance(file, str) for file in places.values())
    ):
        raise CheckpointError(f'{index} is no index: it has no weight_map that gives a file for each tensor')
    outside = [
        f'{in_message(name)}: {strict_json.brief(file)}'
        for name, file in places.items()
        if PurePath(file).anchor or '..' in PurePath(file).parts
    ]
    if outside:
        raise CheckpointError(
            f'{index} names files outside of its folder:\n{shown(outside)}\n'
            'What to do: name the files themselves in place of the index, if they are what is wanted.'
        )
    listed: dict[Path, list[str]] = {}
    for name, file in places.items():
        listed.setdefault(index.parent / file, []).append(name)
    return listed


def _open_files(stack: contextlib.ExitStack, listed: Mapping[Path, Sequence[str]]) -> dict[Path, BinaryIO]:
    """All files, opened once: header and tensors are read from one file, even if its path changes."""
    opened: dict[Path, BinaryIO] = {}
    problems = []
    for file in listed:
        try:
            opened[file] = stack.enter_context(strict_json.opened(file))
        except (OSError, ValueError) as error:
            problems.append(f'{in_message(str(file))}: {strict_json.reason(error)}')
    if problems:
        which = ' that the index names' if any(listed.values()) else ''
        raise CheckpointError(f'files{which} cannot be read:\n{shown(problems)}')
    return opened


def _all_tensors(files: Mapping[Path, Sequence[str]], opened: Mapping[Path, BinaryIO]) -> list[Tensor]:
    """The tensors of all files, in the order of the files."""
    found: list[Tensor] = []
    where: dict[str, Path] = {}
    problems: list[str] = []
    for file, expected in files.items():
        tensors = tensors_of(file, opened[file])
        names = {tensor.name for tensor in tensors}
        problems.extend(
            f'{in_message(name)} is not in {file}, where the index says it is'
            for name in expected
            if name not in names
        )
        for tensor in tensors:
            if tensor.name in where:
                problems.append(f'{tensor.label} is in {where[tensor.name]} and in {file}')
            where[tensor.name] = file
        found.extend(tensors)
    if problems:
        raise CheckpointError(f'the files do not fit together:\n{shown(problems)}')
    return found


def _set_leaf(tree: dict[str, Any], path: str, leaf: Any) -> None:
    *above, last = path.split('/')
    for key in above:
        tree = tree.setdefault(key, {})
    tree[last] = leaf
