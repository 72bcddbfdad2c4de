"""How does a plan become text, and come back?"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scalax.errors import DataError
from scalax.explain import ShardingReport
from scalax.explain._json import loaded
from scalax.plan._collectives import Collective
from scalax.plan._loops import Counted
from scalax.plan._memory import Buffer, Memory
from scalax.plan._places import Place
from scalax.plan._sources import Source
from scalax.plan._work import Work

if TYPE_CHECKING:
    from scalax.plan._plan import Plan

VERSION = 1
_REPORTS = ('inputs', 'outputs')
_AS_THEY_ARE = (
    *('name', 'mesh', 'devices', 'platform', 'flops', 'model_flops', 'device_kind', 'quick', 'refusal'),
)


def write(plan: Plan) -> str:
    """A plan as JSON: what it says of itself, a version, and its reports as they write themselves."""
    reports = {name: json.loads(getattr(plan, name).to_json()) for name in _REPORTS}
    items = {'version': VERSION, **plan.to_dict(), **reports}
    lines = [f'{json.dumps(key)}: {_lines(value)}' for key, value in items.items()]
    return '{\n' + ',\n'.join(lines) + '\n}\n'


def _lines(value: Any) -> str:
    """A list of dicts with a line for each."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and 'source' in value[0]:
        return '[\n' + ',\n'.join(f'  {json.dumps(item)}' for item in value) + '\n]'
    return json.dumps(value)


def read(text_or_path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of the plan that was written.

    Raises:
        DataError: this is no plan, or one of another version.
        ArgumentError: it is neither text nor a path.
    """
    values, name = loaded(text_or_path, 'plan', 'Plan', VERSION)
    try:
        return _fields(values)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f'{name} is not a whole plan: {type(error).__name__}: {error}') from error


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    memory = {field.name: values['memory'][field.name] for field in dataclasses.fields(Memory)}
    work = values['work']
    return {
        **{name: values[name] for name in _AS_THEY_ARE},
        **{name: ShardingReport.load(json.dumps(values[name])) for name in _REPORTS},
        'memory': Memory(**memory),
        'flops_counted': Counted(values['flops_counted']),
        'work': Work(work['flops'], work['bytes'], Counted(work['counted'])),
        'places': tuple(Place(row['slice'], tuple(row['coords']), row['core']) for row in values['places']),
        'buffers': tuple(Buffer(**{**row, 'source': Source(**row['source'])}) for row in values['buffers']),
        'collectives': tuple(map(_collective, values['collectives'])),
    }


def _collective(row: Mapping[str, Any]) -> Collective:
    return Collective(
        **{
            **row,
            'axes': tuple(row['axes']),
            'counted': Counted(row['counted']),
            'source': Source(**row['source']),
            'part': tuple(row.get('part', ())),
            'networks': tuple(row.get('networks', ())),
        }
    )
