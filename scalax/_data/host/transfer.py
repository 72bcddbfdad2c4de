"""Transfers of trees between the host and a mesh, with one dispatch per tree."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from scalax._core.context import resharding
from scalax._core.pytree import partition_specs
from scalax._core.pytree.partition_specs import MeshAxes
from scalax._core.pytree.paths import NamedTree, is_prng_key, is_weakly_typed, overflowed_dtype
from scalax._core.pytree.structure_diff import structure_differences
from scalax._data.host import agreement, process_collectives
from scalax._data.host.process_collectives import without_mesh_context
from scalax._jax import weak_types
from scalax._jax.tracing import ABSTRACT, is_abstract
from scalax.errors import ArgumentError, Problem, ShardingError, StructureError

_ADVICE = (
    'What to do: call it on every process, with trees of the same structure, shapes, dtypes and shardings.'
)


def put_on_mesh(mesh: Mesh, pytree: Any, shardings: Callable[[], Sequence[Any]]) -> Any:
    """Calls `put` on every process of a mesh, or on none: JAX compares the values of the processes.

    Args:
        mesh: the mesh of the shardings.
        pytree: the tree.
        shardings: makes the shardings of the leaves. If it fails on one process, all processes raise.
    """
    if not process_collectives.processes_of(mesh).is_multiprocess:
        return put(pytree, shardings())

    def prepare() -> tuple[list[tuple[str, str]], Sequence[Any]]:
        resolved = shardings()
        tree = NamedTree.of(pytree)
        return [
            (path, f'{agreement.placed_text(leaf)} for {partition_specs.text(sharding.spec)}')
            for path, leaf, sharding in zip(tree.paths, tree.leaves, resolved, strict=True)
        ], resolved

    options = f'mesh ({MeshAxes.of(mesh)})'
    return put(pytree, agreement.prepare_and_agree(mesh, 'shard', options, _ADVICE, prepare))


def agree_to_fetch(function: str, tree: NamedTree, indices: Sequence[int]) -> None:
    """Returns if all processes fetch the leaves with these indices; otherwise raises on every process.

    It uses the mesh of the first of these leaves. A process that fetches no leaf does not take part.
    """
    mesh = next((mesh for i in indices if (mesh := getattr(tree.leaves[i].sharding, 'mesh', None))), None)
    if mesh is not None:
        leaves = [(tree.paths[i], agreement.placed_text(tree.leaves[i])) for i in indices]
        agreement.agree(mesh, function, f'mesh ({MeshAxes.of(mesh)})', leaves, _ADVICE)


def put(pytree: Any, shardings: Sequence[Any]) -> Any:
    """Places the leaves of a tree with one NamedSharding per leaf, in one ``jax.device_put``.

    Raises:
        ShardingError: some leaves are abstract, or integers that are too large; lists all of them.
    """
    leaves, treedef = jax.tree.flatten(pytree)
    reject_tracers(leaves, 'shard')
    if any(issubclass(kind, ABSTRACT) for kind in set(map(type, leaves))):
        tree = NamedTree.of(pytree)
        raise ShardingError(
            [
                Problem(
                    'no-value',
                    tree.describe(index),
                    f'a {type(leaves[index]).__name__} has no value that could be placed',
                    hint='shard arrays; for shapes with shardings use abstract(tree, rules), and to create '
                    'the arrays where they belong use sjit(init, out_shardings=rules).',
                )
                for index, leaf in enumerate(leaves)
                if is_abstract(leaf)
            ]
        )
    with name_large_integers(pytree):
        return jax.tree.unflatten(treedef, _device_put(leaves, shardings))


@contextlib.contextmanager
def name_large_integers(pytree: Any) -> Iterator[None]:
    """Replaces JAX's error about a too large integer by one that lists the leaf paths of all of them.

    Raises:
        ShardingError: some Python numbers in the tree have too many bits for JAX.
    """
    try:
        yield
    except Exception:  # OverflowError, or an error of the runtime
        tree = NamedTree.of(pytree)
        problems = [
            Problem(
                'too-large',
                tree.describe(i),
                f'{leaf} does not fit in {dtype}, to which JAX converts a Python int',
                hint='keep such a number out of the tree, or split it into several; jax_enable_x64 '
                'allows 64 bits.',
            )
            for i, leaf in enumerate(tree.leaves)
            if (dtype := overflowed_dtype(leaf))
        ]
        if problems:
            raise ShardingError(problems) from None
        raise


def _device_put(leaves: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Calls ``jax.device_put``, which sends typed keys to other processes only as their data."""
    key_indices = [
        i
        for i, sharding in enumerate(shardings)
        if not sharding.is_fully_addressable and is_prng_key(leaves[i]) and leaves[i].sharding != sharding
    ]
    operands = list(leaves)
    for i in key_indices:
        operands[i] = without_mesh_context(jax.random.key_data, leaves[i])
    placed = resharding.device_put(operands, shardings)
    for i in key_indices:
        placed[i] = wrap_keys(placed[i], leaves[i], shardings[i])
    for i, sharding in enumerate(shardings):
        if not sharding.is_fully_addressable and is_weakly_typed(leaves[i]):
            placed[i] = weakly_typed(placed[i])
    return placed


