"""Sharding rules of primitives: the placements of operands and results along one mesh axis.

`strategy` looks up the rule of a primitive in `RULES`. A rule returns the placements to which the operands
are converted, and the placements of the results, or None if the primitive needs replicated operands. Most
primitives share the rule `by_dims`, which uses the dimension rules of `scalax._jaxpr.dim_rules`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from scalax._jax import equations
from scalax._jax.equations import Literal, shape_of
from scalax._jax.primitives import KERNEL, primitive_name
from scalax._jaxpr.batch_dims import reduced_dims
from scalax._jaxpr.dim_rules import (
    ALONG_DIM,
    DECOMPOSITIONS,
    ELEMENTWISE,
    SCATTERS,
    UNKNOWN,
    WINDOW_REDUCTIONS,
    OperandDim,
    Sources,
    dim_rule,
    reshape_groups,
)
from scalax._spmd.operations.cudnn_attention import ATTENTION, attention_placements
from scalax._spmd.operations.pallas_kernels import kernel_placements
from scalax._spmd.operations.ragged_dot import group_sizes_placement, row_placements
from scalax._spmd.operations.slices import is_small_slice
from scalax._spmd.placements.placement import (
    REPLICATE,
    SUM,
    Partial,
    Placement,
    ReduceOp,
    Replicate,
    Shard,
    shards_examples,
)


class Op(NamedTuple):
    """An equation and the placements of its operands along one mesh axis.

    Attributes:
        equation: the equation, with global shapes.
        placements: the placements of its operands.
        blocks: the product of the sizes of all batch axes.
        zeros: which operands are known to be zero.
        blocks_of_first: the number of blocks of the sharded dimension of the first operand; None for
            *blocks*.
        target: the placement of the state that the first result becomes part of; `SUM` if it stays a partial
            sum, even in a wider dtype; None for other results.
        is_update: whether an operand depends on gradients, as in an optimizer.
        is_microbatched: whether the blocks of the axis are microbatches, which run one after the other. A sum
            can only be reduced after the last one.
    """

    equation: Any
    placements: tuple[Placement, ...]
    blocks: int
    zeros: tuple[bool, ...]
    blocks_of_first: int | None = None
    target: Placement | None = None
    is_update: bool = False
    is_microbatched: bool = False


class Strategy(NamedTuple):
    """How devices run an equation on their local shards.

    Attributes:
        operands: the placements to which its operands are converted.
        results: the placements of its results.
        final: the placements to which the results are then converted; None for no conversion.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    final: tuple[Placement, ...] | None = None


Rule = Callable[[Op], Strategy | None]


def strategy(op: Op) -> Strategy | None:
    """Returns the strategy of an equation; None if it needs all of its operands replicated."""
    if all(isinstance(placement, Replicate) for placement in op.placements):
        return Strategy(op.placements, (REPLICATE,) * len(op.equation.outvars))
    name = primitive_name(op.equation)
    if name in _PASS_THROUGH:
        return Strategy(op.placements, op.placements)
    if any(isinstance(placement, Partial) for placement in op.placements):
        return _linear(name, op)
    return RULES.get(name, by_dims)(op)


# Each result equals an operand.
_PASS_THROUGH = frozenset({'optimization_barrier'})


# Partial operands ------------------------------------------------------------------------------------

# Jointly linear in these operands.
_ADDITIVE: Mapping[str, slice] = {
    **dict.fromkeys(('add', 'add_any', 'sub', 'concatenate', 'stack', 'complex'), slice(0, None)),
    'select_n': slice(1, None),
    **dict.fromkeys(('scatter', 'scatter-add', 'scatter-sub'), slice(0, None, 2)),
    'dynamic_update_slice': slice(0, 2),
    'pad': slice(0, 2),
}
# Linear in the first operand.
_LINEAR_IN_FIRST = frozenset(
    (
        *('neg', 'transpose', 'reshape', 'squeeze', 'broadcast_in_dim', 'reduce_sum', 'copy', 'slice'),
        *('dynamic_slice', 'rev', 'name', 'real', 'imag', 'conj', 'cumsum', 'reduce_window_sum', 'split'),
        *('unstack', 'convert_element_type', 'div', 'psum', 'psum_invariant', 'pvary'),
        *('all_gather', 'reduce_scatter', 'all_to_all', 'ppermute', 'fft', 'reduce_precision'),
    )
)
# Linear in each operand.
_BILINEAR = frozenset(('mul', 'dot_general', 'conv_general_dilated'))


