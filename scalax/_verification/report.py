"""What a comparison found, and how that shows itself."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from jax.sharding import PartitionSpec

from scalax._core.pytree.partition_specs import axis_sizes_text, text
from scalax._core.render import serialization
from scalax._core.render.blocks import (
    Block,
    Cell,
    Column,
    Figure,
    Figures,
    Fold,
    Heading,
    Lines,
    Row,
    Section,
    Table,
)
from scalax._core.render.renderable import Shown
from scalax._core.util.folding import MOST_RUNS, fold
from scalax.errors import plural

Ended = Literal['', 'stopped']


@dataclasses.dataclass(frozen=True)
class Difference:
    """A result that is not what one device computes.

    Attributes:
        path: its path in what the step returns.
        array: its dtype and global shape.
        spec: its sharding on the mesh; None if that is unknown.
        error: the largest error of an element; of signed integers the sum of the errors, of keys and
            booleans how many elements differ.
        explained: how large rounding may make that: 8 times what was drawn, or 64 times where that is below a
            ten-thousandth of the largest value; and 4 units of the dtype.
        index: the element with the largest error.
        found: its value on the mesh.
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
    explained: float = 0.0
    index: tuple[int, ...] = ()
    found: Any = None
    expected: Any = None
    seed: int = 0
    step: int = 1
    seeds: int = 1
    raised: str = ''

    @property
    def place(self) -> str:
        """The element with the largest error."""
        return f'{self.path}{list(self.index)}' if self.index else self.path

    def __str__(self) -> str:
        if self.raised:
            return f'step {self.step} raises on the mesh, but not on one device: {self.raised}'
        return (
            f'{self.place or "the result"} is {_short(self.found, 6)}, and {_short(self.expected, 6)} on '
            'one device'
        )


@dataclasses.dataclass(frozen=True)
class FirstDifference:
    """The first operation whose result differs.

    Attributes:
        primitive: the JAX primitive.
        line: the line of the user's code.
        difference: its result on the mesh and on one device.
        inside: of a `shard_map`, the operations in it that depend on the device, with their lines:
            collectives with their mesh axes, random bits, and callbacks.
    """

    primitive: str
    line: str
    difference: Difference
    inside: tuple[str, ...] = ()

    def __str__(self) -> str:
        at = f' at {self.line}' if self.line else ''
        between = ', '.join(self.inside) or 'no collective, such as psum'
        holds = f' (in it: {between})' if self.primitive == 'shard_map' else ''
        return (
            f'{self.primitive}{at}{holds} is the first operation that differs: {self.difference.array}, '
            f'{self.difference}'
        )


@dataclasses.dataclass(frozen=True)
class Retry:
    """Whether the differences remain when the step is compiled in another way.

    Attributes:
        change: what is different.
        stays: whether the differences remain; None if that could not be tried.
        why_not: why it could not be tried.
    """

    change: str
    stays: bool | None
    why_not: str = ''


@dataclasses.dataclass(frozen=True)
class Argument:
    """The values of a leaf of the arguments.

    Attributes:
        path: its path.
        array: its dtype and shape.
        values: which values it had.
        why: what the step does with it.
    """

    path: str
    array: str
    values: str
    why: str


