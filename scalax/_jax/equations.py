"""What equations of jaxprs hold: operands, jaxprs inside, and the parameters of each primitive.

No page of JAX lists the parameters of its primitives. They are read here (those of kernels in `kernels`), in
all supported versions: each function takes an equation of the primitives that its docstring names. Each
relies on the parameter that it reads having this name and this meaning.
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

# Handed on, so that no other package imports jax.extend.
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
    """The jaxpr without its constants. Relies on JAX before 0.11 wrapping it, and on one class since.

    What is known of jaxprs and equations is kept in dictionaries with them as keys, which relies on each
    being equal to itself alone.
    """
    return getattr(jaxpr, 'jaxpr', jaxpr)


def argument_names(jaxpr: Any) -> Sequence[str]:
    """The paths of the arguments of a traced function; none where JAX does not know them.

    Relies on ``debug_info.arg_names`` having one for each.
    """
    return jaxpr.debug_info.arg_names or ()


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or literal; that of what has none, such as a token, is empty."""
    shape = getattr(atom.aval, 'shape', ())
    return shape if type(shape) is tuple else tuple(shape)


def size_of(atom: Any) -> int:
    """How many elements a variable or literal has."""
    return math.prod(shape_of(atom))


def producers_of(jaxpr: Any) -> dict[int, Any]:
    """The equations of an open jaxpr, by the ids of their results: literals are not hashable."""
    return {id(var): equation for equation in jaxpr.eqns for var in equation.outvars}


def is_on_device(atom: Any) -> bool:
    """Whether a value is in the memory of devices. Relies on its `memory_space` being named or that one."""
    return memory_space(atom.aval) in (None, jax.memory.Space.Device)


def is_same_operation(a: Any, b: Any) -> bool:
    """Whether two equations apply one primitive with equal parameters."""
    return a.primitive is b.primitive and a.params == b.params


def name_stack(equation: Any) -> str:
    """The scopes and transformations around an equation.

    Relies on ``source_info.name_stack`` writing transformations as they are written in names of operations:
    ``jvp(...)``, ``transpose(jvp(...))``, ``rematted_computation``.
    """
    return str(equation.source_info.name_stack)


def traceback_of(equation: Any) -> TracebackType | None:
    """Where the code of an equation is, if JAX knows it. Relies on ``source_info.traceback``."""
    stack = equation.source_info.traceback
    return None if stack is None else stack.as_python_traceback()


# Jaxprs inside ---------------------------------------------------------------------------------------

# Primitives that run one jaxpr once, with their own operands and results in order: name -> parameter.
CALLS = {
    **dict.fromkeys(('jit', 'remat2'), 'jaxpr'),
    **dict.fromkeys(('closed_call', 'eval_jaxpr', 'custom_jvp_call', 'custom_vjp_call'), 'call_jaxpr'),
}
LOOPS = frozenset({'scan', 'while', 'cond'})
WITH_JAXPRS = LOOPS | CALLS.keys()
# Calls of functions whose gradients users have written.
OWN_GRADIENTS = frozenset({'custom_jvp_call', 'custom_vjp_call'})
# Others that run one jaxpr once, whose operands or results may be fewer: name -> what holds it.
RUN_ONCE = {
    **dict.fromkeys(CALLS, ''),
    **dict.fromkeys(('composite', 'custom_partitioning', 'run_scoped', 'shard_map', 'xla_metadata_call'), ''),
    'custom_linear_solve': 'solve',
    'linear_call': 'callee',
}


def call_jaxpr(equation: Any) -> Any:
    """The jaxpr of a call (`CALLS`)."""
    return equation.params[CALLS[equation.primitive.name]]


# Calls that say more of what they run, which a compiler or a backend may heed.
ANNOTATED_CALLS = frozenset(('custom_partitioning', 'composite', 'xla_metadata_call'))


def annotated_call_jaxpr(equation: Any) -> Any:
    """The jaxpr of a call of `ANNOTATED_CALLS`, open or closed, which takes its operands in order.

    Relies on it being the only one in the parameters.
    """
    [jaxpr] = filter(is_jaxpr, equation.params.values())
    return jaxpr


def prevents_cse(equation: Any) -> Sequence[bool]:
    """Which operands of a call the compiler must not see through.

    They are those of what `jax.checkpoint` computes again, which would be merged with what was there before.
    Relies on *differentiated*, and on *prevent_cse* being one for all operands, or one for each.
    """
    params, count = equation.params, len(equation.invars)
    said = params.get('differentiated', False) and params['prevent_cse']
    return [said] * count if isinstance(said, bool) else said


