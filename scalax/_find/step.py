"""A step that is written for one device: its arguments, which of them hold a batch, and what it returns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from scalax._find.groups import Leaf
from scalax._tree.paths import bits_of, dtype_on_devices, leaf_shape, path_string
from scalax.errors import ArgumentError, plural

Key = tuple[str, tuple[int, ...]]
"""A leaf of the arguments: its path in its argument, and its shape."""


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A function, and what it is called with.

    Attributes:
        function: the function, of positional arguments.
        args: its arguments, trees of arrays or ShapeDtypeStructs.
        batch: the numbers of those that hold rows of a batch.
        donated: the numbers of those that it may overwrite.
        jaxpr: what it computes.
        out: its results.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    batch: frozenset[int]
    donated: frozenset[int]
    jaxpr: Any
    out: Any

    @property
    def name(self) -> str:
        """The name of the function."""
        return str(getattr(self.function, '__name__', type(self.function).__name__))

    @property
    def leaves(self) -> list[Leaf | None]:
        """The leaves of its arguments in order; None for those of batches."""
        found: list[Leaf | None] = []
        for number, argument in enumerate(self.args):
            for path, leaf in jax.tree_util.tree_flatten_with_path(argument)[0]:
                shape, bits = leaf_shape(leaf) or (), bits_of(dtype_on_devices(leaf))
                found.append(None if number in self.batch else Leaf(path_string(path), shape, bits))
        return found

    @property
    def batch_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the arrays of its batches."""
        return [shape for i in self.batch for shape in self.shapes_of(i)]

    def shapes_of(self, number: int) -> list[tuple[int, ...]]:
        """The shapes of the arrays of an argument."""
        return [leaf_shape(leaf) or () for leaf in jax.tree.leaves(self.args[number])]

    def shardings(
        self, of_leaf: Callable[[Leaf], Any], of_batch: Callable[[tuple[int, ...]], Any]
    ) -> tuple[tuple[Any, ...], Any]:
        """The specs of the arguments and of the results.

        A result that is a tree like an argument lies as that one does; the compiler decides about others.

        Args:
            of_leaf: gives the spec of a leaf.
            of_batch: gives that of an array of a batch, from its shape.
        """
        leaves = iter(self.leaves)

        def spec(leaf: Any) -> Any:
            own = next(leaves)
            return of_batch(leaf_shape(leaf) or ()) if own is None else of_leaf(own)

        arguments = tuple(jax.tree.map(spec, argument) for argument in self.args)
        results = [None if like is None else arguments[like] for like in self.like]
        return arguments, self.returned(results)

    def returned(self, results: Sequence[Any]) -> Any:
        """Something for each of `results`, in the form in which the function returns these."""
        if self.one_result:
            return results[0]
        if isinstance(self.out, dict):
            return dict(zip(self.out, results, strict=True))
        return type(self.out)(*results) if hasattr(self.out, '_fields') else tuple(results)

    @property
    def one_result(self) -> bool:
        """Whether it returns one tree: no tuple or dict, or one that is like an argument."""
        return not isinstance(self.out, tuple | dict) or _kind(self.out) in map(_kind, self.args)

    @property
    def results(self) -> tuple[Any, ...]:
        """What it returns."""
        if self.one_result:
            return (self.out,)
        return tuple(self.out.values()) if isinstance(self.out, dict) else tuple(self.out)

    @property
    def like(self) -> tuple[int | None, ...]:
        """For each result the number of the argument that has the same structure, shapes and dtypes."""
        known = {_kind(argument): i for i, argument in reversed([*enumerate(self.args)])}
        return tuple(known.get(_kind(out)) for out in self.results)


def _kind(tree: Any) -> Any:
    """What two trees of the same structure, shapes and dtypes have in common."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf_shape(leaf), str(dtype_on_devices(leaf))) for leaf in leaves)


def make_step(
    function: Any, args: Any, batch_argnums: int | Sequence[int], donate_argnums: int | Sequence[int] = ()
) -> Step:
    """Traces a step.

    Raises:
        ArgumentError: it is no function, does not trace, or arguments are missing.
    """
    if not callable(function):
        raise ArgumentError(
            f'find takes a function of one device first, and its arguments, got {type(function).__name__}'
        )
    if not isinstance(args, tuple | list):
        raise ArgumentError(f'the arguments of the step are a tuple, got {type(args).__name__}')
    batch = _numbers('batch_argnums', batch_argnums, len(args))
    donated = _numbers('donate_argnums', donate_argnums, len(args))
    if not batch:
        raise ArgumentError(
            'batch_argnums says which arguments hold rows of a batch: find shards these over mesh axes, and '
            'finds how to shard the others'
        )
    try:
        jaxpr, out = jax.make_jaxpr(function, return_shape=True)(*args)
    except Exception as error:
        name = getattr(function, '__name__', type(function).__name__)
        raise ArgumentError(
            f'{name} cannot be traced for one device with these arguments: {type(error).__name__}: {error}\n'
            'Arguments are trees of arrays: bind others with functools.partial'
        ) from error
    return Step(function, tuple(args), batch, donated, jaxpr, out)


def _numbers(option: str, value: int | Sequence[int], count: int) -> frozenset[int]:
    if not isinstance(value, int | Sequence):
        raise ArgumentError(f'{option} is the number of an argument, or several, got {value!r}')
    numbers = (value,) if isinstance(value, int) else tuple(value)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or not -count <= number < count:
            raise ArgumentError(f'{option}={value!r}: the step has {plural(count, "argument")}')
    return frozenset(number % count for number in numbers)


def leaves_of(steps: Sequence[Step]) -> dict[Key, Leaf]:
    """The leaves of several steps: those of one path and shape are one.

    Raises:
        ArgumentError: leaves have one path and several shapes, so that no rule can tell them apart.
    """
    found: dict[Key, Leaf] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for step in steps:
        for leaf in filter(None, step.leaves):
            other = shapes.setdefault(leaf.path, leaf.shape)
            if other != leaf.shape and 1 not in (math.prod(other), math.prod(leaf.shape)):
                raise ArgumentError(
                    f'two arguments have a leaf {leaf.path!r}, of the shapes {other} and {leaf.shape}: a '
                    'rule looks at paths, and cannot tell them apart. Put both into one tree'
                )
            found.setdefault((leaf.path, leaf.shape), leaf)
    return found
