"""Dimension rules: from which operand dimensions the result dimensions of each primitive come.

All analyses of jaxprs share this table: partitioning along the batch, auto-sharding, FLOP counts. Primitives
without a rule have the rule `UNKNOWN`.
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
"""The index of an operand, and one of its dimensions."""
Sources = tuple[OperandDim, ...]
"""The operand dimensions that a dimension of a result may come from. The first sharded one decides."""

Axes = tuple[str, ...]
"""The mesh axes that shard a dimension."""


@dataclasses.dataclass(frozen=True, eq=False)
class DimRule:
    """How the dimensions of the operands of an equation become dimensions of its results.

    Attributes:
        results: the sources of each dimension of each result.
        reduced: the groups of operand dimensions that no result has: pairs of dimensions that a matmul
            contracts, and dimensions that a reduction removes.
    """

    results: tuple[tuple[Sources, ...], ...]
    reduced: tuple[Sources, ...] = ()

    def propagate(self, operands: Sequence[Sequence[Axes]]) -> list[tuple[Axes, ...]]:
        """Returns the mesh axes of each dimension of each result; an empty tuple for an unsharded result.

        Args:
            operands: the mesh axes of each dimension of each operand; empty for an unsharded operand.
        """
        propagated = []
        for result in self.results:
            dims = tuple([_first_sharded(operands, sources) for sources in result])
            propagated.append(dims if any(dims) else ())
        return propagated

    def dims_only_from(self, operand: int) -> list[int]:
        """Returns the dimensions of the first result that come from one operand only."""
        return [
            i
            for i, sources in enumerate(self.results[0])
            if sources and all(source == operand for source, _ in sources)
        ]

    def dim_from_exactly(self, operand_dims: Iterable[OperandDim]) -> int | None:
        """Returns the dimension of the results that comes from exactly these operand dimensions.

        Returns None unless there is exactly one, the same in all results.
        """
        sources = {*operand_dims}
        dims_of_results = {
            tuple([i for i, each_sources in enumerate(result) if {*each_sources} == sources])
            for result in self.results
        }
        [dims] = dims_of_results if len(dims_of_results) == 1 else [()]
        return dims[0] if len(dims) == 1 else None


def _first_sharded(operands: Sequence[Sequence[Axes]], sources: Sources) -> Axes:
    for operand, dim in sources:
        if operands[operand] and (axes := operands[operand][dim]):
            return axes
    return ()


UNKNOWN = DimRule(())


def dim_rule(equation: Any) -> DimRule:
    """Returns the dimension rule of an equation; `UNKNOWN` if its primitive has none."""
    rule = RULES.get(primitive_name(equation))
    return UNKNOWN if rule is None else rule(equation)


Rule = Callable[[Any], DimRule]


# Rules -----------------------------------------------------------------------------------------------


def _from_operand(operand: int, dims: Iterable[int]) -> tuple[Sources, ...]:
    """Returns the sources of a result whose dimensions are these dimensions of one operand."""
    return tuple([((operand, dim),) for dim in dims])


def _from_all_operands(equation: Any, rank: int, changed: Container[int] = ()) -> tuple[Sources, ...]:
    """Returns the sources of a result that has the dimensions of all operands of its rank.

    Operands of another rank are scalars. *changed* dimensions have no sources.
    """
    operands = [operand for operand, atom in enumerate(equation.invars) if len(shape_of(atom)) == rank]
    return tuple([() if i in changed else tuple([(operand, i) for operand in operands]) for i in range(rank)])


def _one_result(equation: Any, sources: Mapping[int, Sources], reduced: tuple[Sources, ...] = ()) -> DimRule:
    """Returns the rule of an equation with one result, from the sources of some of its dimensions."""
    rank = len(shape_of(equation.outvars[0]))
    return DimRule((tuple([sources.get(i, ()) for i in range(rank)]),), reduced)


def _elementwise(equation: Any) -> DimRule:
    """Operands and results have the same dimensions, or parts of them."""
    return DimRule(tuple([_from_all_operands(equation, len(shape_of(var))) for var in equation.outvars]))


def _identity(equation: Any) -> DimRule:
    """Each result has the dimensions of the operand with its index."""
    ranks = [len(shape_of(var)) for var in equation.outvars]
    return DimRule(tuple([_from_operand(i, range(rank)) for i, rank in enumerate(ranks)]))


def _broadcast(equation: Any) -> DimRule:
    shapes = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    return _broadcast_shapes(*shapes, tuple(equations.broadcast_dims(equation)))


@functools.lru_cache(maxsize=4096)  # layers have the same shapes
def _broadcast_shapes(old: tuple[int, ...], new: tuple[int, ...], dims: tuple[int, ...]) -> DimRule:
    sources = {dim: ((0, i),) for i, dim in enumerate(dims) if new[dim] == old[i]}
    return DimRule((tuple([sources.get(i, ()) for i in range(len(new))]),))


def _reshape(equation: Any) -> DimRule:
    """Dimensions are merged or split.

    A merged dimension comes from the first of its group that is sharded. Each dimension of a split group may
    come from the dimension that is split.
    """
    sources = {
        new_dim: tuple([(0, old_dim) for old_dim in old_dims])
        for old_dims, new_dims in reshape_groups(equation)
        for new_dim in new_dims
    }
    return _one_result(equation, sources)


Groups = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Pairs of a group of old dimensions, and the group of new dimensions that it becomes."""


