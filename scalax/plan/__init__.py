"""What will a compiled step hold, send and take? Plans: read from what the compiler says, before any run.

``_compile`` has the compiler write its program down, ``_module`` reads it, ``_loops`` says how often each
part runs, ``_groups`` and ``_mesh_axes`` who talks to whom, ``_sources`` because of which line of the
user's program, ``_collectives`` puts these together; ``_plan`` is the outcome, ``_text`` prints it.

``_flops`` counts the operations of the whole step in its jaxpr (``_operations`` those of one primitive,
``_jaxpr_loops`` the rounds of loops), ``_work`` those of one device and the bytes that it moves.

How long that takes: ``_hardware`` has the numbers of chips, ``_places`` says where devices lie, ``_torus``
what joins them, ``_seconds`` how long one collective takes there, ``_roofline`` what bounds the step.
"""

from scalax.plan._collectives import KINDS, Collective
from scalax.plan._compile import Memory
from scalax.plan._flops import Flops, count_flops
from scalax.plan._hardware import HARDWARE, Hardware
from scalax.plan._loops import Counted
from scalax.plan._make import make_plan
from scalax.plan._places import Place
from scalax.plan._plan import Plan
from scalax.plan._roofline import Communication, Roofline, Seconds
from scalax.plan._sources import Source
from scalax.plan._torus import Line
from scalax.plan._work import Work

__all__ = [
    'HARDWARE',
    'KINDS',
    'Collective',
    'Communication',
    'Counted',
    'Flops',
    'Hardware',
    'Line',
    'Memory',
    'Place',
    'Plan',
    'Roofline',
    'Seconds',
    'Source',
    'Work',
    'count_flops',
    'make_plan',
]
