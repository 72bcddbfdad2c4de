"""What is the answer to each command? Printed; what is returned says whether a step fits."""

from __future__ import annotations

import argparse
import math
import os

import jax
from jax.sharding import AbstractMesh

from scalax.cli._load import load_function, pair
from scalax.cli._topologies import KNOWN, table
from scalax.errors import ArgumentError, MeshError, did_you_mean
from scalax.plan import make_plan
from scalax.sharding import MeshShardingHelper

# With these the compiler asks no network where it runs, takes no lock and writes no log.
_ALONE = {
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-8',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
    'TPU_LOG_DIR': 'disabled',
    'TPU_STDERR_LOG_LEVEL': '3',
    'TPU_MIN_LOG_LEVEL': '3',
}


def plan(asked: argparse.Namespace) -> bool | None:
    """Prints the plan of a step."""
    make_step = load_function(asked.function)
    helper = _helper(asked)
    step, arguments = pair(make_step(helper), asked.function, 'the step and the tuple of its arguments')
    if not isinstance(arguments, tuple | list):
        raise ArgumentError(
            f'{asked.function!r} has to return the step and the tuple of its arguments; '
            f'the arguments are a {type(arguments).__name__}'
        )
    made = make_plan(helper, step, arguments, {}, quick=asked.quick)
    print(made.to_json() if asked.json else made)
    return made.fits


def explain(asked: argparse.Namespace) -> None:
    """Prints what each leaf of a tree gets."""
    make_state = load_function(asked.function)
    known = -1 not in asked.mesh.values()
    helper = _abstract_helper(asked) if known and not asked.topology else _helper(asked)
    tree, rules = pair(make_state(helper), asked.function, 'a tree and the rules for it')
    report = helper.explain(tree, rules)
    print(report.to_json() if asked.json else report)


def topologies(asked: argparse.Namespace) -> None:
    """Prints which TPU slices are known."""
    print(table())


def _abstract_helper(asked: argparse.Namespace) -> MeshShardingHelper:
    names = tuple(asked.mesh)
    return MeshShardingHelper.from_mesh(AbstractMesh(tuple(asked.mesh.values()), names))


def _helper(asked: argparse.Namespace) -> MeshShardingHelper:
    """A helper over the hardware that is asked for. Accelerators that are here are left alone."""
    os.environ.update({name: value for name, value in _ALONE.items() if name not in os.environ})
    jax.config.update('jax_platforms', 'cpu')
    names, dims = list(asked.mesh), list(asked.mesh.values())
    unknown = [name for name in asked.dcn if name not in names]
    if unknown:
        raise ArgumentError(
            f'--dcn names {unknown[0]!r}, which is no axis of --mesh ({did_you_mean(unknown[0], names)})'
        )
    if not asked.topology:
        return _simulated(asked, dims, names)
    slices = asked.slices or math.prod(asked.dcn.values())
    try:
        return MeshShardingHelper.from_topology(
            asked.topology,
            dims,
            names,
            asked.split,
            num_slices=slices,
            dcn_axis_dims=[asked.dcn.get(name, 1) for name in names] if asked.dcn else None,
        )
    except MeshError as error:
        if 'describes no topology' in str(error):
            near = did_you_mean(asked.topology, KNOWN)
            raise MeshError(
                f'{error}\n{near} (`python -m scalax topologies` lists those that are known)'
            ) from error
        raise


def _simulated(asked: argparse.Namespace, dims: list[int], names: list[str]) -> MeshShardingHelper:
    if asked.slices or asked.dcn:
        raise ArgumentError('--slices and --dcn are for TPUs: give --topology')
    if -1 in dims:
        raise ArgumentError(
            'without --topology nothing says how many devices there are: give every axis of --mesh a size'
        )
    jax.config.update('jax_num_cpu_devices', math.prod(dims))
    return MeshShardingHelper(dims, names)
