"""A step that is written for one device: its arguments, which of them hold a batch, and what it returns."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from scalax._compile.call.signature import name_of
from scalax._compile.sjit.function import SjitFunction
from scalax._core.pytree.paths import dtype_on_devices, element_bits, leaf_shape, path_string, tree_type
from scalax.errors import ArgumentError, plural


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of the arguments that are not batches. Those of one path and shape are one.

    Attributes:
        path: its path in its argument.
        shape: its shape.
        bits: those of an element.
    """

    path: str
    shape: tuple[int, ...]
    bits: int = dataclasses.field(compare=False)

    @property
    def bytes(self) -> int:
        """Its bytes, on all devices together."""
        return -(-math.prod(self.shape) * self.bits // 8)


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
        return name_of(self.function)

    @functools.cached_property
    def leaves(self) -> list[Leaf | None]:
        """The leaves of its arguments in order; None for those of batches."""
        return [
            None if number in self.batch else _leaf(path, leaf)
            for number, argument in enumerate(self.args)
            for path, leaf in jax.tree.leaves_with_path(argument)
        ]

    @property
    def batch_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the arrays of its batches."""
        return [leaf_shape(leaf) or () for i in self.batch for leaf in jax.tree.leaves(self.args[i])]

    def arguments(
        self, of_leaf: Callable[[Leaf], Any], of_batch: Callable[[tuple[int, ...]], Any]
    ) -> tuple[Any, ...]:
        """The arguments with something else for each leaf.

        Args:
            of_leaf: what there is for a leaf.
            of_batch: what there is for an array of a batch, from its shape.
        """
        return tuple(
            jax.tree.map(lambda leaf: of_batch(leaf_shape(leaf) or ()), argument)
            if number in self.batch
            else jax.tree.map_with_path(lambda *leaf: of_leaf(_leaf(*leaf)), argument)
            for number, argument in enumerate(self.args)
        )

    def returned(self, arguments: Sequence[Any]) -> Any:
        """What the function returns, with one of *arguments* for each result, or None.

        A result that is a tree like an argument is where that one is; the compiler decides about others.
        """
        kinds = [tree_type(argument) for argument in self.args]

        def given(result: Any) -> Any:
            kind = tree_type(result)
            return arguments[kinds.index(kind)] if kind in kinds else None

        if not isinstance(self.out, tuple | dict) or tree_type(self.out) in kinds:
            return given(self.out)
        return jax.tree.map(given, self.out, is_leaf=lambda each: each is not self.out)


def _leaf(path: Any, leaf: Any) -> Leaf:
    return Leaf(path_string(path), leaf_shape(leaf) or (), element_bits(dtype_on_devices(leaf)))


def make_step(
    function: Any, args: Any, batch_argnums: int | Sequence[int], donate_argnums: int | Sequence[int] = ()
) -> Step:
    """Traces a step.

    Raises:
        ArgumentError: it is no function, does not trace, or arguments are missing.
    """
    if not callable(function):
        raise ArgumentError(
            f'autoshard takes a function for one device and its arguments, got {type(function).__name__}'
        )
    name = name_of(function)
    if isinstance(function, SjitFunction):
        raise ArgumentError(
            f'{name} is already compiled for the mesh of a helper: pass the function itself, which autoshard '
            'compiles for one mesh after another'
        )
    if not isinstance(args, tuple | list):
        raise ArgumentError(f'the arguments of the step have to be a tuple, got {type(args).__name__}')
    batch = _numbers('batch_argnums', batch_argnums, len(args))
    donated = _numbers('donate_argnums', donate_argnums, len(args))
    if not batch:
        raise ArgumentError(
            'batch_argnums has to name the arguments that hold a batch: autoshard shards these along the '
            'batch dimension, and finds a rule for the others'
        )
    try:
        jaxpr, out = jax.make_jaxpr(function, return_shape=True)(*args)
    except Exception as error:
        raise ArgumentError(
            f'{name} cannot be traced for one device with these arguments: {type(error).__name__}: {error}\n'
            'Arguments are trees of arrays: bind others with functools.partial'
        ) from error
    return Step(function, tuple(args), batch, donated, jaxpr, out)


def _numbers(option: str, value: int | Sequence[int], count: int) -> frozenset[int]:
    if not isinstance(value, int | Sequence):
        raise ArgumentError(f'{option} has to be the number of an argument, or several, got {value!r}')
    numbers = (value,) if isinstance(value, int) else tuple(value)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or not -count <= number < count:
            raise ArgumentError(f'{option}={value!r}: the step has {plural(count, "argument")}')
    return frozenset(number % count for number in numbers)


def leaves_of(step: Step) -> list[Leaf]:
    """The leaves of a step that are not those of batches, each once.

    Raises:
        ArgumentError: leaves have one path and several shapes, so that no rule can tell them apart.
    """
    leaves = list(dict.fromkeys(leaf for leaf in step.leaves if leaf is not None))
    shapes: dict[str, tuple[int, ...]] = {}
    for leaf in leaves:
        other = shapes.setdefault(leaf.path, leaf.shape)
        if other != leaf.shape and 1 not in (math.prod(other), math.prod(leaf.shape)):
            raise ArgumentError(
                f'two arguments have a leaf {leaf.path!r}, with the shapes {other} and {leaf.shape}: a rule '
                'cannot tell them apart by their paths. Put both into one tree'
            )
    return leaves
