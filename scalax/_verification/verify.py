"""Verification of a step: runs it on its mesh and on one device, and localizes differences."""

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
from scalax._verification.downscale.downscale import DownscaledStep, downscale
from scalax._verification.downscale.shrink import StepAndArgs
from scalax._verification.localize import first_difference
from scalax._verification.reference import SingleDeviceReference, StepCall, single_device_helper
from scalax._verification.report import Ablation, Argument, FirstDifference, VerificationReport
from scalax.errors import ArgumentError

_MAX_SAMPLED = 2**24  # elements of the arguments; a step with more is downscaled
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
    compare_intermediates: bool = False,
) -> VerificationReport:
    """Verifies a step, as `MeshShardingHelper.verify` does; options cannot clash with arguments of the step.

    Args:
        helper: the helper of the mesh.
        function: the step; or, without arguments, a function that makes a step and its arguments.
        args: the positional arguments of the step.
        kwargs: its keyword arguments.
        seeds: the number of sets of arguments.
        steps: the number of consecutive steps.
        config: the second argument of *function*, if that makes the step.
        compare_intermediates: whether to compare intermediate values, if the results are equal.
    """
    start = time.monotonic()
    if not callable(function):
        raise ArgumentError(
            f'verify takes a function first, got {type(function).__name__}: helper.verify(step, *arguments)'
        )
    for name, value in (('seeds', seeds), ('steps', steps)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f'verify: {name} has to be a positive integer, got {value!r}')
    with progress(f'verifying {name_of(function)}', _log) as update_progress:
        step, single_device_step, downscaling = _prepare(
            helper, function, args, kwargs, config, update_progress
        )
        comparison = Comparison(step, SingleDeviceReference(step, single_device_step))
        seeds_done, ablations, nondeterministic = 0, list[Ablation](), frozenset[int]()
        first: FirstDifference | str | None = None
        interrupted = False
        try:
            for seed in range(seeds):
                comparison.run(seed, steps, update_progress)
                seeds_done += 1
            if compare_intermediates and not comparison.differences:
                update_progress('comparing intermediate values')
                first = first_difference(comparison, 0)
            if comparison.differences:
                earliest = min(comparison.differences.values(), key=lambda difference: difference.step)
                retraced = SingleDeviceReference(step, single_device_step)
                nondeterministic = comparison.nondeterministic_results(retraced, earliest.seed)
            elif _has_callbacks(comparison.reference.jaxpr):
                # A callback that returns another value each time would look like a large rounding error,
                # which explains any difference.
                nondeterministic = comparison.nondeterministic_results(comparison.reference, 0)
            if comparison.differences.keys() - nondeterministic:
                update_progress('localizing the first operation that differs')
                first = f'the results of the first step are equal, those of step {earliest.step} are not'
                if earliest.step == 1:
                    all_equal = 'the intermediate values that were compared are equal'
                    first = first_difference(comparison, earliest.seed) or all_equal
                for ablation in run_ablations(comparison, earliest.seed, earliest.step, update_progress):
                    ablations.append(ablation)
        except KeyboardInterrupt:
            interrupted = True
    paths = comparison.paths
    differences = sorted(comparison.differences.items(), key=lambda item: item[1].step)
    return VerificationReport(
        name=step.name,
        mesh=dict(step.helper.mesh.shape),
        differences=tuple(difference for i, difference in differences if i not in nondeterministic),
        nondeterministic=tuple(paths[i] for i in sorted(nondeterministic)),
        results=len(paths),
        seeds=seeds_done,
        steps=steps if comparison.repeats else 1,
        first_difference=first if isinstance(first, FirstDifference) else None,
        why_not_localized=first if isinstance(first, str) else '',
        ablations=tuple(ablations),
        rounding_dependent=tuple(paths[i] for i in sorted(comparison.rounding_dependent)),
        nonfinite=tuple(path for i, path in enumerate(paths) if seeds_done and i not in comparison.finite),
        arguments=tuple(_arguments(comparison)),
        downscaling=downscaling,
        jax=jax.__version__,
        interrupted=interrupted,
        seconds=time.monotonic() - start,
    )


def _has_callbacks(jaxpr: Any) -> bool:
    return any(equation.primitive.name == 'pure_callback' for equation in all_equations(jaxpr))