def _linear(name: str, op: Op) -> Strategy | None:
    """Returns the strategy of an operation that is linear in its partial operands.

    Returns None if they have to be reduced first. A partial sum is reduced before it gets larger, by a
    broadcast or a cast to a wider dtype. It is also reduced before a cast to a narrower dtype, since the sum
    of rounded terms is not the rounded sum.
    """
    partial_operands = {i for i, placement in enumerate(op.placements) if placement == SUM}
    results = op.equation.outvars
    if any(isinstance(x, Partial) and x != SUM for x in op.placements) or not _is_exact(name, op):
        return None
    is_larger = sum(map(bytes_of, results)) > sum(bytes_of(op.equation.invars[i]) for i in partial_operands)
    if is_larger and op.target != SUM and not op.is_microbatched:
        return None
    operands, added_once = list(op.placements), set[int]()
    if op.is_microbatched:  # a replicated term is added once to a sum over microbatches
        added_once = {i for i, x in enumerate(operands) if isinstance(x, Replicate)}
    zeros = [zero or i in added_once for i, zero in enumerate(op.zeros)]
    if not _is_linear_in(name, partial_operands, zeros):
        return None
    if name in _ADDITIVE:
        operands[_ADDITIVE[name]] = [SUM] * len(operands[_ADDITIVE[name]])
    if name == 'dot_general' and 2 * sum(map(bytes_of, results)) <= sum(
        bytes_of(op.equation.invars[i]) for i in partial_operands
    ):
        # The product is smaller than the partial operand, and cheaper to reduce. State is gathered for it.
        operands = [REPLICATE if isinstance(x, Shard) and x.is_state else x for x in operands]
    if any(isinstance(x, Shard) for x in operands):
        return None
    return Strategy(tuple(operands), (SUM,) * len(results))


def _is_linear_in(name: str, partial_operands: Collection[int], zeros: Sequence[bool]) -> bool:
    """Whether an operation is linear in its partial operands, given which operands are zero."""
    if name in _ADDITIVE:
        terms = range(len(zeros))[_ADDITIVE[name]]
        return {*partial_operands} <= {*terms} and all(i in partial_operands or zeros[i] for i in terms)
    if name in _LINEAR_IN_FIRST:
        return {*partial_operands} == {0}
    return name in _BILINEAR and len(partial_operands) == 1


def is_linear_in(equation: Any, partial_operands: Collection[int], zeros: Sequence[bool]) -> bool:
    """Returns whether an equation can be applied to the terms of its partial operands.

    Args:
        equation: the equation.
        partial_operands: the indices of the partial operands.
        zeros: which operands are zero.
    """
    name = primitive_name(equation)
    return _is_linear_in(name, partial_operands, zeros) and _is_exact(name, Op(equation, (), 1, ()))


def _is_exact(name: str, op: Op) -> bool:
    """Whether applying an operation to the terms of a sum commutes with the sum, but for its order."""
    if name in ('mul', 'div'):  # infinite terms of both signs have no sum
        literals = [x.val for x in op.equation.invars if isinstance(x, Literal)]
        if not all(math.isfinite(abs(complex(value))) for value in literals):
            return False
    if name not in ('convert_element_type', 'div', 'reduce_precision'):
        return True
    operand_dtype, result_dtype = op.equation.invars[0].aval.dtype, op.equation.outvars[0].aval.dtype
    if op.is_microbatched:
        # Each microbatch rounds its terms. Narrow integers may have overflowed.
        is_wide_int = jnp.issubdtype(operand_dtype, jnp.signedinteger) and jnp.iinfo(operand_dtype).bits >= 32
        return jnp.issubdtype(result_dtype, jnp.inexact) and (
            jnp.issubdtype(operand_dtype, jnp.inexact) or is_wide_int
        )
    if name == 'reduce_precision':
        return False
    if not jnp.issubdtype(operand_dtype, jnp.inexact) or not jnp.issubdtype(result_dtype, jnp.inexact):
        return False
    return (
        jnp.finfo(result_dtype).bits >= jnp.finfo(operand_dtype).bits
    )  # of a complex number, those of either part


