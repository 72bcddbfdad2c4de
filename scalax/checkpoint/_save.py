"""One save: the arrays are copied to the host, and a thread writes them and commits the step.

Beside the arrays, which Orbax writes, there is a folder ``scalax``: ``leaves.json`` says what the tree looked
like, ``data.N`` is what process N gave as its data state, and ``files.json`` lists all files with their sizes
and checksums. The last is written when all else is, before the step is committed.

A process that cannot write its part says so in a file, and comes to the barriers as the others do: they all
learn of it at once, and none waits for one that has given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, NoReturn

import jax
import orbax.checkpoint as ocp

from scalax._trace.threads import in_a_thread
from scalax.checkpoint import _agreed, _manifest
from scalax.checkpoint._describe import LeafDescription
from scalax.checkpoint._json_file import bytes_of, json_of, sync_folders, write_bytes, write_json
from scalax.checkpoint._manifest import FOLDER, names_below
from scalax.checkpoint._orbax import Path
from scalax.checkpoint._saved import FORMAT, ITEM, LEAVES
from scalax.checkpoint._writer import TOKEN, Writer
from scalax.errors import CheckpointError

_METADATA = '_CHECKPOINT_METADATA'  # what Orbax reads of a step
_AWAITED = 'array_metadatas'  # a folder that Orbax's process 0 makes, and its others wait for
_FAILED = 'failed'
_LOOK_S = 1.0  # how often it is looked whether the folder of a save is still there
_SAVE = 'scalax_save'  # its name, in what Orbax reads
_SHOWN = 1 << 10  # characters of another process's error


@dataclasses.dataclass(frozen=True)
class Content:
    """What is saved: the tree, what there is to say of its leaves, and this process's data state."""

    state: Any
    leaves: Sequence[LeafDescription]
    data: bytes | None
    checksums: bool


def begin(
    writer: Writer, step: int, name: str, known: Collection[int] | None, damaged: Collection[int]
) -> None:
    """Makes room for a step, and the folder that it is written to; by one process, before the others write.

    The arguments are those of `Writer.prepare`, and the name of the save.
    """
    try:
        writer.prepare(step, known, damaged)
        staging = writer.staging(step, name)
        try:
            # In the second Orbax's process 0 writes first: the others would wait for it if it has failed.
            for folder in (FOLDER, _AWAITED):
                (staging / ITEM / folder).mkdir(parents=True, exist_ok=True)
            _write_metadata(staging, name, time.time_ns())
        except BaseException:
            writer.discard(staging)
            raise
    except OSError as error:
        if writer.taken:
            _raise(writer.reason(error, name), error)
        raise


