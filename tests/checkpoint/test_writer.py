"""One writer at a time: the newest writer owns the directory, whatever the previous one is doing."""

import contextlib
import json
import os
import re
import shutil
import socket
import threading
import time
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
from scalax.errors import CheckpointError
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P

# If the folder of a save is deleted while Orbax writes several arrays, the first failure ends its event loop,
# and nothing handles the later ones.
pytestmark = pytest.mark.filterwarnings(
    'ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning'
)


@pytest.fixture
def helper() -> MeshShardingHelper:
    return MeshShardingHelper([8], ['fsdp'])


def state(run: int, step: int) -> dict[str, Any]:
    """Makes leaves whose values identify the run and the step."""
    return {name: np.full(64, 1000 * run + step, np.int32) for name in 'abcd'}


def run_and_step(helper: MeshShardingHelper, folder: Path, step: int | None = None) -> tuple[int, int]:
    """Restores a step, and returns the run that wrote all of its leaves, and the step."""
    restored = Checkpointer(folder).restore(helper, P('fsdp'), state(0, 0), step, verify=True)
    [value] = {int(value) for leaf in jax.tree.leaves(restored) for value in np.asarray(leaf)}
    return divmod(value, 1000)


def message(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_taken(text: str, folder: Path) -> None:
    """Checks the entire message of a previous writer."""
    owner = json.loads((folder / 'writer.json').read_text())
    assert (owner['pid'], owner['host']) == (os.getpid(), socket.gethostname())
    assert re.fullmatch(r'\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+00:00', owner['since'])
    assert text == (
        f'{folder} now has another writer: process {os.getpid()} on host {socket.gethostname()!r}, since '
        f'{owner["since"]}. A directory has one writer, the most recent one; this one no longer writes '
        'or deletes anything there. To keep the other one, end this job; to keep this one, end the other '
        'and create a new Checkpointer here, which takes over the directory with its first save'
    )


@pytest.mark.medium
def test_newest_writer_owns_the_directory(tmp_path: Path, helper: MeshShardingHelper) -> None:
    old, new = Checkpointer(tmp_path, keep=1), Checkpointer(tmp_path)
    for step in (1, 2):
        assert old.save(step, state(1, step))
    old.wait()
    new.restore(helper, P('fsdp'), state(0, 0))
    assert old.save(3, state(1, 3))  # a reader takes nothing over
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
    old.restore(helper, P('fsdp'), state(0, 0))  # readers are not restricted
    assert new.save(5, state(2, 5))
    new.close()
    with Checkpointer(tmp_path) as newest:
        newest.restore(helper, P('fsdp'), state(0, 0))
        assert newest.save(6, state(3, 6))
    assert_taken(message(new.save, 7, state(2, 7)), tmp_path)
    assert run_and_step(helper, tmp_path, 5) == (2, 5)


def test_save_while_another_writer_takes_over(
    tmp_path: Path, helper: MeshShardingHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save is not committed, and its files are deleted."""
    old, new = Checkpointer(tmp_path), Checkpointer(tmp_path)
    assert new.latest_step() is None
    begun, released = threading.Event(), threading.Event()
    write_own = _save.SaveThread._write_local

    def write_late(save: Any, *args: Any) -> None:
        if save._steps is old._steps:
            begun.set()
            assert released.wait(200)
        write_own(save, *args)

    monkeypatch.setattr(_save.SaveThread, '_write_local', write_late)
    assert old.save(3, state(1, 3))
    assert begun.wait(200)
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


class Endless:
    """A write of Orbax that waits for a process that never starts to write."""

    def result(self, timeout: float) -> None:
        time.sleep(timeout)
        raise TimeoutError


@pytest.mark.parametrize('is_gone', [True, False])
def test_save_does_not_wait_for_a_failed_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    monkeypatch.setattr(_save, '_POLL_SECONDS', 0.05)
    monkeypatch.setattr(_save.SaveThread, '_copy', lambda self, state: [Endless()])
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.save(1, state(1, 1))
    [folder] = [path for path in tmp_path.iterdir() if path.is_dir()]
    if is_gone:
        shutil.rmtree(folder)
        expected = (
            f'step 1 could not be saved in {tmp_path}; what was there before is untouched: '
            f'FileNotFoundError: {folder} is gone: another writer has deleted it'
        )
    else:
        (folder / _save.ITEM / _save.FOLDER / 'failed.3').write_text('OSError: no space left')
        expected = 'step 1 could not be saved: see the error on process 3'
    assert message(checkpointer.wait) == expected


def test_orbax_timeout_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Endless):
        def result(self, timeout: float) -> None:
            raise TimeoutError('Orbax has waited for its own')

    monkeypatch.setattr(_save.SaveThread, '_copy', lambda self, state: [Late()])
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.save(1, state(1, 1))
    assert message(checkpointer.wait).endswith('TimeoutError: Orbax has waited for its own')


@pytest.mark.medium
@pytest.mark.parametrize('looks', [1, 2, 3])
def test_takeover_after_each_check(
    tmp_path: Path, helper: MeshShardingHelper, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    """The third check of a save comes before the commit."""
    old, new = Checkpointer(tmp_path, keep=2), Checkpointer(tmp_path, keep=2)
    for step in (1, 2):
        assert old.save(step, state(1, step))
    old.wait()
    new.restore(helper, P('fsdp'), state(0, 0))
    count, require = [0], old._steps.require_writer

    def looked(name: str) -> None:
        require(name)
        count[0] += 1
        if count[0] == looks:
            assert new.save(3, state(2, 3))
            new.wait()

    monkeypatch.setattr(old._steps, 'require_writer', looked)
    assert_taken(message(lambda: old.save(3, state(1, 3)) and old.wait()), tmp_path)
    assert_taken(message(old.save, 4, state(1, 4)), tmp_path)
    monkeypatch.undo()
    assert names(tmp_path) == ['2', '3', 'writer.json']
    assert run_and_step(helper, tmp_path) == (2, 3)
    assert run_and_step(helper, tmp_path, 2) == (1, 2)


@pytest.mark.medium
@pytest.mark.parametrize(
    ('owner', 'where'),
    [(_atomic_commit, '_name_file'), (_save.SaveThread, '_copy'), (_manifest, 'write_manifest')],
)
def test_another_writer_deletes_a_running_save(
    tmp_path: Path,
    helper: MeshShardingHelper,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    where: str,
) -> None:
    """Whatever fails, `save` or `wait` raises an error that names the new writer."""
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


def test_steps_saved_by_the_old_writer_in_between(tmp_path: Path, helper: MeshShardingHelper) -> None:
    """The new writer does not save before these steps. It takes over, and may continue after a restore."""
    old, new = Checkpointer(tmp_path), Checkpointer(tmp_path)
    assert old.save(1, state(1, 1))
    old.wait()
    new.restore(helper, P('fsdp'), state(0, 0))
    assert old.save(2, state(1, 2))
    old.wait()
    assert f'{tmp_path} already holds step 2' in message(new.save, 2, state(2, 2))
    assert_taken(message(old.save, 3, state(1, 3)), tmp_path)
    new.restore(helper, P('fsdp'), state(0, 0))
    assert new.save(3, state(2, 3))
    new.close()
    assert run_and_step(helper, tmp_path) == (2, 3)


def test_existing_steps_are_not_replaced_later(tmp_path: Path) -> None:
    """Neither its own steps nor the steps of a program that does not use writers."""
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest_step() is None
        assert checkpointer.save(3, state(1, 3))
        checkpointer.wait()
        assert 'already holds step 3' in message(checkpointer.save, 2, state(1, 2))
        (tmp_path / '3').rename(tmp_path / '5')
        assert 'already holds step 5' in message(checkpointer.save, 4, state(1, 4))
    assert names(tmp_path) == ['5', 'writer.json']


def test_undeletable_steps(
    tmp_path: Path,
    helper: MeshShardingHelper,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The save succeeds."""
    checkpointer = Checkpointer(tmp_path, keep=1)
    assert checkpointer.save(1, state(1, 1))
    checkpointer.wait()

    def fails(path: Any) -> Any:
        raise PermissionError(13, 'Permission denied')

    with monkeypatch.context() as patch:
        patch.setattr(checkpointer._steps, '_remove', fails)
        assert checkpointer.save(2, state(1, 2))
        checkpointer.wait()
    assert [record.getMessage() for record in caplog.records if record.name == 'scalax.checkpoint'] == [
        'older steps cannot be deleted; the next save tries again: PermissionError: [Errno 13] Permission '
        'denied'
    ]
    assert run_and_step(helper, tmp_path) == (1, 2)
    assert checkpointer.save(3, state(1, 3))
    checkpointer.close()
    assert names(tmp_path) == ['3', 'writer.json']


def test_step_is_synced_before_it_is_committed(
    tmp_path: Path, helper: MeshShardingHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure loses no step: files are synced before the rename, and the rename before deletions."""
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


def test_full_disk_at_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that fails at its start leaves no files; neither does a writer that fails to take over."""

    def full(number: int) -> None:
        raise OSError(28, 'No space left on device')

    with Checkpointer(tmp_path) as checkpointer, monkeypatch.context() as patch:
        for left in ([], ['writer.json']):
            patch.setattr(os, 'fsync', full)
            text = message(lambda: checkpointer.save(1, state(1, 1)) and checkpointer.wait())
            assert 'OSError: [Errno 28] No space left' in text
            assert names(tmp_path) == left
            patch.undo()
            checkpointer._steps._acquire()


@pytest.mark.medium
def test_two_runs_do_not_mix_steps(tmp_path: Path, helper: MeshShardingHelper) -> None:
    """Both save the same steps with different values, and one takes over the directory."""
    first = threading.Barrier(2)
    errors: dict[int, str] = {}

    def train(run: int) -> None:
        checkpointer = Checkpointer(tmp_path, keep=4)
        checkpointer.latest_step()
        first.wait(200)
        try:
            for step in range(1, 13):
                checkpointer.save(step, state(run, step))
                checkpointer.wait()
        except CheckpointError as error:
            errors[run] = str(error)

    with ThreadPoolExecutor(2) as pool:
        [*pool.map(train, (1, 2))]
    assert errors
    steps = sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal())
    restored = [run_and_step(helper, tmp_path, step) for step in steps]
    assert [step for _, step in restored] == steps
    assert len({run for run, _ in restored}) <= 1
    for text in errors.values():
        assert ', from another run' in text or 'now has another writer' in text


@pytest.mark.medium
def test_object_stores_without_rename(
    tmp_path: Path, helper: MeshShardingHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In object stores, a step is complete once it has a commit file."""
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
        assert f'step 5 cannot be saved: {tmp_path} already holds step 5' in message(
            newest.save, 5, state(3, 5)
        )


@pytest.mark.medium
def test_sixteen_threads_with_a_concurrent_close(tmp_path: Path, helper: MeshShardingHelper) -> None:
    """Their calls run one at a time, all of them return, and no thread is left."""
    before = set(threading.enumerate())  # a thread of an earlier test may still be ending
    checkpointer = Checkpointer(tmp_path, keep=4)
    checkpointer.save(0, state(1, 0))
    checkpointer.wait()
    ready = threading.Barrier(16)

    def work(number: int) -> None:
        ready.wait(200)
        for turn in range(4):
            action = (number + turn) % 4
            if action == 0:
                with contextlib.suppress(CheckpointError):  # another thread has saved a later step
                    step = 16 * turn + number + 1
                    checkpointer.save(step, state(1, step))
            elif action == 1:
                restored = checkpointer.restore(helper, P('fsdp'), state(0, 0))
                [value] = {int(value) for leaf in jax.tree.leaves(restored) for value in np.asarray(leaf)}
                assert value // 1000 == 1
            elif action == 2:
                assert checkpointer.latest_step() is not None
                checkpointer.wait()
            else:
                checkpointer.close()

    with ThreadPoolExecutor(16) as pool:
        for future in [pool.submit(work, number) for number in range(16)]:
            future.result(timeout=300)
    checkpointer.close()
    new_threads = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not [name for name in new_threads if name.startswith('scalax')]
    assert checkpointer.latest_step() == run_and_step(helper, tmp_path)[1]
