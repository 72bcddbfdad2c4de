"""One save: the arrays are copied to the host, and a thread writes them and commits the step.

Orbax writes the leaves by their paths. (In a tree it has one name for ``a.b`` and ``a/b``, and does not
restore a node whose children have indices beside names.) Beside them there is a folder ``scalax``:
``data.I-of-N`` is the data state of a process, and ``files.json`` lists all files with their sizes and
checksums. It is written after all else, before the step is committed.

A process that cannot write its part still comes to the barriers: all processes learn of it at once, and none
waits for one that has given up. Orbax's `AsyncCheckpointer` lets the others wait for it until the time is up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from scalax._core.context.thread_state import run_in_thread
from scalax._jax import orbax
from scalax.checkpoint import _agreement, _files, _manifest
from scalax.checkpoint._atomic_commit import StepDirectory
from scalax.checkpoint._saved_step import FOLDER, ITEM, MANIFEST, data_file
from scalax.errors import CheckpointError

_LOOK_S = 5.0  # seconds between two looks at whether the others go on
_log = logging.getLogger('scalax.checkpoint')


class SaveThread(threading.Thread):
    """The thread of one save.

    Attributes:
        step: its number.
        save: its name.
        error: why the save failed, once the thread has ended.
    """

    error: BaseException | None = None

    def __init__(
        self,
        steps: StepDirectory,
        step: int,
        save: str,
        data: bytes | None,
        *,
        checksums: bool,
        keep: int | None,
        timeout: int,
    ) -> None:
        super().__init__(name='scalax-save')
        self.step, self.save = step, save
        self._steps, self._data, self._checksums, self._keep = steps, data, checksums, keep
        self._root = steps.staging(step, save) / ITEM
        self._end = time.monotonic() + timeout
        self._process = jax.process_index()
        self._handler = ocp.StandardCheckpointHandler()
        self._futures: Sequence[Any] = ()

    def copy(self, state: Any) -> None:
        """Copies the arrays to the host and starts the thread, even if that fails: the others wait for it."""
        try:
            if not self._steps.is_prepared(self.step, self.save):
                raise FileNotFoundError(
                    f'process {self._process} does not see {self._root.parent}, which process 0 created: all '
                    'processes have to see the same files'
                )
            # In a thread, because the caller may run in an event loop itself, as in notebooks.
            self._futures = run_in_thread('scalax-copy', lambda: self._copy(state)) or ()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.start()

    def _copy(self, state: Any) -> Sequence[Any] | None:
        loop = asyncio.new_event_loop()  # `asyncio.run` would wait for what is written in the background
        try:
            arguments = ocp.args.StandardSave(state)
            return loop.run_until_complete(self._handler.async_save(self._root, args=arguments))
        finally:
            loop.close()

    def run(self) -> None:
        """Writes the part of this process, waits for the others, and commits."""
        try:
            self._write()
            self._meet('written')
            if self._process == 0:
                self._commit()
            self._meet('committed')
            if self.error is None:
                self._finish()
        except BaseException as error:  # noqa: BLE001 - raised by the next call of the checkpointer
            self.error = self.error or error
        finally:
            self._handler.close()

    def _meet(self, where: str) -> None:
        """Waits for the other processes."""
        _agreement.barrier(f'{self.save} {where}', max(self._end - time.monotonic(), 1))

    def _write(self) -> None:
        try:
            if self.error is None:
                for future in self._futures:
                    self._await(future)
                self._write_own()
        except BaseException as error:  # noqa: BLE001 - told to the other processes
            self.error = error
        if self.error is not None:
            with contextlib.suppress(OSError):
                self._part('failed', self._process).write_text(_text(self.error))

    def _await(self, future: Any) -> None:
        """Waits for what Orbax writes; where Orbax waits for a process that has failed, not until the end."""
        while True:
            until = min(time.monotonic() + _LOOK_S, self._end)
            try:
                future.result(timeout=max(until - time.monotonic(), 0))
                return
            except TimeoutError:
                if time.monotonic() < until or until == self._end:  # of Orbax itself, or of this save
                    raise
            if not self._steps.is_prepared(self.step, self.save):
                raise FileNotFoundError(f'{self._root.parent} is gone: another writer has deleted it')
            if failed := sorted((self._root / FOLDER).glob('failed.*')):
                number = failed[0].suffix[1:]
                raise CheckpointError(
                    f'step {self.step} could not be saved: see the error on process {number}'
                )

    def _write_own(self) -> None:
        """Writes the files of this process, once its arrays are on the disk."""
        own = [*_manifest.file_names(self._root, orbax.folder_of_process(self._process))]
        if self._data is not None:
            (self._root / data_file()).write_bytes(self._data)
            own.append(data_file())
        measured = _manifest.measure(self._root, own, self._checksums)
        _manifest.write_manifest(self._part('files', self._process), measured)

    def _commit(self) -> None:
        """Commits the step; done by process 0 when all have written."""
        try:
            if self.error is not None:
                raise self.error
            self._finalize()
            self._steps.commit(self.step, self.save)
        except BaseException as error:  # noqa: BLE001 - raised by the next call of the checkpointer
            self._steps.discard(self.step, self.save)
            self.error = error

    def _finalize(self) -> None:
        files: dict[str, _manifest.File] = {}
        for process in range(jax.process_count()):
            part, failed = self._part('files', process), self._part('failed', process)
            if failed.exists() or not part.exists():
                why = failed.read_text() if failed.exists() else 'they are missing'
                raise CheckpointError(f'process {process} could not write its files: {why}')
            files |= _manifest.read_manifest(part)
            part.unlink()
        self._handler.finalize(self._root)
        rest = [name for name in _manifest.file_names(self._root) if name not in files]
        files |= _manifest.measure(self._root, rest, self._checksums)
        _manifest.write_manifest(self._root / MANIFEST, files)
        _files.sync_folders(self._root.parent)

    def _finish(self) -> None:
        if self._process == 0:
            try:
                self._steps.prune(self._keep)
            except OSError as error:
                _log.warning('older steps cannot be deleted; the next save tries again: %s', _text(error))
        elif not self._steps.is_committed(self.step, self.save):
            raise CheckpointError(f'step {self.step} could not be saved: see the error on process 0')

    def _part(self, what: str, process: int) -> orbax.Path:
        """A file that each process writes for itself."""
        return self._root / FOLDER / f'{what}.{process}'


def _text(error: BaseException) -> str:
    return f'{type(error).__name__}: {error}'
