"""Named axes: one mapping of logical axis names to mesh axes, active in a context.

`LogicalAxisShardingRule` defines the meaning of a mapping. A mapping is active inside and outside compiled
functions, and can be queried. Arrays name their dimensions themselves (flax's boxes and variables, haliax's
NamedArrays), or `shard` names them: ``shard(x, 'batch embed')``.
"""

from scalax.axes._mapping import AxisMapping, ResourceMapping, axis_mapping
from scalax.axes._named_jit import fsdp, named_jit
from scalax.axes._query import (
    physical_axis_name,
    physical_axis_size,
    pspec_for,
    round_axis_for_partitioning,
    sharding_for_axis,
)
from scalax.axes._shard import auto_sharded, shard, shard_with_axis_mapping

__all__ = [
    'AxisMapping',
    'ResourceMapping',
    'auto_sharded',
    'axis_mapping',
    'fsdp',
    'named_jit',
    'physical_axis_name',
    'physical_axis_size',
    'pspec_for',
    'round_axis_for_partitioning',
    'shard',
    'shard_with_axis_mapping',
    'sharding_for_axis',
]