def reshape_groups(equation: Any) -> Groups:
    """Returns the groups of dimensions that a `reshape` merges and splits, without dimensions of size 1.

    The old dimensions of a group are in the order in which they are merged.
    """
    old, new = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    order = equations.merging_order(equation)
    if order is None:
        return _reshape_shapes(old, new)
    groups = _reshape_shapes(tuple([old[dim] for dim in order]), new)
    return [([order[i] for i in old_dims], new_dims) for old_dims, new_dims in groups]


@functools.lru_cache(maxsize=4096)
def _reshape_shapes(old: tuple[int, ...], new: tuple[int, ...]) -> Groups:
    groups: list[tuple[list[int], list[int]]] = []
    old_rest = [i for i, size in enumerate(old) if size != 1]
    new_rest = [i for i, size in enumerate(new) if size != 1]
    while old_rest and new_rest:
        old_dims, new_dims = [old_rest.pop(0)], [new_rest.pop(0)]
        while (excess := math.prod(old[i] for i in old_dims) - math.prod(new[i] for i in new_dims)) != 0:
            dims, rest = (new_dims, new_rest) if excess > 0 else (old_dims, old_rest)
            if not rest:
                return groups
            dims.append(rest.pop(0))
        groups.append((old_dims, new_dims))
    return groups


def _transpose(equation: Any) -> DimRule:
    return _transpose_dims(tuple(equations.permutation(equation)))


@functools.lru_cache(maxsize=4096)
def _transpose_dims(permutation: tuple[int, ...]) -> DimRule:
    return DimRule((_from_operand(0, permutation),))


def _reduce(equation: Any) -> DimRule:
    ranks = tuple([len(shape_of(atom)) for atom in equation.invars])
    return _reduce_ranks(ranks, tuple(equations.removed_dims(equation)), len(equation.outvars))


@functools.lru_cache(maxsize=4096)
def _reduce_ranks(ranks: tuple[int, ...], removed: tuple[int, ...], num_results: int) -> DimRule:
    operands = [operand for operand, rank in enumerate(ranks) if rank == ranks[0]]
    sources = [tuple([(operand, i) for operand in operands]) for i in range(ranks[0])]
    kept = tuple([dim_sources for i, dim_sources in enumerate(sources) if i not in removed])
    return DimRule((kept,) * num_results, tuple([sources[i] for i in removed]))


