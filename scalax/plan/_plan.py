"""What does a compiled step hold, move and take? A plan: the answers as one value."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from scalax.explain import ShardingReport
from scalax.plan._collectives import Collective
from scalax.plan._compile import Memory
from scalax.plan._text import render


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `MeshShardingHelper.plan` returns; ``str()`` of it is a page of text.

    Attributes:
        name: the name of the function.
        mesh: mesh axis name -> size.
        devices: on how many devices it runs: on one, if nothing says where arguments or outputs lie.
        platform: the hardware that it was compiled for, such as ``'cpu'``.
        memory: bytes on each device.
        inputs: the arguments with their shardings.
        outputs: the outputs with theirs.
        collectives: what the devices send one another in one call, the largest first.
    """

    name: str
    mesh: Mapping[str, int]
    devices: int
    platform: str
    memory: Memory
    inputs: ShardingReport
    outputs: ShardingReport
    collectives: tuple[Collective, ...]

    @property
    def totals(self) -> dict[tuple[str, ...], dict[str, int]]:
        """Along which mesh axes how much is moved: axes -> kind -> bytes of all executions.

        Bytes are those of whole arrays, as in `Collective.bytes`.
        """
        totals: dict[tuple[str, ...], collections.Counter[str]] = {}
        for row in self.collectives:
            totals.setdefault(row.axes, collections.Counter())[row.kind] += row.count * row.bytes
        return {axes: dict(kinds) for axes, kinds in totals.items()}

    def count(self, kind: str, axes: tuple[str, ...] | None = None) -> int:
        """How often collectives of a kind are executed in one call.

        Args:
            kind: such as ``'all-gather'``.
            axes: count only those along these mesh axes.
        """
        return sum(
            row.count
            for row in self.collectives
            if row.kind == kind and (axes is None or set(row.axes) == set(axes))
        )

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = None) -> str:
        """The plan as text.

        Args:
            width: the columns that it may take; those of the terminal by default.
        """
        return render(self, width)

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain Python values, ready for ``json.dumps``."""
        return {
            'name': self.name,
            'mesh': dict(self.mesh),
            'devices': self.devices,
            'platform': self.platform,
            'memory': {**dataclasses.asdict(self.memory), 'total': self.memory.total},
            'inputs': self.inputs.to_dict(),
            'outputs': self.outputs.to_dict(),
            'collectives': [
                {
                    'kind': row.kind,
                    'axes': list(row.axes),
                    'group': row.group,
                    'count': row.count,
                    'counted': row.counted.value,
                    'bytes': row.bytes,
                    'source': row.source._asdict(),
                }
                for row in self.collectives
            ],
        }
