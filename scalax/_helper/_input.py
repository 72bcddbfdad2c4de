"""Data: what each process holds, as global arrays, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from scalax import _broadcast, _data, _local, _mesh, _rows
from scalax._helper._where import Where
from scalax._prefetch import Prefetch


class Input(Where):
    """What the processes bring."""

    def local_data_to_global_array(
        self,
        pytree: Any,
        batch_axis: int = 0,
        mesh_axis_subset: Sequence[str] | str | None = None,
        *,
        check: bool = True,
        rows: Literal['all', 'needed'] = 'all',
        check_replicas: bool = False,
    ) -> Any:
        """Makes global arrays of the data that each process holds.

        Args:
            pytree: this process's part. Scalars are replicated, and must agree on all processes. NumPy
                arrays must not change while the result is in use: on CPU it may share their memory.
            batch_axis: the axis along which the parts of all processes are joined, in process order;
                may be negative.
            mesh_axis_subset: the mesh axes over which the batch is sharded; all of them by default, in
                mesh order. Over the other axes it is replicated.
            check: make sure that all processes bring parts of one structure, shape and dtype, and equal
                scalars: one all-gather of 20 bytes a process, which waits for what the devices have been
                given to do. Without it, processes that disagree may wait for one another for ever. A single
                process has nobody to agree with.
            rows: ``'all'``: every process brings an equal part of the batch; rows that another process's
                devices need are sent there, and nothing else is. ``'needed'``: every process brings the
                rows that `process_rows` names, in that order, and nothing is sent.
            check_replicas: with ``rows='needed'``, compare checksums of the rows that several processes
                bring.

        Returns:
            The tree as global jax.Arrays.

        Raises:
            DataError: the global batch does not divide by the mesh axes, or processes disagree; all such
                leaves are named, on every process.
            MeshError: an axis that the mesh does not have.

        Example:
            >>> import numpy as np
            >>> from scalax.sharding import MeshShardingHelper
            >>> helper = MeshShardingHelper([4, 2], ['data', 'tp'])
            >>> batch = helper.local_data_to_global_array({'x': np.zeros((8, 3))}, mesh_axis_subset='data')
            >>> batch['x'].sharding.spec
            P('data',)
        """
        _mesh.require_devices(self._mesh, 'local_data_to_global_array')
        options = _data.Options(self.mesh, batch_axis, mesh_axis_subset, rows)
        return _data.local_data_to_global_array(options, pytree, check, check_replicas)

    def process_rows(
        self,
        global_batch: int,
        batch_axis: int = 0,
        mesh_axis_subset: Sequence[str] | str | None = None,
    ) -> slice | np.ndarray:
        """The rows of a batch that this process's devices need: what to load for ``rows='needed'``.

        Args:
            global_batch: the number of rows of the whole batch.
            batch_axis: as for `local_data_to_global_array`; which rows are needed does not depend on it.
            mesh_axis_subset: as for `local_data_to_global_array`.

        Returns:
            A slice where the rows follow one another, else their numbers in ascending order. A NumPy array
            takes either: ``batch[helper.process_rows(len(batch))]``.

        Raises:
            DataError: the batch does not divide by the mesh axes.
            MeshError: an axis that the mesh does not have.

        Example:
            >>> from scalax.sharding import MeshShardingHelper
            >>> MeshShardingHelper([4, 2], ['data', 'tp']).process_rows(16)
            slice(0, 16, None)
        """
        _mesh.require_devices(self._mesh, 'process_rows')
        _rows.checked_axis(batch_axis)
        return _rows.process_rows(self.mesh, global_batch, _rows.layout_of(self.mesh, mesh_axis_subset))

    def global_array_to_local_data(
        self, pytree: Any, batch_axis: int = 0, *, rows: Literal['all', 'needed'] = 'all'
    ) -> Any:
        """The inverse of `local_data_to_global_array`: this process's rows, as numpy arrays (keys: as keys).

        Args:
            pytree: global jax.Arrays; what this process holds whole is returned whole.
            batch_axis: the axis of the rows; may be negative.
            rows: ``'all'``: this process's equal part, in process order; where it lies on the devices of
                other processes, the leaf is fetched, which all processes do together. ``'needed'``: the
                rows that this process's devices hold.

        Raises:
            DataError: leaves that have no such part; all of them are named, on every process.
        """
        return _local.global_array_to_local_data(pytree, batch_axis, rows)

    def broadcast_from(self, process: int, tree: Any) -> Any:
        """Gives every process the values that one of them has.

        Args:
            process: the index of that process.
            tree: a tree of the same structure, shapes and dtypes on every process; the values of the
                others do not matter, and may be ``jax.ShapeDtypeStruct`` there.

        Returns:
            The tree in host memory, equal bit by bit: numpy arrays, Python numbers, typed PRNG keys.

        Raises:
            DataError: the trees differ, or cannot be sent; processes and leaves are named, on every process.

        Example:
            >>> from scalax.sharding import MeshShardingHelper
            >>> helper = MeshShardingHelper([8], ['data'])
            >>> helper.broadcast_from(0, {'seed': 17})
            {'seed': 17}
        """
        _mesh.require_devices(self._mesh, 'broadcast_from')
        return _broadcast.broadcast_from(self.mesh, process, tree)

    def prefetch(
        self,
        iterable: Iterable[Any],
        batch_axis: int = 0,
        mesh_axis_subset: Sequence[str] | str | None = None,
        size: int = 2,
        *,
        check: bool = True,
        rows: Literal['all', 'needed'] = 'all',
    ) -> Prefetch:
        """Iterates over global arrays that a background thread loads ahead.

        The thread asks the iterable for batches and copies them to this process's devices. What processes
        do together is done in ``next``. An error of the loader is raised there as it is; with ``check`` the
        other processes get a DataError that says so, and one whose data ends early is noticed.

        Args:
            iterable: of trees, as for `local_data_to_global_array`. A loader may fill the same memory again
                for each batch.
            batch_axis: as for `local_data_to_global_array`.
            mesh_axis_subset: as for `local_data_to_global_array`.
            size: how many batches are in memory at most, besides those that the loop holds.
            check: as for `local_data_to_global_array`, at each batch.
            rows: as for `local_data_to_global_array`.

        Returns:
            An iterator, also a context manager; it stops loading when it is closed or dropped.

        Example:
            >>> import numpy as np
            >>> from scalax.sharding import MeshShardingHelper
            >>> helper = MeshShardingHelper([8], ['data'])
            >>> with helper.prefetch(np.full(8, i) for i in range(3)) as batches:
            ...     [int(batch.sum()) for batch in batches]
            [0, 8, 16]
        """
        _mesh.require_devices(self._mesh, 'prefetch')
        options = _data.Options(self.mesh, batch_axis, mesh_axis_subset, rows)
        return Prefetch(iterable, options, size, check)
