"""One save: the arrays are copied to the host, and a thread writes them and commits the step.

Beside the arrays, which Orbax writes, there is a folder ``scalax``: ``leaves.json`` describes the tree,
``data.N`` is the data state of process N, and ``files.json`` lists all files with their sizes and checksums.
The last is written after all else, before the step is committed.

A process that cannot write its part writes a file that says so, and still comes to the barriers: all
processes learn of it at once, and none waits for one that has given up. Orbax's `AsyncCheckpointer` lets the
others wait for it until the time is up.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from scalax._jax import orbax
from scalax._trace.threads import in_a_thread
from scalax.checkpoint import _agreement, _files, _manifest
from scalax.checkpoint._atomic_commit import StepDirectory
from scalax.checkpoint._description import LeafDescription
from scalax.checkpoint._saved_step import FOLDER, FORMAT, ITEM, LEAVES, MANIFEST
from scalax.errors import CheckpointError

_POLL_SECONDS = 1.0  # between looks whether the folder of a save still exists
_SHOWN = 1 << 10  # characters of another process's error


@dataclasses.dataclass(frozen=True)
class Content:
    """What one process saves, beside the arrays.

    Attributes:
        leaves: the description of each leaf.
        data: the data state of this process.
        checksums: whether to write checksums of the files.
    """

    leaves: Sequence[LeafDescription]
    data: bytes | None
    checksums: bool


class SaveThread(threading.Thread):
    """The thread of one save.

    Attributes:
        step: its number.
        save: its name.
        error: why the save failed, once the thread has ended.
        warning: what went wrong after the step was complete.
    """

    error: BaseException | None = None
    warning: str | None = None

    def __init__(
        self, steps: StepDirectory, step: int, save: str, content: Content, keep: int | None, timeout: int
    ) -> None:
        super().__init__(name='scalax-save')
        self.step, self.save = step, save
        self._steps, self._content, self._keep = steps, content, keep
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
                    f'{self._root.parent}, which process 0 has made, is not seen by process '
                    f'{self._process}: all have to see the same files'
                )
            # In a thread, because the caller may run in an event loop itself, as in notebooks.
            self._futures = in_a_thread('scalax-copy', lambda: self._copy(state)) or ()
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
                    self._wait_for(future)
                self._write_own()
        except BaseException as error:  # noqa: BLE001 - told to the other processes
            self.error = error
        if self.error is not None:
            with contextlib.suppress(OSError):
                self._part('failed', self._process).write_text(_text(self.error))

    def _wait_for(self, future: Any) -> None:
        """Waits for what Orbax writes.

        If another writer has deleted the folder meanwhile, Orbax waits for process 0 to create a folder in
        it. This process creates it instead: Orbax ends, and its error follows at once.
        """
        while True:
            begun, left = time.monotonic(), self._end - time.monotonic()
            try:
                return future.result(timeout=max(min(_POLL_SECONDS, left), 0))
            except TimeoutError:
                # The time is up, or this is a TimeoutError of Orbax itself.
                if left < _POLL_SECONDS or time.monotonic() - begun < _POLL_SECONDS / 2:
                    raise
            if not self._steps.is_prepared(self.step, self.save):
                orbax.awaited_folder(self._root).mkdir(parents=True, exist_ok=True)

    def _write_own(self) -> None:
        """Writes the files of this process, once its arrays are on the disk."""
        content = self._content
        if self._process == 0:
            leaves = [dataclasses.asdict(leaf) for leaf in content.leaves]
            head = {'format': FORMAT, 'processes': jax.process_count(), 'leaves': leaves}
            _files.write_json(self._root / LEAVES, head)
        own = [*_manifest.file_names(self._root, orbax.folder_of_process(self._process))]
        if content.data is not None:
            data = self._part('data', self._process)
            data.write_bytes(content.data)
            own.append(f'{FOLDER}/{data.name}')
        measured = _manifest.measure(self._root, own, content.checksums)
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
                why = (
                    _files.read_bytes(failed, 8 * _SHOWN).decode(errors='replace') if failed.exists() else ''
                )
                raise CheckpointError(f'process {process} could not write its part{why and f": {why}"}')
            files |= _manifest.read_manifest(part)
            part.unlink()
        self._handler.finalize(self._root)
        rest = [name for name in _manifest.file_names(self._root) if name not in files]
        files |= _manifest.measure(self._root, rest, self._content.checksums)
        _manifest.write_manifest(self._root / MANIFEST, files)
        _files.sync_folders(self._root.parent)

    def _finish(self) -> None:
        if self._process == 0:
            try:
                self._steps.prune(self._keep)
            except OSError as error:
                self.warning = (
                    f'step {self.step} is saved, and older steps cannot be deleted; the next save tries it '
                    f'again: {_text(error)}'
                )
        elif not self._steps.is_committed(self.step, self.save):
            raise CheckpointError(
                f'step {self.step} could not be saved: process 0 has not completed it, and says why'
            )

    def _part(self, what: str, process: int) -> orbax.Path:
        """A file that each process writes for itself."""
        return self._root / FOLDER / f'{what}.{process}'


def _text(error: BaseException) -> str:
    return f'{type(error).__name__}: {error}'[:_SHOWN]
