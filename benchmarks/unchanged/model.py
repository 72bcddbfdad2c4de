"""The parts of a model of the table, and the strategies that it is compiled for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import optax

from scalax.sharding import FSDPShardingRule, MeshShardingHelper, ShardingRule
from scalax.sharding import PartitionSpec as P

Tree = Any
Size = Literal['small', 'large']
Loss = Callable[[Tree, Tree, jax.Array], Any]
ADAMW = optax.adamw(1e-3)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and its loss, written for one device.

    The code may name values (`with_sharding_annotation`). Names have no effect unless *hand* binds them,
    so the plain program and the expert program share their code.

    Attributes:
        name: the name in the table.
        init: maps a key to the parameters (float32 or bfloat16 arrays, in any tree).
        batch: maps a number of rows to a batch: a tree of ShapeDtypeStructs.
        loss: maps parameters, a batch and a key to the mean loss over rows.
        columns_and_rows: specs of parameters over fsdp and tp, for the FSDP x TP strategy.
        hand: annotation name -> spec in which the axis 'batch' stands for the axes of the batch; 'tp' is left
            out where the mesh has none.
        hand_loss: the expert's loss, if annotations are not enough; takes a further argument, the batch
            axes.
        rows: the number of rows per device, in plans.
        fsdp_rule: the rule of parameters without tp, for models that do not use `FSDPShardingRule`.
        batch_dim: the batch dimension of the batch's arrays; 1 in time-major data.
        has_aux: whether the loss returns a pair: the mean loss, and arrays that the step returns.
        example: maps a number of rows to a batch with values, if arbitrary small numbers are not valid.
        optimizer: updates the parameters.
        hand_optimizer: maps the sizes of mesh axes to the expert's optimizer.
    """

    name: str
    init: Callable[[jax.Array], Tree]
    batch: Callable[[int], Tree]
    loss: Loss
    columns_and_rows: ShardingRule
    hand: Mapping[str, P]
    hand_loss: Callable[[Tree, Tree, jax.Array, tuple[str, ...]], Any] | None = None
    rows: int = 1
    fsdp_rule: ShardingRule | None = None
    batch_dim: int = 0
    has_aux: bool = False
    example: Callable[[int], Tree] | None = None
    optimizer: optax.GradientTransformation = ADAMW
    hand_optimizer: Callable[[Mapping[str, int]], optax.GradientTransformation] | None = None


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A mesh, the axes that shard the batch, and the rule of the parameters."""

    name: str
    mesh: Mapping[str, int]
    batch_axes: tuple[str, ...]
    slices: int = 1

    def helper(self, topology: str) -> MeshShardingHelper:
        """Returns a helper for absent devices."""
        dims, names = list(self.mesh.values()), list(self.mesh)
        dcn = [self.slices if name == 'data' else 1 for name in names] if self.slices > 1 else None
        return MeshShardingHelper.from_topology(
            topology, dims, names, mesh_axis_splitting=True, num_slices=self.slices, dcn_axis_dims=dcn
        )

    def rule(self, model: Model) -> ShardingRule:
        """Returns the shardings of a model's parameters."""
        if 'tp' in self.mesh:
            return model.columns_and_rows
        return model.fsdp_rule or FSDPShardingRule()

    def bound(self, spec: P) -> P:
        """Returns a spec of `Model.hand` for this mesh."""
        mesh_axes = {'batch': self.batch_axes, **{name: name for name in self.mesh}}
        return P(*(mesh_axes.get(entry) if isinstance(entry, str) else entry for entry in spec))

    def batch(self, model: Model) -> P:
        """Returns the shardings of a batch."""
        return P(*[None] * model.batch_dim, self.batch_axes)


STRATEGIES = (
    Strategy('FSDP', {'fsdp': -1}, ('fsdp',)),
    Strategy('FSDP x TP', {'fsdp': -1, 'tp': 4}, ('fsdp',)),
    Strategy('HSDP, 2 slices', {'data': 2, 'fsdp': -1}, ('data', 'fsdp'), slices=2),
)


def strategies(topology: str) -> tuple[Strategy, ...]:
    """Returns the strategies of the table. In GPU topologies with hosts, HSDP replicates between hosts."""
    first, *others, _ = STRATEGIES
    devices = list(first.helper(topology).mesh.devices.flat)
    hosts = len({device.process_index for device in devices})
    if devices[0].platform != 'gpu':
        return STRATEGIES
    over_hosts = Strategy(f'HSDP, {hosts} hosts', {'data': hosts, 'fsdp': -1}, ('data', 'fsdp'))
    return (first, *others, over_hosts) if hosts > 1 else (first, *others)
