"""Functions of a matrix, such as updates of optimizers that multiply matrices, spread over devices.

Muon multiplies the momentum of each weight with itself, many times. Of matrices in parts, the compiler
gathers most in each product, and much is computed on every device. An expert gives each device whole
matrices: stacks of them move by an all-to-all, and back.

A function of a matrix begins with one value, its root, and takes in scalars besides. Functions that compute
the same become one, of a stack of their roots: of three weights of 32 layers, each of 64 devices gets two
matrices at most, and not one of each weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from scalax._follow.experts import Stored
from scalax._follow.functions import Function, functions_of_matrices, is_late
from scalax._follow.seconds import PER_BYTE, PER_OPERATION
from scalax._follow.stacks import NoStackError, run_stacked
from scalax._follow.trail import LOST, Trail, Trails, closed_spec_of, merged
from scalax._follow.types import Arguments
from scalax._follow.updates import within_bounds
from scalax._jax.equations import CALLS, branches, called, loop_of, opened, shape_of, size_of
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import Rewriter, equation_of, replaced, run
from scalax._jaxprs.dims import multiplications

_BEGIN = 2e-5  # two all-to-alls


def spread_matrices(jaxpr: Any, arguments: Arguments, mesh: Mesh | AbstractMesh) -> Any:
    """The jaxpr, whose functions of matrices run on whole ones; the same one if none does.

    Args:
        jaxpr: the jaxpr, open or closed.
        arguments: what is known of its arguments.
        mesh: a mesh of Auto axes. It is in force.
    """
    return _Spreader(jaxpr, arguments, mesh).jaxpr(jaxpr)


class _Spreader(Rewriter):
    """Spreads the functions of matrices of a jaxpr, and of those inside it."""

    def __init__(self, whole: Any, arguments: Arguments, mesh: Mesh | AbstractMesh) -> None:
        super().__init__(within_bounds)  # here, since it sees all equations as they stay
        self._whole, self._arguments, self._mesh = whole, arguments, mesh
        self._trails = Trails(dict(mesh.shape), arguments.batch_axes)
        pairs = zip(opened(whole).invars, arguments.trails, strict=False)
        self._shapes = {shape_of(var) for var, trail in pairs if not self._trails.has_rows(trail)}
        self._stored: Stored | None = None

    def jaxpr(self, jaxpr: Any) -> Any:
        """The jaxpr, open or closed, with functions of matrices spread."""
        groups: dict[Any, list[Function]] = {}
        for each in functions_of_matrices(jaxpr, self._shapes):
            groups.setdefault(each.kind, []).append(each)
        merged = [(equation, group) for group in groups.values() if (equation := self._one_of(group))]
        return super().jaxpr(_replaced(jaxpr, merged) if merged else jaxpr)

    def _layout(self, function: Function) -> Trail:
        """Where the root of a function is: as its weight. A matrix gets a dimension in front."""
        if self._stored is None:
            given = zip(self._arguments.trails, self._arguments.stored, strict=True)
            layouts = [
                LOST if self._trails.has_rows(mine) else merged((mine, stored), len(mine or stored))
                for mine, stored in given
            ]
            self._stored = Stored(self._whole, layouts, self._trails, ())
        shape = shape_of(function.root)
        layout = self._stored.of(function.root) or ((),) * len(shape)
        return layout if function.is_stack else ((), *layout)

    def _placed(self, x: Any, layout: Trail) -> Any:
        """A value with a layout, if it is one of its shape."""
        if len(layout) != x.ndim or self._trails.possible(layout, x.shape) != layout:
            return x
        spec = closed_spec_of(layout, x.ndim)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, spec))

    def _one_of(self, group: Sequence[Function]) -> Any:
        """One equation that computes a group of functions on whole matrices; None if that does not pay."""
        first, layouts = group[0], [*map(self._layout, group)]
        layout = max(layouts, key=lambda each: len(list(filter(None, each))))
        sharding = {axis for dim in layout for axis in dim}
        axes = [axis for axis in self._mesh.axis_names if axis in (sharding or self._arguments.batch_axes)]
        devices = math.prod(self._mesh.shape[axis] for axis in axes)
        size = shape_of(first.root)[0] if first.is_stack else 1
        already = any(each[0] for each in layouts)
        if already or not _pays(first, size * len(group), size, devices, is_stored=bool(sharding)):
            return None
        way = [*self._way(layout)] or [(tuple(axes), *layout[1:])]

        def spread(*operands: Any) -> list[Any]:
            matrices, free = operands[: len(group)], operands[len(group) :]
            if not first.is_stack:
                matrices = tuple([x[None] for x in matrices])
            # As the weights are, or what computes them would be moved.
            parts = [*map(self._placed, matrices, layouts)]
            if missing := -size * len(group) % devices:  # the other devices compute what is not used
                parts.append(jnp.broadcast_to(parts[0][:1], (missing, *parts[0].shape[1:])))
            stack = jnp.concatenate(parts)
            for each in way:
                stack = self._placed(stack, each)
            if first.is_stack:
                pairs = run_stacked(first.part, [(stack, 0), *[(x, None) for x in free]])
                results = [jnp.moveaxis(x, dim, 0) for x, dim in pairs if dim is not None]
            else:
                results = jax.vmap(lambda x: run(first.part, [x, *free]))(stack)
            for each in way[::-1]:
                results = [self._placed(x, each) for x in results]
            own = [
                self._placed(x[i * size : (i + 1) * size], each)
                for i, each in enumerate(layouts)
                for x in results
            ]
            return own if first.is_stack else [x[0] for x in own]

        operands = [*[each.root for each in group], *first.free]
        outputs = [var for each in group for var in each.results]
        call = jax.jit(spread)
        try:
            return equation_of(call, first.equations[-1], operands, outputs)
        except (NoStackError, NotImplementedError):  # or a primitive that JAX does not map
            return None

    def _way(self, layout: Trail) -> Iterator[Trail]:
        """Where a stack is on its way to whole matrices: one dimension after the other, in the mesh's order.

        The compiler would gather it if two moved at once.
        """
        order = [*self._mesh.axis_names]
        for axes in sorted(filter(None, layout), key=lambda axes: order.index(axes[0])):
            layout = ((*layout[0], *axes), *[() if each == axes else each for each in layout[1:]])
            yield layout


def _replaced(jaxpr: Any, merged: Sequence[tuple[Any, Sequence[Function]]]) -> Any:
    """The jaxpr with equations in place of functions. What reads their results comes behind the last one."""
    functions = [function for _, group in merged for function in group]
    gone = {id(each) for function in functions for each in function.equations}
    late = {id(var) for function in functions for var in function.results}
    kept: list[Any] = []
    waiting = [equation for equation, _ in merged]
    left = len(gone)
    for equation in opened(jaxpr).eqns:
        if id(equation) in gone:
            left -= 1
            if not left:
                kept += waiting
        else:
            (waiting if left and is_late(equation, late) else kept).append(equation)
    return replaced(jaxpr, eqns=kept)


def _pays(function: Function, count: int, size: int, devices: int, *, is_stored: bool) -> bool:
    """Whether so many matrices take less time on devices of their own.

    Left alone, the compiler divides the operations of a matrix in parts, and moves the smallest value of each
    product to all devices. A matrix that is whole everywhere is computed everywhere.
    """
    operations, moved = _work(function.part)
    own = sum(size_of(var) * var.aval.dtype.itemsize for var in (function.root, *function.results))
    each = -(-count // devices) * operations / size * PER_OPERATION
    there_and_back = own * count / size * (1 / devices if is_stored else 1) * PER_BYTE
    divided = operations / (devices if is_stored else 1) * PER_OPERATION
    alone = count / size * (divided + is_stored * moved * PER_BYTE)
    return devices > 1 and each + there_and_back + _BEGIN < alone


def _work(jaxpr: Any) -> tuple[int, int]:
    """The operations of all products of a jaxpr, and the bytes of the smallest value of each."""
    operations = moved = 0
    for equation in opened(jaxpr).eqns:
        name, inside, times = primitive_name(equation), (0, 0), 1
        if name == 'dot_general':
            [result] = equation.outvars
            sizes = [*map(size_of, (*equation.invars, result))]
            inside = 2 * multiplications(equation), 2 * min(sizes) * result.aval.dtype.itemsize
        elif name in CALLS:
            inside = _work(called(equation))
        elif name == 'cond':
            inside = max(map(_work, branches(equation)))
        elif name in ('scan', 'while'):
            loop = loop_of(equation)
            inside, times = _work(loop.body), loop.length or 1
        operations, moved = operations + times * inside[0], moved + times * inside[1]
    return operations, moved
