"""JSON from untrusted sources: rejected texts, and errors instead of hangs for files of any kind."""

import math
import os
import re
import sys
import threading
from pathlib import Path

import pytest

from scalax._core.util import strict_json


@pytest.mark.parametrize(
    ('text', 'value'),
    [
        (b'{}', {}),
        (b' [1, -2.5, true, null, "a"]\n', [1, -2.5, True, None, 'a']),
        (b'"\xc3\xa9"', 'é'),
        (rb'"\ud83d\ude00"', '\U0001f600'),
        (rb'"\\ud83d"', '\\ud83d'),
        (b'{"[": "]", "{\\"[": ["[[["]}', {'[': ']', '{"[': ['[[[']}),
        (str(2**80).encode(), 2**80),
        (b'[' * 127 + b']' * 127, None),
        (b'[' + b'[],' * 1000 + b'[]]', [[]] * 1001),
    ],
)
def test_valid_texts(text: bytes, value: object) -> None:
    parsed = strict_json.parse(text)
    assert value is None or parsed == value


@pytest.mark.parametrize('text', [b'9' * 400, b'9' * 99_999, b'1e999', b'Infinity'])
def test_numbers_that_are_too_large_are_infinite(text: bytes) -> None:
    assert strict_json.parse(text) == math.inf


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        (b'', 'Expecting value: line 1 column 1 (char 0)'),
        (b'{} {}', 'Extra data: line 1 column 4 (char 3)'),
        (b'\xef\xbb\xbf{}', 'Unexpected UTF-8 BOM (decode using utf-8-sig): line 1 column 1 (char 0)'),
        (b'"\xff"', "'utf-8' codec can't decode byte 0xff in position 1: invalid start byte"),
        (b'"\x01"', 'Invalid control character at: line 1 column 2 (char 1)'),
        (b'"' + b'\\"' * 10**6, 'Unterminated string starting at: line 1 column 1 (char 0)'),
        (b'{"a": 1, "a": 1}', "the key 'a' occurs twice"),
        (b'{"a": [1, {"b": {"c": 2, "c": 2}}]}', "a/b: the key 'c' occurs twice"),
        (b'{"a\\n": {"\\u001b": 2, "\\u001b": 2}}', r"a\n: the key '\x1b' occurs twice"),
        (rb'["\ud800"]', r"the string '\ud800' has half of a surrogate pair"),
        (rb'{"a": {"\udc00\ud83d": 1}}', r"a: the string '\udc00\ud83d' has half of a surrogate pair"),
        (b'[' * 128 + b']' * 128, 'it is nested more than 127 deep'),
        (b'[[],' * 10**5, 'it is nested more than 127 deep'),
        (b'{"a": ["]"], "b": ' + b'{"x":' * 10**5, 'b: it is nested more than 127 deep'),
    ],
    ids=range(14),
)
def test_invalid_texts(text: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=f'^{re.escape(message)}$'):
        strict_json.parse(text)


def test_a_raised_limit_of_recursion_does_not_matter() -> None:
    """Before Python 3.12, its parser would fill the stack, and the process would end."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try:
        with pytest.raises(ValueError, match='nested more than 127 deep'):
            strict_json.parse(b'[' * 10**6)
    finally:
        sys.setrecursionlimit(limit)


def test_values_in_messages_are_short_and_printable() -> None:
    assert strict_json.brief('a\x1b[2J') == r"'a\x1b[2J'"
    assert len(strict_json.brief('a' * 10**6)) < 130
    assert len(strict_json.brief([1] * 1000)) < 130
    assert len(strict_json.brief({str(i): ['a' * 1000] * 1000 for i in range(1000)})) < 210
    assert strict_json.printable('a\n\u202eé') == r'a\n\u202eé'
    assert len(strict_json.printable('a' * 10**6)) < 210


def test_files(tmp_path: Path) -> None:
    path = tmp_path / 'a.json'
    path.write_bytes(b'[1]')
    assert strict_json.read(path) == strict_json.read(str(path)) == b'[1]'
    with pytest.raises(ValueError, match=r'^it has 3 bytes; the limit is 2$'):
        strict_json.read(path, max_bytes=2)
    with pytest.raises(IsADirectoryError):
        strict_json.read(tmp_path)
    with pytest.raises(OSError, match='File name too long'):
        strict_json.read('a' * 10_000)
    with pytest.raises(ValueError, match='null byte'):
        strict_json.read('a\0b')


@pytest.mark.parametrize('kind', ['pipe', 'zero', 'link'])
def test_files_without_an_end_are_not_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / 'a.json'
    if kind == 'pipe':
        os.mkfifo(path)
    elif kind == 'link':
        path.symlink_to('/dev/zero')
    else:
        path = Path('/dev/zero')
    messages: list[str] = []

    def read() -> None:
        try:
            strict_json.read(path)
        except ValueError as error:
            messages.append(str(error))

    # If a read hangs, its thread is abandoned, and the test fails.
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(200)
    assert messages == ['it is not a regular file']


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    path = tmp_path / 'a.json'
    path.write_bytes(b'[1, 2]')
    with (
        strict_json.open_regular_file(path) as file,
        pytest.raises(ValueError, match='2 of 6 bytes were there'),
    ):
        os.truncate(path, 2)
        strict_json.read_exactly(file, 6)


def test_reasons() -> None:
    with pytest.raises(OSError) as error:
        strict_json.read('/no/such/file')
    assert strict_json.error_reason(error.value) == 'No such file or directory'
    assert strict_json.error_reason(ValueError('wrong')) == 'wrong'
