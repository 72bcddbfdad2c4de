"""Everything about sharding that users import: meshes, rules, compiled functions, constraints."""

from typing import TYPE_CHECKING, Any

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from scalax._helper import MeshShardingHelper
from scalax._hostdata.prefetch import Prefetch
from scalax._stages.stages import Stages
from scalax._trace.constraints import with_sharding_annotation, with_sharding_constraint
from scalax._transforms.sjit.function import SjitFunction
from scalax.rules import (
    FSDPShardingRule,
    LogicalAxisShardingRule,
    OptimizerStateShardingRule,
    PolicyShardingRule,
    RuleLike,
    ShardingRule,
    TreePathShardingRule,
)

if TYPE_CHECKING:
    from scalax._follow.followed_batch import FollowedBatch, KeptValue, LostRows
    from scalax.explain import ShardingReport

get_global_mesh_helper = MeshShardingHelper.get_global_mesh_helper
get_global_mesh = MeshShardingHelper.get_global_mesh
get_global_annotation_shardings = MeshShardingHelper.get_global_annotation_shardings

__all__ = [
    'AxisType',
    'FSDPShardingRule',
    'FollowedBatch',
    'KeptValue',
    'LogicalAxisShardingRule',
    'LostRows',
    'Mesh',
    'MeshShardingHelper',
    'Stages',
    'NamedSharding',
    'OptimizerStateShardingRule',
    'PartitionSpec',
    'PolicyShardingRule',
    'Prefetch',
    'RuleLike',
    'ShardingReport',
    'ShardingRule',
    'SjitFunction',
    'TreePathShardingRule',
    'get_global_annotation_shardings',
    'get_global_mesh',
    'get_global_mesh_helper',
    'with_sharding_annotation',
    'with_sharding_constraint',
]


def __getattr__(name: str) -> Any:
    if name == 'ShardingReport':  # reports are loaded when they are asked for
        from scalax.explain import ShardingReport

        return ShardingReport
    if name in ('FollowedBatch', 'KeptValue', 'LostRows'):
        from scalax._follow import followed_batch

        return getattr(followed_batch, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
