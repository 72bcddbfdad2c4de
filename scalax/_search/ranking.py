"""How is the best mesh found? All are planned quickly; the best of those are compiled in full, and ranked."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from scalax._helper import MeshShardingHelper
from scalax._mesh import meshes, topologies
from scalax._plan import Plan, make_plan
from scalax._report.tables import human_bytes
from scalax._search.factorizations import Constraints, possible_meshes
from scalax._search.found import Candidate, Search
from scalax._search.progress import Advance, progress
from scalax.errors import (
    ArgumentError,
    IndivisibleWarning,
    ScalaxError,
    ShardingError,
    checked_flag,
    did_you_mean,
)

_NEAR = 1.08
"""A quick plan that is so near to the limit is compiled in full before it is said not to fit."""


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
    """Plans a step on every mesh that a topology can hold, and ranks these.

    Each is planned quickly (`MeshShardingHelper.plan`), which takes seconds. Those that do not fit have lost;
    the others are ranked by the time that their roofline says the step takes at least, and then by what it
    takes if nothing overlaps. The best are compiled in full: what the compiler then says is what is ranked.
    Meshes that something does not divide by, padded or not, have lost too.

    Args:
        make_step: called with a helper, and one of the *rules* if there are any; returns the step, such as
            `sjit` makes, and the tuple of its arguments.
        topology: the slice, such as ``'v5p:4x4x4'``.
        axis_names: the mesh axes; every product of sizes that uses all devices is a candidate.
        rules: name -> what *make_step* is to be called with, such as the rules for its parameters. Each is
            tried on each mesh.
        constraints: mesh axis -> its size, or those that it may have (``{'tp': [1, 2, 4, 8]}``); or a
            function of the sizes (mesh axis -> size) that says whether they are wanted.
        num_slices: the number of slices.
        dcn_axis: the mesh axis that runs from slice to slice; needed with several.
        full: how many of the best to compile in full: minutes for each.
        show_progress: whether to show a bar; by default in a terminal. Without rich, steps are
            logged instead (``scalax.search``, level INFO).

    Returns:
        A `Search`. Ctrl-C ends the search early: it holds what was found until then, and says so.

    Raises:
        ArgumentError: there is no candidate, constraints or dcn_axis name no mesh axis, or an argument is
            none of its kind.
        MissingDependencyError: libtpu, the TPU compiler, is not installed.
        MeshError: the topology is unknown, or names of axes are none.

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
    every = possible_meshes(len(devices), names, constraints)
    todo = [Candidate(sizes, name) for sizes in every for name in (rules or {'': None})]
    if not todo:
        raise ArgumentError(
            f'no mesh over {", ".join(names)} with {len(devices)} devices satisfies the constraints'
        )
    planner = _Planner(make_step, devices, rules, num_slices, dcn_axis)
    done: dict[int, Candidate] = {}
    interrupted = False
    with progress(len(todo) + full, show_progress) as advance:
        try:
            for place, candidate in enumerate(todo):
                advance(candidate.name)
                done[place] = planner.planned(candidate, quick=True)
            _in_full(planner, done, full, advance)
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


@dataclasses.dataclass(frozen=True)
class _Planner:
    """Plans the step of a search."""

    make_step: Callable[..., tuple[Any, Sequence[Any]]]
    devices: Sequence[Any]
    rules: Mapping[str, Any] | None
    num_slices: int
    dcn_axis: str | None

    def planned(self, candidate: Candidate, *, quick: bool) -> Candidate:
        """The candidate with its plan, or with the reason why there is none."""
        given = () if self.rules is None else (self.rules[candidate.rules],)
        names = list(candidate.mesh)
        dcn = (
            [self.num_slices if name == self.dcn_axis else 1 for name in names]
            if self.num_slices > 1
            else None
        )
        try:
            helper = MeshShardingHelper(
                list(candidate.mesh.values()), names, True, dcn_axis_dims=dcn, devices=self.devices
            )
            with warnings.catch_warnings():
                warnings.simplefilter('error', IndivisibleWarning)
                step, arguments = self.make_step(helper, *given)
                plan = make_plan(helper, step, arguments, {}, quick=quick)
        # What does not divide, or does not lie on the torus; what the compiler says of a step that it fails
        # on; whatever the user's own function cannot do with this mesh. The others are looked at anyway.
        except Exception as error:
            return dataclasses.replace(candidate, lost=_short(error))
        return dataclasses.replace(
            candidate, plan=plan, lost='' if plan.fits is not False else _too_large(plan)
        )


def _in_full(planner: _Planner, done: dict[int, Candidate], most: int, advance: Advance) -> None:
    """Compiles the best candidates in full, until so many of them fit or nobody is left."""
    fitting = 0
    for place in sorted(
        (place for place in done if _may_fit(done[place])), key=lambda place: _order(done[place])
    ):
        if fitting >= most:
            return
        advance(f'{done[place].name}, in full')
        done[place] = planner.planned(dataclasses.replace(done[place], lost=''), quick=False)
        fitting += not done[place].lost


def _may_fit(candidate: Candidate) -> bool:
    if candidate.plan is None:
        return False
    memory = candidate.plan.memory
    return memory.limit is None or memory.peak <= _NEAR * memory.limit


def _order(candidate: Candidate) -> tuple[float, float]:
    """By what a step takes at least; nearly equal ones by what it takes if nothing overlaps."""
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
        return 'nobody knows how long it takes: the numbers of the hardware are not known'
    bound, estimate = (
        mine / theirs - 1 for mine, theirs in zip(own.step_seconds, other.step_seconds, strict=True)
    )
    if bound >= 0.005:
        return f'{bound:.0%} slower, bound by {own.bound}'
    if estimate >= 0.005:
        return f'as fast if all overlaps, {estimate:.0%} slower if nothing does; bound by {own.bound}'
    return f'as fast; bound by {own.bound}'


def _too_large(plan: Plan) -> str:
    limit = '' if plan.memory.limit is None else f' of {human_bytes(plan.memory.limit)}'
    return f'does not fit: {human_bytes(plan.memory.peak)}{limit}'


def _short(error: Exception) -> str:
    """What an error says of the first leaf that it is about, or else its first lines, in one."""
    if isinstance(error, ShardingError) and error.problems:
        first, *others = error.problems
        more = f' (and {len(others)} more)' if others else ''
        return f'{first.leaf}: {first.detail}{more}'
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = '' if isinstance(error, ScalaxError | IndivisibleWarning) else f'{type(error).__name__}: '
    return kind + ' '.join(lines[:2])
