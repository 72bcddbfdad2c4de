"""Meshes from axis dimensions and names.

``jax.experimental.mesh_utils`` orders the devices. This module checks the arguments, replaces -1, and
suggests arguments that fit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from scalax._core.pytree.partition_specs import axis_sizes_text
from scalax._core.pytree.structure_diff import first_ten
from scalax._jax.devices import devices_of, mesh_order, slice_of
from scalax.errors import MeshError, plural


def build_mesh(
    axis_dims: Sequence[int],
    axis_names: Sequence[str],
    *,
    split_physical_axes: bool = False,
    dcn_axis_dims: Sequence[int] | None = None,
    devices: Sequence[Any] | None = None,
    axis_types: AxisType | Sequence[AxisType] | None = None,
) -> Mesh:
    """Builds a mesh from the arguments of `MeshShardingHelper`.

    Raises:
        MeshError: dimensions, names, types or devices do not fit together.
    """
    dims, names = checked_axes(axis_dims, axis_names)
    types = checked_types(axis_types, names)
    device_list = list(jax.devices() if devices is None else np.asarray(devices, dtype=object).flat)
    if not device_list:
        raise MeshError('devices is empty: a mesh needs at least one device')
    if len(set(device_list)) != len(device_list):
        raise MeshError('devices contains a device more than once')
    sizes = _infer_sizes(dims, names, len(device_list))
    if dcn_axis_dims is None:
        _reject_several_slices(device_list, names, split_physical_axes)
        array = _order_in_slice(sizes, device_list, split_physical_axes)
    else:
        array = _order_over_slices(sizes, names, dcn_axis_dims, device_list, split_physical_axes)
    return Mesh(array, names, axis_types=types)


def checked_axes(
    axis_dims: Sequence[int], axis_names: Sequence[str]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns dimensions and names as tuples, after checking them against each other."""
    if isinstance(axis_names, str) or not isinstance(axis_names, Iterable):
        raise MeshError(f"axis_names is a sequence of names, such as ['data', 'model'], got {axis_names!r}")
    if not isinstance(axis_dims, Iterable):
        raise MeshError(f'axis_dims is a sequence of integers, such as [4, 2], got {axis_dims!r}')
    names = tuple(axis_names)
    if not all(isinstance(name, str) and name for name in names):
        raise MeshError(f'axis names are non-empty strings, got {names!r}')
    dims = []
    for dim in axis_dims:
        if isinstance(dim, bool) or not isinstance(dim, int | np.integer):
            raise MeshError(f'axis dimensions are integers, got {dim!r} in {tuple(axis_dims)!r}')
        dims.append(int(dim))
    if len(dims) != len(names):
        raise MeshError(
            f'axis_dims {tuple(dims)} and axis_names {names} differ in length: every axis has one '
            'dimension and one name'
        )
    repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if repeated:
        raise MeshError(f'axis names must differ, but {names} repeats {", ".join(map(repr, repeated))}')
    if dims.count(-1) > 1 or any(dim < 1 and dim != -1 for dim in dims):
        raise MeshError(f'axis dimensions are positive, or -1 once, got {tuple(dims)}')
    return tuple(dims), names


def checked_types(
    axis_types: AxisType | Sequence[AxisType] | None, names: tuple[str, ...]
) -> tuple[AxisType, ...]:
    """Returns one axis type for each axis; by default Auto, whatever JAX's default is."""
    if axis_types is None:
        return (AxisType.Auto,) * len(names)
    if isinstance(axis_types, AxisType):
        axis_types = (axis_types,) * len(names)
    types = tuple(axis_types) if isinstance(axis_types, Iterable) else ()
    if AxisType.Manual in types:
        raise MeshError('axes of type Manual exist inside shard_map only: use Auto or Explicit')
    if len(types) != len(names) or not all(isinstance(kind, AxisType) for kind in types):
        raise MeshError(
            f'axis_types is one jax.sharding.AxisType for all axes or one for each of {names}, '
            f'got {axis_types!r}'
        )
    return types


