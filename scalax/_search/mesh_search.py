"""The search for the best mesh: plans all quickly, compiles the best of them in full, and ranks them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import logging
import numbers
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from scalax._helper import MeshShardingHelper
from scalax._mesh import gpu_nodes, meshes, topologies
from scalax._plan.make import make_plan
from scalax._plan.text import memory_taken
from scalax._search.outcome import Candidate, Search
from scalax.errors import (
    ArgumentError,
    IndivisibleWarning,
    ScalaxError,
    ShardingError,
    checked_flag,
    did_you_mean,
)

_log = logging.getLogger('scalax.search')

Sizes = dict[str, int]
Constraints = Mapping[str, int | Collection[int]] | Callable[[Sizes], Any] | None
Advance = Callable[[str], None]
"""Called with the name of the next step, when the one before it is done."""
_NEAR = 1.08
"""A program that exceeds the limit by less in its quick plan is compiled in full all the same."""


def search(
    make_step: Callable[..., tuple[Any, Sequence[Any]]],
    topology: str,
    axis_names: Sequence[str],
    rules: Mapping[str, Any] | None = None,
    *,
    constraints: Constraints = None,
    num_slices: int = 1,
    dcn_axis: str | None = None,
    full: int = 2,
    show_progress: bool | None = None,
) -> Search:
    """Plans a step on every mesh of a topology, and ranks the meshes.

    Each is planned quickly (`MeshShardingHelper.plan`), which takes seconds. Meshes on which the step does
    not fit, or some dimension does not divide, have lost. The others are ranked by the least time of the
    step in their roofline, then by its time if nothing overlaps. The best are compiled in full, and ranked
    again.

    Args:
        make_step: called with a helper, and one of the *rules* if there are any; returns the step, such as
            one made by `sjit`, and the tuple of its arguments.
        topology: the slice, such as ``'v5p:4x4x4'``, or nodes of GPUs, such as ``'h100:4x8'``, for which
            simulated devices stand (`MeshShardingHelper.from_topology`).
        axis_names: the mesh axes; every product of sizes that uses all devices is a candidate.
        rules: name -> the argument for *make_step*, such as rules for its parameters; each is tried on all
            meshes.
        constraints: mesh axis -> its size, or the sizes that it may have (``{'tp': [1, 2, 4, 8]}``); or a
            function of the sizes (mesh axis -> size) that says whether they are wanted.
        num_slices: the number of slices; of GPUs that of nodes, if *topology* does not have it.
        dcn_axis: the mesh axis that runs from slice to slice; needed for several slices.
        full: how many of the best to compile in full: minutes for each. None on simulated devices, of which
            such a plan says no more.
        show_progress: whether to show a bar; by default in a terminal. Without rich, steps are
            logged instead (``scalax.search``, level INFO).

    Returns:
        A `Search`. Ctrl-C ends the search early; the result then ranks the meshes planned so far.

    Raises:
        ArgumentError: there is no candidate, constraints or dcn_axis name no mesh axis, or an argument is
            invalid.
        MissingDependencyError: libtpu, the TPU compiler, is not installed.
        MeshError: the topology is unknown, or names of axes are invalid.

    Example:
        >>> from scalax.plan import search
        >>> found = search(
        ...     make_step, 'v5p:4x4x4', ['fsdp', 'tp'], constraints={'tp': [1, 2, 4, 8]}
        ... )  # doctest: +SKIP
        >>> print(found)  # doctest: +SKIP
        >>> found.best.mesh  # doctest: +SKIP
        {'fsdp': 16, 'tp': 4}
    """
    names, rules = list(meshes.checked_axes([1] * len(axis_names), axis_names)[1]), rules or None
    _check(make_step, names, rules, full)
    if show_progress is not None:
        checked_flag('show_progress', show_progress)
    if dcn_axis is not None and dcn_axis not in names:
        raise ArgumentError(f'dcn_axis={dcn_axis!r} is no mesh axis ({did_you_mean(dcn_axis, names)})')
    if num_slices > 1 and dcn_axis is None:
        raise ArgumentError(
            f'{num_slices} slices need dcn_axis=..., the mesh axis that runs from slice to slice'
        )
    devices = topologies.topology_devices(topology, num_slices)
    if isinstance(devices, gpu_nodes.StandIns):
        full = 0
    every = possible_meshes(len(devices), names, constraints)
    todo = [Candidate(sizes, name) for sizes in every for name in (rules or {'': None})]
    if not todo:
        raise ArgumentError(
            f'no mesh over {", ".join(names)} with {len(devices)} devices satisfies the constraints'
        )
    slices = {dcn_axis: num_slices} if dcn_axis is not None and num_slices > 1 else {}
    plan = functools.partial(_planned, make_step, rules, devices, slices)
    done: dict[int, Candidate] = {}
    interrupted = False
    with progress(len(todo) + full, show_progress) as advance:
        try:
            for place, candidate in enumerate(todo):
                advance(candidate.name)
                done[place] = plan(candidate, quick=True)
            _in_full(plan, done, full, advance)
        except KeyboardInterrupt:
            interrupted = True
    return Search(_ranked(done.values()), topology, interrupted)


def _check(make_step: Any, names: Sequence[str], rules: Any, full: Any) -> None:
    if not callable(make_step):
        raise ArgumentError(
            'search takes a function first, which makes the step and its arguments for a helper, '
            f'got {type(make_step).__name__}'
        )
    if not names:
        raise ArgumentError("a search needs the names of mesh axes, such as ['fsdp', 'tp']")
    if rules is not None and not isinstance(rules, Mapping):
        raise ArgumentError(
            "rules have names, each of which is tried on each mesh, such as {'fsdp': rule}, "
            f'got {type(rules).__name__}'
        )
    if isinstance(full, bool) or not isinstance(full, int) or full < 0:
        raise ArgumentError(f'full is how many meshes to compile in full, 0 or more, got {full!r}')


def _planned(
    make_step: Callable[..., tuple[Any, Sequence[Any]]],
    rules: Mapping[str, Any] | None,
    devices: Sequence[Any],
    slices: Mapping[str, int],
    candidate: Candidate,
    *,
    quick: bool,
) -> Candidate:
    """The candidate with its plan, or with the reason why there is none."""
    sizes = candidate.mesh
    dcn = [slices.get(name, 1) for name in sizes] if slices else None
    try:
        helper = MeshShardingHelper(
            list(sizes.values()), list(sizes), True, dcn_axis_dims=dcn, devices=devices
        )
        with warnings.catch_warnings():
            warnings.simplefilter('error', IndivisibleWarning)
            step, arguments = make_step(helper, *([rules[candidate.rules]] if rules else []))
            plan = make_plan(helper, step, arguments, {}, quick=quick)
    # Sizes that do not divide or do not fit the torus, errors of the compiler, errors of the user's
    # function on this mesh: the other meshes are planned anyway.
    except Exception as error:
        return dataclasses.replace(candidate, lost=_short(error))
    lost = f'does not fit: {memory_taken(plan)}' if plan.fits is False else ''
    return dataclasses.replace(candidate, plan=plan, lost=lost)


def _in_full(plan: Callable[..., Candidate], done: dict[int, Candidate], most: int, advance: Advance) -> None:
    """Compiles the best candidates in full, until *most* of them fit or none is left."""
    fitting = 0
    near = [place for place, candidate in done.items() if _may_fit(candidate)]
    for place in sorted(near, key=lambda place: _order(done[place])):
        if fitting >= most:
            return
        advance(f'{done[place].name}, in full')
        done[place] = plan(dataclasses.replace(done[place], lost=''), quick=False)
        fitting += not done[place].lost


def _may_fit(candidate: Candidate) -> bool:
    if candidate.plan is None:
        return False
    memory = candidate.plan.memory
    return memory.limit is None or memory.total <= _NEAR * memory.limit


def _order(candidate: Candidate) -> tuple[float, float]:
    """Sorts by the least time of a step; nearly equal ones by its time if nothing overlaps."""
    roofline = candidate.plan.known_roofline if candidate.plan else None
    if roofline is None:
        return float('inf'), float('inf')
    bound, estimate = roofline.step_seconds
    return float(f'{bound:.2g}'), estimate


def _ranked(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Those that fit, then those that do not, then those without a plan; those in full before quick ones."""
    every = sorted(candidates, key=lambda c: (c.plan is None, c.plan is not None and c.plan.quick, _order(c)))
    fitting, rest = ([c for c in every if bool(c.lost) is lost] for lost in (False, True))
    first = fitting[:1]
    slower = [dataclasses.replace(c, lost=_slower(c, first[0])) for c in fitting[1:]]
    return (*first, *slower, *rest)


