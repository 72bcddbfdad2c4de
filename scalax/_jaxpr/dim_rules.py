"""Where the dimensions of the results of each primitive come from: the table that all who read jaxprs share.

It is read to partition along a batch, to find which dimensions of weights are one, and to count operations.
Of a primitive that is not in the table nothing is known.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from scalax._jax import equations
from scalax._jax.equations import shape_of, size_of
from scalax._jax.primitives import primitive_name

OperandDim = tuple[int, int]
"""A dimension of an operand: the number of the operand, and that of the dimension."""
Sources = tuple[OperandDim, ...]
"""The dimensions of operands that one of a result may come from; the first one that is known decides."""

Axes = tuple[str, ...]
"""The mesh axes that shard a dimension."""


@dataclasses.dataclass(frozen=True, eq=False)
class DimRule:
    """What an equation does with dimensions.

    Attributes:
        results: for each result, and each of its dimensions, the sources.
        reduced: the dimensions that no result has: those that a product contracts, in pairs, and those that a
            reduction removes.
    """

    results: tuple[tuple[Sources, ...], ...]
    reduced: tuple[Sources, ...] = ()

    def propagate(self, operands: Sequence[Sequence[Axes]]) -> list[tuple[Axes, ...]]:
        """The axes of each dimension of the results; of a result without any, an empty tuple.

        Args:
            operands: those of each dimension of the operands; empty if an operand has none.
        """
        found = []
        for result in self.results:
            known = tuple([_first(operands, sources) for sources in result])
            found.append(known if any(known) else ())
        return found

    def dims_only_from(self, operand: int) -> list[int]:
        """The dimensions of the first result that are those of one operand alone: of a weight its columns."""
        return [
            i
            for i, sources in enumerate(self.results[0])
            if sources and all(place == operand for place, _ in sources)
        ]

    def dim_from_exactly(self, places: Iterable[OperandDim]) -> int | None:
        """The dimension, the same of all results, whose sources are these; None if it is not exactly one."""
        wanted = {*places}
        found = {tuple([i for i, each in enumerate(result) if {*each} == wanted]) for result in self.results}
        [dims] = found if len(found) == 1 else [()]
        return dims[0] if len(dims) == 1 else None


def _first(operands: Sequence[Sequence[Axes]], sources: Sources) -> Axes:
    for operand, dim in sources:
        if operands[operand] and (known := operands[operand][dim]):
            return known
    return ()


UNKNOWN = DimRule(())


def dim_rule(equation: Any) -> DimRule:
    """What an equation does with dimensions; `UNKNOWN` if its primitive has no rule."""
    rule = RULES.get(primitive_name(equation))
    return UNKNOWN if rule is None else rule(equation)


Rule = Callable[[Any], DimRule]


def _of(operand: int, dims: Iterable[int]) -> tuple[Sources, ...]:
    """Dimensions of a result that are these of one operand."""
    return tuple([((operand, dim),) for dim in dims])


def _alike(equation: Any, rank: int, but: Container[int] = ()) -> tuple[Sources, ...]:
    """The dimensions of a result that all operands of its rank have; others are scalars."""
    places = [place for place, atom in enumerate(equation.invars) if len(shape_of(atom)) == rank]
    return tuple([() if i in but else tuple([(place, i) for place in places]) for i in range(rank)])


def _elementwise(equation: Any) -> DimRule:
    """Operands and results have the same dimensions, or parts of them."""
    return DimRule(tuple([_alike(equation, len(shape_of(out))) for out in equation.outvars]))


def _each(equation: Any) -> DimRule:
    """Each result is an operand."""
    return DimRule(tuple([_of(i, range(len(shape_of(out)))) for i, out in enumerate(equation.outvars)]))


def _placed(equation: Any, sources: Mapping[int, Sources], summed: tuple[Sources, ...] = ()) -> DimRule:
    """The sources of these dimensions of the only result."""
    return DimRule((tuple([sources.get(i, ()) for i in range(len(shape_of(equation.outvars[0])))]),), summed)


def _broadcast(equation: Any) -> DimRule:
    shapes = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    return _broadcast_to(*shapes, tuple(equations.broadcast_dims(equation)))


@functools.lru_cache(maxsize=4096)  # layers are alike
def _broadcast_to(operand: tuple[int, ...], out: tuple[int, ...], places: tuple[int, ...]) -> DimRule:
    sources = {place: ((0, i),) for i, place in enumerate(places) if out[place] == operand[i]}
    return DimRule((tuple([sources.get(i, ()) for i in range(len(out))]),))


def _reshape(equation: Any) -> DimRule:
    """Dimensions that are merged or split.

    What is known of merged dimensions is known of the first one of which anything is. Of the dimensions that
    one is split into, each may come from it.
    """
    groups = reshape_groups(equation)
    return _placed(equation, {i: tuple([(0, each) for each in old]) for old, new in groups for i in new})


Groups = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Groups of dimensions that become groups of others."""


