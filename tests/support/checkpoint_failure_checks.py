"""Checks of checkpoints if one process fails: checkpoint/test_processes.py runs them in each process.

All processes get an error within seconds, and the next call works. If a process never makes the call, the
others get an error after the timeout.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from scalax.checkpoint import Checkpointer, _atomic_commit, _checkpointer, _save, _saved_step
from scalax.errors import ArgumentError, CheckpointError
from scalax.sharding import MeshShardingHelper
from scalax.sharding import PartitionSpec as P

SOON_S = 200
LIKE = {'w': jax.ShapeDtypeStruct((16,), np.int32)}


def folder(name: str) -> Path:
    return Path(os.environ['CHECKPOINT_CHECKS'], f'{name}-{jax.process_count()}')


def helper() -> MeshShardingHelper:
    return MeshShardingHelper([-1], ['x'])


def last() -> bool:
    return jax.process_index() == jax.process_count() - 1


def state(step: int) -> dict[str, Any]:
    return {'w': helper().shard(np.full(16, step, np.int32), P('x'))}


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Returns the error of a call, which has to be raised within seconds."""
    begun = time.monotonic()
    try:
        function(*args, **kwargs)
    except (CheckpointError, ArgumentError, OSError, ZeroDivisionError) as error:
        assert time.monotonic() - begun < SOON_S
        return f'{type(error).__name__}: {error}'
    raise AssertionError('no error was raised')


@contextlib.contextmanager
def failing(owner: Any, name: str, here: bool) -> Iterator[None]:
    """Makes a function that raises OSError in one process."""
    function = getattr(owner, name)

    def failed(*args: Any, **kwargs: Any) -> Any:
        raise OSError(5, 'Input/output error')

    if here:
        setattr(owner, name, failed)
    try:
        yield
    finally:
        setattr(owner, name, function)


def assert_saves(checkpointer: Checkpointer, step: int) -> None:
    """Checks that the next save is complete, and that no other files are left."""
    assert checkpointer.save(step, state(step))
    checkpointer.close()
    restored = Checkpointer(checkpointer._directory).restore(helper(), P(), LIKE, verify=True)
    assert int(restored['w'].addressable_data(0)[0]) == step
    names = [path.name for path in checkpointer._directory.iterdir()]
    assert not [name for name in names if 'tmp' in name], names


class Broken:
    def get_state(self) -> Any:
        return 1 // 0

    def set_state(self, state: Any) -> None:
        raise ZeroDivisionError('integer division or modulo by zero')


def check_saves_that_differ() -> None:
    checkpointer = Checkpointer(folder('differ'), timeout=400)
    gone = jnp.ones(3)
    gone.delete()
    last_process = jax.process_count() - 1
    for step, (changes, local_text, others) in enumerate(
        [
            (
                {'state': {'w': gone}},
                'w: float32[3]: it was donated',
                f'process {last_process}: CheckpointError: some',
            ),
            (
                {'state': {**state(1), 'n': 3}},
                'n is Python int 3, and',
                f'process {last_process}: n is Python int 3',
            ),
            ({'step': 99}, 'calls it with step=99, keep=3', 'and process 0 with step='),
            ({'data': Broken()}, 'ZeroDivisionError', f'process {last_process}: ZeroDivisionError'),
            ({'data': {1}}, 'is neither bytes nor JSON', f'process {last_process}: CheckpointError: data='),
        ]
    ):
        arguments = {'step': step, 'state': state(step), **(changes if last() else {})}
        text = error_of(checkpointer.save, **arguments)
        if (
            others.startswith(f'process {last_process}: CheckpointError')
            or 'Error: ' in local_text
            or local_text.startswith('Zero')
        ):
            assert (local_text if last() else others) in text, text
        else:
            assert text.startswith('CheckpointError: save: the processes disagree (step='), text
            assert others in text or local_text in text, text
    for value in (np.arange(3), 7):
        text = error_of(checkpointer.save, 9, {**state(9), 'n': value + last()})
        assert f'process {last_process}: n is ' in text and 'and ' in text, text
    assert checkpointer.latest_step() is None
    assert_saves(checkpointer, 10)


def check_process_0_cannot_list_or_begin() -> None:
    """Process 0 lists the steps and creates the folder."""
    checkpointer = Checkpointer(folder('look'), timeout=400)
    first = jax.process_index() == 0
    for owner, name in ((_atomic_commit, 'complete_steps'), (_atomic_commit.StepDirectory, 'prepare')):
        with failing(owner, name, first):
            text = error_of(checkpointer.save, 1, state(1))
        message = 'CheckpointError: step 1 could not be saved in '
        assert message in text and 'OSError: [Errno 5] Input/output error' in text, text
    assert_saves(checkpointer, 1)


def check_process_that_cannot_copy_or_write() -> None:
    """On the other processes `save` has returned, so `wait` or the next save raises."""
    checkpointer = Checkpointer(folder('write'), timeout=400)
    for who in (0, jax.process_count() - 1):
        here = jax.process_index() == who
        for name in ('async_save', '_write_local', '_finalize'):
            owner = ocp.StandardCheckpointHandler if name == 'async_save' else _save.SaveThread
            with failing(owner, name, here):
                if name == 'async_save' and here:
                    text = error_of(checkpointer.save, 1, state(1))
                    error_of(checkpointer.wait)
                else:
                    assert checkpointer.save(1, state(1))
                    if name == '_finalize' and who != 0:
                        checkpointer.wait()  # only process 0 calls it
                        continue
                    text = error_of(checkpointer.wait)
            assert text.startswith('CheckpointError: '), text
            message = f'process {who} could not write its files: OSError: [Errno 5] Input/output error'
            if here:
                assert 'OSError: [Errno 5] Input/output error' in text, text
            elif jax.process_index() == 0:
                assert message in text, text
            else:
                assert 'see the error on process 0' in text, text
            if who == 0:
                assert checkpointer.latest_step() is None
    # If one process did not wait for a failed save, the next save raises on all processes.
    with failing(_save.SaveThread, '_write_local', last()):
        assert checkpointer.save(2, state(2))
        text = error_of(checkpointer.save, 3, state(3))
        assert ('OSError: [Errno 5]' if last() else 'process') in text, text
    assert_saves(checkpointer, 4)


