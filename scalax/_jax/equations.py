"""Accessors for equations of jaxprs: operands, inner jaxprs, and the parameters of each primitive.

No page of JAX lists the parameters of its primitives. They are read here (for kernels in `kernels`), in all
supported versions. Each function takes an equation of the primitives that its docstring names, and relies on
the parameter that it reads having this name and this meaning.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import jax

# Re-exported, so that no other package imports jax.extend.
from jax.extend.core import ClosedJaxpr as ClosedJaxpr
from jax.extend.core import DropVar as DropVar
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import JaxprEqn as JaxprEqn
from jax.extend.core import Literal as Literal
from jax.sharding import AxisType

from scalax._jax.tracing import memory_space

DimPairs = tuple[Sequence[int], Sequence[int]]
"""Dimensions of the left and of the right operand."""


# Jaxprs and variables --------------------------------------------------------------------------------


def open_jaxpr(jaxpr: Any) -> Any:
    """Returns the open jaxpr of a jaxpr that may be closed.

    Relies on JAX before 0.11 wrapping it, and on one class since. Dictionaries have jaxprs and equations as
    keys, which relies on each being equal to itself only.
    """
    return getattr(jaxpr, 'jaxpr', jaxpr)


def argument_names(jaxpr: Any) -> Sequence[str]:
    """Returns the paths of the arguments of a traced function; an empty tuple if JAX has none.

    Relies on ``debug_info.arg_names`` having one for each argument.
    """
    return jaxpr.debug_info.arg_names or ()


def shape_of(atom: Any) -> tuple[int, ...]:
    """Returns the shape of a variable or literal; an empty tuple for a value without one, such as a token."""
    shape = getattr(atom.aval, 'shape', ())
    return shape if type(shape) is tuple else tuple(shape)


def size_of(atom: Any) -> int:
    """Returns the number of elements of a variable or literal."""
    return math.prod(shape_of(atom))


def producers_of(jaxpr: Any) -> dict[int, Any]:
    """Returns the equation that computes each variable of an open jaxpr, by the id of the variable."""
    return {id(var): equation for equation in jaxpr.eqns for var in equation.outvars}


def is_on_device(atom: Any) -> bool:
    """Returns whether a value is in device memory. Relies on *memory_space*, which is None by default."""
    return memory_space(atom.aval) in (None, jax.memory.Space.Device)


def is_same_operation(a: Any, b: Any) -> bool:
    """Returns whether two equations have the same primitive and equal parameters."""
    return a.primitive is b.primitive and a.params == b.params


def operation_key(equation: Any) -> Any:
    """Returns a value that is equal for equations of the same operation, on operands of the same types.

    It cannot be hashed if a parameter cannot. Relies on *primitive*, *params*, and the types of operands
    determining the types of results.
    """
    operands = [
        (shape_of(x), getattr(x.aval, 'dtype', None), x.val if isinstance(x, Literal) else None)
        for x in equation.invars
    ]
    return equation.primitive, (*equation.params.values(),), (*operands,)


def name_stack(equation: Any) -> str:
    """Returns the scopes and transformations around an equation.

    Relies on ``source_info.name_stack`` writing transformations as in the names of operations:
    ``jvp(...)``, ``transpose(jvp(...))``, ``rematted_computation``.
    """
    return str(equation.source_info.name_stack)


def traceback_of(equation: Any) -> TracebackType | None:
    """Returns the traceback of an equation, if JAX has it. Relies on ``source_info.traceback``."""
    stack = equation.source_info.traceback
    return None if stack is None else stack.as_python_traceback()


# Inner jaxprs ----------------------------------------------------------------------------------------

# Calls: primitives that run one jaxpr once, on all their operands in order: name -> parameter.
CALLS = {
    **dict.fromkeys(('jit', 'remat2'), 'jaxpr'),
    **dict.fromkeys(('closed_call', 'eval_jaxpr', 'custom_jvp_call', 'custom_vjp_call'), 'call_jaxpr'),
}
LOOPS = frozenset({'scan', 'while', 'cond'})
WITH_JAXPRS = LOOPS | CALLS.keys()
# Calls of functions with user-defined gradients.
OWN_GRADIENTS = frozenset({'custom_jvp_call', 'custom_vjp_call'})
# Primitives that run one jaxpr once, perhaps with fewer operands or results: name -> part that holds it.
RUN_ONCE = {
    **dict.fromkeys(CALLS, ''),
    **dict.fromkeys(('composite', 'custom_partitioning', 'run_scoped', 'shard_map', 'xla_metadata_call'), ''),
    'custom_linear_solve': 'solve',
    'linear_call': 'callee',
}


def call_jaxpr(equation: Any) -> Any:
    """Returns the jaxpr of a call (`CALLS`)."""
    return equation.params[CALLS[equation.primitive.name]]


# Calls with annotations that a compiler or a backend may use.
ANNOTATED_CALLS = frozenset(('custom_partitioning', 'composite', 'xla_metadata_call'))


def annotated_call_jaxpr(equation: Any) -> Any:
    """Returns the jaxpr, open or closed, of a call of `ANNOTATED_CALLS`; it takes the call's operands.

    Relies on it being the only jaxpr in the parameters.
    """
    [jaxpr] = filter(is_jaxpr, equation.params.values())
    return jaxpr


def prevents_cse(equation: Any) -> Sequence[bool]:
    """Returns for each operand of a call whether the compiler must not merge its uses with earlier ones.

    They are the inputs of a rematerialization by `jax.checkpoint`, which common subexpression elimination
    would undo. Relies on *differentiated*, and on *prevent_cse* being one bool, or one for each operand.
    """
    params, count = equation.params, len(equation.invars)
    prevent_cse = params.get('differentiated', False) and params['prevent_cse']
    return [prevent_cse] * count if isinstance(prevent_cse, bool) else prevent_cse


def branches(equation: Any) -> Sequence[Any]:
    """Returns the jaxprs of a `cond`, which take all operands but the first. Relies on *branches*."""
    return equation.params['branches']


class Loop(NamedTuple):
    """A `scan` or a `while`.

    Attributes:
        body: the jaxpr of the body. It takes the constants, the carry and the xs, and returns the next carry
            and the ys.
        cond: the jaxpr of the condition of a `while`. It takes its own constants and the carry.
        num_cond_consts: the number of constants of the condition, which are the first operands.
        num_consts: the number of constants of the body.
        num_carry: the number of values of the carry.
        length: the trip count of a `scan`; None for a `while`.
    """

    body: Any
    cond: Any
    num_cond_consts: int
    num_consts: int
    num_carry: int
    length: int | None

    def split(self, operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Splits operands, or values for each operand, into constants, the initial carry and the xs."""
        carry_start = self.num_cond_consts + self.num_consts
        xs_start = carry_start + self.num_carry
        consts = operands[self.num_cond_consts : carry_start]
        return consts, operands[carry_start:xs_start], operands[xs_start:]


