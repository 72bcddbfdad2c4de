"""What can be done with a mesh and rules? `MeshShardingHelper`, in the parts that its users think in."""

from scalax._helper._front import MeshShardingHelper

__all__ = ['MeshShardingHelper']
