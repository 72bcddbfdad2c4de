"""Collectives along the batch axes, within the shards of Auto axes: their equations, and their list."""

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
from scalax._jax.rewriting import with_results
from scalax._spmd.placements.placement import RedistributeOp, ReduceOp

What = Literal['weight', 'gradient', 'examples', 'sum']
"""What a collective converts: state, a sum that becomes a gradient, examples, or another sum."""

RESULT = 'a result'
"""Of a sum that the step returns, as a loss is: what it is about."""

COLLECTIVE_SCOPE = re.compile(r'scalax\((weight|gradient|examples|sum), (\d+)\)/?')
"""What a collective converts, and its number, in the names of operations."""


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """A collective that the partitioner wrote.

    Attributes:
        kind: its operation.
        axes: the mesh axes along which devices exchange blocks.
        bytes: the size of its larger end on one device: of what is gathered, or of what is reduced.
        count: how often a step runs it; 0 if the number of rounds of a loop is not known.
        equation: the equation for which it was written.
        of: the path of the state that it gathers, or whose gradient it reduces; `RESULT`; else the number
            of the argument of the jaxpr, or None.
        what: what is converted.
        value: a variable of the type of that larger end.
        is_backward: whether it runs in a backward pass.
        number: its number in the step, which the name of its operation has, too. Where a jaxpr is used in
            several places, its collectives have one number in all of them.
        reduce_op: of a reduction, what it computes.
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
    """Writes the equations of conversions.

    Args:
        code: makes equations.
        axes: the batch axes, from the major one to the minor one.
        sizes: their sizes.
        numbers: the numbers of the collectives that follow; None begins with 1.
        in_turn: the number of the axis, of these, whose blocks come one after the other on one device.
    """

    def __init__(
        self,
        code: ManualEquations,
        axes: Sequence[str],
        sizes: Sequence[int],
        ids: Iterator[int] | None = None,
        in_turn: int | None = None,
    ) -> None:
        self._code, self.axes, self.sizes, self._in_turn = code, tuple(axes), tuple(sizes), in_turn
        self.ids = itertools.count(1) if ids is None else ids
        self._templates: dict[Any, Any] = {}

    def with_id(self, equation: Any, what: What) -> tuple[Any, int]:
        """Returns the equation of a collective with its number in its name, and the number."""
        collective_id = next(self.ids)
        return in_scope(equation, f'scalax({what}, {collective_id})'), collective_id

    def block(self, axes: Sequence[int]) -> BlockAxes:
        """Returns the names and sizes of axes, given by index, as `block_index` takes them."""
        return tuple([(None if i == self._in_turn else self.axes[i], self.sizes[i]) for i in axes])

    def equation(
        self,
        step: RedistributeOp,
        like: Any,
        operands: Sequence[Any],
        result: Any,
        auto: Sequence[Sequence[str]] = (),
    ) -> Any:
        """Returns the equation of one step.

        Args:
            step: the step.
            like: the equation whose line it gets.
            operands: the value, and the number of its block where blocks come one after the other.
            result: the converted value.
            auto: the Auto axes that shard each dimension of the value; empty if none does.
        """
        [operand, *_] = operands
        known = step, operand.aval.dtype, len(shape_of(operand)), tuple(auto)
        if (template := self._templates.get(known)) is not None:
            return self._code.written(template, like, operand, result)
        key = step._replace(axes=()), self.block(step.axes)
        is_key = jax.dtypes.issubdtype(operand.aval.dtype, jax.dtypes.prng_key)
        is_extreme = step.kind == 'all_reduce' and step.reduce_op != 'sum'
        is_ordered = is_extreme and jnp.issubdtype(operand.aval.dtype, jnp.floating)
        function = _extreme(step.reduce_op, key[1]) if is_ordered else _functions(*key, is_key)
        is_wide = self._code.adds_wide and operand.aval.dtype == jnp.bfloat16 and step.kind in _SUMS
        if is_wide:
            function = _wide(function)
        is_complex = step.kind == 'reduce_scatter' and jnp.issubdtype(operand.aval.dtype, jnp.complexfloating)
        if is_complex:
            function = _of_complex(*key)
        if is_key or is_complex or step.kind in ('slice', 'mask'):
            return with_results(self._code.equation(function, (*key, is_key), like, operands), [result])
        spec = _kept_spec(step, auto)
        if any(spec):
            # XLA's partitioner would gather the value along these axes first.
            nested = _along_auto_axes(function, spec)
            return with_results(self._code.equation(nested, (*key, spec), like, [operand]), [result])
        if is_ordered or is_wide:
            return with_results(self._code.equation(function, key, like, [operand]), [result])
        if step._replace(axes=()) in _COMMON:
            functions = [_functions(each, key[1], is_key) for each in _COMMON]
            template = self._code.exchanges(functions, _MOST_DIMS, ('common', key[1]))[_COMMON[key[0]]]
        else:
            template = self._code.exchange(function, key, like, operand, result)
        self._templates[known] = template
        return self._code.written(template, like, operand, result)

    def shape(self, step: RedistributeOp, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of a block of this shape after a step."""
        count, sizes = math.prod(self.sizes[i] for i in step.axes), [*shape]
        if step.kind in ('all_gather', 'all_to_all'):
            sizes[step.dim] *= count
        if step.kind in ('reduce_scatter', 'slice'):
            sizes[step.dim] //= count
        if step.kind == 'all_to_all':
            sizes[step.other_dim] //= count
        return tuple(sizes)

    def collective(
        self,
        step: RedistributeOp,
        like: Any,
        ends: tuple[Any, Any],
        origin: Any,
        what: What,
        facts: tuple[bool, int],
    ) -> Collective:
        """Returns the entry of the list for a step that sends something.

        Args:
            step: the step.
            like: the equation for which it was written.
            ends: the value before and behind it.
            origin: the state that it gathers or reduces.
            what: what it converts.
            facts: whether it runs in a backward pass, and its number.
        """
        axes = tuple([self.axes[i] for i in step.axes])
        value = max(ends, key=lambda x: math.prod(shape_of(x)))
        size = math.prod(shape_of(value)) * value.aval.dtype.itemsize
        return Collective(step.kind, axes, size, 1, like, origin, what, value, *facts, step.reduce_op)


