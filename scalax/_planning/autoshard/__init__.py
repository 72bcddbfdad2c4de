"""Auto-sharding: finds a mesh and a rule for a step of one device, by planning one layout after another.

`find` returns the best as a `Found`. Users import both from `scalax.plan`.
"""

from scalax._planning.autoshard.autoshard import find
from scalax._planning.autoshard.result import Found, FoundGroup, FoundMesh

__all__ = ['Found', 'FoundGroup', 'FoundMesh', 'find']
