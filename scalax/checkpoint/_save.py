"""One save: the arrays are copied to the host, and a thread writes them and commits the step.

Beside the arrays, which Orbax writes, there is a folder ``scalax``: ``leaves.json`` describes the tree,
``data.N`` is the data state of process N, and ``files.json`` lists all files with their sizes and checksums.
The last is written after all else, before the step is committed.

A process that cannot write its part writes a file that says so, and still comes to the barriers: all
processes learn of it at once, and none waits for one that has given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Collection, Coroutine, Iterator, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from scalax._trace.threads import in_a_thread
from scalax._tree.paths import NamedTree, canonical_dtype, has_foreign_dtype, key_string
from scalax.checkpoint import _agreement, _files
from scalax.checkpoint._description import LeafDescription
from scalax.checkpoint._files import FOLDER, Path
from scalax.checkpoint._saved_step import FORMAT, ITEM, LEAVES
from scalax.checkpoint._target import require_distinct
from scalax.checkpoint._writer import TOKEN_LENGTH, Writer
from scalax.errors import CheckpointError, shown_leaves

_METADATA = '_CHECKPOINT_METADATA'  # what Orbax reads about a step
_AWAITED = 'array_metadatas'  # a folder that Orbax's process 0 makes, and its other processes wait for
_FAILED = 'failed'
_POLL_SECONDS = 1.0  # between looks whether the folder of a save still exists
_NAME_KEY = 'scalax_save'  # the key of the name of a save, in what Orbax reads
_SHOWN = 1 << 10  # characters of another process's error
_PLAIN = {dict, list, tuple, type(None), bool, int, float}


@dataclasses.dataclass(frozen=True)
class Content:
    """What one process saves.

    Attributes:
        state: the tree.
        leaves: the description of each leaf.
        data: the data state of this process.
        checksums: whether to write checksums of the files.
    """

    state: Any
    leaves: Sequence[LeafDescription]
    data: bytes | None
    checksums: bool


def make_room(
    writer: Writer, step: int, name: str, known: Collection[int] | None, damaged: Collection[int]
) -> None:
    """Makes room for a step and creates its folder; done by process 0, before the others write.

    The arguments are those of `Writer.prepare`, and the name of the save.
    """
    try:
        writer.prepare(step, known, damaged)
        staging = writer.staging(step, name)
        try:
            # Orbax's process 0 creates the second, and the others wait for it, even if process 0 has failed.
            for folder in (FOLDER, _AWAITED):
                (staging / ITEM / folder).mkdir(parents=True, exist_ok=True)
            _write_metadata(staging, name, time.time_ns())
        except BaseException:
            writer.discard(staging)
            raise
    except OSError as error:
        if writer.taken:
            _raise_for(writer.reason(error, name), error)
        raise


class SaveThread(threading.Thread):
    """The thread of one save.

    Attributes:
        step: its number.
        error: why the save failed, once the thread has ended.
        warning: what went wrong after the step was complete.
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
        """Copies the arrays to the host and starts the thread, even if that fails: the others wait for it."""
        try:
            if not (self._staging / _METADATA).exists():
                raise FileNotFoundError(
                    f'{self._staging}, which process 0 has made, is not seen by process '
                    f'{jax.process_index()}: all have to see the same files'
                )
            arguments = ocp.args.StandardSave(self._content.state)
            self._futures = _run_coroutine(self._handler.async_save(self._root, args=arguments)) or ()
        except BaseException as error:  # noqa: BLE001 - it is raised
            self.error = self._writer.reason(error, self._name)
            _raise_for(self.error, error)
        finally:
            self._content = dataclasses.replace(self._content, state=None)
            self.start()

    def run(self) -> None:
        """Writes the part of this process, waits for the others, and commits."""
        try:
            self._write()
            self._meet('written')
            if self._first:
                self._commit()
            self._meet('committed')
            if self.error is None:
                self._finish()
        except BaseException as error:  # noqa: BLE001 - raised by the next call of the checkpointer
            self.error = self.error or error
        finally:
            self._handler.close()

    @property
    def _root(self) -> Path:
        return self._staging / ITEM

    def _meet(self, where: str) -> None:
        """Waits for the other processes."""
        _agreement.barrier(f'{self._name[:TOKEN_LENGTH]} {where}', max(self._end - time.monotonic(), 1))

    def _write(self) -> None:
        me = jax.process_index()
        try:
            if self.error is None:
                for future in self._futures:
                    self._wait_for(future)
                self._write_own(me)
        except BaseException as error:  # noqa: BLE001 - told to the other processes
            self.error = self._writer.reason(error, self._name)
        if self.error is not None:
            with contextlib.suppress(OSError):
                (self._root / FOLDER / f'{_FAILED}.{me}').write_text(_text(self.error))

    def _wait_for(self, future: Any) -> None:
        """Waits for what Orbax writes.

        If another writer has deleted the folder meanwhile, Orbax waits for ten minutes for process 0 to
        create a folder in it. This process creates it instead: Orbax ends, and its error follows at once.
        """
        while True:
            begun, left = time.monotonic(), self._end - time.monotonic()
            try:
                return future.result(timeout=max(min(_POLL_SECONDS, left), 0))
            except TimeoutError:
                # The time is up, or this is a TimeoutError of Orbax itself.
                if left < _POLL_SECONDS or time.monotonic() - begun < _POLL_SECONDS / 2:
                    raise
            if not (self._staging / _METADATA).exists():
                (self._root / _AWAITED).mkdir(parents=True, exist_ok=True)

    def _write_own(self, me: int) -> None:
        """Writes the files of this process, once its arrays are on the disk."""
        folder, content = self._root / FOLDER, self._content
        if me == 0:
            leaves = [dataclasses.asdict(leaf) for leaf in content.leaves]
            head = {'format': FORMAT, 'processes': jax.process_count(), 'leaves': leaves}
            _files.write_json(folder / LEAVES, head)
        own = [*_files.file_names(self._root, f'ocdbt.process_{me}')]
        if content.data is not None:
            (folder / f'data.{me}').write_bytes(content.data)
            own.append(f'{FOLDER}/data.{me}')
        _files.write_manifest(folder / f'files.{me}', _files.measure(self._root, own, content.checksums))

    def _commit(self) -> None:
        """Commits the step; done by process 0 when all have written."""
        try:
            if self.error is not None:
                raise self.error
            self._finalize()
            _write_metadata(self._staging, self._name, self._begun, time.time_ns())
            _files.sync_folders(self._staging)
            self._writer.commit(self.step, self._staging)
        except BaseException as error:  # noqa: BLE001 - raised by the next call of the checkpointer
            self._writer.discard(self._staging)
            self.error = self._writer.reason(error, self._name)

    def _finalize(self) -> None:
        folder, files = self._root / FOLDER, dict[str, _files.File]()
        for process in range(jax.process_count()):
            part, failed = (folder / f'{name}.{process}' for name in ('files', _FAILED))
            if failed.exists():
                text = _files.read_bytes(failed, 8 * _SHOWN).decode(errors='replace')
                raise CheckpointError(f'process {process} could not write its part: {text}')
            if not part.exists():
                raise CheckpointError(f'process {process} could not write its part')
            files |= _files.read_manifest(part)
            part.unlink()
        self._handler.finalize(self._root)
        rest = [name for name in _files.file_names(self._root) if name not in files]
        files |= _files.measure(self._root, rest, self._content.checksums)
        _files.write_manifest(_files.manifest_path(self._root), files)

    def _finish(self) -> None:
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
        """Whether the step is complete and was written by this save: another may have saved the same step."""
        with contextlib.suppress(FileNotFoundError):
            metadata = _files.read_json(self._writer.directory / str(self.step) / _METADATA)
            return self._writer.committed(self.step) and metadata['custom_metadata'] == {
                _NAME_KEY: self._name
            }
        return False


