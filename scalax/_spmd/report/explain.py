"""The report of `SjitFunction.explain_propagation`: collectives with their reasons, and redundant work."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from scalax._core.pytree.partition_specs import axis_sizes_text
from scalax._core.render import serialization
from scalax._core.render.blocks import (
    Block,
    Cell,
    Column,
    Figure,
    Figures,
    Heading,
    Lines,
    Row,
    Section,
    Table,
    Tone,
)
from scalax._core.render.renderable import Renderable
from scalax._core.render.tables import array_text, human_bytes, human_flops
from scalax._core.util.folding import MOST_RUNS, fold
from scalax._jaxpr.source_lines import line_of
from scalax._spmd.report.collective_reasons import CollectiveRow, collective_rows
from scalax._spmd.report.redundant_work import OperandKind
from scalax._spmd.step import PartitionedStep
from scalax.errors import plural

_MOST_ROWS = 40


@dataclasses.dataclass(frozen=True)
class RedundantWork:
    """Operations on one line that all devices repeat.

    Attributes:
        operand_kind: their operands: ``'examples'`` that were gathered, a ``'weight'`` (or other state) that
            was gathered, or ``'replicated'`` values, which no mesh axis ever sharded.
        primitive: the JAX primitive.
        line: the line of the user's code, such as ``'model.py:12 layer'``.
        array: the dtype and the shape of the largest result.
        flops: the FLOPs of matmuls and convolutions, on one device in a step.
        bytes: the bytes of all results, on one device in a step.
        count: the number of executions in a step.
    """

    operand_kind: OperandKind
    primitive: str
    line: str
    array: str
    flops: int
    bytes: int
    count: int


@dataclasses.dataclass(frozen=True)
class PropagationReport(Renderable):
    """How a compiled function is partitioned along the mesh axes of its batch; ``str()`` of it is a table.

    Attributes:
        name: the name of the function.
        mesh: mesh axis name -> size.
        axes: the mesh axes of the batch; empty if the function is not partitioned.
        collectives: the collectives along these axes, in the order of the program.
        redundant: the work that all devices repeat, the largest first.
        flops: the FLOPs of matmuls and convolutions on one device in a step. Loops with an unknown trip count
            count once.
        bytes: the bytes of the results of all operations on one device in a step. Loops with an unknown trip
            count count once.
        reason: why the function is not partitioned; empty if it is.
        gradient_outside: whether JAX has differentiated the compiled function from outside. That program is
            not partitioned.
        batch: the arguments that hold the batch; empty if the function creates its batch itself, or is not
            partitioned.
    """

    name: str
    mesh: Mapping[str, int] = dataclasses.field(hash=False)
    axes: tuple[str, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    redundant: tuple[RedundantWork, ...] = ()
    flops: int = 0
    bytes: int = 0
    reason: str = ''
    gradient_outside: bool = False
    batch: tuple[str, ...] = ()

    @property
    def gathered_examples(self) -> tuple[CollectiveRow, ...]:
        """The collectives that gather examples, or move them to other devices."""
        return tuple([row for row in self.collectives if row.what == 'examples'])

    def _title(self) -> str:
        return f'{self.name} along its batch'

    def _blocks(self, title: str) -> list[Block]:
        if not self.axes:
            lead = f'{self.name} is not partitioned along its batch: {self.reason}'
            return [Heading(title, self.mesh), Lines([lead, *gradient_lines(self)])]
        lead = f'{self.name} on {axis_sizes_text(self.mesh)} is partitioned along {batch_text(self)}'
        warnings, large = [*gradient_lines(self)], [*filter(self._is_large, self.redundant)]
        return [
            Heading(title, self.mesh),
            Figures([*self._figures()]),
            Section('', [Lines([f'{lead}. In a step, each device:', *[f'- {x}' for x in self._summary()]])]),
            Section('', [Lines(warnings, 'warn')] if warnings else []),
            Section('Collectives', [_collectives_table(self.collectives)] if self.collectives else []),
            *([Section('Redundant work', [_redundant_table(large)], _REDUNDANT_LEAD)] if large else []),
        ]

    def _is_large(self, work: RedundantWork) -> bool:
        """Whether redundant work is more than scalars such as learning rates, which all devices compute."""
        return bool(work.flops) or 1000 * work.bytes > self.bytes

    def _figures(self) -> Iterator[Figure]:
        for what, label in _LABELS.items():
            rows = [row for row in self.collectives if row.what == what]
            if rows or what == 'examples':
                tone: Tone = 'warn' if rows and what == 'examples' else ''
                yield Figure(human_bytes(_bytes(rows)), label, tone)

    def _summary(self) -> Iterator[str]:
        by_what = collections.defaultdict[str, list[CollectiveRow]](list)
        for row in self.collectives:
            by_what[row.what].append(row)
        if weights := by_what['weight']:
            backward = [row for row in weights if row.is_backward]
            forward = [row for row in weights if not row.is_backward]
            passes = [(forward, 'in the forward pass and the update'), (backward, 'in the backward pass')]
            yield f'gathers weights: {_bytes_text(passes)}'
        else:
            yield 'gathers no weights: each device holds all weights that its examples use'
        if gradients := by_what['gradient']:
            by_kind = [(kind_rows, f'by {kind}') for kind, kind_rows in _by_kind(gradients)]
            yield f'reduces gradients: {_bytes_text(by_kind)}'
        if sums := by_what['sum']:
            yield f'reduces other sums, such as a loss or a norm: {human_bytes(_bytes(sums))}'
        moved_to_state = [row for row in by_what['examples'] if row.path]
        if moved_to_state:
            size = _bytes_and_count(moved_to_state)
            yield f'moves examples, or rows that they look up, instead of weights: {size}'
        if gathered := [row for row in by_what['examples'] if not row.path]:
            size = _bytes_and_count(gathered)
            yield f'gathers or moves examples: {size}, because these operations mix examples'
        elif not moved_to_state:
            yield 'keeps its examples: no operation mixes examples'
        for operand_kind, kind_text in _KIND_TEXTS.items():
            works = [work for work in self.redundant if work.operand_kind == operand_kind]
            flops, result_bytes = sum(work.flops for work in works), sum(work.bytes for work in works)
            if flops or (operand_kind == 'examples' and any(map(self._is_large, works))):
                share = f' ({100 * flops / self.flops:.1f} % of its FLOPs)' if self.flops else ''
                yield (
                    f'repeats the work of other devices on {kind_text}: {human_flops(flops)}{share}, '
                    f'{human_bytes(result_bytes)} of results'
                )

    def to_dict(self) -> dict[str, Any]:
        """The report in plain Python values, ready for ``json.dumps``."""
        return {
            field.name: serialization.to_plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
        }

    def to_json(self) -> str:
        """The report as JSON: `to_dict` and a version, with one line for each collective."""
        return serialization.write(self.to_dict())

    @classmethod
    def load(cls, text_or_path: str | os.PathLike[str]) -> PropagationReport:
        """Loads a report that `to_json` wrote.

        Args:
            text_or_path: the JSON itself, or the path of a file that contains it.

        Raises:
            DataError: the data is not such a report, or has another version, or the file cannot be read.
            FileNotFoundError: there is no such file.
            ArgumentError: the argument is neither text nor a path.
        """
        return serialization.read(cls, text_or_path, 'report')


def batch_text(report: PropagationReport) -> str:
    """Returns a text with the axes along which a step is partitioned, and its batch."""
    batch = (
        f'its batch is {" and ".join(map(repr, report.batch))}'
        if report.batch
        else 'it creates its batch itself'
    )
    return f'{" and ".join(report.axes)}; {batch}'


def gradient_lines(report: PropagationReport) -> Iterator[str]:
    """Yields the warning about a gradient outside of the compiled function, if there is one."""
    if report.gradient_outside:
        yield (
            f'A gradient of {report.name} was taken outside of it. That program is not partitioned: '
            'compile the function that calls jax.grad, with the optimizer in it.'
        )


def make_propagation_report(
    name: str, mesh: Mapping[str, int], step: PartitionedStep, batch: Sequence[str], *, gradient_outside: bool
) -> PropagationReport:
    """Returns the report of a partitioned step.

    Args:
        name: the name of the function.
        mesh: mesh axis name -> size.
        step: the step.
        batch: the arguments that hold its batch.
        gradient_outside: as in `PropagationReport`.
    """
    work = step.redundancy
    works: dict[tuple[OperandKind, str, str], RedundantWork] = {}
    largest: dict[tuple[OperandKind, str, str], int] = {}
    for kind, (equation, calls), row_work in work:
        key = kind, str(equation.primitive), line_of(equation, calls)
        aval = max([var.aval for var in equation.outvars], key=lambda aval: aval.size)
        previous = works.get(key)
        array = array_text(str(aval.dtype), aval.shape)
        if previous is None or aval.size > largest[key]:
            largest[key] = aval.size
        else:
            array = previous.array
        flops, size, count = (
            (previous.flops, previous.bytes, previous.count) if previous is not None else (0, 0, 0)
        )
        works[key] = RedundantWork(
            *(*key, array, flops + row_work.flops, size + row_work.bytes, count + row_work.count),
        )
    redundant = sorted(
        works.values(),
        key=lambda row_work: (-row_work.flops, -row_work.bytes, row_work.line, row_work.primitive),
    )
    return PropagationReport(
        name,
        dict(mesh),
        step.axes,
        tuple(collective_rows(step.collectives, work)),
        tuple(redundant),
        work.total.flops,
        work.total.bytes,
        gradient_outside=gradient_outside,
        batch=(*batch,),
    )


_LABELS = {
    'weight': 'weights gathered',
    'gradient': 'gradients reduced',
    'examples': 'examples gathered or moved',
    'sum': 'other sums reduced',
}
_KIND_TEXTS: dict[OperandKind, str] = {
    'examples': 'gathered examples',
    'weight': 'gathered weights alone',
    'replicated': 'replicated values',
}
_REDUNDANT_LEAD = 'work that all devices repeat, the largest first'


def _bytes(rows: Iterable[CollectiveRow]) -> int:
    return sum(row.step_bytes for row in rows)


def _bytes_and_count(rows: Sequence[CollectiveRow]) -> str:
    return f'{human_bytes(_bytes(rows))} in {plural(len(rows), "collective")}'


def _by_kind(rows: Iterable[CollectiveRow]) -> Iterator[tuple[str, list[CollectiveRow]]]:
    kinds: dict[str, list[CollectiveRow]] = {}
    for row in rows:
        kinds.setdefault(row.kind, []).append(row)
    yield from kinds.items()


def _bytes_text(parts: Iterable[tuple[Sequence[CollectiveRow], str]]) -> str:
    return ', '.join(f'{human_bytes(_bytes(rows))} {label}' for rows, label in parts if rows)


def _collectives_table(rows: Sequence[CollectiveRow]) -> Table:
    has_several_axes = len({row.axes for row in rows}) > 1
    columns = (
        *(
            Column('because', 'lead'),
            Column('operation'),
            *([Column('axes', 'code')] if has_several_axes else []),
        ),
        *(Column('array', 'code'), Column('size', 'number'), Column('forward', 'number')),
        *(Column('backward', 'number'), Column('in a step', 'number'), Column('line')),
    )
    # A weight that is gathered in both passes has one row.
    passes_by_row: dict[CollectiveRow, list[CollectiveRow]] = {}
    for row in rows:
        passes_by_row.setdefault(dataclasses.replace(row, count=0, is_backward=False), []).append(row)
    ordered = sorted(
        passes_by_row.items(),
        key=lambda item: (_ORDER.index(item[0].what), -sum(x.step_bytes for x in item[1])),
    )
    table_rows: list[Row] = []
    folds = fold((row.reason, _key_without_path(row, passes)) for row, passes in ordered)
    for item in folds:
        row, passes = ordered[item.first]
        total = sum(x.step_bytes for x in passes) * item.count
        table_rows.append(
            [
                *(item.short_name(MOST_RUNS), row.kind, *([', '.join(row.axes)] if has_several_axes else [])),
                *(row.array, Cell(human_bytes(row.bytes), row.bytes)),
                *(_executions_cell(passes, item.count, backward) for backward in (False, True)),
                *(Cell(human_bytes(total), total), row.line),
            ]
        )
    return Table(columns, table_rows, max_text_rows=_MOST_ROWS)


def _key_without_path(row: CollectiveRow, passes: Sequence[CollectiveRow]) -> Any:
    """Returns the key of rows that share a line of the table, because only their paths differ."""
    return dataclasses.replace(row, path='', reason=''), tuple([(x.count, x.is_backward) for x in passes])


def _executions_cell(passes: Sequence[CollectiveRow], times: int, backward: bool) -> Cell:
    """Returns how often a collective runs in the backward pass, including all gradients, or outside of it."""
    counted = [row for row in passes if (row.is_backward or row.what == 'gradient') == backward]
    count = sum(row.count for row in counted) * times
    return Cell('unknown' if counted and not count else f'{count:,}' if counted else '', count)


_ORDER = ('examples', 'weight', 'gradient', 'sum')


def _redundant_table(works: Sequence[RedundantWork]) -> Table:
    columns = (
        *(Column('line', 'lead'), Column('operation'), Column('on'), Column('largest result', 'code')),
        *(Column('count', 'number'), Column('FLOPs', 'number'), Column('results', 'number')),
    )
    order = sorted(works, key=lambda work: work.operand_kind != 'examples')
    rows: list[Row] = [
        [
            *(
                work.line,
                work.primitive,
                _KIND_TEXTS[work.operand_kind],
                work.array,
                Cell(f'{work.count:,}', work.count),
            ),
            *(Cell(human_flops(work.flops), work.flops), Cell(human_bytes(work.bytes), work.bytes)),
        ]
        for work in order
    ]
    return Table(columns, rows, max_text_rows=10)
