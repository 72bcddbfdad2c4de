"""How does a report become text, and come back? JSON that reads well as a golden file: a line a leaf."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from scalax import _spec
from scalax.errors import DataError
from scalax.explain._rows import ReportRow

VERSION = 1
_UNCONSTRAINED = 'UNCONSTRAINED'


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
    """
    text, name = _text_and_name(text_or_path)
    try:
        values = json.loads(text)
    except ValueError as error:
        raise DataError(f'{name} is not the JSON of a report: {error}') from error
    if not isinstance(values, dict) or 'version' not in values:
        raise DataError(f'{name} is not the JSON of a report: it has no version')
    if values['version'] != VERSION:
        raise DataError(
            f'{name} is a report of version {values["version"]!r}, this scalax reads version {VERSION}: '
            'write it anew with report.to_json()'
        )
    try:
        rows = tuple(_row(row, values['mesh']) for row in values['rows'])
        idle = {kind: tuple(values[kind]) for kind in ('unused_rules', 'shadowed_rules')}
        return {'rows': rows, 'mesh': values['mesh'], **idle}
    except (KeyError, TypeError) as error:
        raise DataError(f'{name} is not a whole report: {type(error).__name__}: {error}') from error


def _text_and_name(text_or_path: str | os.PathLike[str]) -> tuple[str, str]:
    # Text begins with a brace, or (where it is damaged) has several lines; no sensible path does.
    if isinstance(text_or_path, str) and (text_or_path.lstrip()[:1] == '{' or '\n' in text_or_path):
        return text_or_path, 'the text'
    return Path(text_or_path).read_text(encoding='utf-8'), repr(os.fspath(text_or_path))


def _row(values: Mapping[str, Any], mesh: Container[str]) -> ReportRow:
    spec = values['spec']
    parsed = None if spec is None else _parsed_spec(spec, mesh)
    return ReportRow(**{**values, 'shape': tuple(values['shape']), 'spec': parsed})


def _parsed_spec(spec: Any, mesh: Container[str]) -> PartitionSpec:
    rest = {}
    if isinstance(spec, dict):
        rest = {kind: frozenset(spec[kind]) for kind in ('unreduced', 'reduced')}
        spec = spec['entries']
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
