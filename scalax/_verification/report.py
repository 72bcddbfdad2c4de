"""What a comparison found, and how that shows itself."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from jax.sharding import PartitionSpec

from scalax._core.pytree.partition_specs import axis_sizes_text, text
from scalax._core.render import serialization
from scalax._core.render.blocks import (
    Block,
    Cell,
    Collapsible,
    Column,
    Figure,
    Figures,
    Heading,
    Lines,
    Row,
    Section,
    Table,
)
from scalax._core.render.renderable import Renderable
from scalax._core.util.folding import MOST_RUNS, fold
from scalax.errors import plural


@dataclasses.dataclass(frozen=True)
class Difference:
    """A result that is not what one device computes.

    Attributes:
        path: its path in what the step returns.
        array: its dtype and global shape.
        spec: its sharding on the mesh; None if that is unknown.
        error: the largest error of an element; of signed integers the sum of the errors, of keys and
            booleans how many elements differ.
        tolerance: how large rounding may make that: 8 times what was drawn, or 64 times where that is below a
            ten-thousandth of the largest value; and 4 units of the dtype.
        index: the element with the largest error.
        actual: its value on the mesh.
        expected: its value on one device.
        seed: the arguments that showed it first.
        step: in which of the consecutive steps, from 1.
        seeds: with how many sets of arguments it shows.
        raised: what the step raised on the mesh, but not on one device; the other fields then mean nothing.
    """

    path: str
    array: str = ''
    spec: PartitionSpec | None = None
    error: float = 0.0
    tolerance: float = 0.0
    index: tuple[int, ...] = ()
    actual: Any = None
    expected: Any = None
    seed: int = 0
    step: int = 1
    seeds: int = 1
    raised: str = ''

    @property
    def location(self) -> str:
        """The element with the largest error."""
        return f'{self.path}{list(self.index)}' if self.index else self.path

    def __str__(self) -> str:
        if self.raised:
            return f'step {self.step} raises on the mesh, but not on one device: {self.raised}'
        return (
            f'{self.location or "the result"} is {_short(self.actual, 6)}, and {_short(self.expected, 6)} on '
            'one device'
        )


@dataclasses.dataclass(frozen=True)
class FirstDifference:
    """The first operation whose result differs.

    Attributes:
        primitive: the JAX primitive.
        line: the line of the user's code.
        difference: its result on the mesh and on one device.
        device_dependent_ops: the operations inside a `shard_map` whose results depend on the device, with
            their lines: collectives with their mesh axes, random bits, and callbacks.
    """

    primitive: str
    line: str
    difference: Difference
    device_dependent_ops: tuple[str, ...] = ()

    def __str__(self) -> str:
        at = f' at {self.line}' if self.line else ''
        between = ', '.join(self.device_dependent_ops) or 'no collective, such as psum'
        holds = f' (in it: {between})' if self.primitive == 'shard_map' else ''
        return (
            f'{self.primitive}{at}{holds} is the first operation that differs: {self.difference.array}, '
            f'{self.difference}'
        )


@dataclasses.dataclass(frozen=True)
class Ablation:
    """A comparison of the step compiled with one change, to find what makes the differences disappear.

    Attributes:
        change: the change.
        still_differs: whether the differences remain; None if the comparison failed.
        error: why it failed.
    """

    change: str
    still_differs: bool | None
    error: str = ''


@dataclasses.dataclass(frozen=True)
class Argument:
    """The values of a leaf of the arguments.

    Attributes:
        path: its path.
        array: its dtype and shape.
        values: which values it had.
        reason: what the step does with it.
    """

    path: str
    array: str
    values: str
    reason: str


@dataclasses.dataclass(frozen=True)
class VerificationReport(Renderable):
    """What `MeshShardingHelper.verify` returns; ``str()`` of it is a page of text.

    Attributes:
        name: the name of the step.
        mesh: mesh axis -> size, of the mesh that it ran on.
        differences: the results that differ, in the first of the consecutive steps that has any.
        results: how many results a step has.
        seeds: with how many sets of arguments it ran.
        steps: how many consecutive steps.
        first_difference: the first operation whose result differs, if it was found.
        why_not_localized: why it was not found.
        ablations: what makes the differences go away.
        rounding_dependent: results that differed, but not after the arguments were perturbed by one unit in
            the last place: they depend on how a value is rounded, as the choice of an expert for a token may.
        nondeterministic: results that differ on one device each time the step runs, or each time it is
            traced: they cannot be compared.
        nonfinite: results that had no finite value on one device.
        arguments: the values of the arguments.
        downscaling: what was reduced in the user's step, and what could not be.
        jax: the version of JAX.
        interrupted: whether Ctrl-C ended the comparison early.
        seconds: how long it took.
    """

    name: str
    mesh: Mapping[str, int]
    differences: tuple[Difference, ...] = ()
    results: int = 0
    seeds: int = 0
    steps: int = 0
    first_difference: FirstDifference | None = None
    why_not_localized: str = ''
    ablations: tuple[Ablation, ...] = ()
    rounding_dependent: tuple[str, ...] = ()
    nondeterministic: tuple[str, ...] = ()
    nonfinite: tuple[str, ...] = ()
    arguments: tuple[Argument, ...] = ()
    downscaling: tuple[str, ...] = ()
    jax: str = ''
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether all results were compared, and all are what one device computes."""
        return self._is_equal and not self.interrupted

    @property
    def _is_equal(self) -> bool:
        """The same of what was compared until Ctrl-C."""
        unknown = self.nonfinite or self.nondeterministic
        compared = self.results > 0 and self.seeds > 0
        sought = self.first_difference is None and not self.why_not_localized
        return compared and not self.differences and sought and not unknown

    def _title(self) -> str:
        return f'{self.name} on a mesh and on one device'

    def _blocks(self, title: str) -> list[Block]:
        known = self._is_equal or self.differences or self.first_difference is not None
        said = ('equal', 'to one device') if self._is_equal else ('differs', 'from one device')
        value, label = said if known else ('not compared', 'with one device')
        verdict = Figure(value, label, 'good' if self.ok else 'bad', True)
        return [
            Heading(title, self.mesh),
            Figures([verdict, Figure(f'{self.results}', 'results'), Figure(f'{self.seeds}', 'seeds')]),
            Section('', [Lines([*self._head()])]),
            Section('Results that differ', [_differences(self)] if self.differences else []),
            Section('Where', [Lines([*self._where()])]),
            Section(
                'Sizes',
                [Lines([*self.downscaling])] if self.downscaling else [],
                'What was reduced, or could not be',
            ),
            Section(
                '', [Collapsible('Values of the arguments', [_arguments(self)])] if self.arguments else []
            ),
        ]

    def _head(self) -> Iterator[str]:
        runs = f'{plural(self.steps, "step")} in a row, {plural(self.seeds, "seed")}'
        wrong = sum(not each.raised for each in self.differences)
        if self._is_equal:
            said = f'computes what one device computes: {plural(self.results, "result")}, {runs}'
        elif self.differences or self.first_difference:
            count = f'{wrong} of {plural(self.results, "result")}, ' if wrong else ''
            said = f'does not compute what one device computes: {count}{runs}'
        else:
            known = self.results - len(self.nonfinite) - len(self.nondeterministic)
            others = 'the others' if known < self.results else 'intermediate values'
            part = f' in {known} of {plural(self.results, "result")}; {others} were not compared'
            said = f'computes what one device computes{part}' if known and self.seeds else 'was not compared'
            said = f'{said}: {runs}'
        yield f'{self.name} on {axis_sizes_text(self.mesh)} {said}'
        yield from (str(each) for each in self.differences if each.raised)
        if not self.results:
            yield 'it returns no arrays: there is nothing to compare'
        for what, paths in (
            ('not deterministic on one device', self.nondeterministic),
            ('not finite on one device', self.nonfinite),
            ('depend on how a value is rounded, and were not counted', self.rounding_dependent),
        ):
            if paths:
                yield f'{what}: {", ".join(path or "the result" for path in paths)}'
        if self.interrupted:
            yield 'stopped early'

    def _where(self) -> Iterator[str]:
        if self.first_difference is not None:
            within = '' if self.differences else 'the results are equal, but intermediate values are not: '
            yield f'{within}{self.first_difference}'
        elif self.why_not_localized and not self.differences:
            yield f'intermediate values were not compared: {self.why_not_localized}'
        elif self.why_not_localized:
            yield f'the first operation that differs is unknown: {self.why_not_localized}'
        for still_differs, said in (
            (False, 'the difference is gone'),
            (True, 'the difference is still there'),
        ):
            changes = [
                ablation.change for ablation in self.ablations if ablation.still_differs is still_differs
            ]
            if changes:
                yield f'{said} {"; ".join(changes)}'
        for ablation in self.ablations:
            if ablation.still_differs is None:
                yield f'not compared {ablation.change}: {ablation.error}'

    def to_dict(self) -> dict[str, Any]:
        """The result in plain Python values, ready for ``json.dumps``."""
        text = json.dumps(serialization.to_plain(vars(self)), default=str)
        # Numbers that JSON does not have are text.
        return {**json.loads(text, parse_constant=lambda name: str(float(name))), 'ok': self.ok}


