"""What will a compiled step hold, send and take? Plans: read from what the compiler says, before any run.

``_compile`` has the compiler write its program down, ``_memory`` reads what it holds, ``_shardings`` how
arguments of a program lie that it refused, ``_module`` reads the program, ``_loops`` says how often each
part runs, ``_groups`` and ``_mesh_axes`` who talks to whom, ``_sources`` because of which line of the
user's program, ``_scattered`` which all-reduces are reduce-scatters, ``_collectives`` puts these together;
``_plan`` is the outcome, ``_text`` prints it, ``_json`` writes and reads it, ``_diff`` compares two.

``_flops`` counts the operations of the whole step in its jaxpr (``_operations`` those of one primitive,
``_jaxpr_loops`` the rounds of loops), ``_work`` those of one device and the bytes that it moves.

How long that takes: ``_hardware`` has the numbers of chips, ``_places`` says where devices lie, ``_torus``
what joins them, ``_seconds`` how long one collective takes there, ``_roofline`` what bounds the step.
"""

import importlib
from typing import TYPE_CHECKING, Any

from scalax.plan._collectives import KINDS, Collective
from scalax.plan._diff import PlanDiff
from scalax.plan._flops import Flops, count_flops
from scalax.plan._hardware import HARDWARE, Hardware
from scalax.plan._loops import Counted
from scalax.plan._make import make_plan
from scalax.plan._memory import Buffer, Memory
from scalax.plan._places import Place
from scalax.plan._plan import Plan
from scalax.plan._roofline import Communication, Roofline, Seconds
from scalax.plan._sources import Source
from scalax.plan._torus import Line
from scalax.plan._work import Work

if TYPE_CHECKING:
    from scalax._search import Candidate, Search, search

__all__ = [
    'HARDWARE',
    'KINDS',
    'Buffer',
    'Candidate',
    'Collective',
    'Communication',
    'Counted',
    'Flops',
    'Hardware',
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
    # A search makes helpers, which make plans: its code lies above both, and is loaded when it is asked for.
    if name in ('Candidate', 'Search', 'search'):
        return getattr(importlib.import_module('scalax._search'), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
