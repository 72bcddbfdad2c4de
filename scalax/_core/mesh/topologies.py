"""Topologies: the known TPU slices, and the devices of TPU slices and GPUs that are not attached."""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax

from scalax._core.mesh.gpu_topologies import GPU_KINDS, gpu_devices, is_gpu_topology
from scalax._jax.error_texts import is_wrong_libtpu
from scalax.errors import MeshError, MissingDependencyError, did_you_mean

_FLAT = '1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16'
_CUBES = '2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16'
TPU_SLICE_SIZES = {
    'v4': _CUBES,
    'v5e': _FLAT,
    'v5p': f'{_CUBES} 16x16x24 16x20x28',
    'v6e': _FLAT,
    'tpu7x': _CUBES,
}
"""Kind of chip -> the sizes of its slices."""

TPU_SLICES = tuple(f'{name}:{size}' for name, sizes in TPU_SLICE_SIZES.items() for size in sizes.split())
"""The names of TPU slices. The compiler also accepts other slices with similar sides."""

# The names of slices in Google Cloud: v5p-128 has 128 TensorCores, v6e-64 has 64 chips
# (https://cloud.google.com/tpu/docs/v4, v5e, v5p and v6e): name -> (kind of chip, cores that count per chip).
_ACCELERATORS = {'v4': ('v4', 2), 'v5litepod': ('v5e', 1), 'v5p': ('v5p', 2), 'v6e': ('v6e', 1)}

_LESS_THAN_A_HOST = re.compile(r'v[56]e:(1x1|1x2|2x1)')
_LIKE_A_TPU = re.compile(r'v\d(?!\d)|tpu')  # but not v100, a GPU
_WITHOUT_CHIPS = re.compile(r'[:=_x]0+(?![0-9])')

NO_TPU_MACHINE = {
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-8',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
    'TPU_LOG_DIR': 'disabled',
    'TPU_STDERR_LOG_LEVEL': '3',
    'TPU_MIN_LOG_LEVEL': '3',
}
"""Environment variables that keep libtpu from querying the network, taking a lock, and writing logs."""


def topology_devices(topology: str, num_slices: int) -> Sequence[Any]:
    """Returns the devices of a topology, for compiling only.

    Args:
        topology: a TPU slice, such as ``'v5p:4x4x4'``, or GPUs, such as ``'h100:4x8'``.
        num_slices: the number of slices.

    Raises:
        MissingDependencyError: the compiler is not installed.
        MeshError: the topology is unknown.
    """
    if not topology or not isinstance(topology, str):
        # Without a name, the compiler would choose one.
        raise MeshError(
            f"a topology has a name, such as 'v5p:4x4x4' or 'h100:4x8', got {topology!r}: "
            '`python -m scalax topologies` lists them'
        )
    if isinstance(num_slices, bool) or not isinstance(num_slices, int) or num_slices < 1:
        raise MeshError(f'num_slices is a positive integer, got {num_slices!r}')
    if is_gpu_topology(topology):
        return gpu_devices(topology, num_slices)
    if not _LIKE_A_TPU.match(topology):
        suggestion = did_you_mean(topology.partition(':')[0].lower(), [*TPU_SLICE_SIZES, *GPU_KINDS])
        raise MeshError(
            f'no topology {topology!r} is known ({suggestion}): `python -m scalax topologies` lists them'
        )
    if importlib.util.find_spec('libtpu') is None:
        raise MissingDependencyError(
            'TPU topologies need the TPU compiler, which is published for Linux: pip install "jax[tpu]"'
        )
    quiet_libtpu()
    # Imported here because it loads libtpu.
    from jax.experimental import topologies

    options: dict[str, Any] = {'num_slices': num_slices} if num_slices > 1 else {}
    if topology.startswith('v4:'):
        # The two cores of a chip are one device, as on real machines; by default the compiler describes two.
        options['chip_config_name'] = 'megacore'
    if small := _LESS_THAN_A_HOST.fullmatch(topology):
        # Older libtpu (0.0.42) assumes 2x2 chips on every host.
        options['chips_per_host_bounds'] = (*map(int, small[1].split('x')), 1)
    try:
        if _WITHOUT_CHIPS.search(topology):  # the compiler would divide by zero, which ends the process
            raise ValueError('a side of 0 chips')
        description = topologies.get_topology_desc(platform='tpu', topology_name=topology, **options)
    # libtpu also raises RuntimeError if another process holds its lock; its message is part of ours.
    except (RuntimeError, ValueError) as error:
        if is_wrong_libtpu(error):
            raise MissingDependencyError(
                f'{error}\nlibtpu {importlib.metadata.version("libtpu")} does not work with JAX '
                f'{jax.__version__}: pip install "jax[tpu]" installs a matching version'
            ) from error
        raise MeshError(
            f'the TPU compiler does not support the topology {topology!r}: {error}\n{suggest(topology)}\n'
            '`python -m scalax topologies` lists the known ones'
        ) from error
    return list(description.devices)


def quiet_libtpu() -> None:
    """Keeps libtpu quiet on a machine without TPUs, by setting environment variables that are not set yet.

    Where libtpu is installed, JAX loads it when devices are first requested, and libtpu prints warnings if
    there are no TPUs. A program that may run on such a machine calls this first. On a machine with TPUs it
    does nothing.
    """
    if not (glob.glob('/dev/accel*') or glob.glob('/dev/vfio/[0-9]*')):
        for name, value in NO_TPU_MACHINE.items():
            os.environ.setdefault(name, value)


def suggest(topology: str) -> str:
    """Suggests a slice for an unknown name, for a message.

    Example:
        >>> suggest('v5p-128')
        "did you mean 'v5p:4x4x4'?"
    """
    name, _, count = topology.partition('-')
    kind, cores = _ACCELERATORS.get(name, ('', 0))
    for slice_name in TPU_SLICES:
        if slice_name.startswith(f'{kind}:') and str(cores * num_chips(slice_name)) == count:
            return f'did you mean {slice_name!r}?'
    return did_you_mean(topology, TPU_SLICES)


def num_chips(topology: str) -> int:
    """Returns the number of chips in a slice.

    Example:
        >>> num_chips('v5p:4x4x8')
        128
    """
    return math.prod(map(int, topology.partition(':')[2].split('x')))
