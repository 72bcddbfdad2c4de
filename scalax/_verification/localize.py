"""Localization of the first operation of a step whose result differs, by comparing intermediate values."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from scalax._core.pytree.paths import is_prng_key
from scalax._jax.equations import all_equations, inner_jaxprs, named_axes_of
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.source_lines import line_of
from scalax._verification.compare import Comparison, combine_seeds, make_difference
from scalax._verification.reference import local_shards
from scalax._verification.report import Difference, FirstDifference, first_line
from scalax._verification.rounding import EquationPath, Evaluator, equation_paths
from scalax._verification.tolerance import ErrorStats, error_stats, tolerance_for, worst_replicas

_NUM_SAMPLES = 4  # samples of rounding errors
_CHUNK = 512  # operations whose results one program returns


def first_difference(comparison: Comparison, seed: int) -> FirstDifference | str | None:
    """Finds the first operation whose result differs in the first step.

    The results of the step itself may be equal.

    Args:
        comparison: a comparison.
        seed: selects the arguments.

    Returns:
        The operation; or the reason why it is unknown; or None if all observed intermediate values are equal.
    """
    reference_equations = [*equation_paths(comparison.reference.jaxpr)]
    try:
        for start in range(0, len(reference_equations), _CHUNK):
            chunk = range(start, min(start + _CHUNK, len(reference_equations)))
            first = _first_in_chunk(comparison, reference_equations, chunk, seed)
            if first is not None:
                index, difference = first
                _, equation, calls = reference_equations[index]
                line = line_of(equation, calls)
                if equation.primitive.name == 'shard_map' and not line:
                    # If the step itself is a shard_map, no line of the user's code calls it.
                    line = next(filter(None, map(line_of, _inner_equations(equation))), '')
                operations = _device_dependent_ops(equation)
                return FirstDifference(equation.primitive.name, line, difference, operations)
    except Exception as error:  # noqa: BLE001 - a report is made without the operation
        return first_line(error)
    return None


def _first_in_chunk(
    comparison: Comparison, reference_equations: Sequence[Any], chunk: Sequence[int], seed: int
) -> tuple[int, Difference] | None:
    """Returns the index of the first operation of a chunk whose result differs, with the difference."""
    reference, leaves = comparison.reference, comparison.arguments(seed)
    watched = tuple(reference_equations[i][0] for i in chunk)
    expected_results = reference.intermediates(watched, leaves)
    samples = [
        reference.intermediates(watched, leaves, 1.0, combine_seeds(seed, i)) for i in range(_NUM_SAMPLES)
    ]
    names = [primitive_name(equation) for _, equation, _ in reference_equations]
    watching_step = comparison.step.variant(
        functools.partial(_returning_intermediates, names, chunk), **_UNSET_OPTIONS
    )
    actual_results = comparison.call_on_mesh(leaves, watching_step)
    differing: list[tuple[Any, int, Difference]] = []
    for i, actual, expected, *sampled in zip(chunk, actual_results, expected_results, *samples, strict=True):
        path, equation, calls = reference_equations[i]
        is_loop = primitive_name(equation) == 'scan'
        loops = [depth for depth, call in enumerate(reversed(calls)) if primitive_name(call) == 'scan']
        for k, value in enumerate(expected if actual else ()):
            if not is_prng_key(actual[k]) and actual[k].shape != value.shape:  # a saved residual
                continue
            mesh_value = worst_replicas(local_shards(actual[k]), value)
            for iterations in np.ndindex(value.shape[: len(loops)]):
                error = error_stats(mesh_value[iterations], value[iterations])
                sampled_error = functools.reduce(
                    ErrorStats.__or__,
                    [error_stats(results[k][iterations], value[iterations]) for results in sampled],
                )
                tolerance = tolerance_for(sampled_error, value[iterations], reference.is_rounded(equation))
                if not tolerance.covers(error):
                    time = _execution_time(path, dict(zip(loops, iterations, strict=True)), is_loop)
                    error = dataclasses.replace(error, index=(*iterations, *error.index))
                    difference = make_difference('', actual[k], error, tolerance, seed, 1)
                    differing.append((time, i, difference))
                    break
    return min(differing, key=lambda entry: entry[:2])[1:] if differing else None


def _execution_time(path: EquationPath, iterations: Mapping[int, int], is_loop: bool) -> Any:
    """Returns a sort key for when an operation runs: index and iteration, from the outermost jaxpr inwards.

    The results of a loop exist after its last iteration.

    Args:
        path: the path of the equation.
        iterations: depth of a loop around it -> iteration.
        is_loop: whether the equation itself is a loop.
    """
    last = len(path) - 1
    return [
        (i, math.inf if is_loop and depth == last else iterations.get(depth, 0))
        for depth, i in enumerate(path)
    ]


def _is_reduced(equation: Any) -> bool:
    """Whether no result is unreduced: a program cannot return the partial sums of devices."""
    shardings = [getattr(var.aval, 'sharding', None) for var in equation.outvars]
    return not any(sharding is not None and sharding.spec.unreduced for sharding in shardings)


def _device_dependent_ops(equation: Any) -> tuple[str, ...]:
    """Returns the operations inside an equation that depend on the device, with their lines."""
    operations: dict[str, None] = {}
    for inner in _inner_equations(equation):
        name, axes, line = inner.primitive.name, named_axes_of(inner), line_of(inner)
        if axes or name == 'random_bits' or name.endswith('callback'):
            along = f' along {", ".join(axes)}' if axes else ''
            operations[f'{name.removesuffix("_invariant")}{along}{f" at {line}" if line else ""}'] = None
    return tuple(operations)


def _inner_equations(equation: Any) -> Iterator[Any]:
    return itertools.chain.from_iterable(map(all_equations, inner_jaxprs(equation)))


# These options describe the results of the step, which intermediate values replace.
_UNSET_OPTIONS = dict.fromkeys(('out_shardings', 'donate_argnums', 'donate_argnames'))


def _returning_intermediates(
    names: Sequence[str], chosen: Sequence[int], function: Callable[..., Any]
) -> Callable[..., Any]:
    """Wraps a function so that it returns the results of some of its operations.

    Args:
        names: the primitives of the function on one device. On the mesh there may be further ones.
        chosen: indices into *names*. The results are empty for an operation that is not found on the mesh.
        function: the function.
    """

    @functools.wraps(function)
    def watching(*args: Any, **kwargs: Any) -> Any:
        jaxpr = jax.make_jaxpr(lambda: function(*args, **kwargs))()  # evaluates traced constants
        mesh_equations = [*equation_paths(jaxpr)]
        mesh_names = [primitive_name(equation) for _, equation, _ in mesh_equations]
        blocks = difflib.SequenceMatcher(None, names, mesh_names, False).get_matching_blocks()
        mesh_index = {block.a + i: block.b + i for block in blocks for i in range(block.size)}
        watched = {
            i: mesh_equations[mesh_index[i]][0]
            for i in chosen
            if i in mesh_index and _is_reduced(mesh_equations[mesh_index[i]][1])
        }
        evaluator = Evaluator({*watched.values()})
        evaluator.run(jaxpr, [])
        return [evaluator.recorded[watched[i]] if i in watched else [] for i in chosen]

    return watching