def _sort(equation: Any) -> DimRule:
    """The dimension along which elements are sorted, or selected, has no source."""
    rank = _rank(equation)
    sources = _from_all_operands(equation, rank, [equations.dim_of(equation) % rank])
    return DimRule((sources,) * len(equation.outvars))


def _stack(equation: Any) -> DimRule:
    dim, sources = equations.dim_of(equation), _from_all_operands(equation, _rank(equation))
    return DimRule(((*sources[:dim], (), *sources[dim:]),))


def _unstack(equation: Any) -> DimRule:
    dim = equations.dim_of(equation)
    kept = [i for i in range(_rank(equation)) if i != dim]
    return DimRule((_from_operand(0, kept),) * len(equation.outvars))


def _leading(equation: Any, count: int) -> DimRule:
    """The first *count* dimensions of the results are those of the first operand."""
    ranks = [len(shape_of(var)) for var in equation.outvars]
    return DimRule(
        tuple([_from_operand(0, range(min(count, rank))) + ((),) * (rank - count) for rank in ranks])
    )


def _rank(equation: Any) -> int:
    return len(shape_of(equation.invars[0]))


def _resized(equation: Any) -> DimRule:
    """The results have more or fewer dimensions at the end, as bitcasts and draws from keys do."""
    return _leading(equation, _rank(equation))


def _fft(equation: Any) -> DimRule:
    return _leading(equation, _rank(equation) - len(equations.fft_lengths(equation)))


def _decomposition(equation: Any) -> DimRule:
    """All dimensions of operands but the last two are stacks of matrices, or of vectors."""
    stack_ranks = [len(shape_of(atom)) - 2 for atom in equation.invars]
    results = []
    for var in equation.outvars:
        dims = range(len(shape_of(var)))
        results.append(
            tuple([tuple([(operand, i) for operand, n in enumerate(stack_ranks) if i < n]) for i in dims])
        )
    return DimRule(tuple(results))


def _triangular_solve(equation: Any) -> DimRule:
    """Besides the stack, the right-hand sides are independent of each other."""
    [result] = _decomposition(equation).results
    dim = len(result) - (1 if equations.is_left_side(equation) else 2)
    return DimRule(((*result[:dim], ((1, dim),), *result[dim + 1 :]),))


@functools.lru_cache(maxsize=4096)  # layers have the same shapes
def _contraction(ranks: tuple[int, ...], contracted: Any, batch: Any, group_dims: Any = ()) -> DimRule:
    """The result has the batch dimensions, then the free ones of the left and of the right operand."""
    not_free = [{*contracted[0], *batch[0]}, {*contracted[1], *batch[1], *group_dims}]
    result: list[Sources] = [((0, i), (1, j)) for i, j in zip(*batch, strict=True)]
    for operand in (0, 1):
        result += _from_operand(operand, [i for i in range(ranks[operand]) if i not in not_free[operand]])
    result = [()] * (ranks[2] - len(result)) + result
    return DimRule((tuple(result),), tuple([((0, i), (1, j)) for i, j in zip(*contracted, strict=True)]))


def _dot(equation: Any) -> DimRule:
    return _contraction(_contraction_ranks(equation), *equations.dot_dims(equation))


def _ragged_dot(equation: Any) -> DimRule:
    """Each example is multiplied by the matrix of its group, or groups of examples are contracted."""
    return _contraction(_contraction_ranks(equation), *equations.ragged_dot_dims(equation))


def _contraction_ranks(equation: Any) -> tuple[int, ...]:
    return tuple([len(shape_of(atom)) for atom in (*equation.invars[:2], *equation.outvars)])


def count_multiplications(equation: Any) -> int:
    """Returns the number of multiplications of elements in a matmul.

    A ragged dot multiplies each example by the matrix of its own group only.
    """
    rule, [shape] = dim_rule(equation), [*map(shape_of, equation.outvars)]
    return size_of(equation.invars[0]) * math.prod(shape[i] for i in rule.dims_only_from(1))


