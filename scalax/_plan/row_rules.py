"""How operations of HLO pass on rows of the batch: for each, which dimensions of its result have rows.

A dimension that was merged from several is known by its factors, so that taking it apart again tells which of
the parts has the rows. Where it is not certain, there are none: what is said of rows is said of too few.
https://openxla.org/xla/operation_semantics describes the operations.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from scalax._plan.hlo import Array, Instruction

Factors = tuple[tuple[int, bool], ...]
"""The factors of the size of a dimension, the major one first, each with whether it has rows; or none."""
Rows = tuple[Factors, ...]
"""Those of each dimension of an array."""


class Operand(NamedTuple):
    """An operand of an operation.

    Attributes:
        array: its type.
        rows: where it has rows.
    """

    array: Array
    rows: Rows


def no_rows(array: Array) -> Rows:
    """The rows of an array without any."""
    return ((),) * len(array.dims)


def has_rows(rows: Rows) -> bool:
    """Whether any dimension has rows."""
    return any(rows)


def joined(first: Rows, second: Rows) -> Rows:
    """The rows of a value that is one of two arrays of the same type, or made of both."""
    return tuple(
        mine if mine == theirs or not theirs else theirs if not mine else _whole(_size(mine))
        for mine, theirs in zip(first, second, strict=True)
    )


def passed_on(instruction: Instruction, operands: Sequence[Operand]) -> list[Rows]:
    """The rows in each array of the result of an operation that calls no computation of arrays."""
    rule = _RULES.get(instruction.opcode, _alike)
    return rule(instruction, operands)


def _size(factors: Factors) -> int:
    return math.prod(size for size, _ in factors)


def _whole(size: int) -> Factors:
    return ((size, True),)


def _resized(factors: Factors, size: int) -> Factors:
    """The rows of a dimension of another size."""
    return factors if not factors or _size(factors) == size else _whole(size)


def _alike(instruction: Instruction, operands: Sequence[Operand]) -> list[Rows]:
    """Of elementwise operations, and of those that are not known: dimensions of the same size."""
    return _by_place(instruction, operands, resized=False)


def _in_place(instruction: Instruction, operands: Sequence[Operand]) -> list[Rows]:
    """Of operations that take or add elements, and keep the order of dimensions."""
    return _by_place(instruction, operands, resized=True)


def _by_place(instruction: Instruction, operands: Sequence[Operand], *, resized: bool) -> list[Rows]:
    results = []
    for array in instruction.arrays:
        found = no_rows(array)
        for operand in operands:
            if len(operand.rows) == len(found):
                sizes = zip(operand.rows, operand.array.dims, array.dims, strict=True)
                mine = tuple(
                    _resized(each, size) if resized or own == size else () for each, own, size in sizes
                )
                found = joined(found, mine)
        results.append(found)
    return results


def _broadcast(instruction: Instruction, operands: Sequence[Operand]) -> list[Rows]:
    found = list(no_rows(instruction.arrays[0]))
    for place, each in zip(_integers(instruction, 'dimensions'), operands[0].rows, strict=True):
        found[place] = _resized(each, instruction.arrays[0].dims[place])
    return [tuple(found)]


def _transpose(instruction: Instruction, operands: Sequence[Operand]) -> list[Rows]:
    return [tuple(operands[0].rows[place] for place in _integers(instruction, 'dimensions'))]


def _reshape(instruction: Instruction, operands: Sequence[Operand]) -> list[Rows]:
    """Dimensions are taken apart into their factors, and these are put together again."""
    [array] = instruction.arrays
    given, rows = operands[0]
    each = zip(rows, given.dims, strict=True)
    factors = [*itertools.chain.from_iterable(own or ((size, False),) for own, size in each)]
    found: list[Factors] = []
    for place, size in enumerate(array.dims):
        own: list[tuple[int, bool]] = []
        left = size
        while factors and (left > 1 or (not own and factors[0][0] == 1)):
            first, has = factors.pop(0)
            taken = math.gcd(first, left)
            if taken == 1 and first > 1:  # cannot be told apart
                return [no_rows(array)]
            if taken < first:
                factors.insert(0, (first // taken, has))
            own.append((taken, has))
            left //= taken
        if own and array.dims[place + 1 : place + 2] != (1,):
            own += _left_over(factors)
        found.append(tuple(own) if any(has for _, has in own) else ())
    return [tuple(found)]


def _left_over(factors: list[tuple[int, bool]]) -> Factors:
    """Takes the one row of a device from the factors, unless it goes with those behind it."""
    count = 0
    while factors[count : count + 1] == [(1, True)]:
        count += 1
    if any(has for _, has in factors[count : count + 1]):
        return ()
    taken, factors[:count] = tuple(factors[:count]), []
    return taken


def _reduce(instruction: Instruction, operands: Sequence[Operand]) -> list[Rows]:
    gone = set(_integers(instruction, 'dimensions'))
    kept = [i for i, _ in enumerate(operands[0].rows) if i not in gone]
    found = no_rows(instruction.arrays[0])
    for operand in operands[: len(instruction.arrays)]:
        found = joined(found, tuple(operand.rows[i] for i in kept))
    return [found] * len(instruction.arrays)


def _sort(instruction: Instruction, operands: Sequence[Operand]) -> list[Rows]:
    found = operands[0].rows
    for operand in operands[1:]:
        found = joined(found, operand.rows)
    return [found] * len(instruction.arrays)


def _dot(instruction: Instruction, operands: Sequence[Operand]) -> list[Rows]:
    sides = []
    for side, operand in zip(('lhs', 'rhs'), operands, strict=False):
        batch = _integers(instruction, f'{side}_batch_dims')
        gone = {*batch, *_integers(instruction, f'{side}_contracting_dims')}
        gone |= set(_integers(instruction, f'{side}_group_dims'))
        free = [each for i, each in enumerate(operand.rows) if i not in gone]
        sides.append((tuple(operand.rows[i] for i in batch), free))
    (left, lhs_free), (right, rhs_free) = sides
    return _fitting(instruction, (*joined(left, right), *lhs_free, *rhs_free))


def _fitting(instruction: Instruction, rows: Rows) -> list[Rows]:
    """These rows; none if the result has other dimensions, as grouped products over rows have."""
    [array] = instruction.arrays
    fits = len(rows) == len(array.dims) and all(
        not each or _size(each) == size for each, size in zip(rows, array.dims, strict=True)
    )
    return [rows if fits else no_rows(array)]


def _convolution(instruction: Instruction, operands: Sequence[Operand]) -> list[Rows]:
    labels = re.match(r'(\w+)_(\w+)->(\w+)', instruction.attribute('dim_labels') or '')
    found = no_rows(instruction.arrays[0])
    if labels is None:
        return [found]
    given, kernel, result = labels.groups()
    of = {'b': operands[0].rows[given.index('b')], 'f': operands[1].rows[kernel.index('o')]}
    return _fitting(instruction, tuple(of.get(label, ()) for label in result))


def _gather(instruction: Instruction, operands: Sequence[Operand]) -> list[Rows]:
    operand, indices = operands
    along, offsets = _integers(instruction, 'index_vector_dim')[0], _integers(instruction, 'offset_dims')
    gone = {*_integers(instruction, 'collapsed_slice_dims'), *_integers(instruction, 'operand_batching_dims')}
    taken = _integers(instruction, 'slice_sizes')
    windows = iter(
        [
            each if taken[i] == operand.array.dims[i] else ()
            for i, each in enumerate(operand.rows)
            if i not in gone
        ]
    )
    looked_up = iter([each for i, each in enumerate(indices.rows) if i != along])
    dims = range(len(instruction.arrays[0].dims))
    return _fitting(instruction, tuple(next(windows if i in offsets else looked_up, ()) for i in dims))


def _scatter(instruction: Instruction, operands: Sequence[Operand]) -> list[Rows]:
    count = len(instruction.arrays)
    windows = _integers(instruction, 'update_window_dims')
    gone = {*_integers(instruction, 'inserted_window_dims'), *_integers(instruction, 'input_batching_dims')}
    results = []
    for operand, updates in zip(operands[:count], operands[count + 1 :], strict=True):
        places = [i for i, _ in enumerate(operand.rows) if i not in gone]
        found = list(no_rows(operand.array))
        for place, window in zip(places, windows, strict=True):
            if updates.array.dims[window] == operand.array.dims[place]:
                found[place] = updates.rows[window]
        results.append(joined(operand.rows, tuple(found)))
    return results


def _all_to_all(instruction: Instruction, operands: Sequence[Operand]) -> list[Rows]:
    """The parts of a dimension go to the devices; those that they have of another one come in their place.

    The partitioner writes the parts as a dimension of their own, and what each holds as the next one.
    """
    dims, found = _integers(instruction, 'dimensions'), list(operands[0].rows)
    if len(instruction.arrays) > 1 or not dims or not has_rows(operands[0].rows):
        return _alike(instruction, operands)
    [parts], sizes = dims, instruction.arrays[0].dims
    held = parts + 1
    if found[parts]:
        found[parts] = ()
        if held < len(found):
            found[held] = _whole(sizes[held])
        return [tuple(found)]
    if sizes[held : held + 2] == (1, 1) and found[held]:
        # Parts without rows hold none: this is the one row of a device, of the dimension behind.
        found[held : held + 2] = (), found[held]
    found[parts] = _whole(sizes[parts])
    return [tuple(found)]


def _integers(instruction: Instruction, name: str) -> list[int]:
    return [int(number) for number in re.findall(r'\d+', instruction.attribute(name) or '')]


_RULES: dict[str, Callable[[Instruction, Sequence[Operand]], list[Rows]]] = {
    'all-gather': _in_place,
    'all-to-all': _all_to_all,
    'bitcast': _reshape,
    'broadcast': _broadcast,
    'concatenate': _in_place,
    'convolution': _convolution,
    'dot': _dot,
    'dynamic-slice': _in_place,
    'dynamic-update-slice': _in_place,
    'gather': _gather,
    'pad': _in_place,
    'ragged-dot': _dot,
    'reduce': _reduce,
    'reduce-scatter': _in_place,
    'reduce-window': _in_place,
    'reshape': _reshape,
    'scatter': _scatter,
    'select-and-scatter': _in_place,
    'slice': _in_place,
    'sort': _sort,
    'transpose': _transpose,
}
