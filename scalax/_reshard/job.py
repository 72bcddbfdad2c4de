"""What a call moves: the leaves that there are, and those that there will be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalax._report.tables import bytes_of
from scalax._reshard.names import Arrival, Move, NameMapping, arrivals_of
from scalax._reshard.routes import Route, Side, route_of
from scalax._tree import specs
from scalax._tree.paths import NamedTree, dtype_on_devices, has_foreign_dtype, leaf_shape, type_text
from scalax._tree.specs import MeshAxes
from scalax.errors import ArgumentError, checked_flag, shown_leaves

if TYPE_CHECKING:
    from scalax.rules import RuleLike


@dataclasses.dataclass(frozen=True)
class Options:
    """How a tree is moved: the arguments of `MeshShardingHelper.reshard`."""

    mapping: NameMapping
    dtype: Any
    donate: bool
    memory: int | None
    relay: bool = True

    @classmethod
    def of(
        cls,
        mapping: NameMapping = None,
        dtype: Any = None,
        donate: bool = False,
        memory: int | str | None = None,
    ) -> Options:
        """Checked options.

        Raises:
            ArgumentError: one is invalid.
        """
        size = None if memory is None else bytes_of(str(memory))
        if size == 0:
            raise ArgumentError(f"memory is a size ('2GiB', '500MB', or bytes) or None, got {memory!r}")
        if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
            raise ArgumentError(f'dtype is that of floating-point leaves, or None, got {dtype!r}')
        return cls(mapping, None if dtype is None else jnp.dtype(dtype), checked_flag('donate', donate), size)

    def text(self, mesh: Mesh) -> str:
        """The options as text, the same on every process if they are; the mapping shows in the leaves."""
        return f'mesh ({MeshAxes.of(mesh)}), dtype={self.dtype}, donate={self.donate}, memory={self.memory}'


@dataclasses.dataclass(frozen=True)
class Job:
    """What a call moves.

    Attributes:
        tree: the leaves of the source.
        befores: for each of them, where and what it is.
        is_host: for each, whether it is host data, which every process has.
        arrivals: the leaves of the target.
        afters: for each of them, where and what it will be.
        treedef: their structure.
        options: how.
    """

    tree: NamedTree
    befores: list[Side]
    is_host: list[bool]
    arrivals: list[Arrival]
    afters: list[Side]
    treedef: Any
    options: Options

    @classmethod
    def of(cls, helper: Any, pytree: Any, rules: RuleLike, options: Options) -> Job:
        """The job of a call; nothing moves.

        Raises:
            ArgumentError: the mapping does not fit, or a struct has no sharding.
            ShardingError: leaves cannot be sharded as asked.
        """
        tree = NamedTree.of(pytree)
        _reject(tree, _fault)
        arrivals, treedef = arrivals_of(tree, options.mapping)
        arrivals = [dataclasses.replace(each, dtype=_cast(each.dtype, options.dtype)) for each in arrivals]
        structs = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrivals]
        target = pytree if options.mapping is None else treedef.unflatten(structs)
        shardings = jax.tree.leaves(helper.match_sharding_rule(rules, target))
        if sums := [each.path for each, to in zip(arrivals, shardings, strict=True) if to.spec.unreduced]:
            raise ArgumentError(f'reshard makes no parts of sums (unreduced axes):\n{shown_leaves(sums)}')
        afters = [Side.of(each.shape, each.dtype, to) for each, to in zip(arrivals, shardings, strict=True)]
        host = [_is_host(leaf) for leaf in tree.leaves]
        # Host data comes to where it belongs; what is then cut or joined, to all devices.
        ours: dict[int, Any] = {
            i: NamedSharding(helper.mesh, PartitionSpec()) for i, is_host in enumerate(host) if is_host
        }
        for each, to in zip(arrivals, shardings, strict=True):
            if each.moves == (Move(i := each.moves[0].source),) and host[i]:
                ours[i] = to
        befores = [
            Side.of(shape, dtype_on_devices(leaf), ours[i] if host[i] else leaf.sharding)
            for i, (leaf, shape) in enumerate(zip(tree.leaves, tree.shapes, strict=True))
        ]
        return cls(tree, befores, host, arrivals, afters, treedef, options)

    @property
    def bytes(self) -> int:
        """The bytes of the target, each element counted once."""
        return sum(math.prod(after.shape) * after.bits for after in self.afters) // 8

    def route(self, move: Move, after: Side) -> Route:
        """The route of a move."""
        before = self.befores[move.source]
        options = self.options
        return route_of(before, after, move.axes, move.layer, move.splits, options.memory, options.relay)

    def require_values(self) -> None:
        """Raises ArgumentError if leaves were deleted, or are structs of what this process holds."""
        _reject(self.tree, _fault_of_value)

    def texts(self) -> Iterator[tuple[str, str]]:
        """By path in the target, what has to be the same on every process."""
        for each, after in zip(self.arrivals, self.afters, strict=True):
            sources = ', '.join(map(self._source_text, each.moves))
            spec = specs.text(cast(NamedSharding, after.sharding).spec)
            yield each.path, f'{type_text(each.dtype, each.shape)} for {spec} from {sources}'

    def _source_text(self, move: Move) -> str:
        before, path = self.befores[move.source], self.tree.paths[move.source]
        text = f'{path} {type_text(before.dtype, before.shape)}'
        if self.is_host[move.source]:
            return text
        spec = specs.text(before.sharding.spec) if isinstance(before.sharding, NamedSharding) else 'placed'
        devices = ', '.join(str(device.id) for device in before.boxes)
        return f'{text} as {spec} on devices {devices}'


def _cast(dtype: Any, wanted: Any) -> Any:
    """The dtype after the move: only floating ones of 16 bits and more change; smaller ones have a scale."""
    is_float = isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1
    return wanted if wanted is not None and is_float else dtype


def _is_host(leaf: Any) -> bool:
    """Whether every process has the leaf, rather than some devices of the program."""
    if isinstance(leaf, jax.Array):
        return not leaf.committed and jax.process_count() > 1
    return not isinstance(leaf, jax.ShapeDtypeStruct)


def _fault(leaf: Any) -> str | None:
    if leaf_shape(leaf) is None or has_foreign_dtype(leaf):
        return 'is not an array'
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
        return 'has no sharding'
    if getattr(getattr(getattr(leaf, 'sharding', None), 'spec', None), 'unreduced', None):
        return 'has parts of sums (unreduced axes)'
    return None


def _fault_of_value(leaf: Any) -> str | None:
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return 'was deleted, or donated to a function'
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding.addressable_devices:
        return 'has no value, and this process has a part of it'
    return None


def _reject(tree: NamedTree, fault_of: Callable[[Any], str | None]) -> None:
    """Raises ArgumentError if leaves have a fault; names all of them."""
    faults = [(i, fault) for i, leaf in enumerate(tree.leaves) if (fault := fault_of(leaf))]
    if faults:
        raise ArgumentError(
            'reshard: these leaves cannot be moved:\n'
            f'{shown_leaves(f"{tree.describe(i)} {fault}" for i, fault in faults)}\n'
            'What to do: pass arrays, before they are donated; for a plan, structs with shardings, as '
            'helper.abstract(tree, rules) makes them.'
        )
