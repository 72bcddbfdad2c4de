"""Global arrays of the batches that processes load.

Three steps, so that prefetching can do the first two in another thread:

- `read` checks this process's part and works out the global arrays;
- `place` puts it on this process's own devices: host work, nothing is communicated;
- all processes together call what `place` returns: rows move to the devices that need them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalax._core.pytree.partition_specs import MeshAxes, canonical
from scalax._core.pytree.paths import (
    NamedTree,
    dtype_on_devices,
    has_foreign_dtype,
    is_prng_key,
    is_weakly_typed,
    leaf_shape,
    overflowed_dtype,
    type_text,
)
from scalax._data.host import agreement, process_collectives
from scalax._data.host.batch_layout import BatchLayout, checked_axis, layout_of
from scalax._data.host.transfer import reject_tracers, weakly_typed, wrap_keys
from scalax._jax.tracing import is_abstract
from scalax.errors import DataError, ScalaxError, shown_leaves
from scalax.rules._resolve import named_sharding

LocalBatch = Literal['equal_share', 'addressable']
ADVICE = (
    'What to do: bring data of the same structure, shapes and dtypes on every process, with equal scalars; '
    'drop the incomplete batch at the end of the data, or pad it.'
)


@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """How the batches of processes are joined: the same on every process."""

    mesh: Mesh
    batch_axis: int = 0
    mesh_axis_subset: Sequence[str] | str | None = None
    local_batch: LocalBatch = 'equal_share'

    @functools.cached_property
    def call(self) -> str:
        """The options as text, in which processes have to agree."""
        over = 'all mesh axes' if self.mesh_axis_subset is None else f'mesh axes {self.mesh_axis_subset!r}'
        return (
            f'mesh ({MeshAxes.of(self.mesh)}), batch on axis {self.batch_axis!r} over {over}, '
            f'local_batch={self.local_batch!r}'
        )


@dataclasses.dataclass(frozen=True)
class ProcessBatch:
    """This process's part of a global batch, checked.

    Attributes:
        options: how it is joined.
        layout: which device holds which rows.
        tree: its leaves; Python numbers and keys as they came.
        axes: the batch axis of each leaf, None for scalars.
        shapes: the shapes of the global arrays.
        shardings: and their shardings.
    """

    options: BatchOptions
    layout: BatchLayout
    tree: NamedTree
    axes: Sequence[int | None]
    shapes: Sequence[tuple[int, ...]]
    shardings: Sequence[NamedSharding]


Finish = Callable[[], Any]


def local_data_to_global_array(options: BatchOptions, pytree: Any, check: bool, check_replicas: bool) -> Any:
    """Makes global arrays of the data that each process holds."""
    process_collectives.require_this_process(options.mesh)
    several = process_collectives.processes_of(options.mesh).is_multiprocess
    if not several:
        leaves, treedef = jax.tree.flatten(pytree)
        if shardings := _known_shardings(options, leaves):
            return jax.tree.unflatten(treedef, jax.device_put(leaves, shardings))

    def prepare() -> tuple[Iterator[tuple[str, str]], tuple[ProcessBatch, Finish]]:
        part = read(options, pytree)
        return _statement_leaves(part), (part, place(part))

    if check:
        part, finish = agreement.prepare_and_agree(
            options.mesh, 'local_data_to_global_array', options.call, ADVICE, prepare
        )
    else:
        _, (part, finish) = prepare()
        if several:
            process_collectives.bound_queue(options.mesh)
    if check_replicas and several:
        _compare_replicas(part)
    return finish()


def _compare_replicas(part: ProcessBatch) -> None:
    """Compares checksums of the examples that several processes bring; all processes raise, or none.

    Takes one all-gather, of about 30 bytes for each leaf and shard.

    Raises:
        DataError: names leaves, examples and processes.
    """
    tree, layout = part.tree, part.layout
    if part.options.local_batch != 'addressable' or sum(map(len, layout.held)) == len(
        set().union(*layout.held)
    ):
        return  # no two processes bring the same examples
    checksums = []
    for i, (leaf, axis) in enumerate(zip(tree.leaves, part.axes, strict=True)):
        if axis is not None:
            blocks = np.split(_host(leaf, copy=False), len(layout.here), axis)
            for tile, block in zip(layout.here, blocks, strict=True):
                checksums.append((i, tile, hashlib.blake2b(block.tobytes(), digest_size=8).hexdigest()))
    first: dict[tuple[int, int], tuple[int, str]] = {}
    others: dict[tuple[int, int], list[int]] = {}
    gathered = process_collectives.gather_json(layout.mesh, checksums)
    for process, theirs in zip(process_collectives.processes_of(layout.mesh).indices, gathered, strict=True):
        for i, tile, checksum in theirs:
            if first.setdefault((i, tile), (process, checksum))[1] != checksum:
                others.setdefault((i, tile), []).append(process)
    differences = []
    for (i, tile), processes in sorted(others.items()):
        size = part.shapes[i][part.axes[i] or 0] // layout.count
        differences.append(
            f'{tree.paths[i] or "(the leaf itself)"}: examples {tile * size}:{(tile + 1) * size} of process '
            f'{", ".join(map(str, processes))} are not those of process {first[i, tile][0]}'
        )
    if differences:
        raise DataError(
            'local_data_to_global_array: processes that load the same examples hold different values '
            f'({part.options.call}):\n'
            f'{shown_leaves(differences)}\n'
            'What to do: load exactly the examples that helper.process_examples gives, with the same '
            'shuffling, augmentation and seed on every process.'
        )


def _known_shardings(options: BatchOptions, leaves: Sequence[Any]) -> list[NamedSharding] | None:
    """The shardings that `read` would find, if all leaves are numpy arrays that fit; else None."""
    if set(map(type, leaves)) != {np.ndarray}:
        return None
    subset = options.mesh_axis_subset
    shapes = tuple([(leaf.shape, leaf.dtype) for leaf in leaves])
    try:
        axes = tuple(subset) if isinstance(subset, list) else subset
        return _shardings_of(options.mesh, options.batch_axis, axes, options.local_batch, shapes)
    except (TypeError, ScalaxError):  # not hashable, or wrong: `read` names the leaves
        return None


# Typed: True equals 1, and is not a batch axis.
@functools.lru_cache(maxsize=256, typed=True)
def _shardings_of(
    mesh: Mesh,
    batch_axis: int,
    axes: Any,
    local_batch: LocalBatch,
    shapes: Sequence[tuple[tuple[int, ...], Any]],
) -> list[NamedSharding]:
    """The shardings of arrays on one process, which depend on neither values nor paths."""
    arrays = [np.broadcast_to(np.zeros((), dtype), shape) for shape, dtype in shapes]
    return list(read(BatchOptions(mesh, batch_axis, axes, local_batch), arrays).shardings)


def agree(
    options: BatchOptions, what: str, part: ProcessBatch | None, error: BaseException | None, state: str = ''
) -> None:
    """Returns if all processes bring parts that fit together; raises on every process if not."""
    leaves = () if part is None else _statement_leaves(part)
    agreement.agree(options.mesh, what, options.call, leaves, ADVICE, error, state=state)


def _statement_leaves(part: ProcessBatch) -> Iterator[tuple[str, str]]:
    """What the processes have to agree on, leaf by leaf."""
    # Users know the local shapes, but with local_batch='addressable' these may differ between processes.
    shapes = part.tree.shapes if part.options.local_batch == 'equal_share' else part.shapes
    for path, leaf, shape in zip(part.tree.paths, part.tree.leaves, shapes, strict=True):
        dtype = dtype_on_devices(leaf)
        if shape:
            yield path, agreement.weak_text(leaf) + type_text(dtype, shape)
        else:
            yield path, agreement.scalar_text(leaf, dtype)


def read(options: BatchOptions, pytree: Any) -> ProcessBatch:
    """Checks this process's part, and works out the global arrays.

    Raises:
        DataError: it does not fit; all leaves that do not are named.
        MeshError: the options name axes that the mesh does not have.
    """
    layout = layout_of(options.mesh, options.mesh_axis_subset)
    batch_axis = checked_axis(options.batch_axis)
    if options.local_batch not in ('equal_share', 'addressable'):
        raise DataError(f"local_batch is 'equal_share' or 'addressable', got {options.local_batch!r}")
    tree = NamedTree.of(pytree)
    reject_tracers(tree.leaves, 'local_data_to_global_array')
    faults = [_fault(tree, i, batch_axis, layout, options.local_batch) for i in range(len(tree))]
    if any(faults):
        raise DataError(
            f'local data does not fit the mesh ({MeshAxes.of(options.mesh)}), with the batch on axis '
            f'{batch_axis} over mesh axes {layout.axes}:\n{shown_leaves(filter(None, faults))}\n'
            'What to do: pad the batch or drop its last examples, or shard it over fewer axes with '
            'mesh_axis_subset.'
        )
    axes = [batch_axis % len(shape) if shape else None for shape in tree.shapes]
    shapes = [
        shape
        if axis is None
        else (*shape[:axis], _global_examples(shape[axis], layout, options.local_batch), *shape[axis + 1 :])
        for shape, axis in zip(tree.shapes, axes, strict=True)
    ]
    specs = [PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, layout.axes) for axis in axes]
    shardings = [named_sharding(options.mesh, canonical(spec)) for spec in specs]
    return ProcessBatch(options, layout, tree, axes, shapes, shardings)


def _fault(
    tree: NamedTree, index: int, batch_axis: int, layout: BatchLayout, local_batch: LocalBatch
) -> str | None:
    """What is wrong with one leaf, or None."""
    leaf = tree.leaves[index]
    shape = leaf_shape(leaf)
    if shape is None or is_abstract(leaf):
        return f'{tree.describe(index)} is not an array'
    if has_foreign_dtype(leaf):
        return f'{tree.describe(index)}: JAX has no arrays of dtype {leaf.dtype}'
    if dtype := overflowed_dtype(leaf):
        return f'{tree.describe(index)}: {leaf} does not fit in {dtype}, which JAX makes of a Python int'
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return f'{tree.describe(index)} is a global array already, with shards on other processes'
    if not shape:
        return None
    if not -len(shape) <= batch_axis < len(shape):
        return f'{tree.describe(index)} has no axis {batch_axis}'
    brought = shape[batch_axis]
    if local_batch == 'addressable':
        tiles = len(layout.here)
        if brought % tiles:
            return (
                f'{tree.describe(index)}: {brought} examples do not divide by the {tiles} shards that '
                "this process's devices need"
            )
        return None
    whole = _global_examples(brought, layout, local_batch)
    if whole % layout.count:
        return (
            f'{tree.describe(index)}: the global batch of {whole} examples does not divide by '
            f'{layout.count} shards'
        )
    return None


def _global_examples(brought: int, layout: BatchLayout, local_batch: LocalBatch) -> int:
    """The rows of the whole batch, of which this process brings so many."""
    if local_batch == 'addressable':
        return brought // len(layout.here) * layout.count
    return brought * len(process_collectives.processes_of(layout.mesh).indices)


def place(part: ProcessBatch, *, keep: bool = True) -> Finish:
    """Puts a part on this process's devices; returns what completes the global arrays.

    Only what is returned communicates, and only if rows have to move.

    Args:
        part: the part.
        keep: that the memory of the part will not change while the arrays exist, so that they may share it
            (as they do on CPU), or copy from it later.
    """
    tree, mesh = part.tree, part.options.mesh
    copy = not keep and mesh.devices.flat[0].platform == 'cpu'
    if process_collectives.processes_of(mesh).is_multiprocess:
        placed = [_place_leaf(part, i, copy) for i in range(len(tree))]
        if not keep:
            jax.block_until_ready(placed)
        return lambda: tree.treedef.unflatten(_finish(part, placed))
    # All rows are here, so this is a plain transfer: one for all leaves. Python numbers get weak types in it.
    leaves = [
        _host(leaf, copy) if copy and hasattr(leaf, 'dtype') and not isinstance(leaf, jax.Array) else leaf
        for leaf in tree.leaves
    ]
    arrays = jax.device_put(leaves, list(part.shardings))
    if not keep:
        jax.block_until_ready(arrays)
    return lambda: tree.treedef.unflatten(arrays)


def _host(leaf: Any, copy: bool) -> np.ndarray:
    """A leaf as numpy has it, with the dtype that it has on devices (keys: their data)."""
    if isinstance(leaf, jax.Array):
        return np.asarray(jax.random.key_data(leaf) if is_prng_key(leaf) else leaf)
    if not hasattr(leaf, 'dtype'):
        return np.asarray(leaf).astype(dtype_on_devices(leaf))
    return np.array(leaf) if copy else np.asarray(leaf)


def _place_leaf(part: ProcessBatch, index: int, copy: bool) -> Any:
    """A leaf on this process's devices: the global array, or rows that `_finish` has to move."""
    layout, axis, sharding = part.layout, part.axes[index], part.shardings[index]
    host = _host(part.tree.leaves[index], copy)
    if axis is None:
        return jax.make_array_from_callback(host.shape, sharding, lambda _: host)
    # The data of keys have dimensions of their own, behind those of the keys.
    shape = (*part.shapes[index], *host.shape[len(part.shapes[index]) :])
    if not host.size:
        # Nothing has to move, and of a program's outputs without elements XLA gives every device the whole.
        nothing = np.empty(sharding.shard_shape(shape), host.dtype)
        return jax.make_array_from_callback(shape, sharding, lambda _: nothing)
    if part.options.local_batch == 'equal_share' and not layout.is_in_order:
        return process_collectives.concat_by_process(layout.mesh, host, axis)
    blocks = dict(zip(layout.here, np.split(host, len(layout.here), axis), strict=True))
    size = shape[axis] // layout.count

    def block(index: tuple[slice, ...] | None) -> np.ndarray:
        return blocks[(cast(tuple[slice, ...], index)[axis].start or 0) // size]

    return jax.make_array_from_callback(shape, sharding, block)


def _finish(part: ProcessBatch, placed: Sequence[Any]) -> list[jax.Array]:
    """The global arrays."""
    arrays = list(placed)
    for i, (array, sharding) in enumerate(zip(placed, part.shardings, strict=True)):
        if isinstance(array, np.ndarray):
            arrays[i] = process_collectives.allgather_and_shard(
                part.options.mesh, array, cast(int, part.axes[i]), sharding
            )
        elif array.sharding != sharding:
            process_collectives.bound_queue(part.options.mesh)
            arrays[i] = process_collectives.without_mesh_context(jax.device_put, array, sharding)
    for i, leaf in enumerate(part.tree.leaves):
        if is_prng_key(leaf):
            arrays[i] = wrap_keys(arrays[i], leaf, part.shardings[i])
        elif is_weakly_typed(leaf):
            arrays[i] = weakly_typed(arrays[i])
    return arrays
