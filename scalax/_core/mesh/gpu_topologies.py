"""Topologies of NVIDIA GPUs that are not attached, such as ``'h100:8x8'``, for XLA's GPU compiler.

The compiler needs no GPU and no driver, only a description of the GPU (`gpu_targets`) and of the topology. An
NVLink *domain* is the set of GPUs that NVLink connects: a host, or a rack of hosts (NVL72). It corresponds to
a slice of TPUs.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scalax._core.mesh.gpu_targets import FIELDS, TARGETS, target_config
from scalax.errors import MeshError, MissingDependencyError, plural


class GPULimits(NamedTuple):
    """The largest number of GPUs of a kind in a host and in an NVLink domain.

    Attributes:
        gpus_per_host: the largest number in a host.
        gpus_per_domain: the largest number in an NVLink domain; equal to *gpus_per_host* if NVLink does not
            connect hosts.
    """

    gpus_per_host: int
    gpus_per_domain: int


GPU_KINDS = dict.fromkeys(TARGETS, GPULimits(8, 8)) | {
    'h100-pcie': GPULimits(2, 2),
    'h100-nvl': GPULimits(2, 2),
    'gh200': GPULimits(4, 4),
    'gb200': GPULimits(4, 72),
    'gb300': GPULimits(4, 72),
}
"""Kind of GPU -> its limits. Two PCIe cards with an NVLink bridge count as a host. The four GH200 in a host
are fully connected.

Sources: NVIDIA's pages on HGX A100, H100, H200 and B200, on H100 NVL and PCIe, on GB200 NVL72 and GB300
NVL72; for GH200 https://apps.fz-juelich.de/jsc/hps/jupiter/configuration.html."""

PLUGINS = ('jax-cuda12-pjrt', 'jax-cuda13-pjrt')
"""The packages that contain the compiler, for two versions of CUDA."""

_AMD = re.compile(r'mi\d{3}', re.IGNORECASE)
_FILE = '.txtpb'
_EXAMPLES = 'XLA has examples: https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs'
# The value of a field; for a compute capability, its major number.
_FIELD = r'\b{}\s*:?\s*(?:{{[^}}]*?\bmajor\s*:)?\s*({{[^}}]*}}|[^\s}}]+)'
_VALUE = re.compile(r'["\']|[0.]*[1-9]|0[xX]0*[1-9a-fA-F]')  # a string, or a number above 0
_NUMBERS = re.compile(r'\d+(?:\.\d+)*')  # the release part of a version, which is all that JAX compares
_SIZE = re.compile(r'(?:(?:([1-9]\d{0,5})x)?([1-9]\d{0,5})x)?([1-9]\d{0,3})')


@dataclasses.dataclass(frozen=True)
class GPUTopology:
    """GPUs in hosts and NVLink domains.

    Attributes:
        kind: a key of `GPU_KINDS`, or the path of a target config.
        domains: the number of NVLink domains.
        hosts_per_domain: the number of hosts in a domain.
        gpus_per_host: the number of GPUs in a host.
    """

    kind: str
    domains: int
    hosts_per_domain: int
    gpus_per_host: int


def is_gpu_topology(topology: str) -> bool:
    """Returns whether a topology names a kind of GPU or a target config.

    Example:
        >>> is_gpu_topology('h100:8'), is_gpu_topology('my.txtpb:4x8'), is_gpu_topology('v5p:4x4x4')
        (True, True, False)
    """
    kind = topology.rpartition(':')[0] or topology
    return kind in GPU_KINDS or kind.endswith(_FILE) or _AMD.match(kind) is not None


def gpu_topology(topology: str, num_slices: int = 1) -> GPUTopology:
    """Parses the name of a topology of GPUs.

    Args:
        topology: ``'KIND:GPUS'`` for one host; ``'KIND:HOSTSxGPUS'``, where each host is a domain, or all
            hosts are one domain if NVLink connects hosts of this kind; or ``'KIND:DOMAINSxHOSTSxGPUS'``.
        num_slices: the number of domains, if the name does not contain it.

    Raises:
        MeshError: such a topology does not exist, or *num_slices* differs from the number of domains in the
            name.

    Example:
        >>> gpu_topology('h100:4x8').domains, gpu_topology('gb200:18x4').domains
        (4, 1)
    """
    kind, _, size = topology.rpartition(':')
    if _AMD.match(kind or size):
        raise MeshError(
            f'{topology!r}: XLA compiles for AMD GPUs only on a machine that has them '
            '(https://github.com/openxla/xla/issues/40593)'
        )
    limits = GPU_KINDS.get(kind)
    match = _SIZE.fullmatch(size)
    if not kind or match is None:
        example = kind or size
        most, domain = GPU_KINDS.get(example, GPULimits(8, 8))
        raise MeshError(
            f'a topology of GPUs is KIND:GPUS for one host ({example}:{most}), KIND:HOSTSxGPUS '
            f'({example}:{domain // most if domain > most else 4}x{most}), or KIND:DOMAINSxHOSTSxGPUS with '
            f'domains of NVLink; got {topology!r}'
        )
    domains, hosts, gpus = (int(number) if number else None for number in match.groups())
    if limits is not None and limits.gpus_per_host == limits.gpus_per_domain and domains is None:
        domains, hosts = hosts, 1
    if num_slices not in (1, domains or num_slices):
        raise MeshError(
            f'{topology!r} has {plural(domains or 1, "NVLink domain")}, and num_slices (--slices, --dcn) '
            f'is {num_slices}: leave one of them out, or give both the same number'
        )
    result = GPUTopology(kind, domains or num_slices, hosts or 1, gpus or 1)
    if limits is not None:
        _check_limits(result, limits, topology)
    return result


