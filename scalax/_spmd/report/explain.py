"""The report of `SjitFunction.explain_propagation`: what devices exchange, why, and what all compute."""

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
    """Operations on a line that all devices compute alike.

    Attributes:
        of: what they compute on: ``'examples'`` that were gathered, a ``'weight'`` that was gathered (or
            other state), or ``'replicated'`` values, which no mesh axis ever sharded.
        primitive: the operation of JAX.
        line: the line of the user's code, such as ``'model.py:12 layer'``.
        array: the dtype and the shape of the largest result.
        flops: the operations of products of matrices and of convolutions, of one device in a step.
        bytes: the bytes of all results, of one device in a step.
        count: how many equations there are, each as often as a step runs it.
    """

    of: OperandKind
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
        collectives: what devices exchange along these axes, in the order of the program.
        redundant: what all devices compute alike, the largest first.
        flops: the operations of products of matrices and of convolutions that one device computes in a step,
            as far as the rounds of loops are known.
        bytes: the bytes of the results of all operations of one device in a step, likewise.
        reason: why the function is not partitioned; empty if it is.
        gradient_outside: whether JAX has differentiated the compiled function from outside of it. That
            program is not partitioned.
        batch: the arguments that hold the batch; empty if the function makes its batch itself, or is not
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
            Section('Collectives', [_collectives(self.collectives)] if self.collectives else []),
            *([Section('Computed alike', [_redundant(large)], _ALIKE)] if large else []),
        ]

    def _is_large(self, work: RedundantWork) -> bool:
        """Whether redundant work is more than scales and schedules, which all devices compute anyway."""
        return bool(work.flops) or 1000 * work.bytes > self.bytes

    def _figures(self) -> Iterator[Figure]:
        for what, label in _LABELS.items():
            found = [row for row in self.collectives if row.what == what]
            if found or what == 'examples':
                tone: Tone = 'warn' if found and what == 'examples' else ''
                yield Figure(human_bytes(_bytes(found)), label, tone)

    def _summary(self) -> Iterator[str]:
        by_what = collections.defaultdict[str, list[CollectiveRow]](list)
        for row in self.collectives:
            by_what[row.what].append(row)
        if weights := by_what['weight']:
            again = [row for row in weights if row.is_backward]
            first = [row for row in weights if not row.is_backward]
            passes = [(first, 'in the forward pass and the update'), (again, 'in the backward pass')]
            yield f'gathers weights: {_listed(passes)}'
        else:
            yield 'gathers no weights: each device has all that its examples meet'
        if gradients := by_what['gradient']:
            kinds = [(alike, f'by {kind}') for kind, alike in _by_kind(gradients)]
            yield f'reduces gradients: {_listed(kinds)}'
        if sums := by_what['sum']:
            yield f'reduces other sums, such as a loss or a norm: {human_bytes(_bytes(sums))}'
        to_blocks = [row for row in by_what['examples'] if row.path]
        if to_blocks:
            yield f'moves examples, or rows that they look up, and not weights: {_counted(to_blocks)}'
        if mixed := [row for row in by_what['examples'] if not row.path]:
            yield f'gathers or moves examples: {_counted(mixed)}, because these operations mix examples'
        elif not to_blocks:
            yield 'keeps its examples: no operation mixes examples'
        for of, words in _OF.items():
            found = [each for each in self.redundant if each.of == of]
            flops, size = sum(each.flops for each in found), sum(each.bytes for each in found)
            if flops or (of == 'examples' and any(map(self._is_large, found))):
                share = f' ({100 * flops / self.flops:.1f} % of its products)' if self.flops else ''
                yield f'computes on {words} what the others compute, too: {human_flops(flops)}{share}, ' + (
                    f'{human_bytes(size)} of results'
                )

    def to_dict(self) -> dict[str, Any]:
        """The report in plain Python values, ready for ``json.dumps``."""
        return {
            field.name: serialization.to_plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
        }

    def to_json(self) -> str:
        """The report as JSON: `to_dict` and a version, with a line for each collective."""
        return serialization.write(self.to_dict())

    @classmethod
    def load(cls, text_or_path: str | os.PathLike[str]) -> PropagationReport:
        """Reads what `to_json` wrote.

        Args:
            text_or_path: the JSON itself, or the path of a file of it.

        Raises:
            DataError: this is not such a report, or one of another version, or the file cannot be read.
            FileNotFoundError: there is no such file.
            ArgumentError: it is neither text nor a path.
        """
        return serialization.read(cls, text_or_path, 'report')


def batch_text(report: PropagationReport) -> str:
    """Returns the axes along which a step is partitioned, and its batch."""
    batch = (
        f'its batch is {" and ".join(map(repr, report.batch))}'
        if report.batch
        else 'it makes its batch itself'
    )
    return f'{" and ".join(report.axes)}; {batch}'


def gradient_lines(report: PropagationReport) -> Iterator[str]:
    """Yields the warning about a gradient that was taken outside of the compiled function."""
    if report.gradient_outside:
        yield (
            f'A gradient of {report.name} was taken outside of it. That program is not partitioned: '
            'compile the function that calls jax.grad, with the optimizer in it.'
        )


