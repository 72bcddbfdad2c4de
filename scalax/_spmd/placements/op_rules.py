"""The rules of primitives: which placements they take along one mesh axis, and which they give.

`strategy` looks a primitive up in `RULES`. A rule gives the placements that the operands are converted to and
those of the results, or None if the primitive has to see all of its operands. Most primitives need one rule
only, `by_dims`, which reads in `scalax._jaxpr.dim_rules` where the dimensions of results come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
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
from scalax._spmd.placements.placement import REPLICATE, SUM, Partial, Placement, ReduceOp, Replicate, Shard


class Op(NamedTuple):
    """An equation and the placements of its operands along one mesh axis.

    Attributes:
        equation: the equation, with the shapes of all examples.
        placements: those of its operands.
        blocks: into how many blocks all batch axes together split a dimension.
        zeros: which operands are known to be zero.
        blocks_of_first: into how many blocks they split the sharded dimension of the first operand; None if
            all of them do.
        wanted: the placement of the state that the first result becomes part of; `SUM` if it stays a sum,
            though it has a wider dtype; None of other results.
        is_update: whether an operand is computed of gradients, as state is in an optimizer.
        in_turn: whether the blocks of the axis are microbatches, which come one after the other: a sum cannot
            be reduced before the last one.
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
    """How an equation runs on the blocks of each device.

    Attributes:
        operands: the placements that its operands are converted to.
        results: the placements of its results.
        final: the placements that the results are converted to at once; None leaves them as they are.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    final: tuple[Placement, ...] | None = None


Rule = Callable[[Op], Strategy | None]


def strategy(op: Op) -> Strategy | None:
    """Returns how an equation runs on blocks; None if it takes all of its operands, and no sums."""
    if all(isinstance(placement, Replicate) for placement in op.placements):
        return Strategy(op.placements, (REPLICATE,) * len(op.equation.outvars))
    name = primitive_name(op.equation)
    if name in _FORWARDS:
        return Strategy(op.placements, op.placements)
    if any(isinstance(placement, Partial) for placement in op.placements):
        return _linear(name, op)
    return RULES.get(name, by_dims)(op)


# Each result is an operand.
_FORWARDS = frozenset({'optimization_barrier'})


# Sums ------------------------------------------------------------------------------------------------

# Linear in all of these operands at once.
_ADDITIVE: Mapping[str, slice] = {
    **dict.fromkeys(('add', 'add_any', 'sub', 'concatenate', 'stack', 'complex'), slice(0, None)),
    'select_n': slice(1, None),
    **dict.fromkeys(('scatter', 'scatter-add', 'scatter-sub'), slice(0, None, 2)),
    'dynamic_update_slice': slice(0, 2),
    'pad': slice(0, 2),
}
# Linear in the first operand.
_UNARY = frozenset(
    (
        *('neg', 'transpose', 'reshape', 'squeeze', 'broadcast_in_dim', 'reduce_sum', 'copy', 'slice'),
        *('dynamic_slice', 'rev', 'name', 'real', 'imag', 'conj', 'cumsum', 'reduce_window_sum', 'split'),
        *('unstack', 'convert_element_type', 'div', 'psum', 'psum_invariant', 'pvary'),
        *('all_gather', 'reduce_scatter', 'all_to_all', 'ppermute', 'fft', 'reduce_precision'),
    )
)
# Linear in either operand.
_BILINEAR = frozenset(('mul', 'dot_general', 'conv_general_dilated'))


def _linear(name: str, op: Op) -> Strategy | None:
    """Returns the strategy of what is linear in a sum; None if the sum has to be reduced first.

    A sum is reduced before it grows: before it is broadcast or cast to a wider dtype. It is also reduced
    before it is cast to a narrower one, since the sum of rounded terms is not the rounded sum.
    """
    sums = {i for i, placement in enumerate(op.placements) if placement == SUM}
    results = op.equation.outvars
    if any(isinstance(x, Partial) and x != SUM for x in op.placements) or not _is_exact(name, op):
        return None
    grows = sum(map(_bytes, results)) > sum(_bytes(op.equation.invars[i]) for i in sums)
    if grows and op.target != SUM and not op.is_microbatched:
        return None
    operands = list(op.placements)
    if name in _ADDITIVE:
        terms = {*range(len(operands))[_ADDITIVE[name]]}
        # What is added to a sum over microbatches is added once.
        once = {i for i in terms if op.is_microbatched and isinstance(op.placements[i], Replicate)}
        if not sums <= terms or not all(i in sums or i in once or op.zeros[i] for i in terms):
            return None
        operands = [SUM if i in terms else x for i, x in enumerate(operands)]
    elif not (sums == {0} if name in _UNARY else name in _BILINEAR and len(sums) == 1):
        return None
    if name == 'dot_general' and 2 * sum(map(_bytes, results)) <= sum(
        _bytes(op.equation.invars[i]) for i in sums
    ):
        # The product is less to reduce than the sum, and state is less to gather.
        operands = [REPLICATE if isinstance(x, Shard) and x.is_state else x for x in operands]
    if any(isinstance(x, Shard) for x in operands):
        return None
    return Strategy(tuple(operands), (SUM,) * len(results))


def _is_exact(name: str, op: Op) -> bool:
    """Whether an operation on terms of a sum gives the terms of its result, but for the order of sums."""
    if name in ('mul', 'div'):  # infinite terms of both signs have no sum
        literals = [x.val for x in op.equation.invars if isinstance(x, Literal)]
        if not all(math.isfinite(abs(complex(value))) for value in literals):
            return False
    if name not in ('convert_element_type', 'div', 'reduce_precision'):
        return True
    before, after = op.equation.invars[0].aval.dtype, op.equation.outvars[0].aval.dtype
    if op.is_microbatched:
        # What is rounded is rounded in each microbatch. Small integers may have begun anew at zero.
        is_wide = jnp.issubdtype(before, jnp.signedinteger) and jnp.iinfo(before).bits >= 32
        return jnp.issubdtype(after, jnp.inexact) and (jnp.issubdtype(before, jnp.inexact) or is_wide)
    if name == 'reduce_precision':
        return False
    if not jnp.issubdtype(before, jnp.inexact) or not jnp.issubdtype(after, jnp.inexact):
        return False
    return jnp.finfo(after).bits >= jnp.finfo(before).bits  # of a complex number, those of either part


def _bytes(atom: Any) -> int:
    return math.prod(shape_of(atom)) * getattr(atom.aval.dtype, 'itemsize', 1)


# Blocks ----------------------------------------------------------------------------------------------

# What each device reduces of its own examples is a term of the reduction of all.
_REDUCTIONS: Mapping[str, ReduceOp] = {
    **dict.fromkeys(
        ('reduce_sum', 'dot_general', 'conv_general_dilated', 'scatter-add', 'scatter-sub'), 'sum'
    ),
    **dict.fromkeys(('reduce_max', 'reduce_or', 'scatter-max'), 'max'),
    **dict.fromkeys(('reduce_min', 'reduce_and', 'scatter-min'), 'min'),
}
# Of booleans these are a maximum and a minimum; of integers they combine bits.
_OF_BITS = frozenset(('reduce_or', 'reduce_and'))
# Elements see others along a dimension of these, or change places.
_WORKS_ALONG = (
    ALONG_DIM | WINDOW_REDUCTIONS | {'pad', 'rev', 'select_and_scatter_add', 'select_and_gather_add'}
)
# These put their updates in some places of the first operand.
_PUTS = SCATTERS | {'dynamic_update_slice'}
_DRAWS = frozenset(('random_bits', 'random_split', 'random_fold_in', 'random_gamma'))
POINTWISE = ELEMENTWISE - ALONG_DIM - _DRAWS
"""Of these an element of the result depends on the elements of the operands that have the same indices."""


def by_dims(op: Op) -> Strategy | None:
    """Returns the strategy of a primitive by where the dimensions of its results come from.

    Examples decide, and state only if no operand has examples: of the dimensions of results that are sharded
    in operands, and those that are summed, the one that the largest operands share stays sharded. A sum has
    to be reduced, so its bytes count against it if another dimension can stay.
    """
    dims = dim_rule(op.equation)
    if dims is UNKNOWN or not dims.results:
        return None
    sharded = {i: x for i, x in enumerate(op.placements) if isinstance(x, Shard)}
    examples = {i: x for i, x in sharded.items() if not x.is_state}
    places = {(i, x.dim) for i, x in (examples or sharded).items()}
    is_state = not examples
    candidates = [(group, True) for group in reduced_dims(op.equation)]
    candidates += [(sources, False) for sources in dims.results[0]]
    weights = [_weight(op, places & {*sources}) for sources, _ in candidates]
    if is_state:
        # A stack of matrices may be exchanged for blocks of the stack.
        weights = [
            weight or int(_is_stack(op, *pair)) for weight, pair in zip(weights, candidates, strict=True)
        ]
    elif sum(map(bool, weights)) > 1:
        reduced = sum(map(_bytes, op.equation.outvars))
        weights = [
            max(1, weight - reduced * is_summed) if weight else 0
            for weight, (_, is_summed) in zip(weights, candidates, strict=True)
        ]
    if not weights or not max(weights):
        return None
    if is_state:
        costs = [_cost_of_state(op, *pair) for pair in zip(candidates, weights, strict=True)]
        sources, is_summed = candidates[costs.index(min(costs))]
    else:
        sources, is_summed = candidates[weights.index(max(weights))]
    if is_summed:
        return _reduced(op, sources, is_state)
    return _kept(op, sources, is_state)


def _is_stack(op: Op, sources: Sources, is_summed: bool) -> bool:
    """Whether all operands have a dimension of matrices in a stack, of which each device gets as many."""
    name, operands = primitive_name(op.equation), op.equation.invars
    if is_summed or not (name in DECOMPOSITIONS or (name == 'dot_general' and op.is_update)):
        return False
    sizes = {shape_of(operands[i])[dim] for i, dim in sources if dim < len(shape_of(operands[i]))}
    return len(sources) == len(operands) and len(sizes) == 1 and min(sizes) % op.blocks == 0


def _cost_of_state(op: Op, candidate: tuple[Sources, bool], weight: int) -> float:
    """The bytes that an equation of state alone sends if these dimensions stay sharded, or become so."""
    sources, is_summed = candidate
    if not weight:
        return math.inf
    kept, [result, *_], cost = {*sources}, op.equation.outvars, 0.0
    for i, (atom, placement) in enumerate(zip(op.equation.invars, op.placements, strict=True)):
        if isinstance(placement, Shard) and (i, placement.dim) not in kept:
            is_exchanged = any(place == i for place, _ in sources)
            cost += _bytes(atom) / (op.blocks if is_exchanged else 1)
    if is_summed:
        cost += _bytes(result) * (1 if isinstance(op.target, Shard) else 2)
    elif isinstance(op.target, Shard) and {*dim_rule(op.equation).results[0][op.target.dim]} != kept:
        cost += _bytes(result) / op.blocks
    return cost


def _weight(op: Op, places: set[OperandDim]) -> int:
    return sum(1 + _bytes(op.equation.invars[i]) for i, _ in places)  # an array may be empty


def _reduced(op: Op, group: Sources, is_state: bool) -> Strategy | None:
    """The strategy of a reduction over a sharded dimension."""
    name, equation = primitive_name(op.equation), op.equation
    if name not in _REDUCTIONS:
        return None
    if name == 'conv_general_dilated' and len(group) < 2:  # each group of features has channels of its own
        return None
    is_complex = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.complexfloating)
    if _REDUCTIONS[name] != 'sum' and (
        op.is_microbatched or is_complex
    ):  # devices do not compare complex numbers
        return None
    is_bool = equation.outvars[0].aval.dtype == jnp.bool_
    if is_bool != (name in _OF_BITS):  # devices exchange neither bits of integers nor sums of booleans
        return None
    operands = _sharded(op, group, is_state)
    if is_state and _grows(op, operands):
        return Strategy((REPLICATE,) * len(operands), (REPLICATE,) * len(equation.outvars))
    if name.startswith('scatter'):
        operands[0] = SUM if _REDUCTIONS[name] == 'sum' else REPLICATE
    return Strategy(tuple(operands), (Partial(_REDUCTIONS[name]),) * len(equation.outvars))


def _kept(op: Op, sources: Sources, is_state: bool) -> Strategy | None:
    """The strategy of an equation whose results have the sharded dimension."""
    name, equation = primitive_name(op.equation), op.equation
    dims = dim_rule(equation)
    sizes = {
        shape_of(equation.invars[i])[dim] for i, dim in sources if dim < len(shape_of(equation.invars[i]))
    }
    sizes -= {1}  # elementwise operations broadcast dimensions of one element
    results = list[Placement]()
    for var, result in zip(equation.outvars, dims.results, strict=True):
        matching = [dim for dim, places in enumerate(result) if {*places} == {*sources}]
        if len(matching) != 1 or {shape_of(var)[matching[0]]} != sizes:
            return None
        results.append(Shard(matching[0], is_state))
        if name in _WORKS_ALONG and equations.acts_along(equation, matching[0]):
            return None
    if name in _PUTS and all(i == 0 for i, _ in sources):
        return None
    if name == 'conv_general_dilated' and equations.conv_groups(equation)[0] > 1 and sources[0][0] == 1:
        return None  # a block of the features would be of other groups
    if name in _DRAWS and ((0, 0) not in sources or not equations.draws_per_key(equation)):
        return None
    operands = _sharded(op, sources, is_state)
    if is_state and results[0] != op.target and _grows(op, operands):
        operands, results = [REPLICATE] * len(operands), [REPLICATE] * len(results)
    return Strategy(tuple(operands), tuple(results))


def _grows(op: Op, operands: Sequence[Placement]) -> bool:
    """Whether an equation makes more of state than it takes: then the state itself is gathered."""
    taken = [
        _bytes(atom) for atom, x in zip(op.equation.invars, operands, strict=True) if isinstance(x, Shard)
    ]
    return max(map(_bytes, op.equation.outvars)) > 2 * sum(taken)


def _sharded(op: Op, sources: Sources, is_state: bool) -> list[Placement]:
    """The placements of operands of which those that have a dimension are sharded along it."""
    wanted: dict[int, int] = {}
    for i, dim in sources:
        wanted.setdefault(i, dim)
    operands = list[Placement]()
    for i, atom in enumerate(op.equation.invars):
        size = shape_of(atom)[wanted[i] : wanted[i] + 1] if i in wanted else ()
        operands.append(Shard(wanted[i], is_state) if size and size != (1,) else REPLICATE)
    return operands


# Rules of primitives that the dimensions of results do not decide --------------------------------------


def _reshape(op: Op) -> Strategy | None:
    """The first dimension of those that are merged or split stays sharded if its blocks stay in one piece."""
    [placement, *rest] = op.placements
    assert isinstance(placement, Shard)
    before, shape = shape_of(op.equation.invars[0]), shape_of(op.equation.outvars[0])
    for old, new in reshape_groups(op.equation):
        first, is_state = old[0], placement.is_state
        is_first = first == placement.dim
        blocks = op.blocks if op.blocks_of_first is None or not is_first else op.blocks_of_first
        divides = before[first] % blocks == shape[new[0]] % blocks == 0
        # Where another dimension comes first, its blocks are exchanged for those of the sharded one.
        if divides and (is_first or (placement.dim in old and not is_state)):
            return Strategy((Shard(first, is_state), *rest), (Shard(new[0], is_state), *rest))
    return None


def _gather(op: Op) -> Strategy | None:
    """Examples in another order: of all examples, each device takes those of its share of the indices."""
    found, [first, *_] = by_dims(op), op.placements
    if found is not None or not isinstance(first, Shard) or first.is_state:
        return found
    shape = shape_of(op.equation.outvars[0])
    for dim, sources in enumerate(dim_rule(op.equation).results[0]):
        if {operand for operand, _ in sources} == {1} and shape[dim] % op.blocks == 0:
            [(_, source)] = sources
            return Strategy((REPLICATE, Shard(source)), (Shard(dim),))
    return None


def _slice(op: Op) -> Strategy | None:
    """Of a few elements of a sharded dimension, each device adds those that it has."""
    found, [placement] = by_dims(op), op.placements
    if found is not None or op.is_microbatched or not is_small_slice(op.equation):
        return found
    is_state = isinstance(placement, Shard) and placement.is_state
    return Strategy((placement,), (SUM,), None if is_state else (REPLICATE,))


def _ragged_dot(op: Op) -> Strategy | None:
    """Each device has some rows of each group, or all rows of its examples."""
    if (found := row_placements(op.equation, op.placements)) is not None:
        operands, result = found
        return Strategy(tuple(operands), (result,))
    of_products = op._replace(placements=(*op.placements[:2], REPLICATE))
    if all(isinstance(placement, Replicate) for placement in of_products.placements):
        return None
    if (strategy := by_dims(of_products)) is None:
        return None
    sizes = group_sizes_placement(op.equation, strategy.operands[0])
    if sizes is None:
        return None
    return strategy._replace(operands=(*strategy.operands[:2], sizes))


def _kernel(op: Op) -> Strategy | None:
    """Each device takes the steps of its own examples."""
    found = kernel_placements(op.equation, op.placements, op.blocks)
    return None if found is None else Strategy(*map(tuple, found))


def _attention(op: Op) -> Strategy | None:
    """Each device attends in its own examples."""
    found = attention_placements(op.equation, op.placements)
    return None if found is None else Strategy(*map(tuple, found))


def _elementwise(op: Op) -> Strategy:
    """All operands are sharded alike, but for scalars and dimensions of one element."""
    chosen: Shard | None = None
    for placement in op.placements:
        if isinstance(placement, Shard) and (chosen is None or (chosen.is_state and not placement.is_state)):
            chosen = placement
    assert chosen is not None
    if chosen.is_state and isinstance(op.target, Shard) and op.target in op.placements:
        chosen = op.target
    [out, *_], shapes = op.equation.outvars, [*map(shape_of, op.equation.invars)]
    rank, dim = len(shape_of(out)), chosen.dim
    operands = [chosen if len(shape) == rank and shape[dim] != 1 else REPLICATE for shape in shapes]
    is_broadcast = any(len(shape) == rank and shape != shape_of(out) for shape in shapes)
    if chosen.is_state and is_broadcast and chosen != op.target and _grows(op, operands):
        return Strategy((REPLICATE,) * len(operands), (REPLICATE,) * len(op.equation.outvars))
    return Strategy(tuple(operands), (chosen,) * len(op.equation.outvars))


_ROWS: tuple[tuple[str, Rule], ...] = (
    (' '.join(POINTWISE), _elementwise),
    ('reshape', _reshape),
    ('gather', _gather),
    ('slice', _slice),
    ('ragged_dot_general', _ragged_dot),
    (KERNEL, _kernel),
    (' '.join(ATTENTION), _attention),
)
RULES: dict[str, Rule] = {name: rule for names, rule in _ROWS for name in names.split()}


# Zeros -----------------------------------------------------------------------------------------------


def is_zero(equation: Any, zeros: Sequence[bool]) -> bool:
    """Returns whether the results of an equation are zero because some operands are."""
    name = primitive_name(equation)
    if name in _KEEP_ZERO:
        return zeros[0]
    return name == 'mul' and any(zeros) and _is_finite_literal(equation, zeros)


_KEEP_ZERO: Container[str] = frozenset(
    ('broadcast_in_dim', 'convert_element_type', 'reshape', 'copy', 'squeeze', 'transpose', 'neg')
)


def _is_finite_literal(equation: Any, zeros: Sequence[bool]) -> bool:
    others = [x for x, zero in zip(equation.invars, zeros, strict=True) if not zero]
    return all(isinstance(x, Literal) and math.isfinite(float(x.val)) for x in others)
