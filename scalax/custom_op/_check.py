"""`ShardedOp.check`: runs an operation under every sharding of its operands, and compares the values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalax._trace import contexts
from scalax._trace.contexts import MeshOwner
from scalax._tree.paths import describe_leaf, leaf_text
from scalax._tree.specs import MeshAxes, canonical, indivisible
from scalax.custom_op._rule import message
from scalax.errors import ArgumentError

_RTOL = {'float64': 1e-12, 'complex128': 1e-12, 'float32': 1e-5, 'complex64': 1e-5, 'float16': 5e-3}
_COARSE = 5e-2
"""For bfloat16 and narrower floats, of which sums in another order differ most."""


def chosen_mesh(name: str, mesh: Mesh | MeshOwner | None) -> Mesh:
    """The mesh to try an operation on: that given, that of the active helper, or that in force.

    Raises:
        ArgumentError: there is no mesh with devices.
    """
    context = contexts.current()
    if mesh is None:
        mesh = jax.sharding.get_mesh() if context is None else context.helper.mesh
    mesh = mesh if isinstance(mesh, Mesh) else getattr(mesh, 'mesh', None)
    if not isinstance(mesh, Mesh) or mesh.empty:
        raise ArgumentError(
            f'{name}.check tries the operation on a mesh with devices: give mesh=, a Mesh or a '
            'MeshShardingHelper'
        )
    return mesh


Named = Mapping[str, Any]


def check(
    name: str,
    call: Callable[..., Named],
    plain: Callable[..., Named],
    operands: Named,
    mesh: Mesh,
    rtol: float | None,
    values: bool = True,
) -> int:
    """Compares a function of sharded arrays with another one on one device.

    Args:
        name: the name of the operation.
        call: the function that is tried; returns arrays by name.
        plain: what it is compared with.
        operands: the operands by name.
        mesh: where it is tried.
        rtol: see `ShardedOp.check`.
        values: whether values are compared, rather than shapes and dtypes alone.

    Returns:
        The number of placements.

    Raises:
        AssertionError: the results under one of them differ.
    """
    one = [jax.device_put(operand, mesh.devices.flat[0]) for operand in operands.values()]
    expected = plain(*one)
    tried = 0
    for specs in placements(mesh, [operand.shape for operand in one]):
        got = call(
            *[
                jax.device_put(operand, NamedSharding(mesh, spec))
                for operand, spec in zip(one, specs, strict=True)
            ]
        )
        for label, result in expected.items():
            wrong = _difference(result, got[label], rtol, values)
            if wrong:
                head = f'{name} differs when it is sharded (mesh: {MeshAxes.of(mesh)})'
                arrays = [
                    f'{describe_leaf(operand, value)} as {spec}'
                    for operand, value, spec in zip(operands, one, specs, strict=True)
                ]
                agree = f'Placements tried before, which agree: {tried}'
                raise AssertionError(
                    message(head, arrays, [f'{describe_leaf(label, result)}: {wrong}', agree])
                )
        tried += 1
    return tried


def _difference(expected: jax.Array, got: jax.Array, rtol: float | None, values: bool) -> str:
    """How an array differs, in words; empty if it does not."""
    if (expected.shape, expected.dtype) != (got.shape, got.dtype):
        return f'{leaf_text(got)} when sharded'
    if not values:
        return ''
    one, other = np.asarray(expected), np.asarray(got)
    if not jax.dtypes.issubdtype(expected.dtype, np.inexact):
        same = one == other
    else:
        wide = np.complex128 if np.iscomplexobj(one) else np.float64
        one, other = one.astype(wide), other.astype(wide)
        tolerance = _RTOL.get(str(expected.dtype), _COARSE) if rtol is None else rtol
        finite = np.abs(one[np.isfinite(one)])
        with np.errstate(invalid='ignore'):
            near = np.abs(one - other) <= tolerance * finite.max(initial=0)
        same = near | (one == other) | (np.isnan(one) & np.isnan(other))
    if same.all():
        return ''
    first = tuple(int(i) for i in np.argwhere(~same)[0])
    where = f'the first at {list(first)}' if first else 'a scalar'
    return (
        f'{int((~same).sum())} of {same.size} elements differ, {where}: {one[first]} on one device, '
        f'{other[first]} sharded'
    )


def placements(mesh: Mesh, shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[PartitionSpec, ...]]:
    """Every way of sharding arrays on a mesh that divides evenly, the unsharded one first."""
    return itertools.product(*[list(_specs(mesh, shape)) for shape in shapes])


def _specs(mesh: Mesh, shape: tuple[int, ...]) -> Iterator[PartitionSpec]:
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
