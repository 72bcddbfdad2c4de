"""Data: what each process holds, as global arrays, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scalax import _data, _mesh
from scalax._helper._where import Where


class Input(Where):
    """What the processes bring."""

    def local_data_to_global_array(
        self,
        pytree: Any,
        batch_axis: int = 0,
        mesh_axis_subset: Sequence[str] | str | None = None,
    ) -> Any:
        """Makes global arrays of the data that each process holds.

        Args:
            pytree: this process's part. Scalars are replicated, and must agree on all processes.
            batch_axis: the axis along which the parts of all processes are joined, in process order;
                may be negative.
            mesh_axis_subset: the mesh axes over which the batch is sharded; all of them by default, in
                mesh order. Over the other axes it is replicated.

        Returns:
            The tree as global jax.Arrays.

        Raises:
            DataError: the global batch does not divide by the mesh axes; all such leaves are named.
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
        return _data.local_data_to_global_array(self.mesh, pytree, batch_axis, mesh_axis_subset)

    def global_array_to_local_data(self, pytree: Any, batch_axis: int = 0) -> Any:
        """The rows of global arrays that this process's devices hold, as numpy arrays (keys: as keys).

        Args:
            pytree: global jax.Arrays. One process alone holds every row; of several, none may be sharded
                along another axis (DataError).
            batch_axis: the axis of the rows; may be negative.
        """
        return _data.global_array_to_local_data(pytree, batch_axis)
