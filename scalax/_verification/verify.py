"""Verifies a step: makes it small if its mesh is not here, compares it, and looks for what is wrong."""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from scalax._compile.call.signature import name_of
from scalax._compile.sjit.function import SjitFunction, with_options
from scalax._core.mesh.meshes import has_devices
from scalax._core.pytree.partition_specs import axis_sizes_text
from scalax._core.render.tables import array_text
from scalax._core.util.progress import UpdateProgress, progress
from scalax._jax.equations import all_equations
from scalax._jax.tracing import is_abstract
from scalax._verification.ablations import run_ablations
from scalax._verification.compare import Comparison
from scalax._verification.downscale.downscale import Reduced, reduced
from scalax._verification.localize import first_difference
from scalax._verification.reference import OneDevice, Step, on_one_device
from scalax._verification.report import Ablation, Argument, FirstDifference, VerificationReport
from scalax.errors import ArgumentError

_MOST_DRAWN = 2**24  # elements of arguments: a step with more of them is made small
_log = logging.getLogger('scalax.verify')


def verify(
    helper: Any,
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    seeds: int = 3,
    steps: int = 2,
    config: Any = None,
    inside: bool = False,
) -> VerificationReport:
    """Verifies a step, as `MeshShardingHelper.verify` does; options cannot clash with arguments of the step.

    Args:
        helper: the helper of the mesh.
        function: the step; or, without arguments, what makes a step and its arguments for a helper.
        args: its arguments.
        kwargs: its keyword arguments.
        seeds: with how many sets of arguments it runs.
        steps: how many steps run in a row.
        config: what *function* takes besides the helper.
        inside: whether intermediate values are compared as well, if the results are equal.
    """
    start = time.monotonic()
    if not callable(function):
        raise ArgumentError(
            f'verify takes a function first, got {type(function).__name__}: helper.verify(step, *arguments)'
        )
    for name, value in (('seeds', seeds), ('steps', steps)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f'verify: {name} has to be a positive integer, got {value!r}')
    with progress(f'verifying {name_of(function)}', _log) as note:
        step, alone, said = _sides(helper, function, args, kwargs, config, note)
        found = Comparison(step, OneDevice(step, alone))
        done, tried, uncertain = 0, list[Ablation](), frozenset[int]()
        first: FirstDifference | str | None = None
        interrupted = False
        try:
            for seed in range(seeds):
                found.run(seed, steps, note)
                done += 1
            if inside and not found.differences:
                note('comparing intermediate values')
                first = first_difference(found, 0)
            if found.differences:
                shown = min(found.differences.values(), key=lambda each: each.step)
                uncertain = found.differing_on_one_device(OneDevice(step, alone), shown.seed)
            elif any(each.primitive.name == 'pure_callback' for each in all_equations(found.one.jaxpr)):
                # What is another value each time is no error of rounding, and would explain all others.
                uncertain = found.differing_on_one_device(found.one, 0)
            if found.differences.keys() - uncertain:
                note('looking for the first operation that differs')
                first = f'the results of the first step are equal, those of step {shown.step} are not'
                if shown.step == 1:
                    nothing = 'the intermediate values that were compared are equal'
                    first = first_difference(found, shown.seed) or nothing
                for ablation in run_ablations(found, shown.seed, shown.step, note):
                    tried.append(ablation)
        except KeyboardInterrupt:
            interrupted = True
    differences = sorted(found.differences.items(), key=lambda each: each[1].step)
    return VerificationReport(
        name=step.name,
        mesh=dict(step.helper.mesh.shape),
        differences=tuple(each for leaf, each in differences if leaf not in uncertain),
        nondeterministic=tuple(found.paths[leaf] for leaf in sorted(uncertain)),
        results=len(found.paths),
        seeds=done,
        steps=steps if found.repeats else 1,
        first_difference=first if isinstance(first, FirstDifference) else None,
        why_not_localized=first if isinstance(first, str) else '',
        ablations=tuple(tried),
        rounding_dependent=tuple(found.paths[leaf] for leaf in sorted(found.rounding_dependent)),
        nonfinite=tuple(path for leaf, path in enumerate(found.paths) if done and leaf not in found.finite),
        arguments=tuple(_arguments(found)),
        downscaling=said,
        jax=jax.__version__,
        interrupted=interrupted,
        seconds=time.monotonic() - start,
    )


