"""The search of the best mesh for a step, which makes a helper for each candidate and plans the step on it.

`search` plans and ranks the candidates, and returns a `SearchResult`. Users import it from `scalax.plan`.
"""

from scalax._planning.mesh_search.candidate import Candidate
from scalax._planning.mesh_search.result import SearchResult
from scalax._planning.mesh_search.search import search

__all__ = ['Candidate', 'SearchResult', 'search']
