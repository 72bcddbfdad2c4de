"""Numbers that may be made smaller: those of a configuration, and the sizes of dimensions of arguments."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from scalax._jax.equations import loop_of
from scalax._jaxprs.dimensions import Dimensions, Numbers
from scalax._tree.paths import dtype_on_devices

Values = dict[str, int]

_NO_SIZE = 2**31  # as many tokens as a model is trained with


def numbers_of(config: Any, name: str = '') -> Iterator[tuple[str, int]]:
    """The numbers of a configuration that may be sizes, with their names."""
    if type(config) is int and 1 < config < _NO_SIZE:  # neither booleans nor members of enumerations
        yield name, config
    for key, part in _parts(config):
        yield from numbers_of(part, f'{name}.{key}' if name else str(key))


def _parts(config: Any) -> Iterator[tuple[Any, Any]]:
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        yield from (
            (each.name, getattr(config, each.name)) for each in dataclasses.fields(config) if each.init
        )
    elif isinstance(config, Mapping):
        yield from config.items()
    elif isinstance(config, tuple | list):
        yield from enumerate(config)


def with_numbers(config: Any, values: Mapping[str, int], name: str = '') -> Any:
    """The configuration with other numbers."""
    parts = {
        key: with_numbers(part, values, f'{name}.{key}' if name else str(key)) for key, part in _parts(config)
    }
    if not any(parts[key] is not part for key, part in _parts(config)):
        return values.get(name, config) if isinstance(config, int) else config
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.replace(config, **parts)
    if isinstance(config, Mapping):
        return type(config)(parts)  # type: ignore[call-arg]
    made = type(config)
    return made(*parts.values()) if hasattr(config, '_fields') else made(parts.values())


class _Dimensions(Dimensions):
    """Those of all stacks that a loop runs over are one."""

    def loop(self, equation: Any, operands: Sequence[Numbers]) -> Sequence[Numbers]:
        results = super().loop(equation, operands)
        loop = loop_of(equation)
        first, *others = [
            each[0] for each in (*loop.parts(operands)[2], *results[loop.carried :]) if each
        ] or [0]
        for other in others:
            self.classes.unite(first, other)
        return results


class Sizes:
    """The sizes of dimensions of arguments. Those that are one are one number, in which they are multiples.

    Args:
        jaxpr: what is computed of the arguments.
        names: what the arrays among them are called.
        args: the arguments.

    Attributes:
        values: the numbers, by name.
    """

    def __init__(self, jaxpr: Any, names: Sequence[str], args: Sequence[Any]) -> None:
        self._args = tuple(args)
        arrays = [leaf for leaf in jax.tree.leaves(self._args) if is_array(leaf)]
        found = _Dimensions(jaxpr)
        classes: dict[int, dict[tuple[int, int], int]] = {}
        for i, (numbers, leaf) in enumerate(zip(found.arguments, arrays, strict=True)):
            for dim, (number, size) in enumerate(zip(numbers, leaf.shape, strict=True)):
                classes.setdefault(found.classes.root(number), {})[i, dim] = size
        self.values: Values = {}
        self._multiples: dict[tuple[int, int], tuple[str, int]] = {}
        for places in classes.values():
            i, dim = next(iter(places))
            unit, name = math.gcd(*places.values()), f'dimension {dim} of {names[i]}'
            if unit > 1:
                self.values[name] = unit
                self._multiples |= {place: (name, size // unit) for place, size in places.items()}

    def args(self, values: Mapping[str, int], mesh: Any) -> tuple[Any, ...]:
        """The arguments as ShapeDtypeStructs of other sizes, over another mesh."""
        count = itertools.count()

        def smaller(leaf: Any) -> Any:
            if not is_array(leaf):
                return leaf
            i, shape = next(count), [*leaf.shape]
            for dim, _ in enumerate(shape):
                if (i, dim) in self._multiples:
                    name, times = self._multiples[i, dim]
                    shape[dim] = times * values[name]
            own = getattr(leaf, 'sharding', None)
            placed = NamedSharding(mesh, own.spec) if isinstance(own, NamedSharding) else None
            return jax.ShapeDtypeStruct(tuple(shape), dtype_on_devices(leaf), sharding=placed)

        return jax.tree.map(smaller, self._args)


def is_array(leaf: Any) -> bool:
    """Whether a leaf of arguments has a shape; others are static."""
    return hasattr(leaf, 'shape') and hasattr(leaf, 'dtype')
