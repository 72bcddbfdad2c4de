"""Files of a checkpoint that somebody has written: an error that names the file, or the step before."""

import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from scalax.checkpoint import Checkpointer, _files, _saved_step
from scalax.errors import CheckpointError, CheckpointWarning
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support.random_examples import examples

DEEP = '[' * 100_000
TEXTS = [
    '',
    DEEP,
    '{"a":' * 100_000,
    DEEP + ']' * 100_000,
    'null',
    '[]',
    '{}',
    '1',
    '"text"',
    '\x00',
    '\ud800',
    'NaN',
    '1' * 10_000,
    '{"format": 1}',
    '{"format": 1, "processes": "1", "leaves": []}',
    '{"format": 1, "processes": -1, "leaves": []}',
    '{"format": 1, "processes": 1, "leaves": {}}',
    '{"format": 1, "processes": 1, "leaves": [1]}',
    '{"format": 1, "processes": 1, "leaves": [{"path": 1}]}',
    f'{{"format": 1, "processes": 1, "leaves": [{"[" * 900}{"]" * 900}]}}',
]
ENTRY: dict[str, Any] = {'path': 'w', 'shape': [8], 'dtype': 'int32', 'kind': 'array', 'spec': '', 'mesh': {}}
ENTRIES = [
    {**ENTRY, **change}
    for change in (
        {'path': None},
        {'shape': [-1]},
        {'shape': [True]},
        {'shape': [1e300]},
        {'shape': '8'},
        {'dtype': 3},
        {'kind': 'object'},
        {'kind': ['array']},
        {'spec': 1},
        {'mesh': {'x': 'y'}},
        {'mesh': 3},
    )
]
TEXTS.extend(json.dumps({'format': 1, 'processes': 1, 'leaves': [entry]}) for entry in ENTRIES)
TEXTS.append(json.dumps({'format': 1, 'processes': 1, 'leaves': [ENTRY, ENTRY]}))


@pytest.fixture
def helper() -> MeshShardingHelper:
    return MeshShardingHelper([8], ['x'])


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


class Iterator:
    state: Any = None

    def set_state(self, state: Any) -> None:
        self.state = state


def write(folder: Path, name: str, text: str) -> None:
    """Replaces a file of step 2; the list of files is made to fit, as somebody would do."""
    root = folder / '2' / 'state'
    (root / name).write_bytes(text.encode(errors='surrogatepass'))
    listed = root / 'scalax' / 'files.json'
    if name != 'scalax/files.json':
        files = json.loads(listed.read_text())
        files[name] = [os.path.getsize(root / name), None]
        listed.write_text(json.dumps(files))


def assert_passed_over(folder: Path, helper: MeshShardingHelper, said: str) -> None:
    iterator = Iterator()
    with pytest.warns(CheckpointWarning, match=re.escape(f'step 2: {said}')):
        found = Checkpointer(folder).restore(helper, P(), state(0), data=iterator)
    assert found['n'] == int(found['w'][0]) == 1
    assert iterator.state == {'position': 1}
    with pytest.raises(CheckpointError, match=re.escape(said)):
        Checkpointer(folder).restore(helper, P(), state(0), step=2, data=iterator)


@pytest.mark.parametrize('text', TEXTS, ids=lambda text: text[:20])
def test_the_list_of_files(two: Path, helper: MeshShardingHelper, text: str) -> None:
    write(two, 'scalax/files.json', text)
    assert Checkpointer(two).latest_step() == 1
    assert_passed_over(two, helper, 'scalax/files.json cannot be read: ')


@pytest.mark.parametrize('text', TEXTS, ids=lambda text: text[:20])
def test_the_list_of_leaves(two: Path, helper: MeshShardingHelper, text: str) -> None:
    write(two, 'scalax/leaves.json', text)
    assert Checkpointer(two).latest_step() == 1
    assert_passed_over(two, helper, 'scalax/leaves.json cannot be read: ')
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(two).describe(2)
    start = f'the checkpoint of step 2 in {two} cannot be read: scalax/leaves.json: '
    assert str(caught.value).startswith(start)


