"""What a sender is asked, checked before anything is done with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scalax._core.channel.lines import InvalidMessage

_MOST = 1 << 16  # processes of a job
_LONGEST = 1e8  # seconds


def _number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_number, value))


def _text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 64


def _seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _LONGEST


def _processes(value: Any) -> bool:
    return _number(value) and value <= _MOST


def _parts(value: Any) -> bool:
    """Pairs of a device's id and where the part starts in its block."""
    return isinstance(value, list) and all(
        isinstance(part, list) and len(part) == 2 and _number(part[0]) and _numbers(part[1]) for part in value
    )


_FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    'join': {
        'job': _text,
        'seconds': _seconds,
        'receiver': _processes,
        'receivers': _processes,
    },
    'parts': {'leaf': _number, 'parts': _parts, 'sizes': _numbers, 'dtype': _text},
    'alive': {},
    'done': {},
}
"""The fields that each question has, and what is right for each."""
_MAY = {'join': {'number': _number}}
"""The fields that it may have, too."""


def checked(question: Any) -> Mapping[str, Any]:
    """A question, as it came.

    Raises:
        Invalid: it is none; nobody is told what is wrong with it.
    """
    if not isinstance(question, dict) or not isinstance(question.get('asks'), str):
        raise InvalidMessage
    asks = question['asks']
    fields = _FIELDS.get(asks)
    if fields is None or not fields.keys() <= question.keys():
        raise InvalidMessage
    right = {**fields, **_MAY.get(asks, {}), 'asks': _text}
    if not all(name in right and right[name](value) for name, value in question.items()):
        raise InvalidMessage
    if asks == 'join' and question['receiver'] >= question['receivers']:
        raise InvalidMessage
    return question
