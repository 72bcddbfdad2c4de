"""Request to reshard a tree: the leaves of the source, and the leaves that the target will have."""

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
from scalax._data.reshard.leaf_mapping import LeafSource, NameMapping, TargetLeaf, map_leaves
from scalax._data.reshard.leaf_transfer import LeafTransfer, plan_leaf_transfer
from scalax.errors import ArgumentError, checked_flag, module_advice, shown_leaves


@dataclasses.dataclass(frozen=True)
class ReshardOptions:
    """Options of `MeshShardingHelper.reshard`."""

    mapping: NameMapping
    dtype: Any
    donate: bool
    memory: int | None

    @classmethod
    def of(
        cls, mapping: Any = None, dtype: Any = None, donate: bool = False, memory: Any = None
    ) -> ReshardOptions:
        """Checks the options.

        Raises:
            ArgumentError: an option is invalid.
        """
        size = None if memory is None else parse_bytes(str(memory))
        if size == 0:
            raise ArgumentError(f"memory is a size ('2GiB', '500MB', or bytes) or None, got {memory!r}")
        try:
            target_dtype = None if dtype is None else jnp.dtype(dtype)
        except TypeError:
            target_dtype = jnp.dtype(int)  # an invalid dtype is the same error as an integer dtype
        if target_dtype is not None and not jnp.issubdtype(target_dtype, jnp.floating):
            raise ArgumentError(f'dtype is that of floating-point leaves, or None, got {dtype!r}')
        return cls(mapping, target_dtype, checked_flag('donate', donate), size)


@dataclasses.dataclass(frozen=True)
class ReshardRequest:
    """The leaves of the source and of the target of one call.

    Attributes:
        tree: the leaves of the source.
        targets: the leaves of the target.
        treedef: the structure of the target.
        options: the options of the call.
    """

    tree: NamedTree
    targets: list[TargetLeaf]
    treedef: Any
    options: ReshardOptions

    @classmethod
    def of(
        cls, helper: Any, pytree: Any, rules: Any, options: ReshardOptions, plan_only: bool = False
    ) -> ReshardRequest:
        """Makes the request of a call. Leaves need no values if *plan_only* is set.

        Raises:
            ArgumentError: some leaves cannot be moved, or the mapping does not fit.
            ShardingError: some leaves of the target cannot be sharded by the rules.
        """
        tree = NamedTree.of(pytree)
        faults = ((tree.describe(i), _fault(leaf, plan_only)) for i, leaf in enumerate(tree.leaves))
        _reject(faults, module_advice(tree.leaves))
        targets, treedef = map_leaves(tree, options.mapping)
        targets = [_cast(target, options.dtype) for target in targets]
        structs = [jax.ShapeDtypeStruct(target.shape, target.dtype) for target in targets]
        target_tree = pytree if options.mapping is None else treedef.unflatten(structs)
        shardings = jax.tree.leaves(helper.match_sharding_rule(rules, target_tree))
        targets = [
            dataclasses.replace(target, sharding=sharding)
            for target, sharding in zip(targets, shardings, strict=True)
        ]
        _reject((f'{target.path} of the result', _sharding_fault(target.sharding)) for target in targets)
        return cls(tree, targets, treedef, options)

    @property
    def bytes(self) -> int:
        """The bytes of the target, counting each element once."""
        return sum(math.prod(target.shape) * element_bits(target.dtype) for target in self.targets) // 8

    def transfer(self, source: LeafSource, target: TargetLeaf) -> LeafTransfer:
        """Returns the transfer of a leaf of the source to a leaf of the target."""
        leaf, shape = self.tree.leaves[source.index], self.tree.shapes[source.index]
        return plan_leaf_transfer(
            (shape, dtype_on_devices(leaf), leaf.sharding),
            (target.shape, target.dtype, target.sharding),
            self.options.memory,
            source.axes,
            source.layer,
            source.is_stack,
        )

    def agreement_texts(self) -> Iterator[tuple[str, str]]:
        """Yields (path in the target, text that must be the same on every process)."""
        yield '(the call)', f'with donate={self.options.donate} and memory={self.options.memory}'
        for target in self.targets:
            sources = ', '.join(self._source_text(source.index) for source in target.sources)
            spec = partition_specs.text(target.sharding.spec)
            weak = 'weakly typed ' if target.weak else ''
            yield target.path, f'{weak}{type_text(target.dtype, target.shape)} for {spec} from {sources}'

    def _source_text(self, i: int) -> str:
        leaf, shape = self.tree.leaves[i], self.tree.shapes[i]
        spec = (
            partition_specs.text(leaf.sharding.spec) if isinstance(leaf.sharding, NamedSharding) else 'placed'
        )
        devices = ', '.join(str(device.id) for device in leaf.sharding.devices_indices_map(shape))
        return f'{self.tree.paths[i]} {type_text(leaf.dtype, shape)} as {spec} on devices {devices}'


def _cast(target: TargetLeaf, dtype: Any) -> TargetLeaf:
    """Casts floating-point leaves of at least 16 bits; smaller ones have a scale, and are not cast."""
    is_float = (
        isinstance(target.dtype, np.dtype)
        and jnp.issubdtype(target.dtype, jnp.floating)
        and target.dtype.itemsize > 1
    )
    if dtype is None or not is_float:
        return target
    return dataclasses.replace(target, dtype=dtype, weak=False)


def _reject(leaves: Iterable[tuple[str, str | None]], advice: str = '') -> None:
    if faults := [f'{leaf} {fault}' for leaf, fault in leaves if fault]:
        raise ArgumentError(
            f'reshard: these leaves cannot be moved:\n{shown_leaves(faults)}\n'
            'What to do: pass arrays on devices, before they are donated; for a plan, structs with '
            'shardings, from helper.abstract(tree, rules). helper.shard moves arrays from and to host memory.'
            f'{advice}'
        )


def _fault(leaf: Any, plan_only: bool) -> str | None:
    """Returns why a leaf cannot be moved."""
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
        return 'was never placed on a mesh: each process has its own copy'
    if not (is_array or plan_only) and sharding.addressable_devices:
        return 'has no value, but this process holds a shard of it'
    return _sharding_fault(sharding)


def _sharding_fault(sharding: Any) -> str | None:
    if getattr(getattr(sharding, 'spec', None), 'unreduced', None):
        return 'holds partial sums (unreduced axes)'
    return 'is in pinned_host memory' if getattr(sharding, 'memory_kind', None) == 'pinned_host' else None
