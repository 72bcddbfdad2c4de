"""``python -m benchmarks [--rounds N] [--only NAME]``: prints the table that docs/benchmarks.md shows."""

from __future__ import annotations

import argparse
import os
import platform

import jax

from benchmarks.timing import Row, render


def main() -> None:
    """Runs the benchmarks and prints their table."""
    parser = argparse.ArgumentParser(prog='python -m benchmarks', description=__doc__)
    parser.add_argument('--rounds', type=int, default=4000, help='timed calls of the fastest cases')
    parser.add_argument('--only', default='', help='run the groups whose name holds this')
    options = parser.parse_args()
    if not any(flag in os.environ for flag in ('JAX_PLATFORMS', 'XLA_FLAGS', 'JAX_NUM_CPU_DEVICES')):
        jax.config.update('jax_num_cpu_devices', 8)

    # Imported here: they build meshes, and the devices must be there first.
    from benchmarks import calls, trees

    groups = {
        'cached': lambda: calls.cached_calls(options.rounds),
        'host': lambda: calls.host_batches(options.rounds),
        'alternating': lambda: calls.alternating_calls(options.rounds),
        'structures': lambda: calls.alternating_programs(options.rounds),
        'traces': calls.traces_per_signature,
        'resolve': lambda: trees.resolving(options.rounds),
        'shard': lambda: trees.sharding_trees(options.rounds),
        'data': lambda: trees.batches(options.rounds),
    }
    device = jax.devices()[0]
    print(
        f'JAX {jax.__version__}, Python {platform.python_version()}, '
        f'{jax.device_count()} x {device.device_kind}, {os.cpu_count()} cores\n'
    )
    rows: list[Row] = []
    for name, run in groups.items():
        if options.only in name:
            rows += run()
    print(render(rows))


if __name__ == '__main__':
    main()
