"""The gradient of an operation: the one it was given, or that of its function on whole arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

from scalax._tree.specs import MeshAxes
from scalax.custom_op._run import Operation, Results, as_laid_out, explicit_layout, mesh_of, resharded, run
from scalax.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Gradient:
    """How one operation is differentiated.

    Attributes:
        name: the name of the operation.
        labels: the names of its operands.
        plain: whether the gradient of the function on whole arrays will do.
        forward: returns results and residuals; None for the plain gradient.
        backward: returns cotangents of operands; None for the plain gradient.
    """

    name: str
    labels: Sequence[str]
    plain: bool
    forward: Callable[..., Any] | None = None
    backward: Callable[..., Any] | None = None

    def attach(self, operation: Operation, static: dict[str, Any]) -> Callable[..., Results]:
        """The operation as a function that JAX can differentiate."""
        results = len(operation.factor_map.results)

        def call(*operands: Any) -> Results:
            return run(operation, *operands)

        def forwards(*operands: Any) -> tuple[Results, Any]:
            if self.forward is None:
                if not self.plain:
                    raise ArgumentError(
                        f'{self.name} has no gradient: its results depend on the shardings of its operands '
                        '(depends_on_placement=True), those of its function on whole arrays do not. What to '
                        f'do: give it one with {self.name}.defvjp(forward, backward), or '
                        'jax.lax.stop_gradient its operands.'
                    )
                return with_gradient(*operands), (operands, ())  # it may be differentiated again
            returned = as_tuple(self.forward(*operands, **static))
            if len(returned) < results:
                raise ArgumentError(
                    f'{self.name}.defvjp: forward returns the {results} results and then what backward is to '
                    f'have, got {len(returned)} arrays'
                )
            return returned[:results], (operands, returned[results:])

        def backwards(kept: Any, cotangents: Results) -> tuple[Any, ...]:
            operands, residuals = kept
            if self.backward is None:
                grads = _plain_gradient(operation, operands, cotangents)
            else:
                real = [each for each in cotangents if each.dtype != jax.dtypes.float0]
                grads = as_tuple(self.backward(*operands, *residuals, *real, **static))
            return self._for_operands(operands, grads)

        with_gradient = jax.custom_vjp(call)
        with_gradient.defvjp(forwards, backwards)
        return with_gradient

    def _for_operands(self, operands: Sequence[Any], grads: Results) -> tuple[Any, ...]:
        """One cotangent for each operand, of its type; None for those that have none."""
        real = [i for i, operand in enumerate(operands) if is_real(operand)]
        if len(grads) != len(real):
            names = ', '.join(self.labels[i] for i in real)
            raise ArgumentError(
                f'{self.name}.defvjp: backward returns one cotangent for each floating-point operand '
                f'({names}), got {len(grads)}'
            )
        found: list[Any] = [None] * len(operands)
        for i, grad in zip(real, grads, strict=True):
            if jnp.shape(grad) != operands[i].shape:
                raise ArgumentError(
                    f'{self.name}.defvjp: the cotangent of {self.labels[i]} that backward returns has the '
                    f'shape {list(jnp.shape(grad))}, the operand {list(operands[i].shape)}'
                )
            found[i] = _typed_like(grad, operands[i])
        return tuple(found)


def as_tuple(returned: Any) -> tuple[Any, ...]:
    """What a function returned, one array or several, as a tuple."""
    return tuple(returned) if isinstance(returned, tuple | list) else (returned,)


def is_real(operand: Any) -> bool:
    """Whether an array has a gradient."""
    return jnp.issubdtype(operand.dtype, jnp.inexact)


def gradients_of(fun: Callable[..., Results], operands: Sequence[Any]) -> tuple[Results, Results]:
    """The results of a function, and its gradient for cotangents that are all different, to compare."""
    results, back = jax.vjp(fun, *operands)
    cotangents = []
    for result in results:
        numbers = jnp.cos(jnp.arange(result.size)).reshape(result.shape)
        if is_real(result):
            cotangents.append(_typed_like(numbers.astype(result.dtype), result))
        else:
            cotangents.append(np.zeros(result.shape, jax.dtypes.float0))
    return results, tuple(grad for grad in back(tuple(cotangents)) if grad.dtype != jax.dtypes.float0)


def _plain_gradient(operation: Operation, operands: Sequence[Any], cotangents: Results) -> Results:
    """The gradient of the function on whole arrays; the compiler partitions it."""

    def pull(operands: Sequence[Any], cotangents: Results) -> Results:
        _, back = jax.vjp(operation.plain, *operands)
        return tuple(grad for grad in back(cotangents) if grad.dtype != jax.dtypes.float0)

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