class Save(threading.Thread):
    """The thread of one save.

    Attributes:
        step: its number.
        error: what went wrong, once the thread has ended.
        warning: what went wrong when the step was complete.
    """

    error: BaseException | None = None
    warning: str | None = None

    def __init__(
        self, writer: Writer, step: int, name: str, content: Content, keep: int | None, timeout: int
    ) -> None:
        super().__init__(name='scalax-save')
        self.step = step
        self._writer, self._content, self._keep = writer, content, keep
        self._staging, self._name = writer.staging(step, name), name
        self._begun, self._end = time.time_ns(), time.monotonic() + timeout
        self._first = jax.process_index() == 0
        self._handler = ocp.StandardCheckpointHandler()
        self._futures: Sequence[Any] = ()

    def copy(self) -> None:
        """Copies the arrays to the host, and starts the thread, also if that fails: others wait for it."""
        try:
            if not (self._staging / _METADATA).exists():
                raise FileNotFoundError(
                    f'{self._staging}, which process 0 has made, is not seen by process '
                    f'{jax.process_index()}: all have to see the same files'
                )
            arguments = ocp.args.StandardSave(self._content.state)
            self._futures = _run(self._handler.async_save(self._root, args=arguments)) or ()
        except BaseException as error:
            self.error = self._writer.reason(error, self._name)
            _raise(self.error, error)
        finally:
            self._content = dataclasses.replace(self._content, state=None)
            self.start()

    def run(self) -> None:
        """Writes what is this process's, waits for the others, and commits."""
        try:
            self._write()
            self._meet('written')
            if self._first:
                self._commit()
            self._meet('committed')
            if self.error is None:
                self._end_well()
        except BaseException as error:
            self.error = self.error or error
        finally:
            self._handler.close()

    @property
    def _root(self) -> Path:
        return self._staging / ITEM

    def _meet(self, where: str) -> None:
        """Waits for the other processes."""
        _agreed.meet(f'{self._name[:TOKEN]} {where}', max(self._end - time.monotonic(), 1))

    def _write(self) -> None:
        me = jax.process_index()
        try:
            if self.error is None:
                for future in self._futures:
                    self._wait_for(future)
                self._write_own(me)
        except BaseException as error:
            self.error = self._writer.reason(error, self._name)
        if self.error is not None:
            with contextlib.suppress(OSError):
                (self._root / FOLDER / f'{_FAILED}.{me}').write_text(_text(self.error))

    def _wait_for(self, future: Any) -> None:
        """Waits for what Orbax writes.

        Where another writer has deleted the folder meanwhile, Orbax waits for ten minutes for process 0 to
        make another in it. This process makes one then: Orbax ends, and the error comes right behind.
        """
        while True:
            begun, left = time.monotonic(), self._end - time.monotonic()
            try:
                return future.result(timeout=max(min(_LOOK_S, left), 0))
            except TimeoutError:
                if left < _LOOK_S or time.monotonic() - begun < _LOOK_S / 2:  # too late, or one of Orbax's
                    raise
            if not (self._staging / _METADATA).exists():
                (self._root / _AWAITED).mkdir(parents=True, exist_ok=True)

    def _write_own(self, me: int) -> None:
        """What each process writes, when its arrays are on the disk."""
        folder, content = self._root / FOLDER, self._content
        if me == 0:
            leaves = [dataclasses.asdict(leaf) for leaf in content.leaves]
            head = {'format': FORMAT, 'processes': jax.process_count(), 'leaves': leaves}
            write_json(folder / LEAVES, head)
        own = [*names_below(self._root, f'ocdbt.process_{me}')]
        if content.data is not None:
            (folder / f'data.{me}').write_bytes(content.data)
            own.append(f'{FOLDER}/data.{me}')
        _manifest.write(folder / f'files.{me}', _manifest.measured(self._root, own, content.checksums))

    def _commit(self) -> None:
        """What one process does when all have written."""
        try:
            if self.error is not None:
                raise self.error
            self._finalize()
            _write_metadata(self._staging, self._name, self._begun, time.time_ns())
            sync_folders(self._staging)
            self._writer.commit(self.step, self._staging)
        except BaseException as error:
            self._writer.discard(self._staging)
            self.error = self._writer.reason(error, self._name)

    def _finalize(self) -> None:
        folder, files = self._root / FOLDER, dict[str, _manifest.File]()
        for process in range(jax.process_count()):
            part, failed = (folder / f'{name}.{process}' for name in ('files', _FAILED))
            if failed.exists():
                text = bytes_of(failed, 8 * _SHOWN).decode(errors='replace')
                raise CheckpointError(f'process {process} could not write its part: {text}')
            if not part.exists():
                raise CheckpointError(f'process {process} could not write its part')
            files |= _manifest.read(part)
            part.unlink()
        self._handler.finalize(self._root)
        rest = [name for name in names_below(self._root) if name not in files]
        files |= _manifest.measured(self._root, rest, self._content.checksums)
        _manifest.write(_manifest.manifest_of(self._root), files)

    def _end_well(self) -> None:
        if self._first:
            try:
                self._writer.prune(self._keep)
            except OSError as error:
                self.warning = (
                    f'step {self.step} is saved, and older steps cannot be deleted; the next save tries it '
                    f'again: {_text(error)}'
                )
        elif not self._committed():
            raise self._writer.reason(
                CheckpointError(
                    f'step {self.step} could not be saved: process 0 has not completed it, and says why'
                ),
                self._name,
            )

    def _committed(self) -> bool:
        """Whether the step is complete, and of this save: another may have saved one of its number."""
        with contextlib.suppress(FileNotFoundError):
            metadata = json_of(self._writer.directory / str(self.step) / _METADATA)
            return self._writer.committed(self.step) and metadata['custom_metadata'] == {_SAVE: self._name}
        return False


def _write_metadata(staging: Path, name: str, begun: int, ended: int | None = None) -> None:
    """What Orbax knows of a step: the handler by which it restores it, and when it was saved."""
    metadata = {
        'item_handlers': {ITEM: ocp.StandardCheckpointHandler.typestr()},
        'metrics': {},
        'performance_metrics': {},
        'init_timestamp_nsecs': begun,
        'commit_timestamp_nsecs': ended,
        'custom_metadata': {_SAVE: name},
    }
    write_bytes(staging / _METADATA, json.dumps(metadata).encode())


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, also where the caller is in one itself, as in notebooks."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(coroutine)
        finally:
            loop.close()
    return in_a_thread('scalax-copy', lambda: _run(coroutine))


def _raise(reason: BaseException, error: BaseException) -> NoReturn:
    """Raises what explains an error, which may be the error itself."""
    if reason is error:
        raise error
    raise reason from error


def _text(error: BaseException) -> str:
    return f'{type(error).__name__}: {error}'[:_SHOWN]
