"""Validation of the requests that a sender receives, before anything is done with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scalax._core.channel.lines import InvalidMessage

_MAX_PROCESSES = 1 << 16  # per job
_MAX_SECONDS = 1e8


def _is_index(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _are_indices(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_index, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 64


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _MAX_SECONDS


def _is_process(value: Any) -> bool:
    return _is_index(value) and value <= _MAX_PROCESSES


def _are_parts(value: Any) -> bool:
    """Returns whether *value* is a list of (id of a device, start of the part in its block)."""
    return isinstance(value, list) and all(
        isinstance(part, list) and len(part) == 2 and _is_index(part[0]) and _are_indices(part[1])
        for part in value
    )


_REQUIRED: dict[str, dict[str, Callable[[Any], bool]]] = {
    'join': {
        'job': _is_text,
        'seconds': _is_seconds,
        'receiver': _is_process,
        'receivers': _is_process,
    },
    'parts': {'leaf': _is_index, 'parts': _are_parts, 'sizes': _are_indices, 'dtype': _is_text},
    'alive': {},
    'done': {},
}
"""Request -> the fields that it must have, each with its check."""
_OPTIONAL = {'join': {'number': _is_index}}
"""Request -> the fields that it may have, each with its check."""


def validated(request: Any) -> Mapping[str, Any]:
    """Returns a request unchanged.

    Raises:
        InvalidMessage: it is not a valid request. The other side is not told why.
    """
    if not isinstance(request, dict) or not isinstance(request.get('asks'), str):
        raise InvalidMessage
    kind = request['asks']
    required = _REQUIRED.get(kind)
    if required is None or not required.keys() <= request.keys():
        raise InvalidMessage
    checks = {**required, **_OPTIONAL.get(kind, {}), 'asks': _is_text}
    if not all(name in checks and checks[name](value) for name, value in request.items()):
        raise InvalidMessage
    if kind == 'join' and request['receiver'] >= request['receivers']:
        raise InvalidMessage
    return request
