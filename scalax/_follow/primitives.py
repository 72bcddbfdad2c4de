"""Where the rows of the batch are in the results of each primitive, from where they are in its operands.

A primitive that is not in the table loses the trail.
"""

from __future__ import annotations

import concurrent.futures
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core.primitives
from jax.sharding import AbstractMesh, PartitionSpec

from scalax._follow.jaxprs import WITH_JAXPRS, equations, shape_of
from scalax._follow.trail import LOST, Trail, merged, of_dims
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
    places = eqn.params['broadcast_dimensions']
    dims = {
        place: axes
        for place, axes, size in zip(places, trails[0], operand, strict=False)
        if out[place] == size
    }
    return [of_dims(dims, len(out))]


def _reshape(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    """Dimensions that are merged or split.

    The rows of merged dimensions are those of the first one that has any. Of the dimensions that one is split
    into, the first that divides has the rows: rows change places if that is not the major one.
    """
    if eqn.params.get('dimensions') is not None or not trails[0]:
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
    if eqn.params.get('dimensions') is not None or not trail:
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
    return [tuple([trails[0][i] for i in eqn.params['permutation']]) if trails[0] else LOST]


def _without(dims: Sequence[int], trail: Trail) -> Trail:
    kept = tuple([axes for i, axes in enumerate(trail) if i not in dims])
    return kept if any(kept) else LOST


def _squeeze(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    return [_without(eqn.params['dimensions'], trails[0])]


def _reduce(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    dims = eqn.params['axes'] if 'axes' in eqn.params else eqn.params['dimensions']
    operands = len(shape_of(eqn.invars[0]))
    return [_without(dims, merged(trails, operands))] * len(eqn.outvars)


def _top_k(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    rank = len(shape_of(eqn.invars[0]))
    axis = eqn.params.get('axis', eqn.params.get('reduction_dimension', rank - 1)) % rank
    kept = {i: axes for i, axes in enumerate(trails[0]) if i != axis}
    return [of_dims(kept, rank)] * len(eqn.outvars)


def _sort(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    """What is sorted along the dimension of the rows has others in each place."""
    rank = len(shape_of(eqn.invars[0]))
    kept = merged(trails, rank)
    dims = {i: axes for i, axes in enumerate(kept) if i != eqn.params['dimension']}
    return [of_dims(dims, rank)] * len(eqn.outvars)


def _stack(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    rank, axis = len(shape_of(eqn.outvars[0])), eqn.params['axis']
    kept = merged(trails, rank - 1)
    return [of_dims({i + (i >= axis): axes for i, axes in enumerate(kept)}, rank)]


def _unstack(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    return [_without((eqn.params['axis'],), trails[0])] * len(eqn.outvars)


def _bitcast(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    """A last dimension comes or goes where the sizes of the dtypes differ."""
    rank = len(shape_of(eqn.outvars[0]))
    return [of_dims({i: axes for i, axes in enumerate(trails[0]) if i < rank}, rank)]


def _dot(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    (contracted, batch) = eqn.params['dimension_numbers']
    return [_product(eqn, trails, contracted, batch)]


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
    numbers = eqn.params['ragged_dot_dimension_numbers']
    contracted, batch = numbers.dot_dimension_numbers
    return [_product(eqn, trails[:2], contracted, batch, numbers.rhs_group_dimensions)]


def _conv(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    """The examples of the images, and the features of the kernel (rows in the gradient of a kernel)."""
    numbers = eqn.params['dimension_numbers']
    if eqn.params['batch_group_count'] != 1:
        return [LOST]
    images, kernel = trails[0], trails[1]
    dims = {
        numbers.out_spec[0]: images[numbers.lhs_spec[0]] if images else (),
        numbers.out_spec[1]: kernel[numbers.rhs_spec[0]] if kernel else (),
    }
    return [of_dims(dims, len(shape_of(eqn.outvars[0])))]


def _gather(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    """Rows follow the indices; in dimensions that are taken whole, the operand."""
    numbers, sizes = eqn.params['dimension_numbers'], eqn.params['slice_sizes']
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
    numbers = eqn.params['dimension_numbers']
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
    numbers = eqn.params['dimension_numbers']
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
    kept = rank - len(eqn.params['fft_lengths'])
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


# The parameters that say where the operands and the results are.
PLACES = {
    'sharding_constraint': ('sharding', 'sharding'),
    'device_put': ('devices', 'devices'),
    'jit': ('in_shardings', 'out_shardings'),
}


def placed_by_user(eqn: Any) -> Sequence[Mapping[int, Any]]:
    """The operands and the results of an equation that the user places, by number, with their shardings."""
    said = [eqn.params[name] for name in PLACES.get(primitive_name(eqn), ())] or [(), ()]
    each = [shardings if isinstance(shardings, tuple) else (shardings,) for shardings in said]
    return [{i: x for i, x in enumerate(every) if isinstance(x, jax.sharding.Sharding)} for every in each]


def _shard_map(eqn: Any, trails: Sequence[Trail]) -> list[Trail]:
    """What runs inside has blocks; behind it is what the user says."""
    return [
        of_dims(dict(enumerate(map(entry_axes, spec))), len(shape_of(out)))
        for spec, out in zip(eqn.params['out_specs'], eqn.outvars, strict=True)
    ]


def own_dims(eqn: Any, place: int) -> Sequence[int]:
    """The dimensions of a result that are those of one operand alone: of a weight its columns.

    Args:
        eqn: a product, a convolution or a look-up; of others there are none.
        place: the number of the operand.
    """
    name, rank = primitive_name(eqn), len(shape_of(eqn.outvars[0]))
    if name == 'dot_general':
        contracted, batch = eqn.params['dimension_numbers']
        left = len(shape_of(eqn.invars[0])) - len(contracted[0])
        return range(left, rank) if place else range(len(batch[0]), left)
    if name == 'conv_general_dilated' and place == 1:
        return (eqn.params['dimension_numbers'].out_spec[1],)
    if name == 'gather' and place == 0:
        return tuple(eqn.params['dimension_numbers'].offset_dims)
    return ()


_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    clz complex conj convert_element_type copy cos cosh cumlogsumexp cummax cummin cumprod cumsum
    digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac
    imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul name ne
    neg nextafter not one_minus_square or polygamma population_count pow random_gamma_grad real
    reduce_precision regularized_incomplete_beta rem rev round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan
    tanh threefry2x32 xor zeta random_fold_in
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
_RULES: tuple[tuple[str, Rule], ...] = (
    (_ELEMENTWISE, _elementwise),
    ('concatenate pad slice dynamic_slice split', _elementwise),
    ('optimization_barrier copy_p pvary', _each),
    ('reduce reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor', _reduce),
    ('argmax argmin', _reduce),
    ('top_k approx_top_k', _top_k),
    ('scatter scatter-add scatter-mul scatter-min scatter-max', _scatter),
    ('scatter_add scatter_mul scatter_min scatter_max scatter_sub', _scatter),
    ('reduce_window reduce_window_sum reduce_window_max reduce_window_min tile', _window),
    ('select_and_scatter_add select_and_gather_add select_and_scatter', _window),
    ('cholesky eig eigh householder_product lu qr schur svd', _leading),
    ('triangular_solve tridiagonal tridiagonal_solve hessenberg', _leading),
    ('random_bits random_split random_unwrap random_seed', _longer),
    ('bitcast_convert_type random_wrap', _bitcast),
    ('sort', _sort),
    ('stack', _stack),
    ('unstack', _unstack),
    ('broadcast_in_dim', _broadcast),
    ('reshape', _reshape),
    ('transpose', _transpose),
    ('squeeze', _squeeze),
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
        *('scatter-add', 'scatter_add', 'select_and_scatter_add', 'reduce_window_max', 'reduce_window_sum'),
    }
)

KERNEL = 'pallas_call'
_PALLAS = 'jax.experimental.pallas'


def primitive_name(equation: Any) -> str:
    """The name of an equation's primitive; nothing if JAX has another one, or none, of this name.

    Other libraries name primitives as they like, and tables here say what JAX's do and which parameters they
    have.
    """
    return _name(equation.primitive)


@functools.lru_cache(maxsize=4096)
def _name(primitive: Any) -> str:
    same = _of_jax(_PALLAS in sys.modules).get(primitive.name, primitive) is primitive
    return primitive.name if same else ''


@functools.cache
def _of_jax(has_kernels: bool) -> Mapping[str, Any]:
    """The primitives of JAX that tables here name; None for a name that this JAX does not have."""
    modules = [jax.extend.core.primitives, jax.lax, *([sys.modules[_PALLAS]] if has_kernels else [])]
    listed = [value for module in modules for value in vars(module).values()]
    found = [value for value in listed if isinstance(value, jax.extend.core.Primitive)]
    with concurrent.futures.ThreadPoolExecutor(1) as fresh:  # a thread of its own has no mesh in force
        found += fresh.submit(_others).result()
    names = {*RULES, *WITH_JAXPRS, KERNEL}
    return dict.fromkeys(names) | {each.name: each for each in found if each.name in names}


def _others() -> list[Any]:
    """Those primitives that no public module of JAX lists."""
    mesh, whole, split = AbstractMesh((1,), ('x',)), PartitionSpec(), PartitionSpec('x')
    varying = jax.shard_map(
        lambda x: jax.lax.pcast(x, 'x', to='varying'), mesh=mesh, in_specs=whole, out_specs=split
    )

    def others(rows: Any, groups: Any, key: Any) -> Any:
        keys = jax.random.wrap_key_data(key, impl='threefry2x32')
        return varying(rows), jax.lax.ragged_dot(rows, rows[None], groups), jax.random.key_data(keys)

    shapes = ((1, 1), 'float32'), ((1,), 'int32'), ((2,), 'uint32')
    jaxpr = jax.make_jaxpr(others)(*[jax.ShapeDtypeStruct(*each) for each in shapes])
    return [equation.primitive for equation in equations(jaxpr)]
