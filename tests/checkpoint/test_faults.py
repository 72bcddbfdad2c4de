"""Faults of disks: they cause an error, or a restore of the previous step; never a wrong restore."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from scalax.checkpoint import Checkpointer, _save
from scalax.errors import CheckpointError, CheckpointWarning
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P
from tests.support import ROOT


@pytest.fixture
def helper() -> MeshShardingHelper:
    return MeshShardingHelper([8], ['fsdp'])


def state(step: int) -> dict[str, Any]:
    """Makes different values at each step, which do not compress."""
    rng = np.random.default_rng(step)
    return {
        'w': rng.integers(0, 2**32, (64, 64), np.uint32),
        'b': {'c': rng.normal(size=8).astype(np.float32)},
    }


@pytest.fixture
def three(tmp_path: Path, helper: MeshShardingHelper) -> Path:
    with Checkpointer(tmp_path / 'run') as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, helper.shard(state(step), P('fsdp')), data={'position': step})
    return tmp_path / 'run'


def files(step: Path) -> list[Path]:
    return sorted(path for path in (step / 'state').rglob('*') if path.is_file())


def assert_restores(folder: Path, helper: MeshShardingHelper, step: int, **options: Any) -> None:
    checkpointer = Checkpointer(folder)
    restored = checkpointer.restore(helper, P('fsdp'), state(0), **options)
    assert checkpointer.restored_step == step
    for leaf, other in zip(jax.tree.leaves(restored), jax.tree.leaves(state(step)), strict=True):
        np.testing.assert_array_equal(leaf, other)


def message(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


@pytest.mark.medium
def test_no_truncated_or_missing_file_is_restored(three: Path, helper: MeshShardingHelper) -> None:
    """Tries each file in turn. Every restore and `latest_step` compare sizes."""
    listed = [path for path in files(three / '3') if path.name != 'commit_success.txt']
    assert len(listed) > 8
    for path in listed:
        original = path.read_bytes()
        for damaged in (original[: len(original) // 2], None):
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            assert Checkpointer(three).latest_step() == 2, path
            with pytest.warns(CheckpointWarning, match='step 3: '):
                assert_restores(three, helper, 2)
            path.write_bytes(original)
    assert Checkpointer(three).latest_step() == 3
    assert_restores(three, helper, 3, verify=True)


@pytest.mark.medium
def test_verify_detects_every_flipped_byte(three: Path, helper: MeshShardingHelper) -> None:
    rng = np.random.default_rng(0)
    where = three / '3' / 'state'
    for path in files(three / '3'):
        if path.name in ('commit_success.txt', 'files.json'):
            continue
        original = path.read_bytes()
        damaged = bytearray(original)
        damaged[rng.integers(len(original))] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        text = message(Checkpointer(three).restore, helper, P('fsdp'), state(0), step=3, verify=True)
        name = path.relative_to(where)
        head = f'the checkpoint of step 3 in {three} is damaged:\n'
        assert text.startswith(f'{head}  step 3: {name} has changed since it was written: its CRC-32 is ')
        with pytest.warns(CheckpointWarning, match='has changed since it was written'):
            assert_restores(three, helper, 2, verify=True)
        path.write_bytes(original)
    assert_restores(three, helper, 3, verify=True)


def test_flipped_byte_without_verify(three: Path, helper: MeshShardingHelper) -> None:
    """The reason for `verify`: Orbax restores wrong values without an error."""
    path = max(files(three / '3'), key=lambda path: path.stat().st_size)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    restored = Checkpointer(three).restore(helper, P('fsdp'), state(0))
    assert not np.array_equal(restored['w'], state(3)['w'])


def test_damaged_manifest(three: Path, helper: MeshShardingHelper) -> None:
    listed = three / '3' / 'state' / 'scalax' / 'files.json'
    original = listed.read_text()
    for text in ('', original[: len(original) // 2], '[]'):
        listed.write_text(text)
        assert message(Checkpointer(three).restore, helper, P('fsdp'), state(0), step=3).startswith(
            f'the checkpoint of step 3 in {three} is damaged:\n  step 3: scalax/files.json cannot be read: '
        )
    listed.unlink()
    assert 'step 3: scalax/files.json cannot be read: [Errno 2] No such file' in message(
        Checkpointer(three).restore, helper, P('fsdp'), state(0), step=3
    )
    with pytest.warns(CheckpointWarning):
        assert_restores(three, helper, 2)


def test_empty_step(three: Path, helper: MeshShardingHelper) -> None:
    (three / '3' / 'state').rename(three / '3' / 'elsewhere')
    with pytest.warns(CheckpointWarning, match='step 3: state is missing'):
        assert_restores(three, helper, 2)


@pytest.mark.medium
def test_damaged_steps_are_replaced(three: Path, helper: MeshShardingHelper) -> None:
    for step in ('2', '3'):
        (three / step / 'state' / 'manifest.ocdbt').unlink()
    with Checkpointer(three) as checkpointer:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            checkpointer.restore(helper, P('fsdp'), state(0))
        [text] = [str(number.message) for number in caught if number.category is CheckpointWarning]
        assert text == (
            f'restoring step 1: later checkpoints in {three} are damaged, and the next save deletes them:\n'
            '  step 3: manifest.ocdbt cannot be read: No such file or directory\n'
            '  step 2: manifest.ocdbt cannot be read: No such file or directory'
        )
        assert checkpointer.data() == {'position': 1}
        assert checkpointer.save(2, helper.shard(state(2), P('fsdp')))
    assert sorted(path.name for path in three.iterdir()) == ['1', '2', 'writer.json']
    assert_restores(three, helper, 2, verify=True)
    for step in ('1', '2'):
        (three / step / 'state' / 'manifest.ocdbt').unlink()
    assert message(Checkpointer(three).restore, helper, P('fsdp'), state(0)).startswith(
        f'every checkpoint in {three} is damaged:\n  step 2: manifest.ocdbt cannot be read'
    )
    assert Checkpointer(three).latest_step() is None


def test_verify_without_checksums(tmp_path: Path, helper: MeshShardingHelper) -> None:
    with Checkpointer(tmp_path, checksums=False) as checkpointer:
        checkpointer.save(1, helper.shard(state(1), P('fsdp')))
    assert_restores(tmp_path, helper, 1)
    assert message(Checkpointer(tmp_path).restore, helper, P('fsdp'), state(0), verify=True) == (
        f'the checkpoint of step 1 in {tmp_path} cannot be verified, because it was saved without '
        'checksums. Restore it without verify=True'
    )


def test_unwritable_folder(tmp_path: Path, helper: MeshShardingHelper) -> None:
    file = tmp_path / 'file'
    file.touch()
    checkpointer = Checkpointer(file / 'below')
    text = message(checkpointer.save, 1, helper.shard(state(1), P('fsdp')))
    below = file / 'below'
    start = f'step 1 could not be saved in {below}; what was there before is untouched: NotADirectory'
    assert text.startswith(start)
    assert checkpointer.latest_step() is None
    checkpointer.close()


CHILD = """
import logging, os, resource, signal, sys, warnings
warnings.simplefilter('error')
import jax
jax.config.update('jax_num_cpu_devices', 8)
import numpy as np
from absl import logging as absl_logging
absl_logging.set_verbosity(absl_logging.FATAL)
from scalax.checkpoint import Checkpointer
from scalax.errors import CheckpointError
from scalax.sharding import MeshShardingHelper, PartitionSpec as P
from tests.checkpoint.test_faults import state