def weakly_typed(array: jax.Array) -> jax.Array:
    """Restores the weak type of an array, which JAX drops when it makes arrays from local shards."""
    return cast(jax.Array, without_mesh_context(weak_types.weakly_typed, array))


def wrap_keys(data: jax.Array, like: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Makes sharded keys from their data, with the implementation of the keys *like*."""
    return without_mesh_context(_wrap_keys_program(jax.random.key_impl(like), sharding), data)


@functools.lru_cache(maxsize=64)
def _wrap_keys_program(impl: Any, sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda data: jax.random.wrap_key_data(data, impl=impl), out_shardings=sharding)


def reject_tracers(leaves: Sequence[Any], function: str) -> None:
    """Raises ArgumentError if a leaf is a tracer: the compiler may ignore a transfer in a traced function."""
    if any(issubclass(kind, jax.core.Tracer) for kind in set(map(type, leaves))):
        raise ArgumentError(
            f'{function} moves arrays, but got a value inside a function that JAX traces, where the '
            'compiler may ignore such a move: use with_sharding_constraint there'
        )


def to_host(pytree: Any) -> Any:
    """Converts the jax.Arrays of a tree to NumPy arrays of their global values, on every process.

    Leaves with shards on other processes are gathered one at a time, so that device memory holds at most one
    global array. Typed PRNG keys, which NumPy does not support, stay jax.Arrays.
    """
    leaves, treedef = jax.tree.flatten(pytree)
    addressable = _numeric_arrays(leaves)
    # Distinct shardings are few, and most have no unreduced axes.
    shardings = {leaves[i].sharding for i in addressable}
    remote: list[int] = []
    if jax.process_count() > 1:
        remote = [i for i in addressable if not leaves[i].is_fully_addressable]
        if fetched := [
            i for i in remote if not leaves[i].is_fully_replicated or resharding.unreduced_axes(leaves[i])
        ]:
            agree_to_fetch('gather', NamedTree.of(pytree), fetched)
        addressable = [i for i in addressable if leaves[i].is_fully_addressable]
    if any(isinstance(sharding, NamedSharding) and sharding.spec.unreduced for sharding in shardings):
        for i in (*addressable, *remote):
            leaves[i] = resharding.reduce_partial_sums(leaves[i])
    if len(addressable) == len(leaves):
        return jax.tree.unflatten(treedef, jax.device_get(leaves))
    for i, value in zip(addressable, jax.device_get([leaves[i] for i in addressable]), strict=True):
        leaves[i] = value
    for i in remote:
        leaves[i] = fetch(leaves[i])
    return jax.tree.unflatten(treedef, leaves)


def _numeric_arrays(leaves: Sequence[Any]) -> Sequence[int]:
    """Returns the indices of the jax.Arrays that are not keys; checks each distinct type and dtype once."""
    types = set(map(type, leaves))
    array_types = {kind for kind in types if issubclass(kind, jax.Array)}
    indices: Sequence[int] = range(len(leaves))
    if types != array_types:
        indices = [i for i in indices if type(leaves[i]) in array_types]
    if not all(isinstance(dtype, np.dtype) for dtype in {leaves[i].dtype for i in indices}):
        indices = [i for i in indices if isinstance(leaves[i].dtype, np.dtype)]
    return indices


def fetch(leaf: jax.Array) -> np.ndarray:
    """Returns the global value of an array that has shards on other processes."""
    if leaf.is_fully_replicated:
        return np.asarray(leaf.addressable_data(0))
    return np.asarray(
        without_mesh_context(functools.partial(multihost_utils.process_allgather, tiled=True), leaf)
    )


def shard_and_gather_functions(shardings: Any) -> tuple[Any, Any]:
    """Returns two trees of functions, which shard or gather one array, for a tree of shardings."""
    shard = jax.tree.map(lambda sharding: lambda leaf: put(leaf, [sharding]), shardings)
    return shard, jax.tree.map(lambda _: to_host, shardings)


def apply_functions(functions: Any, pytree: Any) -> Any:
    """Applies a tree of functions to a tree of the same structure."""
    structure: Any = jax.tree.structure(functions)
    if structure != jax.tree.structure(pytree):
        raise StructureError(
            'the tree has another structure than the functions:\n'
            f'{structure_differences(pytree, functions)}\n'
            'What to do: make the functions from a tree of the same structure.'
        )
    return jax.tree.map(lambda function, leaf: function(leaf), functions, pytree)
