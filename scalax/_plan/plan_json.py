"""Plans as JSON: written with a line for each row, and read into values of the types of their fields."""

from __future__ import annotations

import enum
import functools
import inspect
import json
import math
import os
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from scalax._plan.collectives import Collective
from scalax._plan.torus import Place
from scalax._report.saved import loaded, of
from scalax._util import strict_json
from scalax.errors import DataError
from scalax.explain import ShardingReport
from scalax.explain._json import fields

T = TypeVar('T')

VERSION = 1
_DERIVED = {'version', 'fits', 'total'}  # written for people, and not read
_MOST = 1 << 128  # flops and bytes of plans are fewer
_MOST_DEVICES = 1 << 24
_MOST_AXES = 32


def write(values: Mapping[str, Any], reports: Mapping[str, ShardingReport]) -> str:
    """A plan as JSON: its plain values, a version, and its reports as they write themselves."""
    written = {name: json.loads(report.to_json()) for name, report in reports.items()}
    items = {'version': VERSION, **values, **written}
    lines = [f'{json.dumps(key)}: {_lines(value)}' for key, value in items.items()]
    return '{\n' + ',\n'.join(lines) + '\n}\n'


def _lines(value: Any) -> str:
    """A list of dicts, one a line."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and 'source' in value[0]:
        return '[\n' + ',\n'.join(f'  {json.dumps(item)}' for item in value) + '\n]'
    return json.dumps(value)


def read(kind: type[T], text_or_path: str | os.PathLike[str]) -> T:
    """Reads the plan that `write` wrote; *kind* is the class of plans.

    Raises:
        DataError: this is not a plan, or one of another version, or the file cannot be read.
        FileNotFoundError: there is no such file.
        ArgumentError: it is neither text nor a path.
    """
    values, name = loaded(text_or_path, 'plan', 'Plan', VERSION)
    try:
        plan = _built(kind, values, 'it')
        _require_devices(plan.mesh, plan.devices, plan.places, plan.collectives)
        return typing.cast(T, plan)
    except ValueError as error:
        raise DataError(f'{name} is not a whole plan: {error}') from error


def _require_devices(
    mesh: Mapping[str, int], devices: int, places: Sequence[Place], collectives: Sequence[Collective]
) -> None:
    """Raises ValueError if a plan names devices that its mesh does not have, or too many."""
    size = math.prod(mesh.values())
    if not 0 < size <= _MOST_DEVICES or len(mesh) > _MOST_AXES:
        raise ValueError(f'mesh has {strict_json.brief(size)} devices along {len(mesh)} axes')
    if not 0 < devices <= size:
        raise ValueError(f'devices are {devices}, and the mesh has {size}')
    _require_places(places, size)
    for row in collectives:
        if not mesh.keys() >= set(row.axes) or not all(device < size for device in row.part):
            raise ValueError(
                f'a collective is of devices that the mesh does not have: {strict_json.brief(row)}'
            )


def _require_places(places: Sequence[Place], devices: int) -> None:
    if not places:
        return
    axes = {len(place.coords) for place in places}
    if len(places) != devices or len(axes) > 1 or max(axes) > _MOST_AXES:
        raise ValueError(f'places are not one for each of {devices} devices, of as many coordinates each')
    longest = [max(axis) + 1 for axis in zip(*(place.coords for place in places), strict=True)]
    if math.prod(longest) * (max(place.core for place in places) + 1) > _MOST_DEVICES:
        raise ValueError('places are too far from one another')


def _built(kind: Any, values: object, what: str) -> Any:
    """A dataclass or a named tuple of plain values, each of the type that its field has."""
    given, named = of(dict, values, what), _fields(kind)
    more = sorted(given.keys() - named.keys() - _DERIVED)
    missing = [name for name, (_, needed) in named.items() if needed and name not in given]
    if more or missing:
        wrong = (
            f'has no {missing[0]!r}'
            if missing
            else f'has what none of this version has: {strict_json.brief(more)}'
        )
        raise ValueError(f'{what} {wrong}')
    return kind(**{name: _value(named[name][0], given[name], name) for name in named if name in given})


@functools.cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """The fields of a class: name -> its type, and whether it has to be given."""
    hints = typing.get_type_hints(kind)
    parameters = inspect.signature(kind).parameters.values()
    return {one.name: (hints[one.name], one.default is inspect.Parameter.empty) for one in parameters}


def _value(kind: Any, value: object, what: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is ShardingReport:
        return ShardingReport(**fields(of(dict, value, what)))
    if origin is types.UnionType:  # with None
        return None if value is None else _value(arguments[0], value, what)
    if origin is tuple:
        return tuple(_value(arguments[0], item, what) for item in of(list, value, what))
    if origin is typing.Literal or (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        known = arguments or tuple(item.value for item in kind)
        if value not in known:
            raise ValueError(f'{what} is none of {", ".join(map(repr, known))}: {strict_json.brief(value)}')
        return value if arguments else kind(value)
    if origin is not None:  # a mapping
        return {key: _value(arguments[1], item, what) for key, item in of(dict, value, what).items()}
    if kind not in (str, int, bool):
        return _built(kind, value, what)
    if type(value) is not kind or (kind is int and not 0 <= typing.cast(int, value) < _MOST):
        raise ValueError(f'{what} is not of type {kind.__name__}: {strict_json.brief(value)}')
    return value
