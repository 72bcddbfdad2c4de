"""Hostile files in a checkpoint: an error that names the file, or a restore of the previous step."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalax.checkpoint import Checkpointer
from scalax.errors import CheckpointError, CheckpointWarning
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P

DEEP = '[' * 100_000
HELPER = MeshShardingHelper([8], ['x'])


def state(step: int) -> dict[str, Any]:
    return {'w': np.full(8, step, np.int32), 'n': step}


@pytest.fixture(scope='module')
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('saved')
    with Checkpointer(folder) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step), data={'position': step})
    return folder


@pytest.fixture
def two(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / 'run'))


def write(folder: Path, name: str, text: str) -> None:
    """Replaces a file of step 2, and adapts the manifest, as an attacker would do."""
    root = folder / '2' / 'state'
    (root / name).write_bytes(text.encode(errors='surrogatepass'))
    listed = root / 'scalax' / 'files.json'
    if name != 'scalax/files.json':
        files = json.loads(listed.read_text())
        files[name] = [os.path.getsize(root / name), None]
        listed.write_text(json.dumps(files))


def assert_passed_over(folder: Path, message: str) -> None:
    assert Checkpointer(folder).latest_step() == 1
    with pytest.warns(CheckpointWarning, match=re.escape(f'step 2: {message}')):
        assert Checkpointer(folder).restore(HELPER, P(), state(0))['n'] == 1
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Checkpointer(folder).restore(HELPER, P(), state(0), step=2)


@pytest.mark.medium
@pytest.mark.parametrize(
    'text',
    [
        '',
        DEEP,
        '{"a":' * 100_000,
        'null',
        '[]',
        '1',
        '"text"',
        '\x00',
        '\ud800',
        '{"a": 1}',
        '{"a": [1]}',
        '{"a": [1, 2], "a": [1, 2]}',
    ],
    ids=lambda text: text[:9],
)
def test_hostile_manifests(two: Path, text: str) -> None:
    write(two, 'scalax/files.json', text)
    assert_passed_over(two, 'scalax/files.json cannot be read: ')


@pytest.mark.parametrize('name', ['../../1/state/_METADATA', '/etc/hostname', '', '.', 'd/../../x', 'a\0b'])
def test_paths_outside_of_the_folder_are_not_read(two: Path, name: str) -> None:
    write(two, 'scalax/files.json', json.dumps({name: [1, 2]}))
    assert_passed_over(two, f'scalax/files.json cannot be read: {name!r} is not a file of this checkpoint')


@pytest.mark.parametrize('entry', [['1', 2], [1.5, 2], [-1, 2], [True, 2], [1, 'x']], ids=repr)
def test_sizes_and_checksums_have_to_be_integers(two: Path, entry: Any) -> None:
    write(two, 'scalax/files.json', json.dumps({'_METADATA': entry}))
    assert_passed_over(two, "scalax/files.json cannot be read: '_METADATA' has no size and checksum")


def test_empty_folder_is_not_a_step(two: Path) -> None:
    root = two / '2' / 'state'
    shutil.rmtree(root)
    root.mkdir()
    assert_passed_over(two, 'Metadata file (named _METADATA) does not exist at ')


@pytest.mark.parametrize('text', ['', DEEP, '{}', 'null'], ids=lambda text: text[:9])
def test_unreadable_steps_are_not_deleted(two: Path, text: str) -> None:
    """Another version of Orbax may be able to read it, so the user decides."""
    write(two, '_METADATA', text)
    where = re.escape(f'the checkpoint of step 2 in {two} cannot be read: ')
    for call in (
        lambda: Checkpointer(two).restore(HELPER, P(), state(0)),
        lambda: Checkpointer(two).describe(2),
    ):
        with pytest.raises(CheckpointError, match=where):
            call()
    assert Checkpointer(two).restore(HELPER, P(), state(0), step=1)['n'] == 1


@pytest.mark.parametrize('text', [f'J{DEEP}', 'J{', '?', ''], ids=lambda text: text[:9])
def test_hostile_data_states(two: Path, text: str) -> None:
    write(two, 'scalax/data.0-of-1', text)
    with pytest.raises(CheckpointError, match=re.escape(f'the checkpoint of step 2 in {two} cannot be read')):
        Checkpointer(two).data(2)


def test_pipes_and_endless_files(two: Path) -> None:
    """Neither is opened: reading a pipe would block, and reading an endless file would not end."""
    root = two / '2' / 'state'
    for name, make in (('pipe', os.mkfifo), ('zero', lambda path: os.symlink('/dev/zero', path))):
        make(root / name)
        write(two, 'scalax/files.json', json.dumps({name: [0, 0]}))
        with pytest.warns(CheckpointWarning, match=f'step 2: {name} is not a regular file'):
            Checkpointer(two).restore(HELPER, P(), state(0), verify=True)


@pytest.mark.medium
@pytest.mark.parametrize(
    ('text', 'why'),
    [
        ('', 'JSONDecodeError: Expecting value: line 1 column 1 (char 0)'),
        ('[]', 'TypeError: list indices must be integers or slices, not str'),
        ('null', "TypeError: 'NoneType' object is not subscriptable"),
        ('{"token": "x"}', "KeyError: 'pid'"),
        (DEEP, 'ValueError: it is nested more than 127 deep'),
        ('{"token": "x", "token": "y"}', "ValueError: the key 'token' occurs twice"),
    ],
    ids=lambda text: text[:9],
)
def test_damaged_writer_file(two: Path, text: str, why: str) -> None:
    with Checkpointer(two) as checkpointer:
        checkpointer.restore(HELPER, P(), state(0))
        assert checkpointer.save(3, state(3))
        checkpointer.wait()
        path = two / 'writer.json'
        path.write_text(text)
        with pytest.raises(CheckpointError) as error:
            checkpointer.save(4, state(4))
            checkpointer.wait()
        path.unlink()
    message = str(error.value)
    assert f'{path} cannot be read, so the writer of this directory is not known ({why}' in message
    assert '). Delete the file if no other job writes there' in message


def test_control_characters_in_messages(two: Path) -> None:
    bell = '\x1b[2J\u202e'
    shown = r'\x1b[2J\u202e'
    with Checkpointer(two) as old:
        old.restore(HELPER, P(), state(0))
        assert old.save(3, state(3))
        old.wait()
        owner = {'token': 'of another', 'host': bell, 'pid': bell, 'since': bell}
        (two / 'writer.json').write_text(json.dumps(owner))
        with pytest.raises(CheckpointError) as caught:
            old.save(4, state(4))
            old.wait()
    assert f"process {shown} on host '{shown}', since {shown}. A directory has one writer" in str(
        caught.value
    )
    files = json.loads((two / '2' / 'state' / 'scalax' / 'files.json').read_text())
    write(two, 'scalax/files.json', json.dumps({**files, bell: [1, None]}))
    with pytest.raises(CheckpointError, match=re.escape(f'{shown} cannot be read: ')):
        Checkpointer(two).restore(HELPER, P(), state(0), step=2)
