"""A step written for one device: its trace, its arguments and the batches among them, and its results."""

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
    """A leaf of the arguments that are not batches. Leaves with equal paths and shapes are equal.

    Attributes:
        path: its path in its argument.
        shape: its shape.
        bits: the bits of an element.
    """

    path: str
    shape: tuple[int, ...]
    bits: int = dataclasses.field(compare=False)

    @property
    def bytes(self) -> int:
        """The bytes of the global array."""
        return -(-math.prod(self.shape) * self.bits // 8)


@dataclasses.dataclass(frozen=True, eq=False)
class TracedStep:
    """A step with its arguments, traced for one device.

    Attributes:
        function: the function, which takes positional arguments.
        args: its arguments: trees of arrays or ShapeDtypeStructs.
        batch_argnums: the indices of the arguments that hold a batch.
        donate_argnums: the indices of the arguments that it may overwrite.
        jaxpr: its jaxpr.
        out: its results, as ShapeDtypeStructs.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    batch_argnums: frozenset[int]
    donate_argnums: frozenset[int]
    jaxpr: Any
    out: Any

    @property
    def name(self) -> str:
        """The name of the function."""
        return name_of(self.function)

    @functools.cached_property
    def leaves(self) -> list[Leaf | None]:
        """The leaves of all arguments in order; None for leaves of batches."""
        return [
            None if i in self.batch_argnums else _leaf(path, leaf)
            for i, argument in enumerate(self.args)
            for path, leaf in jax.tree.leaves_with_path(argument)
        ]

    @property
    def batch_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the arrays of the batches."""
        return [leaf_shape(leaf) or () for i in self.batch_argnums for leaf in jax.tree.leaves(self.args[i])]

    def map_arguments(
        self, map_leaf: Callable[[Leaf], Any], map_batch: Callable[[tuple[int, ...]], Any]
    ) -> tuple[Any, ...]:
        """Maps the leaves of the arguments.

        Args:
            map_leaf: maps a leaf of an argument that is not a batch.
            map_batch: maps the shape of an array of a batch.
        """
        return tuple(
            jax.tree.map(lambda leaf: map_batch(leaf_shape(leaf) or ()), argument)
            if i in self.batch_argnums
            else jax.tree.map_with_path(lambda *leaf: map_leaf(_leaf(*leaf)), argument)
            for i, argument in enumerate(self.args)
        )

    def map_results(self, mapped_arguments: Sequence[Any]) -> Any:
        """Returns the results with each tree replaced by the mapped argument of the same structure and types.

        Results without such an argument become None: the compiler chooses their shardings.
        """
        types = [tree_type(argument) for argument in self.args]

        def matching_argument(result: Any) -> Any:
            result_type = tree_type(result)
            return mapped_arguments[types.index(result_type)] if result_type in types else None

        if not isinstance(self.out, tuple | dict) or tree_type(self.out) in types:
            return matching_argument(self.out)
        return jax.tree.map(matching_argument, self.out, is_leaf=lambda tree: tree is not self.out)


def _leaf(path: Any, leaf: Any) -> Leaf:
    return Leaf(path_string(path), leaf_shape(leaf) or (), element_bits(dtype_on_devices(leaf)))


def trace_step(
    function: Any, args: Any, batch_argnums: int | Sequence[int], donate_argnums: int | Sequence[int] = ()
) -> TracedStep:
    """Traces a step for one device.

    Raises:
        ArgumentError: *function* is not a function or cannot be traced, or an option is invalid.
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
    batch = _argnums('batch_argnums', batch_argnums, len(args))
    donated = _argnums('donate_argnums', donate_argnums, len(args))
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
            'Arguments have to be trees of arrays: bind others with functools.partial'
        ) from error
    return TracedStep(function, tuple(args), batch, donated, jaxpr, out)


def _argnums(option: str, value: int | Sequence[int], count: int) -> frozenset[int]:
    if not isinstance(value, int | Sequence):
        raise ArgumentError(f'{option} has to be the index of an argument, or several, got {value!r}')
    argnums = (value,) if isinstance(value, int) else tuple(value)
    for argnum in argnums:
        if isinstance(argnum, bool) or not isinstance(argnum, int) or not -count <= argnum < count:
            raise ArgumentError(f'{option}={value!r}: the step has {plural(count, "argument")}')
    return frozenset(argnum % count for argnum in argnums)


def unique_leaves(step: TracedStep) -> list[Leaf]:
    """Returns the leaves of a step, except those of batches, and only one of several equal leaves.

    Raises:
        ArgumentError: leaves have one path and several shapes, so that a rule cannot tell them apart.
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