def branches(equation: Any) -> Sequence[Any]:
    """The jaxprs of a `cond`, which take all operands but the first. Relies on *branches*."""
    return equation.params['branches']


class Loop(NamedTuple):
    """A `scan` or a `while`.

    Attributes:
        body: the jaxpr of a round: takes constants, what is carried, and one element of each stack; gives
            what is carried, and elements of stacks.
        test: the jaxpr of the test of a `while`: takes the operands of the test, and what is carried.
        tested: how many operands the test alone has; they come first.
        constants: how many constants a round has.
        carried: how many values are carried from round to round.
        length: how many rounds a `scan` has.
    """

    body: Any
    cond: Any
    num_cond_consts: int
    num_consts: int
    num_carry: int
    length: int | None

    def split(self, operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """The constants, what is carried first, and the stacks, of operands or of what stands for them."""
        state = self.num_cond_consts + self.num_consts
        stacks = state + self.num_carry
        return operands[self.num_cond_consts : state], operands[state:stacks], operands[stacks:]


def loop_of(equation: Any) -> Loop:
    """How a `scan` or a `while` uses its operands.

    Relies on *jaxpr* and *length*, or *cond_jaxpr*, *body_jaxpr* and the counts of their constants; and on
    carried values of a `scan` having the same rank inside and outside, stacks one dimension more outside: the
    numbers of both have other names in each version.
    """
    params = equation.params
    if equation.primitive.name == 'while':
        counts = params['cond_nconsts'], params['body_nconsts']
        return Loop(params['body_jaxpr'], params['cond_jaxpr'], *counts, len(equation.outvars), None)
    body = open_jaxpr(params['jaxpr'])
    carried = _leading(_same_rank, equation.outvars, body.outvars)
    stacked = _leading(lambda *pair: not _same_rank(*pair), equation.invars[::-1], body.invars[::-1])
    return Loop(params['jaxpr'], None, 0, len(body.invars) - carried - stacked, carried, params['length'])


def scan_options(equation: Any) -> dict[str, Any]:
    """The options of ``jax.lax.scan`` that say how a `scan` goes. Relies on *reverse* and *unroll*."""
    return {name: equation.params[name] for name in ('reverse', 'unroll')}


def trip_count_param(length: int) -> dict[str, Any]:
    """The parameter of a `scan` that says how many rounds it has. Relies on *length* alone saying it."""
    return {'length': length}


def _same_rank(a: Any, b: Any) -> bool:
    return len(shape_of(a)) == len(shape_of(b))


def _leading(fits: Callable[[Any, Any], bool], a: Sequence[Any], b: Sequence[Any]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: fits(*pair), zip(a, b, strict=True)))


def is_jaxpr(value: Any) -> bool:
    """Whether a value of a parameter is a jaxpr, open or closed."""
    return isinstance(value, ClosedJaxpr | Jaxpr)


def param_values(equation: Any) -> Iterator[Any]:
    """What the parameters of an equation hold, also inside tuples, dicts and dataclasses."""
    return _values(equation.params)


_PLAIN = frozenset((bool, int, float, str, type(None)))