def bytes_of(atom: Any) -> int:
    """Returns the size of a value in bytes."""
    return math.prod(shape_of(atom)) * getattr(atom.aval.dtype, 'itemsize', 1)


# Sharded operands ------------------------------------------------------------------------------------

# Reductions whose results over local examples are the terms of a reduction over devices.
_REDUCTIONS: Mapping[str, ReduceOp] = {
    **dict.fromkeys(
        ('reduce_sum', 'dot_general', 'conv_general_dilated', 'scatter-add', 'scatter-sub'), 'sum'
    ),
    **dict.fromkeys(('reduce_max', 'reduce_or', 'scatter-max'), 'max'),
    **dict.fromkeys(('reduce_min', 'reduce_and', 'scatter-min'), 'min'),
}
# For booleans these are a maximum and a minimum; for integers they are bitwise.
_BITWISE_REDUCTIONS = frozenset(('reduce_or', 'reduce_and'))
# These mix or reorder elements along some dimension.
_MAY_MIX_ALONG = (
    ALONG_DIM | WINDOW_REDUCTIONS | {'pad', 'rev', 'select_and_scatter_add', 'select_and_gather_add'}
)
# These write into parts of their first operand.
_WRITES_INTO_FIRST = SCATTERS | {'dynamic_update_slice'}
_RANDOM = frozenset(('random_bits', 'random_split', 'random_fold_in', 'random_gamma'))
POINTWISE = ELEMENTWISE - ALONG_DIM - _RANDOM
"""Primitives whose result elements depend on the operand elements with the same indices."""


def by_dims(op: Op) -> Strategy | None:
    """Returns the strategy of a primitive according to the dimension rules.

    Of the dimensions that are sharded in operands, and are either dimensions of the result or contracted, the
    one that the largest operands share stays sharded. Contraction gives a partial sum: the bytes of its
    reduction count against it if another dimension can stay sharded. State only counts if no operand has
    examples.
    """
    dims = dim_rule(op.equation)
    if dims is UNKNOWN or not dims.results:
        return None
    sharded = {i: x for i, x in enumerate(op.placements) if isinstance(x, Shard)}
    examples = {i: x for i, x in sharded.items() if not x.is_state}
    sharded_dims = {(i, x.dim) for i, x in (examples or sharded).items()}
    is_state = not examples
    candidates = [(group, True) for group in reduced_dims(op.equation)]
    candidates += [(sources, False) for sources in dims.results[0]]
    weights = [_weight(op, sharded_dims & {*sources}) for sources, _ in candidates]
    if is_state:
        # A stack of sharded matrices may be resharded along the stack.
        weights = [
            weight or int(_is_stack(op, *pair)) for weight, pair in zip(weights, candidates, strict=True)
        ]
    elif sum(map(bool, weights)) > 1:
        reduced = sum(map(bytes_of, op.equation.outvars))
        weights = [
            max(1, weight - reduced * is_summed) if weight else 0
            for weight, (_, is_summed) in zip(weights, candidates, strict=True)
        ]
    if not weights or not max(weights):
        return None
    if is_state:
        costs = [_state_communication_bytes(op, *pair) for pair in zip(candidates, weights, strict=True)]
        sources, is_summed = candidates[costs.index(min(costs))]
    else:
        sources, is_summed = candidates[weights.index(max(weights))]
    if is_summed:
        return _reduce_sharded_dim(op, sources, is_state)
    return _keep_sharded_dim(op, sources, is_state)


def _is_stack(op: Op, sources: Sources, is_summed: bool) -> bool:
    """Whether a dimension is a stack of matrices in all operands, which can be sharded evenly."""
    name, operands = primitive_name(op.equation), op.equation.invars
    if is_summed or not (name in DECOMPOSITIONS or (name == 'dot_general' and op.is_update)):
        return False
    sizes = {shape_of(operands[i])[dim] for i, dim in sources if dim < len(shape_of(operands[i]))}
    return len(sources) == len(operands) and len(sizes) == 1 and min(sizes) % op.blocks == 0


