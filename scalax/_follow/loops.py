"""Loops: what a round is given, what is gathered before a loop, and what is summed behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from scalax._follow.edit import Edit
from scalax._follow.trail import Trail, closed_spec_of, common, element_of, merged, of_dims, spec_of, stack_of
from scalax._follow.types import Followed, Use
from scalax._follow.weights import FEW_ROWS
from scalax._jax.equations import DropVar, Literal, loop_of, opened, shape_of
from scalax._jax.rewriting import with_jaxprs
from scalax._jaxprs.dims import reshaped

# Loops settle after two or three rounds of following what they carry; more are not tried.
_ROUNDS = 8


def follow_loop(edit: Edit, equation: Any, operands: Sequence[Trail]) -> tuple[Any, Sequence[Trail]]:
    """A `scan` or a `while` whose rounds are followed, and the trails of its results."""
    loop = loop_of(equation)
    rounds = loop.length or 1  # one also of a loop that runs none: what it sends is divided by them
    constants, first, trails = loop.parts(operands)
    same, begun, stacks = loop.parts(equation.invars)
    rows = [_of_stack(edit, *stack, equation) for stack in zip(stacks, trails, strict=True)]

    def arguments(state: Sequence[Trail]) -> list[Trail]:
        return [*constants, *state, *rows]

    use = Use(loop.constants + loop.carried, tuple([rounds * edit.weights.rounds(atom) for atom in same]))

    def after(state: Sequence[Trail]) -> Followed:
        return edit.follow(loop.body, arguments(state), use)

    grown, state = _settled(edit, loop.body, first, after)
    inside = edit.inside(equation, loop.body, arguments(state), use, rounds)
    carried, has_rows = zip(begun, first, state, strict=True), edit.shared.has_rows
    if gone := [atom for atom, before, kept in carried if has_rows(before) and not has_rows(kept)]:
        _note_losses(edit, equation, gone, after(grown), inside)
    _gather_before(edit, equation, same, inside)
    _sum_behind(edit, equation, loop.carried, inside)
    edit.weights.note_loop(equation.invars[loop.tested :], inside.multiplied, loop.constants, rounds)
    stacked = map(stack_of, inside.trails[loop.carried :])
    return with_jaxprs(equation, inside.jaxpr), [*inside.trails[: loop.carried], *stacked]


def _note_losses(edit: Edit, equation: Any, gone: Sequence[Any], first: Followed, inside: Followed) -> None:
    """Takes note of carried values that a round returns without rows: of where it loses them."""
    known = {id(each.equation) for each in inside.lost}
    causes = [each for each in first.lost if id(each.equation) not in known]
    edit.lost += [dataclasses.replace(each, calls=(*each.calls, equation)) for each in causes]
    for atom in [] if causes else gone:
        edit.note_loss(equation, [atom])


def _of_stack(edit: Edit, atom: Any, trail: Trail, equation: Any) -> Trail:
    """The trail of the elements that a loop takes of a stack."""
    row, had_rows = element_of(trail), edit.shared.has_rows(trail)
    is_in_parts = not row and had_rows and id(atom) in edit.parts
    if is_in_parts:  # the rows of each part are dealt to all devices; else a device would have whole parts
        trail = edit.shared.possible(_dealt_again(*edit.parts[id(atom)]), atom)
        row = element_of(trail)
    if row and (is_in_parts or (id(atom) not in edit.constrained and edit.has_open_rows(atom))):
        edit.place_before(atom, spec_of(trail), equation)
    if had_rows and not edit.shared.has_rows(row):  # a round has one row of them
        edit.note_loss(equation, [atom])
    return row


def _gather_before(edit: Edit, equation: Any, constants: Sequence[Any], inside: Followed) -> None:
    """Gathers the weights among the constants of a loop with which each round multiplies few rows.

    What depends on the batch is no weight: it may be large, and its rows were lost.
    """
    for i, var in enumerate(constants):
        few = inside.multiplied.get(i, FEW_ROWS) < FEW_ROWS
        if few and not (
            isinstance(var, Literal) or id(var) in edit.users_given or var in edit.shared.from_batch
        ):
            edit.place_before(var, closed_spec_of(edit.trail(var), len(shape_of(var))), equation)


def _sum_behind(edit: Edit, equation: Any, carried: int, inside: Followed) -> None:
    """Leaves sums over few rows of a round whole: devices add them up once, behind the loop."""
    edit.summed = [
        var
        for i, var in enumerate(equation.outvars[:carried])
        if i in inside.summed
        and not edit.shared.has_rows(inside.trails[i])
        and shape_of(var)
        and not isinstance(var, DropVar)
        and id(var) not in edit.users_own
    ]


def _settled(
    edit: Edit, body: Any, first: Sequence[Trail], after: Callable[[Sequence[Trail]], Followed]
) -> tuple[list[Trail], list[Trail]]:
    """The trails of what a loop carries, before or behind any round; and what every round keeps of them.

    State that begins as zeros gets the rows that a round returns. Rows that a round loses are not kept.
    """
    shapes = [*map(shape_of, opened(body).outvars)]

    def grown(mine: Trail, theirs: Trail, shape: tuple[int, ...]) -> Trail:
        return edit.shared.trails.possible(merged((mine, theirs), len(shape)), shape)

    def settled(state: list[Trail], joined: Callable[[Trail, Trail, tuple[int, ...]], Trail]) -> list[Trail]:
        for _ in range(_ROUNDS):
            before, returned = state, after(state).trails
            state = [*map(joined, before, returned, shapes)]
            if state == before:
                break
        return state

    most = settled([*first], grown)
    return most, settled(most, lambda mine, theirs, _: common(mine, theirs))


def _dealt_again(reshape: Any, trail: Trail) -> Trail:
    """The rows of a dimension that a reshape splits, in the second of the new dimensions.

    Parts of a batch are rows that a loop takes one part after the other: ``x.reshape(parts, rows, ...)``.
    """
    groups = [(old, new) for old, new in reshaped(reshape) if len(old) == 1 and len(new) > 1 and new[0] == 0]
    return of_dims({new[1]: trail[old[0]] for old, new in groups}, len(shape_of(reshape.outvars[0])))