def _conv(equation: Any) -> DimRule:
    """The result has the examples of the images, and the output features of the kernel.

    In the gradient of a kernel the batch is in groups, and no dimension of the result has sources.
    """
    numbers, (feature_groups, batch_groups) = equations.conv_dims(equation), equations.conv_groups(equation)
    image, kernel, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    sources = {out[0]: ((0, image[0]),), out[1]: ((1, kernel[0]),)} if batch_groups == 1 else {}
    channels = (0, image[1]), (1, kernel[1])
    # The channels of a kernel are those of one feature group of the image.
    is_grouped = feature_groups != 1
    reduced = tuple([(operand_dim,) for operand_dim in channels]) if is_grouped else (channels,)
    return _one_result(equation, sources, reduced)


def _gather(equation: Any) -> DimRule:
    """Batch dimensions come from the indices, and dimensions that are not sliced from the operand."""
    numbers, sizes = equations.gather_dims(equation), equations.slice_sizes(equation)
    shape, rank = shape_of(equation.invars[0]), len(shape_of(equation.outvars[0]))
    batch_dims = [i for i in range(rank) if i not in numbers.offset_dims]
    sources: dict[int, Sources] = {i: ((1, j),) for j, i in enumerate(batch_dims)}
    removed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    window_dims = [i for i in range(len(shape)) if i not in removed]
    pairs = zip(numbers.offset_dims, window_dims, strict=True)
    sources |= {result_dim: ((0, i),) for result_dim, i in pairs if sizes[i] == shape[i]}
    for i, j in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        sources[batch_dims[j]] += ((0, i),)
    return _one_result(equation, sources)


def _scatter(equation: Any) -> DimRule:
    """The result has the dimensions of the operand, and of the updates where these are not slices."""
    numbers, updates = equations.scatter_dims(equation), shape_of(equation.invars[2])
    sources: dict[int, Sources] = {i: ((0, i),) for i in range(_rank(equation))}
    for update_dim, i in _full_update_dims(equation):
        sources[i] += ((2, update_dim),)
    scatter_dims = [i for i in range(len(updates)) if i not in numbers.update_window_dims]
    for i, j in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        sources[i] += ((2, scatter_dims[j]), (1, j))
    return _one_result(equation, sources)


def _full_update_dims(equation: Any) -> list[tuple[int, int]]:
    """Returns pairs of an update dimension of a scatter and the operand dimension that it covers."""
    numbers = equations.scatter_dims(equation)
    shape, updates = shape_of(equation.invars[0]), shape_of(equation.invars[2])
    removed = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window_dims = [i for i in range(len(shape)) if i not in removed]
    pairs = zip(numbers.update_window_dims, window_dims, strict=True)
    return [(update_dim, i) for update_dim, i in pairs if updates[update_dim] == shape[i]]


def is_row_gather(equation: Any) -> bool:
    """Returns whether a `gather` takes full rows of its operand, each by its index."""
    leading = len(shape_of(equation.invars[1])) - 1
    row_sources = _from_operand(1, range(leading)) + _from_operand(0, range(1, _rank(equation)))
    indexes_rows = (*equations.gather_dims(equation).start_index_map,) == (0,)
    return indexes_rows and dim_rule(equation).results == (row_sources,)


def is_row_scatter(equation: Any) -> bool:
    """Returns whether a scatter writes full rows of its updates, each at its index."""
    numbers, leading = equations.scatter_dims(equation), len(shape_of(equation.invars[1])) - 1
    if not (*numbers.scatter_dims_to_operand_dims,) == (*numbers.inserted_window_dims,) == (0,):
        return False
    row_sources = [((0, i), (2, leading + i - 1)) for i in range(1, _rank(equation))]
    return dim_rule(equation).results == ((((0, 0),), *row_sources),)


def _update_slice(equation: Any) -> DimRule:
    sizes = zip(shape_of(equation.invars[0]), shape_of(equation.invars[1]), strict=True)
    return DimRule((tuple([((0, i), (1, i)) if a == b else ((0, i),) for i, (a, b) in enumerate(sizes)]),))


