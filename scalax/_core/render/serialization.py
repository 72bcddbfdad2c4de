"""JSON serialization of reports and plans: dataclasses as plain values, with a version.

The reader builds each field from the type that its class declares.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import json
import os
import reprlib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from jax.sharding import PartitionSpec

from scalax._core.pytree import partition_specs
from scalax._jax.shardings import unreduced_kind, unreduced_kinds
from scalax.errors import ArgumentError, DataError

T = TypeVar('T')

_VERSION = 1  # the format version of reports and plans
_UNCONSTRAINED = 'UNCONSTRAINED'


def to_plain(value: Any) -> Any:
    """Converts a value to plain Python values, ready for ``json.dumps``.

    Args:
        value: a plain value, an enum, a PartitionSpec, a dataclass or named tuple, which may have its own
            ``to_dict``, or a tuple or mapping of these.

    Example:
        >>> to_plain({'spec': PartitionSpec(None, ('data', 'model'))})
        {'spec': [None, ['data', 'model']]}
    """
    if isinstance(value, PartitionSpec):
        return _plain_spec(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if hasattr(value, 'to_dict'):
        return value.to_dict()
    if dataclasses.is_dataclass(value) or hasattr(value, '_asdict'):
        kind: Any = type(value)
        return {name: to_plain(getattr(value, name)) for name in _fields(kind)}
    return [to_plain(item) for item in value] if isinstance(value, tuple) else value


def write(values: Mapping[str, Any]) -> str:
    """Returns JSON with the version, and a line for each item and for each dict in a list."""
    lines = []
    for key, value in {'version': _VERSION, **values}.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ',\n'.join(f'  {json.dumps(row)}' for row in value)
            text = f'[\n{rows}\n]'
        lines.append(f'{json.dumps(key)}: {text}')
    return '{\n' + ',\n'.join(lines) + '\n}\n'


def read(kind: type[T], text_or_path: str | os.PathLike[str], noun: str) -> T:
    """Reads a value that `write` has written.

    Args:
        kind: the class of the value. Its properties may be in the file too, and are not read.
        text_or_path: the JSON itself, or the path of a file that holds it.
        noun: the name of the value in messages, such as ``'report'``.

    Raises:
        DataError: the file holds something else, or another version, or cannot be read.
        FileNotFoundError: there is no such file.
        ArgumentError: *text_or_path* is neither text nor a path.
    """
    if not isinstance(text_or_path, str | os.PathLike):
        raise ArgumentError(
            f'{kind.__name__}.load takes text, or the path of a file, got {type(text_or_path).__name__}: '
            f'pass the result of {noun}.to_json(), or the path of its file'
        )
    is_text = isinstance(text_or_path, str) and text_or_path.lstrip()[:1] in ('', '{')
    name = 'the text' if is_text else repr(os.fspath(text_or_path))
    try:
        values = json.loads(str(text_or_path) if is_text else Path(text_or_path).read_bytes())
        version = values['version']
    except FileNotFoundError:
        raise  # a golden file may not exist yet
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f'{name} is not the JSON of a {noun}: {error}') from error
    except (LookupError, TypeError) as error:
        raise DataError(f'{name} is not the JSON of a {noun}: it has no version') from error
    if version != _VERSION:
        raise DataError(
            f'{name} is a {noun} of version {reprlib.repr(version)}, this scalax reads version '
            f'{_VERSION}: write it again with {noun}.to_json()'
        )
    try:
        return typing.cast(T, _build(kind, values))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        why = f'it has no {error}' if isinstance(error, LookupError) else error
        raise DataError(
            f'{name} is not a complete {noun}: {why}. If another release of scalax wrote it, write it again '
            f'with {noun}.to_json()'
        ) from error


def _build(kind: Any, values: Any) -> Any:
    """Builds a dataclass or named tuple from plain values."""
    return kind(**{name: _value(field, values[name]) for name, field in _fields(kind).items()})


@functools.cache
def _fields(kind: Any) -> dict[str, Any]:
    """Returns the fields of a class: name -> type."""
    hints = typing.get_type_hints(kind)
    return {name: hints[name] for name in inspect.signature(kind).parameters}


def _value(kind: Any, value: Any) -> Any:
    """Converts a plain value to the type *kind*."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is PartitionSpec:
        return _spec(value)
    if origin is types.UnionType:  # a type or None
        return None if value is None else _value(arguments[0], value)
    if origin is tuple:
        return tuple(_value(arguments[0], item) for item in _checked(list, value))
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f'{reprlib.repr(value)} is none of {", ".join(map(repr, arguments))}')
        return value
    if kind in (str, int, bool, float):
        return _checked(kind, value)
    if origin is not None:  # a mapping
        return {key: _value(arguments[1], item) for key, item in value.items()}
    return kind(value) if issubclass(kind, enum.Enum) else _build(kind, value)


def _checked(kind: type, value: Any) -> Any:
    """Checks the type of a value. Integers are accepted as floats: other writers drop ``.0``."""
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ValueError(f'{reprlib.repr(value)} is not of type {kind.__name__}')
    return value


def _plain_spec(spec: PartitionSpec) -> Any:
    """Converts a spec to its entries; with unreduced and reduced axes, to a dict.

    Raises:
        DataError: a mesh axis has the name that stands for `PartitionSpec.UNCONSTRAINED`.
    """
    if _UNCONSTRAINED in partition_specs.spec_axes(spec):
        raise DataError(
            f'{spec} cannot be written: {_UNCONSTRAINED!r} stands for PartitionSpec.UNCONSTRAINED'
        )
    entries = [
        _UNCONSTRAINED if entry is partition_specs.UNCONSTRAINED else entry
        for entry in partition_specs.entries(spec)
    ]
    written = [list(entry) if isinstance(entry, tuple) else entry for entry in entries]
    if not spec.unreduced and not spec.reduced:
        return written
    kind = unreduced_kind(spec)
    sums = {'unreduced': sorted(spec.unreduced), 'reduced': sorted(spec.reduced)}
    return {'entries': written, **sums, **({} if kind == 'sum' else {'unreduced_kind': kind})}


def _spec(value: Any) -> PartitionSpec:
    """Converts plain entries, or a dict, to a spec."""
    written = value if isinstance(value, dict) else {'entries': value}
    sums: dict[str, Any] = {name: frozenset(written.get(name, ())) for name in ('unreduced', 'reduced')}
    if 'unreduced_kind' in written:
        sums['unreduced_kind'] = unreduced_kinds()[written['unreduced_kind']]
    entries = [tuple(entry) if isinstance(entry, list) else entry for entry in written['entries']]
    return PartitionSpec(
        *(partition_specs.UNCONSTRAINED if entry == _UNCONSTRAINED else entry for entry in entries), **sums
    )
