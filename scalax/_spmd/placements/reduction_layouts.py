"""The layouts to which partial sums are reduced: the layouts of the state that they become part of.

A gradient is a sum over examples. It is reduced to the layout of its weight, which follows from the results
of the step, or from the state to which it is added (`state_layouts`). The analysis walks a jaxpr backward
from its results, through operations whose operands have the layout of the result.
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
    size_of,
)
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.carry_accumulation import carry_reductions
from scalax._jaxpr.dim_rules import ELEMENTWISE, dim_rule, reshape_groups
from scalax._spmd.placements.layouts import Layout, ShiftedDims, remap_layout
from scalax._spmd.placements.placement import REPLICATE, SUM, Partial, Placements, Replicate, Shard
from scalax._spmd.placements.state_layouts import state_layouts


def reduced_placements(placements: Placements, layout: Layout | None, *, held: bool = False) -> Placements:
    """Returns the placements of a value after its partial sums are reduced to a layout, or to all devices.

    Args:
        placements: the placements of the value.
        layout: the layout; None if it is not known.
        held: whether sums that the layout leaves to an enclosing loop stay partial.
    """
    result = [*placements]
    for i, placement in enumerate(placements):
        if isinstance(placement, Partial):
            target = REPLICATE if layout is None or placement != SUM else layout.placements[i]
            result[i] = REPLICATE if isinstance(target, Partial) and not held else target
    return tuple(result)


# Operations whose operands have the layout of the result, for the dimensions that they share.
_PRESERVES_LAYOUT = (
    ELEMENTWISE
    | {'transpose', 'squeeze', 'broadcast_in_dim', 'pad', 'slice', 'concatenate'}
    | {'optimization_barrier', 'dynamic_update_slice'}
)
# Operations with inner jaxprs.
_HAS_JAXPRS = CALLS.keys() | {'cond', 'scan', 'while'}
_MaybeLayout = Layout | None


class ReductionLayouts:
    """The layout to which each variable of a jaxpr, and of its inner jaxprs, is reduced.

    Args:
        jaxpr: the jaxpr, open or closed.
        results: the layouts of its results; None where any layout is fine.
        arguments: the layouts of its arguments that are sharded state, used for results without a layout.
        holds_sums: whether loops also keep accumulated sums partial along axes that shard the state.
    """

    def __init__(
        self,
        jaxpr: Any,
        results: Sequence[_MaybeLayout],
        arguments: Sequence[_MaybeLayout] = (),
        *,
        holds_sums: bool = False,
    ) -> None:
        self._of: dict[int, Layout] = {}
        self._holds_sums = holds_sums
        self._states = {} if all(results) else state_layouts(jaxpr, arguments)
        self._axes: Sequence[int] | None = None
        self._backward(jaxpr, results)

    def of(self, atom: Any) -> _MaybeLayout:
        """Returns the layout of a variable; None if it is not known."""
        layout = self._of.get(id(atom))
        if layout is None or self._axes is None:
            return layout
        return layout._replace(placements=tuple([layout.placements[i] for i in self._axes]))

    def is_sharded(self, atom: Any) -> bool:
        """Returns whether a variable becomes part of sharded state."""
        layout = self.of(atom)
        return layout is not None and any(isinstance(x, Shard) for x in layout.placements)

    def along(self, axes: Sequence[int]) -> Self:
        """Returns the layouts restricted to some of the axes, which are given by index."""
        other = copy.copy(self)
        other._axes = axes if self._axes is None else [self._axes[i] for i in axes]
        return other

    def _backward(self, jaxpr: Any, results: Sequence[_MaybeLayout]) -> list[_MaybeLayout]:
        """Propagates layouts from the results of a jaxpr backward, and returns those of its arguments."""
        inner_jaxpr = open_jaxpr(jaxpr)
        for var, layout in zip(inner_jaxpr.outvars, results, strict=True):
            self._set(var, layout)
        for equation in reversed(inner_jaxpr.eqns):
            layouts = [self._of.get(id(var)) or self._states.get(id(var)) for var in equation.outvars]
            if any(layouts) or (self._states and primitive_name(equation) in _HAS_JAXPRS):
                for atom, layout in zip(equation.invars, self._operands(equation, layouts), strict=False):
                    self._set(atom, layout)
        return [self._of.get(id(var)) for var in inner_jaxpr.invars]

    def _set(self, atom: Any, layout: _MaybeLayout) -> None:
        if layout is None or isinstance(atom, Literal):
            return
        previous = self._of.setdefault(id(atom), layout)
        if (
            previous is not layout
            and layout.result < previous.result
            and layout.placements == previous.placements
        ):
            self._of[id(atom)] = layout

    def _operands(self, equation: Any, results: Sequence[_MaybeLayout]) -> Sequence[_MaybeLayout]:
        """Returns the layouts of the operands of an equation."""
        name = primitive_name(equation)
        if name in CALLS:
            return self._backward(call_jaxpr(equation), results)
        if name == 'cond':
            branch_layouts = [self._backward(branch, results) for branch in branches(equation)]
            return [
                None,
                *[next(filter(None, layouts), None) for layouts in zip(*branch_layouts, strict=True)],
            ]
        if name in ('scan', 'while'):
            return self._loop(equation, results)
        [layout, *_] = results
        if layout is None:
            return ()
        if name in ELEMENTWISE:  # most equations
            shape = shape_of(equation.outvars[0])
            return [layout if shape_of(atom) == shape else None for atom in equation.invars]
        if name == 'reshape':
            result_shape, operand_shape = shape_of(equation.outvars[0]), shape_of(equation.invars[0])
            groups = [(old_dims[0], new_dims[0]) for old_dims, new_dims in reshape_groups(equation)]
            pairs = {new: before for before, new in groups if result_shape[new] == operand_shape[before]}
            return [remap_layout(layout, pairs)]
        # JAX writes the gradient of a broadcast with sums over dimensions of size 1.
        removes_ones = name == 'reduce_sum' and size_of(equation.invars[0]) == size_of(equation.outvars[0])
        if name not in _PRESERVES_LAYOUT and not removes_ones:
            return ()
        if name == 'optimization_barrier':
            return results
        sources, result_shape = dim_rule(equation).results[0], shape_of(equation.outvars[0])
        shapes = [*map(shape_of, equation.invars)]
        dim_sources = [
            (i, new, dim)
            for new, places in enumerate(sources)
            for i, dim in places
            if shapes[i][dim] == result_shape[new]
        ]
        return [
            remap_layout(layout, {new: dim for j, new, dim in dim_sources if i == j}) if shape else None
            for i, shape in enumerate(shapes)
        ]

    def _loop(self, equation: Any, results: Sequence[_MaybeLayout]) -> Sequence[_MaybeLayout]:
        loop = loop_of(equation)
        ys = [remap_layout(layout, ShiftedDims(-1)) for layout in results[loop.num_carry :]]
        carry = [*results[: loop.num_carry]]
        after_loop, accumulators = carry, self._accumulators(loop)
        carry = [
            self._unreduced_in_loop(layout) if i in accumulators else layout for i, layout in enumerate(carry)
        ]
        num_consts = loop.num_consts
        for _ in range(2):  # the first iteration finds the layouts of all carried values
            argument_layouts = self._backward(loop.body, [*carry, *ys])
            body_carry = argument_layouts[num_consts : num_consts + loop.num_carry]
            merged_carry = [first or second for first, second in zip(carry, body_carry, strict=True)]
            if merged_carry == carry:
                break
            carry = merged_carry
        xs = [
            remap_layout(layout, ShiftedDims(1)) for layout in argument_layouts[num_consts + loop.num_carry :]
        ]
        carry = [after_loop[i] if i in accumulators else layout for i, layout in enumerate(carry)]
        return [*[None] * loop.num_cond_consts, *argument_layouts[:num_consts], *carry, *xs]

    def _accumulators(self, loop: Loop) -> set[int]:
        """Returns the indices of the carried values to which a `scan` only adds."""
        if loop.cond is not None:
            return set()
        reductions = carry_reductions(loop)
        return {i for i in range(loop.num_carry) if reductions.of(i) == 'sum'}

    def _unreduced_in_loop(self, layout: _MaybeLayout) -> _MaybeLayout:
        """Returns the layout of the terms of a sum that is reduced after a loop.

        Along axes that replicate the state, a partial sum takes no more memory than the state.
        """
        if layout is None:
            return None
        placements = [SUM if self._holds_sums or isinstance(x, Replicate) else x for x in layout.placements]
        return layout._replace(placements=tuple(placements))
