"""Auto-sharding: finds a mesh and a rule for a step of one device, by planning one layout after another.

`autoshard` returns the best as an `AutoShardingResult`. Users import both from `scalax.plan`.
"""

from scalax._planning.autoshard.autoshard import autoshard
from scalax._planning.autoshard.result import AutoShardingResult, GroupChoice, MeshChoice

__all__ = ['AutoShardingResult', 'GroupChoice', 'MeshChoice', 'autoshard']
