"""The front of scalax: a mesh, and everything that can be done with rules on it.

Each method is one call into a layer below: what it does is written there, what it means is written here.
"""

from scalax._helper._input import Input
from scalax._helper._what import What
from scalax._helper._when import When


class MeshShardingHelper(What, When, Input):
    """A mesh of devices, and what can be done with sharding rules on it.

    Args:
        axis_dims: the size of each mesh axis; one may be -1, which stands for what is left.
        axis_names: the name of each mesh axis.
        mesh_axis_splitting: allow one physical axis of a TPU slice to serve several mesh axes, as for
            8x8 on a 4x4x4 slice. It may cost bandwidth.
        dcn_axis_dims: for several slices: how many of them lie along each axis. Each entry of
            `axis_dims` is then a total, and a multiple of its own entry here.
        devices: the devices to use; all by default.
        axis_types: one ``jax.sharding.AxisType`` for all axes or one for each; Auto by default.
        on_indivisible: the policy for bare PartitionSpecs where a dimension does not divide:
            ``'error'``, ``'replicate'`` or ``'warn'``. Rules carry their own.

    Raises:
        MeshError: dimensions, names, types and devices do not fit together; says what would.

    Example:
        >>> import numpy as np
        >>> from jax.sharding import PartitionSpec
        >>> helper = MeshShardingHelper([-1, 2], ['fsdp', 'tp'])
        >>> helper
        MeshShardingHelper(fsdp=4, tp=2)
        >>> helper.shard(np.zeros((8, 8)), PartitionSpec('fsdp', 'tp')).sharding.spec
        P('fsdp', 'tp')
    """
