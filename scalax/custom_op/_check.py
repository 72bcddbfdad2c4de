"""`ShardedOp.check`: runs an operation under every sharding of its operands, and compares the values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalax._tree.specs import MeshAxes, canonical, indivisible
from scalax.custom_op._gradient import as_tuple, gradients_of, is_real

# The largest difference that counts as none, by the largest element.
_RTOL = {'float64': 1e-12, 'complex128': 1e-12, 'float32': 1e-5, 'complex64': 1e-5, 'float16': 5e-3}
# For bfloat16 and narrower floats, of which sums in another order differ most.
_COARSE = 5e-2


def check(
    name: str,
    call: Callable[..., Any],
    plain: Callable[..., Any],
    operands: Mapping[str, jax.Array],
    mesh: Mesh,
    gradients: bool,
) -> int:
    """Compares a function of sharded arrays with another one on one device.

    Args:
        name: the name of the operation.
        call: the function that is tried.
        plain: what it is compared with.
        operands: the operands by name.
        mesh: where it is tried.
        gradients: whether gradients are compared, too.

    Returns:
        The number of placements.

    Raises:
        AssertionError: the results under one of them differ.
    """
    one = [jax.device_put(operand, mesh.devices.flat[0]) for operand in operands.values()]
    real = [label for label, operand in operands.items() if is_real(operand)]
    call, plain = (_by_name(fun, real, gradients) for fun in (call, plain))
    expected = plain(*one)
    tried = 0
    for specs in itertools.product(*[_specs(mesh, operand.shape) for operand in one]):
        shardings = [NamedSharding(mesh, spec) for spec in specs]
        got = call(*map(jax.device_put, one, shardings))
        where = ', '.join(f'{label} as {spec}' for label, spec in zip(operands, specs, strict=True))
        for label, result in expected.items():
            _compare(got[label], result, f'{name}: {label} with {where} (mesh: {MeshAxes.of(mesh)})')
        tried += 1
    return tried


def _by_name(fun: Callable[..., Any], real: Sequence[str], gradients: bool) -> Callable[..., dict[str, Any]]:
    """The function, with its results by name, and with its gradients."""

    def named(*operands: Any) -> dict[str, Any]:
        found = {f'result {i}': result for i, result in enumerate(as_tuple(fun(*operands)))}
        if gradients:
            forward, grads = gradients_of(lambda *xs: as_tuple(fun(*xs)), operands)
            found |= {f'result {i} of forward': result for i, result in enumerate(forward)}
            found |= {f'gradient of {label}': grad for label, grad in zip(real, grads, strict=True)}
        return found

    return jax.jit(named) if gradients else named


def _compare(got: jax.Array, expected: jax.Array, message: str) -> None:
    one, other = np.asarray(expected), np.asarray(got)
    if not is_real(expected):
        np.testing.assert_array_equal(other, one, message)
        return
    wide = np.complex128 if np.iscomplexobj(one) else np.float64
    one, other = one.astype(wide), other.astype(wide)
    largest = np.abs(one[np.isfinite(one)]).max(initial=0)
    tolerance = _RTOL.get(str(expected.dtype), _COARSE)
    np.testing.assert_allclose(other, one, rtol=0, atol=tolerance * largest, err_msg=message)


def _specs(mesh: Mesh, shape: tuple[int, ...]) -> Iterator[PartitionSpec]:
    """Every way of sharding an array on a mesh that divides evenly, the unsharded one first."""
    axes = MeshAxes.of(mesh)
    names = [axis for axis in mesh.axis_names if axes.sizes[axis] > 1]
    for dims in itertools.product([None, *range(len(shape))], repeat=len(names)):
        entries = [
            tuple(axis for axis, at in zip(names, dims, strict=True) if at == dim)
            for dim in range(len(shape))
        ]
        mixed = any(len({axes.types[axis] for axis in entry}) > 1 for entry in entries)
        spec = canonical(PartitionSpec(*entries))
        if not mixed and not indivisible(spec, shape, axes):
            yield spec
