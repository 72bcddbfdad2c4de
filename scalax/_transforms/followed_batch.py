"""What `SjitFunction.followed` tells: which values stay with the rows, and where these are lost."""

from __future__ import annotations

import dataclasses
import math
import os
import traceback
from collections import Counter
from typing import Any

import jax
from jax.sharding import PartitionSpec

from scalax._follow.follow import Followed, Kept, Lost
from scalax._report.tables import array_text, human_bytes, table, terminal_width
from scalax._tree.specs import text
from scalax._util.user_frames import users_own

_JAX = os.path.dirname(jax.__file__) + os.sep


@dataclasses.dataclass(frozen=True)
class KeptValue:
    """Values that stay where the rows of the batch are.

    Attributes:
        array: the dtype and the shape of each, of all devices together, such as ``'bfloat16[64,4096]'``.
        spec: its sharding: the followed dimensions; UNCONSTRAINED ones are the compiler's.
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
    """An operation behind which it is not known which dimension holds rows of the batch.

    Attributes:
        primitive: the operation of JAX.
        line: the line of the user's code.
        array: the dtype and the shape of its largest result.
        bytes: the size of that, of all devices together.
    """

    primitive: str
    line: str
    array: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class FollowedBatch:
    """How the batch of a compiled function was followed; printed, a table.

    Attributes:
        name: the name of the function.
        axes: the mesh axes over which the rows are; empty if nothing was followed.
        kept: the values that are kept in place, in the order of the program.
        lost: where rows were lost, the largest first.
        weights: the elements of weights that devices would gather for products with rows, if these are more
            than those of the rows. Then nothing is kept. Else 0.
        rows: those of the rows, or of their products if these are smaller.
    """

    name: str
    axes: tuple[str, ...] = ()
    kept: tuple[KeptValue, ...] = ()
    lost: tuple[LostRows, ...] = ()
    weights: int = 0
    rows: int = 0

    def __str__(self) -> str:
        if not self.axes:
            return (
                f'{self.name}: no batch is followed. It is an argument with a sharding: batch_argnums or '
                'batch_argnames say which'
            )
        if self.weights > self.rows:
            return (
                f'{self.name} keeps nothing, because rows are few: to keep them gathers {self.weights:,} '
                f'elements of weights, to move them takes {self.rows:,}'
            )
        width, count = terminal_width(None), sum(value.count for value in self.kept)
        lines = [f'{self.name} keeps {count} values with the rows of the batch ({", ".join(self.axes)})']
        if self.kept:
            rows = [
                [value.line, value.primitive, str(value.count), value.array, text(value.spec)]
                for value in self.kept
            ]
            lines += ['', *table([['line', 'operation', 'count', 'value', 'spec'], *rows], width, 0, 2)]
        if self.lost:
            rows = [[each.line, each.primitive, human_bytes(each.bytes), each.array] for each in self.lost]
            lines += ['', 'Rows are lost at:', '']
            lines += table([['line', 'operation', 'size', 'value'], *rows], width, 0, 2)
        return '\n'.join(lines)


def followed_batch(name: str, axes: frozenset[str], followed: Followed) -> FollowedBatch:
    """What the pass found in the jaxpr of a function, with the lines of the user's code."""
    if followed.few_rows is not None:
        few = followed.few_rows
        return FollowedBatch(name, tuple(sorted(axes)), weights=few.weights, rows=few.rows)
    kept = Counter(
        KeptValue(_array(each.aval), each.spec, each.equation.primitive.name, _line(each))
        for each in followed.kept
    )
    lost = {
        LostRows(each.equation.primitive.name, _line(each), _array(each.aval), _bytes(each.aval))
        for each in followed.lost
    }
    return FollowedBatch(
        name,
        tuple(sorted(axes)),
        tuple(dataclasses.replace(value, count=count) for value, count in kept.items()),
        tuple(sorted(lost, key=lambda each: (-each.bytes, each.line, each.primitive))),
    )


def _array(aval: Any) -> str:
    return array_text(str(aval.dtype), aval.shape)


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * int(aval.dtype.itemsize)


def _line(found: Kept | Lost) -> str:
    """The line of the user's code; of what JAX derived, that of the call around it."""
    for equation in (found.equation, *found.calls):
        stack = equation.source_info.traceback
        if stack is not None:
            frames = traceback.extract_tb(stack.as_python_traceback())
            written = [each for each in reversed(frames) if not each.filename.startswith(_JAX)]
            frame = users_own(written, lambda each: each.filename)
            if frame is not None:
                return f'{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}'
    return str(found.equation.source_info.name_stack)