def make_propagation_report(
    name: str, mesh: Mapping[str, int], step: PartitionedStep, batch: Sequence[str], *, gradient_outside: bool
) -> PropagationReport:
    """Returns the report of a step that is partitioned.

    Args:
        name: the name of the function.
        mesh: mesh axis name -> size.
        step: the step.
        batch: the arguments that hold its batch.
        gradient_outside: as in `PropagationReport`.
    """
    work = step.redundancy
    found: dict[tuple[OperandKind, str, str], RedundantWork] = {}
    largest: dict[tuple[OperandKind, str, str], int] = {}
    for of, (equation, calls), each in work:
        key = of, str(equation.primitive), line_of(equation, calls)
        aval = max([var.aval for var in equation.outvars], key=lambda aval: aval.size)
        before = found.get(key)
        array = array_text(str(aval.dtype), aval.shape)
        if before is None or aval.size > largest[key]:
            largest[key] = aval.size
        else:
            array = before.array
        flops, size, count = (before.flops, before.bytes, before.count) if before is not None else (0, 0, 0)
        found[key] = RedundantWork(
            *(*key, array, flops + each.flops, size + each.bytes, count + each.count),
        )
    redundant = sorted(found.values(), key=lambda each: (-each.flops, -each.bytes, each.line, each.primitive))
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
_OF: dict[OperandKind, str] = {
    'examples': 'gathered examples',
    'weight': 'gathered weights alone',
    'replicated': 'replicated values',
}
_ALIKE = 'what every device computes like all others, the largest first'


def _bytes(found: Iterable[CollectiveRow]) -> int:
    return sum(row.step_bytes for row in found)


def _counted(found: Sequence[CollectiveRow]) -> str:
    return f'{human_bytes(_bytes(found))} in {plural(len(found), "collective")}'


def _by_kind(found: Iterable[CollectiveRow]) -> Iterator[tuple[str, list[CollectiveRow]]]:
    kinds: dict[str, list[CollectiveRow]] = {}
    for row in found:
        kinds.setdefault(row.kind, []).append(row)
    yield from kinds.items()


def _listed(parts: Iterable[tuple[Sequence[CollectiveRow], str]]) -> str:
    return ', '.join(f'{human_bytes(_bytes(found))} {words}' for found, words in parts if found)


def _collectives(found: Sequence[CollectiveRow]) -> Table:
    several = len({row.axes for row in found}) > 1
    columns = (
        *(Column('because', 'lead'), Column('operation'), *([Column('axes', 'code')] if several else [])),
        *(Column('array', 'code'), Column('size', 'number'), Column('forward', 'number')),
        *(Column('backward', 'number'), Column('in a step', 'number'), Column('line')),
    )
    # A weight that is gathered in both passes has a row.
    alike: dict[CollectiveRow, list[CollectiveRow]] = {}
    for row in found:
        alike.setdefault(dataclasses.replace(row, count=0, is_backward=False), []).append(row)
    ordered = sorted(
        alike.items(), key=lambda item: (_ORDER.index(item[0].what), -sum(x.step_bytes for x in item[1]))
    )
    shown: list[Row] = []
    folds = fold((row.reason, _but_path(row, passes)) for row, passes in ordered)
    for item in folds:
        row, passes = ordered[item.first]
        total = sum(x.step_bytes for x in passes) * item.count
        shown.append(
            [
                *(item.short_name(MOST_RUNS), row.kind, *([', '.join(row.axes)] if several else [])),
                *(row.array, Cell(human_bytes(row.bytes), row.bytes)),
                *(_runs(passes, item.count, backward) for backward in (False, True)),
                *(Cell(human_bytes(total), total), row.line),
            ]
        )
    return Table(columns, shown, max_text_rows=_MOST_ROWS)


def _but_path(row: CollectiveRow, passes: Sequence[CollectiveRow]) -> Any:
    """What rows have in common that share a line of the table."""
    return dataclasses.replace(row, path='', reason=''), tuple([(x.count, x.is_backward) for x in passes])


def _runs(passes: Sequence[CollectiveRow], times: int, backward: bool) -> Cell:
    """How often a collective runs in the backward pass, to which all gradients belong, or outside of it."""
    found = [row for row in passes if (row.is_backward or row.what == 'gradient') == backward]
    count = sum(row.count for row in found) * times
    return Cell('unknown' if found and not count else f'{count:,}' if found else '', count)


_ORDER = ('examples', 'weight', 'gradient', 'sum')


def _redundant(found: Sequence[RedundantWork]) -> Table:
    columns = (
        *(Column('line', 'lead'), Column('operation'), Column('on'), Column('largest result', 'code')),
        *(Column('count', 'number'), Column('operations', 'number'), Column('results', 'number')),
    )
    order = sorted(found, key=lambda each: each.of != 'examples')
    shown: list[Row] = [
        [
            *(each.line, each.primitive, _OF[each.of], each.array, Cell(f'{each.count:,}', each.count)),
            *(Cell(human_flops(each.flops), each.flops), Cell(human_bytes(each.bytes), each.bytes)),
        ]
        for each in order
    ]
    return Table(columns, shown, max_text_rows=10)
