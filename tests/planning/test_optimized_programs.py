"""Plans of recorded optimized programs, compared with a second reader, and with the partitioner's program."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import pytest

from scalax._compile.sjit.function import partitioned_step
from scalax._planning.cost.collectives import Collective, collectives
from scalax._planning.cost.device_cost import DeviceCost, device_cost_of
from scalax._planning.cost.host_transfers import HostTransfers, host_transfers
from scalax._planning.cost.memory import Memory, MemoryTables, assigned_memory, read_layout
from scalax._planning.hardware.torus import positions_of
from scalax._planning.program.hlo import parse
from scalax.plan import HARDWARE, Plan, Roofline
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support import executable_reader, tpu_compiler
from tests.support.recorded import names, recorded
from tests.support.tpu_programs import PROGRAMS

# The positions of devices come from the compiler's topologies.
pytestmark = tpu_compiler.needed


class Read(NamedTuple):
    """The counts of a plan, and of the second reader, for a program."""

    rows: tuple[Collective, ...]
    device_cost: DeviceCost
    host_transfers: HostTransfers
    memory: Memory
    second: executable_reader.Counts


@functools.cache
def read(name: str) -> Read:
    helper = PROGRAMS[name].helper()
    recording, devices = recorded(name), helper.mesh.devices.ravel()
    program, partitioned = parse(recording.optimized), parse(recording.partitioned)
    ids = [device.id for device in devices]
    step, arguments = PROGRAMS[name].make(helper)
    partitioning = partitioned_step(step, arguments, {})
    reasons = {} if partitioning is None else partitioning.collective_reasons
    return Read(
        collectives(program, recording.mesh, positions_of(devices), partitioned, ids, reasons=reasons),
        device_cost_of(program),
        host_transfers(program),
        assigned_memory(read_layout(MemoryTables(*recording.tables))),
        executable_reader.read(recording.executable, recording.mesh, recording.slices),
    )


def rows_of(name: str) -> tuple[Collective, ...]:
    return read(name).rows


def moved(rows: tuple[Collective, ...]) -> int:
    return sum(row.count * row.bytes for row in rows)


@pytest.mark.medium
@pytest.mark.parametrize('name', names())
def test_both_readers_count_the_same(name: str) -> None:
    totals: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
    for row in rows_of(name):
        count, size = totals.get((row.kind, row.axes), (0, 0))
        totals[row.kind, row.axes] = count + row.count, size + row.count * row.bytes
    assert totals == read(name).second.collectives
    assert totals


@pytest.mark.medium
@pytest.mark.sampled(3)
@pytest.mark.parametrize('name', names())
def test_collectives_have_causes(name: str) -> None:
    """Every byte has an origin in the partitioner's program, and a line of the user's or an argument."""
    rows = rows_of(name)
    assert not [row for row in rows if row.cause == 'compiler']
    assert moved(tuple(row for row in rows if row.source.file or row.source.operand)) >= 0.95 * moved(rows)


def test_partial_sums_that_are_added_first_are_reduced_once() -> None:
    for topology in ('v5e', 'v5p'):
        [row] = rows_of(f'two_products {topology}')
        assert (row.kind, row.axes, row.count, row.bytes) == ('all-reduce', ('tp',), 1, 8192 * 8192 // 2 * 2)
    large = [row for row in rows_of('llama 8b v5p') if row.kind == 'all-reduce' and row.bytes > 2**26]
    assert sum(row.count for row in large) == 161  # 5 for each of 32 layers, and the embedding; not 8


def test_a_gather_that_runs_as_a_sum() -> None:
    rows = [row for row in rows_of('fsdp v5p') if row.bytes > 4]
    assert {(row.kind, row.partitioned_as) for row in rows} == {
        ('all-reduce', 'all-gather'),
        ('all-reduce', 'reduce-scatter'),
    }


@pytest.mark.slow
def test_causes() -> None:
    causes = {name: {row.cause for row in rows_of(name)} for name in names()}
    assert causes['by_hand v5e'] == causes['rings v6e'] == {'program'}
    assert causes['block v5e'] == {'sharding'}
    assert causes['stencil v5e'] == causes['rolled v5e'] == {'halo'}
    assert causes['nested_loops v5p'] == {'ring'}
    assert causes['zero_1 v5e'] == {'sharding', 'padding'}


def test_padding_is_next_to_its_collective() -> None:
    padding = [row for row in rows_of('zero_1 v5e') if row.cause == 'padding']
    assert {(row.kind, row.partitioned_as) for row in padding} == {('collective-permute', 'reduce-scatter')}
    assert {row.source.function for row in padding} == {'zero_1.<locals>.step'}


def test_between_slices_and_inside() -> None:
    rows = rows_of('fsdp two slices')
    networks = {row.axes: row.networks for row in rows}
    assert networks == {('data',): ('dcn',), ('fsdp',): ('ici',)}
    # The gathers over both axes, the gradients of which each device keeps a part, and the loss.
    kinds = {(row.kind, row.partitioned_as) for row in rows if row.axes == ('data',)}
    assert kinds == {('all-gather', ''), ('reduce-scatter', ''), ('all-reduce', '')}


WEIGHTS = [('up', 'forward'), ('up', 'recomputed'), ('down', 'forward'), ('down', 'backward')]


def _counts(name: str, axes: tuple[str, ...]) -> collections.Counter[tuple[str, str]]:
    """How often the collectives along axes run, by reason and phase."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for row in rows_of(name):
        if row.axes == axes and row.bytes > 2**10 and row.cause != 'padding':
            counts[row.reason, row.phase] += row.count
    return counts


