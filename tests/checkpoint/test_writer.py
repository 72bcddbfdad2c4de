"""One writer at a time: the newest has the directory, whatever the one before it is doing at that moment."""

import contextlib
import json
import os
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from scalax._jax import orbax
from scalax.checkpoint import Checkpointer, _atomic_commit, _manifest, _save
from scalax.checkpoint._atomic_commit import StepDirectory
from scalax.errors import CheckpointError, CheckpointWarning
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P

# Where the folder of a save is deleted while Orbax writes several arrays, the first that fails ends its event
# loop; those that fail after it say so to nobody.
pytestmark = pytest.mark.filterwarnings(
    'ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning'
)


@pytest.fixture
def helper() -> MeshShardingHelper:
    return MeshShardingHelper([8], ['fsdp'])


def state(run: int, step: int) -> dict[str, Any]:
    """Leaves that all say which run they are of."""
    return {name: np.full(64, 1000 * run + step, np.int32) for name in 'abcd'}


def run_and_step(helper: MeshShardingHelper, folder: Path, step: int | None = None) -> tuple[int, int]:
    """Of which run a step is, all of it, and which it is."""
    found = Checkpointer(folder).restore(helper, P('fsdp'), state(0, 0), step, verify=True)
    [value] = {int(value) for leaf in jax.tree.leaves(found) for value in np.asarray(leaf)}
    return divmod(value, 1000)


