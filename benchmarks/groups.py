"""The groups of benchmarks by name, in the order of the table."""

from __future__ import annotations

from collections.abc import Callable

import jax

from benchmarks.timing import Row

Groups = dict[str, Callable[[], list[Row]]]


def all_groups(rounds: int) -> Groups:
    """Returns all benchmarks of this scalax; most need eight devices."""
    from benchmarks import calls, checkpoints, decoder, operations, programs, trees, two_processes
    from scalax.sharding import MeshShardingHelper

    return {
        'cached': lambda: [
            row
            for devices in (1, 8)
            if devices <= jax.device_count()
            for row in calls.cached_calls(rounds, devices)
        ],
        'host': lambda: calls.host_batches(rounds),
        'alternating': lambda: calls.alternating_calls(rounds),
        'structures': lambda: calls.alternating_programs(rounds),
        'traces': calls.traces_per_signature,
        'first': lambda: decoder.first_step(rounds),
        'steps': decoder.three_steps,
        'plan': lambda: programs.plans(rounds),
        'microbatch': lambda: programs.microbatches(rounds),
        'operations': lambda: operations.sharded_ops(rounds),
        'resolve': lambda: trees.resolving(rounds),
        'shard': lambda: trees.sharding_trees(rounds),
        'data': lambda: trees.batches(rounds),
        'prefetch': lambda: two_processes.loading_ahead(MeshShardingHelper([-1], ['data']), rounds),
        'processes': lambda: two_processes.in_processes(rounds),
        'checkpoint': lambda: checkpoints.checkpoints(rounds),
        'safetensors': lambda: checkpoints.safetensors(rounds),
    }


def shared_groups(rounds: int) -> Groups:
    """Returns the benchmarks that scalax 0.2.5 can run too; imports only names that it has."""
    from benchmarks import calls, decoder, trees

    devices = jax.device_count()
    cached: Groups = {'cached': lambda: calls.cached_calls(rounds, devices)}
    if devices == 1:
        return cached
    return cached | {
        'traces': calls.traces_per_signature,
        'first': lambda: decoder.first_step(rounds),
        'steps': decoder.three_steps,
        'shard': lambda: trees.sharding_trees(rounds),
        'data': lambda: trees.batches(rounds),
    }


def run(groups: Groups, only: str) -> list[Row]:
    """Returns the rows of the groups whose names contain *only*."""
    return [row for name, group in groups.items() if only in name for row in group()]