def reshape_groups(equation: Any) -> Groups:
    """The groups of dimensions, of more than one element, that a `reshape` makes of groups of others."""
    if equations.permutes_elements(equation):
        return ()
    return _reshaped_to(shape_of(equation.invars[0]), shape_of(equation.outvars[0]))


@functools.lru_cache(maxsize=4096)
def _reshaped_to(old: tuple[int, ...], new: tuple[int, ...]) -> Groups:
    groups: list[tuple[list[int], list[int]]] = []
    left = [i for i, size in enumerate(old) if size != 1]
    right = [i for i, size in enumerate(new) if size != 1]
    while left and right:
        mine, theirs = [left.pop(0)], [right.pop(0)]
        while (more := math.prod(old[i] for i in mine) - math.prod(new[i] for i in theirs)) != 0:
            group, rest = (theirs, right) if more > 0 else (mine, left)
            if not rest:
                return groups
            group.append(rest.pop(0))
        groups.append((mine, theirs))
    return groups


def _transpose(equation: Any) -> DimRule:
    return DimRule((_of(0, equations.permutation(equation)),))


def _reduce(equation: Any) -> DimRule:
    ranks = tuple([len(shape_of(atom)) for atom in equation.invars])
    return _reduced(ranks, tuple(equations.removed_dims(equation)), len(equation.outvars))


@functools.lru_cache(maxsize=4096)
def _reduced(ranks: tuple[int, ...], gone: tuple[int, ...], results: int) -> DimRule:
    places = [place for place, rank in enumerate(ranks) if rank == ranks[0]]
    operands = [tuple([(place, i) for place in places]) for i in range(ranks[0])]
    kept = tuple([sources for i, sources in enumerate(operands) if i not in gone])
    return DimRule((kept,) * results, tuple([operands[i] for i in gone]))


def _sort(equation: Any) -> DimRule:
    """What is sorted along a dimension, or a part of it, has others in each place."""
    rank = _rank(equation)
    return DimRule((_alike(equation, rank, [equations.dim_of(equation) % rank]),) * len(equation.outvars))


def _stack(equation: Any) -> DimRule:
    dim, kept = equations.dim_of(equation), _alike(equation, _rank(equation))
    return DimRule(((*kept[:dim], (), *kept[dim:]),))


def _unstack(equation: Any) -> DimRule:
    dim = equations.dim_of(equation)
    kept = [i for i in range(_rank(equation)) if i != dim]
    return DimRule((_of(0, kept),) * len(equation.outvars))


def _leading(equation: Any, count: int) -> DimRule:
    """So many leading dimensions of the results are those of the first operand."""
    ranks = [len(shape_of(out)) for out in equation.outvars]
    return DimRule(tuple([_of(0, range(min(count, rank))) + ((),) * (rank - count) for rank in ranks]))


def _rank(equation: Any) -> int:
    return len(shape_of(equation.invars[0]))


def _resized(equation: Any) -> DimRule:
    """Further dimensions at the end, or fewer: bits of other sizes, what is drawn of keys."""
    return _leading(equation, _rank(equation))


def _fft(equation: Any) -> DimRule:
    return _leading(equation, _rank(equation) - len(equations.fft_lengths(equation)))


def _matrices(equation: Any) -> DimRule:
    """Stacks of matrices, or of vectors: the stack is what is before the last two dimensions of operands."""
    counts, found = [len(shape_of(atom)) - 2 for atom in equation.invars], []
    for out in equation.outvars:
        dims = range(len(shape_of(out)))
        found.append(tuple([tuple([(place, i) for place, n in enumerate(counts) if i < n]) for i in dims]))
    return DimRule(tuple(found))


def _triangular_solve(equation: Any) -> DimRule:
    """Beside the stack, each right-hand side is solved for alone."""
    [result] = _matrices(equation).results
    dim = len(result) - (1 if equations.is_left_side(equation) else 2)
    return DimRule(((*result[:dim], ((1, dim),), *result[dim + 1 :]),))


@functools.lru_cache(maxsize=4096)  # layers are alike
def _product(ranks: tuple[int, ...], contracted: Any, batch: Any, grouped: Any = ()) -> DimRule:
    """Dimensions of a product: the batch, what is free on the left, what is free on the right."""
    gone = [{*contracted[0], *batch[0]}, {*contracted[1], *batch[1], *grouped}]
    found: list[Sources] = [((0, i), (1, j)) for i, j in zip(*batch, strict=True)]
    for place in (0, 1):
        found += _of(place, [i for i in range(ranks[place]) if i not in gone[place]])
    found = [()] * (ranks[2] - len(found)) + found
    return DimRule((tuple(found),), tuple([((0, i), (1, j)) for i, j in zip(*contracted, strict=True)]))


