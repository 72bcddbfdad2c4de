"""How does a report become text, and come back? JSON that reads well as a golden file: a line a leaf."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jax.sharding import PartitionSpec

from scalax import _spec
from scalax.errors import ArgumentError, DataError
from scalax.explain._rows import ReportRow

VERSION = 1
_UNCONSTRAINED = 'UNCONSTRAINED'
_KINDS: Mapping[str, type[object]] = {
    **dict.fromkeys(('path', 'dtype', 'rule', 'reason'), str),
    **dict.fromkeys(('bytes', 'bytes_per_device'), int),
    'shape': list,
}

T = TypeVar('T')


def plain_row(row: ReportRow) -> dict[str, Any]:
    """A row in plain Python values."""
    values = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    return {**values, 'shape': list(row.shape), 'spec': None if row.spec is None else plain_spec(row.spec)}


def plain_spec(spec: PartitionSpec) -> Any:
    """A spec in plain Python values: a list; with unreduced or reduced axes, a dict.

    Example:
        >>> plain_spec(PartitionSpec(None, ('data', 'model')))
        [None, ['data', 'model']]
    """
    entries = [
        list(entry) if isinstance(entry, tuple) else _UNCONSTRAINED if entry is _spec.UNCONSTRAINED else entry
        for entry in _spec.entries(spec)
    ]
    if not spec.unreduced and not spec.reduced:
        return entries
    return {'entries': entries, 'unreduced': sorted(spec.unreduced), 'reduced': sorted(spec.reduced)}


def write(values: Mapping[str, Any]) -> str:
    """The text of a report's plain values: an item a line, and a line for each row."""
    items = {'version': VERSION, **values}
    lines = []
    for key, value in items.items():
        if key == 'rows' and value:
            rows = ',\n'.join(f'  {json.dumps(row)}' for row in value)
            lines.append(f'"rows": [\n{rows}\n]')
        else:
            lines.append(f'{json.dumps(key)}: {json.dumps(value)}')
    return '{\n' + ',\n'.join(lines) + '\n}\n'


def read(text_or_path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of the report that was written. Totals are for people; they follow from the rows.

    Raises:
        DataError: this is no report, or one of another version.
        ArgumentError: it is neither text nor a path.
    """
    values, name = loaded(text_or_path, 'report', 'ShardingReport', VERSION)
    try:
        mesh = {
            str(axis): _of(int, size, 'a size of the mesh')
            for axis, size in _of(dict, values['mesh'], 'mesh').items()
        }
        rows = tuple(_row(_of(dict, row, 'a row'), mesh) for row in _of(list, values['rows'], 'rows'))
        idle = {
            kind: tuple(_of(str, regex, f'one of {kind}') for regex in _of(list, values[kind], kind))
            for kind in ('unused_rules', 'shadowed_rules')
        }
    except KeyError as error:
        raise DataError(f'{name} is not a whole report: it has no {error}') from error
    except TypeError as error:
        raise DataError(f'{name} is not a whole report: {error}') from error
    return {'rows': rows, 'mesh': mesh, **idle}


def loaded(
    text_or_path: str | os.PathLike[str], what: str, owner: str, version: int
) -> tuple[dict[str, Any], str]:
    """The items of what was written, and what to call it in messages.

    Args:
        text_or_path: the JSON itself, or the path of a file of it.
        what: what it is of, such as ``'report'``.
        owner: the class whose ``load`` was called.
        version: the version that is read.

    Raises:
        DataError: it is none, or one of another version.
        ArgumentError: it is neither text nor a path.
    """
    text, name = _text_and_name(text_or_path, what, owner)
    if not text.strip():
        raise DataError(f'{name} is not the JSON of a {what}: it is empty')
    try:
        values = json.loads(text)
    except ValueError as error:
        raise DataError(f'{name} is not the JSON of a {what}: {error}') from error
    if not isinstance(values, dict) or 'version' not in values:
        raise DataError(f'{name} is not the JSON of a {what}: it has no version')
    if values['version'] != version:
        raise DataError(
            f'{name} is a {what} of version {values["version"]!r}, this scalax reads version {version}: '
            f'write it anew with {what}.to_json()'
        )
    return values, name


def _text_and_name(text_or_path: str | os.PathLike[str], what: str, owner: str) -> tuple[str, str]:
    if not isinstance(text_or_path, str | os.PathLike):
        raise ArgumentError(
            f'{owner}.load takes text, or the path of a file, got {type(text_or_path).__name__}: '
            f'give it what {what}.to_json() returns, or where that was written'
        )
    # Text begins with a brace, or (where it is damaged) is empty, a list or of several lines; no sensible
    # path is.
    if isinstance(text_or_path, str):
        stripped = text_or_path.strip()
        ends = stripped[:1] + stripped[-1:]
        if ends[:1] in ('', '{') or ends == '[]' or '\n' in text_or_path:
            return text_or_path, 'the text'
    name = repr(os.fspath(text_or_path))
    try:
        return Path(text_or_path).read_text(encoding='utf-8'), name
    except UnicodeDecodeError as error:
        raise DataError(f'{name} is not the JSON of a {what}: {error}') from error


def _of(kind: type[T], value: object, what: str) -> T:
    """*value*, which is of that kind, or else no part of a report."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f'{what} is not of type {kind.__name__}: {value!r}')
    return value


def _row(values: Mapping[str, Any], mesh: Container[str]) -> ReportRow:
    spec = values['spec']
    for key, kind in _KINDS.items():
        _of(kind, values[key], key)
    row = {
        **values,
        'shape': tuple(_of(int, size, 'a size of shape') for size in values['shape']),
        'spec': None if spec is None else _parsed_spec(spec, mesh),
    }
    if row.get('memory_kind') is not None:
        _of(str, row['memory_kind'], 'memory_kind')
    return ReportRow(**row)


def _parsed_spec(spec: Any, mesh: Container[str]) -> PartitionSpec:
    rest = {}
    if isinstance(spec, dict):
        rest = {kind: frozenset(spec[kind]) for kind in ('unreduced', 'reduced')}
        spec = spec['entries']
    for entry in _of(list, spec, 'spec'):
        for axis in entry if isinstance(entry, list) else [] if entry is None else [entry]:
            _of(str, axis, 'an axis of spec')
    return PartitionSpec(
        *[
            tuple(entry)
            if isinstance(entry, list)
            else _spec.UNCONSTRAINED
            if entry == _UNCONSTRAINED and entry not in mesh
            else entry
            for entry in spec
        ],
        **rest,
    )
