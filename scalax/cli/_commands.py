"""The commands. Each prints its result; `plan`, `search` and `find` return whether a step fits."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh

from scalax._doctor import diagnose
from scalax._mesh.gpu_nodes import GPUS_OF_NODE, gpu_nodes
from scalax._mesh.topologies import SIZES
from scalax._plan.hardware import numbers_of
from scalax._report import saved
from scalax._report.tables import human_bytes
from scalax.cli._exit_codes import ExitCode
from scalax.errors import ArgumentError, PlanError, did_you_mean, near_names
from scalax.plan import HARDWARE, Hardware, Plan, make_plan
from scalax.plan import find as find_rule
from scalax.plan import search as search_meshes
from scalax.sharding import MeshShardingHelper

_MOST_SIMULATED = 4096  # devices: XLA for CPUs starts threads for each
_MODULE_NAME = '__file_of_the_command__'


def plan(asked: argparse.Namespace) -> bool | None:
    """Prints the plan of a step."""
    helper = _helper(asked)
    make_step = _load_function(asked.function)
    step, arguments = _step(make_step, helper, asked.function)
    made = make_plan(helper, step, arguments, {}, quick=asked.quick)
    try:
        _write(made.to_html, asked.html)
    finally:  # it took minutes, and is not lost where a file cannot be written
        print(_plan_as_json(made) if asked.json else made)
    return made.fits


def _write(write: Callable[[Path], object], path: Path | None) -> None:
    """Writes a file, if one is asked for.

    Raises:
        PlanError: it cannot be written, such as to a disk that is full.
    """
    if path is None:
        return
    try:
        write(path)
    except OSError as error:
        raise PlanError(f'{os.fspath(path)!r} cannot be written: {error.strerror or error}') from error


def _plan_as_json(made: Plan) -> str:
    """The JSON of a plan with what it computes of the seconds, which `Plan.load` does not read."""
    values = made.to_dict()
    roofline = made.known_roofline
    if roofline is not None:
        phases = [phase._asdict() for phase in roofline.phases]
        seconds = {**roofline.step_seconds._asdict(), 'phases': phases}
        values |= {'step_seconds': seconds, 'bound': roofline.bound, 'mfu': roofline.mfu}
    return saved.write(values)


def search(asked: argparse.Namespace) -> bool:
    """Prints which meshes are best for a step."""
    _require_dcn(asked)
    _simulate_gpus(asked.topology, asked.slices)
    make_step = _load_function(asked.function)
    found = search_meshes(
        lambda helper: _step(make_step, helper, asked.function),
        asked.topology,
        [name.strip() for name in asked.axes.split(',')],
        constraints=_sizes_of(asked),
        num_slices=asked.slices,
        dcn_axis=asked.dcn,
        full=0 if asked.quick else asked.full,
        file=asked.file,
    )
    print(json.dumps(found.to_dict()) if asked.json else found)
    _write(found.to_html, asked.html)
    if not any(candidate.plan or candidate.ruled_out for candidate in found.candidates):
        raise PlanError('no mesh was planned: whether the step fits is not known')
    return found.fits


def find(asked: argparse.Namespace) -> bool | None:
    """Prints the mesh and the rule that are best for a step."""
    _simulate_gpus(asked.topology, asked.slices)
    step, arguments = _pair(
        _load_function(asked.function)(), asked.function, 'the step and the tuple of its arguments'
    )
    found = find_rule(
        step,
        arguments,
        asked.topology,
        batch_argnums=asked.batch,
        donate_argnums=asked.donate,
        sizes=_sizes_of(asked),
        num_slices=asked.slices,
        keep=asked.keep,
        optimizer_state='zero1' if asked.zero1 else 'as parameters',
        batch_dim=asked.batch_dim,
        memory=asked.memory,
        headroom=asked.headroom,
        budget_s=asked.budget,
        file=asked.file,
    )
    try:
        _write(found.to_html, asked.html)
    finally:
        if asked.code:
            print(found.to_code())
        else:
            print(json.dumps(found.to_dict()) if asked.json else found)
    return found.fits


def _sizes_of(asked: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    """The sizes that mesh axes may have."""
    constraints = dict(asked.sizes)
    if len(constraints) < len(asked.sizes):
        raise ArgumentError('--sizes names an axis twice: give all of its sizes at once, as in tp=1,2,4')
    return constraints


def _step(make_step: Callable[..., Any], helper: MeshShardingHelper, named: str) -> tuple[Any, Sequence[Any]]:
    """The step and its arguments, which the user's function returns."""
    step, arguments = _pair(make_step(helper), named, 'the step and the tuple of its arguments')
    if not isinstance(arguments, tuple | list):
        raise ArgumentError(
            f'{named!r} has to return the step and the tuple of its arguments; '
            f'the arguments are a {type(arguments).__name__}'
        )
    return step, arguments


def explain(asked: argparse.Namespace) -> None:
    """Prints the sharding of each leaf of a tree."""
    helper = _helper(asked, compiles=False)
    make_state = _load_function(asked.function)
    tree, rules = _pair(make_state(helper), asked.function, 'a tree and the rules for it')
    report = helper.explain(tree, rules)
    _write(report.to_html, asked.html)
    print(report.to_json() if asked.json else report)


def doctor(asked: argparse.Namespace) -> ExitCode:
    """Prints what is wrong here; of several processes only the first, and those with findings."""
    if asked.file and not Path(asked.file).is_file():
        raise ArgumentError(f'there is no file {asked.file!r}')
    found = diagnose(asked.timeout, asked.file)
    if found.process == 0 or found.findings:
        print(json.dumps(found.to_dict()) if asked.json else found)
    return ExitCode.FOUND if found.findings else ExitCode.DONE


