"""Callbacks to Python, such as ``jax.debug.print``: they get values of all examples, on one device alone.

``jax.debug.inspect_array_sharding`` calls back with the sharding that the placements of a value say.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from scalax._jax.equations import is_ordered, is_partitioned_callback, shape_of, sharding_callback
from scalax._jax.manual_axes import callbacks_nest
from scalax._jax.rewriting import eval_equation
from scalax._spmd.conversions import JaxprEditor
from scalax._spmd.placements.placement import REPLICATE, Partial, spec_of
from scalax._spmd.values import CannotPartition, Value

CALLBACKS = frozenset(('debug_callback', 'debug_print', 'io_callback', 'pure_callback'))


def partition_callback(editor: JaxprEditor, equation: Any, values: Sequence[Value]) -> None:
    """Writes a callback that the first device runs on values of all examples; the others get its results.

    One that is made for blocks, with ``partitioned=True``, runs on every device on the blocks that it has.
    """
    if is_ordered(equation):
        raise CannotPartition(
            equation,
            'it runs callbacks in order, which JAX allows on one device only',
            'leave out ordered=True, and hand the callback the number of its round',
        )
    context = editor.context
    if is_partitioned_callback(equation):
        sums = [tuple([REPLICATE if isinstance(x, Partial) else x for x in v.placements]) for v in values]
        atoms = [editor.convert(value, x, equation) for value, x in zip(values, sums, strict=True)]
        editor.eqns.append(editor.code.localize(equation, atoms, equation.outvars))
        return
    if context.auto.sizes and not callbacks_nest():
        raise CannotPartition(
            equation,
            'it runs callbacks, and this JAX cannot beside mesh axes that the compiler partitions',
            'call Python outside of the step, or use a newer JAX',
        )
    atoms = [editor.convert(value, context.replicated, equation) for value in values]
    outputs = [editor.define(var, context.replicated).atom for var in equation.outvars]
    axes = (*context.axes, *context.auto.sizes)
    if not axes:
        editor.eqns.append(editor.code.localize(equation, atoms, outputs))
        return
    function = _on_first_device(equation, axes, tuple(context.auto.sizes))
    editor.eqns.append(editor.code.call_function_into(function, equation, atoms, outputs))


def inspect_placements(editor: JaxprEditor, equation: Any, values: Sequence[Value]) -> None:
    """Writes an ``inspect_sharding`` that tells where all devices have the examples of a value."""
    context, [value] = editor.context, values
    if others := ', '.join(context.auto.sizes):
        raise CannotPartition(
            equation,
            f'it asks for the sharding of a value, which the compiler decides along {others}, too',
            'leave it out, and read the compiled program',
        )
    if value.has_sum:
        editor.reduce(value, equation)
    tell = functools.partial(_tell, sharding_callback(equation), spec_of(value.placements, context.axes))
    editor.eqns.append(editor.code.localize(equation, [value.atom], [], callback=tell))


def _tell(callback: Callable[[Any], None], spec: PartitionSpec, of_block: Any) -> None:
    callback(NamedSharding(of_block.mesh, spec, memory_kind=of_block.memory_kind))


def _on_first_device(equation: Any, axes: Sequence[str], auto: Sequence[str]) -> Callable[..., Any]:
    """The function of values of all devices that runs an equation on the first one."""

    def run(*operands: Any) -> list[Any]:
        is_first = jax.lax.axis_index((*axes,)) == 0
        zeros = [jnp.zeros(shape_of(var), var.aval.dtype) for var in equation.outvars]
        results = jax.lax.cond(is_first, lambda: eval_equation(equation, operands), lambda: zeros)
        return [_sent(x, axes) for x in results]

    if not auto:
        return run
    # JAX runs callbacks where all mesh axes are manual.
    whole = PartitionSpec()
    return jax.shard_map(run, in_specs=whole, out_specs=whole, axis_names={*auto}, check_vma=False)


_NARROWER_THAN_A_BYTE = frozenset(('int2', 'uint2', 'int4', 'uint4'))


def _sent(x: Any, axes: Sequence[str]) -> Any:
    """A value of the first device, on all devices; on the others it was zero. All bits stay as they are."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jax.lax.complex(_sent(x.real, axes), _sent(x.imag, axes))
    if x.dtype == jnp.bool or x.dtype.name in _NARROWER_THAN_A_BYTE:
        wider = 'uint8' if x.dtype == jnp.bool or x.dtype.name.startswith('uint') else 'int8'
        return _sent(x.astype(wider), axes).astype(x.dtype)
    # A sum of floats would lose the sign of zero.
    bits = jax.lax.bitcast_convert_type(x, f'uint{x.dtype.itemsize * 8}')
    return jax.lax.bitcast_convert_type(jax.lax.psum(bits, (*axes,)), x.dtype)
