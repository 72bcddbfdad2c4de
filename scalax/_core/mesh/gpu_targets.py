"""Descriptions of NVIDIA GPUs for XLA's compiler: ``GpuTargetConfigProto``, as text.

The values of a kind are the values that its driver reports, as in XLA's own descriptions of GPUs
(https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs). H100 NVL and GH200, which are
missing there, are from their data sheets (https://www.nvidia.com/en-us/data-center/h100 and
https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip). The values that all GPUs of an
architecture share are from the table "Technical Specifications per Compute Capability" of the CUDA C++
programming guide.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Target(NamedTuple):
    """A GPU, as its driver describes it.

    Attributes:
        device_kind: the name that JAX reports as ``device.device_kind``.
        capability: the compute capability.
        cores: the number of streaming multiprocessors.
        ghz: the maximum clock rate.
        memory_bytes: the size of the memory.
        memory_rate: the memory bandwidth, in bytes per second.
        l2_bytes: the size of the L2 cache.
        links: the number of NVLink links. XLA chooses the kernels of all-reduces by it.
    """

    device_kind: str
    capability: tuple[int, int]
    cores: int
    ghz: float
    memory_bytes: int
    memory_rate: int
    l2_bytes: int
    links: int = 18


_MB = 10**6
_MIB = 2**20
TARGETS = {
    'a100': Target(
        'NVIDIA A100-SXM4-80GB', (8, 0), 108, 1.41, 85_100_068_864, 2_039_040 * _MB, 40 * _MIB, 12
    ),
    'h100': Target('NVIDIA H100 80GB HBM3', (9, 0), 132, 1.98, 84_942_979_072, 3_352_320 * _MB, 50 * _MIB),
    'h100-pcie': Target(
        'NVIDIA H100 PCIe', (9, 0), 114, 1.755, 84_942_979_072, 2_039_040 * _MB, 50 * _MIB, 12
    ),
    'h100-nvl': Target('NVIDIA H100 NVL', (9, 0), 132, 1.785, 94 * 10**9, 3_938_000 * _MB, 50 * _MIB, 12),
    'h200': Target('NVIDIA H200', (9, 0), 132, 1.98, 151_397_597_184, 4_800_000 * _MB, 50 * _MIB),
    'gh200': Target('NVIDIA GH200 480GB', (9, 0), 132, 1.98, 96 * 10**9, 4_000_000 * _MB, 50 * _MIB),
    'b200': Target('NVIDIA B200', (10, 0), 148, 1.965, 191_514_411_008, 7_672_320 * _MB, 132_644_864),
    'gb200': Target('NVIDIA GB200', (10, 0), 152, 2.062, 197_897_748_480, 7_928_064 * _MB, 135_528_448),
    'gb300': Target('NVIDIA GB300', (10, 3), 152, 2.07, 297_021_079_552, 7_928_064 * _MB, 135_528_448),
}
"""Kind of GPU -> its description."""

# Major compute capability -> floating-point units per core, bytes of shared memory per core and per block.
_CORES = {8: (64, 167_936, 166_912), 9: (128, 233_472, 232_448), 10: (128, 233_472, 232_448)}

_TEXT = """\
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  core_count: {target.cores}
  fpus_per_core: {units}
  clock_rate_ghz: {target.ghz}
  device_memory_size: {target.memory_bytes}
  memory_bandwidth: {target.memory_rate}
  l2_cache_size: {target.l2_bytes}
  shared_memory_per_core: {shared}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {max_shared}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  threads_per_warp: 32
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_interconnect_info {{ active_links: {target.links} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{target.device_kind}"
"""


FIELDS = ('cuda_compute_capability', *re.findall(r'(?m)^ *(\w+):', _TEXT))
"""The fields that a target config must have."""


def target_config(kind: str) -> str:
    """Returns the ``GpuTargetConfigProto`` of a kind of GPU, as text.

    Example:
        >>> 'core_count: 132' in target_config('h100')
        True
    """
    target = TARGETS[kind]
    major, minor = target.capability
    units, shared, max_shared = _CORES[major]
    extension = 'ACCELERATED_FEATURES' if major >= 9 else 'NONE'  # such as sm_90a
    return _TEXT.format(
        target=target,
        major=major,
        minor=minor,
        extension=extension,
        units=units,
        shared=shared,
        max_shared=max_shared,
    )
