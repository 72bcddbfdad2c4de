"""The layouts of values that are computed from state, dimension by dimension.

The moments of an optimizer have the same layout after a decay as before it, and a gradient that is added to
them is reduced to that layout. The analysis walks a jaxpr forward from the arguments of the step, through
operations that preserve dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scalax._jax.equations import CALLS, Literal, branches, call_jaxpr, loop_of, open_jaxpr, shape_of
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.dim_rules import ELEMENTWISE, dim_rule
from scalax._spmd.placements.layouts import Layout, ShiftedDims, remap_layout

_PERMUTES_DIMS = frozenset(('transpose', 'squeeze'))
_MaybeLayout = Layout | None


def state_layouts(jaxpr: Any, arguments: Sequence[_MaybeLayout]) -> Mapping[int, Layout]:
    """Returns the layouts, by variable id, of the values of a jaxpr and of its inner jaxprs.

    Args:
        jaxpr: the jaxpr, open or closed.
        arguments: the layouts of its arguments; None for arguments that are not sharded state.
    """
    layouts: dict[int, Layout] = {}
    if any(arguments):
        _forward(layouts, jaxpr, arguments)
    return layouts


def _forward(layouts: dict[int, Layout], jaxpr: Any, arguments: Sequence[_MaybeLayout]) -> list[_MaybeLayout]:
    """Records the layouts of the values of a jaxpr, and returns the layouts of its results."""
    inner_jaxpr = open_jaxpr(jaxpr)
    _record(layouts, inner_jaxpr.invars, arguments)
    for equation in inner_jaxpr.eqns:
        operands = [layouts.get(id(atom)) for atom in equation.invars]
        if any(operands):
            _record(layouts, equation.outvars, _results(layouts, equation, operands))
    return [layouts.get(id(atom)) for atom in inner_jaxpr.outvars]


def _record(layouts: dict[int, Layout], atoms: Sequence[Any], atom_layouts: Sequence[_MaybeLayout]) -> None:
    for atom, layout in zip(atoms, atom_layouts, strict=False):
        if layout is not None and not isinstance(atom, Literal):
            layouts.setdefault(id(atom), layout)


def _results(
    layouts: dict[int, Layout], equation: Any, operands: Sequence[_MaybeLayout]
) -> Sequence[_MaybeLayout]:
    """Returns the layouts of the results of an equation."""
    name = primitive_name(equation)
    if name in ELEMENTWISE:  # most equations
        shape = shape_of(equation.outvars[0])
        for layout, atom in zip(operands, equation.invars, strict=True):
            if layout and shape_of(atom) == shape:
                return [layout]
        return ()
    if name in CALLS:
        return _forward(layouts, call_jaxpr(equation), operands)
    if name == 'cond':
        branch_layouts = [_forward(layouts, branch, operands[1:]) for branch in branches(equation)]
        return [
            next(filter(None, result_layouts), None) for result_layouts in zip(*branch_layouts, strict=True)
        ]
    if name in ('scan', 'while'):
        loop = loop_of(equation)
        consts, carry, xs = loop.split(operands)
        elements = [remap_layout(layout, ShiftedDims(-1)) for layout in xs]
        results = _forward(layouts, loop.body, [*consts, *carry, *elements])
        return [
            *results[: loop.num_carry],
            *[remap_layout(layout, ShiftedDims(1)) for layout in results[loop.num_carry :]],
        ]
    if name == 'optimization_barrier':
        return operands
    if name in _PERMUTES_DIMS:
        sources = dim_rule(equation).results[0]
        return [
            remap_layout(operands[0], {dim: new for new, places in enumerate(sources) for _, dim in places})
        ]
    return ()