def loop_of(equation: Any) -> Loop:
    """Returns how a `scan` or a `while` uses its operands.

    Relies on *jaxpr* and *length*, or *cond_jaxpr*, *body_jaxpr* and the counts of their constants. Relies on
    the carry of a `scan` having the same rank inside and outside, and xs and ys one dimension more outside:
    the parameters for their numbers have other names in each version.
    """
    params = equation.params
    if equation.primitive.name == 'while':
        counts = params['cond_nconsts'], params['body_nconsts']
        return Loop(params['body_jaxpr'], params['cond_jaxpr'], *counts, len(equation.outvars), None)
    body = open_jaxpr(params['jaxpr'])
    num_carry = _count_leading(_same_rank, equation.outvars, body.outvars)
    num_xs = _count_leading(lambda *pair: not _same_rank(*pair), equation.invars[::-1], body.invars[::-1])
    num_consts = len(body.invars) - num_carry - num_xs
    return Loop(params['jaxpr'], None, 0, num_consts, num_carry, params['length'])


def scan_options(equation: Any) -> dict[str, Any]:
    """Returns the options of ``jax.lax.scan`` that a `scan` has. Relies on *reverse* and *unroll*."""
    return {name: equation.params[name] for name in ('reverse', 'unroll')}


def trip_count_param(length: int) -> dict[str, Any]:
    """Returns the parameter of a `scan` for its trip count. Relies on *length* being the only one."""
    return {'length': length}


