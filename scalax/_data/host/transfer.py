"""Transfers of whole trees between the host and a mesh, in one dispatch a tree."""

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
    'What to do: call it on every process, with trees of one structure, shape and dtype, whose global arrays '
    'are placed alike.'
)


def put_on_mesh(mesh: Mesh, pytree: Any, shardings: Callable[[], Sequence[Any]]) -> Any:
    """`put` onto a mesh, on all of its processes or on none: JAX compares what they place.

    Args:
        mesh: the mesh of the shardings.
        pytree: the tree.
        shardings: makes those of the leaves; where it fails on one process, the others are told.
    """
    if not process_collectives.processes_of(mesh).is_multiprocess:
        return put(pytree, shardings())

    def prepare() -> tuple[list[tuple[str, str]], Sequence[Any]]:
        made = shardings()
        tree = NamedTree.of(pytree)
        return [
            (path, f'{agreement.placed_text(leaf)} for {partition_specs.text(to.spec)}')
            for path, leaf, to in zip(tree.paths, tree.leaves, made, strict=True)
        ], made

    call = f'mesh ({MeshAxes.of(mesh)})'
    return put(pytree, agreement.prepare_and_agree(mesh, 'shard', call, _ADVICE, prepare))


def agree_to_fetch(what: str, tree: NamedTree, fetched: Sequence[int]) -> None:
    """Returns if all processes fetch the same leaves, by number; raises on every process if not.

    It is done on the mesh of the first of them; a process that fetches nothing takes no part.
    """
    mesh = next((mesh for i in fetched if (mesh := getattr(tree.leaves[i].sharding, 'mesh', None))), None)
    if mesh is not None:
        leaves = [(tree.paths[i], agreement.placed_text(tree.leaves[i])) for i in fetched]
        agreement.agree(mesh, what, f'mesh ({MeshAxes.of(mesh)})', leaves, _ADVICE)


def put(pytree: Any, shardings: Sequence[Any]) -> Any:
    """Places the leaves of a tree as NamedShardings say, leaf by leaf, in one ``jax.device_put``.

    Raises:
        ShardingError: some leaves are abstract, or integers that are too large; all are named.
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
    """Names the leaves of a tree that have too many bits for JAX, where it raises an error about one.

    Raises:
        ShardingError: in place of JAX's error, which does not say where the integer is.
    """
    try:
        yield
    except Exception:  # OverflowError, or what the runtime says
        tree = NamedTree.of(pytree)
        problems = [
            Problem(
                'too-large',
                tree.describe(i),
                f'{leaf} does not fit in {dtype}, which JAX makes of a Python int',
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
    """Like ``jax.device_put``; typed keys, which it does not send to other processes, go as their data."""
    keys = [
        i
        for i, sharding in enumerate(shardings)
        if not sharding.is_fully_addressable and is_prng_key(leaves[i]) and leaves[i].sharding != sharding
    ]
    sent = list(leaves)
    for i in keys:
        sent[i] = without_mesh_context(jax.random.key_data, leaves[i])
    placed = resharding.device_put(sent, shardings)
    for i in keys:
        placed[i] = wrap_keys(placed[i], leaves[i], shardings[i])
    for i, sharding in enumerate(shardings):
        if not sharding.is_fully_addressable and is_weakly_typed(leaves[i]):
            placed[i] = weakly_typed(placed[i])
    return placed


def weakly_typed(array: jax.Array) -> jax.Array:
    """The array with a weak type: JAX drops it where arrays are made of the parts that processes hold."""
    return cast(jax.Array, without_mesh_context(weak_types.weakly_typed, array))


def wrap_keys(data: jax.Array, like: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The keys that have these data, sharded so, of the kind of *like*."""
    return without_mesh_context(_wrapping(jax.random.key_impl(like), sharding), data)


@functools.lru_cache(maxsize=64)
def _wrapping(impl: Any, sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda data: jax.random.wrap_key_data(data, impl=impl), out_shardings=sharding)


def reject_tracers(leaves: Sequence[Any], what: str) -> None:
    """Raises ArgumentError inside a traced function, where the compiler may ignore a transfer."""
    if any(issubclass(kind, jax.core.Tracer) for kind in set(map(type, leaves))):
        raise ArgumentError(
            f'{what} moves arrays, and this is a value inside a function that JAX traces, where the '
            'compiler may ignore such a move: use with_sharding_constraint there'
        )


def to_host(pytree: Any) -> Any:
    """Every leaf as a numpy array of its global value, on every process; other leaves stay.

    Leaves that other processes hold a part of are gathered one at a time, so that at most one of them
    is in device memory whole. Typed PRNG keys, which numpy does not know, stay jax.Arrays.
    """
    leaves, treedef = jax.tree.flatten(pytree)
    here = _numeric_arrays(leaves)
    # Shardings are few, and most have no parts of sums.
    shardings = {leaves[i].sharding for i in here}
    elsewhere: list[int] = []
    if jax.process_count() > 1:
        elsewhere = [i for i in here if not leaves[i].is_fully_addressable]
        if fetched := [
            i for i in elsewhere if not leaves[i].is_fully_replicated or resharding.unreduced_axes(leaves[i])
        ]:
            agree_to_fetch('gather', NamedTree.of(pytree), fetched)
        here = [i for i in here if leaves[i].is_fully_addressable]
    if any(isinstance(one, NamedSharding) and one.spec.unreduced for one in shardings):
        for i in (*here, *elsewhere):
            leaves[i] = resharding.reduce_partial_sums(leaves[i])
    if len(here) == len(leaves):
        return jax.tree.unflatten(treedef, jax.device_get(leaves))
    for i, value in zip(here, jax.device_get([leaves[i] for i in here]), strict=True):
        leaves[i] = value
    for i in elsewhere:
        leaves[i] = fetch(leaves[i])
    return jax.tree.unflatten(treedef, leaves)


def _numeric_arrays(leaves: Sequence[Any]) -> Sequence[int]:
    """The positions of the jax.Arrays that are not keys. Types and dtypes are few: each is looked at once."""
    types = set(map(type, leaves))
    array_types = {kind for kind in types if issubclass(kind, jax.Array)}
    found: Sequence[int] = range(len(leaves))
    if types != array_types:
        found = [i for i in found if type(leaves[i]) in array_types]
    if not all(isinstance(dtype, np.dtype) for dtype in {leaves[i].dtype for i in found}):
        found = [i for i in found if isinstance(leaves[i].dtype, np.dtype)]
    return found


def fetch(leaf: jax.Array) -> np.ndarray:
    """The global value of an array of which other processes hold a part."""
    if leaf.is_fully_replicated:
        return np.asarray(leaf.addressable_data(0))
    return np.asarray(
        without_mesh_context(functools.partial(multihost_utils.process_allgather, tiled=True), leaf)
    )


def shard_and_gather_functions(shardings: Any) -> tuple[Any, Any]:
    """For each sharding of a tree a function that places an array with it, and one that fetches an array."""
    places = jax.tree.map(lambda sharding: lambda leaf: put(leaf, [sharding]), shardings)
    return places, jax.tree.map(lambda _: to_host, shardings)


def apply_functions(functions: Any, pytree: Any) -> Any:
    """Applies a tree of functions to a tree of the same structure."""
    mine: Any = jax.tree.structure(functions)
    if mine != jax.tree.structure(pytree):
        raise StructureError(
            'the tree has another structure than the functions:\n'
            f'{structure_differences(pytree, functions)}\n'
            'What to do: make the functions from a tree of the same structure.'
        )
    return jax.tree.map(lambda function, leaf: function(leaf), functions, pytree)
