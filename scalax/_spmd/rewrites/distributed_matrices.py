"""Functions of matrices, as in Muon, Shampoo and SOAP, each computed on a device that holds the whole matrix.

A product of a sharded matrix with itself, or its decomposition, takes all of the matrix. On blocks, every
device would gather the matrix for each product, and decompose all matrices. An expert gives each device some
whole matrices: an all-to-all converts a stack of them from blocks of matrices to blocks of the stack, and
another one converts the results back.

A function begins with one value, its root, and takes scalars besides. Where stacks do not divide by the
number of devices, the roots of functions that compute the same become one stack: of three weights of 30
layers, each of 64 devices gets two matrices at most, and not one of each weight.
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

# The latency of two all-to-alls, and of the decomposition of a small matrix, in seconds.
_EXCHANGE, _DECOMPOSITION = 2e-5, 2e-5
# How many times a decomposition multiplies as often as a product of the matrix with itself, at least.
_PRODUCTS_OF_DECOMPOSITION = 10
_OPEN = PartitionSpec.UNCONSTRAINED

MATRIX_PRIMITIVES = DECOMPOSITIONS | {'dot_general'}


def distribute_matrices(jaxpr: Any, facts: StepFacts) -> Any:
    """Returns a jaxpr whose functions of matrices take whole ones; the same jaxpr if it has none."""
    return _Distribution(jaxpr, facts).jaxpr(jaxpr)


class _Distribution(Rewriter):
    """Distributes the functions of matrices of a jaxpr, and of the jaxprs inside it."""

    def __init__(self, jaxpr: Any, facts: StepFacts) -> None:
        super().__init__()
        self._step, self._facts = jaxpr, facts
        self._sizes = dict(facts.mesh.shape)
        self._distributed = set[Any]()
        # The placements of state by its shape; of state that is sharded, if some is.
        self._state: dict[tuple[int, ...], Placements] = {}
        for var, argument in zip(open_jaxpr(jaxpr).invars, facts.arguments, strict=True):
            shape = shape_of(var)
            if argument.is_state and not _is_sharded(self._state.get(shape, ())):
                self._state[shape] = argument.placements

    def jaxpr(self, jaxpr: Any) -> Any:
        """Returns a jaxpr, open or closed, whose functions of matrices are distributed."""
        if jaxpr in self._distributed:
            return jaxpr
        if jaxpr in self._known:
            return self._known[jaxpr]
        groups: dict[Any, list[MatrixFunction]] = {}
        for function in find_matrix_functions(jaxpr, self._state):
            if self._becomes_state(function):
                alone = function.is_stack and shape_of(function.root)[0] % self._devices(function) == 0
                groups.setdefault((function.kind, id(function) if alone else None), []).append(function)
        merged = [(equation, group) for group in groups.values() if (equation := self._merged(group))]
        self._distributed |= {call_jaxpr(equation) for equation, _ in merged}
        return super().jaxpr(_with_merged(jaxpr, merged) if merged else jaxpr)

    @functools.cached_property
    def _wanted(self) -> ReductionLayouts:
        return ReductionLayouts(self._step, self._facts.results)

    def _becomes_state(self, function: MatrixFunction) -> bool:
        """Whether the step returns a function of matrices, or its root, as state: examples have others."""
        is_wanted = any(self._wanted.of(var) is not None for var in (function.root, *function.results))
        return is_wanted and bool(self._placements(function))

    def _placements(self, function: MatrixFunction) -> Placements:
        """The placements of the root: as its weight has, as far as that is known; else none."""
        for var in (function.root, *function.results):
            layout = self._wanted.of(var)
            if layout is not None and shape_of(var) == shape_of(function.root):
                return layout.placements
        return self._state.get(shape_of(function.root), ())

    def _axes(self, function: MatrixFunction) -> list[int]:
        """The batch axes, by number, that shard a root; all of them if none does."""
        sharding = [i for i, x in enumerate(self._placements(function)) if isinstance(x, Shard)]
        return sharding or [*range(len(self._facts.axes))]

    def _devices(self, function: MatrixFunction) -> int:
        return math.prod(self._sizes[self._facts.axes[i]] for i in self._axes(function))

    def _merged(self, group: Sequence[MatrixFunction]) -> Any:
        """Returns one equation that computes a group of functions on whole matrices.

        None if that does not pay, or if one of them mixes matrices, or has a primitive that JAX does not map.
        """
        first = group[0]
        placements, axes, devices = self._placements(first), self._axes(first), self._devices(first)
        size = shape_of(first.root)[0] if first.is_stack else 1
        if first.is_stack and all(_is_dim(placements[i], 0) for i in axes):
            return None
        if not _pays(first, size * len(group), size, devices, is_sharded=_is_sharded(placements)):
            return None
        stacks = tuple([self._facts.axes[i] for i in axes])

        def distributed(*operands: Any) -> list[Any]:
            matrices, scalars = [*operands[: len(group)]], operands[len(group) :]
            if not first.is_stack:
                matrices = [x[None] for x in matrices]
            stack = jnp.concatenate(matrices) if len(matrices) > 1 else matrices[0]
            while missing := -len(stack) % devices:  # the other devices compute what nobody uses
                stack = jnp.concatenate([stack, stack[:missing]])
            stack = self._constrained(stack, [stacks, *[_OPEN] * (stack.ndim - 1)])
            results = _of_stack(first, stack, scalars)
            results = [self._on_blocks(x, stack, placements, first) for x in results]
            if len(stack) > size:
                blocks = [x[i * size : (i + 1) * size] for i in range(len(group)) for x in results]
            else:
                blocks = [*results]
            return blocks if first.is_stack else [x[0] for x in blocks]

        operands = [*[function.root for function in group], *first.scalars]
        outputs = [var for function in group for var in function.results]
        return trace_equation_if_supported(jax.jit(distributed), first.equations[-1], operands, outputs)

    def _on_blocks(self, x: Any, stack: Any, placements: Placements, function: MatrixFunction) -> Any:
        """A result in blocks of matrices: along the dimensions of the root, or else the largest dimension."""
        entries: list[Any] = [(), *[_OPEN] * (x.ndim - 1)]
        for i in self._axes(function):
            placement, axis = placements[i], self._facts.axes[i]
            if not isinstance(placement, Shard):
                continue  # the matrices were replicated, and so are the results
            divisible = [dim for dim in range(1, x.ndim) if x.shape[dim] % self._sizes[axis] == 0]
            dim = placement.dim + (not function.is_stack)
            if x.shape != stack.shape or dim == 0:
                dim = max(divisible, key=lambda dim: x.shape[dim], default=0)
            if dim in divisible:
                entries[dim] = (axis,) if entries[dim] is _OPEN else (*entries[dim], axis)
        return self._constrained(x, entries)

    def _constrained(self, x: Any, entries: Sequence[Any]) -> Any:
        spec = PartitionSpec(*[entry or None if isinstance(entry, tuple) else entry for entry in entries])
        return jax.lax.with_sharding_constraint(x, NamedSharding(self._facts.mesh, spec))


def _is_dim(placement: Any, dim: int) -> bool:
    return isinstance(placement, Shard) and placement.dim == dim


def _is_sharded(placements: Placements) -> bool:
    return not all(isinstance(x, Replicate) for x in placements)


def _of_stack(function: MatrixFunction, stack: Any, scalars: Sequence[Any]) -> Sequence[Any]:
    """Returns the results of a function for a stack of any size: stacks."""
    if not function.is_stack:
        results: Sequence[Any] = jax.vmap(lambda x: eval_jaxpr(function.jaxpr, [x, *scalars]))(stack)
        return results
    part, rows = function.jaxpr, BatchDimAnalysis(shape_of(function.root)[0])
    if not OWN_GRADIENTS.isdisjoint(map(primitive_name, all_equations(part))):
        raise NotImplementedError('a part has a gradient of its own')
    facts = rows.eval_jaxpr(part, [BatchDim(0), *[None] * len(scalars)])
    dims = [fact.dim for fact in facts if isinstance(fact, BatchDim) and fact.elements_per_example == 1]
    if len(dims) < len(facts):
        raise NotImplementedError('a result is one value for all matrices')
    if len(stack) == rows.count and not any(dims):
        return eval_jaxpr(part, [stack, *scalars])
    operands = [TrackedValue(stack, BatchDim(0)), *[TrackedValue(x, None) for x in scalars]]
    results = Rebatcher(rows, len(stack)).eval_jaxpr(part, operands, facts)
    return [jnp.moveaxis(x, dim, 0) for x, dim in zip(results, dims, strict=True)]


def _with_merged(jaxpr: Any, merged: Sequence[tuple[Any, Sequence[MatrixFunction]]]) -> Any:
    """Returns a jaxpr with equations in place of functions. What reads their results comes behind them."""
    functions = [function for _, group in merged for function in group]
    removed = {id(equation) for function in functions for equation in function.equations}
    late = {id(var) for function in functions for var in function.results}
    kept: list[Any] = []
    waiting = [equation for equation, _ in merged]
    left = len(removed)
    for equation in open_jaxpr(jaxpr).eqns:
        if id(equation) in removed:
            left -= 1
            if not left:
                kept += waiting
        else:
            (waiting if left and propagate_dependence(equation, late) else kept).append(equation)
    return replace_jaxpr(jaxpr, eqns=kept)


def _pays(function: MatrixFunction, count: int, size: int, devices: int, *, is_sharded: bool) -> bool:
    """Whether so many matrices take less time if each device computes some of them.

    On blocks, products divide their operations, and send their smallest value to all devices. Every device
    computes what is replicated, and all decompositions.
    """
    products = decompositions = moved = 0.0
    for equation, times in _costly(function.jaxpr):
        if primitive_name(equation) == 'dot_general':
            values = (*equation.invars, *equation.outvars)
            products += times * 2 * count_multiplications(equation) * SECONDS_PER_FLOP
            moved += times * 2 * min(map(size_of, values)) * equation.outvars[0].aval.dtype.itemsize
        else:
            *stack, rows, columns = shape_of(equation.invars[0])
            operations = _PRODUCTS_OF_DECOMPOSITION * rows * columns * min(rows, columns)
            decompositions += times * math.prod(stack) * (_DECOMPOSITION + operations * SECONDS_PER_FLOP)
    ends = sum(size_of(var) * var.aval.dtype.itemsize for var in (function.root, *function.results))
    parts = devices if is_sharded else 1
    distributed = -(-count // devices) * (products + decompositions) / size
    distributed += _EXCHANGE + ends * count / size / parts * SECONDS_PER_BYTE
    on_blocks = products / parts + decompositions + is_sharded * moved * SECONDS_PER_BYTE
    return devices > 1 and distributed < count / size * on_blocks


def _costly(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """The products and decompositions of a jaxpr and of those inside it, and how often each is computed."""
    for equation in open_jaxpr(jaxpr).eqns:
        name = primitive_name(equation)
        if name in MATRIX_PRIMITIVES:
            yield equation, times
        rounds = loop_of(equation).length or 1 if name == 'scan' else 1
        for inside in inner_jaxprs(equation):
            yield from _costly(inside, times * rounds)