def first_line(error: Exception) -> str:
    """The first line of an error, which may be long."""
    return textwrap.shorten(f'{type(error).__name__}: {error}'.splitlines()[0], 200, placeholder=' ...')


def _differences(verified: VerificationReport) -> Table:
    columns = (
        *(Column('result', 'lead'), Column('array', 'code'), Column('spec', 'code')),
        *(Column('mesh', 'number'), Column('one device', 'number')),
        *(Column('error', 'number'), Column('rounding', 'number'), Column('seeds', 'number')),
    )
    rows: list[Row] = []
    for each in verified.differences:
        if not each.raised:
            spec = '' if each.spec is None else text(each.spec)
            values = Cell(_short(each.actual, 6)), Cell(_short(each.expected, 6))
            sizes = Cell(_short(each.error), each.error), Cell(_short(each.tolerance), each.tolerance)
            rows.append(
                [each.location, each.array, spec, *values, *sizes, Cell(f'{each.seeds} of {verified.seeds}')]
            )
    return Table(columns, rows, max_text_rows=10)


def _short(value: Any, digits: int = 3) -> str:
    return f'{value:.{digits}g}' if isinstance(value, float | complex) else str(value)


def _arguments(verified: VerificationReport) -> Table:
    columns = Column('argument', 'lead'), Column('array', 'code'), Column('values'), Column('because', 'wide')
    leaves = sorted(verified.arguments, key=lambda leaf: not leaf.reason)  # plain numbers last
    folds = fold((leaf.path, (leaf.array, leaf.values, leaf.reason)) for leaf in leaves)
    rows = [(item, leaves[item.first]) for item in folds]
    return Table(
        columns,
        [[item.short_name(MOST_RUNS), leaf.array, leaf.values, leaf.reason] for item, leaf in rows],
        max_text_rows=10,
    )