def _write_metadata(staging: Path, name: str, begun: int, ended: int | None = None) -> None:
    """Writes what Orbax needs to know about a step: the handler that restores it, and when it was saved."""
    metadata = {
        'item_handlers': {ITEM: ocp.StandardCheckpointHandler.typestr()},
        'metrics': {},
        'performance_metrics': {},
        'init_timestamp_nsecs': begun,
        'commit_timestamp_nsecs': ended,
        'custom_metadata': {_NAME_KEY: name},
    }
    _files.write_bytes(staging / _METADATA, json.dumps(metadata).encode())


def _run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, even if the caller runs in one itself, as in notebooks."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(coroutine)
        finally:
            loop.close()
    return in_a_thread('scalax-copy', lambda: _run_coroutine(coroutine))


def _raise_for(reason: BaseException, error: BaseException) -> NoReturn:
    """Raises the reason for an error, which may be the error itself."""
    if reason is error:
        raise error
    raise reason from error


def _text(error: BaseException) -> str:
    return f'{type(error).__name__}: {error}'[:_SHOWN]


def validate_state(tree: NamedTree) -> NamedTree:
    """Checks that a tree can be saved.

    Returns:
        The tree as it is saved: numpy arrays in the dtypes that JAX gives them, in which they are restored.

    Raises:
        CheckpointError: names every leaf that cannot be saved.
    """
    require_distinct(tree.paths, 'the state')
    if not tree.leaves:
        raise CheckpointError('the state has no leaves: there is nothing to save')
    if tree.bare:
        raise CheckpointError("the state is a single leaf; give a tree, such as {'params': leaf}")
    leaves = [_as_jax_holds(leaf) for leaf in tree.leaves]
    found = [
        f'{tree.describe(i)}: {why}'
        for i, leaf in enumerate(tree.leaves)
        for why in _reasons(leaf, leaves[i])
    ]
    found.extend(_name_clashes(tree))
    if found:
        raise CheckpointError(f'some leaves of the state cannot be saved:\n{shown_leaves(found)}')
    changed = any(leaf is not given for leaf, given in zip(leaves, tree.leaves, strict=True))
    return dataclasses.replace(tree, leaves=leaves) if changed else tree