@dataclasses.dataclass(frozen=True)
class Verified(Shown):
    """What `MeshShardingHelper.verify` returns; ``str()`` of it is a page of text.

    Attributes:
        name: the name of the step.
        mesh: mesh axis -> size, of the mesh that it ran on.
        differences: the results that differ, in the first of the consecutive steps that has any.
        results: how many results a step has.
        seeds: with how many sets of arguments it ran.
        steps: how many consecutive steps.
        first: the first operation that differs, if it was found.
        why_no_first: why it was not found.
        retries: what makes the differences go away.
        unsettled: results that differed, but no longer when the arguments were changed by one rounding: they
            depend on how a value is rounded, as the choice of an expert for a token may.
        not_deterministic: results that differ on one device each time the step runs, or each time it is
            traced: they cannot be compared.
        not_compared: results that had no finite value on one device.
        arguments: the values of the arguments.
        reduced: what was reduced in the user's step, and what could not be.
        jax: the version of JAX.
        ended: ``'stopped'`` by Ctrl-C; empty if everything was compared.
        seconds: how long it took.
    """

    name: str
    mesh: Mapping[str, int]
    differences: tuple[Difference, ...] = ()
    results: int = 0
    seeds: int = 0
    steps: int = 0
    first: FirstDifference | None = None
    why_no_first: str = ''
    retries: tuple[Retry, ...] = ()
    unsettled: tuple[str, ...] = ()
    not_deterministic: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()
    arguments: tuple[Argument, ...] = ()
    reduced: tuple[str, ...] = ()
    jax: str = ''
    ended: Ended = ''
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether all results were compared, and all are what one device computes."""
        return self._is_equal and not self.ended

    @property
    def _is_equal(self) -> bool:
        """The same of what was compared until Ctrl-C."""
        unknown = self.not_compared or self.not_deterministic
        compared = self.results > 0 and self.seeds > 0
        sought = self.first is None and not self.why_no_first
        return compared and not self.differences and sought and not unknown

    def _title(self) -> str:
        return f'{self.name} on a mesh and on one device'

    def _blocks(self, title: str) -> list[Block]:
        known = self._is_equal or self.differences or self.first is not None
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
                [Lines([*self.reduced])] if self.reduced else [],
                'What was reduced, or could not be',
            ),
            Section('', [Fold('Values of the arguments', [_arguments(self)])] if self.arguments else []),
        ]

    def _head(self) -> Iterator[str]:
        runs = f'{plural(self.steps, "step")} in a row, {plural(self.seeds, "seed")}'
        wrong = sum(not each.raised for each in self.differences)
        if self._is_equal:
            said = f'computes what one device computes: {plural(self.results, "result")}, {runs}'
        elif self.differences or self.first:
            count = f'{wrong} of {plural(self.results, "result")}, ' if wrong else ''
            said = f'does not compute what one device computes: {count}{runs}'
        else:
            known = self.results - len(self.not_compared) - len(self.not_deterministic)
            others = 'the others' if known < self.results else 'intermediate values'
            part = f' in {known} of {plural(self.results, "result")}; {others} were not compared'
            said = f'computes what one device computes{part}' if known and self.seeds else 'was not compared'
            said = f'{said}: {runs}'
        yield f'{self.name} on {axis_sizes_text(self.mesh)} {said}'
        yield from (str(each) for each in self.differences if each.raised)
        if not self.results:
            yield 'it returns no arrays: there is nothing to compare'
        for what, paths in (
            ('not deterministic on one device', self.not_deterministic),
            ('not finite on one device', self.not_compared),
            ('depend on how a value is rounded, and were not counted', self.unsettled),
        ):
            if paths:
                yield f'{what}: {", ".join(path or "the result" for path in paths)}'
        if self.ended:
            yield 'stopped early'

    def _where(self) -> Iterator[str]:
        if self.first is not None:
            within = '' if self.differences else 'the results are equal, but intermediate values are not: '
            yield f'{within}{self.first}'
        elif self.why_no_first and not self.differences:
            yield f'intermediate values were not compared: {self.why_no_first}'
        elif self.why_no_first:
            yield f'the first operation that differs is unknown: {self.why_no_first}'
        for stays, said in ((False, 'the difference is gone'), (True, 'the difference is still there')):
            changes = [retry.change for retry in self.retries if retry.stays is stays]
            if changes:
                yield f'{said} {"; ".join(changes)}'
        for retry in self.retries:
            if retry.stays is None:
                yield f'not compared {retry.change}: {retry.why_not}'

    def to_dict(self) -> dict[str, Any]:
        """The result in plain Python values, ready for ``json.dumps``."""
        text = json.dumps(serialization.plain(vars(self)), default=str)
        # Numbers that JSON does not have are text.
        return {**json.loads(text, parse_constant=lambda name: str(float(name))), 'ok': self.ok}


def first_line(error: Exception) -> str:
    """The first line of an error, which may be long."""
    return textwrap.shorten(f'{type(error).__name__}: {error}'.splitlines()[0], 200, placeholder=' ...')


def _differences(verified: Verified) -> Table:
    columns = (
        *(Column('result', 'lead'), Column('array', 'code'), Column('spec', 'code')),
        *(Column('mesh', 'number'), Column('one device', 'number')),
        *(Column('error', 'number'), Column('rounding', 'number'), Column('seeds', 'number')),
    )
    rows: list[Row] = []
    for each in verified.differences:
        if not each.raised:
            spec = '' if each.spec is None else text(each.spec)
            values = Cell(_short(each.found, 6)), Cell(_short(each.expected, 6))
            sizes = Cell(_short(each.error), each.error), Cell(_short(each.explained), each.explained)
            rows.append(
                [each.place, each.array, spec, *values, *sizes, Cell(f'{each.seeds} of {verified.seeds}')]
            )
    return Table(columns, rows, most_lines=10)


def _short(value: Any, digits: int = 3) -> str:
    return f'{value:.{digits}g}' if isinstance(value, float | complex) else str(value)


def _arguments(verified: Verified) -> Table:
    columns = Column('argument', 'lead'), Column('array', 'code'), Column('values'), Column('because', 'wide')
    leaves = sorted(verified.arguments, key=lambda leaf: not leaf.why)  # plain numbers last
    folds = fold((leaf.path, (leaf.array, leaf.values, leaf.why)) for leaf in leaves)
    rows = [(item, leaves[item.first]) for item in folds]
    return Table(
        columns,
        [[item.short_name(MOST_RUNS), leaf.array, leaf.values, leaf.why] for item, leaf in rows],
        most_lines=10,
    )
