"""The report of a verification: results that differ, and how the report renders."""

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
    """A result that differs from the result on one device.

    Attributes:
        path: the leaf path of the result.
        array: its dtype and global shape.
        spec: its sharding on the mesh; None if unknown.
        error: the largest error of an element. For signed integers, the sum of the errors; for keys and
            booleans, the number of elements that differ.
        tolerance: the largest error that rounding explains: 8 times the sampled errors, or 64 times if that
            is below a ten-thousandth of the largest value; plus 4 units in the last place.
        index: the element with the largest error.
        actual: the value of this element on the mesh.
        expected: its value on one device.
        seed: the seed of the arguments that first showed the difference.
        step: the consecutive step that showed it, from 1.
        seeds: the number of seeds that show it.
        raised: the error that the step raised on the mesh, but not on one device. The other fields are then
            unset.
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
        difference: the difference between its results on the mesh and on one device.
        device_dependent_ops: the operations inside a `shard_map` whose results depend on the device, with
            their lines: collectives with their mesh axes, random bits, and callbacks.
    """

    primitive: str
    line: str
    difference: Difference
    device_dependent_ops: tuple[str, ...] = ()

    def __str__(self) -> str:
        at = f' at {self.line}' if self.line else ''
        operations = ', '.join(self.device_dependent_ops) or 'no collective, such as psum'
        inside = f' (inside: {operations})' if self.primitive == 'shard_map' else ''
        return (
            f'{self.primitive}{at}{inside} is the first operation that differs: {self.difference.array}, '
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
        path: the leaf path.
        array: its dtype and shape.
        values: the kind of values that it had.
        reason: the operation of the step that requires such values.
    """

    path: str
    array: str
    values: str
    reason: str


@dataclasses.dataclass(frozen=True)
class VerificationReport(Renderable):
    """The result of `MeshShardingHelper.verify`. ``str()`` renders it as a page of text.

    Attributes:
        name: the name of the step.
        mesh: mesh axis -> size, for the mesh that it ran on.
        differences: the results that differ, in the first consecutive step that has differences.
        results: the number of results of a step.
        seeds: the number of seeds, each of which selects other arguments.
        steps: the number of consecutive steps.
        first_difference: the first operation whose result differs, if it was found.
        why_not_localized: why it was not found.
        ablations: whether the differences remain when the step is compiled with one change each.
        rounding_dependent: results that differed, but not after the arguments were perturbed by one unit in
            the last place: they depend on how a value is rounded, as the choice of an expert for a token may.
        nondeterministic: results that differ on one device each time the step runs, or each time it is
            traced: they cannot be compared.
        nonfinite: results that had no finite value on one device.
        arguments: the values of the arguments.
        downscaling: what was reduced in the user's step, and what could not be.
        jax: the version of JAX.
        interrupted: whether Ctrl-C ended the comparison.
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
        """Whether all results were compared, and all match one device."""
        return self._is_equal and not self.interrupted

    @property
    def _is_equal(self) -> bool:
        """Whether all results could be compared, and matched one device until Ctrl-C."""
        any_compared = self.results > 0 and self.seeds > 0
        any_skipped = bool(self.nonfinite or self.nondeterministic or self.why_not_localized)
        any_difference = bool(self.differences) or self.first_difference is not None
        return any_compared and not any_skipped and not any_difference

    def _title(self) -> str:
        return f'{self.name} on a mesh and on one device'

    def _blocks(self, title: str) -> list[Block]:
        if self._is_equal:
            value, label = 'equal', 'to one device'
        elif self.differences or self.first_difference is not None:
            value, label = 'differs', 'from one device'
        else:
            value, label = 'not compared', 'with one device'
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
                'Sizes that were reduced, and what could not be preserved',
            ),
            Section(
                '', [Collapsible('Values of the arguments', [_arguments(self)])] if self.arguments else []
            ),
        ]

    def _head(self) -> Iterator[str]:
        runs = f'{plural(self.steps, "consecutive step")}, {plural(self.seeds, "seed")}'
        num_different = sum(not difference.raised for difference in self.differences)
        if self._is_equal:
            verdict = f'matches one device: {plural(self.results, "result")}, {runs}'
        elif self.differences or self.first_difference:
            count = f'{num_different} of {plural(self.results, "result")}, ' if num_different else ''
            verdict = f'does not match one device: {count}{runs}'
        else:
            num_compared = self.results - len(self.nonfinite) - len(self.nondeterministic)
            skipped = 'the others' if num_compared < self.results else 'intermediate values'
            verdict = 'was not compared'
            if num_compared and self.seeds:
                of = f'{num_compared} of {plural(self.results, "result")}'
                verdict = f'matches one device in {of}; {skipped} were not compared'
            verdict = f'{verdict}: {runs}'
        yield f'{self.name} on {axis_sizes_text(self.mesh)} {verdict}'
        yield from (str(difference) for difference in self.differences if difference.raised)
        if not self.results:
            yield 'it returns no arrays: there is nothing to compare'
        for reason, paths in (
            ('not deterministic on one device', self.nondeterministic),
            ('not finite on one device', self.nonfinite),
            ('depend on how a value is rounded, and do not count', self.rounding_dependent),
        ):
            if paths:
                yield f'{reason}: {", ".join(path or "the result" for path in paths)}'
        if self.interrupted:
            yield 'stopped early'

    def _where(self) -> Iterator[str]:
        if self.first_difference is not None:
            prefix = '' if self.differences else 'the results are equal, but intermediate values are not: '
            yield f'{prefix}{self.first_difference}'
        elif self.why_not_localized and not self.differences:
            yield f'intermediate values were not compared: {self.why_not_localized}'
        elif self.why_not_localized:
            yield f'the first operation that differs is unknown: {self.why_not_localized}'
        for outcome, still_differs in (('disappears', False), ('remains', True)):
            changes = [
                ablation.change for ablation in self.ablations if ablation.still_differs is still_differs
            ]
            if changes:
                yield f'the difference {outcome} {"; ".join(changes)}'
        for ablation in self.ablations:
            if ablation.still_differs is None:
                yield f'not compared {ablation.change}: {ablation.error}'

    def to_dict(self) -> dict[str, Any]:
        """Returns the report in plain Python values, ready for ``json.dumps``."""
        json_text = json.dumps(serialization.to_plain(vars(self)), default=str)
        # JSON has no infinity and no NaN: they become text.
        return {**json.loads(json_text, parse_constant=lambda name: str(float(name))), 'ok': self.ok}