def _slower(candidate: Candidate, best: Candidate) -> str:
    own, other = (c.plan.known_roofline if c.plan else None for c in (candidate, best))
    if own is None or other is None:
        return 'no hardware numbers; time unknown'
    bound, estimate = (
        mine / theirs - 1 for mine, theirs in zip(own.step_seconds, other.step_seconds, strict=True)
    )
    if bound >= 0.005:
        return f'{bound:.0%} slower, bound by {own.bound}'
    if estimate >= 0.005:
        return f'as fast if all overlaps, {estimate:.0%} slower if nothing does; bound by {own.bound}'
    return f'as fast; bound by {own.bound}'


def _short(error: Exception) -> str:
    """An error on one line: its first problem with a leaf, or else its first two lines."""
    if isinstance(error, ShardingError) and error.problems:
        first, *others = error.problems
        more = f' (and {len(others)} more)' if others else ''
        return f'{first.leaf}: {first.detail}{more}'
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = '' if isinstance(error, ScalaxError | IndivisibleWarning) else f'{type(error).__name__}: '
    return kind + ' '.join(lines[:2])


def possible_meshes(devices: int, names: Sequence[str], constraints: Constraints = None) -> Iterator[Sizes]:
    """All sizes of the mesh axes; the largest of the first axis come first.

    Args:
        devices: the number of devices; all are used.
        names: the mesh axes.
        constraints: mesh axis -> its size, or the sizes that it may have; or a function of the sizes that
            says whether they are wanted.

    Raises:
        ArgumentError: the constraints name an unknown axis, or are invalid.

    Example:
        >>> [*possible_meshes(8, ['fsdp', 'tp'], {'tp': range(2, 5)})]
        [{'fsdp': 4, 'tp': 2}, {'fsdp': 2, 'tp': 4}]
        >>> [*possible_meshes(4, ['fsdp', 'tp'], lambda sizes: sizes['fsdp'] >= sizes['tp'])]
        [{'fsdp': 4, 'tp': 1}, {'fsdp': 2, 'tp': 2}]
    """
    allowed: dict[str, Collection[int]] = {}
    if isinstance(constraints, Mapping):
        for name, those in constraints.items():
            if name not in names:
                raise ArgumentError(
                    f'constraints name {name!r}, which is no mesh axis ({did_you_mean(str(name), names)})'
                )
            allowed[name] = _sizes(name, those)
    elif constraints is not None and not callable(constraints):
        raise ArgumentError(
            "constraints are sizes by mesh axis, such as {'tp': [1, 2, 4]}, or a function of the sizes, "
            f'got {constraints!r}'
        )
    for dims in _products(devices, len(names)):
        sizes = dict(zip(names, dims, strict=True))
        wanted = constraints(dict(sizes)) if callable(constraints) else True
        if wanted and all(sizes[name] in few for name, few in allowed.items()):
            yield sizes


