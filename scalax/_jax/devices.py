"""Properties of devices, and their order in a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils


def devices_of(platform: str) -> tuple[Sequence[Any], str]:
    """Returns the devices of a platform, and JAX's message if it has none.

    Relies on a RuntimeError if JAX has no such platform, is configured for others, or cannot open it.
    """
    try:
        return jax.devices(platform), ''
    except RuntimeError as error:
        return [], str(error)


def slice_of(device: Any) -> int | None:
    """Returns the slice of a TPU, or the NVLink domain of a GPU; 0 for CPUs; None if it is unknown.

    Relies on *slice_index*, and on the first of the *coords* of GPUs: unattached GPUs have slice index 0.
    """
    if _is_gpu(device) and (coords := getattr(device, 'coords', None)):
        return int(coords[0])
    index = getattr(device, 'slice_index', None)
    return None if index is None else int(index)


def coords_of(device: Any) -> tuple[int, ...]:
    """Returns the coordinates of a TPU in the torus; an empty tuple for others. Relies on *coords*."""
    return () if _is_gpu(device) else tuple(getattr(device, 'coords', None) or ())


def _is_gpu(device: Any) -> bool:
    return getattr(device, 'platform', '') == 'gpu'


def core_of(device: Any) -> int:
    """Returns the index of a device on its chip. Relies on *core_on_chip*."""
    return int(getattr(device, 'core_on_chip', None) or 0)


def mesh_order(sizes: Sequence[int], devices: Sequence[Any], split: bool) -> np.ndarray:
    """Returns devices in the order of ``mesh_utils.create_device_mesh``.

    Relies on an AssertionError about devices that do not fill a box of the physical mesh, such as the first
    three of a TPU slice. They keep their order.

    Raises:
        NotImplementedError: an axis needs a part of a physical axis, and *split* is false.
    """
    try:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=split)
    except AssertionError:
        return np.asarray(devices, dtype=object).reshape(sizes)
