"""Auto-sharding: finds a mesh and a rule for a step of one device, by planning one layout after another.

`find` returns the best as a `Found`. Users import both from `scalax.plan`.
"""

from scalax._find.find_rule import find
from scalax._find.found import Found, FoundGroup, FoundMesh

__all__ = ['Found', 'FoundGroup', 'FoundMesh', 'find']
