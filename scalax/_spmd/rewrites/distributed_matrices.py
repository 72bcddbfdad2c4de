"""Distribution of matrix functions, as in Muon, Shampoo and SOAP: each matrix goes to one device.

A product of a sharded matrix with itself, or its decomposition, needs the entire matrix. On local shards,
every device would gather the matrix for each product, and all devices would compute all decompositions.
Instead, each device gets some entire matrices: an all-to-all reshards a stack of matrices from shards of the
matrices to shards of the stack, and another one reshards the results.

A matrix function has one matrix argument, its root, and possibly scalars. If stacks are not divisible by the
number of devices, the roots of equal functions are concatenated to one stack: of three weights with 30 layers
each, each of 64 devices gets at most two matrices, instead of one of each weight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from scalax._jax.equations import (
    OWN_GRADIENTS,
    all_equations,
    call_jaxpr,
    inner_jaxprs,
    loop_of,
    open_jaxpr,
    shape_of,
    size_of,
)
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import Rewriter, eval_jaxpr, replace_jaxpr, trace_equation_if_supported
from scalax._jaxpr.batch_dims import BatchDim, BatchDimAnalysis
from scalax._jaxpr.dim_rules import DECOMPOSITIONS, count_multiplications
from scalax._jaxpr.machine_balance import SECONDS_PER_BYTE, SECONDS_PER_FLOP
from scalax._jaxpr.matrix_functions import MatrixFunction, find_matrix_functions, propagate_dependence
from scalax._jaxpr.rebatch import Rebatcher, TrackedValue
from scalax._spmd.placements.placement import Placements, Replicate, Shard
from scalax._spmd.placements.reduction_layouts import ReductionLayouts
from scalax._spmd.rewrites.facts import StepFacts

# The latencies, in seconds, of two all-to-alls, and of the decomposition of a small matrix.
_EXCHANGE_LATENCY, _DECOMPOSITION_LATENCY = 2e-5, 2e-5
# A lower bound for the cost of a decomposition, in products of the matrix with itself.
_MATMULS_PER_DECOMPOSITION = 10
_UNCONSTRAINED = PartitionSpec.UNCONSTRAINED

MATRIX_PRIMITIVES = DECOMPOSITIONS | {'dot_general'}


def distribute_matrices(jaxpr: Any, facts: StepFacts) -> Any:
    """Distributes the matrix functions of a jaxpr over devices. Returns the same jaxpr if it has none."""
    return _Distribution(jaxpr, facts).jaxpr(jaxpr)


class _Distribution(Rewriter):
    """Distributes the matrix functions of a jaxpr and of its inner jaxprs."""

    def __init__(self, jaxpr: Any, facts: StepFacts) -> None:
        super().__init__()
        self._step, self._facts = jaxpr, facts
        self._sizes = dict(facts.mesh.shape)
        self._distributed = set[Any]()
        # The placements of state by its shape, preferably of sharded state.
        self._state: dict[tuple[int, ...], Placements] = {}
        for var, argument in zip(open_jaxpr(jaxpr).invars, facts.arguments, strict=True):
            shape = shape_of(var)
            if argument.is_state and not _is_sharded(self._state.get(shape, ())):
                self._state[shape] = argument.placements

    def jaxpr(self, jaxpr: Any) -> Any:
        """Returns a jaxpr, open or closed, with distributed matrix functions."""
        if jaxpr in self._distributed:
            return jaxpr
        if jaxpr in self._rewritten:
            return self._rewritten[jaxpr]
        groups: dict[Any, list[MatrixFunction]] = {}
        for function in find_matrix_functions(jaxpr, self._state):
            if self._becomes_state(function):
                divides = function.is_stack and shape_of(function.root)[0] % self._num_devices(function) == 0
                groups.setdefault((function.kind, id(function) if divides else None), []).append(function)
        merged = [(equation, group) for group in groups.values() if (equation := self._merge(group))]
        self._distributed |= {call_jaxpr(equation) for equation, _ in merged}
        return super().jaxpr(_with_merged(jaxpr, merged) if merged else jaxpr)

    @functools.cached_property
    def _layouts(self) -> ReductionLayouts:
        return ReductionLayouts(self._step, self._facts.results)

    def _becomes_state(self, function: MatrixFunction) -> bool:
        """Whether the root or a result of a matrix function becomes state. Functions of examples do not."""
        is_state = any(self._layouts.of(var) is not None for var in (function.root, *function.results))
        return is_state and bool(self._placements(function))

    def _placements(self, function: MatrixFunction) -> Placements:
        """Returns the placements of the root, which are those of its weight; empty if it is not known."""
        for var in (function.root, *function.results):
            layout = self._layouts.of(var)
            if layout is not None and shape_of(var) == shape_of(function.root):
                return layout.placements
        return self._state.get(shape_of(function.root), ())

    def _root_axes(self, function: MatrixFunction) -> list[int]:
        """Returns the indices of the batch axes that shard a root; of all batch axes if none does."""
        sharding = [i for i, x in enumerate(self._placements(function)) if isinstance(x, Shard)]
        return sharding or [*range(len(self._facts.axes))]

    def _num_devices(self, function: MatrixFunction) -> int:
        return math.prod(self._sizes[self._facts.axes[i]] for i in self._root_axes(function))

    def _merge(self, group: Sequence[MatrixFunction]) -> Any:
        """Returns one equation that computes a group of equal matrix functions on distributed matrices.

        Returns None if this takes longer, or if a function mixes matrices or has a primitive without a
        batching rule.
        """
        first = group[0]
        placements, axes, devices = self._placements(first), self._root_axes(first), self._num_devices(first)
        size = shape_of(first.root)[0] if first.is_stack else 1
        if first.is_stack and all(_is_dim(placements[i], 0) for i in axes):
            return None
        if not _is_faster(first, size * len(group), size, devices, is_sharded=_is_sharded(placements)):
            return None
        stack_axes = tuple([self._facts.axes[i] for i in axes])

        def distributed(*operands: Any) -> list[Any]:
            matrices, scalars = [*operands[: len(group)]], operands[len(group) :]
            if not first.is_stack:
                matrices = [x[None] for x in matrices]
            stack = jnp.concatenate(matrices) if len(matrices) > 1 else matrices[0]
            while missing := -len(stack) % devices:  # pad to the number of devices
                stack = jnp.concatenate([stack, stack[:missing]])
            stack = self._constrained(stack, [stack_axes, *[_UNCONSTRAINED] * (stack.ndim - 1)])
            results = _apply_to_stack(first, stack, scalars)
            results = [self._reshard_result(x, stack, placements, first) for x in results]
            if len(stack) > size:
                blocks = [x[i * size : (i + 1) * size] for i in range(len(group)) for x in results]
            else:
                blocks = [*results]
            return blocks if first.is_stack else [x[0] for x in blocks]

        operands = [*[function.root for function in group], *first.scalars]
        outputs = [var for function in group for var in function.results]
        return trace_equation_if_supported(jax.jit(distributed), first.equations[-1], operands, outputs)

    def _reshard_result(self, x: Any, stack: Any, placements: Placements, function: MatrixFunction) -> Any:
        """Reshards a result to shards of matrices: along the dimensions of the root, or the largest one."""
        entries: list[Any] = [(), *[_UNCONSTRAINED] * (x.ndim - 1)]
        for i in self._root_axes(function):
            placement, axis = placements[i], self._facts.axes[i]
            if not isinstance(placement, Shard):
                continue  # the results are replicated like the matrices
            divisible = [dim for dim in range(1, x.ndim) if x.shape[dim] % self._sizes[axis] == 0]
            dim = placement.dim + (not function.is_stack)
            if x.shape != stack.shape or dim == 0:
                dim = max(divisible, key=lambda dim: x.shape[dim], default=0)
            if dim in divisible:
                entries[dim] = (axis,) if entries[dim] is _UNCONSTRAINED else (*entries[dim], axis)
        return self._constrained(x, entries)

    def _constrained(self, x: Any, entries: Sequence[Any]) -> Any:
        spec = PartitionSpec(*[entry or None if isinstance(entry, tuple) else entry for entry in entries])
        return jax.lax.with_sharding_constraint(x, NamedSharding(self._facts.mesh, spec))


def _is_dim(placement: Any, dim: int) -> bool:
    return isinstance(placement, Shard) and placement.dim == dim


def _is_sharded(placements: Placements) -> bool:
    return not all(isinstance(x, Replicate) for x in placements)


def _apply_to_stack(function: MatrixFunction, stack: Any, scalars: Sequence[Any]) -> Sequence[Any]:
    """Applies a matrix function to a stack of matrices of another size."""
    if not function.is_stack:
        results: Sequence[Any] = jax.vmap(lambda x: eval_jaxpr(function.jaxpr, [x, *scalars]))(stack)
        return results
    part, rows = function.jaxpr, BatchDimAnalysis(shape_of(function.root)[0])
    if not OWN_GRADIENTS.isdisjoint(map(primitive_name, all_equations(part))):
        raise NotImplementedError('a part has a gradient of its own')
    batch_values = rows.eval_jaxpr(part, [BatchDim(0), *[None] * len(scalars)])
    dims = [
        batch_value.dim
        for batch_value in batch_values
        if isinstance(batch_value, BatchDim) and batch_value.elements_per_example == 1
    ]
    if len(dims) < len(batch_values):
        raise NotImplementedError('a result is one value for all matrices')
    if len(stack) == rows.count and not any(dims):
        return eval_jaxpr(part, [stack, *scalars])
    operands = [TrackedValue(stack, BatchDim(0)), *[TrackedValue(x, None) for x in scalars]]
    results = Rebatcher(rows, len(stack)).eval_jaxpr(part, operands, batch_values)
    return [jnp.moveaxis(x, dim, 0) for x, dim in zip(results, dims, strict=True)]


def _with_merged(jaxpr: Any, merged: Sequence[tuple[Any, Sequence[MatrixFunction]]]) -> Any:
    """Returns a jaxpr with merged equations in place of matrix functions."""
    functions = [function for _, group in merged for function in group]
    removed = {id(equation) for function in functions for equation in function.equations}
    late = {id(var) for function in functions for var in function.results}
    new_equations: list[Any] = []
    waiting = [equation for equation, _ in merged]
    num_removed_left = len(removed)
    for equation in open_jaxpr(jaxpr).eqns:
        if id(equation) in removed:
            num_removed_left -= 1
            if not num_removed_left:
                new_equations += waiting
        elif num_removed_left and propagate_dependence(equation, late):
            waiting.append(equation)
        else:
            new_equations.append(equation)
    return replace_jaxpr(jaxpr, eqns=new_equations)


def _is_faster(function: MatrixFunction, count: int, size: int, devices: int, *, is_sharded: bool) -> bool:
    """Whether distributing matrices over devices takes less time than computing on local shards.

    On local shards, devices share the FLOPs of matmuls, and gather their smallest operand or result. Every
    device computes all decompositions, and, if the matrices are replicated, everything.

    Args:
        function: the matrix function.
        count: the number of matrices.
        size: the number of matrices in the stack of the function.
        devices: the number of devices.
        is_sharded: whether the matrices are sharded.
    """
    matmul_seconds = decomposition_seconds = gathered_bytes = 0.0
    for equation, trip_count in _costly_equations(function.jaxpr):
        if primitive_name(equation) == 'dot_general':
            values = (*equation.invars, *equation.outvars)
            matmul_seconds += trip_count * 2 * count_multiplications(equation) * SECONDS_PER_FLOP
            gathered_bytes += (
                trip_count * 2 * min(map(size_of, values)) * equation.outvars[0].aval.dtype.itemsize
            )
        else:
            *stack, rows, columns = shape_of(equation.invars[0])
            operations = _MATMULS_PER_DECOMPOSITION * rows * columns * min(rows, columns)
            decomposition_seconds += (
                trip_count * math.prod(stack) * (_DECOMPOSITION_LATENCY + operations * SECONDS_PER_FLOP)
            )
    ends = sum(size_of(var) * var.aval.dtype.itemsize for var in (function.root, *function.results))
    num_shards = devices if is_sharded else 1
    distributed_seconds = -(-count // devices) * (matmul_seconds + decomposition_seconds) / size
    distributed_seconds += _EXCHANGE_LATENCY + ends * count / size / num_shards * SECONDS_PER_BYTE
    sharded_seconds = (
        matmul_seconds / num_shards + decomposition_seconds + is_sharded * gathered_bytes * SECONDS_PER_BYTE
    )
    return devices > 1 and distributed_seconds < count / size * sharded_seconds


def _costly_equations(jaxpr: Any, trip_count: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields the matmuls and decompositions of a jaxpr and its inner jaxprs, with their trip counts."""
    for equation in open_jaxpr(jaxpr).eqns:
        name = primitive_name(equation)
        if name in MATRIX_PRIMITIVES:
            yield equation, trip_count
        length = loop_of(equation).length or 1 if name == 'scan' else 1
        for inside in inner_jaxprs(equation):
            yield from _costly_equations(inside, trip_count * length)
