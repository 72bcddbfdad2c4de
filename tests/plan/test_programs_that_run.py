"""Plans of the recorded programs: what runs is counted, by a second reader too, and explained."""

from __future__ import annotations

import functools

import pytest

from scalax._plan.collectives import Collective, collectives
from scalax._plan.hlo import parse
from scalax._plan.torus import places_of
from tests.support import executable_reader
from tests.support.recorded import names, recorded
from tests.support.tpu_programs import PROGRAMS


@functools.cache
def rows_of(name: str) -> tuple[Collective, ...]:
    made, devices = recorded(name), PROGRAMS[name].helper().mesh.devices.ravel()
    return collectives(
        parse(made.optimized),
        made.mesh,
        places_of(devices),
        parse(made.partitioned),
        [device.id for device in devices],
    )


def moved(rows: tuple[Collective, ...]) -> int:
    return sum(row.count * row.bytes for row in rows)


@pytest.mark.parametrize('name', names())
def test_both_readers_count_the_same(name: str) -> None:
    found: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
    for row in rows_of(name):
        count, size = found.get((row.kind, row.axes), (0, 0))
        found[row.kind, row.axes] = count + row.count, size + row.count * row.bytes
    made = recorded(name)
    assert found == executable_reader.read(made.executable, made.mesh, made.slices).collectives
    assert found


@pytest.mark.parametrize('name', names())
def test_what_runs_is_explained(name: str) -> None:
    """Every byte has an origin in the partitioner's program, and a line of the user's or an argument."""
    rows = rows_of(name)
    assert not [row for row in rows if row.cause == 'compiler']
    assert moved(tuple(row for row in rows if row.source.file or row.source.operand)) >= 0.95 * moved(rows)


def test_sums_that_are_added_first_are_reduced_once() -> None:
    for topology in ('v5e', 'v5p'):
        [row] = rows_of(f'two_products {topology}')
        assert (row.kind, row.axes, row.count, row.bytes) == ('all-reduce', ('tp',), 1, 8192 * 8192 // 2 * 2)
    large = [row for row in rows_of('llama 8b v5p') if row.kind == 'all-reduce' and row.bytes > 2**26]
    assert sum(row.count for row in large) == 161  # 5 for each of 32 layers, and the embedding; not 8


def test_a_gather_that_runs_as_a_sum() -> None:
    rows = [row for row in rows_of('fsdp v5p') if row.bytes > 4]
    assert {(row.kind, row.partitioned_as) for row in rows} == {
        ('all-reduce', 'all-gather'),
        ('all-reduce', ''),
    }


def test_causes() -> None:
    causes = {name: {row.cause for row in rows_of(name)} for name in names()}
    assert causes['by_hand v5e'] == causes['rings v6e'] == {'program'}
    assert causes['block v5e'] == {'sharding'}
    assert causes['stencil v5e'] == causes['rolled v5e'] == {'halo'}
    assert causes['nested_loops v5p'] == {'ring'}
    assert causes['zero_1 v5e'] == {'sharding', 'padding'}


def test_padding_is_next_to_its_collective() -> None:
    padding = [row for row in rows_of('zero_1 v5e') if row.cause == 'padding']
    assert {(row.kind, row.partitioned_as) for row in padding} == {('collective-permute', 'all-reduce')}
    assert {row.source.function for row in padding} == {'zero_1.<locals>.loss'}


def test_between_slices_and_inside() -> None:
    rows = rows_of('fsdp two slices')
    networks = {row.axes: row.networks for row in rows}
    assert networks == {('data',): ('dcn',), ('fsdp',): ('ici',)}
    # The gathers over both axes, and sums of gradients that each device keeps a part of.
    halves = {(row.kind, row.partitioned_as) for row in rows if row.axes == ('data',)}
    assert halves == {('all-gather', ''), ('all-gather', 'all-reduce'), ('all-reduce', '')}


def test_a_wrong_join_is_noticed() -> None:
    """Without the partitioner's program of the same compilation nothing is found."""
    made, other = recorded('fsdp v5e'), recorded('rings v5e')
    rows = collectives(parse(made.optimized), made.mesh, (), parse(other.partitioned.replace('sp', 'xy')))
    assert {row.cause for row in rows} == {'compiler'}
