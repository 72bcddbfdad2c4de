"""The commands: each prints its result. Their docstrings are the descriptions that ``--help`` prints."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from scalax._core.channel.secret import SECRET_VARIABLE
from scalax._core.mesh.gpu_topologies import GPU_KINDS
from scalax._core.mesh.topologies import TPU_SLICE_SIZES
from scalax._core.render.tables import table, terminal_width
from scalax._diagnostics.doctor import diagnose
from scalax._diagnostics.watchdog.watch import ProcessState, query_states
from scalax._verification.verify import verify as verify_step
from scalax.cli._exit_codes import ExitCode
from scalax.errors import ArgumentError, PlanError, did_you_mean
from scalax.plan import autoshard as autoshard_step
from scalax.plan import make_plan
from scalax.plan import search as search_meshes
from scalax.sharding import MeshShardingHelper, Pipeline

_MAX_SIMULATED = 4096  # devices: XLA for CPUs starts threads for each
_MODULE_NAME = '__file_of_the_command__'
_STEP = 'the step and the tuple of its arguments'


def plan(function: str, quick: bool, html: Path | None, as_json: bool, **where: Any) -> ExitCode:
    """Compiles a step for a mesh, without running it, and shows the memory of a device, the communication
    between devices, and the bottleneck of the step.

    FILE.py:make_step names a function in a file. It is called with a MeshShardingHelper, and returns
    the step (such as helper.sjit makes) and the tuple of its arguments, which may be
    jax.ShapeDtypeStruct.
    """
    helper = _helper(**where)
    step, arguments = _step(_load_function(function), helper, function)
    result = make_plan(helper, step, arguments, {}, quick=quick)
    _show(result, html, result.to_json() if as_json else str(result))
    return _fit_code(result.fits)


def _fit_code(fits: bool | None) -> ExitCode:
    return ExitCode.TOO_LARGE if fits is False else ExitCode.DONE


def _show(result: Any, html: Path | None, text: str) -> None:
    """Prints the text of a result, and writes its page if there is a path for it.

    Raises:
        PlanError: the page cannot be written. The text, which may have taken minutes, is printed
            nevertheless.
    """
    try:
        if html is not None:
            result.to_html(html)
    except OSError as error:
        raise PlanError(f'{str(html)!r} cannot be written: {error.strerror or error}') from error
    finally:
        print(text)


def search(
    function: str,
    topology: str,
    axes: str,
    sizes: list[tuple[str, tuple[int, ...]]],
    pipeline: tuple[str, tuple[int, ...]] | None,
    html: Path | None,
    as_json: bool,
    **options: Any,
) -> ExitCode:
    """Plans a step on every mesh of a slice, quickly; in full where only that shows whether the best fits.
    Ranks the meshes, and reports why each of the others is not the best. Ctrl-C ranks those planned so far.

    FILE.py:make_step as in `plan`; with --pipeline it also takes ``pipeline=``.
    """
    _require_dcn(options['num_slices'], options['dcn_axis'])
    make_step = _load_function(function)
    axis, counts = pipeline or ('', ())
    result = search_meshes(
        lambda helper, **options: _step(functools.partial(make_step, **options), helper, function),
        topology,
        [name.strip() for name in axes.split(',')],
        constraints=_by_axis(sizes),
        pipelines=[Pipeline(axis, count) for count in counts],
        **options,
    )
    _show(result, html, json.dumps(result.to_dict()) if as_json else str(result))
    if not any(candidate.plan or candidate.ruled_out for candidate in result.candidates):
        raise PlanError('no mesh was planned: whether the step fits is unknown')
    return _fit_code(result.fits)


def autoshard(
    function: str,
    topology: str,
    sizes: list[tuple[str, tuple[int, ...]]],
    num_slices: int,
    zero1: bool,
    code: bool,
    html: Path | None,
    as_json: bool,
    **options: Any,
) -> ExitCode:
    """Finds a mesh and a sharding rule for a step written for one device: plans it with one layout after
    another. Ctrl-C ends the search with the best layout so far.

    FILE.py:make_step names a function in a file. It is called without arguments, and returns the step,
    a function for one device, and the tuple of its arguments, which may be jax.ShapeDtypeStruct.
    """
    step, arguments = _pair(_load_function(function), function, _STEP)
    result = autoshard_step(
        step,
        arguments,
        topology,
        sizes=_by_axis(sizes),
        num_slices=num_slices,
        optimizer_state='zero1' if zero1 else 'as parameters',
        **options,
    )
    text = json.dumps(result.to_dict()) if as_json else str(result)
    _show(result, html, result.to_code() if code else text)
    return _fit_code(result.fits)


def _by_axis(sizes: list[tuple[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """Returns mesh axis -> its possible sizes."""
    if len(dict(sizes)) < len(sizes):
        raise ArgumentError('--sizes names an axis twice: give all of its sizes at once, as in tp=1,2,4')
    return dict(sizes)


def _config(make_step: Callable[..., Any], name: str, function: str) -> Any:
    """Returns the configuration for *make_step*; None if it takes only the helper.

    Args:
        make_step: the user's function.
        name: the name of the configuration in its file; empty for the default of the second parameter.
        function: the function as the user named it.

    Raises:
        ArgumentError: the file has no such value, *make_step* takes no configuration, or it needs one.
    """
    parameters = [
        parameter
        for parameter in inspect.signature(make_step).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    second = parameters[1] if len(parameters) > 1 else None
    if name:
        values = vars(sys.modules[_MODULE_NAME])
        if second is None:
            raise ArgumentError(f'--config {name}: {function!r} takes no configuration besides the helper')
        if name not in values:
            public_names = [key for key in values if not key.startswith('_')]
            raise ArgumentError(
                f'--config {name}: there is no such value in the file ({did_you_mean(name, public_names)})'
            )
        return values[name]
    if second is None:
        return None
    if second.default is second.empty:
        raise ArgumentError(
            f'{function!r} takes {second.name!r} besides the helper: give --config the name of a value in '
            'its file'
        )
    return second.default


def _step(
    make_step: Callable[..., Any], helper: MeshShardingHelper, function: str
) -> tuple[Any, Sequence[Any]]:
    """Calls the user's function, and returns the step and its arguments."""
    step, arguments = _pair(make_step, function, _STEP, helper)
    if not isinstance(arguments, tuple | list):
        raise ArgumentError(
            f'{function!r} has to return {_STEP}; the arguments are a {type(arguments).__name__}'
        )
    return step, arguments


