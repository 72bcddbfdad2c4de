"""What a search for a rule knows: a mesh, a rule, and what each place saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jax.sharding import PartitionSpec

from scalax._plan.plan import Plan
from scalax._plan.roofline import Seconds
from scalax._report import saved
from scalax._search.objective import mean
from scalax.rules import TreePathShardingRule

Ended = Literal['', 'time', 'stopped']


@dataclasses.dataclass(frozen=True)
class FoundGroup:
    """A group of leaves, and what its place saves.

    Attributes:
        name: the paths of its leaves.
        spec: where they are.
        next_spec: the next best place, if all others stay; None if none was tried.
        seconds: how much longer the steps take there.
        memory: how many more bytes a device needs there.
        moved: how many more bytes a device exchanges there, mesh axes -> bytes.
        fits: whether the steps fit there.
    """

    name: str
    spec: PartitionSpec
    next_spec: PartitionSpec | None = None
    seconds: float = 0.0
    memory: int = 0
    moved: Mapping[str, int] = dataclasses.field(default_factory=dict)
    fits: bool = True


@dataclasses.dataclass(frozen=True)
class FoundMesh:
    """The best layout of a mesh and a placement of the batch.

    Attributes:
        mesh: mesh axis -> size.
        batch: where the rows of the batch are.
        bound: the seconds that the steps take at least; None if there is no program.
        estimate: the seconds if nothing overlaps; None likewise.
        memory: the bytes on a device.
        lost: why it is not the best; empty for the best.
    """

    mesh: Mapping[str, int]
    batch: PartitionSpec
    bound: float | None
    estimate: float | None
    memory: int
    lost: str

    @property
    def mean(self) -> float | None:
        """The mean of both, which the search makes small."""
        return (
            None if self.bound is None or self.estimate is None else mean(Seconds(self.bound, self.estimate))
        )


@dataclasses.dataclass(frozen=True)
class FoundData:
    """The attributes of a `Found`, which says what each is."""

    mesh: Mapping[str, int]
    rule: TreePathShardingRule
    batch: PartitionSpec
    plan: Plan
    groups: tuple[FoundGroup, ...]
    meshes: tuple[FoundMesh, ...]
    fits: bool | None
    lower_bound: float | None
    bound: float
    estimate: float
    memory: int
    tried: int
    seconds: float
    ended: Ended
    topology: str | None
    _code: str = dataclasses.field(default='', repr=False)

    def to_code(self) -> str:
        """Python that makes the helper, the rule, and the function on the mesh."""
        return self._code

    def to_dict(self) -> dict[str, Any]:
        """The result in plain Python values, ready for ``json.dumps``; the rule as its repr."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = saved.plain({name: value for name, value in own.items() if name not in ('rule', '_code')})
        return {**plain, 'rule': repr(self.rule), 'code': self._code}
