"""Plans of steps that ran on an H100, compared with the measurements of `benchmarks.on_gpu`.

*llama-1b-cublas* is the program of a plan without a GPU; the others were compiled with one.
"""

import json
import lzma
import math

import pytest

from scalax._planning.cost.memory import MemoryTables, assigned_memory, read_layout
from scalax._planning.program.hlo import parse
from scalax._planning.time.schedule import schedule_of
from scalax.plan import HARDWARE
from tests.support.recorded import FOLDER

FILES = sorted((FOLDER / 'ran').glob('*.json.xz'))


@pytest.fixture(params=FILES, ids=lambda path: path.name.partition('.')[0])
def ran(request):
    """Returns the optimized program, its memory tables, the seconds of a call, and the allocator's peak."""
    return json.loads(lzma.decompress(request.param.read_bytes()))


def test_measured_memory_matches_the_plan(ran):
    """*decoder-3b* was measured without preallocation, where the allocator rounds up."""
    memory = assigned_memory(read_layout(MemoryTables(*ran['tables']), one_memory=True))
    assert memory.total == pytest.approx(ran['peak_bytes'], rel=0.004)
    assert memory.total <= ran['peak_bytes']


@pytest.mark.medium
def test_measured_times_match_the_schedule(ran):
    h100 = HARDWARE['h100']
    schedule = schedule_of(
        parse(ran['optimized'], True), h100.flops_per_second, h100.hbm_bytes_per_second, math.inf, {}
    )
    assert schedule.seconds == pytest.approx(ran['seconds'], rel=0.15)
    assert sum(row.bound for row in schedule.kernels) < ran['seconds']
