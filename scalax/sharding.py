"""The public names for sharding: `MeshShardingHelper`, sharding rules, constraints, and JAX's own classes."""

from typing import TYPE_CHECKING, Any

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from scalax._compile.sjit.function import SjitFunction
from scalax._core.context.constraints import with_sharding_annotation, with_sharding_constraint
from scalax._data.host.prefetch import Prefetch
from scalax._helper import MeshShardingHelper
from scalax._spmd.options import BatchPartitioning
from scalax._spmd.pipelines.config import Pipeline
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
    from scalax._spmd.report.collective_reasons import CollectiveRow
    from scalax._spmd.report.explain import PropagationReport, RedundantWork
    from scalax.explain import ShardingReport

get_global_mesh_helper = MeshShardingHelper.get_global_mesh_helper
get_global_mesh = MeshShardingHelper.get_global_mesh
get_global_annotation_shardings = MeshShardingHelper.get_global_annotation_shardings

__all__ = [
    'AxisType',
    'BatchPartitioning',
    'CollectiveRow',
    'FSDPShardingRule',
    'LogicalAxisShardingRule',
    'Mesh',
    'MeshShardingHelper',
    'Pipeline',
    'NamedSharding',
    'OptimizerStateShardingRule',
    'PartitionSpec',
    'PolicyShardingRule',
    'PropagationReport',
    'RedundantWork',
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
    if name == 'ShardingReport':  # imported on demand, because most programs do not need reports
        from scalax.explain import ShardingReport

        return ShardingReport
    if name in ('CollectiveRow', 'PropagationReport', 'RedundantWork'):
        from scalax._spmd.report import explain

        return getattr(explain, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