def _state_communication_bytes(op: Op, candidate: tuple[Sources, bool], weight: int) -> float:
    """Returns the bytes that an equation of state alone sends if a dimension is sharded."""
    sources, is_summed = candidate
    if not weight:
        return math.inf
    kept_dims, [result, *_], cost = {*sources}, op.equation.outvars, 0.0
    for i, (atom, placement) in enumerate(zip(op.equation.invars, op.placements, strict=True)):
        if isinstance(placement, Shard) and (i, placement.dim) not in kept_dims:
            is_exchanged = any(operand == i for operand, _ in sources)
            cost += bytes_of(atom) / (op.blocks if is_exchanged else 1)
    if is_summed:
        cost += bytes_of(result) * (1 if isinstance(op.target, Shard) else 2)
    elif isinstance(op.target, Shard) and {*dim_rule(op.equation).results[0][op.target.dim]} != kept_dims:
        cost += bytes_of(result) / op.blocks
    return cost


def _weight(op: Op, dims: set[OperandDim]) -> int:
    return sum(1 + bytes_of(op.equation.invars[i]) for i, _ in dims)  # an array may be empty


def _reduce_sharded_dim(op: Op, group: Sources, is_state: bool) -> Strategy | None:
    """Returns the strategy of a reduction over a sharded dimension; None if it needs replicated operands."""
    name, equation = primitive_name(op.equation), op.equation
    if name not in _REDUCTIONS:
        return None
    if name == 'conv_general_dilated' and len(group) < 2:  # each group of features has its own channels
        return None
    is_complex = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.complexfloating)
    if _REDUCTIONS[name] != 'sum' and (
        op.is_microbatched or is_complex
    ):  # devices do not compare complex numbers
        return None
    is_bool = equation.outvars[0].aval.dtype == jnp.bool_
    if is_bool != (
        name in _BITWISE_REDUCTIONS
    ):  # devices exchange neither bits of integers nor sums of booleans
        return None
    operands = _operand_placements(op, group, is_state)
    if is_state and _expands_state(op, operands):
        return Strategy((REPLICATE,) * len(operands), (REPLICATE,) * len(equation.outvars))
    if name.startswith('scatter'):
        operands[0] = SUM if _REDUCTIONS[name] == 'sum' else REPLICATE
    return Strategy(tuple(operands), (Partial(_REDUCTIONS[name]),) * len(equation.outvars))


def _keep_sharded_dim(op: Op, sources: Sources, is_state: bool) -> Strategy | None:
    """Returns the strategy of an equation whose results have the sharded dimension; None if it is mixed."""
    name, equation = primitive_name(op.equation), op.equation
    dims = dim_rule(equation)
    sizes = {
        shape_of(equation.invars[i])[dim] for i, dim in sources if dim < len(shape_of(equation.invars[i]))
    }
    sizes -= {1}  # elementwise operations broadcast dimensions of one element
    results = list[Placement]()
    for var, result in zip(equation.outvars, dims.results, strict=True):
        matching = [dim for dim, operand_dims in enumerate(result) if {*operand_dims} == {*sources}]
        if len(matching) != 1 or {shape_of(var)[matching[0]]} != sizes:
            return None
        results.append(Shard(matching[0], is_state, _common_outer_axes(op, sources)))
        if name in _MAY_MIX_ALONG and equations.acts_along(equation, matching[0]):
            return None
    if name in _WRITES_INTO_FIRST and all(i == 0 for i, _ in sources):
        return None
    if name == 'conv_general_dilated' and equations.conv_groups(equation)[0] > 1 and sources[0][0] == 1:
        return None  # a block of the features would belong to other groups
    if name in _RANDOM and ((0, 0) not in sources or not equations.draws_per_key(equation)):
        return None
    operands = _operand_placements(op, sources, is_state)
    if is_state and results[0] != op.target and _expands_state(op, operands):
        operands, results = [REPLICATE] * len(operands), [REPLICATE] * len(results)
    return Strategy(tuple(operands), tuple(results))


def _expands_state(op: Op, operands: Sequence[Placement]) -> bool:
    """Whether the result of an equation is larger than the state it uses, so that the state is gathered."""
    sharded_bytes = [
        bytes_of(atom) for atom, x in zip(op.equation.invars, operands, strict=True) if isinstance(x, Shard)
    ]
    return max(map(bytes_of, op.equation.outvars)) > 2 * sum(sharded_bytes)