def _dot(equation: Any) -> DimRule:
    return _product(_ranks(equation), *equations.dot_dims(equation))


def _ragged_dot(equation: Any) -> DimRule:
    """Rows in groups, each multiplied by the matrix of its group; or groups of rows contracted."""
    return _product(_ranks(equation), *equations.ragged_dot_dims(equation))


def _ranks(product: Any) -> tuple[int, ...]:
    return tuple([len(shape_of(atom)) for atom in (*product.invars[:2], *product.outvars)])


def count_multiplications(equation: Any) -> int:
    """How often a product of matrices multiplies two elements; of groups, each row those of its own."""
    dims, [result] = dim_rule(equation), [*map(shape_of, equation.outvars)]
    return size_of(equation.invars[0]) * math.prod(result[i] for i in dims.dims_only_from(1))


def _conv(equation: Any) -> DimRule:
    """The examples of the images, and the features of the kernel (rows in the gradient of a kernel)."""
    numbers, (features, rows) = equations.conv_dims(equation), equations.conv_groups(equation)
    image, kernel, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    found = {out[0]: ((0, image[0]),), out[1]: ((1, kernel[0]),)} if rows == 1 else {}
    summed = (0, image[1]), (1, kernel[1])
    # Each group of features has channels of its own: then these of the images are not those of the kernel.
    return _placed(equation, found, (summed,) if features == 1 else tuple([(place,) for place in summed]))


def _gather(equation: Any) -> DimRule:
    """What is looked up follows the indices; in dimensions that are taken whole, the operand."""
    numbers, sizes = equations.gather_dims(equation), equations.slice_sizes(equation)
    shape, rank = shape_of(equation.invars[0]), len(shape_of(equation.outvars[0]))
    batch = [i for i in range(rank) if i not in numbers.offset_dims]
    found: dict[int, Sources] = {i: ((1, j),) for j, i in enumerate(batch)}
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    whole = [i for i in range(len(shape)) if i not in gone]
    pairs = zip(numbers.offset_dims, whole, strict=True)
    found |= {place: ((0, i),) for place, i in pairs if sizes[i] == shape[i]}
    for i, j in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        found[batch[j]] += ((0, i),)
    return _placed(equation, found)


def _scatter(equation: Any) -> DimRule:
    """Dimensions stay those of the operand; where they are updated whole, they are also the updates'."""
    numbers, update = equations.scatter_dims(equation), shape_of(equation.invars[2])
    found: dict[int, Sources] = {i: ((0, i),) for i in range(_rank(equation))}
    for place, i in updated_dims(equation):
        found[i] += ((2, place),)
    rows = [i for i in range(len(update)) if i not in numbers.update_window_dims]
    for i, j in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        found[i] += ((2, rows[j]), (1, j))
    return _placed(equation, found)


def updated_dims(equation: Any) -> list[OperandDim]:
    """The dimensions of the updates of a scatter that are whole ones of its operand, and these."""
    numbers = equations.scatter_dims(equation)
    shape, update = shape_of(equation.invars[0]), shape_of(equation.invars[2])
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = [i for i in range(len(shape)) if i not in gone]
    pairs = zip(numbers.update_window_dims, windows, strict=True)
    return [(place, i) for place, i in pairs if update[place] == shape[i]]


def is_row_gather(equation: Any) -> bool:
    """Whether a `gather` takes whole rows of its operand, each by its number."""
    leading = len(shape_of(equation.invars[1])) - 1
    rows = _of(1, range(leading)) + _of(0, range(1, _rank(equation)))
    by_number = (*equations.gather_dims(equation).start_index_map,) == (0,)
    return by_number and dim_rule(equation).results == (rows,)


def is_row_scatter(equation: Any) -> bool:
    """Whether a scatter puts whole rows of its updates in its operand, each by its number."""
    numbers, leading = equations.scatter_dims(equation), len(shape_of(equation.invars[1])) - 1
    if not (*numbers.scatter_dims_to_operand_dims,) == (*numbers.inserted_window_dims,) == (0,):
        return False
    rows = [((0, i), (2, leading + i - 1)) for i in range(1, _rank(equation))]
    return dim_rule(equation).results == ((((0, 0),), *rows),)


def _update_slice(equation: Any) -> DimRule:
    shapes = zip(shape_of(equation.invars[0]), shape_of(equation.invars[1]), strict=True)
    return DimRule((tuple([((0, i), (1, i)) if a == b else ((0, i),) for i, (a, b) in enumerate(shapes)]),))