def message(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_taken(text: str, folder: Path) -> None:
    """The message of one who is not the writer any more: all of it."""
    owner = json.loads((folder / 'writer.json').read_text())
    assert (owner['pid'], owner['host']) == (os.getpid(), socket.gethostname())
    assert re.fullmatch(r'\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+00:00', owner['since'])
    assert text == (
        f'{folder} has another writer now: process {os.getpid()} on host {socket.gethostname()!r}, since '
        f'{owner["since"]}. A directory has one writer, the one that came last, and this one writes and '
        'deletes nothing there any more. To keep the other one, end this job; to keep this one, end the '
        'other and make a new Checkpointer here, which takes the directory with its first save'
    )


def test_the_newest_writer_has_the_directory(tmp_path: Path, helper: MeshShardingHelper) -> None:
    old, new = Checkpointer(tmp_path, keep=1), Checkpointer(tmp_path)
    for step in (1, 2):
        assert old.save(step, state(1, step))
    old.wait()
    new.restore(helper, P('fsdp'), state(0, 0))
    assert old.save(3, state(1, 3))  # who only reads takes nothing
    old.wait()
    new.restore(helper, P('fsdp'), state(0, 0))
    assert new.save(4, state(2, 4))
    new.wait()
    before = names(tmp_path)
    for step in (4, 5, 100):
        assert_taken(message(old.save, step, state(1, step)), tmp_path)
    old.close()
    assert names(tmp_path) == before == ['3', '4', 'writer.json']
    assert old.latest_step() == 4
    assert run_and_step(helper, tmp_path) == (2, 4)
    old.restore(helper, P('fsdp'), state(0, 0))  # readers are free
    assert new.save(5, state(2, 5))
    new.close()
    with Checkpointer(tmp_path) as newest:
        newest.restore(helper, P('fsdp'), state(0, 0))
        assert newest.save(6, state(3, 6))
    assert_taken(message(new.save, 7, state(2, 7)), tmp_path)
    assert run_and_step(helper, tmp_path, 5) == (2, 5)


def test_a_save_that_runs_while_another_takes_the_directory(
    tmp_path: Path, helper: MeshShardingHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not committed, and its files are gone."""
    old, new = Checkpointer(tmp_path), Checkpointer(tmp_path)
    assert new.latest_step() is None
    begun, released = threading.Event(), threading.Event()
    write_own = _save.SaveThread._write_own

    def write_late(save: Any, *args: Any) -> None:
        if save._steps is old._steps:
            begun.set()
            assert released.wait(60)
        write_own(save, *args)

    monkeypatch.setattr(_save.SaveThread, '_write_own', write_late)
    assert old.save(3, state(1, 3))
    assert begun.wait(60)
    try:
        assert new.save(3, state(2, 3))
        new.wait()
    finally:
        released.set()
    assert_taken(message(old.wait), tmp_path)
    assert names(tmp_path) == ['3', 'writer.json']
    assert run_and_step(helper, tmp_path) == (2, 3)
    assert new.save(4, state(2, 4))
    new.close()
    assert names(tmp_path) == ['3', '4', 'writer.json']


@pytest.mark.parametrize('looks', [1, 2, 3, 4])
def test_another_takes_the_directory_behind_each_look(
    tmp_path: Path, helper: MeshShardingHelper, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    """The third look of a save is the one before the commit, the fourth the one before it deletes."""
    old, new = Checkpointer(tmp_path, keep=2), Checkpointer(tmp_path, keep=2)
    for step in (1, 2):
        assert old.save(step, state(1, step))
    old.wait()
    new.restore(helper, P('fsdp'), state(0, 0))
    count, require = [0], old._steps.writer.require

    def looked() -> None:
        require()
        count[0] += 1
        if count[0] == looks:
            assert new.save(3, state(2, 3))
            new.wait()

    monkeypatch.setattr(old._steps.writer, 'require', looked)
    with contextlib.nullcontext() if looks < 4 else pytest.warns(CheckpointWarning, match='holds step 3'):
        if looks == 4:  # it is committed already, and makes way
            assert old.save(3, state(1, 3))
            old.wait()
        else:
            assert_taken(message(lambda: old.save(3, state(1, 3)) and old.wait()), tmp_path)
    assert_taken(message(old.save, 4, state(1, 4)), tmp_path)
    monkeypatch.undo()
    replaced = [f'3.replaced-by-{new._steps.writer.token}'] if looks == 4 else []
    assert names(tmp_path) == ['2', '3', *replaced, 'writer.json']
    assert run_and_step(helper, tmp_path) == (2, 3)
    assert run_and_step(helper, tmp_path, 2) == (1, 2)


@pytest.mark.parametrize(
    ('owner', 'where'),
    [(_atomic_commit, '_mark'), (_save.SaveThread, '_copy'), (_manifest, 'write_manifest')],
)
def test_another_deletes_what_a_save_has_begun(
    tmp_path: Path,
    helper: MeshShardingHelper,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    where: str,
) -> None:
    """Whatever fails then, the error says who has taken the directory: in `save`, or in `wait`."""
    old, new = Checkpointer(tmp_path), Checkpointer(tmp_path)
    assert old.save(1, state(1, 1))
    old.wait()
    new.restore(helper, P('fsdp'), state(0, 0))
    function, left = getattr(owner, where), [True]

    def called(*args: Any) -> Any:
        if left:
            left.clear()
            assert new.save(2, state(2, 2))
            new.wait()
        return function(*args)

    monkeypatch.setattr(owner, where, called)
    assert_taken(message(lambda: old.save(2, state(1, 2)) and old.wait()), tmp_path)
    with contextlib.suppress(CheckpointError):
        old.wait()
    assert names(tmp_path) == ['1', '2', 'writer.json']
    assert run_and_step(helper, tmp_path) == (2, 2)


def test_steps_that_the_old_writer_saves_meanwhile_make_way(
    tmp_path: Path, helper: MeshShardingHelper
) -> None:
    old, new = Checkpointer(tmp_path, keep=None), Checkpointer(tmp_path, keep=None)
    assert old.save(1, state(1, 1))
    old.wait()
    new.restore(helper, P('fsdp'), state(0, 0))
    for step in (2, 3, 4):
        assert old.save(step, state(1, step))
    old.close()
    with pytest.warns(CheckpointWarning) as caught:
        assert new.save(3, state(2, 3))
    token = new._steps.writer.token
    [warning] = [str(one.message) for one in caught]
    assert warning == (
        f'{tmp_path} holds steps 3 to 4, saved by the writer that this one replaces after this one had '
        f'looked for steps; when its own step is complete they are kept as 3.replaced-by-{token}, which no '
        'restore looks at'
    )
    new.wait()
    assert names(tmp_path) == ['1', '2', '3', *(f'{n}.replaced-by-{token}' for n in (3, 4)), 'writer.json']
    assert run_and_step(helper, tmp_path) == (2, 3)
    assert new.save(4, state(2, 4))
    new.close()
    assert run_and_step(helper, tmp_path) == (2, 4)


@pytest.fixture
def second(tmp_path: Path) -> Checkpointer:
    """The writer that looked for steps before the first one of its directory saved step 3."""
    first, second = Checkpointer(tmp_path), Checkpointer(tmp_path)
    assert second.latest_step() is None
    assert first.save(3, state(1, 3))
    first.wait()
    return second


def assert_tries_again(second: Checkpointer, folder: Path, helper: MeshShardingHelper, error: str) -> None:
    """Its save fails, which loses nothing of what there is; the next one replaces the step."""
    with pytest.warns(CheckpointWarning, match='holds step 3'):
        assert second.save(3, state(2, 3))
    assert error in message(second.wait)
    assert names(folder) == ['3', 'writer.json']
    assert run_and_step(helper, folder) == (1, 3)
    assert second.save(3, state(2, 3))
    second.close()
    assert run_and_step(helper, folder) == (2, 3)


def test_steps_make_way_only_when_another_is_complete(
    tmp_path: Path, helper: MeshShardingHelper, monkeypatch: pytest.MonkeyPatch, second: Checkpointer
) -> None:
    write_own, failed = _save.SaveThread._write_own, []

    def fails_once(save: Any, *args: Any) -> None:
        if not failed:
            failed.append(save)
            raise OSError(28, 'No space left on device')
        write_own(save, *args)

    monkeypatch.setattr(_save.SaveThread, '_write_own', fails_once)
    assert_tries_again(second, tmp_path, helper, 'OSError: [Errno 28] No space left on device')


def test_a_step_that_has_made_way_comes_back_where_the_rename_fails(
    tmp_path: Path, helper: MeshShardingHelper, monkeypatch: pytest.MonkeyPatch, second: Checkpointer
) -> None:
    rename, failed = type(second._directory).rename, []

    def fails_once(path: Any, to: Any) -> Any:
        if Path(to).name == '3' and not failed:
            failed.append(path)
            raise OSError(5, 'Input/output error')
        return rename(path, to)

    monkeypatch.setattr(type(second._directory), 'rename', fails_once)
    assert_tries_again(second, tmp_path, helper, 'OSError: [Errno 5] Input/output error')


def test_a_disk_that_cannot_be_read_once_the_directory_is_taken(
    tmp_path: Path, helper: MeshShardingHelper, monkeypatch: pytest.MonkeyPatch, second: Checkpointer
) -> None:
    """The next save still knows which steps have come from the writer before."""

    def fails() -> Any:
        raise OSError(5, 'Input/output error')

    with monkeypatch.context() as patch:
        patch.setattr(second._steps, '_unfinished', fails)
        assert 'Input/output error' in message(second.save, 3, state(2, 3))
    with pytest.warns(CheckpointWarning, match='holds step 3'):
        assert second.save(3, state(2, 3))
    second.close()
    assert run_and_step(helper, tmp_path) == (2, 3)


def test_no_step_makes_way_later_on(tmp_path: Path) -> None:
    """Neither its own nor one of another program, which does not know of writers."""
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest_step() is None
        assert checkpointer.save(3, state(1, 3))
        checkpointer.wait()
        assert 'holds step 3 already' in message(checkpointer.save, 2, state(1, 2))
        (tmp_path / '3').rename(tmp_path / '5')
        assert 'holds step 5 already' in message(checkpointer.save, 4, state(1, 4))
    assert names(tmp_path) == ['5', 'writer.json']


def test_steps_that_cannot_be_deleted(
    tmp_path: Path, helper: MeshShardingHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is saved, and so said; what is a link is deleted, and what it leads to is not."""
    checkpointer = Checkpointer(tmp_path / 'run', keep=1)
    assert checkpointer.save(1, state(1, 1))
    checkpointer.wait()
    (tmp_path / 'run' / '1').rename(tmp_path / 'elsewhere')
    (tmp_path / 'run' / '1').symlink_to(tmp_path / 'elsewhere')

    def fails(path: Any) -> Any:
        raise PermissionError(13, 'Permission denied')

    with monkeypatch.context() as patch:
        patch.setattr(checkpointer._steps, 'remove', fails)
        assert checkpointer.save(2, state(1, 2))
        with pytest.warns(CheckpointWarning) as caught:
            checkpointer.wait()
    assert [str(one.message) for one in caught] == [
        'step 2 is saved, and older steps cannot be deleted; the next save tries it again: '
        'PermissionError: [Errno 13] Permission denied'
    ]
    assert run_and_step(helper, tmp_path / 'run') == (1, 2)
    assert checkpointer.save(3, state(1, 3))
    checkpointer.close()
    assert names(tmp_path / 'run') == ['3', 'writer.json']
    assert (tmp_path / 'elsewhere' / 'state').is_dir()


def test_a_step_is_on_the_disk_before_it_counts(
    tmp_path: Path, helper: MeshShardingHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the power goes: its files and folders before the rename, and that before older ones go."""
    synced: set[int] = set()
    fsync, commit, prune = os.fsync, StepDirectory.commit, StepDirectory.prune

    def noted(number: int) -> None:
        synced.add(os.fstat(number).st_ino)
        fsync(number)

    def committed(steps: StepDirectory, step: int, name: str) -> None:
        staging = steps.staging(step, name)
        below = [*Path(staging).rglob('*')]
        assert 'files.json' in {path.name for path in below}
        assert [path for path in [Path(staging), *below] if path.stat().st_ino not in synced] == []
        synced.clear()
        commit(steps, step, name)

    def pruned(steps: StepDirectory, keep: Any) -> None:
        assert tmp_path.stat().st_ino in synced
        prune(steps, keep)

    monkeypatch.setattr(os, 'fsync', noted)
    monkeypatch.setattr(StepDirectory, 'commit', committed)
    monkeypatch.setattr(StepDirectory, 'prune', pruned)
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        assert checkpointer.save(1, state(1, 1))
    assert names(tmp_path) == ['1', 'writer.json']


def test_a_disk_that_is_full_from_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of a save that could not begin, nor of a writer that could not take the directory."""

    def full(number: int) -> None:
        raise OSError(28, 'No space left on device')

    with Checkpointer(tmp_path) as checkpointer, monkeypatch.context() as patch:
        for left in ([], ['writer.json']):
            patch.setattr(os, 'fsync', full)
            said = message(lambda: checkpointer.save(1, state(1, 1)) and checkpointer.wait())
            assert 'OSError: [Errno 28] No space left' in said
            assert names(tmp_path) == left
            patch.undo()
            checkpointer._steps.writer.take()


def test_two_runs_in_threads_mix_no_step(tmp_path: Path, helper: MeshShardingHelper) -> None:
    """Both save the same steps, with other numbers; one takes the directory from the other."""
    first = threading.Barrier(2)
    errors: dict[int, str] = {}

    def train(run: int) -> None:
        checkpointer = Checkpointer(tmp_path, keep=4)
        checkpointer.latest_step()
        first.wait(60)
        try:
            for step in range(1, 13):
                checkpointer.save(step, state(run, step))
                checkpointer.wait()
        except CheckpointError as error:
            errors[run] = str(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_atomic_commit, 'warn', lambda *args: None)
        with ThreadPoolExecutor(2) as pool:
            [*pool.map(train, (1, 2))]
    [(loser, text)] = errors.items()
    assert_taken(text, tmp_path)
    steps = sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal())
    assert steps == [9, 10, 11, 12]
    assert [run_and_step(helper, tmp_path, step) for step in steps] == [(3 - loser, step) for step in steps]


@pytest.mark.parametrize(
    'text', ['', '[' * 100_000, '{"token": 1}', '[]', '\xff', ' ' * 5000, 'null'], ids=lambda text: text[:5]
)
def test_what_somebody_wrote_in_place_of_the_writer(
    tmp_path: Path, helper: MeshShardingHelper, text: str
) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.save(1, state(1, 1))
        checkpointer.wait()
        file = tmp_path / 'writer.json'
        file.write_text(text, encoding='latin-1')
        found = message(checkpointer.save, 2, state(1, 2))
        assert found.startswith(f'{file} cannot be read, so the writer of this directory is not known: ')
        assert found.endswith('. Delete the file if no other job writes there')
        assert names(tmp_path) == ['1', 'writer.json']
        file.unlink()
        assert checkpointer.save(2, state(1, 2))
    file.write_text(text, encoding='latin-1')
    with Checkpointer(tmp_path) as newest:
        newest.restore(helper, P('fsdp'), state(0, 0))
        assert newest.save(3, state(2, 3))
    assert run_and_step(helper, tmp_path) == (2, 3)


def test_where_folders_cannot_be_renamed(
    tmp_path: Path, helper: MeshShardingHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in object stores: a step counts once a file in it says so."""
    commits_by_file = ocp.path.atomicity.CommitFileTemporaryPath
    monkeypatch.setattr(
        ocp.path.atomicity_defaults,
        'get_default_temporary_path_class',
        lambda *args, **kwargs: commits_by_file,
    )
    monkeypatch.setattr(orbax, 'commits_by_rename', lambda directory: False)
    old, new = Checkpointer(tmp_path, keep=2), Checkpointer(tmp_path, keep=2)
    for step in (1, 2, 3):
        assert old.save(step, state(1, step))
    old.wait()
    (tmp_path / '4' / 'state').mkdir(parents=True)  # of a save that was killed
    assert old.latest_step() == 3
    new.restore(helper, P('fsdp'), state(0, 0))
    assert new.save(4, state(2, 4))
    new.wait()
    assert_taken(message(old.save, 4, state(1, 4)), tmp_path)
    assert names(tmp_path) == ['3', '4', 'writer.json']
    assert run_and_step(helper, tmp_path) == (2, 4)
    with Checkpointer(tmp_path) as newest:
        newest.restore(helper, P('fsdp'), state(0, 0))
        assert new.save(5, state(2, 5))
        new.wait()
        assert f'step 5 cannot be saved: {tmp_path} holds step 5 already' in message(
            newest.save, 5, state(3, 5)
        )


def test_sixteen_threads_and_a_close_among_them(tmp_path: Path, helper: MeshShardingHelper) -> None:
    """They take turns, everyone ends, and no thread stays behind."""
    checkpointer = Checkpointer(tmp_path, keep=4)
    checkpointer.save(0, state(1, 0))
    checkpointer.wait()
    ready = threading.Barrier(16)

    def work(number: int) -> None:
        ready.wait(60)
        for turn in range(4):
            what = (number + turn) % 4
            if what == 0:
                with contextlib.suppress(CheckpointError):  # another thread has saved a later step
                    step = 16 * turn + number + 1
                    checkpointer.save(step, state(1, step))
            elif what == 1:
                found = checkpointer.restore(helper, P('fsdp'), state(0, 0))
                [value] = {int(value) for leaf in jax.tree.leaves(found) for value in np.asarray(leaf)}
                assert value // 1000 == 1
            elif what == 2:
                assert checkpointer.latest_step() is not None
                checkpointer.wait()
            else:
                checkpointer.close()

    with ThreadPoolExecutor(16) as pool:
        for one in [pool.submit(work, number) for number in range(16)]:
            one.result(timeout=300)
    checkpointer.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith('scalax')]
    assert checkpointer.latest_step() == run_and_step(helper, tmp_path)[1]