def _check_limits(topology: GPUTopology, limits: GPULimits, name: str) -> None:
    """Raises MeshError if a host or an NVLink domain of a topology has more GPUs than exist in one."""
    kind, hosts, gpus = topology.kind, topology.hosts_per_domain, topology.gpus_per_host
    if gpus > limits.gpus_per_host:
        raise MeshError(
            f'{name!r} has hosts of {gpus:,} GPUs, and a host of {kind} has at most '
            f'{limits.gpus_per_host}: write several hosts, as in {kind}:4x{limits.gpus_per_host}'
        )
    if hosts * gpus > limits.gpus_per_domain:
        raise MeshError(
            f'{name!r} has NVLink domains of {hosts:,} hosts with {plural(gpus, "GPU")}, and NVLink joins at '
            f'most {limits.gpus_per_domain} of {kind}: write several domains, as in '
            f'{kind}:4x{limits.gpus_per_domain // gpus}x{gpus}'
        )


def gpu_devices(topology: str, num_slices: int) -> Sequence[Any]:
    """Returns the devices of a topology of GPUs, for compiling only, ordered by domain and host.

    Raises:
        MissingDependencyError: the compiler is not installed, is installed twice, or does not fit JAX.
        MeshError: the topology is invalid, or the compiler refuses the target config.
    """
    parsed = gpu_topology(topology, num_slices)
    is_file = parsed.kind.endswith(_FILE)
    config = _read_config(parsed.kind) if is_file else target_config(parsed.kind)
    _require_plugin()
    from jax.experimental import topologies

    shape = f'{parsed.domains}x{parsed.hosts_per_domain}x{parsed.gpus_per_host}'
    try:
        description = topologies.get_topology_desc(
            platform='cuda', topology_name='', target_config=config, topology=shape
        )
    except NotImplementedError as error:
        raise MissingDependencyError(
            f'JAX did not load the compiler for GPUs ({error}): on a machine without GPUs set '
            'JAX_PLATFORMS=cpu before anything uses JAX'
        ) from error
    except RuntimeError as error:
        hint = ''
        if is_file:
            hint = f'. The compiler wrote to stderr which part of the file it cannot read. {_EXAMPLES}'
        raise MeshError(
            f'the compiler for GPUs does not support the topology {topology!r}: {error}{hint}'
        ) from error
    return list(description.devices)


def _read_config(file: str) -> str:
    """Returns the text of a target config.

    Raises:
        MeshError: the file cannot be read, or a number is missing or 0: XLA divides by some of them, which
            would end the process.
    """
    try:
        text = Path(file).read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
        raise MeshError(f'the target config {file!r} cannot be read: {error}') from error
    without_comments = re.sub('#.*', '', text)
    fields = {name: re.search(_FIELD.format(name), without_comments) for name in FIELDS}
    missing = ', '.join(name for name, field in fields.items() if field is None)
    faults = [
        f'{name} is {field[1]}' for name, field in fields.items() if field and not _VALUE.match(field[1])
    ]
    if missing:
        faults.insert(0, f'it has no {missing}')
    if faults:
        raise MeshError(f'{file!r} is not the target config of a GPU: {"; ".join(faults)}. {_EXAMPLES}')
    return text


def installed_plugins() -> dict[str, str]:
    """Returns the installed compilers for NVIDIA GPUs: package -> version."""
    versions = {}
    for package in PLUGINS:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _require_plugin() -> None:
    """Raises MissingDependencyError unless one compiler is installed, in the version that JAX loads."""
    plugins = installed_plugins()
    if not plugins:
        raise MissingDependencyError(
            'topologies of GPUs need the compiler for GPUs, which is published for Linux: '
            'pip install "jax[cuda12-local]" (no GPU is needed)'
        )
    if fault := plugin_fault(plugins, importlib.metadata.version('jaxlib')):
        raise MissingDependencyError(': '.join(fault))


def plugin_fault(plugins: Mapping[str, str], jaxlib: str) -> tuple[str, str] | None:
    """Returns the fault of the installed compilers and its fix, or None if there is no fault.

    Args:
        plugins: the result of `installed_plugins`.
        jaxlib: the version of jaxlib, which its plugins share.

    Example:
        >>> plugin_fault({'jax-cuda12-pjrt': '0.10.0'}, '0.10.2')
        ('jax-cuda12-pjrt 0.10.0 does not fit jaxlib 0.10.2', 'pip install jax-cuda12-plugin==0.10.2')
    """
    if len(plugins) > 1:
        first, second = plugins
        return f'{first} and {second} are installed, and JAX loads only one of them', f'pip uninstall {first}'
    for package, version in plugins.items():
        if _NUMBERS.findall(version)[:1] != _NUMBERS.findall(jaxlib)[:1]:
            fix = f'pip install {package.replace("pjrt", "plugin")}=={jaxlib}'
            return f'{package} {version} does not fit jaxlib {jaxlib}', fix
    return None
