"""Numbers that may be sizes: those of a configuration, and the dimensions of arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from scalax._tree.paths import dtype_on_devices
from scalax._verify.sides import is_array

Sizes = Mapping[int, int]
"""Of each number the one in its place."""

_NO_SIZE = 2**31  # as many tokens as a model is trained with


def numbers_of(config: Any, name: str = '') -> Iterator[tuple[str, int]]:
    """The numbers of a configuration that may be sizes, with their names."""
    if type(config) is int and 1 < config < _NO_SIZE:  # neither booleans nor members of enumerations
        yield name, config
    for key, part in _parts(config).items():
        yield from numbers_of(part, f'{name}.{key}' if name else str(key))


def _parts(config: Any) -> Mapping[Any, Any]:
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {each.name: getattr(config, each.name) for each in dataclasses.fields(config) if each.init}
    if isinstance(config, tuple | list):
        return dict(enumerate(config))
    return config if isinstance(config, Mapping) else {}


def with_sizes(config: Any, sizes: Sizes) -> Any:
    """The configuration with other numbers in the place of some."""
    before = _parts(config)
    parts = {key: with_sizes(part, sizes) for key, part in before.items()}
    if all(parts[key] is before[key] for key in parts):
        return sizes.get(config, config) if type(config) is int else config
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.replace(config, **parts)
    if isinstance(config, Mapping):
        return type(config)(parts)  # type: ignore[call-arg]
    return type(config)(*parts.values()) if hasattr(config, '_fields') else type(config)(parts.values())


def resized(args: Sequence[Any], sizes: Sizes, mesh: Any) -> tuple[Any, ...]:
    """Arguments as ShapeDtypeStructs with other dimensions in the place of some, over another mesh."""

    def smaller(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        own = getattr(leaf, 'sharding', None)
        placed = NamedSharding(mesh, own.spec) if isinstance(own, NamedSharding) else None
        shape = tuple([sizes.get(size, size) for size in leaf.shape])
        return jax.ShapeDtypeStruct(shape, dtype_on_devices(leaf), sharding=placed)

    return jax.tree.map(smaller, tuple(args))