helper = MeshShardingHelper([8], ['fsdp'])
def large(step):
    bits = np.random.default_rng(step).integers(0, 2**32, (1024, 4096), np.uint32)
    return helper.shard(state(step) | {{'large': bits}}, P('fsdp'))
"""

# Files cannot grow beyond 1 MiB, as on a full disk.
FULL = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
checkpointer = Checkpointer({folder!r})
checkpointer.save(1, helper.shard(state(1), P('fsdp')))
checkpointer.wait()
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, unlimited[1]))
for then in (checkpointer.wait, lambda: checkpointer.save(4, large(4)), checkpointer.close):
    checkpointer.save(2, large(2))
    try:
        then()
    except CheckpointError as error:
        print(str(error)[:200].replace(chr(10), ' '))
    else:
        sys.exit('nothing was raised')
    assert checkpointer.latest_step() == 1
resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
assert checkpointer.save(2, helper.shard(state(2), P('fsdp')))
checkpointer.close()
assert sorted(os.listdir({folder!r})) == ['1', '2', 'writer.json'], os.listdir({folder!r})
"""

KILLED = """
checkpointer = Checkpointer({folder!r})
checkpointer.save(1, helper.shard(state(1), P('fsdp')))
checkpointer.wait()
checkpointer.save(2, large(2))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Any]:
    def run(code: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'}
        text = textwrap.dedent(CHILD + code).format(folder=str(tmp_path / 'run'))
        command = [sys.executable, '-c', text]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)

    yield run


@pytest.mark.slow
def test_a_full_disk(child: Any, tmp_path: Path, helper: MeshShardingHelper) -> None:
    done = child(FULL)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    for line in lines:
        start = f'step 2 could not be saved in {tmp_path / "run"}; what was there before is untouched: '
        assert line.startswith(start)
    assert_restores(tmp_path / 'run', helper, 2, verify=True)


@pytest.mark.slow
def test_process_killed_while_saving(child: Any, tmp_path: Path, helper: MeshShardingHelper) -> None:
    done = child(KILLED)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr[-4000:]
    assert [*(tmp_path / 'run').glob('2.orbax-checkpoint-tmp-*')]
    assert Checkpointer(tmp_path / 'run').latest_step() == 1
    assert_restores(tmp_path / 'run', helper, 1, verify=True)


def test_ctrl_c_while_waiting_for_a_save(
    tmp_path: Path, helper: MeshShardingHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save continues, and its step is one of the kept steps."""
    waited_for, released = threading.Event(), threading.Event()
    write_own = _save.SaveThread._write_local

    def write_late(*args: Any) -> None:
        assert released.wait(200)
        write_own(*args)

    def press() -> None:
        assert waited_for.wait(200)
        time.sleep(0.2)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    monkeypatch.setattr(_save.SaveThread, '_write_local', write_late)
    presser = threading.Thread(target=press)
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, helper.shard(state(1), P('fsdp')))
        presser.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                waited_for.set()
                checkpointer.wait()
        finally:
            released.set()
        presser.join(200)
        for step in (2, 3):
            assert checkpointer.save(step, helper.shard(state(step), P('fsdp')))
    assert sorted(path.name for path in tmp_path.iterdir()) == ['3', 'writer.json']
    assert_restores(tmp_path, helper, 3, verify=True)


def test_error_of_the_loop_is_not_hidden_by_a_save_error(tmp_path: Path, helper: MeshShardingHelper) -> None:
    with pytest.raises(ZeroDivisionError) as caught, Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, helper.shard(state(1), P('fsdp')))
        # It blocks the rename that would commit the step.
        (tmp_path / '1').mkdir()
        (tmp_path / '1' / 'file').touch()
        raise ZeroDivisionError
    assert any('step 1 could not be saved' in note for note in getattr(caught.value, '__notes__', []))
