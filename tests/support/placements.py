"""Every way of sharding the operands of an operation on a mesh."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalax._core.pytree.partition_specs import MeshAxes, canonical
from scalax._core.pytree.spec_validation import indivisible_dims

# The largest difference that counts as none, by the largest element.
_RTOL = {'float32': 1e-5}
# For bfloat16 and narrower floats, of which sums in another order differ most.
_COARSE = 5e-2


def count_equal_placements(call: Callable[..., Any], operands: tuple[Any, ...], mesh: Mesh) -> int:
    """In how many ways the operands are sharded; raises AssertionError where that changes the results."""
    one = [jax.device_put(operand, mesh.devices.flat[0]) for operand in operands]
    expected = jax.tree.leaves(call(*one))
    tried = 0
    for specs in itertools.product(*[_specs(mesh, operand.shape) for operand in one]):
        shardings = [NamedSharding(mesh, spec) for spec in specs]
        got = jax.tree.leaves(call(*map(jax.device_put, one, shardings)))
        for result, wanted in zip(got, expected, strict=True):
            _compare(result, wanted, f'operands as {", ".join(map(str, specs))}')
        tried += 1
    return tried


def _compare(got: jax.Array, expected: jax.Array, message: str) -> None:
    one, other = np.asarray(expected), np.asarray(got)
    if not jax.numpy.issubdtype(expected.dtype, np.inexact):
        np.testing.assert_array_equal(other, one, message)
        return
    one, other = one.astype(np.float64), other.astype(np.float64)
    tolerance = _RTOL.get(str(expected.dtype), _COARSE) * np.abs(one).max()
    np.testing.assert_allclose(other, one, rtol=0, atol=tolerance, err_msg=message)


def _specs(mesh: Mesh, shape: tuple[int, ...]) -> Iterator[PartitionSpec]:
    """Every way of sharding an array on a mesh that divides evenly, the unsharded one first."""
    axes = MeshAxes.of(mesh)
    for dims in itertools.product([None, *range(len(shape))], repeat=len(mesh.axis_names)):
        entries = [
            tuple(axis for axis, at in zip(mesh.axis_names, dims, strict=True) if at == dim)
            for dim in range(len(shape))
        ]
        mixed = any(len({axes.types[axis] for axis in entry}) > 1 for entry in entries)
        spec = canonical(PartitionSpec(*entries))
        if not mixed and not indivisible_dims(spec, shape, axes):
            yield spec