def _window(equation: Any) -> DimRule:
    """Dimensions that windows, or copies, change in size have no sources."""
    shapes, results = [*map(shape_of, equation.invars)], []
    for shape in map(shape_of, equation.outvars):
        changed = [
            i for i, size in enumerate(shape) if any(x[i : i + 1] not in ((), (size,)) for x in shapes)
        ]
        results.append(_from_all_operands(equation, len(shape), changed))
    return DimRule(tuple(results))


def _collective(equation: Any) -> DimRule:
    """Dimensions that a collective along manual mesh axes changes have no sources."""
    dim_maps = equations.collective_dims(equation)
    if dim_maps is None:
        return UNKNOWN
    results = [
        tuple([((i, dim_map[dim]),) if dim in dim_map else () for dim in range(len(shape_of(var)))])
        for i, (var, dim_map) in enumerate(zip(equation.outvars, dim_maps, strict=True))
    ]
    return DimRule(tuple(results))


# Tables ----------------------------------------------------------------------------------------------

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
# Collectives along manual mesh axes.
COLLECTIVES = frozenset(
    ('psum', 'psum_invariant', 'pmax', 'pmin', 'all_gather', 'reduce_scatter', 'all_to_all')
)
# Elementwise primitives that also combine, or reorder, the elements along a dimension.
ALONG_DIM = frozenset(('cumlogsumexp', 'cummax', 'cummin', 'cumprod', 'cumsum', 'rev'))
# Primitives that cost no more than reading their operands. A slice of the result needs slices of the operands
# only.
_CHEAP = 'add and convert_element_type eq ge gt le lt max min mul ne neg not or select_n sub xor'
CHEAP_ELEMENTWISE = frozenset(_CHEAP.split())
# The result has the elements of the first operand in another shape or dtype, or (`VIEWS`) a part of them.
SHAPE_OPS = frozenset(('broadcast_in_dim', 'convert_element_type', 'copy', 'reshape', 'squeeze', 'transpose'))
VIEWS = SHAPE_OPS | {'dynamic_slice', 'slice', 'split', 'unstack'}
SCATTERS = frozenset(f'scatter{kind}' for kind in ('', '-add', '-sub', '-mul', '-min', '-max'))
WINDOW_REDUCTIONS = frozenset(f'reduce_window{kind}' for kind in ('', '_sum', '_max', '_min'))
# Operands are matrices, or stacks of matrices, that are factored or solved.
DECOMPOSITIONS = frozenset(
    (
        *('cholesky', 'eig', 'eigh', 'householder_product', 'lu', 'qr', 'schur', 'svd'),
        *('triangular_solve', 'tridiagonal', 'tridiagonal_solve', 'hessenberg'),
    )
)
# Matmuls and convolutions: the operands are multiplied, and summed over contracted dimensions.
CONTRACTIONS = frozenset(('dot_general', 'ragged_dot_general', 'conv_general_dilated'))

_TABLE: tuple[tuple[str, Rule], ...] = (
    (_ELEMENTWISE, _elementwise),
    ('concatenate pad slice dynamic_slice split', _elementwise),
    ('sharding_constraint device_put reshard optimization_barrier ppermute pvary', _identity),
    (' '.join(COLLECTIVES), _collective),
    ('reduce reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor', _reduce),
    ('argmax argmin squeeze', _reduce),
    ('scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max', _scatter),
    ('reduce_window reduce_window_sum reduce_window_max reduce_window_min tile', _window),
    ('select_and_scatter_add select_and_gather_add select_and_scatter', _window),
    (' '.join(DECOMPOSITIONS - {'triangular_solve'}), _decomposition),
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
    # Its specs state the shardings of the results, but not where their dimensions come from.
    ('shard_map', lambda equation: _leading(equation, 0)),
)
RULES = {name: rule for names, rule in _TABLE for name in names.split()}
