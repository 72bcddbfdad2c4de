"""WHAT is sharded how: rules turn the shapes and paths of a pytree into PartitionSpecs.

One rule a file. Rules are immutable values, know axis sizes at most, and never see a device.
"""

from scalax.rules._base import ShardingRule
from scalax.rules._fsdp import FSDPShardingRule
from scalax.rules._logical_axis import LogicalAxisShardingRule
from scalax.rules._optimizer_state import OptimizerStateShardingRule
from scalax.rules._policy import PolicyShardingRule
from scalax.rules._tree_path import TreePathShardingRule

__all__ = [
    'FSDPShardingRule',
    'LogicalAxisShardingRule',
    'OptimizerStateShardingRule',
    'PolicyShardingRule',
    'ShardingRule',
    'TreePathShardingRule',
]
