"""The time of a cached sjit call compared with a hand-written jax.jit call, and the traces per signature."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.timing import Row, compare
from scalax.sharding import MeshShardingHelper, TreePathShardingRule


def _tree(leaves: int, size: int = 8) -> dict[str, jax.Array]:
    return {f'w{i}': jnp.ones((size,), jnp.float32) for i in range(leaves)}


def _plural(number: int, singular: str, plural: str) -> str:
    return f'{number} {singular if number == 1 else plural}'


def _bump(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: leaf + 1 for name, leaf in tree.items()}


def _another_bump() -> Callable[[dict[str, jax.Array]], dict[str, jax.Array]]:
    """Returns a new function object, which has no entry in JAX's caches."""
    return lambda tree: _bump(tree)


def _in_turn(functions: Sequence[Callable[..., Any]], trees: Sequence[Any]) -> None:
    for function, tree in zip(functions, trees, strict=True):
        function(tree)


def _data_mesh(devices: int) -> MeshShardingHelper:
    """Returns a mesh of some of the devices; scalax 0.2.5 can only use all of them."""
    if devices == jax.device_count():
        return MeshShardingHelper([-1], ['data'])
    return MeshShardingHelper([-1], ['data'], devices=jax.devices()[:devices])


def cached_calls(rounds: int, devices: int) -> list[Row]:
    """Times calls of one signature with sharded arguments, as a training step makes them."""
    rows = []
    for leaves in (1, 20, 500):
        helper = _data_mesh(devices)
        spec = PartitionSpec('data')
        sharding = NamedSharding(helper.mesh, spec)
        tree = jax.device_put(_tree(leaves), sharding)
        ours = helper.sjit(_bump, in_shardings=(spec,), out_shardings=spec)
        reference = jax.jit(_bump, in_shardings=(sharding,), out_shardings=sharding)
        count = rounds if leaves < 500 else max(rounds // 2, 5)
        rows.append(
            compare(
                f'cached call, {_plural(leaves, "leaf", "leaves")}, {_plural(devices, "device", "devices")}',
                functools.partial(ours, tree),
                functools.partial(reference, tree),
                count,
                1.02,
            )
        )
    return rows


def host_batches(rounds: int) -> list[Row]:
    """Times calls with sharded parameters and a host batch, with Auto and Explicit axes."""
    rows = []
    helper = MeshShardingHelper([-1], ['data'], axis_types=AxisType.Explicit)
    spec = PartitionSpec('data')
    sharding = NamedSharding(helper.mesh, spec)
    batch = np.ones((8, 8), np.float32)

    def step(tree: dict[str, jax.Array], batch: jax.typing.ArrayLike) -> dict[str, jax.Array]:
        return _bump(tree)

    for leaves in (1, 300):
        tree = jax.device_put(_tree(leaves), sharding)
        ours = helper.sjit(step, in_shardings=(spec, spec), out_shardings=spec)
        reference = jax.jit(step, in_shardings=(sharding, sharding), out_shardings=sharding)

        def by_hand(tree: Any = tree, reference: Any = reference) -> Any:
            return reference(tree, jax.device_put(batch, sharding))

        rows.append(
            compare(
                f'numpy batch on Explicit axes, {leaves} leaves',
                functools.partial(ours, tree, batch),
                by_hand,
                max(rounds // (2 if leaves == 1 else 10), 50),
                1.2 if leaves == 1 else 1.1,
            )
        )
    return rows


def alternating_calls(rounds: int) -> list[Row]:
    """Times calls of three shapes in turn, against three jits among which the caller chooses by hand."""
    rows = []
    helper = MeshShardingHelper([-1], ['data'])
    spec = PartitionSpec('data')
    sharding = NamedSharding(helper.mesh, spec)
    for leaves, outputs in ((1, spec), (1, None), (500, spec)):
        trees = [jax.device_put(_tree(leaves, size), sharding) for size in (8, 16, 24)]
        ours = helper.sjit(_bump, in_shardings=(spec,), out_shardings=outputs)
        hand: dict[str, Any] = {} if outputs is None else {'out_shardings': sharding}
        jits = [jax.jit(_another_bump(), in_shardings=(sharding,), **hand) for _ in trees]
        rows.append(
            compare(
                f'three shapes in turn, {_plural(leaves, "leaf", "leaves")}'
                + ('' if outputs else ', no out_shardings'),
                functools.partial(_in_turn, [ours] * len(trees), trees),
                functools.partial(_in_turn, jits, trees),
                max(rounds // (2 if leaves == 1 else 5), 5),  # of three calls each
                1.15 if leaves == 1 else 1.05,
            )
        )
    return rows


def alternating_programs(rounds: int) -> list[Row]:
    """Three structures, each with shardings of its own, in turn; by hand again three jits."""
    rows = []
    for leaves in (1, 500):
        helper = MeshShardingHelper([-1], ['data'])
        rule = TreePathShardingRule(('w0', PartitionSpec('data')), ('.*', PartitionSpec()))
        trees = []
        for extra in range(3):
            tree = _tree(leaves + extra)
            trees.append(helper.shard(tree, rule))
        ours = helper.sjit(_bump, in_shardings=(rule,), out_shardings=rule)
        jits = []
        for tree in trees:
            shardings = helper.match_sharding_rule(rule, tree)
            jits.append(jax.jit(_another_bump(), in_shardings=(shardings,), out_shardings=shardings))
        rows.append(
            compare(
                f'three structures in turn, {_plural(leaves, "leaf", "leaves")}',
                functools.partial(_in_turn, [ours] * len(trees), trees),
                functools.partial(_in_turn, jits, trees),
                max(rounds // (2 if leaves == 1 else 5), 5),  # of three calls each
                1.15 if leaves == 1 else 1.05,
            )
        )
    return rows


def traces_per_signature() -> list[Row]:
    """Counts the traces of the user's function for numpy, unplaced and sharded arguments together."""
    rows = []
    helper = MeshShardingHelper([-1], ['data'])
    spec = PartitionSpec('data')
    sharding = NamedSharding(helper.mesh, spec)
    cases: dict[str, dict[str, Any]] = {
        'no rules': {},
        'in_shardings': {'in_shardings': spec},
        'in, out and constraint': {
            'in_shardings': spec,
            'out_shardings': spec,
            'args_sharding_constraint': spec,
        },
    }
    for name, options in cases.items():
        counts = {'ours': 0, 'theirs': 0}
        hand: dict[str, Any] = {key: sharding for key in options if key != 'args_sharding_constraint'}
        ours = helper.sjit(_counted(counts, 'ours'), **options)
        reference = jax.jit(_counted(counts, 'theirs'), **hand)
        data = np.ones(8, np.float32)
        for compiled in (ours, reference):
            for x in (data, jnp.asarray(data), jax.device_put(data, sharding)) * 2:
                compiled(x)
        rows.append(Row(f'traces, {name}', counts['ours'], counts['theirs'], 1, counted=True))
    return rows


def _counted(counts: dict[str, int], who: str) -> Callable[[Any], jax.Array]:
    """Returns a function that counts its traces."""

    def bump(x: Any) -> jax.Array:
        counts[who] += 1
        return x + 1

    return bump
