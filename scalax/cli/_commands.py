"""What is the answer to each command? Printed; what is returned says whether a step fits."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from scalax.cli._load import load_function, pair
from scalax.cli._topologies import table
from scalax.errors import ArgumentError, PlanError, did_you_mean, near_names
from scalax.plan import make_plan
from scalax.plan import search as search_meshes
from scalax.sharding import MeshShardingHelper

_MOST_SIMULATED = 4096  # XLA for CPUs starts threads for each device


def plan(asked: argparse.Namespace) -> bool | None:
    """Prints the plan of a step."""
    helper = _helper(asked)
    make_step = load_function(asked.function)
    step, arguments = _step(make_step, helper, asked.function)
    made = make_plan(helper, step, arguments, {}, quick=asked.quick)
    if asked.html:
        made.to_html(asked.html)
    print(made.to_json() if asked.json else made)
    return made.fits


def search(asked: argparse.Namespace) -> bool:
    """Prints which meshes are best for a step."""
    _require_dcn(asked)
    make_step = load_function(asked.function)
    found = search_meshes(
        lambda helper: _step(make_step, helper, asked.function),
        asked.topology,
        [name.strip() for name in asked.axes.split(',')],
        constraints=dict(asked.sizes),
        num_slices=asked.slices,
        dcn_axis=asked.dcn,
        full=asked.full,
    )
    print(json.dumps(found.to_dict()) if asked.json else found)
    if not any(candidate.plan for candidate in found.candidates):
        raise PlanError('no mesh was planned: nobody knows whether the step fits')
    if found.fits and asked.html:
        found.best.to_html(asked.html)
    return found.fits


def _step(make_step: Callable[..., Any], helper: MeshShardingHelper, named: str) -> tuple[Any, Sequence[Any]]:
    """What the user's function makes: the step and its arguments."""
    step, arguments = pair(make_step(helper), named, 'the step and the tuple of its arguments')
    if not isinstance(arguments, tuple | list):
        raise ArgumentError(
            f'{named!r} has to return the step and the tuple of its arguments; '
            f'the arguments are a {type(arguments).__name__}'
        )
    return step, arguments


def explain(asked: argparse.Namespace) -> None:
    """Prints what each leaf of a tree gets."""
    known = -1 not in asked.mesh.values()
    helper = _abstract_helper(asked) if known and not asked.topology else _helper(asked)
    make_state = load_function(asked.function)
    tree, rules = pair(make_state(helper), asked.function, 'a tree and the rules for it')
    report = helper.explain(tree, rules)
    print(report.to_json() if asked.json else report)


def topologies(asked: argparse.Namespace) -> None:
    """Prints which TPU slices are known."""
    print(table())


def _abstract_helper(asked: argparse.Namespace) -> MeshShardingHelper:
    _reject_slices(asked)
    names = tuple(asked.mesh)
    return MeshShardingHelper.from_mesh(AbstractMesh(tuple(asked.mesh.values()), names))


def _helper(asked: argparse.Namespace) -> MeshShardingHelper:
    """A helper over the hardware that is asked for; made before the user's file may use any devices."""
    sizes: dict[str, int] = asked.mesh
    if not asked.topology:
        return _simulated(asked, list(sizes.values()), list(sizes))
    _require_dcn(asked)
    across: dict[str, int] = asked.dcn
    for name in across:
        if name not in sizes and near_names(name, sizes):
            raise ArgumentError(
                f'--dcn names {name!r}, which is no axis of --mesh ({did_you_mean(name, sizes)}); '
                f'if it is another axis, give it there too: {name}={across[name]}'
            )
    sizes = {**{name: size for name, size in across.items() if name not in sizes}, **sizes}
    return MeshShardingHelper.from_topology(
        asked.topology,
        list(sizes.values()),
        list(sizes),
        True,  # where whole axes of the torus do, they are taken all the same
        num_slices=asked.slices or math.prod(across.values()),
        dcn_axis_dims=[across.get(name, 1) for name in sizes] if across else None,
    )


def _require_dcn(asked: argparse.Namespace) -> None:
    if (asked.slices or 1) > 1 and not asked.dcn:
        raise ArgumentError(
            f'--slices {asked.slices} needs --dcn, which says along which mesh axes slices lie'
        )


def _reject_slices(asked: argparse.Namespace) -> None:
    if asked.slices or asked.dcn:
        raise ArgumentError('--slices and --dcn are for TPUs: give --topology')


def _simulated(asked: argparse.Namespace, dims: list[int], names: list[str]) -> MeshShardingHelper:
    _reject_slices(asked)
    if -1 in dims:
        raise ArgumentError(
            'without --topology nothing says how many devices there are: give every axis of --mesh a size'
        )
    count = math.prod(dims)
    if count > _MOST_SIMULATED:
        raise ArgumentError(
            f'--mesh is of {count:,} devices, and {_MOST_SIMULATED:,} are simulated at most: give --topology'
        )
    jax.config.update('jax_num_cpu_devices', count)
    return MeshShardingHelper(dims, names)