def verify(
    function: str,
    config: str,
    devices: int,
    html: Path | None,
    as_json: bool,
    seeds: int,
    steps: int,
    compare_intermediates: bool,
    **where: Any,
) -> ExitCode:
    """Runs a step on a mesh of simulated devices and on one device, with random arguments, and compares all
    results, up to rounding. Reports which results differ, by how much, and which operation differs first.

    FILE.py:make_step as in `plan`; it may take a configuration besides the helper. A step for more devices
    than --devices, for a topology, or with large arguments is downscaled: its mesh, and the sizes in its
    configuration or the dimensions of its arguments. Ctrl-C ends it, and shows the results compared so far.
    """
    is_here = not where['topology'] and math.prod(where['mesh'].values()) <= devices
    if not is_here:
        jax.config.update('jax_num_cpu_devices', devices)
    helper = _helper(**where, compiles=is_here)
    # On stdout is the result only: output of the user's file, and of JAX about sizes that are tried, is not.
    with contextlib.redirect_stdout(sys.stderr):
        make_step = _load_function(function)
        value = _config(make_step, config, function)
        result = verify_step(
            helper,
            make_step,
            (),
            {},
            config=value,
            seeds=seeds,
            steps=steps,
            compare_intermediates=compare_intermediates,
        )
    _show(result, html, json.dumps(result.to_dict()) if as_json else str(result))
    if result.interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.DONE if result.ok else ExitCode.FOUND


def explain(function: str, html: Path | None, as_json: bool, **where: Any) -> ExitCode:
    """Shows the sharding of each leaf, and the rule that decided it. Nothing is compiled.

    FILE.py:make_state names a function in a file. It is called with a MeshShardingHelper, and returns
    a tree (its leaves may be jax.ShapeDtypeStruct) and the rules for it.
    """
    helper = _helper(**where, compiles=False)
    tree, rules = _pair(_load_function(function), function, 'a tree and the rules for it', helper)
    report = helper.explain(tree, rules)
    _show(report, html, report.to_json() if as_json else str(report))
    return ExitCode.DONE


def doctor(timeout: int, address: str | None, as_json: bool) -> ExitCode:
    """Looks for what is wrong with the installation, its variables and its devices, and reports how to fix
    it. Another process opens the devices and runs a program on each; it is ended if it hangs.

    Start it as the program is started (srun, mpirun, on all hosts of a slice): then it also compares the
    processes.

    With --run, it asks a program that runs what each of its processes does, and which one is behind. Nothing
    else is looked at. SCALAX_RUN_TOKEN has to be what it is in the program.
    """
    if address:
        try:
            states, report = query_states(address)
        except (OSError, ValueError) as error:
            raise PlanError(
                f'process 0 does not answer at {address} ({error}): see the logs of the others. What to do: '
                f'if {SECRET_VARIABLE} is set in the run, set it here to the same value; a run on several '
                'hosts without it does not answer'
            ) from error
        rows = [[f'{x:.0f} s' if isinstance(x, float) else f'{x}' for x in state] for state in states]
        lines = table(
            [ProcessState._fields, *rows], terminal_width(None), ProcessState._fields.index('line'), range(0)
        )
        answer = {'processes': [state._asdict() for state in states], 'report': report}
        print(json.dumps(answer) if as_json else '\n'.join([*lines, '', report]).rstrip())
        return ExitCode.FOUND if report else ExitCode.DONE
    result = diagnose(timeout)
    if (
        result.process == 0 or result.findings
    ):  # of several processes, only the first one and those with findings report
        print(json.dumps(result.to_dict()) if as_json else result)
    return ExitCode.FOUND if result.findings else ExitCode.DONE