def _infer_sizes(dims: tuple[int, ...], names: tuple[str, ...], count: int) -> tuple[int, ...]:
    """Returns the dimensions with -1 replaced. Raises MeshError unless their product is *count*."""
    sizes = _replace_minus_one(dims, count)
    dims_text, product = axis_sizes_text(dict(zip(names, dims, strict=True))), abs(math.prod(dims))
    if -1 in sizes:
        raise MeshError(
            f'mesh ({dims_text}): {count} devices are not divisible by {product}, the product of the given '
            'dimensions'
        )
    if math.prod(sizes) != count:
        raise MeshError(
            f'mesh ({dims_text}) needs {plural(product, "device")}, there {"is" if count == 1 else "are"} '
            f'{count}: give one of the dimensions as -1, or some of the devices as devices=...'
        )
    return sizes


def _replace_minus_one(dims: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Returns the dimensions with -1 replaced, if *count* is divisible by the product of the others."""
    fixed = math.prod(dim for dim in dims if dim != -1)
    return dims if count % fixed else tuple(count // fixed if dim == -1 else dim for dim in dims)


def _reject_several_slices(devices: list[Any], names: tuple[str, ...], split: bool) -> None:
    """Raises MeshError if TPU devices of several slices would be used like devices of one slice."""
    slices = {*map(slice_of, devices)}
    if len(slices) > 1 and devices[0].platform == 'tpu' and not split:
        raise MeshError(
            f'these devices are in {len(slices)} slices: give dcn_axis_dims, the number of slices '
            f'along each of the axes ({", ".join(names)}), so that only those axes communicate '
            'between slices; or pass mesh_axis_splitting=True to use the devices in the order given'
        )


def _order_in_slice(
    sizes: tuple[int, ...], devices: list[Any], split: bool, where: str = 'of these devices'
) -> np.ndarray:
    """Returns the devices of one slice in the order of a mesh, as an array of shape *sizes*."""
    try:
        return mesh_order(sizes, devices, split)
    except NotImplementedError as error:
        raise MeshError(
            f'mesh {sizes} does not map onto entire physical axes {where}; '
            f'pass mesh_axis_splitting=True to let one physical axis serve several mesh axes '
            f'(it may cost bandwidth). JAX reports: {error}'
        ) from error


def _order_over_slices(
    sizes: tuple[int, ...],
    names: tuple[str, ...],
    dcn_axis_dims: Sequence[int],
    devices: list[Any],
    split: bool,
) -> np.ndarray:
    """Returns devices of several slices in the order of a mesh: axes of *dcn_axis_dims* span slices."""
    dcn_dims = tuple(dcn_axis_dims) if isinstance(dcn_axis_dims, Iterable) else dcn_axis_dims
    if not isinstance(dcn_dims, tuple) or len(dcn_dims) != len(names):
        raise MeshError(f'dcn_axis_dims has one entry for each of the axes {names}, got {dcn_dims!r}')
    dcn, _ = checked_axes(dcn_dims, names)
    # All CPU devices report slice 0, even on several hosts.
    slices = {*map(slice_of, devices)}
    by_process = slices == {None} or (slices == {0} and devices[0].platform == 'cpu')
    granule_name = (
        'processes' if by_process else 'NVLink domains' if devices[0].platform == 'gpu' else 'slices'
    )
    granules: dict[int, list[Any]] = {}
    for device in devices:
        index: Any = device.process_index if by_process else slice_of(device)
        granules.setdefault(index, []).append(device)
    dcn_text = axis_sizes_text(dict(zip(names, dcn, strict=True)))
    dcn = _replace_minus_one(dcn, len(granules))
    if math.prod(dcn) != len(granules):
        raise MeshError(
            f'dcn_axis_dims ({dcn_text}) must multiply to the number of {granule_name}, which is '
            f'{len(granules)}'
        )
    for name, total, across in zip(names, sizes, dcn, strict=True):
        if total % across:
            raise MeshError(
                f'axis {name!r} has {total} devices over {across} {granule_name}: each total of axis_dims '
                f'is a multiple of its entry in dcn_axis_dims'
            )
    inside = tuple(total // across for total, across in zip(sizes, dcn, strict=True))
    counts = [len(granules[index]) for index in sorted(granules)]
    if set(counts) != {math.prod(inside)}:
        raise MeshError(
            f'mesh {sizes} over {len(granules)} {granule_name} ({dcn} across, {inside} inside each) needs '
            f'{math.prod(inside)} devices of each, but they have {first_ten(map(str, counts))}'
        )
    arrays = [
        _order_in_slice(inside, granules[index], split, f'inside each of the {granule_name}')
        for index in sorted(granules)
    ]
    # (across, ..., inside, ...) -> (across, inside, across, inside, ...) -> (across * inside, ...)
    count = len(sizes)
    order = [part + axis for axis in range(count) for part in (0, count)]
    return np.stack(arrays).reshape(*dcn, *inside).transpose(order).reshape(sizes)


def checked_mesh(mesh: Any) -> Mesh | AbstractMesh:
    """Returns *mesh* if a helper can be made from it.

    Raises:
        MeshError: *mesh* is not a mesh, is empty, or has axes of type Manual.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise MeshError(f'from_mesh takes a Mesh or an AbstractMesh, got {type(mesh).__name__}')
    if mesh.empty:
        raise MeshError('from_mesh got the empty mesh, which JAX returns where no mesh is set')
    checked_types(tuple(mesh.axis_types), tuple(mesh.axis_names))
    return mesh


def pickled(mesh: Mesh | AbstractMesh) -> Any:
    """Returns a form of a mesh that can be pickled, with a platform and ids in place of devices."""
    if isinstance(mesh, AbstractMesh):
        return mesh
    ids = np.vectorize(lambda device: device.id, otypes=[int])(mesh.devices)
    return mesh.devices.flat[0].platform, ids, mesh.axis_names, mesh.axis_types


def unpickled(parts: Any) -> Mesh | AbstractMesh:
    """Returns the mesh from the result of `pickled`, with the devices of this program.

    Raises:
        MeshError: this program has no such devices.
    """
    if isinstance(parts, AbstractMesh):
        return parts
    platform, ids, names, types = parts
    devices, error = devices_of(platform)
    reason = f'. JAX reports: {error}' if error else ''
    device_of_id = {device.id: device for device in devices}
    missing = [device_id for device_id in ids.flat if device_id not in device_of_id]
    if missing:
        raise MeshError(
            f'a pickled helper uses {ids.size} {platform!r} devices, and the devices with ids '
            f'{", ".join(map(str, missing))} do not exist here: load it where JAX has the same devices (on a '
            f"CPU, jax.config.update('jax_num_cpu_devices', n)), or make a helper there{reason}"
        )
    array = np.array([device_of_id[device_id] for device_id in ids.flat], dtype=object)
    return Mesh(array.reshape(ids.shape), names, axis_types=types)


def has_devices(mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether programs can run on the mesh."""
    return isinstance(mesh, Mesh) and _is_attached(mesh.devices.flat[0])


def require_devices(mesh: Mesh | AbstractMesh, operation: str) -> None:
    """Raises MeshError if programs cannot run on the mesh.

    Args:
        mesh: the mesh.
        operation: the operation that needs the devices, for the message.
    """
    if isinstance(mesh, AbstractMesh):
        raise MeshError(
            f'{operation} needs devices to run on, and this helper was made from an AbstractMesh, which has '
            'none: use a helper over a Mesh'
        )
    if not has_devices(mesh):
        raise MeshError(
            f'{operation} needs devices to run on, and this helper has '
            f'{mesh.devices.flat[0].device_kind} devices that are not attached: it can '
            'only compile (.lower(...).compile()) and plan for them'
        )


@functools.lru_cache(maxsize=64)
def _is_attached(device: Any) -> bool:
    """Returns whether JAX can run on a device, rather than only compile for it."""
    return device in devices_of(device.platform)[0]
