"""What a call moves: the leaves that there are, and those that there will be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from scalax._core.pytree import partition_specs
from scalax._core.pytree.paths import (
    NamedTree,
    dtype_on_devices,
    element_bits,
    has_foreign_dtype,
    leaf_shape,
    type_text,
)
from scalax._core.render.tables import parse_bytes
from scalax._data.reshard.leaf_mapping import Arrival, Move, NameMapping, arrivals_of
from scalax._data.reshard.routes import Route, route_of
from scalax.errors import ArgumentError, checked_flag, module_advice, shown_leaves


@dataclasses.dataclass(frozen=True)
class Options:
    """How a tree is moved: the arguments of `MeshShardingHelper.reshard`."""

    mapping: NameMapping
    dtype: Any
    donate: bool
    memory: int | None

    @classmethod
    def of(cls, mapping: Any = None, dtype: Any = None, donate: bool = False, memory: Any = None) -> Options:
        """Checked options.

        Raises:
            ArgumentError: one is invalid.
        """
        size = None if memory is None else parse_bytes(str(memory))
        if size == 0:
            raise ArgumentError(f"memory is a size ('2GiB', '500MB', or bytes) or None, got {memory!r}")
        try:
            wanted = None if dtype is None else jnp.dtype(dtype)
        except TypeError:
            wanted = jnp.dtype(int)  # no better
        if wanted is not None and not jnp.issubdtype(wanted, jnp.floating):
            raise ArgumentError(f'dtype is that of floating-point leaves, or None, got {dtype!r}')
        return cls(mapping, wanted, checked_flag('donate', donate), size)


@dataclasses.dataclass(frozen=True)
class Job:
    """What a call moves.

    Attributes:
        tree: the leaves of the source.
        arrivals: the leaves of the target.
        treedef: their structure.
        options: how.
    """

    tree: NamedTree
    arrivals: list[Arrival]
    treedef: Any
    options: Options

    @classmethod
    def of(cls, helper: Any, pytree: Any, rules: Any, options: Options, planned: bool = False) -> Job:
        """The job of a call; nothing moves. What is only *planned* needs no values.

        Raises:
            ArgumentError: leaves cannot be moved, or the mapping does not fit.
            ShardingError: leaves cannot be sharded as asked.
        """
        tree = NamedTree.of(pytree)
        faults = ((tree.describe(i), _fault(leaf, planned)) for i, leaf in enumerate(tree.leaves))
        _reject(faults, module_advice(tree.leaves))
        arrivals, treedef = arrivals_of(tree, options.mapping)
        arrivals = [_as_cast(arrival, options.dtype) for arrival in arrivals]
        structs = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrivals]
        target = pytree if options.mapping is None else treedef.unflatten(structs)
        tos = jax.tree.leaves(helper.match_sharding_rule(rules, target))
        arrivals = [dataclasses.replace(each, sharding=to) for each, to in zip(arrivals, tos, strict=True)]
        _reject((f'{each.path} of the result', _fault_of(each.sharding)) for each in arrivals)
        return cls(tree, arrivals, treedef, options)

    @property
    def bytes(self) -> int:
        """The bytes of the target, each element counted once."""
        return sum(math.prod(each.shape) * element_bits(each.dtype) for each in self.arrivals) // 8

    def route(self, move: Move, arrival: Arrival) -> Route:
        """The route of a move."""
        i, *how = move
        before = self.tree.shapes[i], dtype_on_devices(self.tree.leaves[i]), self.tree.leaves[i].sharding
        after = arrival.shape, arrival.dtype, arrival.sharding
        return route_of(before, after, self.options.memory, *how)

    def texts(self) -> Iterator[tuple[str, str]]:
        """By path in the target, what has to be the same on every process."""
        yield '(the call)', f'with donate={self.options.donate} and memory={self.options.memory}'
        for each in self.arrivals:
            sources = ', '.join(self._source_text(move.source) for move in each.moves)
            spec = partition_specs.text(each.sharding.spec)
            weak = 'weakly typed ' if each.weak else ''
            yield each.path, f'{weak}{type_text(each.dtype, each.shape)} for {spec} from {sources}'

    def _source_text(self, i: int) -> str:
        leaf, shape = self.tree.leaves[i], self.tree.shapes[i]
        spec = (
            partition_specs.text(leaf.sharding.spec) if isinstance(leaf.sharding, NamedSharding) else 'placed'
        )
        devices = ', '.join(str(device.id) for device in leaf.sharding.devices_indices_map(shape))
        return f'{self.tree.paths[i]} {type_text(leaf.dtype, shape)} as {spec} on devices {devices}'


def _as_cast(arrival: Arrival, wanted: Any) -> Arrival:
    """The leaf after a cast: only floating ones of 16 bits and more change; smaller ones have a scale."""
    dtype = arrival.dtype
    is_float = isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1
    if wanted is None or not is_float:
        return arrival
    return dataclasses.replace(arrival, dtype=wanted, weak=False)


def _reject(leaves: Iterable[tuple[str, str | None]], advice: str = '') -> None:
    if faults := [f'{leaf} {fault}' for leaf, fault in leaves if fault]:
        raise ArgumentError(
            f'reshard: these leaves cannot be moved:\n{shown_leaves(faults)}\n'
            'What to do: pass arrays, before they are donated; for a plan, structs with shardings, as '
            'helper.abstract(tree, rules) makes them. helper.shard places what is elsewhere, before or after.'
            f'{advice}'
        )


def _fault(leaf: Any, planned: bool) -> str | None:
    """Why a leaf cannot be moved."""
    if leaf_shape(leaf) is None or has_foreign_dtype(leaf):
        return 'is not an array'
    sharding, is_array = getattr(leaf, 'sharding', None), isinstance(leaf, jax.Array)
    mesh = getattr(sharding, 'mesh', None)
    if sharding is None or (isinstance(mesh, AbstractMesh) and mesh.empty):
        return 'has no sharding'
    if isinstance(mesh, AbstractMesh):
        return 'is on a mesh without devices'
    if is_array and leaf.is_deleted():
        return 'was deleted, or donated to a function'
    if is_array and not leaf.committed and jax.process_count() > 1:
        return 'was never placed: each process has its own'
    if not (is_array or planned) and sharding.addressable_devices:
        return 'has no value, and this process has a part of it'
    return _fault_of(sharding)


def _fault_of(sharding: Any) -> str | None:
    if getattr(getattr(sharding, 'spec', None), 'unreduced', None):
        return 'has parts of sums (unreduced axes)'
    return 'is in pinned_host memory' if getattr(sharding, 'memory_kind', None) == 'pinned_host' else None
