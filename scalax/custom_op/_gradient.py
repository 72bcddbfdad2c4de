"""The gradient of an operation: the user's, or the gradient of its function on global arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

from scalax._core.pytree.partition_specs import MeshAxes
from scalax.custom_op._run import Operation, Results, apply_layout, explicit_layout, mesh_of, reshard_to, run
from scalax.errors import ArgumentError

Gradient = tuple[Callable[..., Any], Callable[..., Any]]
"""A function that returns results and residuals, and one that returns the cotangents of operands."""


def differentiable(operation: Operation, gradient: Gradient | None) -> Callable[..., Results]:
    """Returns the operation as a function that JAX can differentiate.

    Args:
        operation: the operation.
        gradient: the user's gradient; None for the gradient of its function on global arrays.
    """

    def call(*operands: Any) -> Results:
        return run(operation, *operands)

    def forward(*operands: Any) -> tuple[Results, Any]:
        if gradient is None:
            return with_gradient(*operands), (operands, ())  # it may be differentiated again
        outputs, num_results = as_tuple(gradient[0](*operands)), len(operation.factor_map.results)
        return outputs[:num_results], (operands, outputs[num_results:])

    def backward(saved: Any, cotangents: Results) -> tuple[Any, ...]:
        operands, residuals = saved
        if gradient is None:
            grads = _global_gradient(operation, operands, cotangents)
        else:
            grads = as_tuple(gradient[1](*operands, *residuals, *_floating(cotangents)))
        return _operand_cotangents(operation, operands, grads)

    with_gradient = jax.custom_vjp(call)
    with_gradient.defvjp(forward, backward)
    return with_gradient


def _operand_cotangents(operation: Operation, operands: Sequence[Any], grads: Results) -> tuple[Any, ...]:
    """Returns one cotangent for each operand, with its sharding; None for operands without a gradient."""
    differentiable_indices = [i for i, operand in enumerate(operands) if has_gradient(operand)]
    if len(grads) != len(differentiable_indices):
        names = ', '.join(operation.labels[i] for i in differentiable_indices)
        raise ArgumentError(
            f'{operation.name}.defvjp: backward has to return one cotangent for each floating-point operand '
            f'({names}), got {len(grads)}'
        )
    cotangents = {
        i: _with_sharding_of(operands[i], grad) for i, grad in zip(differentiable_indices, grads, strict=True)
    }
    return tuple(cotangents.get(i) for i in range(len(operands)))


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    """Returns the outputs of a function, one array or several, as a tuple."""
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)


def has_gradient(operand: Any) -> bool:
    """Whether JAX computes gradients of arrays of this dtype."""
    return jnp.issubdtype(operand.dtype, jnp.inexact)


def _floating(cotangents: Sequence[Any]) -> Results:
    """Drops the cotangents of arrays that have no gradient."""
    return tuple(cotangent for cotangent in cotangents if cotangent.dtype != jax.dtypes.float0)


def _global_gradient(operation: Operation, operands: Sequence[Any], cotangents: Results) -> Results:
    """Returns the gradient of the function on global arrays, which the compiler partitions."""

    def pullback(operands: Sequence[Any], cotangents: Results) -> Results:
        _, vjp = jax.vjp(operation.on_global_arrays, *operands)
        return _floating(vjp(cotangents))

    mesh = mesh_of(operands)
    if AxisType.Explicit not in mesh.axis_types:
        return pullback(operands, cotangents)
    # The function need not support types with shardings, so it runs over Auto axes.
    with jax.sharding.use_abstract_mesh(mesh):
        # The operands get the layout of the operation, because XLA (of JAX 0.12.0.1) may abort the process if
        # one program has an operand of a matmul in two shardings.
        layout = explicit_layout(operation, mesh, operands)
        operands = apply_layout(layout, mesh, operands)
        grads: Results = jax.sharding.auto_axes(
            pullback,
            axes=tuple(MeshAxes.of(mesh).of_type(AxisType.Explicit)),
            out_sharding=tuple(
                NamedSharding(mesh, layout.spec(factors))
                for operand, factors in zip(operands, operation.factor_map.operands, strict=True)
                if has_gradient(operand)
            ),
        )(operands, cotangents)
    return grads


def _with_sharding_of(operand: Any, grad: Any) -> Any:
    """Reshards a cotangent to the sharding that the type of its operand has over Explicit axes."""
    sharding = jax.typeof(operand).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return grad
    return reshard_to(grad, NamedSharding(sharding.mesh, sharding.spec))
