"""How many floating-point operations does one primitive take? Matrix products, convolutions and FFTs.

A multiplication and an addition are two operations, as everywhere in the field: a product of M x K and
K x N matrices takes 2 M N K. Elementwise operations and reductions are not counted: they run on other
units, and the peak that hardware is sold by is that of its matrix units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

# What computes with matrices by methods whose operations nobody has counted here, or is code of others.
UNCOUNTED = frozenset(
    {
        *('cholesky', 'cholesky_update', 'eig', 'eigh', 'hessenberg', 'householder_product', 'lu', 'qr'),
        *('geqrf', 'geqp3', 'ormqr', 'schur', 'svd', 'symmetric_product', 'triangular_solve', 'tridiagonal'),
        *('ffi_call', 'tpu_custom_call', 'triton_kernel_call', 'scaled_matmul', 'scaled_dot'),
        *('dot_product_attention_fwd', 'dot_product_attention_fwd_wrapper'),
        *('dot_product_attention_bwd', 'dot_product_attention_bwd_wrapper'),
    }
)


def flops_of(equation: Any) -> int:
    """The floating-point operations of one equation of a jaxpr, without those of jaxprs inside it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jaxpr = jax.jit(jnp.matmul).trace(jnp.ones((3, 5)), jnp.ones((5, 7))).jaxpr
        >>> [flops_of(equation) for equation in jaxpr.eqns]
        [210]
    """
    count = _COUNTS.get(equation.primitive.name)
    return 0 if count is None else count(equation)


def _product(equation: Any) -> int:
    (contracted, _), _ = equation.params['dimension_numbers']
    if not contracted:
        return 0  # an elementwise product
    left, (result,) = equation.invars[0].aval, _shapes(equation.outvars)
    return _pairs(math.prod(result) * math.prod(left.shape[i] for i in contracted), equation)


def _ragged_product(equation: Any) -> int:
    """Each row meets the matrix of one group."""
    numbers = equation.params['ragged_dot_dimension_numbers']
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    left, right = _shapes(equation.invars[:2])
    shared = {*contracted, *batch, *numbers.rhs_group_dimensions}
    free = math.prod(size for i, size in enumerate(right) if i not in shared)
    return _pairs(math.prod(left) * free, equation)


def _convolution(equation: Any) -> int:
    """Only what meets an element of the input: neither padding nor the holes of a dilated input."""
    params = equation.params
    numbers = params['dimension_numbers']
    left, right = _shapes(equation.invars[:2])
    (result,) = _shapes(equation.outvars)
    taken = math.prod(
        overlaps(left[i], right[j], result[k], stride, padding[0], dilated_input, dilated_kernel)
        for i, j, k, stride, padding, dilated_input, dilated_kernel in zip(
            *(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:]),
            *(params['window_strides'], params['padding'], params['lhs_dilation'], params['rhs_dilation']),
            strict=True,
        )
    )
    outputs = result[numbers.out_spec[0]] * result[numbers.out_spec[1]]
    return _pairs(outputs * right[numbers.rhs_spec[1]] * taken, equation)


def overlaps(
    size: int, kernel: int, result: int, stride: int, low: int, dilated_input: int, dilated_kernel: int
) -> int:
    """In one dimension: how many pairs of an output and a kernel position meet an element of the input."""
    places = (
        np.arange(result, dtype=np.int64)[:, None] * stride
        + np.arange(kernel, dtype=np.int64) * dilated_kernel
        - low
    )
    inside = (places >= 0) & (places <= (size - 1) * dilated_input) & (places % dilated_input == 0)
    return int(inside.sum())


def _fft(equation: Any) -> int:
    """5 N log2 N by convention, half of that where one side is real (http://www.fftw.org/speed/method.html)."""
    variables = equation.invars[0], equation.outvars[0]
    complex_ = all(jnp.issubdtype(var.aval.dtype, jnp.complexfloating) for var in variables)
    return fft_flops(variables[0].aval.shape, equation.params['fft_lengths'], complex_)


def fft_flops(shape: Sequence[int], lengths: Sequence[int], complex_: bool) -> int:
    """The operations of FFTs of these *lengths* along the last dimensions of an array."""
    size, many = math.prod(lengths), math.prod(shape[: len(shape) - len(lengths)])
    return round((5 if complex_ else 2.5) * size * math.log2(size) * many) if size else 0


def _pairs(count: int, equation: Any) -> int:
    """The operations of that many multiplications and additions; a complex one takes eight."""
    dtypes = [var.aval.dtype for var in equation.invars[:2]]
    return count * (8 if all(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes) else 2)


def _shapes(variables: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(variable.aval.shape) for variable in variables]


_COUNTS: dict[str, Callable[[Any], int]] = {
    'dot_general': _product,
    'ragged_dot': _ragged_product,
    'ragged_dot_general': _ragged_product,
    'conv_general_dilated': _convolution,
    'fft': _fft,
}
