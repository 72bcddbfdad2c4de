"""Every way to shard the operands of an operation on a mesh."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalax._core.pytree.partition_specs import MeshAxes, canonical
from scalax._core.pytree.spec_validation import indivisible_dims

# Tolerances, relative to the largest element.
_RTOL = {'float32': 1e-5}
_COARSE = 5e-2  # of bfloat16 and narrower floats, for sums in another order


def count_equal_placements(call: Callable[..., Any], operands: tuple[Any, ...], mesh: Mesh) -> int:
    """Asserts that no sharding of the operands changes the results, and returns the number of shardings."""
    on_one_device = [jax.device_put(operand, mesh.devices.flat[0]) for operand in operands]
    expected = jax.tree.leaves(call(*on_one_device))
    count = 0
    for specs in itertools.product(*[_specs(mesh, operand.shape) for operand in on_one_device]):
        shardings = [NamedSharding(mesh, spec) for spec in specs]
        results = jax.tree.leaves(call(*map(jax.device_put, on_one_device, shardings)))
        for result, expected_result in zip(results, expected, strict=True):
            _compare(result, expected_result, f'operands as {", ".join(map(str, specs))}')
        count += 1
    return count


def _compare(result: jax.Array, expected: jax.Array, message: str) -> None:
    actual_values, expected_values = np.asarray(result), np.asarray(expected)
    if not jax.numpy.issubdtype(expected.dtype, np.inexact):
        np.testing.assert_array_equal(actual_values, expected_values, message)
        return
    actual_values, expected_values = actual_values.astype(np.float64), expected_values.astype(np.float64)
    tolerance = _RTOL.get(str(expected.dtype), _COARSE) * np.abs(expected_values).max()
    np.testing.assert_allclose(actual_values, expected_values, rtol=0, atol=tolerance, err_msg=message)


def _specs(mesh: Mesh, shape: tuple[int, ...]) -> Iterator[PartitionSpec]:
    """Yields every spec that shards an array evenly, the unsharded one first."""
    axes = MeshAxes.of(mesh)
    for dims in itertools.product([None, *range(len(shape))], repeat=len(mesh.axis_names)):
        entries = [
            tuple(axis for axis, axis_dim in zip(mesh.axis_names, dims, strict=True) if axis_dim == dim)
            for dim in range(len(shape))
        ]
        mixed = any(len({axes.types[axis] for axis in entry}) > 1 for entry in entries)
        spec = canonical(PartitionSpec(*entries))
        if not mixed and not indivisible_dims(spec, shape, axes):
            yield spec
