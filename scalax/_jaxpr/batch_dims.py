"""Whether a jaxpr treats each row of its arguments alone, so that it can run on fewer of them, or more.

Of each value it is known whether it has rows, and where; or that it is a sum over rows, which is added up
over microbatches, so that only what is linear may follow; or that it is the same for all rows. Added to a sum
over rows, what is the same for all of them is a sum to which one microbatch adds it. What else depends on
several rows, such as a maximum over them, is refused.
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
    """Where rows are in an array.

    Attributes:
        dim: the dimension.
        each: how many elements of it a row has: more than one where it holds rows and their tokens.
    """

    dim: int
    elements_per_example: int = 1


PARTIAL_SUM: Literal['sum'] = 'sum'
BatchValue = BatchDim | Literal['sum'] | None
"""Where the rows of a value are; that it is a sum over rows; or that it is the same for all of them."""

_SUMS = frozenset({'reduce_sum', 'dot_general', 'conv_general_dilated', 'scatter-add', 'scatter-sub'})
# Rows in groups depend on all of them; what runs on each device is not looked into.
_NOT_ALONE = frozenset({'ragged_dot_general', 'shard_map'})
_DRAW = frozenset({'random_bits', 'random_split', 'random_fold_in', 'random_gamma'})
# Windows, and what sees other elements along a dimension.
_WORKS_ALONG = ALONG_DIM | WINDOW_REDUCTIONS | {'pad', 'select_and_scatter_add', 'select_and_gather_add'}
# These put their updates in some places of the first operand.
_PUTS = SCATTERS | {'dynamic_update_slice'}
# Linear in several operands at once: in all of them, or in these.
_ADD = frozenset({'add', 'add_any', 'sub', 'complex', 'concatenate', 'pad', 'stack'})
_ADDED = {
    'dynamic_update_slice': (0, 1),
    'select_n': (1, 2),
    **dict.fromkeys(('scatter', 'scatter-add', 'scatter-sub'), (0, 2)),
}
# Linear in one operand: in the first one, or in either.
_BILINEAR = frozenset({'mul', 'dot_general', 'conv_general_dilated'})
_PARTS = frozenset({'slice', 'dynamic_slice', 'split', 'unstack', 'real', 'imag'})
_LINEAR = (
    _BILINEAR
    | SHAPE_OPS
    | _PARTS
    | {'neg', 'div', 'rev', 'conj', 'cumsum', 'fft', 'reduce_sum', 'reduce_precision', 'name'}
    | {'sharding_constraint', 'device_put'}
)


_ALONE = 'compute it for each example alone, or outside of the loop'
_EACH_ROW = 'look up in each example alone (jax.vmap, or jnp.take_along_axis), or outside of the loop'


class MixesExamples(NotImplementedError):
    """An equation does not treat each row alone, or that is not known.

    Args:
        equation: the equation.
        why: what it does.
        instead: what to write instead.

    Attributes:
        calls: the equations in whose jaxprs it is, from the innermost one outwards.
    """

    def __init__(self, equation: Any, why: str, instead: str = _ALONE) -> None:
        super().__init__(why)
        self.equation, self.instead = equation, instead
        self.calls: list[Any] = []


def jointly_linear_operands(equation: Any) -> Sequence[int]:
    """The operands that an equation is linear in at once, as a sum is in its terms."""
    name = primitive_name(equation)
    return _ADDED.get(name, range(len(equation.invars)) if name in _ADD else ())


def reduced_dims(equation: Any) -> Sequence[Sources]:
    """The dimensions of operands that are reduced, those that meet together.

    A scatter adds up its updates, or takes the largest or smallest of them, each at what an index says.
    """
    if primitive_name(equation) not in ('scatter-add', 'scatter-sub', 'scatter-max', 'scatter-min'):
        return dim_rule(equation).reduced
    numbers, (_, indices, updates) = equations.scatter_dims(equation), map(shape_of, equation.invars)
    scattered = [dim for dim in range(len(updates)) if dim not in numbers.update_window_dims]
    pairs = zip(range(len(indices) - 1), scattered, strict=True)
    return [((1, i), (2, j)) for i, j in pairs if i not in numbers.scatter_indices_batching_dims]


class BatchDimAnalysis(AbstractInterpreter[BatchValue]):
    """Where the rows of the values of a jaxpr are.

    Args:
        count: how many rows there are.

    Attributes:
        count: the same.
    """

    def __init__(self, count: int) -> None:
        super().__init__(bottom=None)
        self.count, self._at = count, None

    def record(self, facts: dict[int, BatchValue]) -> None:
        """Nothing: a jaxpr may be used for rows and for other values."""

    def eval_equation(self, equation: Any, operands: Sequence[BatchValue]) -> Sequence[BatchValue]:
        try:
            return super().eval_equation(equation, operands)
        except MixesExamples as refused:
            refused.calls.append(equation)
            raise

    def eval_primitive(
        self, name: str, equation: Any, operands: Sequence[BatchValue]
    ) -> Sequence[BatchValue]:
        if name in ('optimization_barrier', 'device_put'):
            return operands
        if PARTIAL_SUM in operands:
            self._check_linear(name, equation, operands)
            return [PARTIAL_SUM] * len(equation.outvars)
        rows = {place: fact for place, fact in enumerate(operands) if isinstance(fact, BatchDim)}
        each = {fact.elements_per_example for fact in rows.values()}
        dims = dim_rule(equation)
        if dims is UNKNOWN or name in _NOT_ALONE:
            raise MixesExamples(
                equation,
                f'{name} takes examples of the batch, and what it does with them is not known',
                'write it in other operations, or compute it outside of the loop',
            )
        if len(each) > 1:
            raise MixesExamples(equation, 'examples meet elements of examples in one dimension')
        if name == 'random_gamma' and 0 not in rows:
            raise MixesExamples(
                equation, 'random_gamma draws for all examples of one key', 'use a key for each example'
            )
        if name in _DRAW and not equations.draws_per_key(equation):
            why = 'keys of examples are of a generator that draws for all of them at once'
            raise MixesExamples(equation, why, "use keys of jax.random.key(seed, impl='threefry2x32')")
        if name == 'reshape':
            return [self._reshaped(equation, rows[0])]
        places = {(place, fact.dim) for place, fact in rows.items()}
        summed = reduced_dims(equation)
        if name in _SUMS and places <= {place for sources in summed for place in sources}:
            if sum(not places.isdisjoint(sources) for sources in summed) > 1:
                raise MixesExamples(equation, 'it sums over the batch twice')
            return [PARTIAL_SUM] * len(equation.outvars)
        return [
            self._alone(equation, places, each, *pair)
            for pair in zip(equation.outvars, dims.results, strict=True)
        ]

    def _alone(
        self, equation: Any, places: set[OperandDim], each: set[int], out: Any, dims: Sequence[Any]
    ) -> BatchDim:
        """The rows of a result, which is where those of the operands are."""
        name = primitive_name(equation)
        found = [i for i, sources in enumerate(dims) if not places.isdisjoint(sources)]
        [size] = {shape_of(equation.invars[place])[dim] for place, dim in places} or {0}
        if (
            len(found) != 1
            or not places.issubset(dims[found[0]])
            or shape_of(out)[found[0]] != size
            or (name in _PUTS and all(place == 0 for place, _ in dims[found[0]]))
            or (name in _WORKS_ALONG and equations.acts_along(equation, found[0]))
        ):
            instead = _EACH_ROW if name in ('gather', *_PUTS) else _ALONE
            raise MixesExamples(equation, f'{name} mixes examples of the batch', instead)
        return BatchDim(found[0], *each)

    def _reshaped(self, equation: Any, rows: BatchDim) -> BatchDim:
        """Rows whose dimension is split, or merged with others after it."""
        shape = shape_of(equation.outvars[0])
        for old, new in reshape_groups(equation):
            if old[0] == rows.dim and shape[new[0]] % self.count == 0:
                return BatchDim(new[0], shape[new[0]] // self.count)
        raise MixesExamples(
            equation,
            'reshape reorders the batch dimension, or splits it',
            'keep the batch in one dimension, in front of what is merged with it',
        )

    def _check_linear(self, name: str, equation: Any, operands: Sequence[BatchValue]) -> None:
        """Raises `MixesExamples` unless sums over rows give what is linear in them."""
        sums = {place for place, fact in enumerate(operands) if fact == PARTIAL_SUM}
        ok = sums.issubset(jointly_linear_operands(equation)) or (
            name in _LINEAR and (sums == {0} or (name in _BILINEAR and len(sums) == 1))
        )
        if name in ('convert_element_type', 'div'):
            before, after = [atom.aval.dtype for atom in (equation.invars[0], equation.outvars[0])]
            is_integer = jnp.issubdtype(before, jnp.integer)
            # Integers are rounded, where sums of them were not; and small ones may have begun anew at zero,
            # as unsigned ones do below it.
            signed = jnp.issubdtype(before, jnp.signedinteger)
            wraps = is_integer and not (signed and jnp.iinfo(before).bits >= 32)
            ok &= jnp.issubdtype(after, jnp.inexact) and not wraps
        if not ok or any(isinstance(fact, BatchDim) for fact in operands):
            raise MixesExamples(
                equation,
                f'{name} takes a sum over the batch, of which a microbatch has a part only',
                'sum within each example, or add up outside of the loop',
            )

    def join(self, facts: Sequence[BatchValue]) -> BatchValue:
        found = {*facts} - {None}
        if len(found) > 1:
            why = 'one value has the batch in a dimension, and has it in another one or is a sum over it'
            raise MixesExamples(self._at, why, 'keep the batch in one dimension, and sums over it apart')
        return found.pop() if found else None

    def element_of(self, stack: BatchValue) -> BatchValue:
        if not isinstance(stack, BatchDim):
            return stack
        if stack.dim == 0:
            raise MixesExamples(
                self._at, 'a loop runs over the batch dimension', 'run it on all examples at once (jax.vmap)'
            )
        return stack._replace(dim=stack.dim - 1)

    def stack_of(self, element: BatchValue) -> BatchValue:
        return element._replace(dim=element.dim + 1) if isinstance(element, BatchDim) else element

    def eval_branches(self, equation: Any, operands: Sequence[BatchValue]) -> Sequence[BatchValue]:
        self._at = equation
        return super().eval_branches(equation, operands)

    def loop_fixpoint(self, equation: Any, operands: Sequence[BatchValue]) -> LoopValues[BatchValue]:
        self._at = equation
        return super().loop_fixpoint(equation, operands)

    def control_dependence(
        self, equation: Any, by: Callable[[], BatchValue], results: Sequence[BatchValue]
    ) -> Sequence[BatchValue]:
        if by() is None:
            return results
        if primitive_name(equation) == 'cond':
            raise MixesExamples(
                equation, 'a sum over the batch chooses a branch', 'choose outside of the loop'
            )
        raise MixesExamples(
            equation, 'the batch decides how often a loop runs', 'run it a fixed number of times'
        )
