"""Trial logs: trials of earlier searches, damaged lines, and other files."""

import json
import os

import pytest

from scalax._core.render.trial_log import TrialLog, fingerprint
from scalax.errors import ArgumentError, DataError


def test_trials_are_stored_by_fingerprint(tmp_path):
    path = tmp_path / 'trials.jsonl'
    file = TrialLog(path)
    file.add('a', {'number': 1})
    file.add('b', {'number': 2})
    file.add('a', {'number': 3})
    assert file.get('a') is None  # only trials from before the file was opened
    again = TrialLog(str(path))
    assert again.get('a') == {'number': 3}
    assert again.get('b') == {'number': 2} and again.get('c') is None


def test_without_a_path_nothing_is_stored():
    file = TrialLog(None)
    file.add('a', {})
    assert file.get('a') is None


def test_an_incomplete_line_does_not_affect_others(tmp_path):
    path = tmp_path / 'trials.jsonl'
    TrialLog(path).add('a', {'number': 1})
    with path.open('a') as out:
        out.write('{"of": "a", "num')
    file = TrialLog(path)
    assert file.get('a') == {'number': 1}
    file.add('a', {'number': 2})
    assert TrialLog(path).get('a') == {'number': 2}


@pytest.mark.parametrize('text', ['', '{', '{"of": "', '{"of": "0123', '{"of": "a", "number": 1}'])
def test_a_file_with_an_incomplete_first_line(text, tmp_path):
    path = tmp_path / 'trials.jsonl'
    path.write_text(text)
    TrialLog(path).add('b', {'number': 2})
    assert TrialLog(path).get('b') == {'number': 2}


@pytest.mark.parametrize(
    'line',
    ['{"of": 1}', 'null', '[1]', '{"of": "', '[' * 100_000, '\x00'],
)
def test_damaged_lines_are_skipped(line, tmp_path):
    path = tmp_path / 'trials.jsonl'
    path.write_text(f'{line}\n{json.dumps({"of": "a", "number": 1})}\n')
    assert TrialLog(path).get('a') == {'number': 1}


@pytest.mark.parametrize(
    ('content', 'why'),
    [
        (b'import jax\n\nprint(1)\n', r"it begins with 'import jax\n\nprint(1)\n'"),
        (b'{"version": 1, "name": "step"}', 'it begins with \'{"version": 1, "name": "step"}\''),
        (b'\x89PNG\r\n\x1a\n\xff', r"it begins with '�PNG\r\n\x1a\n�'"),
    ],
)
def test_files_of_another_kind_are_left_alone(content, why, tmp_path):
    path = tmp_path / 'precious.py'
    path.write_bytes(content)
    with pytest.raises(DataError) as raised:
        TrialLog(path)
    assert str(raised.value) == (
        f'{str(path)!r} is not a file of trials: {why}. Give the file of an earlier search, or a path where '
        'there is no file'
    )
    assert path.read_bytes() == content


def test_paths_where_no_file_can_be(tmp_path):
    for path, why in (
        (tmp_path, 'Is a directory'),
        (tmp_path / 'none' / 'trials.jsonl', 'No such file or directory'),
    ):
        with pytest.raises(ArgumentError) as raised:
            TrialLog(path)
        assert str(raised.value) == f'the file of trials {str(path)!r} cannot be written: {why}'
    with pytest.raises(ArgumentError) as raised:
        TrialLog(5)
    assert str(raised.value) == 'file has to be the path of a file of trials, got 5'
    os.mkfifo(tmp_path / 'pipe')
    with pytest.raises(DataError, match='is not a file of trials: it is not a regular file'):
        TrialLog(tmp_path / 'pipe')


def test_a_fingerprint_depends_on_the_program_and_its_compiler(monkeypatch):
    first = fingerprint(['step', 'mesh'])
    assert first == fingerprint(['step', 'mesh'])
    assert fingerprint(['<function f at 0x7f01>']) == fingerprint(['<function f at 0x7f02>'])
    assert len({first, fingerprint(['step', 'mesh2']), fingerprint(['step'])}) == 3
    arrays = [f'tensor<{rows}x{columns}xf32>' for rows in (8, 80, 100) for columns in (1, 10, 128, 256)]
    assert len({fingerprint([array]) for array in arrays}) == len(arrays)
    monkeypatch.setenv('LIBTPU_INIT_ARGS', '--xla_tpu_something=true')
    assert fingerprint(['step', 'mesh']) != first