def _sides(
    helper: Any,
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    config: Any,
    note: UpdateProgress,
) -> tuple[Step, Step | None, tuple[str, ...]]:
    """The step on its mesh, the same on one device if it is made for any helper, and what is smaller."""
    makes = not args and not kwargs
    if makes and hasattr(function, 'trace'):
        raise ArgumentError(
            f'verify got no arguments for {name_of(function)}: pass arrays or ShapeDtypeStructs'
        )
    if config is not None and not makes:
        raise ArgumentError(
            'config is only for a function that makes the step: pass that function without arguments'
        )
    if helper.mesh.size == 1:
        raise ArgumentError(
            f'the mesh has one device, so {name_of(function)} would be compared with itself: simulate '
            "several with jax.config.update('jax_num_cpu_devices', 8) before JAX is used"
        )
    if has_devices(helper.mesh) and len(helper.mesh.local_devices) < helper.mesh.size:
        raise ArgumentError(
            f'the mesh has devices of several processes, but verify runs in one: run {name_of(function)} on '
            'the devices of one host, or on simulated ones'
        )

    def make(own: Any, given: Any) -> tuple[Any, tuple[Any, ...]]:
        if makes:
            return _made(function, own, given)
        return function if own is helper else with_options(function, own), tuple(args)

    said: tuple[str, ...] = ()
    (step, own), over = make(helper, config), helper
    if not has_devices(helper.mesh) or _drawn((own, kwargs)) > _MOST_DRAWN:
        if kwargs or not (makes or isinstance(function, SjitFunction)):
            raise ArgumentError(
                f'{name_of(function)} has to be reduced, because the devices of its mesh are not here, or '
                'its arguments are large. That needs a function made by sjit with positional arguments, or a '
                'function that makes the step for any helper'
            )
        note('reducing its sizes')
        small = reduced(make, config, helper, jax.local_devices())
        over, step, own, config = small.helper, small.step, small.args, small.config
        said = tuple(_said(small, dict(helper.mesh.shape)))
    one = on_one_device(over)
    alone = Step(one, make(one, config)[0], own, {}) if makes else None
    return Step(over, step, own, kwargs), alone, said


def _drawn(tree: Any) -> int:
    """How many elements have to be drawn."""
    structs = [leaf for leaf in jax.tree.leaves(tree) if is_abstract(leaf)]
    return sum(math.prod(leaf.shape) for leaf in structs)


def _made(function: Any, helper: Any, config: Any) -> tuple[Any, tuple[Any, ...]]:
    """What the user's function makes for a helper."""
    values = (helper,) if config is None else (helper, config)
    needed = 'a helper' if config is None else 'a helper and a configuration'
    called = f'{name_of(function)} is called with {needed}, because verify got no arguments for it'
    try:
        inspect.signature(function).bind(*values)
    except TypeError as error:
        raise ArgumentError(
            f'{called}, and it does not take them ({error}): pass the arguments of a step, or a function '
            'that makes the step for a helper'
        ) from None
    except ValueError:  # of functions in C, whose signature is unknown
        pass
    made = function(*values)
    if not isinstance(made, tuple | list) or len(made) != 2 or not isinstance(made[1], tuple | list):
        raise ArgumentError(
            f'{called}: it has to return the step and the tuple of its arguments, got {_kind(made)}'
        )
    return made[0], tuple(made[1])


def _kind(made: Any) -> str:
    kind = type(made).__name__
    return f'a {kind} of {", ".join(type(each).__name__ for each in made)}' if kind == 'tuple' else kind


def _said(small: Reduced, wanted: Mapping[str, int]) -> Iterator[str]:
    """What was made smaller, and what could not be."""
    if (shape := small.helper.mesh.shape) != wanted:
        yield f'mesh ({axis_sizes_text(wanted)}) -> ({axis_sizes_text(shape)})'
    if small.sizes:
        pairs = small.sizes.items()
        yield ', '.join(f'{name or "config"} {before} -> {after}' for name, (before, after) in pairs)
    yield from small.said


def _arguments(found: Comparison) -> Iterator[Argument]:
    pairs = zip(found.step.paths, found.step.leaves, found.roles, strict=True)
    for path, leaf, role in pairs:
        below = '' if role.bound is None else f' below {role.bound}'
        own = '' if is_abstract(leaf) else 'yours, then similar ones: '
        yield Argument(path, array_text(str(leaf.dtype), leaf.shape), f'{own}{role.kind}{below}', role.reason)
