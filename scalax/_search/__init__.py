"""Which mesh is best for a step? Every one that a topology can hold is planned, the best of them in full.

``_meshes`` lists the meshes, ``_search`` plans and ranks them, ``_found`` is the outcome, ``_progress`` says
how far it is. `scalax.plan` has the public names; the code is up here as a search makes helpers, which make
plans.
"""

from scalax._search.found import Candidate, Search
from scalax._search.ranking import search

__all__ = ['Candidate', 'Search', 'search']
