"""Memory of recorded TPU programs: 90 % of the live bytes at the peak have a known source."""

import pytest

from scalax._planning.cost.buffers import largest_buffers
from scalax._planning.cost.host_transfers import HostTransfers, host_transfers
from scalax._planning.cost.memory import MemoryTables, assigned_memory, read_layout
from scalax._planning.program.hlo import parse
from scalax.plan import Source

recordings = pytest.importorskip('tests.support.recorded')
MIB = 2**20
# The bytes that each device moves to the host in one call, and back.
MOVED = {
    # Eight layers, each with 4,096 rows of 2,048 bfloat16.
    **dict.fromkeys(['offloaded v5e', 'offloaded v6e', 'offloaded v5p'], 8 * 4096 * 2048 * 2),
    'parked v5e': 8 * MIB,
}


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize('name', recordings.names())
def test_at_least_90_percent_of_the_peak_is_named(name):
    recording = recordings.recorded(name)
    layout = read_layout(MemoryTables(*recording.tables))
    memory = assigned_memory(layout)
    rows = largest_buffers(layout, parse(recording.optimized))
    assert 0.99 * memory.peak <= sum(row.bytes for row in rows) <= memory.peak
    named = sum(row.bytes for row in rows if row.source._replace(annotation='') != Source())
    assert named >= 0.9 * memory.peak


@pytest.mark.medium
@pytest.mark.parametrize('name', recordings.names())
def test_memory_is_the_compilers_own(name):
    recording = recordings.recorded(name)
    memory, stats = assigned_memory(read_layout(MemoryTables(*recording.tables))), recording.memory
    assert memory.arguments == stats['argument_size_in_bytes']
    assert memory.donated == stats['alias_size_in_bytes']
    assert memory.total == stats['total_allocation_bytes']
    host = ('host_argument', 'host_output', 'host_temp')
    held = sum(stats[f'{part}_size_in_bytes'] for part in host) - stats['host_alias_size_in_bytes']
    assert memory.host == held
    # The compiler's peak includes the vector memory of a chip and host memory.
    assert memory.peak <= 1.002 * stats['peak_memory_in_bytes']
    if stats['peak_memory_in_bytes'] > 2**29:  # much larger than both
        assert memory.peak == pytest.approx(stats['peak_memory_in_bytes'], rel=0.001)


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize('name', recordings.names())
def test_recorded_host_transfers(name):
    moved = MOVED.get(name, 0)
    assert host_transfers(parse(recordings.recorded(name).optimized)) == HostTransfers(moved, moved)
