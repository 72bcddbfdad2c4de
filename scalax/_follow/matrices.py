"""Functions of a matrix, such as updates of optimizers that multiply matrices, spread over devices.

Muon multiplies the momentum of each weight with itself, many times. Of matrices in parts, the compiler
gathers most in each product, and much is computed on every device. An expert gives each device whole
matrices: stacks of them move by an all-to-all, and back.

A function of a matrix begins with one value, its root, and takes in scalars besides. Functions that compute
the same become one, of a stack of their roots: of three weights of 32 layers, each of 64 devices gets two
matrices at most, and not one of each weight.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from scalax._follow.experts import Stored
from scalax._follow.trail import LOST, Trail, Trails, axes_of, closed_spec_of, merged
from scalax._follow.types import Arguments
from scalax._jax.equations import OWN_GRADIENTS, equations, jaxprs_in, loop_of, opened, shape_of, size_of
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import Rewriter, equation_if_mapped, replaced, run
from scalax._jaxprs.dims import multiplications
from scalax._jaxprs.machine_balance import PER_BYTE, PER_OPERATION
from scalax._jaxprs.matrix_functions import Function, functions_of_matrices, is_late
from scalax._jaxprs.other_rows import Known, OnOtherRows
from scalax._jaxprs.rows import Rows, RowsOf

_BEGIN = 2e-5  # the latency of two all-to-alls, in seconds


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
        super().__init__(lambda equation: equation)
        self._whole, self._arguments, self._mesh = whole, arguments, mesh
        self._trails = Trails(dict(mesh.shape), arguments.batch_axes)
        pairs = zip(opened(whole).invars, arguments.trails, strict=False)
        self._shapes = {shape_of(var) for var, trail in pairs if not self._trails.has_rows(trail)}

    def jaxpr(self, jaxpr: Any) -> Any:
        """The jaxpr, open or closed, with functions of matrices spread."""
        groups: dict[Any, list[Function]] = {}
        for each in functions_of_matrices(jaxpr, self._shapes):
            groups.setdefault(each.kind, []).append(each)
        merged = [(equation, group) for group in groups.values() if (equation := self._one_of(group))]
        return super().jaxpr(_replaced(jaxpr, merged) if merged else jaxpr)

    @functools.cached_property
    def _stored(self) -> Stored:
        """Where weights are, and what is computed of them."""
        layouts = [
            LOST if self._trails.has_rows(mine) else merged((mine, stored), len(mine or stored))
            for mine, stored in zip(self._arguments.trails, self._arguments.stored, strict=True)
        ]
        return Stored(self._whole, layouts, self._trails, ())

    def _layout(self, function: Function) -> Trail:
        """Where the root of a function is: as its weight. A matrix gets a dimension in front."""
        layout = self._stored.of(function.root) or ((),) * len(shape_of(function.root))
        return layout if function.is_stack else ((), *layout)

    def _placed(self, x: Any, layout: Trail) -> Any:
        """A value with a layout, if it is one of its shape."""
        if len(layout) != x.ndim or self._trails.possible(layout, x.shape) != layout:
            return x
        spec = closed_spec_of(layout, x.ndim)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, spec))

    def _one_of(self, group: Sequence[Function]) -> Any:
        """One equation that computes a group of functions on whole matrices.

        None if that does not pay, or if one of them mixes matrices, or has a primitive that JAX does not map.
        """
        first, layouts = group[0], [*map(self._layout, group)]
        layout = max(layouts, key=lambda each: len(list(filter(None, each))))
        sharding = axes_of(layout)
        axes = [axis for axis in self._mesh.axis_names if axis in (sharding or self._arguments.batch_axes)]
        devices = self._trails.shards(axes)
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
            results = _of_stack(first, stack, free)
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
        return equation_if_mapped(jax.jit(spread), first.equations[-1], operands, outputs)

    def _way(self, layout: Trail) -> Iterator[Trail]:
        """Where a stack is on its way to whole matrices: one dimension after the other, in the mesh's order.

        The compiler would gather it if two moved at once.
        """
        order = [*self._mesh.axis_names]
        for axes in sorted(filter(None, layout), key=lambda axes: order.index(axes[0])):
            layout = ((*layout[0], *axes), *[() if each == axes else each for each in layout[1:]])
            yield layout


def _of_stack(function: Function, stack: Any, free: Sequence[Any]) -> Sequence[Any]:
    """The results of a function, for a stack of any size: stacks."""
    if not function.is_stack:
        results: Sequence[Any] = jax.vmap(lambda x: run(function.part, [x, *free]))(stack)
        return results
    part, rows = function.part, RowsOf(shape_of(function.root)[0])
    if not OWN_GRADIENTS.isdisjoint(map(primitive_name, equations(part))):
        raise NotImplementedError('a part has a gradient of its own')
    facts = rows.results(part, [Rows(0), *[None] * len(free)])
    dims = [fact.dim for fact in facts if isinstance(fact, Rows) and fact.each == 1]
    if len(dims) < len(facts):
        raise NotImplementedError('a result is one value for all matrices')
    operands = [Known(stack, Rows(0)), *[Known(x, None) for x in free]]
    found = OnOtherRows(rows, len(stack), _share).values(part, operands, facts)
    return [jnp.moveaxis(x, dim, 0) for x, dim in zip(found, dims, strict=True)]


def _share(x: Any, fact: Any) -> Any:
    raise NotImplementedError('a value has elements for each matrix')


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
    operations = moved = 0
    for product, times in _products(function.part):
        values = (*product.invars, *product.outvars)
        operations += times * 2 * multiplications(product)
        moved += times * 2 * min(map(size_of, values)) * product.outvars[0].aval.dtype.itemsize
    own = sum(size_of(var) * var.aval.dtype.itemsize for var in (function.root, *function.results))
    parts = devices if is_stored else 1
    spread = -(-count // devices) * operations / size * PER_OPERATION
    spread += _BEGIN + own * count / size / parts * PER_BYTE
    alone = operations / parts * PER_OPERATION + is_stored * moved * PER_BYTE
    return devices > 1 and spread < count / size * alone


def _products(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """The products of a jaxpr and of those inside it, and how often each is computed."""
    for equation in opened(jaxpr).eqns:
        name = primitive_name(equation)
        if name == 'dot_general':
            yield equation, times
        rounds = loop_of(equation).length or 1 if name == 'scan' else 1
        for inside in jaxprs_in(equation):
            yield from _products(inside, times * rounds)
