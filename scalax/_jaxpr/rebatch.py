"""Evaluation of a jaxpr at another batch size than it was traced for.

The jaxpr must treat each example alone (`batch_dims`). Its shapes contain the traced number of examples. A
value with a batch dimension is computed at the new size, and a batch-independent value as it was traced. If
a batch-independent value meets examples along a dimension, it is computed at the new size where that is easy.
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
    """A value, and its batch dimension.

    Attributes:
        value: the value; of the new batch size, if it has a batch dimension.
        batch_value: the batch dimension, `PARTIAL_SUM`, or None for a batch-independent value.
        slice_fn: a function that computes the share of the new examples of a batch-independent value
            directly. None if there is no such function.
    """

    value: Any
    batch_value: BatchValue
    slice_fn: Callable[[BatchDim], Any] | None = None


class Rebatcher:
    """Evaluates jaxprs at another batch size.

    Args:
        analysis: the batch dimension analysis, with the traced number of examples.
        count: the new number of examples.
    """

    def __init__(self, analysis: BatchDimAnalysis, count: int) -> None:
        self._analysis, self._count = analysis, count

    def eval_jaxpr(
        self, jaxpr: Any, operands: Sequence[TrackedValue], batch_values: Sequence[BatchValue]
    ) -> list[Any]:
        """Returns the results of a closed jaxpr in a trace of its own.

        Args:
            jaxpr: the jaxpr.
            operands: its arguments.
            batch_values: the batch dimensions that the results are to have.
        """
        return [*map(self.materialize, self._eval_equations(jaxpr, operands), batch_values)]

    def scan(
        self, equation: Any, operands: Sequence[TrackedValue], batch_values: Sequence[BatchValue]
    ) -> list[Any]:
        """Returns the results of a `scan`.

        Args:
            equation: the `scan`.
            operands: its operands.
            batch_values: the batch dimensions of its results.
        """
        loop = loop_of(equation)
        consts, init, stacks = loop.split(operands)
        carry_batch_values = batch_values[: loop.num_carry]
        x_batch_values = [self._analysis.element_of(stack.batch_value) for stack in stacks]

        def step(carry: Any, xs: Any) -> tuple[Any, Any]:
            body_operands = [
                *_without_slice_fns(consts),
                *map(TrackedValue, carry, carry_batch_values),
                *map(TrackedValue, xs, x_batch_values),
            ]
            result_batch_values = [*carry_batch_values, *[None] * (len(batch_values) - loop.num_carry)]
            results = self.eval_jaxpr(loop.body, body_operands, result_batch_values)
            return results[: loop.num_carry], results[loop.num_carry :]

        first = [*map(self.materialize, init, carry_batch_values)]
        xs = [stack.value for stack in stacks]
        carry, ys = jax.lax.scan(step, first, xs, loop.length, **scan_options(equation))
        return [*carry, *ys]

    def materialize(self, tracked: TrackedValue, batch_value: BatchValue) -> Any:
        """Returns a value with the requested batch dimension.

        Raises:
            NotImplementedError: the value is batch-independent, and has elements for each traced example.
        """
        if tracked.batch_value is not None or batch_value is None:
            return tracked.value
        if tracked.slice_fn and batch_value != PARTIAL_SUM:
            return tracked.slice_fn(batch_value)
        raise NotImplementedError('a batch-independent value has elements for each example')

    def _eval_equations(
        self, jaxpr: Any, operands: Sequence[TrackedValue], in_checkpoint: bool = False
    ) -> list[TrackedValue]:
        inner = open_jaxpr(jaxpr)
        values = {id(var): TrackedValue(value, None) for var, value in constants_of(jaxpr)}
        values.update(zip(map(id, inner.invars), operands, strict=True))

        def read(atom: Any) -> TrackedValue:
            return TrackedValue(atom.val, None) if isinstance(atom, Literal) else values[id(atom)]

        for equation in inner.eqns:
            results = self._eval_equation(equation, [*map(read, equation.invars)], in_checkpoint)
            values.update(zip(map(id, equation.outvars), results, strict=True))
        return [*map(read, inner.outvars)]

    def _eval_equation(
        self, equation: Any, operands: Sequence[TrackedValue], in_checkpoint: bool
    ) -> Sequence[TrackedValue]:
        name, batch_values = primitive_name(equation), [operand.batch_value for operand in operands]
        if name in CALLS:
            # The barriers of an outermost checkpoint are not needed: its forward pass ran in another loop.
            operands = _behind_barrier(equation, operands) if in_checkpoint else operands
            return self._eval_equations(call_jaxpr(equation), operands, in_checkpoint or name == 'remat2')
        values, num_results = [operand.value for operand in operands], len(equation.outvars)
        is_independent = not any(batch_values)
        result_batch_values: Sequence[BatchValue] = (
            [None] * num_results if is_independent else self._analysis.eval_equation(equation, batch_values)
        )
        if name in WITH_JAXPRS:
            evaluate = {'scan': self.scan, 'while': self._while, 'cond': self._cond}[name]
            results = evaluate(equation, operands, result_batch_values)
            return [*map(TrackedValue, results, result_batch_values)]
        if name in ('sharding_constraint', 'device_put'):
            return [*map(TrackedValue, _constrain(equation, values), batch_values)]
        batch_dims = {i: value for i, value in enumerate(batch_values) if isinstance(value, BatchDim)}
        params = dict[str, Any]()
        for i in jointly_linear_operands(equation) if PARTIAL_SUM in result_batch_values else ():
            values[i] = self.materialize(operands[i], PARTIAL_SUM)
        if batch_dims and name != 'optimization_barrier':
            result = result_batch_values[0]
            elements_per_example = next(iter(batch_dims.values())).elements_per_example
            traced_size = self._analysis.count * elements_per_example
            for i, dim in _matching_dims(equation, batch_dims, result):
                if shape_of(equation.invars[i])[dim] == traced_size:
                    values[i] = self.materialize(operands[i], BatchDim(dim, elements_per_example))
            if isinstance(result, BatchDim):
                operand_dim = batch_dims[0].dim if 0 in batch_dims else None
                params = self._resized_params(equation, operand_dim, result)
        slice_fn = self._slice_fn(equation, operands) if is_independent else None
        results = eval_on_ambient_mesh(equation, values, **params)
        return [
            TrackedValue(value, batch_value, slice_fn)
            for value, batch_value in zip(results, result_batch_values, strict=True)
        ]

    def _slice_fn(self, equation: Any, operands: Sequence[TrackedValue]) -> Callable[[BatchDim], Any] | None:
        """Returns a function that computes the share of a batch-independent result from shares of operands.

        Returns None unless that is possible and cheap: for broadcasts and cheap elementwise operations.
        """
        name = primitive_name(equation)
        if name != 'broadcast_in_dim' and name not in CHEAP_ELEMENTWISE:
            return None
        sources, shape = dim_rule(equation).results[0], shape_of(equation.outvars[0])

        @functools.cache
        def slice_fn(batch_dim: BatchDim) -> Any:
            values = [operand.value for operand in operands]
            for i, dim in sources[batch_dim.dim]:
                if shape_of(equation.invars[i])[dim] == shape[batch_dim.dim]:
                    values[i] = self.materialize(operands[i], BatchDim(dim, batch_dim.elements_per_example))
            params = self._resized_params(equation, None, batch_dim)
            return eval_on_ambient_mesh(equation, values, **params)[0]

        return slice_fn

    def _resized_params(self, equation: Any, operand_dim: int | None, batch_dim: BatchDim) -> dict[str, Any]:
        size = self._count * batch_dim.elements_per_example
        operands = [shape_of(atom) for atom in equation.invars[:1]]
        if operand_dim is not None:
            operands = [_resized(shape, operand_dim, size) for shape in operands]
        return resized_params(
            equation, operands, [_resized(shape_of(equation.outvars[0]), batch_dim.dim, size)]
        )

    def _while(
        self, equation: Any, operands: Sequence[TrackedValue], batch_values: Sequence[BatchValue]
    ) -> list[Any]:
        loop = loop_of(equation)
        consts, init, _ = loop.split(operands)

        def cond(carry: Any) -> Any:
            cond_consts = _without_slice_fns(operands[: loop.num_cond_consts])
            carry = map(TrackedValue, carry, batch_values)
            return self.eval_jaxpr(loop.cond, [*cond_consts, *carry], [None])[0]

        def body(carry: Any) -> Any:
            carry = map(TrackedValue, carry, batch_values)
            return self.eval_jaxpr(loop.body, [*_without_slice_fns(consts), *carry], batch_values)

        return jax.lax.while_loop(cond, body, [*map(self.materialize, init, batch_values)])

    def _cond(
        self, equation: Any, operands: Sequence[TrackedValue], batch_values: Sequence[BatchValue]
    ) -> list[Any]:
        operand_batch_values = [operand.batch_value for operand in operands[1:]]

        def branch(jaxpr: Any, *values: Any) -> Any:
            tracked = [*map(TrackedValue, values, operand_batch_values)]
            results = self.eval_jaxpr(jaxpr, tracked, batch_values)
            # XLA rejects branches of which one ends in a sharding constraint.
            return jax.lax.optimization_barrier(results) if results else results

        branches = [functools.partial(branch, jaxpr) for jaxpr in equations.branches(equation)]
        index, *values = [operand.value for operand in operands]
        return jax.lax.switch(index, branches, *values)


def _without_slice_fns(operands: Sequence[TrackedValue]) -> list[TrackedValue]:
    """Returns values that an inner trace closes over, without functions that belong to the outer trace."""
    return [TrackedValue(operand.value, operand.batch_value) for operand in operands]


def _behind_barrier(equation: Any, operands: Sequence[TrackedValue]) -> Sequence[TrackedValue]:
    """Returns the operands of a call, with an optimization barrier where JAX adds one.

    Values with a `slice_fn` have no barrier, because it would need the full value.
    """
    pairs = zip(operands, equations.prevents_cse(equation), strict=True)
    values = {
        i: operand.value
        for i, (operand, needs_barrier) in enumerate(pairs)
        if needs_barrier and operand.slice_fn is None
    }
    if not values:
        return operands
    values = dict(zip(values, jax.lax.optimization_barrier([*values.values()]), strict=True))
    return [operand._replace(value=values.get(i, operand.value)) for i, operand in enumerate(operands)]


def _resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _matching_dims(
    equation: Any, batch_dims: Mapping[int, BatchDim], result: BatchValue
) -> Sequence[OperandDim]:
    """Returns the operand dimensions that become the batch dimension of the result, or are summed with it."""
    if isinstance(result, BatchDim):
        return dim_rule(equation).results[0][result.dim]
    operand_dims = {(operand, batch_dim.dim) for operand, batch_dim in batch_dims.items()}
    return next(group for group in reduced_dims(equation) if not operand_dims.isdisjoint(group))


def _constrain(equation: Any, values: Sequence[Any]) -> list[Any]:
    """Constrains values to the user's shardings, along the mesh axes that are Auto inside a pipeline."""
    result_shardings = equations.sharding_params(equation)[1]
    specs = {i: x.spec for i, x in result_shardings.items() if isinstance(x, NamedSharding)}
    if len(specs) < len(values):
        return eval_on_ambient_mesh(equation, values)
    return [_constrain_auto_axes(value, specs[i]) for i, value in enumerate(values)]


def _constrain_auto_axes(value: Any, user_spec: PartitionSpec) -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    axes = MeshAxes.of(mesh)
    spec = drop_indivisible(only_axes(user_spec, axes.of_type(AxisType.Auto)), value.shape, axes)
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))
