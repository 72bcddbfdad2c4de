"""Where the rows of the batch are in the results of each primitive, from where they are in its operands.

A primitive that is not in the table loses the trail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from scalax._follow.trail import LOST, Trail, merged, of_dims
from scalax._jax import equations
from scalax._jax.equations import PLACES, shape_of
from scalax._jax.primitives import primitive_name
from scalax._tree.specs import entry_axes

Rule = Callable[[Any, Sequence[Trail]], list[Trail]]
"""Takes an equation and the trails of its operands; gives those of its results."""


def _elementwise(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    """Operands and results have the same dimensions, or parts of them; or an operand is a scalar."""
    return [merged(trails, len(shape_of(out))) for out in eqn.outvars]


def _each(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    """Each result is an operand."""
    return list(trails[: len(eqn.outvars)])


def _broadcast(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    out, operand = shape_of(eqn.outvars[0]), shape_of(eqn.invars[0])
    dims = {
        place: axes
        for place, axes, size in zip(equations.broadcast_dims(eqn), trails[0], operand, strict=False)
        if out[place] == size
    }
    return [of_dims(dims, len(out))]


def _reshape(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    """Dimensions that are merged or split.

    The rows of merged dimensions are those of the first one that has any. Of the dimensions that one is split
    into, the first that divides has the rows: rows change places if that is not the major one.
    """
    if equations.is_reordered(eqn) or not trails[0]:
        return [LOST]
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    dims = {}
    for merged_dims, split_dims in _groups(old, new):
        i = next((i for i in merged_dims if trails[0][i]), None)
        if i is not None:
            dims.update(dict.fromkeys(split_dims, trails[0][i]))
    return [of_dims(dims, len(new))]


def redealt(eqn: Any, trail: Trail) -> Trail:
    """The rows of a dimension that a reshape splits, in the second of the new dimensions.

    Parts of a batch are rows that a loop takes one part after the other: ``x.reshape(parts, rows, ...)``.
    """
    if equations.is_reordered(eqn) or not trail:
        return LOST
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    split = [(a[0], b[1]) for a, b in _groups(old, new) if len(a) == 1 and len(b) > 1 and b[0] == 0]
    return of_dims({place: trail[i] for i, place in split}, len(new))


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The groups of dimensions, of more than one element, that a reshape makes of groups of others."""
    groups: list[tuple[list[int], list[int]]] = []
    left = [i for i, size in enumerate(old) if size != 1]
    right = [i for i, size in enumerate(new) if size != 1]
    while left and right:
        mine, theirs = [left.pop(0)], [right.pop(0)]
        a, b = old[mine[0]], new[theirs[0]]
        while a != b:
            if a < b and left:
                a *= old[left[0]]
                mine.append(left.pop(0))
            elif b < a and right:
                b *= new[right[0]]
                theirs.append(right.pop(0))
            else:
                return groups
        groups.append((mine, theirs))
    return groups