def _same_rank(a: Any, b: Any) -> bool:
    return len(shape_of(a)) == len(shape_of(b))


def _count_leading(matches: Callable[[Any, Any], bool], a: Sequence[Any], b: Sequence[Any]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: matches(*pair), zip(a, b, strict=True)))


def is_jaxpr(value: Any) -> bool:
    """Returns whether a value of a parameter is a jaxpr, open or closed."""
    return isinstance(value, ClosedJaxpr | Jaxpr)


def param_values(equation: Any) -> list[Any]:
    """Returns the values of the parameters of an equation, also inside tuples, dicts and dataclasses."""
    return _leaf_values(equation.params.values()) if equation.params else []


_PLAIN = frozenset((bool, int, float, str, type(None)))


def _leaf_values(values: Iterable[Any]) -> list[Any]:
    leaves = list[Any]()
    for value in values:
        value_type: Any = type(value)
        kind = _kind(value_type)
        if kind == 'sequence':
            leaves += value if _PLAIN.issuperset(map(type, value)) else _leaf_values(value)
        elif kind == 'dict':
            leaves += _leaf_values(value.values())
        elif kind == 'dataclass':
            leaves += _leaf_values(getattr(value, field.name, None) for field in dataclasses.fields(value))
        else:
            leaves.append(value)
    return leaves


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """Returns the open jaxprs in the parameters of an equation."""
    return iter(_jaxprs_of(equation.params.values()) if equation.params else ())


def _jaxprs_of(values: Iterable[Any]) -> list[Any]:
    """Returns the open jaxprs in values, also inside tuples, dicts and dataclasses."""
    jaxprs = list[Any]()
    for value in values:
        value_type: Any = type(value)
        kind = _kind(value_type)
        if kind == 'jaxpr':
            jaxprs.append(open_jaxpr(value))
        elif kind == 'sequence':
            if not _PLAIN.issuperset(map(type, value)):
                jaxprs += _jaxprs_of(value)
        elif kind in ('dict', 'dataclass'):
            jaxprs += map(open_jaxpr, filter(is_jaxpr, _leaf_values([value])))
    return jaxprs


@functools.lru_cache(maxsize=4096)
def _kind(kind: Any) -> str:
    """Returns how values of a type may hold jaxprs; an empty string if they cannot."""
    if issubclass(kind, ClosedJaxpr | Jaxpr):
        return 'jaxpr'
    if issubclass(kind, list | tuple):
        return 'sequence'
    if issubclass(kind, dict):
        return 'dict'
    return 'dataclass' if dataclasses.is_dataclass(kind) else ''


def run_once_jaxpr(equation: Any) -> Any:
    """Returns the jaxpr that an equation of `RUN_ONCE` runs; for a linear solve, the jaxpr that solves it.

    Relies on it being the first jaxpr in the parameters, or in *jaxprs* or a parameter of its name.
    """
    params, part = equation.params, RUN_ONCE[equation.primitive.name]
    value = getattr(params.get('jaxprs'), part, None) or params.get(part, params) if part else params
    return open_jaxpr(next(filter(is_jaxpr, _leaf_values([value]))))


def linear_solve_call(equation: Any) -> tuple[Any, Sequence[Any]]:
    """Returns the closed jaxpr that solves a `custom_linear_solve`, and its operands.

    Relies on *jaxprs* and *const_lengths* being tuples of *matvec*, *vecmat*, *solve* and *transpose_solve*.
    The operands of these come first, in order, and then the right-hand sides, which each of them takes last.
    """
    counts = equation.params['const_lengths']
    start, operands = counts.matvec + counts.vecmat, equation.invars
    solve_operands = [*operands[start : start + counts.solve], *operands[sum(counts) :]]
    return equation.params['jaxprs'].solve, solve_operands


