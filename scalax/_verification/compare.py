"""Comparison of a step on a mesh with the same step on one device, over several arguments and steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from scalax._core.pytree.paths import NamedTree, is_prng_key
from scalax._core.render.tables import array_text
from scalax._core.util.progress import UpdateProgress
from scalax._jax.tracing import is_abstract
from scalax._verification.reference import (
    SingleDeviceReference,
    StepCall,
    abstract_leaf,
    local_shards,
    uncommitted,
    wrap_keys_like,
)
from scalax._verification.report import Difference
from scalax._verification.sample_inputs import domains_of, resample, sample
from scalax._verification.tolerance import (
    ErrorStats,
    Tolerance,
    error_stats,
    error_stats_of_shards,
    is_inexact,
    tolerance_for,
)
from scalax.errors import ArgumentError, PlacementError, shown

_NUM_SAMPLES = 2  # samples of rounding errors per step
_SEED_STRIDE = 1000  # between the seeds of the arguments of consecutive steps


class Comparison:
    """Compares a step on a mesh with the same step on one device.

    Args:
        step: the step.
        reference: the step on one device, if it was traced already.
        function: a function to call on the mesh instead of the function of the step.

    Attributes:
        step: the step.
        reference: the step on one device.
        domains: the value domains of the leaves of the arguments.
        paths: the paths of the results.
        differences: result index -> its difference; -1 is a step that raised on the mesh.
        rounding_dependent: the indices of results that differed, but not after the arguments were perturbed.
        finite: the indices of results with finite values on one device.
    """

    def __init__(
        self, step: StepCall, reference: SingleDeviceReference | None = None, function: Any = None
    ) -> None:
        self.step, self.reference, self._function = step, reference or SingleDeviceReference(step), function
        self._shardings = step.shardings(function)
        self.paths = NamedTree.of(self.reference.out).paths
        self.domains = domains_of(self.reference.jaxpr)
        self._fed_back = step.results_fed_back(self.reference.out)
        self._sampled_errors: dict[tuple[int, int], ErrorStats] = {}  # (step, result) -> the largest ones
        self.differences: dict[int, Difference] = {}
        self.rounding_dependent: set[int] = set()
        self.finite: set[int] = set()

    def run(self, seed: int, steps: int, update_progress: UpdateProgress) -> None:
        """Compares consecutive steps, each of which takes the results of the one before."""
        differences = self._first_differences(seed, steps, 0, update_progress)
        for perturbation in (1, 2):
            # A result may depend on how a value is rounded, such as on which expert an example is routed to.
            # Perturbed arguments then move the difference to another element. A bug keeps its difference.
            if all(map(self._is_exact, differences)):
                break
            last_step = max(difference.step for difference in differences.values())
            repeated = self._first_differences(seed, last_step, perturbation, update_progress)
            gone = {i for i in differences if i not in repeated and not self._is_exact(i)}
            self.rounding_dependent |= gone
            differences = {i: difference for i, difference in differences.items() if i not in gone}
        for i, difference in differences.items():
            seeds = self.differences[i].seeds + 1 if i in self.differences else 1
            self.differences[i] = dataclasses.replace(self.differences.get(i, difference), seeds=seeds)

    @property
    def repeats(self) -> bool:
        """Whether a step returns arguments of the next one."""
        return bool(self._fed_back)

    def _is_exact(self, i: int) -> bool:
        """Whether rounding cannot change a result."""
        return i < 0 or not self.reference.rounded_results[i]

    def arguments(self, seed: int, perturbation: int = 0) -> list[Any]:
        """Returns the leaves of the arguments: for seed 0 the user's values, where there are any.

        Args:
            seed: selects the values.
            perturbation: if not 0, the seed of a perturbation of each float by one unit in the last place.
        """
        leaves, domains = self.step.leaves, self.domains
        values = sample([*map(abstract_leaf, leaves)], domains, seed)
        concrete = [i for i, leaf in enumerate(leaves) if not is_abstract(leaf)]
        user_values = [uncommitted(leaves[i]) for i in concrete]
        resampled = resample(user_values, [domains[i] for i in concrete], seed)
        for i, value in zip(concrete, resampled, strict=True):
            values[i] = value
        return [_perturb(leaf, perturbation) for leaf in values] if perturbation else values

    def _first_differences(
        self, seed: int, steps: int, perturbation: int, update_progress: UpdateProgress
    ) -> dict[int, Difference]:
        """Returns the differences of the first step that has differences which rounding does not explain."""
        leaves = self.arguments(seed, perturbation)
        mesh_leaves, sample_leaves = [*map(_placed, leaves, self._shardings)], [leaves] * _NUM_SAMPLES
        for step in range(1, (steps if self._fed_back else 1) + 1):
            update_progress(f'step {step} with seed {seed}')
            expected = self.reference.run(leaves)
            samples = [
                self.reference.run(perturbed, 1.0, combine_seeds(seed, perturbation, i))
                for i, perturbed in enumerate(sample_leaves)
            ]
            for i, value in enumerate(expected):
                for results in samples:
                    known_errors = self._sampled_errors.get((step, i), ErrorStats())
                    self._sampled_errors[step, i] = known_errors | error_stats(results[i], value)
            try:
                actual = jax.tree.leaves(self.call_on_mesh(mesh_leaves, self._function))
            except Exception as error:
                if step == 1:
                    error.add_note(f'{self.step.name} raises this on the mesh, but not on one device')
                    raise
                return {-1: Difference('', seed=seed, step=step, raised=f'{type(error).__name__}: {error}')}
            self._require_mesh(actual)
            self._require_shapes(actual, expected)
            if differences := self._compare(actual, expected, seed, step):
                return differences
            fresh = self.arguments(seed + _SEED_STRIDE * step, perturbation)
            leaves, *sample_leaves = [
                self._next_arguments(fresh, results) for results in (expected, *samples)
            ]
            mesh_leaves = [*map(_placed, fresh, self._shardings)]
            for argument, result in self._fed_back.items():
                mesh_leaves[argument] = actual[result]
        return {}

    def _require_mesh(self, results: Sequence[Any]) -> None:
        """Raises ArgumentError if a step ran on one device."""
        devices = {device for result in results for device in result.sharding.device_set}
        if len(devices) < 2 and results:
            raise ArgumentError(
                f'{self.step.name} ran on one device, so it was compared with itself: neither its arguments '
                'nor its results have shardings. Use helper.sjit(fun, in_shardings=...), or pass sharded '
                'arguments'
            )

    def _require_shapes(self, actual: Sequence[Any], expected: Sequence[np.ndarray]) -> None:
        """Raises ArgumentError if the shapes of results depend on the mesh, so that values do not compare."""
        wrong = [
            f'{path or "(the result itself)"}: {array_text(str(result.dtype), result.shape)} on the mesh, '
            f'and {array_text(str(result.dtype), value.shape)} on one device'
            for path, result, value in zip(self.paths, actual, expected, strict=True)
            if not is_prng_key(result) and result.shape != value.shape
        ]
        if wrong:
            raise ArgumentError(
                f'{self.step.name} returns arrays of other shapes on the mesh than on one device:\n'
                f'{shown(wrong)}\n'
                'What to do: return global arrays, whose shapes are the same on any mesh; the out_specs of a '
                'shard_map concatenate local shards along the mesh axes over which they differ.'
            )

    def _compare(
        self, actual: Sequence[Any], expected: Sequence[np.ndarray], seed: int, step: int
    ) -> dict[int, Difference]:
        differences = {}
        for i, (result, value) in enumerate(zip(actual, expected, strict=True)):
            if not value.size or not is_inexact(value) or np.isfinite(value).any():
                self.finite.add(i)
            error = error_stats_of_shards(local_shards(result), value)
            tolerance = tolerance_for(self._sampled_errors[step, i], value, self.reference.rounded_results[i])
            if not tolerance.covers(error):
                differences[i] = make_difference(self.paths[i], result, error, tolerance, seed, step)
        return differences

    def nondeterministic_results(self, retraced: SingleDeviceReference, seed: int) -> frozenset[int]:
        """Returns the indices of results that differ between runs on one device, or after a new trace."""
        leaves = self.arguments(seed)
        first, *others = [reference.run(leaves) for reference in (self.reference, self.reference, retraced)]
        pairs = [(i, value, first[i]) for results in others for i, value in enumerate(results)]
        return frozenset(i for i, value, expected in pairs if error_stats(value, expected).largest)

    def call_on_mesh(self, leaves: Sequence[Any], function: Any) -> Any:
        """Returns the results of the step on the mesh, or of another function with its arguments."""
        try:
            return self.step.call(leaves, function)
        except PlacementError:  # the compiler has placed results that no rule constrains
            return self.step.call([uncommitted(leaf) for leaf in leaves], function)

    def _next_arguments(self, fresh: Sequence[Any], results: Sequence[np.ndarray]) -> list[Any]:
        """Returns the arguments of the next step on one device."""
        leaves = [*fresh]
        for argument, result in self._fed_back.items():
            leaves[argument] = wrap_keys_like(results[result], fresh[argument])
        return leaves


def _placed(value: Any, sharding: NamedSharding | None) -> Any:
    return value if sharding is None else jax.device_put(value, sharding)


def combine_seeds(*seeds: int) -> int:
    """Hashes several seeds into one of 32 bits."""
    return int(np.random.SeedSequence(seeds).generate_state(1)[0])


def make_difference(
    path: str, result: Any, error: ErrorStats, tolerance: Tolerance, seed: int, step: int
) -> Difference:
    """Makes the difference that a report shows."""
    array, spec = array_text(str(result.dtype), result.shape), getattr(result.sharding, 'spec', None)
    values = error.index, error.actual, error.expected
    return Difference(path, array, spec, error.largest, tolerance.largest, *values, seed, step)


def _perturb(leaf: Any, seed: int) -> Any:
    """Moves each element of a floating-point array up or down by one unit in the last place."""
    if not hasattr(leaf, 'dtype') or is_prng_key(leaf) or not is_inexact(leaf):
        return leaf
    signs = np.random.default_rng((seed, leaf.size)).choice([-1.0, 1.0], leaf.shape)
    unit = float(jax.numpy.finfo(leaf.dtype).eps)
    return (leaf * (1 + unit * signs)).astype(leaf.dtype)
