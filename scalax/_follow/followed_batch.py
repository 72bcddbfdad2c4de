"""What `SjitFunction.followed` and plans tell: which values stay with the rows, and where these are lost."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeVar

from jax.sharding import PartitionSpec

from scalax._follow.types import Arguments, Followed, Noted
from scalax._jax.equations import traceback_of
from scalax._jaxprs.source_lines import frames_outside_jax, line_of
from scalax._report.tables import array_text, human_bytes, table, terminal_width
from scalax._tree.paths import array_bytes
from scalax._tree.specs import text

_DEAL = os.path.join('scalax', '_stages', 'deal.py')


@dataclasses.dataclass(frozen=True)
class KeptValue:
    """Values that stay sharded along the batch dimension.

    Attributes:
        array: the dtype and the shape of each, of all devices together, such as ``'bfloat16[64,4096]'``.
        spec: its sharding: that of the batch; UNCONSTRAINED dimensions are left to the compiler.
        primitive: the operation of JAX that computes it.
        line: the line of the user's code, such as ``'model.py:12 layer'``.
        count: how many there are on the line; one in a loop counts once.
    """

    array: str
    spec: PartitionSpec
    primitive: str
    line: str
    count: int = 1


@dataclasses.dataclass(frozen=True)
class LostRows:
    """An operation whose operands are sharded along the batch dimension, and whose results are not.

    Sums over the batch, such as a mean or a gradient, are not among these.

    Attributes:
        primitive: the operation of JAX.
        line: the line of the user's code.
        array: the dtype and the shape of its largest result; of a loop over examples, of its operand.
        bytes: the size of that, of all devices together.
        count: how many there are on the line; one in a loop counts once.
    """

    primitive: str
    line: str
    array: str
    bytes: int
    count: int = 1


T = TypeVar('T', KeptValue, LostRows)


@dataclasses.dataclass(frozen=True)
class FollowedBatch:
    """How batch sharding was propagated through a compiled function; printed, a table.

    Attributes:
        name: the name of the function.
        axes: the mesh axes that shard the batch dimension; empty if nothing was propagated.
        kept: the values that stay sharded along it, in the order of the program.
        lost: where the batch sharding was lost, the largest first.
        moved: where examples move to other devices: to the larger weight of a product (the value is the
            weight), or because they are sorted, looked up by an index or scattered (it is the result).
        reason: why nothing was propagated; empty if something was.
    """

    name: str
    axes: tuple[str, ...] = ()
    kept: tuple[KeptValue, ...] = ()
    lost: tuple[LostRows, ...] = ()
    moved: tuple[LostRows, ...] = ()
    reason: str = ''

    @property
    def count(self) -> int:
        """How many values are kept; one in a loop counts once."""
        return sum(value.count for value in self.kept)

    def __str__(self) -> str:
        if not self.axes:
            return f'{self.name} propagates no batch sharding: {self.reason}'
        width = terminal_width(None)
        kept = f'{self.name} keeps {self.count} values sharded along the batch dimension'
        lines = [f'{kept} ({", ".join(self.axes)})']
        if self.kept:
            rows = [[*_cells(each), each.array, text(each.spec)] for each in self.kept]
            lines += ['', *table([[*_HEAD, 'value', 'spec'], *rows], width, 0, (2,))]
        for what, places in (('The batch sharding is lost', self.lost), ('Examples move', self.moved)):
            if places:
                rows = [[*_cells(each), human_bytes(each.bytes), each.array] for each in places]
                found = table([[*_HEAD, 'size', 'value'], *rows], width, 0, (2, 3))
                lines += ['', f'{what} at:', '', *found]
        return '\n'.join(lines)


_HEAD = ('line', 'operation', 'count')


def _cells(each: KeptValue | LostRows) -> list[str]:
    return [each.line, each.primitive, str(each.count)]


def nothing_followed(batch: FollowedBatch) -> str:
    """Why no batch sharding is propagated."""
    return f'no batch sharding is propagated: {batch.reason}'


def followed_batch(
    name: str, arguments: Arguments | None, followed: Followed | None, why_not: str
) -> FollowedBatch:
    """What was followed of the batch of a call, with the lines of the user's code.

    Args:
        name: the name of the function.
        arguments: what is known of the arguments of the call; None if there is no batch.
        followed: what the pass found in the jaxpr; None if it did not run.
        why_not: why not.
    """
    if arguments is None or followed is None:
        return FollowedBatch(name, reason=why_not)
    if followed.failure:
        return FollowedBatch(name, reason=followed.failure)
    return FollowedBatch(
        name,
        tuple(sorted(arguments.batch_axes)),
        _counted(KeptValue(spec=each.spec, **_place(each)) for each in followed.kept),
        _largest_first(each for each in followed.lost if not _is_dealt(each.equation)),
        _largest_first(followed.moved),
    )


def _is_dealt(equation: Any) -> bool:
    """Whether an equation deals rows to pipelines, which say where these are behind it."""
    return any(frame.filename.endswith(_DEAL) for frame in frames_outside_jax(traceback_of(equation))[:1])


def _largest_first(places: Iterable[Noted]) -> tuple[LostRows, ...]:
    found = _counted(LostRows(bytes=array_bytes(each.aval), **_place(each)) for each in places)
    return tuple(sorted(found, key=lambda each: (-each.bytes, each.line, each.primitive)))


def _counted(values: Iterable[T]) -> tuple[T, ...]:
    return tuple([dataclasses.replace(value, count=count) for value, count in Counter(values).items()])


def _place(noted: Noted) -> dict[str, Any]:
    line, array = line_of(noted.equation, noted.calls), array_text(str(noted.aval.dtype), noted.aval.shape)
    return {'primitive': noted.equation.primitive.name, 'line': line, 'array': array}