def custom_vmap_call(equation: Any) -> tuple[Any, Sequence[Any]]:
    """Returns the closed jaxpr of a `custom_vmap_call`, and its operands. Relies on *call* taking all."""
    return equation.params['call'], equation.invars


def expansion(equation: Any) -> Callable[..., Sequence[Any]] | None:
    """Returns the function of arrays that a `call_hi_primitive` stands for; None if it is unknown.

    Relies on a parameter being a primitive of ``jax.experimental.hijax``, which has `expand`, and the
    structure of the arguments in *in_tree*.
    """
    for primitive in equation.params.values():
        if hasattr(primitive, 'expand') and hasattr(primitive, 'in_tree'):
            break
    else:
        return None

    def expand(*operands: Any) -> Sequence[Any]:
        return jax.tree.leaves(primitive.expand(*jax.tree.unflatten(primitive.in_tree, operands)))

    return expand


def takes_arrays(jaxpr: Any) -> bool:
    """Returns whether all arguments of a jaxpr are arrays, and none is a reference as in kernels.

    Relies on types of references not being a ``jax.core.ShapedArray``.
    """
    return all(isinstance(var.aval, jax.core.ShapedArray) for var in open_jaxpr(jaxpr).invars)


def takes_refs(equation: Any) -> bool:
    """Returns whether an equation creates, reads or writes a mutable array.

    Relies on types of such arrays being `jax.ref.AbstractRef`.
    """
    return any(isinstance(x.aval, jax.ref.AbstractRef) for x in (*equation.invars, *equation.outvars))


