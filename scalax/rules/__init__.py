"""Rules, which map the paths and shapes of a pytree to PartitionSpecs, and their resolution on a mesh.

Rules are immutable values, one in each file. They depend on the sizes of mesh axes at most, never on devices.
Other packages call `_resolve.resolve` for the shardings of a tree, and `_rule_tree` for trees of rules.
"""

from scalax.rules._fsdp import FSDPShardingRule
from scalax.rules._logical_axis import LogicalAxisShardingRule
from scalax.rules._optimizer_state import OptimizerStateShardingRule
from scalax.rules._policy import PolicyShardingRule
from scalax.rules._rule import ShardingRule
from scalax.rules._rule_tree import RuleLike
from scalax.rules._tree_path import TreePathShardingRule

__all__ = [
    'FSDPShardingRule',
    'LogicalAxisShardingRule',
    'OptimizerStateShardingRule',
    'PolicyShardingRule',
    'RuleLike',
    'ShardingRule',
    'TreePathShardingRule',
]
