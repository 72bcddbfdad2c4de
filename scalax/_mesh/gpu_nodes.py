"""Topologies of GPUs, such as ``'h100:4x8'``: nodes of GPUs, for each of which a CPU device stands.

The compiler for GPUs is not here where there are none, and JAX describes no topology of CPUs. So programs are
compiled for CPU devices of this process, and the nodes say which of them a fast network joins.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from scalax._jax.devices import devices_of
from scalax.errors import MeshError

GPUS_OF_NODE = {'h100': 8, 'h200': 8, 'b200': 8}
"""Kind of GPU -> the most in a node: those that NVLink switches join."""

_SIZE = re.compile(r'(?:([1-9]\d{0,5})x)?([1-9]\d{0,5})')


@dataclasses.dataclass(frozen=True)
class Nodes:
    """The GPUs of a topology.

    Attributes:
        kind: the kind of GPU, a key of `GPUS_OF_NODE`.
        count: the number of nodes.
        each: the number of GPUs of a node.
    """

    kind: str
    count: int
    each: int

    @property
    def size(self) -> int:
        """The number of GPUs."""
        return self.count * self.each


def gpu_nodes(topology: str, num_slices: int = 1) -> Nodes | None:
    """The GPUs that a topology names; None if it names no GPUs.

    Args:
        topology: ``'KIND:GPUS'``, one node, or ``'KIND:NODESxGPUS'``.
        num_slices: the number of nodes, if the name does not have it: a node is to GPUs what a slice is to
            TPUs.

    Raises:
        MeshError: the size is invalid, or *num_slices* is not the number of nodes in the name.

    Example:
        >>> gpu_nodes('h100:4x8').size, gpu_nodes('h100:8', 4).count, gpu_nodes('v5p:4x4x4')
        (32, 4, None)
    """
    kind, _, size = topology.partition(':')
    if kind not in GPUS_OF_NODE:
        return None
    most, read = GPUS_OF_NODE[kind], _SIZE.fullmatch(size)
    if read is None:
        raise MeshError(
            f'a topology of GPUs says how many a node has, {kind}:{most}, or how many nodes of how many, '
            f'{kind}:4x{most}; got {topology!r}'
        )
    count, each = int(read[1] or num_slices), int(read[2])
    if each > most:
        raise MeshError(
            f'{topology!r} has nodes of {each:,} GPUs, and a node of {kind} has at most {most}: write '
            f'several nodes, as in {kind}:4x{most}'
        )
    if num_slices not in (1, count):
        raise MeshError(
            f'{topology!r} has {count:,} nodes, and num_slices={num_slices}: leave one of them out, as in '
            f'{kind}:{each}'
        )
    return Nodes(kind, count, each)


class SimulatedGPUs(NamedTuple):
    """What the devices of a mesh stand for.

    Attributes:
        kind: the kind of GPU.
        nodes: the number of the node of each, in the order of the mesh.
    """

    kind: str
    nodes: tuple[int, ...]


class StandIns(tuple[Any, ...]):
    """CPU devices that stand for the GPUs of nodes, those of one node after those of another.

    Attributes:
        nodes: the nodes.
    """

    nodes: Nodes

    def of(self, devices: Iterable[Any]) -> SimulatedGPUs:
        """What some of them stand for."""
        node = {device: place // self.nodes.each for place, device in enumerate(self)}
        return SimulatedGPUs(self.nodes.kind, tuple(node[device] for device in devices))


def stand_ins(nodes: Nodes, topology: str) -> StandIns:
    """The CPU devices of this process that stand for GPUs.

    Raises:
        MeshError: there are too few.
    """
    here, said = devices_of('cpu', local=True)
    why = f', and let it have CPUs, as with JAX_PLATFORMS=cpu. JAX says: {said}' if said else ''
    if len(here) < nodes.size:
        raise MeshError(
            f'{topology!r} has {nodes.size:,} GPUs, for each of which a simulated CPU device stands, and JAX '
            f'has {len(here)}: call jax.config.update("jax_num_cpu_devices", {nodes.size}) before anything '
            f'uses JAX{why}'
        )
    found = StandIns(here[: nodes.size])
    found.nodes = nodes
    return found