def all_equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr and of its inner jaxprs."""
    return with_inner_equations(open_jaxpr(jaxpr).eqns)


def with_inner_equations(eqns: Iterable[Any]) -> Iterator[Any]:
    """Yields equations, each followed by the equations of its inner jaxprs."""
    for equation in eqns:
        yield equation
        for jaxpr in inner_jaxprs(equation):
            yield from with_inner_equations(jaxpr.eqns)


def draws_per_key(equation: Any) -> bool:
    """Returns whether a `random_bits` draws for each key separately.

    Relies on ``key<fry>`` being the dtype of threefry keys.
    """
    return str(equation.invars[0].aval.dtype) == 'key<fry>'


def draws_same_under_vmap(jaxpr: Any) -> bool:
    """Returns whether a jaxpr draws the same random numbers under `jax.vmap`.

    For several keys of JAX's other generators, *rbg* and *unsafe_rbg*, it would draw all numbers from the
    first key; other generators are unknown. Relies on ``key<fry>`` being the dtype of threefry keys.
    """
    for equation in all_equations(jaxpr):
        if equation.primitive.name in ('rng_bit_generator', 'rng_uniform'):
            return False
        for atom in (*equation.invars, *equation.outvars):
            dtype = getattr(atom.aval, 'dtype', None)
            if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) and str(dtype) != 'key<fry>':
                return False
    return True


# Dimensions ------------------------------------------------------------------------------------------


def dim_of(equation: Any) -> int:
    """Returns the dimension along which `sort`, `top_k`, `approx_top_k`, `stack`, `unstack` or `iota` acts.

    It may be negative. Relies on *dimension*, *axis* or *reduction_dimension*.
    """
    params = equation.params
    return params[next(name for name in ('dimension', 'axis', 'reduction_dimension') if name in params)]


def acts_along(equation: Any, dim: int) -> bool:
    """Returns whether `rev`, `pad`, a cumulative or a window operation acts along a dimension.

    Relies on *axis*, *dimensions*, *padding_config*, or *window_dimensions* and *padding*.
    """
    params = equation.params
    if 'window_dimensions' in params:
        return params['window_dimensions'][dim] != 1 or any(params['padding'][dim])
    if 'padding_config' in params:
        return any(params['padding_config'][dim])
    return dim == params['axis'] if 'axis' in params else dim in params['dimensions']


def moves_contiguous_parts(equation: Any) -> bool:
    """Returns whether a `slice` has no strides, and a `pad` nothing between the elements.

    `associative_scan` has such slices and pads in each of its steps. Relies on *strides* being None if all
    are 1, and on *padding_config*.
    """
    strides, padding = equation.params.get('strides'), equation.params.get('padding_config', ())
    return all(stride == 1 for stride in strides or ()) and all(between == 0 for _, _, between in padding)


def count_sort_keys(equation: Any) -> int:
    """Returns how many operands of a `sort`, the first ones, are its keys. Relies on *num_keys*."""
    return equation.params['num_keys']


def has_all_groups(equation: Any) -> bool:
    """Returns whether a `ragged_dot_general` has all groups. Relies on *group_offset* being None then."""
    return equation.params['group_offset'] is None


def removed_dims(equation: Any) -> Sequence[int]:
    """Returns the dimensions that a reduction, `argmax`, `argmin` or `squeeze` removes.

    Relies on *axes*, or *dimensions* of `reduce` and `squeeze`.
    """
    params = equation.params
    return params['axes'] if 'axes' in params else params['dimensions']


def broadcast_dims(equation: Any) -> Sequence[int]:
    """Returns the result dimension that each operand dimension of `broadcast_in_dim` becomes."""
    return equation.params['broadcast_dimensions']


def permutation(equation: Any) -> Sequence[int]:
    """Returns the operand dimension that each result dimension of `transpose` comes from."""
    return equation.params['permutation']


def permutes_elements(equation: Any) -> bool:
    """Returns whether a `reshape` also permutes its elements."""
    return merging_order(equation) is not None


def merging_order(equation: Any) -> Sequence[int] | None:
    """Returns the order in which a `reshape` reads the dimensions of its operand; None if it is theirs.

    ``jax.vmap`` of a convolution writes such a reshape. Relies on *dimensions*.
    """
    dimensions = equation.params.get('dimensions')
    return None if dimensions is None else [*map(int, dimensions)]


def is_left_side(equation: Any) -> bool:
    """Returns whether the matrix of a `triangular_solve` is left of the unknowns. Relies on *left_side*."""
    return equation.params['left_side']


def fft_lengths(equation: Any) -> Sequence[int]:
    """Returns the lengths of the last dimensions, along which `fft` acts."""
    return equation.params['fft_lengths']


def dot_dims(equation: Any) -> tuple[DimPairs, DimPairs]:
    """Returns the contracted and the batch dimensions of `dot_general`. Relies on *dimension_numbers*."""
    return equation.params['dimension_numbers']


def ragged_dot_dims(equation: Any) -> tuple[DimPairs, DimPairs, Sequence[int]]:
    """Returns the contracted, batch and right-hand group dimensions of `ragged_dot_general`.

    Relies on *ragged_dot_dimension_numbers*.
    """
    numbers = equation.params['ragged_dot_dimension_numbers']
    return (*numbers.dot_dimension_numbers, numbers.rhs_group_dimensions)


def ragged_dim(equation: Any) -> int:
    """Returns the ragged dimension of the left operand of `ragged_dot_general`. Relies on there being one."""
    return equation.params['ragged_dot_dimension_numbers'].lhs_ragged_dimensions[0]


def conv_dims(equation: Any) -> Any:
    """Returns the *lhs_spec*, *rhs_spec* and *out_spec* of `conv_general_dilated`.

    They have the dimensions of examples and of channels first, then the spatial ones.
    """
    return equation.params['dimension_numbers']


def conv_groups(equation: Any) -> tuple[int, int]:
    """Returns the numbers of feature groups and of batch groups of `conv_general_dilated`."""
    return equation.params['feature_group_count'], equation.params['batch_group_count']


def conv_group_dims(equation: Any) -> tuple[int, int, int] | None:
    """Returns the dimensions of the images, the kernel and the result that are split into groups.

    Returns None if a convolution has one group.
    """
    numbers, (feature_groups, batch_groups) = conv_dims(equation), conv_groups(equation)
    if feature_groups == batch_groups == 1:
        return None
    image_dim = numbers.lhs_spec[1 if feature_groups > 1 else 0]
    return image_dim, numbers.rhs_spec[0], numbers.out_spec[1]


def conv_windows(equation: Any) -> Iterator[tuple[int, tuple[int, int], int, int]]:
    """Returns (stride, padding, input dilation, kernel dilation) of each spatial dimension of a conv."""
    names = 'window_strides', 'padding', 'lhs_dilation', 'rhs_dilation'
    return zip(*[equation.params[name] for name in names], strict=True)


def gather_dims(equation: Any) -> Any:
    """Returns the ``jax.lax.GatherDimensionNumbers`` of `gather`."""
    return equation.params['dimension_numbers']


def slice_bounds(equation: Any) -> list[tuple[int, int, int]]:
    """Returns the start, the limit and the stride of a `slice` in each dimension.

    Relies on *start_indices*, *limit_indices* and *strides*, which is None if all are 1.
    """
    params = equation.params
    strides = params['strides'] or [1] * len(params['start_indices'])
    return [*zip(params['start_indices'], params['limit_indices'], strides, strict=True)]


def slice_sizes(equation: Any) -> Sequence[int]:
    """Returns the size of the slices of `gather` along each dimension of its operand."""
    return equation.params['slice_sizes']


def bounds_mode(equation: Any) -> Any:
    """Returns the ``jax.lax.GatherScatterMode`` of a `gather` or a scatter, for indices out of bounds."""
    return equation.params['mode']


def fill_value(equation: Any) -> Any:
    """Returns the value that a `gather` has for indices out of bounds; None for its default."""
    return equation.params['fill_value']


def indices_are_sorted(equation: Any) -> bool:
    """Returns whether a `gather` or a scatter assumes sorted indices. Relies on *indices_are_sorted*."""
    return equation.params.get('indices_are_sorted', False)


def scatter_dims(equation: Any) -> Any:
    """Returns the ``jax.lax.ScatterDimensionNumbers`` of a scatter."""
    return equation.params['dimension_numbers']


# Shardings -------------------------------------------------------------------------------------------

# The parameters for the shardings of the operands, and of the results.
SHARDING_PARAMS = {
    'sharding_constraint': ('sharding', 'sharding'),
    'device_put': ('devices', 'devices'),
    'jit': ('in_shardings', 'out_shardings'),
}


def sharding_params(equation: Any) -> list[dict[int, jax.sharding.Sharding]]:
    """Returns the shardings that an equation of `SHARDING_PARAMS` specifies for operands, and for results.

    Each is a dictionary: index -> sharding. Relies on unspecified ones not being a ``jax.sharding.Sharding``.
    """
    params = [equation.params[name] for name in SHARDING_PARAMS[equation.primitive.name]]
    tuples = [shardings if isinstance(shardings, tuple) else (shardings,) for shardings in params]
    return [
        {i: x for i, x in enumerate(shardings) if isinstance(x, jax.sharding.Sharding)}
        for shardings in tuples
    ]


def shard_map_in_specs(equation: Any) -> Sequence[Any]:
    """Returns the specs of the operands of a `shard_map`. Relies on *in_specs*."""
    return equation.params['in_specs']


def shard_map_out_specs(equation: Any) -> Sequence[Any]:
    """Returns the specs of the results of a `shard_map`. Relies on *out_specs*."""
    return equation.params['out_specs']


def shard_map_jaxpr(equation: Any) -> tuple[Any, jax.sharding.AbstractMesh]:
    """Returns the jaxpr of a `shard_map`, and the ambient mesh in it.

    Relies on *jaxpr*, *mesh*, and *newly_manual_axes* or *manual_axes*; and on `update` of meshes keeping
    their devices, which JAX compares when it differentiates.
    """
    params = equation.params
    mesh = getattr(params['mesh'], 'abstract_mesh', params['mesh'])
    manual = {*mesh.manual_axes, *_manual_axes(params)}
    types = [
        AxisType.Manual if name in manual else axis_type
        for name, axis_type in zip(mesh.axis_names, mesh.axis_types, strict=True)
    ]
    return params['jaxpr'], mesh.update(axis_types=(*types,))


def named_axes_of(equation: Any) -> tuple[str, ...]:
    """Returns the mesh axes of a collective, or of another operation with axis names such as `axis_index`.

    Relies on *axes*, or *axis_name*. Other operations have dimensions of the operand there, not names.
    """
    named = equation.params.get('axes', equation.params.get('axis_name', ()))
    return tuple(axis for axis in (named if isinstance(named, tuple) else (named,)) if isinstance(axis, str))


def collective_dims(equation: Any) -> list[dict[int, int]] | None:
    """Returns the dimensions of a collective's operands that its results have unchanged.

    There is one dictionary for each result: result dimension -> dimension of the operand with the same index.
    Returns None if they are unknown. Relies on *axes* (which may be dimensions), *all_gather_dimension*,
    *scatter_dimension*, *split_axis* and *concat_axis*, and *tiled*.
    """
    params, name = equation.params, equation.primitive.name
    if 'axes' in params:
        if not all(isinstance(axis, str) for axis in params['axes']):
            return None
        return [{dim: dim for dim in range(len(shape_of(out)))} for out in equation.outvars]
    rank = len(shape_of(equation.invars[0]))
    if name == 'all_to_all':
        split, concat = params['split_axis'], params['concat_axis']
        if split != concat and not params['tiled']:
            return None
        return [{dim: dim for dim in range(rank) if dim not in (split, concat)}]
    changed = params['all_gather_dimension' if 'all_gather_dimension' in params else 'scatter_dimension']
    if params['tiled']:
        return [{dim: dim for dim in range(rank) if dim != changed}]
    if name == 'reduce_scatter':
        return [{dim - (dim > changed): dim for dim in range(rank) if dim != changed}]
    return [{dim + (dim >= changed): dim for dim in range(rank)}]


def count_shard_map_devices(equation: Any) -> int:
    """Returns the number of devices along the manual axes of a `shard_map`.

    Relies on *mesh* and *newly_manual_axes* or *manual_axes*.
    """
    sizes = equation.params['mesh'].shape
    return math.prod(sizes[axis] for axis in _manual_axes(equation.params))


def shard_map_manual_axes(equation: Any) -> frozenset[str]:
    """Returns the mesh axes that a `shard_map` makes manual, as `count_shard_map_devices` reads them."""
    return frozenset(_manual_axes(equation.params))


def shard_map_mesh_shape(equation: Any) -> Mapping[str, int]:
    """Returns the sizes of the mesh axes of a `shard_map`, in order. Relies on *mesh*."""
    return equation.params['mesh'].shape


def has_effects(equation: Any) -> bool:
    """Returns whether an equation has side effects.

    Naming a mesh axis does not count. Relies on the class of such effects being called NamedAxisEffect.
    """
    effects = equation.effects  # most equations have none
    return bool(effects) and any(type(effect).__name__ != 'NamedAxisEffect' for effect in effects)


def is_ordered(equation: Any) -> bool:
    """Returns whether a callback to Python runs in program order.

    Relies on the classes of effects of such callbacks having names that begin with *Ordered*.
    """
    return any(type(effect).__name__.startswith('Ordered') for effect in equation.effects)


def is_partitioned_callback(equation: Any) -> bool:
    """Returns whether a callback gets the local shard of each device. Relies on *partitioned*."""
    return bool(equation.params.get('partitioned'))


def sharding_callback(equation: Any) -> Any:
    """Returns the function that an ``inspect_sharding`` calls with a sharding. Relies on *callback*."""
    return equation.params['callback']


def _manual_axes(params: Mapping[str, Any]) -> Iterable[str]:
    """Returns the mesh axes that a `shard_map` makes manual: all axes if it names none."""
    return params.get('newly_manual_axes') or params.get('manual_axes') or params['mesh'].axis_names