@pytest.mark.parametrize('text', ['', DEEP, '{}', 'null', '{"tree_metadata": 1}'], ids=lambda text: text[:20])
def test_what_orbax_says_of_the_tree(two: Path, helper: MeshShardingHelper, text: str) -> None:
    write(two, '_METADATA', text)
    assert_passed_over(two, helper, 'what Orbax says of its arrays cannot be read: ')


def test_leaves_that_orbax_does_not_list(two: Path, helper: MeshShardingHelper) -> None:
    said = json.loads((two / '2' / 'state' / '_METADATA').read_text())
    del said['tree_metadata']["('w',)"]
    write(two, '_METADATA', json.dumps(said))
    assert_passed_over(two, helper, "leaves that Orbax does not list: 'w'")


def test_a_list_of_leaves_that_one_process_does_not_see(two: Path) -> None:
    (two / '2' / 'state' / 'scalax' / 'leaves.json').unlink()
    step = _saved_step.SavedStep(two, 2)
    count = len(json.loads((two / '2' / 'state' / 'scalax' / 'files.json').read_text()))
    found = [step.damage(False, (number, count)) for number in range(count)]
    assert all(found) and ['scalax/leaves.json cannot be read: No such file or directory'] in found


@pytest.mark.parametrize('text', ['J', f'J{DEEP}', 'J{', '?', ''], ids=lambda text: text[:20])
def test_the_state_of_an_iterator(two: Path, helper: MeshShardingHelper, text: str) -> None:
    write(two, 'scalax/data.0', text)
    assert_passed_over(two, helper, 'scalax/data.0 cannot be read: ')
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(two).data(2)
    start = f'the checkpoint of step 2 in {two} cannot be read: scalax/data.0: '
    assert str(caught.value).startswith(start)


@pytest.mark.parametrize(
    'name', ['../../1/state/_METADATA', '/etc/hostname', '', '.', 'd/../../x', 'd//x', 'a\0b', 'x' * 5000]
)
def test_nothing_outside_of_the_folder_is_looked_at(two: Path, helper: MeshShardingHelper, name: str) -> None:
    write(two, 'scalax/files.json', json.dumps({name: [1, 2]}))
    assert_passed_over(two, helper, f'scalax/files.json cannot be read: {name[:80]!r} is not a file of this')


@pytest.mark.parametrize(
    'entry', [1, [], [1], [1, 2, 3], ['1', 2], [1.5, 2], [-1, 2], [True, 2], [1, 'x'], {'0': 1}], ids=repr
)
def test_sizes_and_checksums_are_numbers(two: Path, helper: MeshShardingHelper, entry: Any) -> None:
    write(two, 'scalax/files.json', json.dumps({'_METADATA': entry}))
    assert_passed_over(two, helper, "scalax/files.json cannot be read: '_METADATA' has no size and checksum")


def test_a_pipe_and_a_file_without_end(two: Path, helper: MeshShardingHelper) -> None:
    """Neither is opened: the one would be waited for, the other read for ever."""
    root = two / '2' / 'state'
    leaves = json.loads((root / 'scalax' / 'files.json').read_text())['scalax/leaves.json']
    for name, made in (('pipe', os.mkfifo), ('zero', lambda path: os.symlink('/dev/zero', path))):
        made(root / name)
        write(two, 'scalax/files.json', json.dumps({'scalax/leaves.json': leaves, name: [0, 0]}))
        with pytest.warns(CheckpointWarning, match=f'{name} cannot be read: {name} is no regular file'):
            Checkpointer(two).restore(helper, P(), state(0), verify=True)
    listed = root / 'scalax' / 'files.json'
    listed.unlink()
    os.mkfifo(listed)
    assert_passed_over(two, helper, 'scalax/files.json cannot be read: it is no regular file')