def _operand_placements(op: Op, sources: Sources, is_state: bool) -> list[Placement]:
    """Returns the placements of operands with a dimension sharded in the operands that have it."""
    sharded_dims: dict[int, int] = {}
    for i, dim in sources:
        sharded_dims.setdefault(i, dim)
    operands, outer_axes = list[Placement](), _common_outer_axes(op, sources)
    for i, atom in enumerate(op.equation.invars):
        size = shape_of(atom)[sharded_dims[i] : sharded_dims[i] + 1] if i in sharded_dims else ()
        shard = Shard(sharded_dims[i], is_state, outer_axes) if i in sharded_dims else REPLICATE
        operands.append(shard if size and size != (1,) else REPLICATE)
    return operands


def _common_outer_axes(op: Op, sources: Sources) -> tuple[str, ...]:
    """Returns the outer axes of the shards of dimensions; none if they differ."""
    outer_axes = {
        x.outer_axes for i, dim in sources if isinstance(x := op.placements[i], Shard) and x.dim == dim
    }
    return outer_axes.pop() if len(outer_axes) == 1 else ()


# Rules of primitives that dimension rules do not cover -------------------------------------------------


def _reshape(op: Op) -> Strategy | None:
    """Keeps the first of merged or split dimensions sharded, if the blocks stay contiguous."""
    [placement, *rest] = op.placements
    assert isinstance(placement, Shard)
    operand_shape, result_shape = shape_of(op.equation.invars[0]), shape_of(op.equation.outvars[0])
    for old_dims, new_dims in reshape_groups(op.equation):
        first_dim, is_state = old_dims[0], placement.is_state
        if placement.outer_axes:  # the shards of a merged dimension would be others
            if [*old_dims] == [placement.dim] and len(new_dims) == 1:
                return Strategy(op.placements, (placement.at(new_dims[0]), *rest))
            continue
        is_first = first_dim == placement.dim
        blocks = op.blocks if op.blocks_of_first is None or not is_first else op.blocks_of_first
        divides = operand_shape[first_dim] % blocks == result_shape[new_dims[0]] % blocks == 0
        # If another dimension of examples is sharded, it is resharded to the first one.
        if divides and (is_first or (placement.dim in old_dims and not is_state)):
            return Strategy((Shard(first_dim, is_state), *rest), (Shard(new_dims[0], is_state), *rest))
    return None


def _gather(op: Op) -> Strategy | None:
    """Looks up examples in another order: gathers all examples, and shards the indices."""
    by_dim_rules, [table, *_] = by_dims(op), op.placements
    if by_dim_rules is not None or not shards_examples(table):
        return by_dim_rules
    shape = shape_of(op.equation.outvars[0])
    for dim, sources in enumerate(dim_rule(op.equation).results[0]):
        if {operand for operand, _ in sources} == {1} and shape[dim] % op.blocks == 0:
            [(_, source)] = sources
            return Strategy((REPLICATE, Shard(source)), (Shard(dim),))
    return None


def _conv(op: Op) -> Strategy | None:
    """Shards the groups of a convolution if examples are groups, as under ``jax.vmap`` over its kernels."""
    equation, groups = op.equation, equations.conv_groups(op.equation)
    if (dims := equations.conv_group_dims(equation)) is not None and max(groups) % op.blocks == 0:
        image_dim, kernel_dim, result_dim = dims
        placements = Shard(image_dim), Shard(kernel_dim)
        if any(x == y for x, y in zip(op.placements, placements, strict=True)):
            return Strategy(placements, (Shard(result_dim),))
    return by_dims(op)


def _slice(op: Op) -> Strategy | None:
    """Slices a few elements of a sharded dimension: devices sum the elements that they hold."""
    by_dim_rules, [placement] = by_dims(op), op.placements
    if by_dim_rules is not None or op.is_microbatched:
        return by_dim_rules
    if not is_small_slice(op.equation):
        return _rearrange(op)
    if isinstance(placement, Shard) and placement.outer_axes:
        return None
    is_state = isinstance(placement, Shard) and placement.is_state
    return Strategy((placement,), (SUM,), None if is_state else (REPLICATE,))


