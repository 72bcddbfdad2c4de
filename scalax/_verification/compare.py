"""Runs a step on both sides, with several arguments and several steps in a row, and compares the results."""

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
from scalax._verification.reference import OneDevice, Step, blocks_of, shape_of, unplaced, with_keys
from scalax._verification.report import Difference
from scalax._verification.sample_inputs import drawn, roles_of, varied
from scalax._verification.tolerance import Error, Explained, error_of, error_of_blocks, explained, is_number
from scalax.errors import ArgumentError, PlacementError, shown

_DRAWS = 2  # of rounding errors, for each step
_APART = 1000  # between the seeds of the arguments of steps in a row


class Comparison:
    """Compares a step on a mesh with the same step on one device.

    Args:
        step: the step.
        one: the step on one device, if it was traced already.
        function: what is called on the mesh, if not the function of the step.

    Attributes:
        one: the step on one device.
        roles: what values the leaves of the arguments may have.
        paths: the paths of the results.
        differences: what was found, by the number of the result; that of a step that raised is -1.
        rounding_dependent: the indices of results that differed, but not after the arguments were perturbed.
        finite: the numbers of results that had finite values on one device.
    """

    def __init__(self, step: Step, one: OneDevice | None = None, function: Any = None) -> None:
        self.step, self.one, self._function = step, one or OneDevice(step), function
        self._shardings = step.shardings(function)
        self.paths, self._results = NamedTree.of(self.one.out).paths, jax.tree.leaves(self.one.out)
        self.roles = roles_of(self.one.jaxpr)
        self._next = step.next_arguments(self.one.out)
        self._drawn: dict[tuple[int, int], Error] = {}  # (step, result) -> the largest errors that were drawn
        self.differences: dict[int, Difference] = {}
        self.rounding_dependent: set[int] = set()
        self.finite: set[int] = set()

    def run(self, seed: int, steps: int, note: UpdateProgress) -> None:
        """Compares some steps in a row, of which each takes what the one before returned."""
        found = self._differing(seed, steps, 0, note)
        for moved in (1, 2):
            # A result that hinges on a rounding, such as which expert takes a row, hinges elsewhere if the
            # arguments are moved by a rounding. A fault stays.
            if all(map(self._is_certain, found)):
                break
            again = self._differing(seed, max(each.step for each in found.values()), moved, note)
            gone = {leaf for leaf in found if leaf not in again and not self._is_certain(leaf)}
            self.rounding_dependent |= gone
            found = {leaf: each for leaf, each in found.items() if leaf not in gone}
        for leaf, each in found.items():
            seeds = self.differences[leaf].seeds + 1 if leaf in self.differences else 1
            self.differences[leaf] = dataclasses.replace(self.differences.get(leaf, each), seeds=seeds)

    @property
    def repeats(self) -> bool:
        """Whether a step returns arguments of the next one."""
        return bool(self._next)

    def _is_certain(self, leaf: int) -> bool:
        """Whether no rounding can change a result."""
        return leaf < 0 or not self.one.rounded[leaf]

    def arguments(self, seed: int, moved: int = 0) -> list[Any]:
        """The leaves of the arguments: for seed 0 the user's own, if they have values."""
        leaves, roles = self.step.leaves, self.roles
        new = drawn([*map(shape_of, leaves)], roles, seed)
        own = [i for i, leaf in enumerate(leaves) if not is_abstract(leaf)]
        values = varied([unplaced(leaves[i]) for i in own], [roles[i] for i in own], seed)
        for i, value in zip(own, values, strict=True):
            new[i] = value
        return [_moved(leaf, moved) for leaf in new] if moved else new

    def _differing(self, seed: int, steps: int, moved: int, note: UpdateProgress) -> dict[int, Difference]:
        """The results of the first step that has any that rounding does not explain."""
        plain = self.arguments(seed, moved)
        on_mesh, errors = [*map(_placed, plain, self._shardings)], [plain] * _DRAWS
        for number in range(1, (steps if self._next else 1) + 1):
            note(f'step {number} with seed {seed}')
            expected = self.one.run(plain)
            samples = [self.one.run(leaves, 1.0, seed_of(seed, moved, i)) for i, leaves in enumerate(errors)]
            for leaf, value in enumerate(expected):
                for sample in samples:
                    known = self._drawn.get((number, leaf), Error())
                    self._drawn[number, leaf] = known | error_of(sample[leaf], value)
            try:
                results = jax.tree.leaves(self.called(on_mesh, self._function))
            except Exception as error:
                if number == 1:
                    error.add_note(f'{self.step.name} raises this on the mesh, but not on one device')
                    raise
                return {-1: Difference('', seed=seed, step=number, raised=f'{type(error).__name__}: {error}')}
            self._require_mesh(results)
            self._require_shapes(results, expected)
            if found := self._compared(results, expected, seed, number):
                return found
            fresh = self.arguments(seed + _APART * number, moved)
            plain, *errors = [self._following(fresh, each) for each in (expected, *samples)]
            on_mesh = [*map(_placed, fresh, self._shardings)]
            for to, result in self._next.items():
                on_mesh[to] = results[result]
        return {}

    def _require_mesh(self, results: Sequence[Any]) -> None:
        """Raises ArgumentError if a step ran on one device."""
        devices = {device for result in results for device in result.sharding.device_set}
        if len(devices) < 2 and results:
            raise ArgumentError(
                f'{self.step.name} ran on one device, so it was compared with itself: neither arguments nor '
                'results have shardings. Use helper.sjit(fun, in_shardings=...), or pass sharded arguments'
            )

    def _require_shapes(self, results: Sequence[Any], expected: Sequence[np.ndarray]) -> None:
        """Raises ArgumentError if shapes depend on the sizes of the mesh axes: values cannot be compared."""
        wrong = [
            f'{path or "(the result itself)"}: {array_text(str(result.dtype), result.shape)} on the mesh, '
            f'and {array_text(str(result.dtype), value.shape)} on one device'
            for path, result, value in zip(self.paths, results, expected, strict=True)
            if not is_prng_key(result) and result.shape != value.shape
        ]
        if wrong:
            raise ArgumentError(
                f'{self.step.name} returns arrays of other shapes on the mesh than on one device:\n'
                f'{shown(wrong)}\n'
                'What to do: return global arrays, whose shapes are the same on any mesh; the out_specs of a '
                'shard_map join blocks along the mesh axes over which they differ.'
            )

    def _compared(
        self, results: Sequence[Any], expected: Sequence[np.ndarray], seed: int, number: int
    ) -> dict[int, Difference]:
        found = {}
        for leaf, (result, value) in enumerate(zip(results, expected, strict=True)):
            if not value.size or not is_number(value) or np.isfinite(value).any():
                self.finite.add(leaf)
            error = error_of_blocks(blocks_of(result), value)
            limit = explained(self._drawn[number, leaf], value, self.one.rounded[leaf])
            if not limit.covers(error):
                found[leaf] = difference(self.paths[leaf], result, error, limit, seed, number)
        return found

    def differing_on_one_device(self, anew: OneDevice, seed: int) -> frozenset[int]:
        """The numbers of results that differ on one device each time, or when it is traced anew."""
        leaves = self.arguments(seed)
        first, *others = [one.run(leaves) for one in (self.one, self.one, anew)]
        pairs = [(leaf, value, first[leaf]) for other in others for leaf, value in enumerate(other)]
        return frozenset(leaf for leaf, value, known in pairs if error_of(value, known).largest)

    def called(self, leaves: Sequence[Any], function: Any) -> Any:
        """What the step returns on the mesh, or another function in its place."""
        try:
            return self.step.call(leaves, function)
        except PlacementError:  # results are where the compiler likes them, if no rule says where
            return self.step.call([unplaced(leaf) for leaf in leaves], function)

    def _following(self, fresh: Sequence[Any], results: Sequence[np.ndarray]) -> list[Any]:
        """The arguments of the next step of one device."""
        leaves = [*fresh]
        for to, result in self._next.items():
            leaves[to] = with_keys(results[result], fresh[to])
        return leaves


def _placed(value: Any, sharding: NamedSharding | None) -> Any:
    return value if sharding is None else jax.device_put(value, sharding)


def seed_of(*numbers: int) -> int:
    """A number of 32 bits, of which all are different for other numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def difference(path: str, result: Any, error: Error, limit: Explained, seed: int, step: int) -> Difference:
    """A difference, as users see it."""
    array, spec = array_text(str(result.dtype), result.shape), getattr(result.sharding, 'spec', None)
    values = error.index, error.actual, error.expected
    return Difference(path, array, spec, error.largest, limit.largest, *values, seed, step)


def _moved(leaf: Any, seed: int) -> Any:
    """An argument moved by a rounding: each element up or down."""
    if not hasattr(leaf, 'dtype') or is_prng_key(leaf) or not is_number(leaf):
        return leaf
    signs = np.random.default_rng((seed, leaf.size)).choice([-1.0, 1.0], leaf.shape)
    unit = float(jax.numpy.finfo(leaf.dtype).eps)
    return (leaf * (1 + unit * signs)).astype(leaf.dtype)
