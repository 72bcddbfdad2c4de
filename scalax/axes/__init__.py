"""Named axes: a mapping of logical axis names to mesh axes, given once, usable everywhere.

A mapping has the meaning that `LogicalAxisShardingRule` gives it. It is active in a context, inside and
outside of compiled functions, and can be queried. Arrays name their dimensions themselves (flax's boxes and
variables, haliax's NamedArrays) or are named where they are sharded: ``shard(x, 'batch embed')``.
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
