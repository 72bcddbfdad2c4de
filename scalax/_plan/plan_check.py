"""Limits that a plan has to keep, for tests of a step."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterator, Mapping
from typing import Any

from scalax._plan.blocks import collective_table, head, memory_blocks, memory_taken
from scalax._plan.plan_data import PlanData
from scalax._report import blocks
from scalax._report.tables import distinct_texts, human_bytes, milliseconds
from scalax.errors import ArgumentError, did_you_mean

_SHOWN = 5
_WIDTH = 110


def exceeded(
    plan: PlanData,
    fits: bool | None,
    peak: float | None,
    moved: Mapping[str | tuple[str, ...], float],
    seconds: float | None,
) -> list[str]:
    """The limits of `Plan.check` that a plan exceeds, and what fills them, in lines; none if it keeps all."""
    if not any(fits is value for value in (True, False, None)):
        raise ArgumentError(f'fits is True, False or None, got {fits!r}')
    if not isinstance(moved, Mapping):
        raise ArgumentError(f'bytes takes a dict of limits by mesh axes, got {moved!r}')
    of_memory, of_bytes = [*_memory(plan, fits, peak)], [*_moved(plan, moved)]
    of_time = [*_seconds(plan, seconds)]
    if not (problems := [*of_memory, *of_bytes, *of_time]):
        return []
    lines = [f'{head(plan)} does not keep its limits:', *(f'  {problem}' for problem in problems)]
    lines += ['', *blocks.text(memory_blocks(plan), _WIDTH).splitlines()] if of_memory else []
    lines += ['', *str(plan.roofline()).splitlines()] if of_time else []
    return lines + (['', *_largest(plan)] if (of_bytes or of_time) and plan.collectives else [])


def _memory(plan: PlanData, fits: bool | None, peak: float | None) -> Iterator[str]:
    if fits is not None and plan.fits is not fits:
        found = {True: 'fits', False: 'does not fit', None: 'is not known to fit'}[plan.fits]
        yield f'it {found}: {memory_taken(plan)}'
    if peak is not None and plan.memory.peak > _number('peak', peak):
        found, most = distinct_texts(plan.memory.peak, round(peak), human_bytes, ' B')
        yield f'peak of memory: {found}, at most {most}'


def _moved(plan: PlanData, limits: Mapping[str | tuple[str, ...], float]) -> Iterator[str]:
    for given, limit in limits.items():
        axes = given if isinstance(given, tuple) else (given,)
        if not axes:
            raise ArgumentError('a limit of bytes names no mesh axis: ()')
        for axis in axes:
            if axis not in plan.mesh:
                raise ArgumentError(f'the mesh has no axis {axis!r} ({did_you_mean(str(axis), plan.mesh)})')
        moved = sum(sum(kinds.values()) for own, kinds in plan.totals.items() if {*own} == {*axes})
        if moved > _number(f'bytes along {axes}', limit):
            found, most = distinct_texts(moved, round(limit), human_bytes, ' B')
            yield f'along {" x ".join(axes)}: {found}, at most {most}'


def _seconds(plan: PlanData, limit: float | None) -> Iterator[str]:
    if limit is not None and _number('seconds', limit) < plan.step_seconds.bound:
        found, most = distinct_texts(plan.step_seconds.bound, float(limit), milliseconds, ' s')
        yield f'a step: {found} at least, at most {most}'


def _number(name: str, limit: Any) -> float:
    if isinstance(limit, bool) or not isinstance(limit, numbers.Real) or math.isnan(limit):
        raise ArgumentError(f'the limit of {name} is not a number: {limit!r}')
    if limit < 0:
        raise ArgumentError(f'the limit of {name} is below 0, which every plan exceeds: {limit!r}')
    return float(limit)


def _largest(plan: PlanData) -> Iterator[str]:
    yield 'its largest collectives:'
    table = collective_table(plan)
    yield from dataclasses.replace(table, rows=table.rows[:_SHOWN]).text(_WIDTH)
