"""Reasons of collectives: the rows of a report, each with its reason, line, bytes and count."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence

import jax

from scalax._core.render.tables import array_text
from scalax._core.util.folding import MOST_RUNS, fold
from scalax._jax.equations import shape_of
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.dim_rules import SHAPE_OPS
from scalax._jaxpr.source_lines import line_of
from scalax._spmd.placements.collectives import RESULT, Collective, What
from scalax._spmd.placements.placement import ReduceOp
from scalax._spmd.report.redundant_work import Redundancy


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """One collective that scalax wrote into a step, or several that differ in nothing.

    Attributes:
        kind: the operation: ``'all_gather'``, ``'reduce_scatter'``, ``'all_reduce'`` or ``'all_to_all'``.
        what: what it converts: ``'weight'`` (or other state), ``'gradient'``, ``'examples'``, or ``'sum'``,
            which is another sum, such as a loss or a norm of weights.
        reason: why it is there, such as ``'weight params/up for dot_general'``, ``'gradient of params/up'``
            or ``'examples gathered for sort'``.
        path: the path of the weight, also of the one whose gradient it reduces, or to whose blocks it
            moves examples; empty if there is none.
        primitive: the operation of JAX that needs it.
        line: the line of the user's code, such as ``'model.py:12 layer'``.
        axes: the mesh axes along which devices exchange blocks.
        array: the dtype and the shape of what is gathered or reduced, such as ``'bfloat16[4096,1024]'``.
        bytes: the size of that, in one execution.
        count: how often a step runs it; 0 if the number of rounds of a ``while`` loop is not known.
        is_backward: whether it runs in the backward pass.
    """

    kind: str
    what: What
    reason: str
    path: str
    primitive: str
    line: str
    axes: tuple[str, ...]
    array: str
    bytes: int
    count: int
    is_backward: bool

    @property
    def step_bytes(self) -> int:
        """The bytes of all executions of a step."""
        return self.bytes * max(1, self.count)


def collective_rows(collectives: Sequence[Collective], work: Redundancy) -> list[CollectiveRow]:
    """Returns the list of the collectives of a step, in the order of the program.

    Args:
        collectives: the collectives; those whose results nothing uses are left out.
        work: what is known of them in the jaxpr of the step.
    """
    found: dict[CollectiveRow, int] = {}
    lines: dict[int, str] = {}
    for each in collectives:
        number = each.id
        if number in work.places:
            lines[number] = lines.get(number) or line_of(*work.places[number])
            row = _row(each, lines[number], number in work.of_examples)
            found[row] = found.get(row, 0) + each.count
    return [dataclasses.replace(row, count=count) for row, count in found.items()]


def reasons_of(collectives: Sequence[Collective], of_examples: Container[int]) -> dict[int, str]:
    """Returns why each collective is there, by the numbers in the names of operations.

    A jaxpr that is used in several places has one collective for the weights of all of them.

    Args:
        collectives: the collectives.
        of_examples: the numbers of those that take examples, and not state alone.
    """
    found: dict[int, dict[str, None]] = {}
    for each in collectives:
        reason = _row(each, '', each.id in of_examples).reason
        found.setdefault(each.id, {})[reason] = None
    return {
        number: ' and '.join(item.short_name(MOST_RUNS) for item in fold((reason, 0) for reason in reasons))
        for number, reasons in found.items()
    }


def _row(each: Collective, line: str, of_examples: bool) -> CollectiveRow:
    """The row of one collective, with a count of 0."""
    primitive = primitive_name(each.equation) or str(each.equation.primitive)
    primitive = 'add' if primitive == 'add_any' else primitive
    path = each.origin if isinstance(each.origin, str) and each.what != 'sum' else ''
    array = array_text(str(each.value.aval.dtype), shape_of(each.value))
    return CollectiveRow(
        *(each.kind, each.what, _reason(each, path, primitive, of_examples), path, primitive, line),
        *(each.axes, array, each.bytes, 0, each.is_backward),
    )


# What takes a sum says nothing to users if it only changes the form of the sum, or adds to it.
_UNTOLD = SHAPE_OPS | {'add'}
_LOOK_UPS = frozenset(('gather', 'scatter-add'))
_REDUCTIONS: Mapping[ReduceOp, str] = {'sum': 'sum', 'max': 'maximum', 'min': 'minimum'}


def _reason(each: Collective, path: str, primitive: str, of_examples: bool) -> str:
    if each.what == 'weight':
        return f'weight {path} for {primitive}' if path else f'state gathered for {primitive}'
    if each.what == 'gradient':
        return f'gradient of {path}'
    if each.what == 'sum':
        reduction = f'{_REDUCTIONS[each.reduce_op]} over {"examples" if of_examples else "blocks of state"}'
        user = RESULT if each.origin == RESULT else primitive
        return reduction if user in _UNTOLD else f'{reduction} for {user}'
    moved = 'gathered' if each.kind == 'all_gather' else 'moved'
    if path and primitive not in _LOOK_UPS:
        return f'examples {moved} to meet blocks of {path}'
    if path:  # of a table
        if each.kind == 'all_gather' and jax.dtypes.issubdtype(each.value.aval.dtype, jax.numpy.integer):
            return f'indices of rows of {path} gathered'
        return f'gradients of rows of {path} moved' if primitive == 'scatter-add' else f'rows of {path} moved'
    return f'examples {moved} for {primitive}'
