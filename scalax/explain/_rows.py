"""The rows of a report, one for each leaf, and the table of text that they make."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import PartitionSpec

from scalax._report.pages import visible
from scalax._report.tables import array_text, fits, human_bytes, table, terminal_width, wrapped
from scalax._tree.specs import axis_sizes_text, text
from scalax._util.folding import MOST_RUNS, Fold, fold, times
from scalax.errors import plural


@dataclasses.dataclass(frozen=True)
class ReportRow:
    """One leaf.

    Attributes:
        path: the leaf path.
        shape: the global shape.
        dtype: the name of the dtype that the array has on the devices.
        spec: the spec it got; None where the compiler decides.
        rule: the rule that decided.
        reason: why, in a few words.
        bytes: the bytes of the global array.
        bytes_per_device: the bytes of the largest shard.
        memory_kind: the requested memory kind; None for the default.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec | None
    rule: str
    reason: str
    bytes: int
    bytes_per_device: int
    memory_kind: str | None = None

    @property
    def why(self) -> str:
        """The rule and its reason, as tables show them."""
        return ': '.join(part for part in (self.rule, self.reason) if part)

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds the whole array; False where the compiler decides."""
        return self.spec is not None and self.bytes == self.bytes_per_device and not self.is_unreduced

    @property
    def is_unreduced(self) -> bool:
        """Whether devices hold partial results, such as terms of a sum, that are still to be combined."""
        return self.spec is not None and bool(self.spec.unreduced)


@dataclasses.dataclass(frozen=True)
class ReplicatedSummary:
    """The replicated leaves.

    Attributes:
        paths: their leaf paths.
        bytes: their total bytes on each device.
    """

    paths: tuple[str, ...]
    bytes: int


def replicated(rows: Iterable[ReportRow]) -> ReplicatedSummary:
    """The replicated leaves among *rows*, and their bytes on each device."""
    whole = [row for row in rows if row.is_replicated]
    return ReplicatedSummary(tuple(row.path for row in whole), sum(row.bytes for row in whole))


def unreduced(rows: Iterable[ReportRow]) -> tuple[int, int]:
    """The number of unreduced rows, and their bytes on each device."""
    sizes = [row.bytes_per_device for row in rows if row.is_unreduced]
    return len(sizes), sum(sizes)


Line = tuple[Fold, ReportRow]
"""The leaves of one line of a table, and the first of their rows."""

HEADS = ('path', 'array', 'spec', 'bytes/device', 'rule')
_all_but_path = operator.attrgetter(*[f.name for f in dataclasses.fields(ReportRow) if f.name != 'path'])


def render_table(
    rows: Sequence[ReportRow],
    mesh: Mapping[str, int],
    notes: Iterable[str] = (),
    width: int | None = None,
    folded: bool = True,
) -> str:
    """A report as text, no line wider than *width* columns (default: the terminal's).

    Args:
        rows: one for each leaf.
        mesh: mesh axis name -> size.
        notes: lines to add below the totals.
        width: the width in columns.
        folded: whether leaves that are alike in many layers share a line.
    """
    width = terminal_width(width)
    cells, rules = fitted([HEADS, *itertools.starmap(cells_of, lines_of(rows, folded))], width)
    below = wrapped([*totals(rows, mesh), *notes], width)
    return '\n'.join([*table(cells, width, 0, 3), *footnotes(rules, width), '', *below])


def fitted(cells: Sequence[tuple[str, ...]], width: int) -> tuple[Sequence[tuple[str, ...]], list[str]]:
    """The cells, and the rules to list below the table.

    If rows do not fit into *width*, the rules, in the last column, become numbers of footnotes.
    """
    if fits(cells, width):
        return cells, []
    rules = dict.fromkeys(rule for *_, rule in cells[1:] if rule)
    numbers = {rule: f'[{number}]' for number, rule in enumerate(rules, 1)}
    numbered = [(*others, numbers.get(rule, '')) for *others, rule in cells[1:]]
    return [cells[0], *numbered], [f'{number} {rule}' for rule, number in numbers.items()]


def footnotes(rules: Sequence[str], width: int) -> list[str]:
    """The lines of footnotes below a table."""
    return ['', *wrapped(rules, width)] if rules else []


def folded_path(item: Fold) -> str:
    """The path column of a line that may stand for several leaves."""
    return visible(item.short_name(MOST_RUNS)) or '(leaf)'


def spec_text(row: ReportRow) -> str:
    """The spec of a row, and its memory where that is not the default one."""
    # A spec with reduced axes is shown in full.
    plain = row.spec is not None and row.is_replicated and not row.spec.reduced
    spec = 'compiler' if row.spec is None else 'replicated' if plain else text(row.spec)
    return spec if row.memory_kind is None else f'{spec} in {row.memory_kind}'


def lines_of(rows: Sequence[ReportRow], folded: bool) -> list[Line]:
    """The lines of a table; without folding there is one for each row."""
    leaves = ((row.path, (_all_but_path(row), folded or index)) for index, row in enumerate(rows))
    return [(item, rows[item.first]) for item in fold(leaves)]


def cells_of(item: Fold, row: ReportRow) -> tuple[str, str, str, str, str]:
    """The cells of a line."""
    size = human_bytes(row.bytes_per_device * item.count)
    return (
        folded_path(item),
        f'{times(item.count)}{array_text(row.dtype, row.shape)}',
        spec_text(row),
        size,
        row.why,
    )


def totals(rows: Sequence[ReportRow], mesh: Mapping[str, int]) -> list[str]:
    """The totals of all rows in two lines; in three if some are unreduced."""
    whole = replicated(rows)
    count, size = unreduced(rows)
    return [
        f'{plural(len(rows), "array")}, {human_bytes(sum(row.bytes for row in rows))} in all, '
        f'{human_bytes(sum(row.bytes_per_device for row in rows))} on each device of the mesh '
        f'({axis_sizes_text(mesh)})',
        f'replicated: {plural(len(whole.paths), "array")}, {human_bytes(whole.bytes)} on each device',
        *(
            [f'unreduced: {plural(count, "array")}, {human_bytes(size)} on each device, to be combined']
            if count
            else []
        ),
    ]


def idle_notes(unused: Sequence[str], shadowed: Sequence[str]) -> list[str]:
    """A line for regexes that match nothing, and one for those that never decide."""
    notes = []
    if unused:
        notes.append(f'regexes that match nothing: {", ".join(map(repr, unused))}')
    if shadowed:
        notes.append(f'regexes always shadowed by earlier ones: {", ".join(map(repr, shadowed))}')
    return notes
