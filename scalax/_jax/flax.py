"""Boxes of flax and haliax around arrays, and modules of flax.nnx.

None of the libraries is imported: their objects are recognized by the names of their class and of the package
that defines it. The modules change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any


def _linen_names(box: Any) -> Any:
    return getattr(box, 'names', None)  # a user's own box class may have none


def _nnx_names(variable: Any) -> Any:
    metadata = variable.get_metadata()
    # The first is flax's current name; the others are from older versions.
    keys = ('out_sharding', 'sharding_names', 'sharding')
    names = next((metadata[key] for key in keys if metadata.get(key)), None)
    return getattr(names, 'spec', names)  # a NamedSharding too


def _haliax_names(array: Any) -> Any:
    return [axis.name for axis in array.axes]


_READERS: dict[tuple[str, str], Callable[[Any], Iterable[Any] | None]] = {
    ('flax', 'AxisMetadata'): _linen_names,
    ('flax', 'Variable'): _nnx_names,
    ('flax', 'VariableState'): _nnx_names,
    ('haliax', 'NamedArray'): _haliax_names,
}


def is_box(node: Any) -> bool:
    """Returns whether a node of a tree is another library's box around an array.

    Relies on the class being, or extending, one of `_READERS`.
    """
    kind: Any = type(node)  # to mypy, a class of unknown metaclass is not hashable
    return _reader(kind) is not None


def names_of_box(box: Any) -> Iterable[Any] | None:
    """Returns the names of the dimensions of a box, as its library has them; None if it has none.

    Relies on *names* of linen's boxes, `get_metadata` of nnx variables, *axes* of NamedArrays.
    """
    kind: Any = type(box)
    reader = _reader(kind)
    assert reader is not None
    return reader(box)


@functools.lru_cache(maxsize=1024)
def _reader(kind: type) -> Callable[[Any], Iterable[Any] | None] | None:
    class_names = [(base.__module__.partition('.')[0], base.__qualname__) for base in kind.__mro__]
    return next((_READERS[name] for name in class_names if name in _READERS), None)


def module_class(nnx: Any) -> Any:
    """The class of modules and of other objects of ``flax.nnx``. Relies on *Pytree*, before *Object*."""
    return getattr(nnx, 'Pytree', None) or nnx.Object
