"""Python callbacks, such as ``jax.debug.print``: one device runs them on global values.

``jax.debug.inspect_array_sharding`` gets the sharding that corresponds to the placements of a value.
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
    """Writes a callback: the first device runs it on global values, and sends its results to the others.

    A callback with ``partitioned=True`` runs on every device, on its local shards.
    """
    if is_ordered(equation):
        raise CannotPartition(
            equation,
            'it runs callbacks in order, which JAX allows on one device only',
            'leave out ordered=True, and pass the callback the index of the iteration',
        )
    context = editor.context
    if is_partitioned_callback(equation):
        targets = [tuple([REPLICATE if isinstance(x, Partial) else x for x in v.placements]) for v in values]
        atoms = [editor.convert(value, x, equation) for value, x in zip(values, targets, strict=True)]
        editor.eqns.append(editor.code.localize(equation, atoms, equation.outvars))
        return
    if context.auto.sizes and not callbacks_nest():
        raise CannotPartition(
            equation,
            'it runs callbacks, which this version of JAX does not support with mesh axes that the compiler '
            'partitions',
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
    """Writes an ``inspect_sharding`` that reports the sharding of the global value."""
    context, [value] = editor.context, values
    if auto_axes := ', '.join(context.auto.sizes):
        raise CannotPartition(
            equation,
            f'it asks for the sharding of a value, part of which the compiler decides (along {auto_axes})',
            'leave it out, and read the compiled program',
        )
    if value.has_sum:
        editor.reduce(value, equation)
    callback = functools.partial(
        _report, sharding_callback(equation), spec_of(value.placements, context.axes)
    )
    editor.eqns.append(editor.code.localize(equation, [value.atom], [], callback=callback))


def _report(callback: Callable[[Any], None], spec: PartitionSpec, local_sharding: Any) -> None:
    callback(NamedSharding(local_sharding.mesh, spec, memory_kind=local_sharding.memory_kind))


def _on_first_device(equation: Any, axes: Sequence[str], auto: Sequence[str]) -> Callable[..., Any]:
    """Returns a function that runs an equation on the first device, for global values on all devices."""

    def run(*operands: Any) -> list[Any]:
        is_first = jax.lax.axis_index((*axes,)) == 0
        zeros = [jnp.zeros(shape_of(var), var.aval.dtype) for var in equation.outvars]
        results = jax.lax.cond(is_first, lambda: eval_equation(equation, operands), lambda: zeros)
        return [_broadcast(x, axes) for x in results]

    if not auto:
        return run
    # JAX only supports callbacks where all mesh axes are manual.
    replicated = PartitionSpec()
    return jax.shard_map(run, in_specs=replicated, out_specs=replicated, axis_names={*auto}, check_vma=False)


_SUB_BYTE_DTYPES = frozenset(('int2', 'uint2', 'int4', 'uint4'))


def _broadcast(x: Any, axes: Sequence[str]) -> Any:
    """Broadcasts a value from the first device, bit by bit. The others pass zeros."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jax.lax.complex(_broadcast(x.real, axes), _broadcast(x.imag, axes))
    if x.dtype == jnp.bool or x.dtype.name in _SUB_BYTE_DTYPES:
        wider = 'uint8' if x.dtype == jnp.bool or x.dtype.name.startswith('uint') else 'int8'
        return _broadcast(x.astype(wider), axes).astype(x.dtype)
    # A sum of floats would lose the sign of zero.
    bits = jax.lax.bitcast_convert_type(x, f'uint{x.dtype.itemsize * 8}')
    return jax.lax.bitcast_convert_type(jax.lax.psum(bits, (*axes,)), x.dtype)
