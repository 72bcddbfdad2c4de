"""Thread of one save: it copies the arrays to the host, writes them in the background, and commits the step.

Orbax writes the leaves by their paths. (If it wrote a tree, it would use one name for ``a.b`` and ``a/b``,
and could not restore a node whose children have both indices and names.) A folder ``scalax`` beside them has
the data state of each process, ``data.I-of-N``, and the manifest ``files.json``, which is written after all
other files and before the step is committed.

A process that cannot write its part still reaches the barriers, so that all processes learn of it at once.
With Orbax's `AsyncCheckpointer` the others would wait for it until the timeout.
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

_POLL_SECONDS = 5.0  # between two checks whether another process has failed
_log = logging.getLogger('scalax.checkpoint')


class SaveThread(threading.Thread):
    """The thread of one save.

    Attributes:
        step: the step that it saves.
        save: the name of the save.
        error: why the save failed, after the thread has ended.
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
        """Copies the arrays to the host and starts the thread, also after an error: other processes wait."""
        try:
            if not self._steps.is_prepared(self.step, self.save):
                raise FileNotFoundError(
                    f'process {self._process} does not see {self._root.parent}, which process 0 created: all '
                    'processes have to see the same files'
                )
            # In a thread, because the caller may already run in an event loop, as in notebooks.
            self._futures = run_in_thread('scalax-copy', lambda: self._copy(state)) or ()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.start()

    def _copy(self, state: Any) -> Sequence[Any] | None:
        loop = asyncio.new_event_loop()  # `asyncio.run` would wait for the writes in the background
        try:
            arguments = ocp.args.StandardSave(state)
            return loop.run_until_complete(self._handler.async_save(self._root, args=arguments))
        finally:
            loop.close()

    def run(self) -> None:
        """Writes the files of this process, waits for the other processes, and commits the step."""
        try:
            self._write()
            self._barrier('written')
            if self._process == 0:
                self._commit()
            self._barrier('committed')
            if self.error is None:
                self._finish()
        except BaseException as error:  # noqa: BLE001 - raised by the next call of the checkpointer
            self.error = self.error or error
        finally:
            self._handler.close()

    def _barrier(self, stage: str) -> None:
        """Waits for the other processes."""
        _agreement.barrier(f'{self.save} {stage}', max(self._end - time.monotonic(), 1))

    def _write(self) -> None:
        try:
            if self.error is None:
                for future in self._futures:
                    self._await(future)
                self._write_local()
        except BaseException as error:  # noqa: BLE001 - reported to the other processes
            self.error = error
        if self.error is not None:
            with contextlib.suppress(OSError):
                self._process_file('failed', self._process).write_text(_text(self.error))

    def _await(self, future: Any) -> None:
        """Waits for a write of Orbax, but no longer if another process has failed."""
        while True:
            deadline = min(time.monotonic() + _POLL_SECONDS, self._end)
            try:
                future.result(timeout=max(deadline - time.monotonic(), 0))
                return
            except TimeoutError:
                # Raised by Orbax itself, or by the timeout of this save.
                if time.monotonic() < deadline or deadline == self._end:
                    raise
            if not self._steps.is_prepared(self.step, self.save):
                raise FileNotFoundError(f'{self._root.parent} is gone: another writer has deleted it')
            if failed := sorted((self._root / FOLDER).glob('failed.*')):
                process = failed[0].suffix[1:]
                raise CheckpointError(
                    f'step {self.step} could not be saved: see the error on process {process}'
                )

    def _write_local(self) -> None:
        """Writes the data state and the manifest of this process, after its arrays are on the disk."""
        names = [*_manifest.file_names(self._root, orbax.folder_of_process(self._process))]
        if self._data is not None:
            (self._root / data_file()).write_bytes(self._data)
            names.append(data_file())
        files = _manifest.measure(self._root, names, self._checksums)
        _manifest.write_manifest(self._process_file('files', self._process), files)

    def _commit(self) -> None:
        """Commits the step; process 0 does this after all processes have written their files."""
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
            manifest = self._process_file('files', process)
            failed = self._process_file('failed', process)
            if failed.exists() or not manifest.exists():
                reason = failed.read_text() if failed.exists() else 'they are missing'
                raise CheckpointError(f'process {process} could not write its files: {reason}')
            files |= _manifest.read_manifest(manifest)
            manifest.unlink()
        self._handler.finalize(self._root)
        other_names = [name for name in _manifest.file_names(self._root) if name not in files]
        files |= _manifest.measure(self._root, other_names, self._checksums)
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

    def _process_file(self, kind: str, process: int) -> orbax.Path:
        """Returns the path of a file that each process writes: 'files' (its manifest) or 'failed'."""
        return self._root / FOLDER / f'{kind}.{process}'


def _text(error: BaseException) -> str:
    return f'{type(error).__name__}: {error}'
