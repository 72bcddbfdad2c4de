"""Reading back what was saved as JSON with a version: reports and plans."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from scalax._util import strict_json
from scalax.errors import ArgumentError, DataError

_MOST = 1 << 63  # bytes and sizes are less

T = TypeVar('T')


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
        values = strict_json.parse(text)
    except ValueError as error:
        raise DataError(f'{name} is not the JSON of a {what}: {error}') from error
    if not isinstance(values, dict) or 'version' not in values:
        raise DataError(f'{name} is not the JSON of a {what}: it has no version')
    written = values['version']
    if type(written) is not int or written != version:
        raise DataError(
            f'{name} is a {what} of version {strict_json.brief(written)}, this scalax reads version '
            f'{version}: write it anew with {what}.to_json()'
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
        return strict_json.read(text_or_path).decode('utf-8'), name
    except FileNotFoundError:
        raise  # a golden file may be there or not
    except (OSError, ValueError) as error:
        raise DataError(f'{name} is not the JSON of a {what}: {strict_json.reason(error)}') from error


def of(kind: type[T], value: object, what: str) -> T:
    """*value*, which is of that kind, or else no part of a report."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f'{what} is not of type {kind.__name__}: {strict_json.brief(value)}')
    return value


def count(value: object, what: str) -> int:
    """*value*, which is the number of something."""
    number = of(int, value, what)
    if not 0 <= number < _MOST:
        raise ValueError(f'{what} is not a number from 0 to 2**63: {strict_json.brief(number)}')
    return number