def topologies(as_json: bool) -> ExitCode:
    """The known TPU slices, as --topology NAME:SIZE takes them, whose chips are the product of the size; and
    GPUs, as NAME:GPUS, NAME:HOSTSxGPUS or, where NVLink joins hosts, NAME:DOMAINSxHOSTSxGPUS. A target config
    of XLA, FILE.txtpb, may take the place of the name of a GPU.
    """
    slices = {name: sizes.split() for name, sizes in TPU_SLICE_SIZES.items()}
    for name, joined in GPU_KINDS.items():  # the largest host, and the largest domain or four of such hosts
        hosts = joined.gpus_per_domain // joined.gpus_per_host
        slices[name] = [f'{joined.gpus_per_host}', f'{4 if hosts == 1 else hosts}x{joined.gpus_per_host}']
    lines = (f'{name:<9}  {"  ".join(sizes)}' for name, sizes in slices.items())
    print(json.dumps(slices) if as_json else '\n'.join(lines))
    return ExitCode.DONE


def _helper(
    *,
    topology: str | None,
    mesh: dict[str, int],
    slices: int | None,
    dcn: dict[str, int],
    compiles: bool = True,
) -> MeshShardingHelper:
    """Makes the helper for the hardware of the command, before the user's file may use any devices."""
    if not topology:
        return _helper_without_topology(mesh, slices or dcn, compiles)
    _require_dcn(slices, dcn)
    for name in dcn:
        if name not in mesh:
            raise ArgumentError(
                f'--dcn names {name!r}, which is not an axis of --mesh ({did_you_mean(name, mesh)}): give '
                'its whole size there'
            )
    num_slices = slices or math.prod(dcn.values())
    return MeshShardingHelper.from_topology(
        topology,
        list(mesh.values()),
        list(mesh),
        True,  # a mesh axis may be a part of a torus axis; entire torus axes are preferred
        num_slices=num_slices,
        dcn_axis_dims=[dcn.get(name, 1) for name in mesh] if dcn else None,
    )


def _helper_without_topology(sizes: dict[str, int], slices: object, compiles: bool) -> MeshShardingHelper:
    """Makes a helper for simulated devices, or for an abstract mesh if nothing is compiled."""
    if slices:
        raise ArgumentError('--slices and --dcn are for TPUs and GPUs: give --topology')
    if -1 in sizes.values():
        raise ArgumentError(
            'without --topology the number of devices is unknown: give every axis of --mesh a size'
        )
    if not compiles:
        types = (AxisType.Auto,) * len(sizes)  # like a mesh of devices has
        return MeshShardingHelper.from_mesh(AbstractMesh(tuple(sizes.values()), tuple(sizes), types))
    count = math.prod(sizes.values())
    if count > _MAX_SIMULATED:
        raise ArgumentError(
            f'--mesh has {count:,} devices, and at most {_MAX_SIMULATED:,} devices are simulated'
        )
    jax.config.update('jax_num_cpu_devices', count)
    return MeshShardingHelper(list(sizes.values()), list(sizes))


def _require_dcn(slices: int | None, dcn: object) -> None:
    if (slices or 1) > 1 and not dcn:
        raise ArgumentError(f'--slices {slices} needs --dcn, the mesh axes across slices')


def _load_function(function_path: str) -> Callable[..., Any]:
    """Runs a file, and returns the function that ``FILE.py:name`` names. Errors of the file are not caught.

    Raises:
        ArgumentError: there is no such file, or no such function in it.
    """
    file, colon, name = function_path.rpartition(':')
    if not colon or not name.isidentifier():
        raise ArgumentError(f'{function_path!r} does not name a function: write FILE.py:function')
    path = Path(file).resolve()
    if not path.is_file():
        raise ArgumentError(f'there is no file {file!r}')
    # Modules can be imported from the working directory, as under `python -m`, and from the folder of the
    # file, as when it is run.
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
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith('_')]
        raise ArgumentError(f'{file!r} has no function {name!r} ({did_you_mean(name, names)})')
    return function


def _pair(make: Callable[..., Any], function: str, description: str, *args: Any) -> tuple[Any, Any]:
    """Calls the user's function, and returns the pair that it returns.

    Args:
        make: the function.
        function: the function as the user named it.
        description: a description of the two values, for the message.
        *args: its arguments.

    Raises:
        ArgumentError: the function has other parameters, as for another command, or does not return a pair.
    """
    try:
        inspect.signature(make).bind(*args)
    except TypeError as error:
        parameters = (
            f'a MeshShardingHelper first ({error}); one without arguments is for autoshard'
            if args
            else f'no arguments ({error}); one with a helper is for plan, search, verify and explain'
        )
        raise ArgumentError(f'{function!r} has to take {parameters}') from None
    returned = make(*args)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ArgumentError(
            f'{function!r} has to return {description}; it returned {type(returned).__name__}'
        )
    return returned