def _rearrange(op: Op) -> Strategy | None:
    """Concatenates, splits, pads or reverses examples: gathers them, and shards the results again.

    All devices do this, but each computes what follows for its block of the results alone.
    """
    if (by_dim_rules := by_dims(op)) is not None or op.is_microbatched:
        return by_dim_rules
    dims = {x.dim for x in op.placements if shards_examples(x)}
    if len(dims) != 1 or not equations.moves_contiguous_parts(op.equation):
        return None
    [dim], results = dims, op.equation.outvars
    sizes = [shape_of(var)[dim] for var in results]
    final = tuple([Shard(dim) if size and size % op.blocks == 0 else REPLICATE for size in sizes])
    return Strategy((REPLICATE,) * len(op.placements), (REPLICATE,) * len(results), final)


def _ragged_dot(op: Op) -> Strategy | None:
    """Shards the rows of groups, or the examples of which each has all rows."""
    if (placements := row_placements(op.equation, op.placements)) is not None:
        operands, result = placements
        return Strategy(tuple(operands), (result,))
    without_sizes = op._replace(placements=(*op.placements[:2], REPLICATE))
    if all(isinstance(placement, Replicate) for placement in without_sizes.placements):
        return None
    if (matmul_strategy := by_dims(without_sizes)) is None:
        return None
    sizes = group_sizes_placement(op.equation, matmul_strategy.operands[0])
    if sizes is None:
        return None
    return matmul_strategy._replace(operands=(*matmul_strategy.operands[:2], sizes))


def _kernel(op: Op) -> Strategy | None:
    """Shards the grid of a Pallas kernel: each device runs the steps of its examples."""
    placements = kernel_placements(op.equation, op.placements, op.blocks)
    return None if placements is None else Strategy(*map(tuple, placements))


def _attention(op: Op) -> Strategy | None:
    """Shards cuDNN attention along the examples."""
    placements = attention_placements(op.equation, op.placements)
    return None if placements is None else Strategy(*map(tuple, placements))


def _elementwise(op: Op) -> Strategy:
    """Shards all operands in the same dimension, except for scalars and dimensions of size 1."""
    shard: Shard | None = None
    for placement in op.placements:
        if isinstance(placement, Shard) and (shard is None or (shard.is_state and not placement.is_state)):
            shard = placement
    assert shard is not None
    if shard.is_state and isinstance(op.target, Shard) and op.target in op.placements:
        shard = op.target
    [out, *_], shapes = op.equation.outvars, [*map(shape_of, op.equation.invars)]
    rank, dim = len(shape_of(out)), shard.dim
    operands = [shard if len(shape) == rank and shape[dim] != 1 else REPLICATE for shape in shapes]
    is_broadcast = any(len(shape) == rank and shape != shape_of(out) for shape in shapes)
    if shard.is_state and is_broadcast and shard != op.target and _expands_state(op, operands):
        return Strategy((REPLICATE,) * len(operands), (REPLICATE,) * len(op.equation.outvars))
    return Strategy(tuple(operands), (shard,) * len(op.equation.outvars))


_RULE_TABLE: tuple[tuple[str, Rule], ...] = (
    (' '.join(POINTWISE), _elementwise),
    ('reshape', _reshape),
    ('gather', _gather),
    ('conv_general_dilated', _conv),
    ('slice', _slice),
    ('concatenate split pad rev', _rearrange),
    ('ragged_dot_general', _ragged_dot),
    (KERNEL, _kernel),
    (' '.join(ATTENTION), _attention),
)
RULES: dict[str, Rule] = {name: rule for names, rule in _RULE_TABLE for name in names.split()}


# Zeros -----------------------------------------------------------------------------------------------


def is_zero(equation: Any, zeros: Sequence[bool]) -> bool:
    """Returns whether the results of an equation are zero because some operands are."""
    name = primitive_name(equation)
    if name in _PRESERVES_ZERO:
        return zeros[0]
    return name == 'mul' and any(zeros) and _is_finite_literal(equation, zeros)


_PRESERVES_ZERO: Container[str] = frozenset(
    ('broadcast_in_dim', 'convert_element_type', 'reshape', 'copy', 'squeeze', 'transpose', 'neg')
)


def _is_finite_literal(equation: Any, zeros: Sequence[bool]) -> bool:
    others = [x for x, zero in zip(equation.invars, zeros, strict=True) if not zero]
    return all(isinstance(x, Literal) and math.isfinite(float(x.val)) for x in others)
