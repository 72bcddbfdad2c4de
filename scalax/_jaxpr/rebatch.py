"""Runs a jaxpr that treats each row alone on other rows than it was traced for: fewer of them, or more.

The jaxpr has the number of all rows in it, in shapes. What has rows is computed with as many as there are.
What is the same for all rows is computed as it is, and its rows are taken where it meets others: so a
microbatch gets its own part of what is drawn of a key in the shape of all rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from scalax._core.pytree.partition_specs import MeshAxes, only_axes
from scalax._core.pytree.spec_validation import drop_indivisible
from scalax._jax import equations
from scalax._jax.equations import (
    CALLS,
    WITH_JAXPRS,
    Literal,
    call_jaxpr,
    loop_of,
    open_jaxpr,
    scan_options,
    shape_of,
)
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import constants_of, eval_on_ambient_mesh, resized_params
from scalax._jaxpr.batch_dims import (
    PARTIAL_SUM,
    BatchDim,
    BatchDimAnalysis,
    BatchValue,
    jointly_linear_operands,
    reduced_dims,
)
from scalax._jaxpr.dim_rules import CHEAP_ELEMENTWISE, OperandDim, dim_rule


class TrackedValue(NamedTuple):
    """A value, of other rows if it has any.

    Attributes:
        value: the value.
        fact: what is known of it.
        slice_fn: of what is the same for all rows, what computes its share of these rows alone; None if it is
            taken of all of it.
    """

    value: Any
    fact: BatchValue
    slice_fn: Callable[[BatchDim], Any] | None = None


class Rebatcher:
    """Runs jaxprs on other rows.

    Args:
        rows: where rows are.
        count: how many rows there are instead.
        share: what these rows get of a value that is the same for all: where it has rows, or is a sum.
    """

    def __init__(self, rows: BatchDimAnalysis, count: int, share: Callable[[Any, Any], Any]) -> None:
        self._rows, self._count, self._share = rows, count, share

    def values(self, jaxpr: Any, operands: Sequence[TrackedValue], facts: Sequence[BatchValue]) -> list[Any]:
        """The results of a closed jaxpr, in a trace of their own, with rows where these facts say so."""
        return [*map(self.materialize, self._results(jaxpr, operands), facts)]

    def scan(self, equation: Any, given: Sequence[TrackedValue], found: Sequence[BatchValue]) -> list[Any]:
        """The results of a `scan`, in a trace of their own.

        Args:
            equation: the `scan`.
            given: its operands.
            found: what is known of its results.
        """
        loop = loop_of(equation)
        constants, begun, stacks = loop.split(given)
        state = found[: loop.num_carry]
        rows = [self._rows.element_of(each.fact) for each in stacks]

        def step(values: Any, elements: Any) -> tuple[Any, Any]:
            operands = [
                *_of_outer_trace(constants),
                *map(TrackedValue, values, state),
                *map(TrackedValue, elements, rows),
            ]
            results = self.values(loop.body, operands, [*state, *[None] * (len(found) - loop.num_carry)])
            return results[: loop.num_carry], results[loop.num_carry :]

        first, values = [*map(self.materialize, begun, state)], [each.value for each in stacks]
        carried, stacked = jax.lax.scan(step, first, values, loop.length, **scan_options(equation))
        return [*carried, *stacked]

    def materialize(self, known: TrackedValue, fact: BatchValue) -> Any:
        """A value, or the share of what is the same for all rows, where it has rows or is a sum."""
        if known.fact is not None or fact is None:
            return known.value
        return (
            known.slice_fn(fact) if known.slice_fn and fact != PARTIAL_SUM else self._share(known.value, fact)
        )

    def _results(
        self, jaxpr: Any, operands: Sequence[TrackedValue], in_checkpoint: bool = False
    ) -> list[TrackedValue]:
        inner = open_jaxpr(jaxpr)
        known = {id(var): TrackedValue(value, None) for var, value in constants_of(jaxpr)}
        known.update(zip(map(id, inner.invars), operands, strict=True))

        def read(atom: Any) -> TrackedValue:
            return TrackedValue(atom.val, None) if isinstance(atom, Literal) else known[id(atom)]

        for equation in inner.eqns:
            found = self._equation(equation, [*map(read, equation.invars)], in_checkpoint)
            known.update(zip(map(id, equation.outvars), found, strict=True))
        return [*map(read, inner.outvars)]

    def _equation(
        self, equation: Any, given: Sequence[TrackedValue], in_checkpoint: bool
    ) -> Sequence[TrackedValue]:
        name, facts = primitive_name(equation), [each.fact for each in given]
        if name in CALLS:
            # What an outermost checkpoint computes again was computed in another loop.
            given = _kept_apart(equation, given) if in_checkpoint else given
            return self._results(call_jaxpr(equation), given, in_checkpoint or name == 'remat2')
        values, count = [each.value for each in given], len(equation.outvars)
        found = self._rows.eval_equation(equation, facts) if any(facts) else [None] * count
        if name in WITH_JAXPRS:
            control = {'scan': self.scan, 'while': self._while, 'cond': self._cond}[name]
            return [*map(TrackedValue, control(equation, given, found), found)]
        if name in ('sharding_constraint', 'device_put'):
            return [*map(TrackedValue, _placed(equation, values), facts)]
        rows = {place: fact for place, fact in enumerate(facts) if isinstance(fact, BatchDim)}
        dims, changed = {place: each.dim for place, each in rows.items()}, dict[str, Any]()
        for place in jointly_linear_operands(equation) if PARTIAL_SUM in found else ():
            values[place] = self.materialize(given[place], PARTIAL_SUM)
        if rows and name != 'optimization_barrier':
            out, each = found[0], next(iter(rows.values())).elements_per_example
            for place, dim in _meeting(equation, rows, out):
                if shape_of(equation.invars[place])[dim] == self._rows.count * each:
                    values[place] = self.materialize(given[place], BatchDim(dim, each))
            if isinstance(out, BatchDim):
                changed = self._resized(equation, dims.get(0), out)
        cut = None if any(facts) else self._cut(equation, given)
        return [
            TrackedValue(x, fact, cut)
            for x, fact in zip(eval_on_ambient_mesh(equation, values, **changed), found, strict=True)
        ]

    def _cut(self, equation: Any, given: Sequence[TrackedValue]) -> Callable[[BatchDim], Any] | None:
        """Computes the share of what is the same for all rows, where that needs not all of them.

        What is broadcast along rows needs none, and elements of others need those of their operands.
        """
        name = primitive_name(equation)
        if name != 'broadcast_in_dim' and name not in CHEAP_ELEMENTWISE:
            return None
        dims, shape = dim_rule(equation).results[0], shape_of(equation.outvars[0])

        @functools.cache
        def cut(rows: BatchDim) -> Any:
            values = [each.value for each in given]
            for place, dim in dims[rows.dim]:
                if shape_of(equation.invars[place])[dim] == shape[rows.dim]:
                    values[place] = self.materialize(given[place], BatchDim(dim, rows.elements_per_example))
            return eval_on_ambient_mesh(equation, values, **self._resized(equation, None, rows))[0]

        return cut

    def _resized(self, equation: Any, operand: int | None, rows: BatchDim) -> dict[str, Any]:
        return resized_params(equation, operand, rows.dim, self._count * rows.elements_per_example)

    def _while(self, equation: Any, given: Sequence[TrackedValue], found: Sequence[BatchValue]) -> list[Any]:
        loop = loop_of(equation)
        constants, begun, _ = loop.split(given)

        def test(values: Any) -> Any:
            tested = _of_outer_trace(given[: loop.num_cond_consts])
            return self.values(loop.cond, [*tested, *map(TrackedValue, values, found)], [None])[0]

        def step(values: Any) -> Any:
            return self.values(
                loop.body, [*_of_outer_trace(constants), *map(TrackedValue, values, found)], found
            )

        return jax.lax.while_loop(test, step, [*map(self.materialize, begun, found)])

    def _cond(self, equation: Any, given: Sequence[TrackedValue], found: Sequence[BatchValue]) -> list[Any]:
        facts = [each.fact for each in given[1:]]

        def branch(jaxpr: Any, *values: Any) -> Any:
            results = self.values(jaxpr, [*map(TrackedValue, values, facts)], found)
            # XLA refuses branches of which one ends in a constraint. Those of a gradient may keep nothing.
            return jax.lax.optimization_barrier(results) if results else results

        run = [functools.partial(branch, jaxpr) for jaxpr in equations.branches(equation)]
        index, *operands = [each.value for each in given]
        return jax.lax.switch(index, run, *operands)


def _of_outer_trace(given: Sequence[TrackedValue]) -> list[TrackedValue]:
    """What a trace inside takes of the one around it, without what was cut there."""
    return [TrackedValue(each.value, each.fact) for each in given]


def _kept_apart(equation: Any, given: Sequence[TrackedValue]) -> Sequence[TrackedValue]:
    """The operands of a call, behind a barrier where JAX puts them behind one.

    But for what is cut where it meets rows, which must not be computed in full.
    """
    pairs = zip(given, equations.prevents_cse(equation), strict=True)
    apart = {i: each.value for i, (each, again) in enumerate(pairs) if again and each.slice_fn is None}
    if not apart:
        return given
    values = dict(zip(apart, jax.lax.optimization_barrier([*apart.values()]), strict=True))
    return [each._replace(value=values.get(i, each.value)) for i, each in enumerate(given)]


def _meeting(equation: Any, rows: Mapping[int, BatchDim], out: BatchValue) -> Sequence[OperandDim]:
    """The dimensions of operands that meet where rows are, in a result or in a sum."""
    if isinstance(out, BatchDim):
        return dim_rule(equation).results[0][out.dim]
    places = {(place, fact.dim) for place, fact in rows.items()}
    return next(each for each in reduced_dims(equation) if not places.isdisjoint(each))


def _placed(equation: Any, values: Sequence[Any]) -> list[Any]:
    """Values where the user says, along the mesh axes that are there inside of a pipeline."""
    said = equations.sharding_params(equation)[1]
    specs = {i: each.spec for i, each in said.items() if isinstance(each, NamedSharding)}
    if len(specs) < len(values):
        return eval_on_ambient_mesh(equation, values)
    return [_at(value, specs[i]) for i, value in enumerate(values)]


def _at(value: Any, said: PartitionSpec) -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    axes = MeshAxes.of(mesh)
    there = drop_indivisible(only_axes(said, axes.of_type(AxisType.Auto)), value.shape, axes)
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, there))
