"""The batch in microbatches: which rows each of them has, and which stage owns it.

Outside of a pipeline the batch is sharded over its axis too, beside other mesh axes. Each stage owns
microbatches, and each device of it has rows of all of these: row i of a device is in microbatch ``i % J`` of
the J ones of its stage. So nothing moves when rows are dealt.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from scalax._jaxprs.rows import SUM, Fact, Rows


@dataclasses.dataclass(frozen=True)
class Deal:
    """How rows are dealt.

    Attributes:
        rows: how many rows there are.
        microbatches: into how many microbatches they are dealt.
        axis: the axis of stages.
        sizes: the mesh axes over which rows are sharded and their sizes, in the order of the spec, the axis
            of stages among them.
        is_manual: whether all of these axes are manual in the pipeline: a device runs on its own rows of a
            microbatch. Otherwise the compiler shards them over the others.
    """

    rows: int
    microbatches: int
    axis: str
    sizes: tuple[tuple[str, int], ...]
    is_manual: bool = False

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return dict(self.sizes)[self.axis]

    @property
    def owners(self) -> int:
        """How many stages own microbatches: all of them, or one if microbatches do not divide by them."""
        return self.stages if self.microbatches % self.stages == 0 else 1

    @property
    def inside(self) -> tuple[str, ...]:
        """The mesh axes over which a microbatch is sharded."""
        return tuple([name for name, _ in self.sizes if name != self.axis])

    @property
    def outside(self) -> tuple[str, ...]:
        """The mesh axes over which the batch is sharded outside of the pipeline."""
        return tuple([name for name, _ in self.sizes]) if self.owners > 1 else self.inside

    @property
    def devices(self) -> int:
        """Over how many devices a microbatch is sharded."""
        return math.prod(size for name, size in self.sizes if name != self.axis)

    def size(self, rows: Rows) -> int:
        """The size of the dimension of rows in what a device computes of a microbatch."""
        return self.rows // self.microbatches * rows.each // (self.devices if self.is_manual else 1)

    def of(self, x: Any, rows: Rows) -> Any:
        """An array with its microbatches in front: those of an owner, then the owners."""
        dealt = jnp.moveaxis(self._split(x, rows), (rows.dim + 4, rows.dim + 1), (0, 1))
        size = self.rows // self.microbatches * rows.each
        return dealt.reshape(*dealt.shape[:2], *x.shape[: rows.dim], size, *x.shape[rows.dim + 1 :])

    def back(self, dealt: Any, rows: Rows) -> Any:
        """The array of which `of` made this one."""
        dim, shape = rows.dim, dealt.shape[2:]
        before, _, after, rest, _, each = self._factors(rows)
        apart = dealt.reshape(*dealt.shape[:2], *shape[:dim], before, after, rest, each, *shape[dim + 1 :])
        together = jnp.moveaxis(apart, (0, 1), (dim + 4, dim + 1))
        return together.reshape(*shape[:dim], self.rows * each, *shape[dim + 1 :])

    def microbatch(self, x: Any, rows: Rows, number: Any) -> Any:
        """What a device computes of one microbatch, of an array that is replicated."""
        own = self._split(x, rows)
        taken = {4: number // self.owners, 1: number % self.owners}
        if self.is_manual:
            names = [name for name, _ in self.sizes]
            place = names.index(self.axis)
            taken |= {
                i: jax.lax.axis_index(tuple(each))
                for i, each in ((0, names[:place]), (2, names[place + 1 :]))
                if each
            }
        for i, index in sorted(taken.items(), reverse=True):
            own = jax.lax.dynamic_index_in_dim(own, index, rows.dim + i, keepdims=False)
        return own.reshape(*x.shape[: rows.dim], self.size(rows), *x.shape[rows.dim + 1 :])

    def share(self, x: Any, fact: Fact, number: Any) -> Any:
        """What a microbatch gets of what is the same for all rows; of a term of a sum the first gets all."""
        if isinstance(fact, Rows):
            return self.microbatch(x, fact, number)
        return jnp.where(self.is_first(number), x, jnp.zeros_like(x)) if fact == SUM else x

    def is_first(self, number: Any) -> Any:
        """Whether what a device computes of a microbatch is the first of all that there is to compute."""
        if self.is_manual and self.inside:
            return (number == 0) & (jax.lax.axis_index(self.inside) == 0)
        return number == 0

    def _factors(self, rows: Rows) -> tuple[int, ...]:
        """The sizes of a dimension of rows: by mesh axes, with the owner, by microbatch, and of a row."""
        place = [name for name, _ in self.sizes].index(self.axis)
        before, after = [
            math.prod(size for _, size in each) for each in (self.sizes[:place], self.sizes[place + 1 :])
        ]
        rest = self.rows // (self.microbatches * before * after)
        return before, self.owners, after, rest, self.microbatches // self.owners, rows.each

    def _split(self, x: Any, rows: Rows) -> Any:
        return x.reshape(*x.shape[: rows.dim], *self._factors(rows), *x.shape[rows.dim + 1 :])


def placed(x: Any, entries: dict[int, Any]) -> Any:
    """An array whose dimensions are sharded over these mesh axes, of the mesh in force; others are open."""
    spec = [entries.get(i, PartitionSpec.UNCONSTRAINED) for i in range(x.ndim)]
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))
