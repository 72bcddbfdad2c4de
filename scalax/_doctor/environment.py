"""The machine and its environment variables: what is there, and what cannot work."""

from __future__ import annotations

import glob
import os
import platform
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from scalax._doctor.finding import Finding
from scalax._report.tables import human_bytes
from scalax.errors import near_names

_PREFIXES = ('JAX_', 'XLA_', 'TPU_', 'LIBTPU_', 'NCCL_', 'MEGASCALE_', 'SLURM_STEP', 'OMPI_COMM_WORLD')
_NAMES = ('CUDA_VISIBLE_DEVICES', 'ROCR_VISIBLE_DEVICES', 'LD_LIBRARY_PATH', 'PJRT_DEVICE', 'SLURM_PROCID')
# Read by JAX beside its settings.
_OF_JAX = {
    'JAX_COORDINATOR_ADDRESS',
    'JAX_COORDINATOR_PORT',
    'JAX_COORDINATOR_BIND_ADDRESS',
    'JAX_LOCAL_DEVICE_IDS',
    'JAX_NUM_PROCESSES',
    'JAX_PROCESS_ID',
    'JAX_PLATFORM_NAME',
    'JAX_PLATFORMS',
    'JAX_ENABLE_X64',
    'JAX_COMPILATION_CACHE_DIR',
    'JAX_TRACEBACK_FILTERING',
}
_PROXIES = ('http_proxy', 'https_proxy', 'grpc_proxy', 'all_proxy')
_OF_SEVERAL = ('JAX_COORDINATOR_ADDRESS', 'SLURM_STEP_NODELIST', 'OMPI_COMM_WORLD_RANK', 'TPU_WORKER_ID')
_LITTLE_DISK = 2**30  # bytes: the program of a large plan, as text
_FILES = {'TPU': ('/dev/accel*', '/dev/vfio/[0-9]*'), 'NVIDIA': ('/dev/nvidia[0-9]*',), 'AMD': ('/dev/kfd',)}
_PACKAGE_OF = {'TPU': 'libtpu', 'NVIDIA': 'cuda', 'AMD': 'rocm'}
_INSTALL = {
    'TPU': 'pip install "jax[tpu]"',
    'NVIDIA': 'pip install "jax[cuda13]", or "jax[cuda12]" for an older driver (nvidia-smi shows it)',
    'AMD': 'install the plugin for ROCm: https://docs.jax.dev/en/latest/installation.html',
}


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that JAX, its compilers and its plugins read."""
    return {
        name: value for name, value in sorted(environ.items()) if name.startswith(_PREFIXES) or name in _NAMES
    }


def given(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables without those that JAX has set in this process when it was imported, for libtpu."""
    try:
        start = Path('/proc/self/environ').read_bytes().split(b'\0')
    except OSError:  # Linux has it, and libtpu is for Linux
        return dict(environ)
    own = {os.fsdecode(entry.partition(b'=')[0]) for entry in start}
    return {name: value for name, value in environ.items() if name in own or not name.startswith('TPU_')}


def accelerators() -> dict[str, int]:
    """The makers whose devices this machine has -> the number of device files; nothing is opened."""
    counts = {maker: sum(len(glob.glob(each)) for each in files) for maker, files in _FILES.items()}
    return {maker: count for maker, count in counts.items() if count}


def system() -> str:
    """The operating system, the processors and the memory, in a line."""
    memory = ''
    if hasattr(os, 'sysconf') and 'SC_PHYS_PAGES' in os.sysconf_names:
        memory = f', {human_bytes(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))} of memory'
    return f'{platform.system()} {platform.machine()}, {os.cpu_count()} processors{memory}'


def missing_plugins(present: Collection[str], versions: Collection[str]) -> Iterator[Finding]:
    """Devices without the package that opens them.

    Args:
        present: the makers of devices, as in `accelerators`.
        versions: the names of the installed packages.
    """
    for maker in present:
        if not any(_PACKAGE_OF[maker] in name for name in versions):
            yield Finding(
                f'this machine has {maker} devices, and no package is installed with which JAX opens them: '
                'it computes on the CPU',
                _INSTALL[maker],
            )


def wrong_variables(
    environ: Mapping[str, str], settings: Collection[str], present: Collection[str]
) -> Iterator[Finding]:
    """Variables that are misspelt, or hide devices, or name what cannot be used.

    Args:
        environ: the environment variables.
        settings: the settings of JAX: ``'jax_enable_x64'``.
        present: the makers of devices, as in `accelerators`.
    """
    known = {name.upper() for name in settings if name.startswith('jax_')} | _OF_JAX
    for name in environ:
        near = near_names(name, known) if name.startswith('JAX_') and name not in known else []
        if near:
            yield Finding(f'{name} is set, and JAX has no such setting', f'did you mean {" or ".join(near)}?')
    platforms = environ.get('JAX_PLATFORMS') or environ.get('JAX_PLATFORM_NAME') or ''
    if present and platforms.replace(' ', '') == 'cpu':
        yield Finding(
            f'JAX_PLATFORMS=cpu hides the {" and ".join(present)} devices of this machine',
            'unset JAX_PLATFORMS, unless that is meant',
        )
    library = environ.get('TPU_LIBRARY_PATH', '')
    if library and not Path(library).is_file():
        yield Finding(
            f'TPU_LIBRARY_PATH={library} is no file: JAX finds no libtpu',
            'unset it: JAX then takes the package',
        )
    proxies = [name for name in environ if name.lower() in _PROXIES]
    if proxies and 'no_proxy' not in map(str.lower, environ) and any(name in environ for name in _OF_SEVERAL):
        yield Finding(
            f'{", ".join(proxies)} can keep processes from joining: gRPC takes it to the coordinator too',
            'unset it, or name the hosts of the program in no_proxy',
        )
    folder = environ.get('JAX_COMPILATION_CACHE_DIR', '')
    if folder and '://' not in folder and not _can_write(Path(folder)):
        yield Finding(
            f'JAX_COMPILATION_CACHE_DIR={folder} cannot be written: nothing compiled is kept',
            'make the folder and allow this user to write there, or name another one',
        )


def full_disk() -> Iterator[Finding]:
    """A disk without room for what compilers write while a plan is made."""
    try:
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield Finding(f'no folder for temporary files: {error}', 'set TMPDIR to a folder that can be written')
        return
    if free < _LITTLE_DISK:
        yield Finding(
            f'{folder} has {human_bytes(free)} left: plans and checkpoints write there',
            'delete what is not needed, or set TMPDIR to a folder with more room',
        )


def _can_write(folder: Path) -> bool:
    """Whether a folder can be written, or made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK)
