"""Do processes that load the same rows hold the same values? Checksums, gathered on request."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import jax
import numpy as np

from scalax._hostdata import collectives
from scalax._hostdata.batch_layout import Layout
from scalax._hostdata.prng_keys import is_key
from scalax._tree.paths import NamedTree
from scalax.errors import DataError, shown


def compare(tree: NamedTree, axes: Sequence[int | None], layout: Layout, rows: str, call: str) -> None:
    """Compares what several processes hold: rows, where each brings those that it needs.

    One all-gather of 8 bytes for each leaf and shard; all processes raise, or none.

    Args:
        tree: this process's part.
        axes: the batch axis of each leaf, None for scalars.
        layout: which rows lie where.
        rows: ``'needed'``; with ``'all'`` no two processes hold the same.
        call: the options, for the message.

    Raises:
        DataError: names leaves, rows and processes.
    """
    arrays = [i for i, axis in enumerate(axes) if axis is not None]
    if rows != 'needed' or not arrays or sum(map(len, layout.held)) == len(set().union(*layout.held)):
        return
    sums = np.zeros((len(arrays), layout.count, 2), np.uint32)
    sizes = []
    for number, i in enumerate(arrays):
        leaf = tree.leaves[i]
        host = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
        parts = np.split(host, len(layout.here), axes[i] or 0)
        sizes.append(parts[0].shape[axes[i] or 0])
        for tile, part in zip(layout.here, parts, strict=True):
            data = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
            sums[number, tile] = np.frombuffer(hashlib.blake2b(data, digest_size=8).digest(), np.uint32)
    gathered = collectives.gather(layout.mesh, sums)
    indices = collectives.processes_of(layout.mesh).indices
    found = []
    for number, i in enumerate(arrays):
        for tile in range(layout.count):
            holders = [position for position, tiles in enumerate(layout.held) if tile in tiles]
            first = gathered[holders[0], number, tile]
            other = [p for p in holders if (gathered[p, number, tile] != first).any()]
            if other:
                start = tile * sizes[number]
                listed = ', '.join(str(indices[p]) for p in other)
                found.append(
                    f'{tree.paths[i] or "(the leaf itself)"}: rows {start}:{start + sizes[number]} of '
                    f'process {listed} are not those of process {indices[holders[0]]}'
                )
    if found:
        raise DataError(
            f'local_data_to_global_array: processes that load the same rows hold different values ({call}):\n'
            f'{shown(found)}\n'
            'What to do: load exactly the rows that helper.process_rows gives, with the same shuffling, '
            'augmentation and seed on every process.'
        )
