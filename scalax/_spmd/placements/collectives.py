"""Collectives along the batch axes: their equations, and their records for the report."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from scalax._core.pytree.partition_specs import spec_axes
from scalax._jax.equations import shape_of
from scalax._jax.manual_axes import ManualEquations, in_scope
from scalax._jax.rewriting import with_inner_lines, with_results
from scalax._spmd.placements.placement import RedistributeOp, ReduceOp

What = Literal['weight', 'gradient', 'examples', 'sum']
"""What a collective converts: state, a partial sum that becomes a gradient, examples, or another sum."""

RESULT = 'a result'
"""The origin of a partial sum that the step returns, such as a loss."""

COLLECTIVE_SCOPE = re.compile(r'scalax\((weight|gradient|examples|sum), (\d+)\)/?')
"""Matches the scope that the name of a collective's operation has: what it converts, and its id."""


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """A collective that the partitioner inserted.

    Attributes:
        kind: its operation.
        axes: the mesh axes along which devices exchange blocks.
        bytes: the size on one device of its operand or its result, whichever is larger.
        count: how often a step runs it; 0 if the trip count of a loop is unknown.
        equation: the equation for which it was inserted.
        origin: the leaf path of the state that it gathers, or whose gradient it reduces; or `RESULT`; or the
            index of an argument of the jaxpr; or None.
        what: what is converted.
        value: its operand or its result, whichever is larger.
        is_backward: whether it runs in a backward pass.
        id: its id in the step, which is also part of the name of its operation. If a jaxpr is called several
            times, its collectives have the same ids in all calls.
        reduce_op: for a reduction, the operation.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int
    equation: Any
    origin: str | int | None
    what: What
    value: Any
    is_backward: bool
    id: int
    reduce_op: ReduceOp = 'sum'

    @property
    def gathers_state(self) -> bool:
        """Whether it gathers state."""
        return self.kind == 'all_gather' and self.what == 'weight'


class CollectiveWriter:
    """Makes the equations of collectives, and of the other operations that convert between placements.

    Args:
        code: makes equations.
        axes: the batch axes, from major to minor.
        sizes: the sizes of these axes.
        ids: yields the ids of collectives; None starts at 1.
        microbatch_axis: the index of the axis whose place microbatches take; None outside of pipelines.
    """

    def __init__(
        self,
        code: ManualEquations,
        axes: Sequence[str],
        sizes: Sequence[int],
        ids: Iterator[int] | None = None,
        microbatch_axis: int | None = None,
    ) -> None:
        self._code, self.axes, self.sizes, self._microbatch_axis = (
            code,
            tuple(axes),
            tuple(sizes),
            microbatch_axis,
        )
        self.ids = itertools.count(1) if ids is None else ids
        self._templates: dict[Any, Any] = {}

    def with_id(self, equation: Any, what: What) -> tuple[Any, int]:
        """Returns the equation of a collective with a new id in its name, and the id."""
        collective_id = next(self.ids)
        return in_scope(equation, f'scalax({what}, {collective_id})'), collective_id

    def block(self, axes: Sequence[int]) -> BlockAxes:
        """Returns the names and sizes of axes, given by index, as `block_index` takes them."""
        return tuple([(None if i == self._microbatch_axis else self.axes[i], self.sizes[i]) for i in axes])

    def equation(
        self,
        op: RedistributeOp,
        like: Any,
        operands: Sequence[Any],
        result: Any,
        auto: Sequence[Sequence[str]] = (),
    ) -> Any:
        """Returns the equation of one operation of a conversion.

        Args:
            op: the operation.
            like: the equation whose source line it gets.
            operands: the variable of the value, and in pipelines that of the index of the microbatch.
            result: the variable of the result.
            auto: the Auto axes that shard each dimension of the value; empty if none does.
        """
        [operand, *_] = operands
        template_key = op, operand.aval.dtype, len(shape_of(operand)), tuple(auto)
        if (template := self._templates.get(template_key)) is not None:
            return self._code.from_template(template, like, operand, result)
        key = op._replace(axes=()), self.block(op.axes)
        is_key = jax.dtypes.issubdtype(operand.aval.dtype, jax.dtypes.prng_key)
        is_extreme = op.kind == 'all_reduce' and op.reduce_op != 'sum'
        is_ordered = is_extreme and jnp.issubdtype(operand.aval.dtype, jnp.floating)
        function = _max_or_min(op.reduce_op, key[1]) if is_ordered else _op_function(*key, is_key)
        is_wide = (
            self._code.widens_bfloat16_sums
            and operand.aval.dtype == jnp.bfloat16
            and op.kind in _REDUCING_KINDS
        )
        if is_wide:
            function = _in_float32(function)
        is_complex = op.kind == 'reduce_scatter' and jnp.issubdtype(operand.aval.dtype, jnp.complexfloating)
        if is_complex:
            function = _complex_reduce_scatter(*key)
        spec = _spec_along_auto_axes(op, auto, len(shape_of(operand)))
        is_simple = is_key or is_complex or op.kind in ('slice', 'mask')
        if is_simple and not (op.outer_axes or op.other_outer_axes):
            return with_results(self._code.equation(function, (*key, is_key), like, operands), [result])
        if any(spec):
            # Without the nested shard_map, XLA's partitioner would first gather the value along these axes.
            nested = _along_auto_axes(function, spec)
            nested_equation = self._code.equation(nested, (*key, is_key, spec), like, operands)
            return with_results(with_inner_lines(nested_equation), [result])
        if is_ordered or is_wide:
            return with_results(self._code.equation(function, key, like, [operand]), [result])
        if op._replace(axes=()) in _COMMON_OPS:
            functions = [_op_function(common_op, key[1], is_key) for common_op in _COMMON_OPS]
            template = self._code.collective_templates(functions, _MAX_COMMON_DIMS, ('common', key[1]))[
                _COMMON_OPS[key[0]]
            ]
        else:
            template = self._code.collective(function, key, like, operand, result)
        self._templates[template_key] = template
        return self._code.from_template(template, like, operand, result)

    def shape(self, op: RedistributeOp, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the local shape after an operation on a block of a shape."""
        count, sizes = math.prod(self.sizes[i] for i in op.axes), [*shape]
        if op.kind in ('all_gather', 'all_to_all'):
            sizes[op.dim] *= count
        if op.kind in ('reduce_scatter', 'slice'):
            sizes[op.dim] //= count
        if op.kind == 'all_to_all':
            sizes[op.other_dim] //= count
        return tuple(sizes)

    def collective(
        self,
        op: RedistributeOp,
        like: Any,
        ends: tuple[Any, Any],
        origin: Any,
        what: What,
        *,
        is_backward: bool,
        collective_id: int,
    ) -> Collective:
        """Returns the record of an operation that sends data.

        Args:
            op: the operation.
            like: the equation for which it was inserted.
            ends: its operand and its result.
            origin: the state that it gathers or reduces.
            what: what it converts.
            is_backward: whether it runs in a backward pass.
            collective_id: its id.
        """
        axes = tuple([self.axes[i] for i in op.axes])
        value = max(ends, key=lambda x: math.prod(shape_of(x)))
        size = math.prod(shape_of(value)) * value.aval.dtype.itemsize
        return Collective(
            op.kind, axes, size, 1, like, origin, what, value, is_backward, collective_id, op.reduce_op
        )