def topologies(asked: argparse.Namespace) -> None:
    """Prints the known kinds of chips with their numbers, and the slices of each."""
    if asked.json:
        chips = {name: dataclasses.asdict(HARDWARE[name]) for name in SIZES}
        print(json.dumps({name: {**chips[name], 'slices': SIZES[name].split()} for name in SIZES}))
        return
    print('TPU slices, as --topology NAME:SIZE takes them:\n')
    for name, sizes in SIZES.items():
        print(f'{name:<6} {_chip_numbers(HARDWARE[name])}')
        print(f'       {"  ".join(sizes.split())}')
    print('\nThe chips of a slice are the product of its size; of several slices, times --slices.')
    print(
        '\nNodes of GPUs, as --topology NAME:NODESxGPUS or NAME:GPUS. Programs are compiled for CPU devices'
    )
    print('and not for GPUs; memory and seconds are those of the CPU program with the numbers of the GPU:\n')
    for name, most in GPUS_OF_NODE.items():
        print(f'{name:<6} {_chip_numbers(HARDWARE[name])}')
        print(f'       {name}:{most}  {name}:4x{most}')
    print('Sources: scalax.plan.HARDWARE[name].sources')


def _helper(asked: argparse.Namespace, compiles: bool = True) -> MeshShardingHelper:
    """A helper over the hardware of the command; made before the user's file may use any devices."""
    sizes: dict[str, int] = asked.mesh
    if not asked.topology:
        return _helper_without_topology(asked, sizes, compiles)
    _require_dcn(asked)
    across: dict[str, int] = asked.dcn
    for name in across:
        if name not in sizes and near_names(name, sizes):
            raise ArgumentError(
                f'--dcn names {name!r}, which is no axis of --mesh ({did_you_mean(name, sizes)}); '
                f'if it is another axis, give it there too: {name}={across[name]}'
            )
    sizes = {**{name: size for name, size in across.items() if name not in sizes}, **sizes}
    num_slices = asked.slices or math.prod(across.values())
    _simulate_gpus(asked.topology, num_slices)
    return MeshShardingHelper.from_topology(
        asked.topology,
        list(sizes.values()),
        list(sizes),
        True,  # splitting is allowed; whole axes of the torus are still preferred
        num_slices=num_slices,
        dcn_axis_dims=[across.get(name, 1) for name in sizes] if across else None,
    )


def _helper_without_topology(
    asked: argparse.Namespace, sizes: dict[str, int], compiles: bool
) -> MeshShardingHelper:
    """A helper over simulated devices; over an abstract mesh if nothing is compiled."""
    if asked.slices or asked.dcn:
        raise ArgumentError('--slices and --dcn are for TPUs and GPUs: give --topology')
    if -1 in sizes.values():
        raise ArgumentError(
            'without --topology the number of devices is not known: give every axis of --mesh a size'
        )
    if not compiles:
        return MeshShardingHelper.from_mesh(AbstractMesh(tuple(sizes.values()), tuple(sizes)))
    count = math.prod(sizes.values())
    _simulate(count, f'--mesh has {count:,} devices')
    return MeshShardingHelper(list(sizes.values()), list(sizes))


def _simulate_gpus(topology: str, num_slices: int) -> None:
    """Makes the CPU devices that stand for GPUs, if a topology is of GPUs; before anything uses JAX."""
    nodes = gpu_nodes(topology, num_slices)
    if nodes is not None:
        _simulate(nodes.size, f'--topology {topology} has {nodes.size:,} GPUs')


def _simulate(count: int, what: str) -> None:
    if count > _MOST_SIMULATED:
        raise ArgumentError(f'{what}, and at most {_MOST_SIMULATED:,} devices are simulated')
    jax.config.update('jax_num_cpu_devices', count)


def _require_dcn(asked: argparse.Namespace) -> None:
    if (asked.slices or 1) > 1 and not asked.dcn:
        raise ArgumentError(
            f'--slices {asked.slices} needs --dcn, which says along which mesh axes slices are'
        )


def _load_function(named: str) -> Callable[..., Any]:
    """The function that ``FILE.py:name`` names. The file is run, and its errors are not caught.

    Raises:
        ArgumentError: there is no such file, or no such function in it.
    """
    file, colon, name = named.rpartition(':')
    if not colon or not name.isidentifier():
        raise ArgumentError(f'{named!r} does not name a function: write FILE.py:function')
    path = Path(file).resolve()
    if not path.is_file():
        raise ArgumentError(f'there is no file {file!r}')
    # As under `python -m`, this folder can be imported from; so can that of the file, as when it is run.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(_MODULE_NAME, path)
    if spec is None or spec.loader is None:
        raise ArgumentError(f'{file!r} is not a Python file')
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE_NAME] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith('_')]
        raise ArgumentError(f'{file!r} has no function {name!r} ({did_you_mean(name, own)})')
    return function


def _pair(returned: Any, named: str, second: str) -> tuple[Any, Any]:
    """Checks that a user's function returned two values.

    Args:
        returned: what it returned.
        named: the function as the user named it.
        second: a description of the two values, for the message.

    Raises:
        ArgumentError: it returned something else.
    """
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ArgumentError(f'{named!r} has to return {second}; it returned {type(returned).__name__}')
    return returned


def _chip_numbers(chip: Hardware) -> str:
    devices, flops = numbers_of(chip, 'devices_per_chip', 'flops_per_second', for_='this list')
    memory = 'not known' if chip.hbm_bytes is None else human_bytes(chip.hbm_bytes)
    of_chip = '' if devices == 1 else f', {devices} of them a chip'
    return f'a device{of_chip}: {memory} of usable HBM, {flops / devices:.4g} flops/s (bfloat16)'