@pytest.mark.parametrize(
    ('name', 'axes'),
    [
        ('fsdp_tp v6e', [('fsdp',)]),
        ('fsdp_tp v5p', [('fsdp',)]),
        ('fsdp two slices', [('data',), ('fsdp',)]),
    ],
)
def test_reasons_of_collectives(name: str, axes: list[tuple[str, ...]]) -> None:
    """Weights are gathered once per use in each of 8 layers, and gradients summed once.

    Inside fusions, the collectives have no names, or those of matmuls.
    """
    for along in axes:
        assert _counts(name, along) == {
            **{(f'weight params/{leaf} for dot_general', phase): 8 for leaf, phase in WEIGHTS},
            **{(f'gradient of params/{leaf}', 'backward'): 8 for leaf in ('up', 'down')},
        }


def test_reasons_of_collectives_where_examples_move() -> None:
    """The examples are as large as a weight: the backward pass gathers them, and reduces no gradient."""
    assert _counts('fsdp v5e', ('fsdp', 'tp')) == {
        **{(f'weight params/{leaf} for dot_general', 'forward'): 8 for leaf in ('up', 'down')},
        ('examples gathered to meet blocks of params/up', 'recomputed'): 8,
        ('examples gathered to meet blocks of params/down', 'backward'): 8,
        ('examples moved to meet blocks of params/up', 'backward'): 8,
    }


def test_a_wrong_join_is_noticed() -> None:
    """With the partitioner's program of another compilation, no origins are found."""
    recording, other = recorded('fsdp v5e'), recorded('rings v5e')
    rows = collectives(
        parse(recording.optimized), recording.mesh, (), parse(other.partitioned.replace('sp', 'xy'))
    )
    assert {row.cause for row in rows} == {'compiler'}


@pytest.mark.medium
@pytest.mark.parametrize('name', names())
def test_both_readers_count_the_same_work(name: str) -> None:
    _, work, moves, _, second = read(name)
    assert (work.flops, moves.to_host, moves.from_host) == (second.flops, second.to_host, second.from_host)


# --- Time ---------------------------------------------------------------------------------------------

HELPER = MeshShardingHelper([8], ['x'])


@functools.cache
def any_plan() -> Plan:
    return HELPER.plan(HELPER.sjit(lambda x: x, in_shardings=P('x')), jax.ShapeDtypeStruct((8,), 'float32'))


def roofline_of(name: str) -> Roofline:
    program, mesh = read(name), PROGRAMS[name].helper().mesh
    return dataclasses.replace(
        any_plan(),
        mesh=PROGRAMS[name].mesh,
        devices=mesh.size,
        memory=program.memory,
        collectives=program.rows,
        device_cost=program.device_cost,
        host_transfers=program.host_transfers,
        device_kind=mesh.devices.flat[0].device_kind,
        device_positions=positions_of(mesh.devices.flat),
        flops=0,
    ).roofline()


def seconds_by_hand(name: str) -> tuple[float, float]:
    """Returns the network times if each chip receives over all of its links at once, and over one link."""
    program, hardware = PROGRAMS[name], HARDWARE[PROGRAMS[name].topology[:3]]
    counts = read(name).second.collectives
    w, hop, links = hardware.ici_bytes_per_second, hardware.hop_seconds, 2 * hardware.torus_axes
    between_slices = hardware.dcn_bytes_per_second / hardware.chips_per_host
    all_links = one_link = 0.0
    for (kind, axes), (count, size) in counts.items():
        group = math.prod(program.mesh[axis] for axis in axes)
        times = {'all-reduce': 2, 'all-to-all': 1 / group, 'collective-permute': 1 / (group - 1)}.get(kind, 1)
        received = size * (group - 1) / group * times
        across = program.slices > 1 and axes == ('data',)
        all_links += 0 if across else received / (w * links)
        # A group without a ring needs more hops, and an all-to-all crosses the middle of a line.
        one_link += received / between_slices if across else 4 * received / w + count * hop * 64
    return all_links, one_link


@pytest.mark.medium
@pytest.mark.sampled(7)
@pytest.mark.parametrize('name', names())
def test_the_least_time_is_a_lower_bound(name: str) -> None:
    roofline, step = roofline_of(name), roofline_of(name).step_seconds
    hardware = HARDWARE[PROGRAMS[name].topology[:3]]
    assert roofline.compute == read(name).second.flops / hardware.flops_per_second
    least, most = seconds_by_hand(name)
    network = sum(row.seconds for row in roofline.communication)
    assert least <= network <= most
    # The bound is a sum over phases, and may be rounded differently from the total.
    assert max(roofline.compute, roofline.hbm) <= step.overlapped * (1 + 1e-12) <= step.serial * (1 + 1e-12)
    assert step.serial == pytest.approx(
        roofline.compute + roofline.hbm + network + roofline.to_host + roofline.from_host
    )
    assert sum(seconds for _, seconds in roofline.collectives) == pytest.approx(network)