_MAX_COMMON_DIMS = 4
# The most frequent operations, which are traced together: gathers and scatters along the first dimensions,
# and sums.
_COMMON_OPS = {
    op: i
    for i, op in enumerate(
        [
            *[RedistributeOp('all_gather', (), dim) for dim in range(_MAX_COMMON_DIMS)],
            *[RedistributeOp('reduce_scatter', (), dim) for dim in range(_MAX_COMMON_DIMS)],
            RedistributeOp('all_reduce', ()),
        ]
    )
}

SENDING_KINDS = frozenset(('all_gather', 'all_to_all', 'reduce_scatter', 'all_reduce'))
"""The kinds of operations that send data between devices."""

_REDUCING_KINDS = frozenset(('reduce_scatter', 'all_reduce'))


def _in_float32(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that computes in float32."""
    return jax.jit(lambda x: function(x.astype('float32')).astype(x.dtype))


def _spec_along_auto_axes(op: RedistributeOp, auto_dims: Sequence[Sequence[str]], rank: int) -> PartitionSpec:
    """Returns the spec along the Auto axes of a value that an operation converts.

    A dimension that it changes is only sharded over the `outer_axes` of its shards: along other axes, one of
    the two axes would have to be the major.
    """
    changed: dict[int, tuple[str, ...]] = {} if op.kind == 'all_reduce' else {op.dim: op.outer_axes}
    if op.kind == 'all_to_all':
        changed[op.other_dim] = op.other_outer_axes
    outer_axes = {axis for axes in changed.values() for axis in axes}
    unchanged = [tuple(axes) if outer_axes.isdisjoint(axes) else () for axes in auto_dims or [()] * rank]
    return PartitionSpec(*[changed.get(dim, axes) or None for dim, axes in enumerate(unchanged)])


def _along_auto_axes(function: Callable[[Any], Any], spec: PartitionSpec) -> Callable[[Any], Any]:
    """Returns a function that runs on the shards along the axes of a spec."""

    def on_auto_shards(x: Any) -> Any:
        axes = {*spec_axes(spec)}
        return jax.shard_map(function, in_specs=spec, out_specs=spec, axis_names=axes, check_vma=False)(x)

    return on_auto_shards


BlockAxes = tuple[tuple[str | None, int], ...]
"""The axes that shard a dimension, and their sizes; None in place of the axis of microbatches."""


def block_index(block: BlockAxes, *microbatch_index: Any) -> Any:
    """Returns the index of a device's block; *microbatch_index* is only given in pipelines."""
    if all(axis is not None for axis, _ in block):
        return jax.lax.axis_index(_axis_name(block))
    index: Any = 0
    for axis, size in block:
        index = index * size + (microbatch_index[0] if axis is None else jax.lax.axis_index(axis))
    return index


def _axis_name(block: BlockAxes) -> Any:
    axes = tuple([axis for axis, _ in block])
    return axes if len(axes) > 1 else axes[0]


@functools.lru_cache(maxsize=1024)
def _max_or_min(reduce_op: ReduceOp, block: BlockAxes) -> Callable[[Any], Any]:
    """Returns a maximum or minimum over devices of floating-point values. It is NaN if any value is NaN.

    Backends differ in whether an all-reduce of floating-point values propagates NaN, but agree on integers.
    So the function reduces integers in the order of the values.
    """
    name = _axis_name(block)

    def max_or_min(x: Any) -> Any:
        floats = x.astype('float64' if x.dtype.itemsize == 8 else 'float32')  # exact
        dtype = jnp.dtype(f'int{8 * floats.dtype.itemsize}')
        limits = jnp.iinfo(dtype)

        def ordered_bits(bits: Any) -> Any:
            # The bits of negative values, without the sign, are in the order of the magnitudes.
            return jnp.where(bits < 0, bits ^ limits.max, bits)

        nan_key = limits.max if reduce_op == 'max' else limits.min
        keys = jnp.where(
            jnp.isnan(floats), nan_key, ordered_bits(jax.lax.bitcast_convert_type(floats, dtype))
        )
        keys = jax.lax.pmax(keys, name) if reduce_op == 'max' else jax.lax.pmin(keys, name)
        # Both limits are the bits of a NaN.
        return jax.lax.bitcast_convert_type(ordered_bits(keys), floats.dtype).astype(x.dtype)

    return jax.jit(max_or_min)


@functools.lru_cache(maxsize=1024)
def _complex_reduce_scatter(op: RedistributeOp, block: BlockAxes) -> Callable[..., Any]:
    """Returns a `reduce_scatter` of complex values, by parts: XLA's TPU backend only supports real values."""
    function = _op_function(op, block, False)
    return jax.jit(lambda x: jax.lax.complex(function(jnp.real(x)), function(jnp.imag(x))))


@functools.lru_cache(maxsize=1024)
def _op_function(op: RedistributeOp, block: BlockAxes, is_key: bool) -> Callable[..., Any]:
    """Returns the function of one operation of a conversion."""
    dim, name = op.dim, _axis_name(block)

    def all_gather(x: Any) -> Any:
        return jax.lax.all_gather(x, name, axis=dim, tiled=True)

    def all_to_all(x: Any) -> Any:
        return jax.lax.all_to_all(x, name, op.other_dim, dim, tiled=True)

    def reduce_scatter(x: Any) -> Any:
        return jax.lax.psum_scatter(x, name, scatter_dimension=dim, tiled=True)

    def all_reduce(x: Any) -> Any:
        reduce = {'sum': jax.lax.psum, 'max': jax.lax.pmax, 'min': jax.lax.pmin}[op.reduce_op]
        return reduce(x, name)

    def slice_(x: Any, *microbatch_index: Any) -> Any:
        size = x.shape[dim] // math.prod(size for _, size in block)
        return jax.lax.dynamic_slice_in_dim(x, block_index(block, *microbatch_index) * size, size, dim)

    def mask(x: Any, *microbatch_index: Any) -> Any:
        # The maximum and the minimum of equal values are the values.
        return (
            x
            if op.reduce_op != 'sum'
            else jnp.where(block_index(block, *microbatch_index) == 0, x, jnp.zeros_like(x))
        )

    def on_key_data(keys: Any) -> Any:
        data = by_kind[op.kind](jax.random.key_data(keys))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))

    by_kind: dict[str, Callable[..., Any]] = {
        'all_gather': all_gather,
        'all_to_all': all_to_all,
        'reduce_scatter': reduce_scatter,
        'all_reduce': all_reduce,
        'slice': slice_,
        'mask': mask,
    }
    if is_key and op.kind != 'slice':
        return jax.jit(on_key_data)
    return jax.jit(by_kind[op.kind]) if op.kind in ('slice', 'mask') else by_kind[op.kind]
