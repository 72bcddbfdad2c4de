"""Reports and plans as JSON: dataclasses as plain values with a version, and a strict reader of them.

The reader builds each field from the type that its class declares. Files may be damaged or hostile.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import json
import os
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from jax.sharding import PartitionSpec

from scalax._jax.shardings import kinds_of_sums, sums_kind
from scalax._tree import specs
from scalax._util import strict_json
from scalax.errors import ArgumentError, DataError

T = TypeVar('T')

_VERSION = 1  # of reports, and of plans
_MOST = 1 << 128  # bytes and flops are fewer
_UNCONSTRAINED = 'UNCONSTRAINED'


_ENTRIES = tuple[str | tuple[str, ...] | None, ...]


class _Spec(NamedTuple):
    """A PartitionSpec as it is written; without unreduced and reduced axes, its entries alone."""

    entries: _ENTRIES
    unreduced: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()
    unreduced_kind: str = 'sum'


def plain(value: Any) -> Any:
    """A value in plain Python values, ready for ``json.dumps``.

    Args:
        value: a plain value, an enum, a PartitionSpec; a dataclass or named tuple, which may have its own
            ``to_dict``; or a tuple or mapping of these.

    Raises:
        DataError: a PartitionSpec names an axis that cannot be written.

    Example:
        >>> plain({'spec': PartitionSpec(None, ('data', 'model'))})
        {'spec': [None, ['data', 'model']]}
    """
    if isinstance(value, PartitionSpec):
        return _plain_spec(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if hasattr(value, 'to_dict'):
        return value.to_dict()
    if dataclasses.is_dataclass(value) or hasattr(value, '_asdict'):
        kind: Any = type(value)
        return {name: plain(getattr(value, name)) for name in _fields(kind)}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def _plain_spec(spec: PartitionSpec) -> Any:
    if _UNCONSTRAINED in specs.spec_axes(spec):
        raise DataError(
            f'{specs.text(spec)} cannot be written as JSON, where {_UNCONSTRAINED!r} leaves a dimension to '
            'the compiler: give the mesh axis another name'
        )
    written = _Spec(
        tuple(_UNCONSTRAINED if entry is specs.UNCONSTRAINED else entry for entry in specs.entries(spec)),
        tuple(sorted(spec.unreduced)),
        tuple(sorted(spec.reduced)),
        sums_kind(spec),
    )
    if not spec.unreduced and not spec.reduced:
        return plain(written.entries)
    values = plain(written)
    if written.unreduced_kind == 'sum':
        del values['unreduced_kind']
    return values


def write(values: Mapping[str, Any]) -> str:
    """The JSON of plain values and the version, with a line for each item, and for each dict in a list."""
    lines = []
    for key, value in {'version': _VERSION, **values}.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ',\n'.join(f'  {json.dumps(row)}' for row in value)
            text = f'[\n{rows}\n]'
        lines.append(f'{json.dumps(key)}: {text}')
    return '{\n' + ',\n'.join(lines) + '\n}\n'


def read(kind: type[T], text_or_path: str | os.PathLike[str], what: str) -> T:
    """The value that was written.

    Args:
        kind: its class. What it computes (its properties) may be in the file too, and is not read.
        text_or_path: the JSON itself, or the path of a file of it.
        what: what it is called in messages, such as ``'report'``.

    Raises:
        DataError: the file holds something else, or another version, or cannot be read.
        FileNotFoundError: there is no such file.
        ArgumentError: *text_or_path* is neither text nor a path.
    """
    if not isinstance(text_or_path, str | os.PathLike):
        raise ArgumentError(
            f'{kind.__name__}.load takes text, or the path of a file, got {type(text_or_path).__name__}: '
            f'give it what {what}.to_json() returns, or where that was written'
        )
    is_text = isinstance(text_or_path, str) and _is_json(text_or_path)
    name = 'the text' if is_text else repr(os.fspath(text_or_path))
    try:
        values = _parsed(text_or_path if is_text else strict_json.read(text_or_path))
    except FileNotFoundError:
        raise  # a golden file may not exist yet
    except (OSError, ValueError) as error:
        raise DataError(f'{name} is not the JSON of a {what}: {strict_json.reason(error)}') from error
    version = values.pop('version')
    if type(version) is not int or version != _VERSION:
        raise DataError(
            f'{name} is a {what} of version {strict_json.brief(version)}, this scalax reads version '
            f'{_VERSION}: write it anew with {what}.to_json()'
        )
    try:
        return typing.cast(T, built(kind, values, ''))
    except ValueError as error:
        raise DataError(f'{name} is not a whole {what}: {error}') from error


def _is_json(text: str) -> bool:
    """Whether this is JSON, perhaps damaged, and not a path: empty, an object, a list, or several lines."""
    stripped = text.strip()
    return stripped[:1] in ('', '{') or stripped[:1] + stripped[-1:] == '[]' or '\n' in text


def _parsed(text: Any) -> dict[str, Any]:
    if not text.strip():
        raise ValueError('it is empty')
    values = strict_json.parse(text)
    if not isinstance(values, dict) or 'version' not in values:
        raise ValueError('it has no version')
    return values


def built(kind: Any, values: object, where: str) -> Any:
    """A dataclass or named tuple of plain values.

    Args:
        kind: its class.
        values: what JSON has of it.
        where: names them in messages; ``''`` for all of the file.

    Raises:
        ValueError: they are not values of that class.
    """
    given, declared = _of(dict, values, where), _fields(kind)
    for name, (_, needed) in declared.items():
        if needed and name not in given:
            raise ValueError(f'{where or "it"} has no {name!r}')
    # Reports inside of plans have a version, too.
    computed = {name for name in given if isinstance(getattr(kind, name, None), property)} | {'version'}
    more = sorted(given.keys() - declared.keys() - computed)
    if more:
        raise ValueError(f'{where or "it"} has what none of this version has: {strict_json.brief(more)}')
    fields = {
        name: _value(field, given[name], f'{where}.{name}' if where else name)
        for name, (field, _) in declared.items()
        if name in given
    }
    return kind(**fields)


@functools.cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """The fields of a class: name -> its type, and whether it has no default."""
    hints = typing.get_type_hints(kind)
    parameters = inspect.signature(kind).parameters.values()
    return {one.name: (hints[one.name], one.default is inspect.Parameter.empty) for one in parameters}


def _value(kind: Any, value: object, where: str) -> Any:
    """A plain value as a value of the type *kind*."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is PartitionSpec:
        return _spec(value, where)
    if origin is types.UnionType:
        if value is None and types.NoneType in arguments:
            return None
        sequences = [one for one in arguments if typing.get_origin(one) is tuple]
        return _value(sequences[0] if sequences and isinstance(value, list) else arguments[0], value, where)
    if origin is tuple:
        items = enumerate(_of(list, value, where))
        return tuple(_value(arguments[0], item, f'{where}[{number}]') for number, item in items)
    if origin is not None and origin is not Literal:  # a mapping
        return {
            key: _value(arguments[1], item, f'{where}[{strict_json.brief(key)}]')
            for key, item in _of(dict, value, where).items()
        }
    if origin is Literal or issubclass(kind, enum.Enum):
        known = arguments or tuple(item.value for item in kind)
        if value not in known:
            raise ValueError(f'{where} is none of {", ".join(map(repr, known))}: {strict_json.brief(value)}')
        return value if arguments else kind(value)
    if kind not in (str, int, bool):
        return built(kind, value, where)
    if kind is int and not 0 <= _of(int, value, where) < _MOST:
        raise ValueError(f'{where} is not a number from 0 to 2**128: {strict_json.brief(value)}')
    return _of(kind, value, where)


def _of(kind: type[T], value: object, where: str) -> T:
    """*value*, if it is of that type."""
    if type(value) is not kind:
        raise ValueError(f'{where} is not of type {kind.__name__}: {strict_json.brief(value)}')
    return value


def _spec(value: object, where: str) -> PartitionSpec:
    is_dict = isinstance(value, dict)
    written = built(_Spec, value, where) if is_dict else _Spec(_value(_ENTRIES, value, where))
    sums: dict[str, Any] = {'unreduced': frozenset(written.unreduced), 'reduced': frozenset(written.reduced)}
    if written.unreduced_kind != 'sum':
        kinds = kinds_of_sums()
        if written.unreduced_kind not in kinds:
            unknown = strict_json.brief(written.unreduced_kind)
            raise ValueError(f'{where}.unreduced_kind is none of this JAX: {unknown}')
        sums['unreduced_kind'] = kinds[written.unreduced_kind]
    entries = (specs.UNCONSTRAINED if entry == _UNCONSTRAINED else entry for entry in written.entries)
    try:
        return PartitionSpec(*entries, **sums)
    except (TypeError, ValueError) as error:
        raise ValueError(f'{where} is no PartitionSpec: {error}') from error
