"""What the partitioner wrote: the collectives, each with its reason, and what they send."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from scalax._jax.primitives import primitive_name
from scalax._spmd.collectives import Collective


@dataclasses.dataclass(frozen=True)
class Row:
    """One collective of a step, or several that differ in nothing.

    Attributes:
        kind: the operation.
        axes: the mesh axes along which devices exchange blocks.
        bytes: the size, on one device, of what is gathered or reduced.
        count: how often a step runs it; 0 if the number of rounds of a loop is not known.
        reason: why it is there.
        primitive: the primitive for which it was written.
        equation: the equation for which it was written.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int
    reason: str
    primitive: str
    equation: Any


def rows(collectives: Sequence[Collective]) -> list[Row]:
    """Returns the list of the collectives of a step."""
    found: dict[tuple[Any, ...], Row] = {}
    for each in collectives:
        primitive = primitive_name(each.equation) or str(each.equation.primitive)
        key = each.kind, each.axes, each.bytes, _reason(each, primitive), primitive
        row = found.get(key)
        if row is None:
            found[key] = Row(*each_row(each, primitive))
        else:
            found[key] = dataclasses.replace(row, count=row.count + each.count)
    return [*found.values()]


def each_row(each: Collective, primitive: str) -> tuple[Any, ...]:
    """The columns of the row of one collective."""
    reason = _reason(each, primitive)
    return each.kind, each.axes, each.bytes, each.count, reason, primitive, each.equation


def _reason(each: Collective, primitive: str) -> str:
    if each.what == 'state':
        return f'weight {each.of} for {primitive}' if each.of else f'state gathered for {primitive}'
    if each.what == 'gradient':
        return f'gradient of {each.of}'
    if each.what == 'sum':
        return f'sum over examples for {primitive}'
    return f'examples gathered for {primitive}'
