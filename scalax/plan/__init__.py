"""What will a compiled step hold, send and take? Plans: read from what the compiler says, before any run.

``_compile`` has the compiler write its program down, ``_module`` reads it, ``_loops`` says how often each
part runs, ``_groups`` and ``_mesh_axes`` who talks to whom, ``_sources`` because of which line of the
user's program, ``_collectives`` puts these together; ``_plan`` is the outcome, ``_text`` prints it.
"""

from scalax.plan._collectives import KINDS, Collective
from scalax.plan._compile import Memory
from scalax.plan._loops import Counted
from scalax.plan._make import make_plan
from scalax.plan._plan import Plan
from scalax.plan._sources import Source

__all__ = ['KINDS', 'Collective', 'Counted', 'Memory', 'Plan', 'Source', 'make_plan']
