"""The gradient of an operation: the one it was given, or that of its function on whole arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

from scalax._core.pytree.partition_specs import MeshAxes
from scalax.custom_op._run import Operation, Results, as_laid_out, explicit_layout, mesh_of, resharded, run
from scalax.errors import ArgumentError

Gradient = tuple[Callable[..., Any], Callable[..., Any]]
"""A function that returns results and residuals, and one that returns cotangents of operands."""


def differentiable(operation: Operation, gradient: Gradient | None) -> Callable[..., Results]:
    """The operation as a function that JAX can differentiate.

    Args:
        operation: the operation.
        gradient: how it is differentiated; None: as its function on whole arrays.
    """

    def call(*operands: Any) -> Results:
        return run(operation, *operands)

    def forwards(*operands: Any) -> tuple[Results, Any]:
        if gradient is None:
            return with_gradient(*operands), (operands, ())  # it may be differentiated again
        returned, results = as_tuple(gradient[0](*operands)), len(operation.factor_map.results)
        return returned[:results], (operands, returned[results:])

    def backwards(kept: Any, cotangents: Results) -> tuple[Any, ...]:
        operands, residuals = kept
        if gradient is None:
            grads = _plain_gradient(operation, operands, cotangents)
        else:
            grads = as_tuple(gradient[1](*operands, *residuals, *_floating(cotangents)))
        return _for_operands(operation, operands, grads)

    with_gradient = jax.custom_vjp(call)
    with_gradient.defvjp(forwards, backwards)
    return with_gradient


def _for_operands(operation: Operation, operands: Sequence[Any], grads: Results) -> tuple[Any, ...]:
    """One cotangent for each operand, of its type; None for those that have none."""
    real = [i for i, operand in enumerate(operands) if is_real(operand)]
    if len(grads) != len(real):
        names = ', '.join(operation.labels[i] for i in real)
        raise ArgumentError(
            f'{operation.name}.defvjp: backward has to return one cotangent for each floating-point operand '
            f'({names}), got {len(grads)}'
        )
    typed = {i: _typed_like(grad, operands[i]) for i, grad in zip(real, grads, strict=True)}
    return tuple(typed.get(i) for i in range(len(operands)))


def as_tuple(returned: Any) -> tuple[Any, ...]:
    """What a function returned, one array or several, as a tuple."""
    return tuple(returned) if isinstance(returned, tuple | list) else (returned,)


def is_real(operand: Any) -> bool:
    """Whether an array has a gradient."""
    return jnp.issubdtype(operand.dtype, jnp.inexact)


def _floating(cotangents: Sequence[Any]) -> Results:
    """Cotangents without those of arrays that have no gradient."""
    return tuple(each for each in cotangents if each.dtype != jax.dtypes.float0)


def _plain_gradient(operation: Operation, operands: Sequence[Any], cotangents: Results) -> Results:
    """The gradient of the function on whole arrays; the compiler partitions it."""

    def pull(operands: Sequence[Any], cotangents: Results) -> Results:
        _, back = jax.vjp(operation.plain, *operands)
        return _floating(back(cotangents))

    mesh = mesh_of(operands)
    if AxisType.Explicit not in mesh.axis_types:
        return pull(operands, cotangents)
    # The function was not written for types with shardings.
    with jax.sharding.use_abstract_mesh(mesh):
        # In the layout of the operation itself: XLA (of JAX 0.12.0.1) may end the process where one program
        # has an operand of a product in two shardings.
        layout = explicit_layout(operation, mesh, operands)
        operands = as_laid_out(layout, mesh, operands)
        pulled: Results = jax.sharding.auto_axes(
            pull,
            axes=tuple(MeshAxes.of(mesh).of_type(AxisType.Explicit)),
            out_sharding=tuple(
                NamedSharding(mesh, layout.spec(factors))
                for operand, factors in zip(operands, operation.factor_map.operands, strict=True)
                if is_real(operand)
            ),
        )(operands, cotangents)
    return pulled


def _typed_like(grad: Any, operand: Any) -> Any:
    """The cotangent with the sharding that the type of its operand has over Explicit axes."""
    wanted = jax.typeof(operand).sharding
    if AxisType.Explicit not in wanted.mesh.axis_types:
        return grad
    return resharded(grad, NamedSharding(wanted.mesh, wanted.spec))
