"""Rows reach the devices that need them, by the fewest bytes between processes: integers only."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalax._hostdata.schedule import schedule


@dataclasses.dataclass(frozen=True)
class Case:
    owners: list[int]  # the process of each device
    numbers: list[int]  # the tile of each device
    rows: int  # of each process

    @property
    def tiles(self) -> list[tuple[int, int]]:
        size = self.rows * len(set(self.owners)) // len(set(self.numbers))
        return [(number * size, (number + 1) * size) for number in self.numbers]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Meshes of all kinds: each tile on equally many devices, in any order; processes of unequal size."""
    tiles, copies = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    numbers = draw(st.permutations([tile for tile in range(tiles) for _ in range(copies)]))
    processes = draw(st.integers(1, len(numbers)))
    more = [draw(st.integers(0, processes - 1)) for _ in range(len(numbers) - processes)]
    rows = tiles * draw(st.integers(0, 3))
    return Case(sorted([*range(processes), *more]), list(numbers), rows)


@given(cases())
def test_every_device_gets_its_rows(case: Case) -> None:
    held = moved(case)
    for device, (start, stop) in enumerate(case.tiles):
        assert set(range(start, stop)) <= held[device]


def moved(case: Case) -> list[set[int]]:
    """The rows at each device after all rounds; what a device cannot send, or twice at once, is an error."""
    rounds, between = schedule(case.owners, case.tiles, case.rows)
    brought = [set(range(owner * case.rows, (owner + 1) * case.rows)) for owner in case.owners]
    held = [
        {row for row in rows if start <= row < stop}
        for rows, (start, stop) in zip(brought, case.tiles, strict=True)
    ]
    for number, moves in enumerate(rounds):
        assert moves
        assert len({move.stop - move.start for move in moves}) == 1
        assert len({move.source for move in moves}) == len({move.target for move in moves}) == len(moves)
        arriving = []
        for move in moves:
            rows = set(range(move.start, move.stop))
            assert rows
            at_hand = brought[move.source] if number < between else held[move.source]
            assert rows <= at_hand
            assert (case.owners[move.source] != case.owners[move.target]) == (number < between)
            arriving.append((move.target, rows))
        for target, rows in arriving:
            held[target] |= rows
    return held


@given(cases())
def test_no_row_crosses_twice(case: Case) -> None:
    rounds, between = schedule(case.owners, case.tiles, case.rows)
    crossing = [
        (case.owners[move.target], row)
        for moves in rounds[:between]
        for move in moves
        for row in range(move.start, move.stop)
    ]
    needed = {
        (owner, row)
        for owner, (start, stop) in zip(case.owners, case.tiles, strict=True)
        for row in range(start, stop)
        if row // max(case.rows, 1) != owner
    }
    assert sorted(crossing) == sorted(needed)


@pytest.mark.parametrize(
    ('owners', 'numbers', 'rounds', 'between'),
    [
        ([0, 0, 1, 1], [0, 1, 2, 3], 0, 0),  # in order
        ([0, 0, 1, 1], [1, 0, 3, 2], 0, 0),  # each has its own, in some order
        ([0, 0, 1, 1], [0, 0, 1, 1], 0, 0),  # copies inside each process
        ([0, 0, 1, 1], [3, 2, 1, 0], 1, 1),  # backwards: everything at once
        ([0, 0, 1, 1], [0, 2, 1, 3], 1, 1),
        ([0, 0, 1, 1], [0, 1, 0, 1], 1, 1),  # both need everything
        ([0, 0, 1, 1], [0, 0, 0, 0], 2, 1),  # the two copies halve what comes, and exchange halves
        ([0, 1, 2, 3], [0, 0, 0, 0], 3, 3),  # a ring
        ([0, 1, 2, 3], [3, 2, 1, 0], 1, 1),
        ([0, 0, 1, 1, 2, 2], [0] * 6, 2, 1),  # each copy takes one of two parts, and passes it on
    ],
)
def test_rounds(owners: list[int], numbers: list[int], rounds: int, between: int) -> None:
    case = Case(owners, numbers, 8)
    found, crossing = schedule(owners, case.tiles, 8)
    assert (len(found), crossing) == (rounds, between)