def test_sizes_are_limited_before_anything_is_read(
    two: Path, helper: MeshShardingHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = two / '2' / 'state' / 'scalax'
    listed, leaves = (root / 'files.json').read_text(), (root / 'leaves.json').read_bytes()
    os.truncate(root / 'leaves.json', 1 << 40)  # takes no room on the disk
    (root / 'files.json').write_text(
        json.dumps({**json.loads(listed), 'scalax/leaves.json': [1 << 40, None]})
    )
    assert_passed_over(
        two,
        helper,
        'scalax/leaves.json cannot be read: it has 1,099,511,627,776 bytes, and 268,435,456 are taken at '
        'most',
    )
    (root / 'leaves.json').write_bytes(leaves)
    os.truncate(root.parent / '_METADATA', 1 << 40)
    (root / 'files.json').write_text(json.dumps({**json.loads(listed), '_METADATA': [1 << 40, None]}))
    assert_passed_over(
        two, helper, 'what Orbax says of its arrays cannot be read: _METADATA has 1099511627776'
    )
    monkeypatch.setattr(_files, '_MOST', 100)
    with Checkpointer(two / 'other') as checkpointer:
        checkpointer.save(1, state(1))
        with pytest.raises(CheckpointError, match=r'ValueError: leaves.json has .* bytes, and at most 100'):
            checkpointer.wait()
    monkeypatch.setattr(_saved_step, '_MOST_DATA', 100)
    with (
        Checkpointer(two / 'other') as checkpointer,
        pytest.raises(CheckpointError, match='data: its state has 201 bytes, and at most 100 are kept'),
    ):
        checkpointer.save(1, state(1), data=bytes(200))


def test_messages_steer_no_terminal(two: Path, helper: MeshShardingHelper) -> None:
    bell = '\x1b[2J\u202e'
    shown = r'\x1b[2J\u202e'
    with Checkpointer(two) as old:
        old.restore(helper, P(), state(0))
        assert old.save(3, state(3))
        old.wait()
        owner = {'token': 'of another', 'host': bell, 'pid': bell, 'since': bell}
        (two / 'writer.json').write_text(json.dumps(owner))
        with pytest.raises(CheckpointError) as caught:
            old.save(4, state(4))
            old.wait()
    said = f"process {shown} on host '{shown}', since {shown}. A directory has one writer"
    assert said in str(caught.value)
    leaves = {'format': 1, 'processes': 1, 'leaves': [{**ENTRY, 'path': bell}]}
    write(two, 'scalax/leaves.json', json.dumps(leaves))
    with pytest.raises(CheckpointError, match=re.escape(f"leaves that Orbax does not list: '{shown}'")):
        Checkpointer(two).restore(helper, P(), state(0), step=2)
    with Checkpointer(two / 'named') as named:
        named.save(1, {bell: np.zeros(8, np.int32)})
    with pytest.raises(CheckpointError, match=re.escape(f'{shown}: int32[8] is in the checkpoint')):
        named.restore(helper, P(), state(0))
    files = json.loads((two / '2' / 'state' / 'scalax' / 'files.json').read_text())
    write(two, 'scalax/files.json', json.dumps({**files, bell: [1, None]}))
    with pytest.raises(CheckpointError, match=re.escape(f'{shown} cannot be read: No such file')):
        Checkpointer(two).restore(helper, P(), state(0), step=2)


def test_mutated_files_are_passed_over_or_restored(two: Path, helper: MeshShardingHelper) -> None:
    """Some hundred changes to the JSON of a step: never another error, and never other numbers."""
    chance = random.Random(0)
    root = two / '2' / 'state' / 'scalax'
    names = ['files.json', 'leaves.json', 'data.0']
    whole = {name: (root / name).read_bytes() for name in names}
    for _ in range(examples(400).max_examples):
        name = chance.choice(names)
        data = bytearray(whole[name])
        for _ in range(chance.randint(1, 3)):
            place = chance.randrange(len(data))
            change = chance.choice(['flip', 'drop', 'repeat', 'insert'])
            if change == 'flip':
                data[place] = chance.randrange(256)
            elif change == 'drop':
                del data[place : place + chance.randint(1, 9)]
            elif change == 'repeat':
                data[place:place] = data[place : place + chance.randint(1, 30)]
            else:
                data[place:place] = chance.choice([b'[', b'{', b'"', b'\\u0000', b'1e999', b'-', b'null'])
            data = data or bytearray(b' ')
        (root / name).write_bytes(data)
        checkpointer = Checkpointer(two)
        assert checkpointer.latest_step() in (1, 2)
        for read in (checkpointer.describe, checkpointer.data):
            try:
                read(2)
            except CheckpointError as error:
                assert str(error).startswith(f'the checkpoint of step 2 in {two}')
        (root / name).write_bytes(whole[name])
    assert Checkpointer(two).restore(helper, P(), state(0), verify=True)['n'] == 2
    assert jax.device_count() == 8
