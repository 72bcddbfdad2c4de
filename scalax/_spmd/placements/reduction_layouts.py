"""The layouts in which sums are wanted: those of the state that they become part of.

A gradient is a sum over examples. It is reduced to the layout of its weight, which is known from what the
step returns, or from the state that it is added to (`state_layouts`): the pass goes backward from the results
of a jaxpr, through what keeps the layout of its operands.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

from scalax._jax.equations import (
    CALLS,
    Literal,
    Loop,
    branches,
    call_jaxpr,
    loop_of,
    open_jaxpr,
    shape_of,
)
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.carry_accumulation import carry_reductions
from scalax._jaxpr.dim_rules import ELEMENTWISE, dim_rule, reshape_groups
from scalax._spmd.placements.layouts import Layout, ShiftedDims, remap_layout
from scalax._spmd.placements.placement import REPLICATE, SUM, Partial, Placements, Replicate, Shard
from scalax._spmd.placements.state_layouts import state_layouts


def reduced_placements(placements: Placements, layout: Layout | None, *, held: bool = False) -> Placements:
    """Returns the placements of a value whose sums are reduced to a layout, or to all devices.

    Args:
        placements: those of the value.
        layout: the layout; None if it is not known.
        held: whether sums that the layout leaves to a loop around stay sums.
    """
    found = [*placements]
    for i, placement in enumerate(placements):
        if isinstance(placement, Partial):
            target = REPLICATE if layout is None or placement != SUM else layout.placements[i]
            found[i] = REPLICATE if isinstance(target, Partial) and not held else target
    return tuple(found)


# Their operands have the layout of their result, as far as they have its dimensions.
_KEEPING = (
    ELEMENTWISE
    | {'transpose', 'squeeze', 'broadcast_in_dim', 'pad', 'slice', 'concatenate'}
    | {'optimization_barrier', 'dynamic_update_slice'}
)
# These hold jaxprs.
_HOLDING = CALLS.keys() | {'cond', 'scan', 'while'}
_Known = Layout | None


class ReductionLayouts:
    """The layout that is wanted of each variable of a jaxpr, and of those inside it.

    Args:
        jaxpr: the jaxpr, open or closed.
        results: the layouts of its results; None where any will do.
        arguments: those of its arguments that are state in blocks, for results of which nothing is said.
        holds_sums: whether loops hold what they add up as sums also along axes that shard the state.
    """

    def __init__(
        self,
        jaxpr: Any,
        results: Sequence[_Known],
        arguments: Sequence[_Known] = (),
        *,
        holds_sums: bool = False,
    ) -> None:
        self._of: dict[int, Layout] = {}
        self._holds_sums = holds_sums
        self._states = {} if all(results) else state_layouts(jaxpr, arguments)
        self._axes: Sequence[int] | None = None
        self._backward(jaxpr, results)

    def of(self, atom: Any) -> _Known:
        """Returns the layout that is wanted of a variable, wherever its jaxpr is used."""
        layout = self._of.get(id(atom))
        if layout is None or self._axes is None:
            return layout
        return layout._replace(placements=tuple([layout.placements[i] for i in self._axes]))

    def is_sharded(self, atom: Any) -> bool:
        """Returns whether a variable becomes part of state that is sharded."""
        layout = self.of(atom)
        return layout is not None and any(isinstance(x, Shard) for x in layout.placements)

    def along(self, axes: Sequence[int]) -> Self:
        """Returns the layouts along these of the axes alone, by number."""
        other = copy.copy(self)
        other._axes = axes if self._axes is None else [self._axes[i] for i in axes]
        return other

    def _backward(self, jaxpr: Any, results: Sequence[_Known]) -> list[_Known]:
        """Returns what is wanted of the arguments of a jaxpr."""
        inner = open_jaxpr(jaxpr)
        for var, layout in zip(inner.outvars, results, strict=True):
            self._want(var, layout)
        for equation in reversed(inner.eqns):
            found = [self._of.get(id(var)) or self._states.get(id(var)) for var in equation.outvars]
            if any(found) or (self._states and primitive_name(equation) in _HOLDING):
                for atom, layout in zip(equation.invars, self._operands(equation, found), strict=False):
                    self._want(atom, layout)
        return [self._of.get(id(var)) for var in inner.invars]

    def _want(self, atom: Any, layout: _Known) -> None:
        if layout is None or isinstance(atom, Literal):
            return
        known = self._of.setdefault(id(atom), layout)
        if known is not layout and layout.result < known.result and layout.placements == known.placements:
            self._of[id(atom)] = layout

    def _operands(self, equation: Any, results: Sequence[_Known]) -> Sequence[_Known]:
        """Returns what is wanted of the operands of an equation."""
        name = primitive_name(equation)
        if name in CALLS:
            return self._backward(call_jaxpr(equation), results)
        if name == 'cond':
            found = [self._backward(branch, results) for branch in branches(equation)]
            return [None, *[next(filter(None, layouts), None) for layouts in zip(*found, strict=True)]]
        if name in ('scan', 'while'):
            return self._loop(equation, results)
        [layout, *_] = results
        if layout is None:
            return ()
        if name in ELEMENTWISE:  # most equations
            shape = shape_of(equation.outvars[0])
            return [layout if shape_of(atom) == shape else None for atom in equation.invars]
        if name == 'reshape':
            out, old = shape_of(equation.outvars[0]), shape_of(equation.invars[0])
            groups = [(mine[0], theirs[0]) for mine, theirs in reshape_groups(equation)]
            pairs = {new: before for before, new in groups if out[new] == old[before]}
            return [remap_layout(layout, pairs)]
        if name not in _KEEPING:
            return ()
        if name == 'optimization_barrier':
            return results
        sources, out = dim_rule(equation).results[0], shape_of(equation.outvars[0])
        shapes = [*map(shape_of, equation.invars)]
        kept = [
            (i, new, dim)
            for new, places in enumerate(sources)
            for i, dim in places
            if shapes[i][dim] == out[new]
        ]
        return [
            remap_layout(layout, {new: dim for j, new, dim in kept if i == j}) if shape else None
            for i, shape in enumerate(shapes)
        ]

    def _loop(self, equation: Any, results: Sequence[_Known]) -> Sequence[_Known]:
        loop = loop_of(equation)
        stacks = [remap_layout(each, ShiftedDims(-1)) for each in results[loop.carried :]]
        carried = [*results[: loop.carried]]
        behind, sums = carried, self._sums(loop)
        carried = [self._held(x) if i in sums else x for i, x in enumerate(carried)]
        before = loop.constants
        for _ in range(2):  # what is wanted of a carried value is known after one round
            found = self._backward(loop.body, [*carried, *stacks])
            state = found[before : before + loop.carried]
            merged = [one or other for one, other in zip(carried, state, strict=True)]
            if merged == carried:
                break
            carried = merged
        elements = [remap_layout(each, ShiftedDims(1)) for each in found[before + loop.carried :]]
        carried = [behind[i] if i in sums else x for i, x in enumerate(carried)]
        return [*[None] * loop.tested, *found[:before], *carried, *elements]

    def _sums(self, loop: Loop) -> set[int]:
        """Returns which carried values a `scan` only adds to."""
        if loop.test is not None:
            return set()
        reductions = carry_reductions(loop)
        return {i for i in range(loop.carried) if reductions.of(i) == 'sum'}

    def _held(self, layout: _Known) -> _Known:
        """Returns what is wanted of the terms of a sum that is reduced behind a loop.

        Along axes that replicate the state a sum takes no more memory than the state.
        """
        if layout is None:
            return None
        placements = [SUM if self._holds_sums or isinstance(x, Replicate) else x for x in layout.placements]
        return layout._replace(placements=tuple(placements))