def _prepare(
    helper: Any,
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    config: Any,
    update_progress: UpdateProgress,
) -> tuple[StepCall, StepCall | None, tuple[str, ...]]:
    """Makes the step to run, downscaled if necessary.

    Returns:
        The step on its mesh; the step on one device, if *function* makes the step for a helper; and lines
        about the downscaling.
    """
    makes_step = not args and not kwargs
    if makes_step and hasattr(function, 'trace'):
        raise ArgumentError(
            f'verify got no arguments for {name_of(function)}: pass arrays or ShapeDtypeStructs'
        )
    if config is not None and not makes_step:
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

    def make(step_helper: Any, step_config: Any) -> StepAndArgs:
        if makes_step:
            return _call_make_step(function, step_helper, step_config)
        return function if step_helper is helper else with_options(function, step_helper), tuple(args)

    downscaling: tuple[str, ...] = ()
    (step, step_args), step_helper = make(helper, config), helper
    if not has_devices(helper.mesh) or _num_sampled((step_args, kwargs)) > _MAX_SAMPLED:
        if kwargs or not (makes_step or isinstance(function, SjitFunction)):
            raise ArgumentError(
                f'{name_of(function)} has to be downscaled, because the devices of its mesh are not '
                'attached, or its arguments are large. This needs a function made by sjit with positional '
                'arguments, or a function that makes the step for any helper'
            )
        update_progress('downscaling the step')
        small = downscale(make, config, helper, jax.local_devices())
        step_helper, step, step_args, config = small.helper, small.step, small.args, small.config
        downscaling = tuple(_downscaling_lines(small, dict(helper.mesh.shape)))
    single_device_step = None
    if makes_step:
        one_device = single_device_helper(step_helper)
        single_device_step = StepCall(one_device, make(one_device, config)[0], step_args, {})
    return StepCall(step_helper, step, step_args, kwargs), single_device_step, downscaling


def _num_sampled(tree: Any) -> int:
    """Returns the number of elements whose values have to be sampled."""
    structs = [leaf for leaf in jax.tree.leaves(tree) if is_abstract(leaf)]
    return sum(math.prod(leaf.shape) for leaf in structs)


def _call_make_step(function: Any, helper: Any, config: Any) -> StepAndArgs:
    """Calls the user's function that makes a step, and checks its result."""
    values = (helper,) if config is None else (helper, config)
    parameters = 'a helper' if config is None else 'a helper and a configuration'
    called = f'{name_of(function)} is called with {parameters}, because verify got no arguments for it'
    try:
        inspect.signature(function).bind(*values)
    except TypeError as error:
        raise ArgumentError(
            f'{called}, and it does not take them ({error}): pass the arguments of a step, or a function '
            'that makes the step for a helper'
        ) from None
    except ValueError:  # a C function without a signature
        pass
    result = function(*values)
    if not isinstance(result, tuple | list) or len(result) != 2 or not isinstance(result[1], tuple | list):
        raise ArgumentError(
            f'{called}: it has to return the step and the tuple of its arguments, got {_type_text(result)}'
        )
    return result[0], tuple(result[1])


def _type_text(value: Any) -> str:
    name = type(value).__name__
    return f'a {name} of {", ".join(type(item).__name__ for item in value)}' if name == 'tuple' else name


def _downscaling_lines(small: DownscaledStep, full_shape: Mapping[str, int]) -> Iterator[str]:
    """Yields lines about the sizes that were reduced, and about differences between the two programs."""
    if (shape := small.helper.mesh.shape) != full_shape:
        yield f'mesh ({axis_sizes_text(full_shape)}) -> ({axis_sizes_text(shape)})'
    if small.sizes:
        pairs = small.sizes.items()
        yield ', '.join(f'{name or "config"} {before} -> {after}' for name, (before, after) in pairs)
    yield from small.caveats


def _arguments(comparison: Comparison) -> Iterator[Argument]:
    step = comparison.step
    for path, leaf, domain in zip(step.paths, step.leaves, comparison.domains, strict=True):
        below = '' if domain.bound is None else f' below {domain.bound}'
        prefix = '' if is_abstract(leaf) else 'yours, then similar ones: '
        array = array_text(str(leaf.dtype), leaf.shape)
        yield Argument(path, array, f'{prefix}{domain.kind}{below}', domain.reason)
