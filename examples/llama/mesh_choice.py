"""The mesh for the available devices, from a table or a search.

A run that continues after the loss of a host has fewer devices than before. Its batches and losses do not
depend on the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from absl import app
from jax.experimental import multihost_utils

from examples.llama.options import Options
from examples.llama.settings import sharding_problems
from examples.llama.strategies import Strategy
from examples.llama.trainer import Trainer
from scalax.errors import ArgumentError, PlanError
from scalax.plan import search
from scalax.sharding import MeshShardingHelper

SEARCH = 'search'


def choose_mesh(options: Options, strategy: Strategy, devices: Sequence[jax.Device]) -> str | None:
    """Returns the mesh that `--mesh` specifies for these devices, such as 'fsdp=3,tp=2'.

    Raises:
      app.UsageError: the table is invalid or lacks this number of devices, or no mesh is suitable.
    """
    if options.mesh == SEARCH:
        sizes = search_mesh(options, strategy, devices)
        return ','.join(f'{axis}={size}' for axis, size in sizes.items())
    if options.mesh is None or ':' not in options.mesh:
        return options.mesh
    table = read_table(options.mesh)
    if len(devices) not in table:
        counts = ', '.join(map(str, table))
        raise app.UsageError(
            f'--mesh {options.mesh}: {len(devices)} devices are here, and it has meshes for {counts}. Add '
            f'"{len(devices)}: ...", or give search.'
        )
    return table[len(devices)]


def read_table(text: str) -> dict[int, str]:
    """Returns the mesh for each number of devices.

    Example:
      >>> read_table('8: fsdp=4,tp=2; 6: fsdp=6')
      {8: 'fsdp=4,tp=2', 6: 'fsdp=6'}
    """
    table: dict[int, str] = {}
    for entry in text.split(';'):
        count, _, mesh = (part.strip() for part in entry.partition(':'))
        if not count.isdecimal() or not mesh:
            raise app.UsageError(
                f'--mesh {text}: "{entry.strip()}" is not of the form devices: mesh, as in 8: fsdp=4,tp=2'
            )
        if int(count) in table:
            raise app.UsageError(f'--mesh {text}: {count} devices are given twice.')
        table[int(count)] = mesh
    return table


def search_mesh(options: Options, strategy: Strategy, devices: Sequence[jax.Device]) -> dict[str, int]:
    """Returns the best mesh over which the batch and the model can be sharded.

    All processes search, because compiling may need all of them, and use the result of process 0.
    """

    def make_step(helper: MeshShardingHelper) -> tuple:
        trainer = Trainer(helper, strategy, options.model, options.optimizer)
        tokens = jax.ShapeDtypeStruct((options.batch_size, options.sequence_length + 1), np.int32)
        return trainer.train_step, (trainer.abstract_state(), tokens)

    def is_valid(sizes: dict[str, int]) -> bool:
        return sizes.get('stage', 1) == options.stages and not [*sharding_problems(options, strategy, sizes)]

    try:
        result = search(make_step, devices, [*strategy.mesh], constraints=is_valid)
        best = result.best.mesh
    except (ArgumentError, PlanError) as error:
        raise app.UsageError(f'--mesh search, {len(devices)} devices: {error}') from error
    if jax.process_count() > 1:
        sizes = multihost_utils.broadcast_one_to_all(np.asarray([*best.values()]))
        best = dict(zip(best, map(int, sizes), strict=True))
    return best