_MOST_DIMS = 4
# Most steps are of these: gathers and scatters of arrays of few dimensions, and sums.
_COMMON = {
    step: i
    for i, step in enumerate(
        [
            *[RedistributeOp('all_gather', (), dim) for dim in range(_MOST_DIMS)],
            *[RedistributeOp('reduce_scatter', (), dim) for dim in range(_MOST_DIMS)],
            RedistributeOp('all_reduce', ()),
        ]
    )
}

SENDING_KINDS = frozenset(('all_gather', 'all_to_all', 'reduce_scatter', 'all_reduce'))
"""The steps that send something."""

_SUMS = frozenset(('reduce_scatter', 'all_reduce'))


def _wide(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that runs in float32."""
    return jax.jit(lambda x: function(x.astype('float32')).astype(x.dtype))


def _kept_spec(step: RedistributeOp, auto: Sequence[Sequence[str]]) -> PartitionSpec:
    """The spec along Auto axes that a value has before and after a step.

    A dimension that the step changes has none: of its blocks along two axes, one would have to be the major.
    """
    changed = () if step.kind == 'all_reduce' else (step.dim, *[step.other_dim] * (step.kind == 'all_to_all'))
    return PartitionSpec(
        *[tuple(axes) if axes and dim not in changed else None for dim, axes in enumerate(auto)]
    )


def _along_auto_axes(function: Callable[[Any], Any], spec: PartitionSpec) -> Callable[[Any], Any]:
    """A function that runs on blocks along the axes of a spec, too."""

    def nested(x: Any) -> Any:
        axes = {*spec_axes(spec)}
        return jax.shard_map(function, in_specs=spec, out_specs=spec, axis_names=axes, check_vma=False)(x)

    return nested


BlockAxes = tuple[tuple[str | None, int], ...]
"""The axes along which a dimension is split, and their sizes; None where blocks come one after the other."""


def block_index(block: BlockAxes, *number: Any) -> Any:
    """Returns the index of a device's block; *number* is that of the block that blocks in turn have."""
    if all(axis is not None for axis, _ in block):
        return jax.lax.axis_index(_name(block))
    index: Any = 0
    for axis, size in block:
        index = index * size + (number[0] if axis is None else jax.lax.axis_index(axis))
    return index


def _name(block: BlockAxes) -> Any:
    axes = tuple([axis for axis, _ in block])
    return axes if len(axes) > 1 else axes[0]


@functools.lru_cache(maxsize=1024)
def _extreme(reduce_op: ReduceOp, block: BlockAxes) -> Callable[[Any], Any]:
    """The function that reduces floating-point numbers to the largest or the least, or to NaN if any is NaN.

    Backends differ in whether an all-reduce of floating-point numbers propagates NaN, but not in the order of
    integers, so it reduces integers that are ordered like the numbers.
    """
    name = _name(block)

    def extreme(x: Any) -> Any:
        wide = x.astype('float64' if x.dtype.itemsize == 8 else 'float32')  # exact
        dtype = jnp.dtype(f'int{8 * wide.dtype.itemsize}')
        limits = jnp.iinfo(dtype)

        def flipped(bits: Any) -> Any:
            # The bits of negative numbers but for the sign, whose order is that of their magnitudes.
            return jnp.where(bits < 0, bits ^ limits.max, bits)

        of_nan = limits.max if reduce_op == 'max' else limits.min
        keys = jnp.where(jnp.isnan(wide), of_nan, flipped(jax.lax.bitcast_convert_type(wide, dtype)))
        keys = jax.lax.pmax(keys, name) if reduce_op == 'max' else jax.lax.pmin(keys, name)
        # Either limit stands for bits of a NaN.
        return jax.lax.bitcast_convert_type(flipped(keys), wide.dtype).astype(x.dtype)

    return jax.jit(extreme)


@functools.lru_cache(maxsize=1024)
def _of_complex(step: RedistributeOp, block: BlockAxes) -> Callable[..., Any]:
    """Returns a `reduce_scatter` of complex numbers, which the compiler for TPUs has for real ones alone."""
    function = _functions(step, block, False)
    return jax.jit(lambda x: jax.lax.complex(function(jnp.real(x)), function(jnp.imag(x))))


@functools.lru_cache(maxsize=1024)
def _functions(step: RedistributeOp, block: BlockAxes, is_key: bool) -> Callable[..., Any]:
    """The function of one operation that a step is."""
    dim, name = step.dim, _name(block)

    def all_gather(x: Any) -> Any:
        return jax.lax.all_gather(x, name, axis=dim, tiled=True)

    def all_to_all(x: Any) -> Any:
        return jax.lax.all_to_all(x, name, step.other_dim, dim, tiled=True)

    def reduce_scatter(x: Any) -> Any:
        return jax.lax.psum_scatter(x, name, scatter_dimension=dim, tiled=True)

    def all_reduce(x: Any) -> Any:
        reduce = {'sum': jax.lax.psum, 'max': jax.lax.pmax, 'min': jax.lax.pmin}[step.reduce_op]
        return reduce(x, name)

    def slice_(x: Any, *number: Any) -> Any:
        size = x.shape[dim] // math.prod(size for _, size in block)
        return jax.lax.dynamic_slice_in_dim(x, block_index(block, *number) * size, size, dim)

    def mask(x: Any, *number: Any) -> Any:
        # The largest and the least element of equal values are these.
        return (
            x
            if step.reduce_op != 'sum'
            else jnp.where(block_index(block, *number) == 0, x, jnp.zeros_like(x))
        )

    def of_keys(keys: Any) -> Any:
        data = by_kind[step.kind](jax.random.key_data(keys))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))

    by_kind: dict[str, Callable[..., Any]] = {
        'all_gather': all_gather,
        'all_to_all': all_to_all,
        'reduce_scatter': reduce_scatter,
        'all_reduce': all_reduce,
        'slice': slice_,
        'mask': mask,
    }
    if is_key and step.kind != 'slice':
        return jax.jit(of_keys)
    return jax.jit(by_kind[step.kind]) if step.kind in ('slice', 'mask') else by_kind[step.kind]
