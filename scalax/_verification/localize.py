"""Which operation of a step is the first whose result differs: found by looking at values inside."""

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
from scalax._verification.compare import Comparison, difference, seed_of
from scalax._verification.reference import blocks_of
from scalax._verification.report import Difference, FirstDifference, first_line
from scalax._verification.rounding import Evaluation, Place, places
from scalax._verification.tolerance import Error, error_of, explained, worst_copies

_DRAWS = 4
_AT_ONCE = 512  # operations whose results are looked at in one program


def first_difference(found: Comparison, seed: int) -> FirstDifference | str | None:
    """The first operation whose result differs in the first step, also where those of the step are equal.

    Args:
        found: a comparison.
        seed: the arguments.

    Returns:
        The operation; why it is not known; or None, if what is seen of the values inside is right.
    """
    here = [*places(found.one.jaxpr)]
    try:
        for start in range(0, len(here), _AT_ONCE):
            differs = _differing(found, here, range(start, min(start + _AT_ONCE, len(here))), seed)
            if differs is not None:
                number, difference = differs
                _, equation, calls = here[number]
                line, inside = line_of(equation, calls), _between_devices(equation)
                if equation.primitive.name == 'shard_map' and not line:
                    # A step that is a shard_map itself is called by no line of the user's.
                    line = next(filter(None, map(line_of, _equations_inside(equation))), '')
                return FirstDifference(equation.primitive.name, line, difference, inside)
    except Exception as error:  # noqa: BLE001 - a report is made without it
        return first_line(error)
    return None


def _differing(
    found: Comparison, here: Sequence[Any], chosen: Sequence[int], seed: int
) -> tuple[int, Difference] | None:
    """The operation among some whose result is the first to differ, by its number."""
    one, leaves = found.one, found.arguments(seed)
    watched = tuple(here[i][0] for i in chosen)
    values = one.kept(watched, leaves)
    samples = [one.kept(watched, leaves, 1.0, seed_of(seed, i)) for i in range(_DRAWS)]
    names = [primitive_name(equation) for _, equation, _ in here]
    watching = found.step.variant(functools.partial(_watching, names, chosen), **_UNSAID)
    differing: list[tuple[Any, int, Difference]] = []
    for i, results, known, *drawn in zip(
        chosen, found.called(leaves, watching), values, *samples, strict=True
    ):
        place, equation, calls = here[i]
        loops = [depth for depth, call in enumerate(reversed(calls)) if primitive_name(call) == 'scan']
        for k, value in enumerate(known if results else ()):
            if not is_prng_key(results[k]) and results[k].shape != value.shape:  # kept for a gradient
                continue
            whole = worst_copies(blocks_of(results[k]), value)
            for rounds in np.ndindex(value.shape[: len(loops)]):
                error = error_of(whole[rounds], value[rounds])
                scale = functools.reduce(
                    Error.__or__, [error_of(each[k][rounds], value[rounds]) for each in drawn]
                )
                limit = explained(scale, value[rounds], one.is_rounded(equation))
                if not limit.covers(error):
                    when = _when(
                        place, dict(zip(loops, rounds, strict=True)), primitive_name(equation) == 'scan'
                    )
                    error = dataclasses.replace(error, index=(*rounds, *error.index))
                    differing.append((when, i, difference('', results[k], error, limit, seed, 1)))
                    break
    return min(differing, key=lambda each: each[:2])[1:] if differing else None


def _when(place: Place, rounds: Mapping[int, int], ends: bool) -> Any:
    """When an operation runs: its number in its jaxpr and the round, from the outside to the inside.

    The results of a loop are there when all of its rounds have run.
    """
    last = len(place) - 1
    return [(number, math.inf if ends and i == last else rounds.get(i, 0)) for i, number in enumerate(place)]


def _is_whole(equation: Any) -> bool:
    """Whether no result is a sum that devices hold parts of, which no program may return."""
    shardings = [getattr(var.aval, 'sharding', None) for var in equation.outvars]
    return not any(each is not None and each.spec.unreduced for each in shardings)


def _between_devices(equation: Any) -> tuple[str, ...]:
    """The operations inside of one that depend on the device, and their lines, each once."""
    found: dict[str, None] = {}
    for inner in _equations_inside(equation):
        name, axes, line = inner.primitive.name, named_axes_of(inner), line_of(inner)
        if axes or name == 'random_bits' or name.endswith('callback'):
            along = f' along {", ".join(axes)}' if axes else ''
            found[f'{name.removesuffix("_invariant")}{along}{f" at {line}" if line else ""}'] = None
    return tuple(found)


def _equations_inside(equation: Any) -> Iterator[Any]:
    return itertools.chain.from_iterable(map(all_equations, inner_jaxprs(equation)))


# The results are others than those of the step.
_UNSAID = dict.fromkeys(('out_shardings', 'donate_argnums', 'donate_argnames'))


def _watching(
    names: Sequence[str], chosen: Sequence[int], function: Callable[..., Any]
) -> Callable[..., Any]:
    """A function that returns the results of some operations of another one.

    Args:
        names: the operations that the other one has on one device; on the mesh there may be further ones.
        chosen: the numbers of some; there is nothing for those that are not on the mesh.
        function: the other one.
    """

    @functools.wraps(function)
    def watching(*args: Any, **kwargs: Any) -> Any:
        jaxpr = jax.make_jaxpr(lambda: function(*args, **kwargs))()  # of constants, some of which are traced
        there = [*places(jaxpr)]
        matcher = difflib.SequenceMatcher(None, names, [primitive_name(each[1]) for each in there], False)
        blocks = matcher.get_matching_blocks()
        numbers = {block.a + i: block.b + i for block in blocks for i in range(block.size)}
        watched = {
            i: there[numbers[i]][0] for i in chosen if i in numbers and _is_whole(there[numbers[i]][1])
        }
        evaluation = Evaluation({*watched.values()})
        evaluation.run(jaxpr, [])
        return [evaluation.kept[watched[i]] if i in watched else [] for i in chosen]

    return watching
