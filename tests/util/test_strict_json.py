"""JSON that others wrote: what is refused, and that files of any kind end in an error and not in a hang."""

import os
import re
import threading
from pathlib import Path

import pytest

from scalax._util import strict_json


@pytest.mark.parametrize(
    ('text', 'value'),
    [
        ('{}', {}),
        (' [1, -2.5, true, null, "a"]\n', [1, -2.5, True, None, 'a']),
        (b'"\xc3\xa9"', 'é'),
        (r'"\ud83d\ude00"', '\U0001f600'),
        (str(2**70), 2**70),
    ],
)
def test_what_is_taken(text: str | bytes, value: object) -> None:
    parsed = strict_json.parse(text)
    assert parsed == value


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('', 'Expecting value'),
        ('{} {}', 'Extra data'),
        ('{"a": 1, "b": {"a": 2, "a": 2}}', "the key 'a' is there twice in one object"),
        ('9' * 9999, 'Exceeds the limit'),
        ('\ufeff{}', 'Unexpected UTF-8 BOM'),
        (b'"\xff"', "can't decode byte 0xff"),
        ('"\x01"', 'Invalid control character'),
        ('[' * 10**6, 'it is nested too deep'),
    ],
    ids=range(8),
)
def test_what_is_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        strict_json.parse(text)


def test_values_in_messages_are_short_and_printable() -> None:
    assert strict_json.brief('a\x1b[2J') == r"'a\x1b[2J'"
    assert len(strict_json.brief('a' * 10**6)) < 130
    assert len(strict_json.brief([1] * 1000)) < 130


def test_files(tmp_path: Path) -> None:
    path = tmp_path / 'a.json'
    path.write_bytes(b'[1]')
    assert strict_json.read(path) == strict_json.read(str(path)) == b'[1]'
    with pytest.raises(ValueError, match='it has 3 bytes, and 2 are taken at most'):
        strict_json.read(path, most=2)
    # A file of so many bytes may take none on the disk.
    os.truncate(path, 1 << 40)
    with pytest.raises(ValueError, match='it has 1,099,511,627,776 bytes, and 100,000,000 are taken at most'):
        strict_json.read(path)
    with pytest.raises(IsADirectoryError):
        strict_json.read(tmp_path)
    with pytest.raises(OSError, match='File name too long'):
        strict_json.read('a' * 10_000)
    with pytest.raises(ValueError, match='null byte'):
        strict_json.read('a\0b')


@pytest.mark.parametrize('kind', ['pipe', 'zero', 'link'])
def test_what_has_no_end_is_not_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / 'a.json'
    if kind == 'pipe':
        os.mkfifo(path)
    elif kind == 'link':
        path.symlink_to('/dev/zero')
    else:
        path = Path('/dev/zero')
    said: list[str] = []

    def read() -> None:
        try:
            strict_json.read(path)
        except ValueError as error:
            said.append(str(error))

    # In a thread that may be left behind: a test that hangs says nothing.
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(30)
    assert said == ['it is no regular file']


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    path = tmp_path / 'a.json'
    path.write_bytes(b'[1, 2]')
    with strict_json.opened(path) as file, pytest.raises(ValueError, match='2 of 6 bytes were there'):
        os.truncate(path, 2)
        strict_json.exactly(file, 6, 0)


def test_reasons() -> None:
    with pytest.raises(OSError) as error:
        strict_json.read('/no/such/file')
    assert strict_json.reason(error.value) == 'No such file or directory'
    assert strict_json.reason(ValueError('wrong')) == 'wrong'
