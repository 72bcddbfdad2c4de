"""The time to resolve, shard and batch entire trees, compared with the underlying JAX calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.timing import Row, compare, medians
from scalax.sharding import MeshShardingHelper, TreePathShardingRule

Tree = Any

_REGEXES = (
    'embed/table',
    'lm_head/kernel',
    'attention/q/kernel',
    'attention/k/kernel',
    'attention/v/kernel',
    'attention/o/kernel',
    'mlp/gate/kernel',
    'mlp/up/kernel',
    'mlp/down/kernel',
    'attention_norm/scale',
    'mlp_norm/scale',
    'bias$',
    '.*',
)


def _large_tree(layers: int) -> dict[str, object]:
    """Returns abstract parameters of a decoder: ten leaves per layer."""

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.float32)

    def layer() -> dict[str, object]:
        return {
            'attention': {name: {'kernel': leaf(64, 64)} for name in 'qkvo'},
            'mlp': {name: {'kernel': leaf(64, 64)} for name in ('gate', 'up', 'down')},
            'attention_norm': {'scale': leaf(64)},
            'mlp_norm': {'scale': leaf(64)},
            'extra': {'bias': leaf(64)},
        }

    return {'layers': {str(i): layer() for i in range(layers)}}


def resolving(rounds: int) -> list[Row]:
    """Times 100,000 leaves and 13 regexes."""
    helper = MeshShardingHelper([-1, 2], ['fsdp', 'tp'])
    tree = _large_tree(10_000)
    count = len(jax.tree.leaves(tree))
    rule = TreePathShardingRule(*((regex, PartitionSpec()) for regex in _REGEXES))
    resolved, with_path = medians(
        [
            lambda: helper.match_sharding_rule(rule, tree),
            lambda: jax.tree_util.tree_flatten_with_path(tree),
        ],
        max(rounds // 100, 5),
        warmup=1,
    )
    name = f'resolve {count:,} leaves, 13 regexes, against tree_flatten_with_path'
    return [Row(name, resolved, with_path, 3)]


def sharding_trees(rounds: int) -> list[Row]:
    """Times 200 arrays that move to the mesh and back."""
    helper = MeshShardingHelper([-1, 2], ['fsdp', 'tp'])
    spec = PartitionSpec('fsdp', 'tp')
    tree = {f'w{i}': np.ones((64, 64), np.float32) for i in range(200)}
    shardings = {name: NamedSharding(helper.mesh, spec) for name in tree}
    shard, gather = _shard_and_gather(helper, tree, spec)
    placed = jax.device_put(tree, shardings)

    few = dict(list(tree.items())[:20])

    def both() -> object:
        shard, gather = _shard_and_gather(MeshShardingHelper([-1, 2], ['fsdp', 'tp']), few, spec)
        return gather(shard(few))

    def both_by_hand() -> object:
        mesh = jax.make_mesh((jax.device_count() // 2, 2), ('fsdp', 'tp'), (AxisType.Auto,) * 2)
        return jax.device_get(jax.device_put(few, dict.fromkeys(few, NamedSharding(mesh, spec))))

    count = max(rounds // 40, 5)
    return [
        compare(
            'shard 200 arrays, against one device_put',
            lambda: jax.block_until_ready(shard(tree)),
            lambda: jax.block_until_ready(jax.device_put(tree, shardings)),
            count,
            1.1,
        ),
        compare(
            'gather 200 arrays, against one device_get',
            lambda: gather(placed),
            lambda: jax.device_get(placed),
            count,
            1.1,
        ),
        compare(
            'shard and gather 20 arrays, on a new mesh', both, both_by_hand, max(rounds // 400, 1), warmup=1
        ),
    ]


def _shard_and_gather(
    helper: MeshShardingHelper, tree: Tree, spec: PartitionSpec
) -> tuple[Callable[[Tree], Tree], Callable[[Tree], Tree]]:
    """Returns functions that shard and gather a tree. scalax 0.2.5 has one function per leaf."""
    if hasattr(helper, 'shard'):
        return lambda tree: helper.shard(tree, spec), helper.gather
    shard_fns, gather_fns = helper.make_shard_and_gather_fns(tree, spec)
    apply = helper.apply_shard_and_gather_fns
    return functools.partial(apply, shard_fns), functools.partial(apply, gather_fns)


def batches(rounds: int) -> list[Row]:
    """Times a host batch that becomes global arrays."""
    helper = MeshShardingHelper([-1], ['data'])
    sharding = NamedSharding(helper.mesh, PartitionSpec('data'))
    batch = {
        'tokens': np.zeros((64, 2048), np.int32),
        'targets': np.zeros((64, 2048), np.int32),
    }

    def by_hand() -> object:
        return jax.block_until_ready(
            jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(sharding, leaf), batch)
        )

    return [
        compare(
            'local_data_to_global_array, 2 x 64 x 2048 tokens',
            lambda: jax.block_until_ready(helper.local_data_to_global_array(batch)),
            by_hand,
            max(rounds // 10, 5),
            1.1,
        )
    ]