def first_line(error: Exception) -> str:
    """Returns the first line of an error, shortened."""
    return textwrap.shorten(f'{type(error).__name__}: {error}'.splitlines()[0], 200, placeholder=' ...')


def _differences(report: VerificationReport) -> Table:
    columns = (
        *(Column('result', 'lead'), Column('array', 'code'), Column('spec', 'code')),
        *(Column('mesh', 'number'), Column('one device', 'number')),
        *(Column('error', 'number'), Column('rounding', 'number'), Column('seeds', 'number')),
    )
    rows: list[Row] = []
    for difference in report.differences:
        if not difference.raised:
            spec = '' if difference.spec is None else text(difference.spec)
            values = Cell(_short(difference.actual, 6)), Cell(_short(difference.expected, 6))
            errors = [Cell(_short(error), error) for error in (difference.error, difference.tolerance)]
            seeds = Cell(f'{difference.seeds} of {report.seeds}')
            rows.append([difference.location, difference.array, spec, *values, *errors, seeds])
    return Table(columns, rows, max_text_rows=10)


def _short(value: Any, digits: int = 3) -> str:
    return f'{value:.{digits}g}' if isinstance(value, float | complex) else str(value)


def _arguments(report: VerificationReport) -> Table:
    columns = Column('argument', 'lead'), Column('array', 'code'), Column('values'), Column('reason', 'wide')
    leaves = sorted(report.arguments, key=lambda leaf: not leaf.reason)  # leaves without a reason come last
    folds = fold((leaf.path, (leaf.array, leaf.values, leaf.reason)) for leaf in leaves)
    rows = [(item, leaves[item.first]) for item in folds]
    return Table(
        columns,
        [[item.short_name(MOST_RUNS), leaf.array, leaf.values, leaf.reason] for item, leaf in rows],
        max_text_rows=10,
    )
