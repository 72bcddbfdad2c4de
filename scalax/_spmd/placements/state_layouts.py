"""The layouts of values that are computed from state, dimension by dimension.

The moments of an optimizer are stored behind a decay as before it. A gradient that is added to them is wanted
in their layout. So the pass goes forward from the arguments of a step, through what keeps dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scalax._jax.equations import CALLS, Literal, branches, call_jaxpr, loop_of, open_jaxpr, shape_of
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.dim_rules import ELEMENTWISE, dim_rule
from scalax._spmd.placements.layouts import Layout, ShiftedDims, remap_layout

_MOVING = frozenset(('transpose', 'squeeze'))
_Known = Layout | None


def state_layouts(jaxpr: Any, arguments: Sequence[_Known]) -> Mapping[int, Layout]:
    """Returns the layouts of the variables, by id, of a jaxpr and of those inside it.

    Args:
        jaxpr: the jaxpr, open or closed.
        arguments: the layouts of its arguments; None of those that are not state in blocks.
    """
    found: dict[int, Layout] = {}
    if any(arguments):
        _forward(found, jaxpr, arguments)
    return found


def _forward(known: dict[int, Layout], jaxpr: Any, arguments: Sequence[_Known]) -> list[_Known]:
    """Takes note of the layouts in a jaxpr, and returns those of its results."""
    inner = open_jaxpr(jaxpr)
    _note(known, inner.invars, arguments)
    for equation in inner.eqns:
        operands = [known.get(id(atom)) for atom in equation.invars]
        if any(operands):
            _note(known, equation.outvars, _results(known, equation, operands))
    return [known.get(id(atom)) for atom in inner.outvars]


def _note(known: dict[int, Layout], atoms: Sequence[Any], layouts: Sequence[_Known]) -> None:
    for atom, layout in zip(atoms, layouts, strict=False):
        if layout is not None and not isinstance(atom, Literal):
            known.setdefault(id(atom), layout)


def _results(known: dict[int, Layout], equation: Any, operands: Sequence[_Known]) -> Sequence[_Known]:
    """Returns the layouts of the results of an equation."""
    name = primitive_name(equation)
    if name in ELEMENTWISE:  # most equations
        shape = shape_of(equation.outvars[0])
        alike = (
            x for x, atom in zip(operands, equation.invars, strict=True) if x and shape_of(atom) == shape
        )
        return [next(alike, None)]
    if name in CALLS:
        return _forward(known, call_jaxpr(equation), operands)
    if name == 'cond':
        found = [_forward(known, branch, operands[1:]) for branch in branches(equation)]
        return [next(filter(None, layouts), None) for layouts in zip(*found, strict=True)]
    if name in ('scan', 'while'):
        loop = loop_of(equation)
        constants, carried, stacks = loop.parts(operands)
        elements = [remap_layout(x, ShiftedDims(-1)) for x in stacks]
        results = _forward(known, loop.body, [*constants, *carried, *elements])
        return [*results[: loop.carried], *[remap_layout(x, ShiftedDims(1)) for x in results[loop.carried :]]]
    if name == 'optimization_barrier':
        return operands
    if name in _MOVING:
        sources = dim_rule(equation).results[0]
        return [
            remap_layout(operands[0], {dim: new for new, places in enumerate(sources) for _, dim in places})
        ]
    return ()
