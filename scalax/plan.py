"""Plans: memory, communication and time of a step before any run; searches for the best mesh and rule."""

from scalax._data.reshard.plan import ReshardPlan, plan_reshard
from scalax._planning.autoshard.autoshard import autoshard
from scalax._planning.autoshard.result import AutoShardingResult, GroupChoice, MeshChoice
from scalax._planning.cost.buffers import Buffer
from scalax._planning.cost.collective_instances import KINDS
from scalax._planning.cost.collectives import Collective
from scalax._planning.cost.device_cost import DeviceCost
from scalax._planning.cost.flops import Flops, count_flops, count_model_flops
from scalax._planning.cost.host_transfers import HostTransfers
from scalax._planning.cost.memory import Memory
from scalax._planning.hardware.specs import HARDWARE, Hardware
from scalax._planning.hardware.torus import DevicePosition, TorusSegment
from scalax._planning.mesh_search.candidate import Candidate
from scalax._planning.mesh_search.result import SearchResult
from scalax._planning.mesh_search.search import search
from scalax._planning.program.exactness import Exactness
from scalax._planning.program.module_scopes import ScopeCost, ScopeRuns
from scalax._planning.program.provenance import Source
from scalax._planning.report.make_plan import make_plan
from scalax._planning.report.plan import Plan
from scalax._planning.time.roofline import Communication, PhaseTime, Roofline, StepTime
from scalax._planning.time.schedule import Kernel, Schedule, Span
from scalax._spmd.pipelines.summary import PipelinedLoop

__all__ = [
    'AutoShardingResult',
    'Buffer',
    'Candidate',
    'Collective',
    'Communication',
    'DeviceCost',
    'DevicePosition',
    'Exactness',
    'Flops',
    'GroupChoice',
    'HARDWARE',
    'Hardware',
    'HostTransfers',
    'KINDS',
    'Kernel',
    'Memory',
    'MeshChoice',
    'PhaseTime',
    'PipelinedLoop',
    'Plan',
    'ReshardPlan',
    'Roofline',
    'Schedule',
    'ScopeCost',
    'ScopeRuns',
    'SearchResult',
    'Source',
    'Span',
    'StepTime',
    'TorusSegment',
    'autoshard',
    'count_flops',
    'count_model_flops',
    'make_plan',
    'plan_reshard',
    'search',
]
