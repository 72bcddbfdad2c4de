"""What devices say of themselves, and in which order they make a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils


def devices_of(platform: str) -> tuple[Sequence[Any], str]:
    """The devices of a platform, with what JAX says where it has none.

    Relies on a RuntimeError where JAX has no such platform, was told to use others, or cannot open it.
    """
    try:
        return jax.devices(platform), ''
    except RuntimeError as error:
        return [], str(error)


def slice_of(device: Any) -> int | None:
    """The slice of a TPU, or the NVLink domain of a GPU; None if a device does not say. CPU devices say 0.

    Relies on *slice_index*, and on the first of the *coords* of GPUs: those that are not here are all in
    slice 0.
    """
    if _is_gpu(device) and (coords := getattr(device, 'coords', None)):
        return int(coords[0])
    index = getattr(device, 'slice_index', None)
    return None if index is None else int(index)


def coords_of(device: Any) -> tuple[int, ...]:
    """Where the chip of a TPU is in the torus; empty of others. Relies on *coords*, which GPUs have, too."""
    return () if _is_gpu(device) else tuple(getattr(device, 'coords', None) or ())


def _is_gpu(device: Any) -> bool:
    return getattr(device, 'platform', '') == 'gpu'


def core_of(device: Any) -> int:
    """The number of a device on its chip. Relies on *core_on_chip*."""
    return int(getattr(device, 'core_on_chip', None) or 0)


def mesh_order(sizes: Sequence[int], devices: Sequence[Any], split: bool) -> np.ndarray:
    """Devices in the order in which ``mesh_utils.create_device_mesh`` lays them out.

    Relies on an AssertionError about devices that fill no box of the physical mesh, such as the first three
    of a TPU slice, for which it knows no layout: they are used in the order given.

    Raises:
        NotImplementedError: an axis needs a part of a physical axis, and *split* is false.
    """
    try:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=split)
    except AssertionError:
        return np.asarray(devices, dtype=object).reshape(sizes)
