"""Packages, accelerators and environment variables of this machine, and faults in them."""

from __future__ import annotations

import glob
import importlib.metadata
import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from scalax._core.mesh.gpu_topologies import PLUGINS, plugin_fault
from scalax.errors import near_names

_PACKAGES = (
    *('scalax', 'jax', 'jaxlib', 'libtpu', 'numpy', 'einops'),
    *('safetensors', 'orbax-checkpoint', 'flax', 'optax', 'equinox'),
)
_PLUGIN = re.compile(r'jax[-_](cuda|rocm)\w*[-_](plugin|pjrt)')
_PREFIXES = ('JAX_', 'XLA_', 'TPU_', 'LIBTPU_', 'NCCL_', 'MEGASCALE_', 'SLURM_STEP', 'OMPI_COMM_WORLD')
_NAMES = ('CUDA_VISIBLE_DEVICES', 'ROCR_VISIBLE_DEVICES', 'LD_LIBRARY_PATH', 'PJRT_DEVICE', 'SLURM_PROCID')
# Read by JAX in addition to its settings.
_JAX_VARIABLES = {
    *('JAX_COORDINATOR_ADDRESS', 'JAX_COORDINATOR_PORT', 'JAX_COORDINATOR_BIND_ADDRESS'),
    *('JAX_LOCAL_DEVICE_IDS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID', 'JAX_PLATFORM_NAME'),
}
_DEVICE_FILES = {
    'TPU': ('/dev/accel*', '/dev/vfio/[0-9]*'),
    'NVIDIA': ('/dev/nvidia[0-9]*',),
    'AMD': ('/dev/kfd',),
}
_PACKAGE_OF = {'TPU': 'libtpu', 'NVIDIA': 'cuda', 'AMD': 'rocm'}
_INSTALL = {
    'TPU': 'pip install "jax[tpu]"',
    'NVIDIA': 'pip install "jax[cuda13]", or "jax[cuda12]" for an older driver (nvidia-smi shows it)',
    'AMD': 'install the plugin for ROCm: https://docs.jax.dev/en/latest/installation.html',
}


class Finding(NamedTuple):
    """A fault.

    Attributes:
        what: the fault.
        cure: how to fix it.
    """

    what: str
    cure: str


def installed() -> dict[str, str]:
    """Returns the versions of JAX, its plugins and the packages that scalax supports, if installed."""
    versions = {
        (package.metadata['Name'] or '').lower(): package.version
        for package in importlib.metadata.distributions()
    }
    names = (*_PACKAGES, *sorted(filter(_PLUGIN.fullmatch, versions)))
    return {name: versions[name] for name in names if name in versions}


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that JAX, its compilers and its plugins read."""
    return {
        name: value for name, value in sorted(environ.items()) if name.startswith(_PREFIXES) or name in _NAMES
    }


def accelerators() -> dict[str, int]:
    """Returns vendor -> the number of its device files on this machine, without opening any."""
    counts = {
        vendor: sum(len(glob.glob(pattern)) for pattern in patterns)
        for vendor, patterns in _DEVICE_FILES.items()
    }
    return {vendor: count for vendor, count in counts.items() if count}


def missing_plugins(present: Collection[str], versions: Collection[str]) -> Iterator[Finding]:
    """Finds devices for which no package is installed that opens them.

    Args:
        present: the vendors of the devices, as in `accelerators`.
        versions: the names of the installed packages.
    """
    for vendor in present:
        if not any(_PACKAGE_OF[vendor] in name for name in versions):
            yield Finding(
                f'this machine has {vendor} devices, but no package with which JAX opens them is '
                'installed: it computes on the CPU',
                _INSTALL[vendor],
            )


def wrong_compilers(versions: Mapping[str, str]) -> Iterator[Finding]:
    """Finds compilers for GPUs that JAX does not load, given package -> installed version."""
    plugins = {package: versions[package] for package in PLUGINS if package in versions}
    if wrong := plugin_fault(plugins, versions.get('jaxlib', '')):
        yield Finding(*wrong)


def wrong_variables(
    environ: Mapping[str, str], settings: Collection[str], present: Collection[str]
) -> Iterator[Finding]:
    """Finds variables that are misspelt, or hide devices.

    Args:
        environ: the environment variables.
        settings: the settings of JAX: ``'jax_enable_x64'``.
        present: the vendors of the devices, as in `accelerators`.
    """
    known_names = {name.upper() for name in settings if name.startswith('jax_')} | _JAX_VARIABLES
    for name in environ:
        near = near_names(name, known_names) if name.startswith('JAX_') and name not in known_names else []
        if near:
            yield Finding(f'{name} is set, but JAX has no such setting', f'did you mean {" or ".join(near)}?')
    if present and environ.get('JAX_PLATFORMS', '').strip() == 'cpu':
        yield Finding(
            f'JAX_PLATFORMS=cpu hides the {" and ".join(present)} devices of this machine',
            'unset JAX_PLATFORMS, unless that is intended',
        )