def _sizes(name: str, those: Any) -> Collection[int]:
    sizes: Any = (those,) if isinstance(those, numbers.Integral) else those
    if not isinstance(sizes, Collection) or not all(isinstance(size, numbers.Integral) for size in sizes):
        raise ArgumentError(
            f'constraints of {name!r} are a size or several, such as [1, 2, 4], got {those!r}'
        )
    return sizes


def _products(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    if factors == 1:
        yield (number,)
        return
    for first in range(number, 0, -1):
        if number % first == 0:
            for rest in _products(number // first, factors - 1):
                yield first, *rest


@contextlib.contextmanager
def progress(steps: int, shown: bool | None) -> Iterator[Advance]:
    """A progress bar in a terminal if rich is installed, else a log message for each step.

    Args:
        steps: the number of steps.
        shown: whether to show it; by default if stderr is a terminal.
    """
    if shown is None:
        shown = sys.stderr.isatty()
    if not shown:
        yield lambda text: None
    elif importlib.util.find_spec('rich'):
        with _rich(steps) as advance:
            yield advance
    else:
        yield lambda text: _log.info('planning %s', text)


@contextlib.contextmanager
def _rich(steps: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    step = TextColumn('{task.description}', markup=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), step)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task('', total=steps)
        started = False

        def advance(text: str) -> None:
            nonlocal started
            bar.update(task, description=text, advance=int(started))
            started = True

        yield advance