def _transpose(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    return [tuple([trails[0][i] for i in equations.permutation(eqn)]) if trails[0] else LOST]


def _without(dims: Sequence[int], trail: Trail) -> Trail:
    kept = tuple([axes for i, axes in enumerate(trail) if i not in dims])
    return kept if any(kept) else LOST


def _reduce(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    operands = merged(trails, len(shape_of(eqn.invars[0])))
    return [_without(equations.removed_dims(eqn), operands)] * len(eqn.outvars)


def _sort(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    """What is sorted along the dimension of the rows, or a part of it, has others in each place."""
    rank = len(shape_of(eqn.invars[0]))
    kept, sorted_dim = merged(trails, rank), equations.dim_of(eqn) % rank
    return [of_dims({i: axes for i, axes in enumerate(kept) if i != sorted_dim}, rank)] * len(eqn.outvars)


def _stack(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    rank, axis = len(shape_of(eqn.outvars[0])), equations.dim_of(eqn)
    kept = merged(trails, rank - 1)
    return [of_dims({i + (i >= axis): axes for i, axes in enumerate(kept)}, rank)]


def _unstack(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    return [_without((equations.dim_of(eqn),), trails[0])] * len(eqn.outvars)


def _bitcast(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    """A last dimension comes or goes where the sizes of the dtypes differ."""
    rank = len(shape_of(eqn.outvars[0]))
    return [of_dims({i: axes for i, axes in enumerate(trails[0]) if i < rank}, rank)]


def _dot(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    return [_product(eqn, trails, *equations.dot_dims(eqn))]


def _product(eqn: Any, trails: Sequence[Trail], contracted: Any, batch: Any, grouped: Any = ()) -> Trail:
    """Dimensions of a product: the batch, what is free on the left, what is free on the right."""
    left, right = [trail or ((),) * len(shape_of(x)) for trail, x in zip(trails, eqn.invars, strict=False)]
    gone = [{*contracted[0], *batch[0]}, {*contracted[1], *batch[1], *grouped}]
    dims = [left[i] or right[j] for i, j in zip(*batch, strict=True)]
    dims += [axes for i, axes in enumerate(left) if i not in gone[0]]
    dims += [axes for i, axes in enumerate(right) if i not in gone[1]]
    dims = [()] * (len(shape_of(eqn.outvars[0])) - len(dims)) + dims
    return tuple(dims) if any(dims) else LOST


def _ragged_dot(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    """Rows in groups, each multiplied by the matrix of its group; or groups of rows contracted."""
    return [_product(eqn, trails[:2], *equations.ragged_dot_dims(eqn))]


def _conv(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    """The examples of the images, and the features of the kernel (rows in the gradient of a kernel)."""
    numbers = equations.conv_dims(eqn)
    if equations.conv_groups(eqn)[1] != 1:
        return [LOST]
    images, kernel = trails[0], trails[1]
    dims = {
        numbers.out_spec[0]: images[numbers.lhs_spec[0]] if images else (),
        numbers.out_spec[1]: kernel[numbers.rhs_spec[0]] if kernel else (),
    }
    return [of_dims(dims, len(shape_of(eqn.outvars[0])))]


def _gather(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    """Rows follow the indices; in dimensions that are taken whole, the operand."""
    numbers, sizes = equations.gather_dims(eqn), equations.slice_sizes(eqn)
    operand, indices = trails
    shape, rank = shape_of(eqn.invars[0]), len(shape_of(eqn.outvars[0]))
    batch = [i for i in range(rank) if i not in numbers.offset_dims]
    dims: dict[int, tuple[str, ...]] = dict(zip(batch, indices, strict=False)) if indices else {}
    if operand:
        gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        whole = [i for i in range(len(shape)) if i not in gone]
        for place, i in zip(numbers.offset_dims, whole, strict=True):
            if sizes[i] == shape[i]:
                dims[place] = operand[i]
        for i, j in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
            dims[batch[j]] = dims.get(batch[j]) or operand[i]
    return [of_dims(dims, rank)]


def _scatter(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    """Rows stay those of the operand; in dimensions that are updated whole, also of the updates."""
    numbers = equations.scatter_dims(eqn)
    operand, indices, updates = trails[0], trails[1], trails[2]
    shape, update = shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
    dims = dict(enumerate(operand))
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = [i for i in range(len(shape)) if i not in gone]
    rows = [i for i in range(len(update)) if i not in numbers.update_window_dims]
    if updates:
        for place, i in zip(numbers.update_window_dims, windows, strict=True):
            if update[place] == shape[i]:
                dims[i] = dims.get(i) or updates[place]
    for i, j in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        dims[i] = dims.get(i) or (updates[rows[j]] if updates else ()) or (indices[j] if indices else ())
    return [of_dims(dims, len(shape))]


def columns_of_table(eqn: Any, table: Trail) -> Trail:
    """Where updates that are scattered to the rows of a table lie, if their columns lie as the table's."""
    numbers = equations.scatter_dims(eqn)
    shape, update = shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = [i for i in range(len(shape)) if i not in gone]
    pairs = zip(numbers.update_window_dims, windows, strict=True)
    found = {place: table[i] for place, i in pairs if table and update[place] == shape[i]}
    return of_dims(found, len(update))


def _update_slice(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    shape, update = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    whole = [axes if a == b else () for axes, a, b in zip(trails[1], shape, update, strict=False)]
    return [merged([trails[0], tuple(whole)], len(shape))] if any(whole) else [trails[0]]


def _window(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    """Windows over some dimensions, or copies along them; the others are kept."""
    return [
        of_dims(
            {
                i: axes
                for i, axes in enumerate(merged(trails, len(shape_of(out))))
                if all(len(shape_of(x)) <= i or shape_of(x)[i] == shape_of(out)[i] for x in eqn.invars)
            },
            len(shape_of(out)),
        )
        for out in eqn.outvars
    ]


def _leading(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    """Stacks of matrices, or of vectors: leading dimensions of the same sizes are the stack."""
    found = []
    for out in eqn.outvars:
        dims: dict[int, tuple[str, ...]] = {}
        for atom, trail in zip(eqn.invars, trails, strict=True):
            for i, (axes, a, b) in enumerate(zip(trail, shape_of(atom), shape_of(out), strict=False)):
                if a != b or i >= len(shape_of(atom)) - 2:
                    break
                dims[i] = dims.get(i) or axes
        found.append(of_dims(dims, len(shape_of(out))))
    return found


def _fft(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    rank = len(shape_of(eqn.outvars[0]))
    kept = rank - len(equations.fft_lengths(eqn))
    return [of_dims({i: axes for i, axes in enumerate(trails[0]) if i < kept}, rank)]


def _longer(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    """Keys of random numbers: what is drawn from each has further dimensions."""
    rank = len(shape_of(eqn.outvars[0]))
    return [of_dims(dict(enumerate(trails[0])), rank) if trails[0] else LOST] * len(eqn.outvars)


def _placed(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    """What the user says holds."""
    _, results = placed_by_user(eqn)
    return [placed_at(results.get(i), trails[i], var) for i, var in enumerate(eqn.outvars)]


def placed_at(sharding: Any, trail: Trail, var: Any) -> Trail:
    """The trail of a value that has this sharding. Dimensions that are left open stay as they were.

    Args:
        sharding: where the user places it; None if nothing is said.
        trail: its trail, without what is said.
        var: the value.
    """
    if sharding is None:
        return trail
    dims = {
        i: (trail[i] if trail else ()) if entry is PartitionSpec.UNCONSTRAINED else entry_axes(entry)
        for i, entry in enumerate(getattr(sharding, 'spec', ()))
    }
    return of_dims(dims, len(shape_of(var)))


def placed_by_user(eqn: Any) -> Sequence[Mapping[int, Any]]:
    """The operands and the results of an equation that the user places, by number, with their shardings."""
    return equations.shardings_said(eqn) if primitive_name(eqn) in PLACES else ({}, {})


def _shard_map(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    """What runs inside has blocks; behind it is what the user says."""
    return [
        of_dims(dict(enumerate(map(entry_axes, spec))), len(shape_of(out)))
        for spec, out in zip(equations.mapped_outputs(eqn), eqn.outvars, strict=True)
    ]


def own_dims(eqn: Any, place: int) -> Sequence[int]:
    """The dimensions of a result that are those of one operand alone: of a weight its columns.

    Args:
        eqn: a product, a convolution or a look-up; of others there are none.
        place: the number of the operand.
    """
    name, rank = primitive_name(eqn), len(shape_of(eqn.outvars[0]))
    if name == 'dot_general':
        contracted, batch = equations.dot_dims(eqn)
        left = len(shape_of(eqn.invars[0])) - len(contracted[0])
        return range(left, rank) if place else range(len(batch[0]), left)
    if name == 'conv_general_dilated' and place == 1:
        return (equations.conv_dims(eqn).out_spec[1],)
    if name == 'gather' and place == 0:
        return tuple(equations.gather_dims(eqn).offset_dims)
    return ()


_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    clz complex conj convert_element_type copy cos cosh cumlogsumexp cummax cummin cumprod cumsum
    digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac
    imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul name ne
    neg nextafter not one_minus_square or polygamma population_count pow real reduce_precision
    regularized_incomplete_beta rem rev round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor
    zeta random_fold_in
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
_RULES: tuple[tuple[str, Rule], ...] = (
    (_ELEMENTWISE, _elementwise),
    ('concatenate pad slice dynamic_slice split', _elementwise),
    ('optimization_barrier pvary', _each),
    ('reduce reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor', _reduce),
    ('argmax argmin squeeze', _reduce),
    ('scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max', _scatter),
    ('reduce_window reduce_window_sum reduce_window_max reduce_window_min tile', _window),
    ('select_and_scatter_add select_and_gather_add select_and_scatter', _window),
    ('cholesky eig eigh householder_product lu qr schur svd', _leading),
    ('triangular_solve tridiagonal tridiagonal_solve hessenberg', _leading),
    ('random_bits random_split random_unwrap random_seed', _longer),
    ('bitcast_convert_type random_wrap', _bitcast),
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
    ('sharding_constraint device_put', _placed),
    ('shard_map', _shard_map),
)
RULES = {name: rule for names, rule in _RULES for name in names.split()}

# The user says where their results are, whatever is known of their operands.
SAID = frozenset({'sharding_constraint', 'device_put', 'shard_map'})
# Operands of different layouts meet in these, and the compiler chooses where their results are.
CHOICES = frozenset(
    {
        *('dot_general', 'ragged_dot_general', 'conv_general_dilated', 'gather', 'sort', 'scatter'),
        *('scatter-add', 'select_and_scatter_add', 'reduce_window_max', 'reduce_window_sum'),
    }
)
