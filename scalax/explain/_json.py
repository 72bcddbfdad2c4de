"""Reports as JSON with one line for each leaf, which reads well as a golden file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Container, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from scalax._report.saved import count, loaded, of
from scalax._tree import specs
from scalax._util import strict_json
from scalax.errors import DataError
from scalax.explain._rows import ReportRow

VERSION = 1
_UNCONSTRAINED = 'UNCONSTRAINED'
_TEXTS = ('path', 'dtype', 'rule', 'reason')
_COUNTS = ('bytes', 'bytes_per_device')
_ROW = {*_TEXTS, *_COUNTS, 'shape', 'spec', 'memory_kind'}


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
        list(entry) if isinstance(entry, tuple) else _UNCONSTRAINED if entry is specs.UNCONSTRAINED else entry
        for entry in specs.entries(spec)
    ]
    if not spec.unreduced and not spec.reduced:
        return entries
    combined = specs.sums_kind(spec)
    return {
        'entries': entries,
        'unreduced': sorted(spec.unreduced),
        'reduced': sorted(spec.reduced),
        **({} if combined == 'sum' else {'unreduced_kind': combined}),
    }


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
        DataError: this is no report, or one of another version, or the file cannot be read.
        FileNotFoundError: there is no such file.
        ArgumentError: it is neither text nor a path.
    """
    values, name = loaded(text_or_path, 'report', 'ShardingReport', VERSION)
    try:
        return fields(values)
    except ValueError as error:
        raise DataError(f'{name} is not a whole report: {error}') from error


def fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a report, from its plain values.

    Raises:
        ValueError: they are none; says which, and why.
    """
    mesh = {
        axis: count(size, 'a size of the mesh')
        for axis, size in of(dict, _item(values, 'mesh'), 'mesh').items()
    }
    rows = tuple(_row(of(dict, row, 'a row'), mesh) for row in of(list, _item(values, 'rows'), 'rows'))
    idle = {kind: _texts(_item(values, kind), kind) for kind in ('unused_rules', 'shadowed_rules')}
    return {'rows': rows, 'mesh': mesh, **idle}


def _item(values: Mapping[str, Any], key: str) -> Any:
    if key not in values:
        raise ValueError(f'it has no {key!r}')
    return values[key]


def _texts(values: object, what: str) -> tuple[str, ...]:
    return tuple(of(str, value, f'one of {what}') for value in of(list, values, what))


def _row(values: Mapping[str, Any], mesh: Container[str]) -> ReportRow:
    more = sorted(values.keys() - _ROW)
    if more:
        raise ValueError(f'a row has what no row of this version has: {strict_json.brief(more)}')
    kind = values.get('memory_kind')
    spec = _item(values, 'spec')
    plain: dict[str, Any] = {
        **{key: of(str, _item(values, key), key) for key in _TEXTS},
        **{key: count(_item(values, key), key) for key in _COUNTS},
    }
    return ReportRow(
        **plain,
        shape=tuple(count(size, 'a size of shape') for size in of(list, _item(values, 'shape'), 'shape')),
        spec=None if spec is None else _parsed_spec(spec, mesh),
        memory_kind=None if kind is None else of(str, kind, 'memory_kind'),
    )


def _parsed_spec(spec: Any, mesh: Container[str]) -> PartitionSpec:
    sums: dict[str, Any] = {}
    if isinstance(spec, dict):
        sums = {key: frozenset(_texts(_item(spec, key), key)) for key in ('unreduced', 'reduced')}
        if 'unreduced_kind' in spec:
            kinds = getattr(getattr(jax.sharding, 'UnreducedKind', None), '__members__', {})
            name = of(str, spec['unreduced_kind'], 'unreduced_kind')
            if name not in kinds:
                raise ValueError(f'unreduced_kind is none of this JAX: {strict_json.brief(name)}')
            sums['unreduced_kind'] = kinds[name]
        spec = _item(spec, 'entries')
    entries = [_parsed_entry(entry, mesh) for entry in of(list, spec, 'spec')]
    try:
        return PartitionSpec(*entries, **sums)
    except (TypeError, ValueError) as error:
        raise ValueError(f'spec is no PartitionSpec: {error}') from error


def _parsed_entry(entry: Any, mesh: Container[str]) -> Any:
    if isinstance(entry, list):
        return tuple(of(str, axis, 'an axis of spec') for axis in entry)
    if entry is None or (entry == _UNCONSTRAINED and entry not in mesh):
        return None if entry is None else specs.UNCONSTRAINED
    return of(str, entry, 'an axis of spec')
