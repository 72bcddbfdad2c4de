"""Plans: memory, communication and time of a step before any run; searches for the best mesh and rule."""

from scalax._find import Found, FoundGroup, FoundMesh, find
from scalax._plan.buffers import Buffer
from scalax._plan.collective_runs import KINDS
from scalax._plan.collectives import Collective
from scalax._plan.flops import Flops, count_flops, count_model_flops
from scalax._plan.formulas import Counted
from scalax._plan.hardware import HARDWARE, Hardware
from scalax._plan.hlo_cost import Work
from scalax._plan.host_moves import HostMoves
from scalax._plan.make import make_plan
from scalax._plan.memory import Memory
from scalax._plan.plan import Plan
from scalax._plan.provenance import Source
from scalax._plan.roofline import Communication, Phase, Roofline, Seconds
from scalax._plan.schedule import Kernel, Schedule, Span
from scalax._plan.scopes import ScopeRuns, ScopeWork
from scalax._plan.torus import Line, Place
from scalax._reshard.plan import ReshardPlan, plan_reshard
from scalax._search import Candidate, Search, search
from scalax._spmd.pipelines.summary import PipelinedLoop

__all__ = [
    'Buffer',
    'Candidate',
    'Collective',
    'Communication',
    'Counted',
    'Flops',
    'Found',
    'FoundGroup',
    'FoundMesh',
    'HARDWARE',
    'Hardware',
    'HostMoves',
    'KINDS',
    'Kernel',
    'Line',
    'Memory',
    'Phase',
    'PipelinedLoop',
    'Place',
    'Plan',
    'ReshardPlan',
    'Roofline',
    'Schedule',
    'ScopeRuns',
    'ScopeWork',
    'Search',
    'Seconds',
    'Source',
    'Span',
    'Work',
    'count_flops',
    'count_model_flops',
    'find',
    'make_plan',
    'plan_reshard',
    'search',
]
