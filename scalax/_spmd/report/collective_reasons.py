"""The collectives of a report, each with its reason, source line, bytes and count."""

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
    """One collective that scalax inserted into a step, or several equal ones.

    Attributes:
        kind: the operation: ``'all_gather'``, ``'reduce_scatter'``, ``'all_reduce'`` or ``'all_to_all'``.
        what: what it converts: ``'weight'`` (or other state), ``'gradient'``, ``'examples'``, or ``'sum'``,
            which is another sum, such as a loss or a norm of weights.
        reason: why it is there, such as ``'weight params/up for dot_general'``, ``'gradient of params/up'``
            or ``'examples gathered for sort'``.
        path: the leaf path of the weight that it gathers, whose gradient it reduces, or to whose shards it
            moves examples; empty if there is none.
        primitive: the JAX primitive that needs it.
        line: the line of the user's code, such as ``'model.py:12 layer'``.
        axes: the mesh axes along which devices exchange blocks.
        array: the dtype and the shape of the gathered or reduced array, such as ``'bfloat16[4096,1024]'``.
        bytes: the size of this array.
        count: how often a step runs it; 0 if the trip count of a ``while`` loop is unknown.
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
        """The bytes of all executions in a step."""
        return self.bytes * max(1, self.count)


def collective_rows(collectives: Sequence[Collective], work: Redundancy) -> list[CollectiveRow]:
    """Returns the collectives of a step, in the order of the program, without those with unused results.

    Args:
        collectives: the recorded collectives.
        work: the locations of the collectives in the jaxpr of the step.
    """
    counts: dict[CollectiveRow, int] = {}
    lines: dict[int, str] = {}
    for collective in collectives:
        collective_id = collective.id
        if collective_id in work.locations:
            lines[collective_id] = lines.get(collective_id) or line_of(*work.locations[collective_id])
            row = _row(collective, lines[collective_id], collective_id in work.of_examples)
            counts[row] = counts.get(row, 0) + collective.count
    return [dataclasses.replace(row, count=count) for row, count in counts.items()]


def reasons_of(collectives: Sequence[Collective], of_examples: Container[int]) -> dict[int, str]:
    """Returns the reason of each collective, by collective id.

    A jaxpr that is called several times has one collective for the weights of all calls.

    Args:
        collectives: the collectives.
        of_examples: the ids of the collectives whose operands depend on examples.
    """
    reasons_by_id: dict[int, dict[str, None]] = {}
    for collective in collectives:
        reason = _row(collective, '', collective.id in of_examples).reason
        reasons_by_id.setdefault(collective.id, {})[reason] = None
    return {
        collective_id: ' and '.join(
            item.short_name(MOST_RUNS) for item in fold((reason, 0) for reason in reasons)
        )
        for collective_id, reasons in reasons_by_id.items()
    }


def _row(collective: Collective, line: str, of_examples: bool) -> CollectiveRow:
    """Returns the row of one collective, with a count of 0."""
    primitive = primitive_name(collective.equation) or str(collective.equation.primitive)
    primitive = 'add' if primitive == 'add_any' else primitive
    path = collective.origin if isinstance(collective.origin, str) and collective.what != 'sum' else ''
    array = array_text(str(collective.value.aval.dtype), shape_of(collective.value))
    return CollectiveRow(
        *(
            collective.kind,
            collective.what,
            _reason(collective, path, primitive, of_examples),
            path,
            primitive,
            line,
        ),
        *(collective.axes, array, collective.bytes, 0, collective.is_backward),
    )


# Operations that users do not need to see in the reason of a sum: they only reshape it, or add to it.
_OMITTED_USERS = SHAPE_OPS | {'add'}
_LOOK_UPS = frozenset(('gather', 'scatter-add'))
_REDUCTIONS: Mapping[ReduceOp, str] = {'sum': 'sum', 'max': 'maximum', 'min': 'minimum'}


def _reason(collective: Collective, path: str, primitive: str, of_examples: bool) -> str:
    if collective.what == 'weight':
        return f'weight {path} for {primitive}' if path else f'state gathered for {primitive}'
    if collective.what == 'gradient':
        return f'gradient of {path}'
    if collective.what == 'sum':
        reduction = (
            f'{_REDUCTIONS[collective.reduce_op]} over {"examples" if of_examples else "blocks of state"}'
        )
        user = RESULT if collective.origin == RESULT else primitive
        return reduction if user in _OMITTED_USERS else f'{reduction} for {user}'
    verb = 'gathered' if collective.kind == 'all_gather' else 'moved'
    if path and primitive not in _LOOK_UPS:
        return f'examples {verb} to meet blocks of {path}'
    if path:  # the update of a table
        if collective.kind == 'all_gather' and jax.dtypes.issubdtype(
            collective.value.aval.dtype, jax.numpy.integer
        ):
            return f'indices of rows of {path} gathered'
        return f'gradients of rows of {path} moved' if primitive == 'scatter-add' else f'rows of {path} moved'
    return f'examples {verb} for {primitive}'
