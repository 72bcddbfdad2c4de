"""``python -m benchmarks [--rounds N] [--only NAME] [--against 0.2.5]``: the tables of docs/benchmarks.md.

``--only unchanged [--model NAME] [--topology v5e:2x4]``: the tables of benchmarks/unchanged/tables.md.
``--only others [--model NAME] [--topology v5e:2x4]``: third-party models, in the same file.
``--only auto_sharding [--model NAME] [--topology v5e:2x4] [--slices 2] [--budget SECONDS]``:
    the rules that autoshard chooses, compared with expert rules.
``--only published [--model NAME]``: published GPU step times: benchmarks/published/table.md.
``--only gpu [--model NAME]``: steps on the local GPU, compared with their plans: docs/estimates.md.
``--only stages [--model 70B] [--topology h100]``: hand-written pipelines, compared with FSDP and HSDP.
"""

from __future__ import annotations

import argparse
import os
import platform

import jax

from benchmarks.timing import render
from scalax.utils import quiet_libtpu

# Separate tables that take minutes, so `--only` has to name them in full.
UNCHANGED, OTHERS, AUTO_SHARDING, PUBLISHED = 'unchanged', 'others', 'auto_sharding', 'published'
GPU, STAGES = 'gpu', 'stages'


def main() -> None:
    """Runs the benchmarks and prints their table."""
    parser = argparse.ArgumentParser(prog='python -m benchmarks', description=__doc__)
    parser.add_argument('--rounds', type=int, default=4000, help='timed calls of the fastest cases')
    parser.add_argument('--only', default='', help='run the groups whose name holds this')
    parser.add_argument(
        '--against', choices=['0.2.5'], help='compare with that release of scalax, in its environment'
    )
    parser.add_argument('--repeats', type=int, default=3, help='processes of each library (--against)')
    parser.add_argument(
        '--topology',
        default='v5p:4x4x4',
        help='of absent TPUs or GPUs (--only unchanged, others, auto_sharding, stages)',
    )
    parser.add_argument(
        '--model',
        default='',
        help='models whose name holds this (--only unchanged, others, auto_sharding, published, gpu)',
    )
    parser.add_argument('--strategy', default='', help='one of FSDP, FSDP x TP ... (--only unchanged)')
    parser.add_argument('--slices', type=int, default=1, help='slices of the topology (--only auto_sharding)')
    parser.add_argument(
        '--budget', type=float, default=90.0, help='seconds of a search (--only auto_sharding)'
    )
    options = parser.parse_args()
    if options.against:
        from benchmarks import against

        print(against.table(options.against, options.rounds, options.only, options.repeats))
        return
    if options.only == UNCHANGED:
        from benchmarks.unchanged.table import show

        quiet_libtpu()
        show(options.topology, options.model, options.strategy)
        return
    if options.only == AUTO_SHARDING:
        from benchmarks import auto_sharding

        quiet_libtpu()
        auto_sharding.show(options.topology, options.model, options.slices, options.budget)
        return
    if options.only == PUBLISHED:
        from benchmarks.published import table

        table.show(options.model)
        return
    if options.only == GPU:
        from benchmarks import on_gpu

        on_gpu.show(options.model)
        return
    if options.only == STAGES:
        from benchmarks.stages import table as stages

        quiet_libtpu()
        stages.show(options.model, options.topology)
        return
    if not any(flag in os.environ for flag in ('XLA_FLAGS', 'JAX_NUM_CPU_DEVICES')):
        jax.config.update('jax_num_cpu_devices', 8)
    if options.only == OTHERS:
        from benchmarks.unchanged import others_table

        quiet_libtpu()
        others_table.show(options.topology, options.model)
        return

    # Imported late: these modules build meshes, which initializes the devices.
    from benchmarks.groups import all_groups, run

    groups = all_groups(options.rounds)
    if not any(options.only in name for name in groups):
        names = ', '.join([*groups, UNCHANGED, OTHERS, AUTO_SHARDING])
        parser.error(f'no group holds {options.only!r} in its name: {names}')
    quiet_libtpu()
    device = jax.devices()[0]
    print(
        f'JAX {jax.__version__}, Python {platform.python_version()}, '
        f'{jax.device_count()} x {device.device_kind}, {os.cpu_count()} cores\n'
    )
    rows = run(groups, options.only)
    print(render(('what', 'scalax', 'by hand', 'ratio', 'aim'), [row.cells for row in rows]))


if __name__ == '__main__':
    main()
