"""Batch-dimension analysis: whether a jaxpr treats each example alone, so that it can run on microbatches.

Each value either has a batch dimension, or is a partial sum over the batch, or is independent of the batch.
Partial sums are added up over microbatches, so only linear operations may follow. When a batch-independent
value is added to a partial sum, exactly one microbatch contributes it. Everything else that depends on
several examples, such as a maximum over the batch, raises `MixesExamples`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from scalax._jax import equations
from scalax._jax.equations import shape_of
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.abstract_interpreter import AbstractInterpreter, LoopValues
from scalax._jaxpr.dim_rules import (
    ALONG_DIM,
    SCATTERS,
    SHAPE_OPS,
    UNKNOWN,
    WINDOW_REDUCTIONS,
    OperandDim,
    Sources,
    dim_rule,
    reshape_groups,
)


class BatchDim(NamedTuple):
    """The batch dimension of an array.

    Attributes:
        dim: the dimension.
        elements_per_example: the number of its elements that belong to one example. It is more than one if
            the dimension merges the examples with others, such as their tokens.
    """

    dim: int
    elements_per_example: int = 1


PARTIAL_SUM: Literal['sum'] = 'sum'
BatchValue = BatchDim | Literal['sum'] | None
"""The batch dimension of a value, or `PARTIAL_SUM`, or None if the value is independent of the batch."""

_SUMS = frozenset({'reduce_sum', 'dot_general', 'conv_general_dilated', 'scatter-add', 'scatter-sub'})
# The groups of a ragged dot depend on all examples, and the body of a shard_map is not analyzed.
_NOT_ANALYZED = frozenset({'ragged_dot_general', 'shard_map'})
_RANDOM = frozenset({'random_bits', 'random_split', 'random_fold_in', 'random_gamma'})
# These combine or reorder the elements along a dimension.
_ACTS_ALONG = ALONG_DIM | WINDOW_REDUCTIONS | {'pad', 'select_and_scatter_add', 'select_and_gather_add'}
# These write updates into a part of the first operand.
_UPDATES = SCATTERS | {'dynamic_update_slice'}
# Jointly linear in all operands, or in the operands with these indices.
_LINEAR_IN_ALL = frozenset({'add', 'add_any', 'sub', 'complex', 'concatenate', 'pad', 'stack'})
_LINEAR_IN = {
    'dynamic_update_slice': (0, 1),
    'select_n': (1, 2),
    **dict.fromkeys(('scatter', 'scatter-add', 'scatter-sub'), (0, 2)),
}
# Linear in either of the operands, but not jointly; and linear in the first operand.
_BILINEAR = frozenset({'mul', 'dot_general', 'conv_general_dilated'})
_PARTS = frozenset({'slice', 'dynamic_slice', 'split', 'unstack', 'real', 'imag'})
_LINEAR = (
    _BILINEAR
    | SHAPE_OPS
    | _PARTS
    | {'neg', 'div', 'rev', 'conj', 'cumsum', 'fft', 'reduce_sum', 'reduce_precision', 'name'}
    | {'sharding_constraint', 'device_put'}
)


_PER_EXAMPLE = 'compute it for each example alone, or outside of the loop'
_LOOKUP_PER_EXAMPLE = (
    'look up in each example alone (jax.vmap, or jnp.take_along_axis), or outside of the loop'
)


class MixesExamples(NotImplementedError):
    """Raised about an equation that does not treat each example alone, or that may not.

    Args:
        equation: the equation.
        reason: what the equation does.
        instead: what to write instead.

    Attributes:
        calls: the equations whose jaxprs contain the equation, from the innermost one outwards.
    """

    def __init__(self, equation: Any, reason: str, instead: str = _PER_EXAMPLE) -> None:
        super().__init__(reason)
        self.equation, self.instead = equation, instead
        self.calls: list[Any] = []


def jointly_linear_operands(equation: Any) -> Sequence[int]:
    """Returns the indices of the operands in which an equation is jointly linear, like a sum in its terms."""
    name = primitive_name(equation)
    return _LINEAR_IN.get(name, range(len(equation.invars)) if name in _LINEAR_IN_ALL else ())


def reduced_dims(equation: Any) -> Sequence[Sources]:
    """Returns the groups of operand dimensions that an equation contracts or reduces together.

    A scatter reduces its updates: it sums them, or takes the largest or smallest, at each index.
    """
    if primitive_name(equation) not in ('scatter-add', 'scatter-sub', 'scatter-max', 'scatter-min'):
        return dim_rule(equation).reduced
    numbers, (_, indices, updates) = equations.scatter_dims(equation), map(shape_of, equation.invars)
    scattered = [dim for dim in range(len(updates)) if dim not in numbers.update_window_dims]
    pairs = zip(range(len(indices) - 1), scattered, strict=True)
    return [((1, i), (2, j)) for i, j in pairs if i not in numbers.scatter_indices_batching_dims]


class BatchDimAnalysis(AbstractInterpreter[BatchValue]):
    """Finds the batch dimensions of the values of a jaxpr.

    Args:
        count: the number of examples in the batch.

    Attributes:
        count: the number of examples in the batch.
    """

    def __init__(self, count: int) -> None:
        super().__init__(bottom=None)
        self.count, self._control_flow = count, None

    def record(self, values: dict[int, BatchValue]) -> None:
        """Records nothing, because one jaxpr may be called with and without examples."""

    def eval_equation(self, equation: Any, operands: Sequence[BatchValue]) -> Sequence[BatchValue]:
        try:
            return super().eval_equation(equation, operands)
        except MixesExamples as error:
            error.calls.append(equation)
            raise

    def eval_primitive(
        self, name: str, equation: Any, operands: Sequence[BatchValue]
    ) -> Sequence[BatchValue]:
        if name in ('optimization_barrier', 'device_put'):
            return operands
        if PARTIAL_SUM in operands:
            self._check_linear(name, equation, operands)
            return [PARTIAL_SUM] * len(equation.outvars)
        batch_dims = {i: value for i, value in enumerate(operands) if isinstance(value, BatchDim)}
        elements_per_example = {batch_dim.elements_per_example for batch_dim in batch_dims.values()}
        rule = dim_rule(equation)
        if rule is UNKNOWN or name in _NOT_ANALYZED:
            raise MixesExamples(
                equation,
                f'{name} takes examples of the batch, and scalax does not know how it treats them',
                'write it in other operations, or compute it outside of the loop',
            )
        if len(elements_per_example) > 1:
            reason = 'one dimension mixes a batch dimension with a dimension of (example x token)'
            raise MixesExamples(equation, reason)
        if name == 'random_gamma' and 0 not in batch_dims:
            reason = 'random_gamma draws for all examples from one key'
            raise MixesExamples(equation, reason, 'use a key for each example')
        if name in _RANDOM and not equations.draws_per_key(equation):
            reason = 'the examples have keys of a generator that draws for all keys at once'
            raise MixesExamples(equation, reason, "use keys of jax.random.key(seed, impl='threefry2x32')")
        if name == 'reshape':
            return [self._reshaped(equation, batch_dims[0])]
        operand_dims = {(operand, batch_dim.dim) for operand, batch_dim in batch_dims.items()}
        reduced = reduced_dims(equation)
        if name in _SUMS and operand_dims <= {dim for group in reduced for dim in group}:
            if sum(not operand_dims.isdisjoint(group) for group in reduced) > 1:
                raise MixesExamples(equation, 'it sums over the batch twice')
            return [PARTIAL_SUM] * len(equation.outvars)
        return [
            self._result_batch_dim(equation, operand_dims, elements_per_example, var, sources)
            for var, sources in zip(equation.outvars, rule.results, strict=True)
        ]

    def _result_batch_dim(
        self,
        equation: Any,
        operand_dims: set[OperandDim],
        elements_per_example: set[int],
        var: Any,
        result_sources: Sequence[Sources],
    ) -> BatchDim:
        """Returns the batch dimension of a result, which comes from all batch dimensions of the operands."""
        name = primitive_name(equation)
        dims = [i for i, sources in enumerate(result_sources) if not operand_dims.isdisjoint(sources)]
        [size] = {shape_of(equation.invars[operand])[dim] for operand, dim in operand_dims} or {0}
        if (
            len(dims) != 1
            or not operand_dims.issubset(result_sources[dims[0]])
            or shape_of(var)[dims[0]] != size
            or (name in _UPDATES and all(operand == 0 for operand, _ in result_sources[dims[0]]))
            or (name in _ACTS_ALONG and equations.acts_along(equation, dims[0]))
        ):
            instead = _LOOKUP_PER_EXAMPLE if name in ('gather', *_UPDATES) else _PER_EXAMPLE
            raise MixesExamples(equation, f'{name} mixes examples of the batch', instead)
        return BatchDim(dims[0], *elements_per_example)

    def _reshaped(self, equation: Any, batch_dim: BatchDim) -> BatchDim:
        """Returns a batch dimension after a reshape that splits it, or merges it with dimensions after it."""
        shape = shape_of(equation.outvars[0])
        for old_dims, new_dims in reshape_groups(equation):
            if old_dims[0] == batch_dim.dim and shape[new_dims[0]] % self.count == 0:
                return BatchDim(new_dims[0], shape[new_dims[0]] // self.count)
        raise MixesExamples(
            equation,
            'reshape reorders the batch dimension, or splits it',
            'keep the batch in one dimension, in front of the dimensions that are merged with it',
        )

    def _check_linear(self, name: str, equation: Any, operands: Sequence[BatchValue]) -> None:
        """Raises `MixesExamples` unless an equation is linear in its operands that are partial sums."""
        sums = {i for i, value in enumerate(operands) if value == PARTIAL_SUM}
        is_linear = sums.issubset(jointly_linear_operands(equation)) or (
            name in _LINEAR and (sums == {0} or (name in _BILINEAR and len(sums) == 1))
        )
        if name in ('convert_element_type', 'div'):
            old_dtype, new_dtype = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
            is_integer = jnp.issubdtype(old_dtype, jnp.integer)
            # A division rounds integers, which their sum was not. Small integers may have wrapped around, and
            # unsigned ones below zero.
            is_signed = jnp.issubdtype(old_dtype, jnp.signedinteger)
            may_wrap = is_integer and not (is_signed and jnp.iinfo(old_dtype).bits >= 32)
            is_linear &= jnp.issubdtype(new_dtype, jnp.inexact) and not may_wrap
        if not is_linear or any(isinstance(value, BatchDim) for value in operands):
            raise MixesExamples(
                equation,
                f'{name} uses a batch-wide sum, but a microbatch only has a partial sum',
                'sum within each example, or sum outside of the loop',
            )

    def join(self, values: Sequence[BatchValue]) -> BatchValue:
        distinct = {*values} - {None}
        if len(distinct) > 1:
            raise MixesExamples(
                self._control_flow,
                'one value has the batch in different dimensions, or is a batch-wide sum elsewhere',
                'keep the batch in one dimension, and batch-wide sums in values of their own',
            )
        return distinct.pop() if distinct else None

    def element_of(self, stack: BatchValue) -> BatchValue:
        if not isinstance(stack, BatchDim):
            return stack
        if stack.dim == 0:
            reason = 'a loop runs over the batch dimension'
            raise MixesExamples(self._control_flow, reason, 'run it on all examples at once (jax.vmap)')
        return stack._replace(dim=stack.dim - 1)

    def stack_of(self, element: BatchValue) -> BatchValue:
        return element._replace(dim=element.dim + 1) if isinstance(element, BatchDim) else element

    def eval_branches(self, equation: Any, operands: Sequence[BatchValue]) -> Sequence[BatchValue]:
        self._control_flow = equation
        return super().eval_branches(equation, operands)

    def loop_fixpoint(self, equation: Any, operands: Sequence[BatchValue]) -> LoopValues[BatchValue]:
        self._control_flow = equation
        return super().loop_fixpoint(equation, operands)

    def control_dependence(
        self, equation: Any, predicate: Callable[[], BatchValue], results: Sequence[BatchValue]
    ) -> Sequence[BatchValue]:
        if predicate() is None:
            return results
        if primitive_name(equation) == 'cond':
            reason = 'the branch of `cond` depends on a batch-wide sum'
            raise MixesExamples(equation, reason, 'choose the branch outside of the loop')
        reason = 'the number of iterations of a loop depends on the batch'
        raise MixesExamples(equation, reason, 'run it a fixed number of times')