def _window(equation: Any) -> DimRule:
    """Windows over some dimensions, or copies along them; the others are kept."""
    shapes, found = [*map(shape_of, equation.invars)], []
    for out in map(shape_of, equation.outvars):
        changed = [i for i, size in enumerate(out) if any(x[i : i + 1] not in ((), (size,)) for x in shapes)]
        found.append(_alike(equation, len(out), changed))
    return DimRule(tuple(found))


def _exchanged(equation: Any) -> DimRule:
    """What devices exchange along mesh axes; the dimensions that an exchange changes have no sources."""
    found = equations.collective_dims(equation)
    if found is None:
        return UNKNOWN
    operands = zip(equation.outvars, found, strict=True)
    return DimRule(
        tuple(
            [
                tuple([((i, dims[dim]),) if dim in dims else () for dim in range(len(shape_of(out)))])
                for i, (out, dims) in enumerate(operands)
            ]
        )
    )


# Operands and results have the same dimensions and sizes; an operand may be a scalar.
_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    clz complex conj convert_element_type copy cos cosh cumlogsumexp cummax cummin cumprod cumsum
    digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac
    imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi name
    ne neg nextafter not one_minus_square or polygamma polynomial population_count pow random_fold_in
    random_gamma real reduce_precision regularized_incomplete_beta rem rev round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub
    tan tanh threefry2x32 xor zeta
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
# What devices exchange along mesh axes that are manual.
COLLECTIVES = frozenset(
    ('psum', 'psum_invariant', 'pmax', 'pmin', 'all_gather', 'reduce_scatter', 'all_to_all')
)
# Of these, elements see others along a dimension, or change places.
ALONG_DIM = frozenset(('cumlogsumexp', 'cummax', 'cummin', 'cumprod', 'cumsum', 'rev'))
# These cost no more than to read their operands, and a part of them is that of parts of their operands.
_CHEAP = 'add and convert_element_type eq ge gt le lt max min mul ne neg not or select_n sub xor'
CHEAP_ELEMENTWISE = frozenset(_CHEAP.split())
# The result is the first operand in another form, or a part of it.
SHAPE_OPS = frozenset(('broadcast_in_dim', 'convert_element_type', 'copy', 'reshape', 'squeeze', 'transpose'))
VIEWS = SHAPE_OPS | {'dynamic_slice', 'slice', 'split', 'unstack'}
SCATTERS = frozenset(f'scatter{kind}' for kind in ('', '-add', '-sub', '-mul', '-min', '-max'))
WINDOW_REDUCTIONS = frozenset(f'reduce_window{kind}' for kind in ('', '_sum', '_max', '_min'))
# Operands are matrices, or stacks of them, that are factored or solved for.
DECOMPOSITIONS = frozenset(
    (
        *('cholesky', 'eig', 'eigh', 'householder_product', 'lu', 'qr', 'schur', 'svd'),
        *('triangular_solve', 'tridiagonal', 'tridiagonal_solve', 'hessenberg'),
    )
)
# Operands are multiplied, and summed over dimensions that they have in common.
CONTRACTIONS = frozenset(('dot_general', 'ragged_dot_general', 'conv_general_dilated'))

_TABLE: tuple[tuple[str, Rule], ...] = (
    (_ELEMENTWISE, _elementwise),
    ('concatenate pad slice dynamic_slice split', _elementwise),
    ('sharding_constraint device_put reshard optimization_barrier ppermute pvary', _each),
    (' '.join(COLLECTIVES), _exchanged),
    ('reduce reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor', _reduce),
    ('argmax argmin squeeze', _reduce),
    ('scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max', _scatter),
    ('reduce_window reduce_window_sum reduce_window_max reduce_window_min tile', _window),
    ('select_and_scatter_add select_and_gather_add select_and_scatter', _window),
    (' '.join(DECOMPOSITIONS - {'triangular_solve'}), _matrices),
    ('triangular_solve', _triangular_solve),
    ('random_bits random_split random_unwrap random_seed', _resized),
    ('bitcast_convert_type random_wrap', _resized),
    ('sort top_k approx_top_k', _sort),
    ('stack', _stack),
    ('unstack', _unstack),
    ('broadcast_in_dim', _broadcast),
    ('reshape', _reshape),
    ('transpose', _transpose),
    ('dot_general', _dot),
    ('ragged_dot_general', _ragged_dot),
    ('conv_general_dilated', _conv),
    ('gather', _gather),
    ('dynamic_update_slice', _update_slice),
    ('fft', _fft),
    # What runs inside has blocks; where its results are is said, and not where they come from.
    ('shard_map', lambda equation: _leading(equation, 0)),
)
RULES = {name: rule for names, rule in _TABLE for name in names.split()}