def restorable_tree(state: Any) -> Any:
    """The state, or nested dicts by leaf path if Orbax could save the state but not restore it.

    Orbax sorts the children of each node by their keys when it reads a tree. It cannot sort those of a node
    that has both indices and names, such as lists of modules in flax's nnx.
    """
    nodes: list[Any] = []

    def is_leaf(node: Any) -> bool:
        if type(node) not in _PLAIN and not isinstance(node, jax.Array | np.ndarray):
            nodes.append(node)
        return False

    jax.tree.leaves(state, is_leaf=is_leaf)
    if not any(map(_has_indices_and_names, nodes)):
        return state
    tree: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        *parents, last = map(key_string, path)
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = leaf
    return tree


def _has_indices_and_names(node: Any) -> bool:
    children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
    keys = [path[0] for path, _ in children if path]
    indices = [isinstance(getattr(key, 'idx', getattr(key, 'key', '')), int) for key in keys]
    return any(indices) and not all(indices)


def _as_jax_holds(leaf: Any) -> Any:
    """A leaf as JAX holds it: without x64, a numpy array of 64 bits has 32."""
    if not isinstance(leaf, np.ndarray | np.generic) or has_foreign_dtype(leaf):
        return leaf
    dtype = canonical_dtype(leaf.dtype)
    with np.errstate(over='ignore'):  # overflows are found by comparing values
        return leaf if leaf.dtype == dtype else leaf.astype(dtype)


def _fits(leaf: Any, held: Any) -> bool:
    """Whether the values of a numpy array fit in the dtype that JAX gives it; digits may be lost."""
    if held is leaf:
        return True
    if leaf.dtype.kind in 'iu':
        return bool((held == leaf).all())
    return bool((np.isfinite(held) == np.isfinite(leaf)).all())


_NOT_STORED = 'Orbax does not write this dtype; cast it to a wider one'


def _is_stored(dtype: Any) -> bool:
    """Whether TensorStore, in which Orbax writes arrays, has a dtype; of keys the data is written."""
    try:
        return not isinstance(dtype, np.dtype) or bool(tensorstore.dtype(dtype.name))
    except ValueError:
        return False


def _reasons(leaf: Any, held: Any) -> Iterator[str]:
    if isinstance(leaf, jax.core.Tracer):
        yield 'it is a value inside a traced function; save outside of it'
    elif isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            yield 'it was donated to a compiled function, and is gone; save what that returned'
        elif 0 in leaf.shape:
            yield 'Orbax does not write arrays without elements; leave it out'
        elif jax.process_count() > 1 and leaf.is_fully_addressable:
            yield 'it is on this process alone; shard it over the mesh of all, or make it a numpy array'
        elif not _is_stored(leaf.dtype):
            yield _NOT_STORED
    elif isinstance(leaf, np.ma.MaskedArray):
        yield 'its mask would be lost'
    elif isinstance(leaf, np.ndarray | np.generic):
        if leaf.size == 0:
            yield 'Orbax does not write arrays without elements; leave it out'
        elif has_foreign_dtype(leaf):
            yield f'JAX has no arrays of dtype {leaf.dtype}'
        elif not _is_stored(held.dtype):
            yield _NOT_STORED
        elif not _fits(leaf, held):
            yield (
                f'it holds values that do not fit in {held.dtype}, which JAX makes of '
                f'{leaf.dtype}; set jax_enable_x64, or save a Python number'
            )
    elif isinstance(leaf, int) and not -(2**63) <= leaf < 2**64:
        yield 'it has more than 64 bits'
    elif not isinstance(leaf, bool | int | float):
        yield 'only arrays, typed keys and Python numbers can be saved'


def _name_clashes(tree: NamedTree) -> Iterator[str]:
    """The leaves that have one name to Orbax, which joins keys with dots."""
    first: dict[str, str] = {}
    for path in tree.paths:
        name = path.replace('/', '.')
        if name in first:
            yield f'{path}: Orbax has one name for it and for {first[name]}: {name}; rename one of their keys'
        first.setdefault(name, path)
