"""Plans: what a compiled step holds, sends and takes, read from what the compiler says, before any run.

`compilation` has the compiler write its program; `hlo`, `memory` and `device_coords` read it; `collectives`,
`flops` and `hlo_cost` count; `roofline` times; the rest shows.
"""

from scalax._plan.collectives import KINDS, Collective
from scalax._plan.device_coords import Place
from scalax._plan.diff import PlanDiff
from scalax._plan.flops import Flops, count_flops
from scalax._plan.hardware import HARDWARE, Hardware
from scalax._plan.hlo_cost import Work
from scalax._plan.hlo_loops import Counted
from scalax._plan.make import make_plan
from scalax._plan.memory import Buffer, Memory
from scalax._plan.plan import Plan
from scalax._plan.provenance import Source
from scalax._plan.roofline import Communication, Roofline, Seconds
from scalax._plan.torus import Line

__all__ = [
    'Buffer',
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
    'Seconds',
    'Source',
    'Work',
    'count_flops',
    'make_plan',
]