def check_orbax_alone_waits_for_a_failed_process() -> None:
    """With Orbax's checkpointer, other processes get a timeout that does not name the failed process."""
    options = ocp.options.AsyncOptions(timeout_secs=3)
    checkpointer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler(), async_options=options)

    def save() -> None:
        checkpointer.save(folder('orbax') / '1', args=ocp.args.StandardSave(state(1)))
        checkpointer.wait_until_finished()

    with failing(ocp.StandardCheckpointHandler, 'async_save', last()):
        text = error_of(save)
    assert ('Input/output error' if last() else 'TimeoutError: Timed out while waiting') in text, text


def check_restore_that_fails_on_one_process() -> None:
    where = folder('restore')
    with Checkpointer(where) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step), data=step)
    process = jax.process_count() - 1
    for owner, name in (
        (_checkpointer, 'complete_steps'),
        (_saved_step.SavedStep, 'damage'),
        (_checkpointer, 'renamed_paths'),
        (_saved_step.SavedStep, 'arrays'),
    ):
        reader = Checkpointer(where, timeout=400)
        with failing(owner, name, last()):
            if name == 'damage':
                text = error_of(reader.restore, helper(), P('x'), LIKE, 2)
                assert 'it cannot be read: [Errno 5] Input/output error' in text, text
            else:
                text = error_of(reader.restore, helper(), P('x'), LIKE)
                assert (
                    'OSError: [Errno 5]' if last() else f'process {process}: OSError: [Errno 5]'
                ) in text, text
        assert reader.restored_step is None
        assert int(reader.restore(helper(), P(), LIKE)['w'].addressable_data(0)[0]) == 2
    reader = Checkpointer(where, timeout=400)

    class Fine:
        def set_state(self, state: Any) -> None: ...

    text = error_of(reader.restore, helper(), P('x'), LIKE, data=Broken() if last() else Fine())
    assert 'ZeroDivisionError: ' in text, text
    assert reader.restored_step is None


def check_one_saves_and_the_others_restore() -> None:
    checkpointer = Checkpointer(folder('mixed'), timeout=400)
    checkpointer.save(1, state(1))
    checkpointer.wait()
    more = state(2)  # all processes create it
    if last():
        text = error_of(checkpointer.save, 2, more)
    else:
        text = error_of(checkpointer.restore, helper(), P(), LIKE)
    assert 'the processes disagree' in text, text
    assert_saves(checkpointer, 3)


def check_all_processes_of_a_job_are_one_writer() -> None:
    old, new = (Checkpointer(folder('owned'), timeout=400) for _ in range(2))
    old.save(1, state(1))
    old.wait()
    new.restore(helper(), P(), LIKE)
    assert new.save(2, state(2))
    text = error_of(old.save, 3, state(3))
    assert ('' if jax.process_index() == 0 else 'process 0: CheckpointError: ') in text
    assert 'now has another writer: process ' in text, text
    assert_saves(new, 3)


def check_step_committed_while_listing() -> None:
    """Only some processes see the step, so a restart does not continue from it."""
    where = folder('comes')
    old, new = (Checkpointer(where, timeout=400) for _ in range(2))
    for step in (1, 2):
        old.save(step, state(step))
    old.wait()
    with pytest.MonkeyPatch.context() as patch:
        if last():
            patch.setattr(_checkpointer, 'complete_steps', lambda directory: [1])
        new.restore(helper(), P(), LIKE)
    assert new.restored_step == 1
    text = error_of(new.save, 2, state(5))
    assert f'{where} already holds step 2' in text, text
    new.restore(helper(), P(), LIKE)
    assert new.restored_step == 2
    assert_saves(new, 3)


def check_sixteen_threads_of_each_process() -> None:
    """Some threads read. Saves run one after the other, in the same order on every process."""
    checkpointer = Checkpointer(folder('threads'), timeout=400)
    for step in (1, 2):
        checkpointer.save(step, state(step))
        threads = [threading.Thread(target=checkpointer.wait) for _ in range(8)]
        threads += [threading.Thread(target=checkpointer.latest_step) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(200)
    assert checkpointer.latest_step() == 2
    checkpointer.close()
    names = [
        thread.name for thread in threading.enumerate()
    ]  # 'scalax-exit' waits for the end of the program
    assert not [name for name in names if name.startswith('scalax') and name != 'scalax-exit']


def check_missing_process() -> None:
    """The others raise after the timeout, and so does the process that arrives late."""
    checkpointer, more = Checkpointer(folder('absent'), timeout=2), state(1)
    for call in (lambda: checkpointer.save(1, more), lambda: checkpointer.restore(helper(), P(), LIKE)):
        if not last():
            text = error_of(call)
            assert text.startswith(
                'CheckpointError: some processes did not make this call within 2 seconds; all processes '
                'have to make it. They are out of step: restart the job. '
            ), text
        float(jax.jit(lambda w: w.sum())(more['w']))  # the last process waits until the others have raised
    if last():
        assert 'CheckpointError: some processes did not make this call within ' in error_of(
            Checkpointer(folder('absent'), timeout=400).save, 1, more
        )
