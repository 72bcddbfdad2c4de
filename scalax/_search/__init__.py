"""The search of the best mesh for a step, which makes a helper for each candidate and plans the step on it.

`search` plans and ranks the candidates, and returns a `Search`. Users import it from `scalax.plan`.
"""

from scalax._search.candidate import Candidate
from scalax._search.mesh_search import search
from scalax._search.result import Search

__all__ = ['Candidate', 'Search', 'search']
