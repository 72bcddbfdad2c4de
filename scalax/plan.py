"""Plans: what a compiled step will hold, send and take, before any run; and the search of a mesh for it."""

import importlib
from typing import TYPE_CHECKING, Any

from scalax._plan import (
    HARDWARE,
    KINDS,
    Buffer,
    Collective,
    Communication,
    Counted,
    Flops,
    Hardware,
    Line,
    Memory,
    Place,
    Plan,
    PlanDiff,
    Roofline,
    Seconds,
    Source,
    Work,
    count_flops,
    make_plan,
)

if TYPE_CHECKING:
    from scalax._search import Candidate, Search, search

__all__ = [
    'Buffer',
    'Candidate',
    'Collective',
    'Communication',
    'Counted',
    'Flops',
    'HARDWARE',
    'Hardware',
    'KINDS',
    'Line',
    'Memory',
    'Place',
    'Plan',
    'PlanDiff',
    'Roofline',
    'Search',
    'Seconds',
    'Source',
    'Work',
    'count_flops',
    'make_plan',
    'search',
]


def __getattr__(name: str) -> Any:
    # Loaded when it is asked for: it makes helpers.
    if name in ('Candidate', 'Search', 'search'):
        return getattr(importlib.import_module('scalax._search'), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