def _values(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = tuple(getattr(value, field.name, None) for field in dataclasses.fields(value))
    if isinstance(value, list | tuple):
        for part in value:
            if type(part) in _PLAIN:  # most, without an iterator for each
                yield part
            else:
                yield from _values(part)
    else:
        yield value


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """The jaxprs that the parameters of any equation hold, without their constants."""
    return iter(_jaxprs_of(equation.params.values()) if equation.params else ())


def _jaxprs_of(values: Iterable[Any]) -> list[Any]:
    """The same of some values: those that `_values` gives, without an iterator for each."""
    found = list[Any]()
    for value in values:
        value_type: Any = type(value)
        kind = _kind(value_type)
        if kind == 'jaxpr':
            found.append(open_jaxpr(value))
        elif kind == 'sequence':
            if not _PLAIN.issuperset(map(type, value)):
                found += _jaxprs_of(value)
        elif kind:
            found += map(open_jaxpr, filter(is_jaxpr, _values(value)))
    return found


@functools.lru_cache(maxsize=4096)
def _kind(kind: Any) -> str:
    """What values of a type may hold jaxprs as; nothing of others."""
    if issubclass(kind, ClosedJaxpr | Jaxpr):
        return 'jaxpr'
    if issubclass(kind, list | tuple):
        return 'sequence'
    return 'other' if issubclass(kind, dict) or dataclasses.is_dataclass(kind) else ''


def run_once_jaxpr(equation: Any) -> Any:
    """The jaxpr that an equation of `RUN_ONCE` runs; of a linear solve the one that solves it.

    Relies on it being the first of those in the parameters, or in *jaxprs* or a parameter of its name.
    """
    params, part = equation.params, RUN_ONCE[equation.primitive.name]
    held = getattr(params.get('jaxprs'), part, None) or params.get(part, params) if part else params
    return open_jaxpr(next(filter(is_jaxpr, _values(held))))


def linear_solve_call(equation: Any) -> tuple[Any, Sequence[Any]]:
    """The closed jaxpr that solves a `custom_linear_solve`, and its operands.

    Relies on *jaxprs* and *const_lengths* being tuples of *matvec*, *vecmat*, *solve* and *transpose_solve*:
    the operands of these come first, in order, and then the right-hand sides, which each of them takes last.
    """
    counts = equation.params['const_lengths']
    before, count = counts.matvec + counts.vecmat, counts.solve
    operands = equation.invars
    return equation.params['jaxprs'].solve, [*operands[before : before + count], *operands[sum(counts) :]]


def custom_vmap_call(equation: Any) -> tuple[Any, Sequence[Any]]:
    """The closed jaxpr that a `custom_vmap_call` runs, and its operands. Relies on *call* taking all."""
    return equation.params['call'], equation.invars


def expansion(equation: Any) -> Callable[..., Sequence[Any]] | None:
    """The function of arrays that a `call_hi_primitive` stands for; None if it is not known.

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
    """Whether all arguments of a jaxpr are arrays, and none is a reference, as those of kernels are.

    Relies on types of references being no ``jax.core.ShapedArray``.
    """
    return all(isinstance(var.aval, jax.core.ShapedArray) for var in open_jaxpr(jaxpr).invars)


def takes_refs(equation: Any) -> bool:
    """Whether an equation makes, reads or changes an array that can be changed in place.

    Relies on types of such arrays being `jax.ref.AbstractRef`.
    """
    return any(isinstance(x.aval, jax.ref.AbstractRef) for x in (*equation.invars, *equation.outvars))


def all_equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of those inside it."""
    return with_inner_equations(open_jaxpr(jaxpr).eqns)


def with_inner_equations(eqns: Iterable[Any]) -> Iterator[Any]:
    """Equations, each with those of the jaxprs inside it."""
    for equation in eqns:
        yield equation
        for inside in inner_jaxprs(equation):
            yield from with_inner_equations(inside.eqns)


def draws_per_key(equation: Any) -> bool:
    """Whether a `random_bits` draws for each key separately. Relies on ``key<fry>`` naming threefry keys."""
    return str(equation.invars[0].aval.dtype) == 'key<fry>'


def draws_same_under_vmap(jaxpr: Any) -> bool:
    """Whether what a jaxpr draws of keys is the same under `jax.vmap`.

    With many keys of the other generators of JAX, *rbg* and *unsafe_rbg*, all is drawn of the first one. Of a
    generator of somebody else nothing is known. Relies on ``key<fry>`` being the dtype of threefry's keys.
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
    """The one dimension along which `sort`, `top_k`, `approx_top_k`, `stack`, `unstack` or `iota` works.

    It may count from the last one. Relies on *dimension*, *axis* or *reduction_dimension*.
    """
    params = equation.params
    return params[next(name for name in ('dimension', 'axis', 'reduction_dimension') if name in params)]


def acts_along(equation: Any, dim: int) -> bool:
    """Whether `rev`, `pad`, a cumulative operation, or one on windows works along a dimension.

    Relies on *axis*, *dimensions*, *padding_config*, or *window_dimensions* and *padding*.
    """
    params = equation.params
    if 'window_dimensions' in params:
        return params['window_dimensions'][dim] != 1 or any(params['padding'][dim])
    if 'padding_config' in params:
        return any(params['padding_config'][dim])
    return dim == params['axis'] if 'axis' in params else dim in params['dimensions']


def count_sort_keys(equation: Any) -> int:
    """By how many of its operands, the first ones, a `sort` sorts. Relies on *num_keys*."""
    return equation.params['num_keys']


def has_all_groups(equation: Any) -> bool:
    """Whether a `ragged_dot_general` takes all groups. Relies on *group_offset* being None then."""
    return equation.params['group_offset'] is None


def removed_dims(equation: Any) -> Sequence[int]:
    """The dimensions that a reduction, `argmax`, `argmin` or `squeeze` removes.

    Relies on *axes*, or *dimensions* of `reduce` and `squeeze`.
    """
    params = equation.params
    return params['axes'] if 'axes' in params else params['dimensions']


def broadcast_dims(equation: Any) -> Sequence[int]:
    """Which dimensions of its result those of the operand of `broadcast_in_dim` are."""
    return equation.params['broadcast_dimensions']


def permutation(equation: Any) -> Sequence[int]:
    """Which dimension of its operand each of the result of `transpose` is."""
    return equation.params['permutation']


def permutes_elements(equation: Any) -> bool:
    """Whether a `reshape` reads its operand in another order. Relies on *dimensions*, which is then given."""
    return equation.params.get('dimensions') is not None


def is_left_side(equation: Any) -> bool:
    """Whether the matrix of a `triangular_solve` is on the left of the unknowns. Relies on *left_side*."""
    return equation.params['left_side']


def fft_lengths(equation: Any) -> Sequence[int]:
    """The lengths of the last dimensions, along which `fft` works."""
    return equation.params['fft_lengths']


def dot_dims(equation: Any) -> tuple[DimPairs, DimPairs]:
    """The contracted and the batch dimensions of `dot_general`. Relies on *dimension_numbers*."""
    return equation.params['dimension_numbers']


def ragged_dot_dims(equation: Any) -> tuple[DimPairs, DimPairs, Sequence[int]]:
    """The same of `ragged_dot_general`, and the dimensions of groups on the right.

    Relies on *ragged_dot_dimension_numbers*.
    """
    numbers = equation.params['ragged_dot_dimension_numbers']
    return (*numbers.dot_dimension_numbers, numbers.rhs_group_dimensions)


def ragged_dim(equation: Any) -> int:
    """The dimension of rows on the left of `ragged_dot_general`. Relies on there being one."""
    return equation.params['ragged_dot_dimension_numbers'].lhs_ragged_dimensions[0]


def conv_dims(equation: Any) -> Any:
    """The *lhs_spec*, *rhs_spec* and *out_spec* of `conv_general_dilated`: rows, channels, then windows."""
    return equation.params['dimension_numbers']


def conv_groups(equation: Any) -> tuple[int, int]:
    """In how many groups features and rows of `conv_general_dilated` are."""
    return equation.params['feature_group_count'], equation.params['batch_group_count']


def conv_windows(equation: Any) -> Iterator[tuple[int, tuple[int, int], int, int]]:
    """Stride, padding, and dilation of input and kernel, of each window dimension of a convolution."""
    names = 'window_strides', 'padding', 'lhs_dilation', 'rhs_dilation'
    return zip(*[equation.params[name] for name in names], strict=True)


def gather_dims(equation: Any) -> Any:
    """The ``jax.lax.GatherDimensionNumbers`` of `gather`."""
    return equation.params['dimension_numbers']


def slice_bounds(equation: Any) -> list[tuple[int, int, int]]:
    """The start, the limit and the stride of a `slice` in each dimension.

    Relies on *start_indices*, *limit_indices* and *strides*, which is None if all are 1.
    """
    params = equation.params
    strides = params['strides'] or [1] * len(params['start_indices'])
    return [*zip(params['start_indices'], params['limit_indices'], strides, strict=True)]


def slice_sizes(equation: Any) -> Sequence[int]:
    """How much `gather` takes along each dimension of its operand."""
    return equation.params['slice_sizes']


def bounds_mode(equation: Any) -> Any:
    """What a `gather` or a scatter does with indices out of bounds: a ``jax.lax.GatherScatterMode``."""
    return equation.params['mode']


def fill_value(equation: Any) -> Any:
    """What a `gather` gives for indices out of bounds; None for its default."""
    return equation.params['fill_value']


def indices_are_sorted(equation: Any) -> bool:
    """Whether a `gather` or a scatter relies on its indices being sorted. Relies on *indices_are_sorted*."""
    return equation.params.get('indices_are_sorted', False)


def scatter_dims(equation: Any) -> Any:
    """The ``jax.lax.ScatterDimensionNumbers`` of a scatter."""
    return equation.params['dimension_numbers']


# Shardings -------------------------------------------------------------------------------------------

# The parameters that say where the operands and the results are.
SHARDING_PARAMS = {
    'sharding_constraint': ('sharding', 'sharding'),
    'device_put': ('devices', 'devices'),
    'jit': ('in_shardings', 'out_shardings'),
}


def sharding_params(equation: Any) -> list[dict[int, jax.sharding.Sharding]]:
    """The shardings that an equation of `SHARDING_PARAMS` gives its operands, and its results, by number.

    Relies on what says nothing being no ``jax.sharding.Sharding``.
    """
    said = [equation.params[name] for name in SHARDING_PARAMS[equation.primitive.name]]
    each = [shardings if isinstance(shardings, tuple) else (shardings,) for shardings in said]
    return [{i: x for i, x in enumerate(every) if isinstance(x, jax.sharding.Sharding)} for every in each]


def shard_map_in_specs(equation: Any) -> Sequence[Any]:
    """The specs of the operands of a `shard_map`. Relies on *in_specs*."""
    return equation.params['in_specs']


def shard_map_out_specs(equation: Any) -> Sequence[Any]:
    """The specs of the results of a `shard_map`. Relies on *out_specs*."""
    return equation.params['out_specs']


def shard_map_jaxpr(equation: Any) -> tuple[Any, jax.sharding.AbstractMesh]:
    """The jaxpr of a `shard_map`, and the mesh that is in force in it.

    Relies on *jaxpr*, *mesh*, and *newly_manual_axes* or *manual_axes*; and on `update` of meshes, which
    keeps what they say of devices: JAX compares that where it differentiates.
    """
    params = equation.params
    mesh = getattr(params['mesh'], 'abstract_mesh', params['mesh'])
    manual = {*mesh.manual_axes, *_manual_axes(params)}
    types = [
        AxisType.Manual if name in manual else each
        for name, each in zip(mesh.axis_names, mesh.axis_types, strict=True)
    ]
    return params['jaxpr'], mesh.update(axis_types=(*types,))


def named_axes_of(equation: Any) -> tuple[str, ...]:
    """The mesh axes that an operation names along which devices exchange something, or differ.

    Relies on *axes*, or *axis_name*, holding them: names, or dimensions of the operand of other operations.
    """
    named = equation.params.get('axes', equation.params.get('axis_name', ()))
    return tuple(axis for axis in (named if isinstance(named, tuple) else (named,)) if isinstance(axis, str))


def collective_dims(equation: Any) -> list[dict[int, int]] | None:
    """The dimensions of the operands of a collective that its results have as they are.

    One dictionary for each result, of the operand of its number: dimension of the result -> dimension of the
    operand. None if it is not known. Relies on *axes* (which may be dimensions), *all_gather_dimension*,
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
    """How many blocks a `shard_map` runs on. Relies on *mesh* and *newly_manual_axes* or *manual_axes*."""
    sizes = equation.params['mesh'].shape
    return math.prod(sizes[axis] for axis in _manual_axes(equation.params))


def shard_map_manual_axes(equation: Any) -> frozenset[str]:
    """The mesh axes that a `shard_map` makes manual. Relies on what `count_shard_map_devices` relies on."""
    return frozenset(_manual_axes(equation.params))


def shard_map_mesh_shape(equation: Any) -> Mapping[str, int]:
    """The sizes of the axes of the mesh of a `shard_map`, in order. Relies on *mesh*."""
    return equation.params['mesh'].shape


def has_effects(equation: Any) -> bool:
    """Whether an equation does more than to compute its results.

    Naming a mesh axis does not count. Relies on the class of such effects being called NamedAxisEffect.
    """
    return any(type(effect).__name__ != 'NamedAxisEffect' for effect in equation.effects)


def is_ordered(equation: Any) -> bool:
    """Whether a callback to Python runs in the order of the program.

    Relies on the classes of effects of such callbacks having names that begin with *Ordered*.
    """
    return any(type(effect).__name__.startswith('Ordered') for effect in equation.effects)


def is_partitioned_callback(equation: Any) -> bool:
    """Whether a callback gets the block of each device. Relies on *partitioned*."""
    return bool(equation.params.get('partitioned'))


def sharding_callback(equation: Any) -> Any:
    """The function that an ``inspect_sharding`` tells the sharding of its operand. Relies on *callback*."""
    return equation.params['callback']


def _manual_axes(params: Mapping[str, Any]) -> Iterable[str]:
    """The mesh axes that a `shard_map` makes manual: all of them, if it names none."""
    return params.get('newly_manual_axes') or params.get('shard_map_manual_axes') or params['mesh'].axis_names
