"""Broadcast of a tree from one process to every process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from scalax._core.pytree.partition_specs import MeshAxes
from scalax._core.pytree.paths import NamedTree, has_foreign_dtype, is_prng_key, leaf_shape, leaf_text
from scalax._data.host import agreement, process_collectives
from scalax._data.host.transfer import reject_tracers
from scalax._jax.tracing import is_abstract
from scalax.errors import DataError, module_advice, shown_leaves

_CHUNK = 2**26  # bytes that are sent at once


def broadcast_from(mesh: Mesh, process: int, pytree: Any) -> Any:
    """Implements `MeshShardingHelper.broadcast_from`."""
    processes = process_collectives.processes_of(mesh)
    position = processes.position

    def prepare() -> tuple[list[tuple[str, str]], tuple[NamedTree, list[np.ndarray]]]:
        reject_tracers(jax.tree.leaves(pytree), 'broadcast_from')
        tree = NamedTree.of(pytree)
        _check(tree, process, processes.indices)
        is_source = processes.indices.index(process) == position
        values = [_buffer(leaf, is_source) for leaf in tree.leaves]
        # With the dtypes of the host: the values never become arrays of these dtypes on a device.
        leaves = list(zip(tree.paths, map(leaf_text, tree.leaves), strict=True))
        return leaves, (tree, values)

    advice = (
        'What to do: call it on every process with a tree of the same structure, shapes and dtypes; the '
        f'values matter on process {process} only.'
    )
    options = f'mesh ({MeshAxes.of(mesh)}), process={process!r}'
    tree, values = agreement.prepare_and_agree(mesh, 'broadcast_from', options, advice, prepare)
    if processes.is_multiprocess:
        views = [value.reshape(-1).view(np.uint8) for value in values]
        _overwrite(mesh, processes.indices.index(process), views)
    return tree.treedef.unflatten(
        [_as_leaf(leaf, value) for leaf, value in zip(tree.leaves, values, strict=True)]
    )


def _check(tree: NamedTree, process: int, indices: Sequence[int]) -> None:
    """Raises DataError if this process cannot send or receive the tree."""
    if isinstance(process, bool) or process not in indices:
        raise DataError(
            f'broadcast_from takes the index of a process that holds devices of the mesh '
            f'({", ".join(map(str, indices))}), got {process!r}'
        )
    faults = [_fault(tree, i, process == jax.process_index()) for i in range(len(tree))]
    if any(faults):
        raise DataError(
            f'these leaves cannot be sent to other processes:\n{shown_leaves(filter(None, faults))}'
            + (f'\nWhat to do:{advice}' if (advice := module_advice(tree.leaves)) else '')
        )


def _fault(tree: NamedTree, index: int, is_source: bool) -> str | None:
    """Returns why a leaf cannot be sent; None if it can."""
    leaf = tree.leaves[index]
    if leaf_shape(leaf) is None or (is_source and is_abstract(leaf)):
        return f'{tree.describe(index)} is not an array'
    if has_foreign_dtype(leaf):
        return f'{tree.describe(index)}: JAX has no arrays of dtype {leaf.dtype}'
    if isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
        return f'{tree.describe(index)} has more than 64 bits'
    if (
        is_source
        and isinstance(leaf, jax.Array)
        and not (leaf.is_fully_addressable or leaf.is_fully_replicated)
    ):
        return (
            f'{tree.describe(index)} is a global array, the same on every process: helper.gather fetches it'
        )
    return None


def _buffer(leaf: Any, is_source: bool) -> np.ndarray:
    """Returns a copy of a leaf, to be sent or overwritten."""
    if is_prng_key(leaf):
        leaf = jax.random.key_data(leaf)
    elif jax.dtypes.issubdtype(getattr(leaf, 'dtype', np.int8), jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    if not is_source and hasattr(leaf, 'dtype'):
        return np.empty(leaf.shape, leaf.dtype)
    if isinstance(leaf, jax.Array):
        leaf = leaf.addressable_data(0) if leaf.is_fully_replicated else leaf
    return np.array(leaf, order='C')


def _overwrite(mesh: Mesh, position: int, views: list[np.ndarray]) -> None:
    """Overwrites bytes with the bytes of the process at *position*, one chunk at a time."""
    joined = np.concatenate([np.empty(0, np.uint8), *views])
    for start in range(0, joined.size, _CHUNK):
        chunk = joined[start : start + _CHUNK]
        chunk[:] = process_collectives.broadcast(mesh, position, chunk)
    ends = np.cumsum([view.size for view in views])
    for view, end in zip(views, ends.tolist(), strict=True):
        view[:] = joined[end - view.size : end]


def _as_leaf(leaf: Any, value: np.ndarray) -> Any:
    """Converts a value to the kind of a leaf: a Python number, an array, or keys."""
    if not hasattr(leaf, 'dtype'):
        return type(leaf)(value.item())
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(leaf))
    return value
