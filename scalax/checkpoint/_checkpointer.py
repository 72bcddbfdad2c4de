"""Checkpointer of a training run: saves in the background, and restores onto any mesh.

Each file of the package prevents a failure that Orbax alone would have; `tests/checkpoint/test_orbax` and
`test_processes` demonstrate each one. When such a test fails, the file can be removed.

- `_agreement`, `_save`: if one process fails or makes another call, the others wait until the timeout.
- `_atomic_commit`: the second of two managers deletes the step of the first, or commits half-written files.
- `_manifest`, `_saved_step`: a step that lacks a file counts as the latest; changed bytes are restored.
- `_files`: folders and JSON files may be lost in a power failure.
- `_target`: leaves are restored in other dtypes, and PRNG keys with another implementation.
- `_validation`: values that do not fit in 32 bits are changed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import threading
import types
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

from scalax._core.mesh import meshes
from scalax._core.pytree.paths import NamedTree
from scalax._core.util.progress import progress
from scalax._data.host import process_collectives
from scalax._data.reshard.leaf_mapping import checked_pairs
from scalax._diagnostics.watchdog.state import record_step
from scalax.checkpoint import _agreement
from scalax.checkpoint._atomic_commit import StepDirectory
from scalax.checkpoint._files import as_path
from scalax.checkpoint._saved_step import SavedStep, complete_steps, encode_data, find_step, latest_undamaged
from scalax.checkpoint._target import renamed_paths, require_fit, target_of
from scalax.errors import ArgumentError, CheckpointError, CheckpointWarning, checked_flag, shown, warn

if TYPE_CHECKING:
    from scalax._helper import MeshShardingHelper
    from scalax.checkpoint._save import SaveThread
    from scalax.rules import RuleLike


_log = logging.getLogger('scalax.checkpoint')


class Checkpointer(contextlib.AbstractContextManager['Checkpointer']):
    """Saves and restores the state of a training run; every process has one, for the same directory.

    A save copies the arrays to the host and returns. A thread then writes them to disk; the next `save`,
    `wait` or `close` raises its errors. Threads may share a checkpointer; their calls run one at a time.

    A directory has one writer: a checkpointer takes it over with its first save, and the next write of the
    previous writer, in this process or another, is an error. Any number of processes may read it.

    Args:
        directory: the directory; the first save creates it. All processes have to see the same files in it.
        keep: the number of latest steps to keep; None keeps all.
        save_every: `save` does nothing at steps that are not a multiple of this.
        checksums: whether to write checksums of all files, which ``restore(verify=True)`` compares.
        timeout: the seconds after which an unfinished save fails, and so does a save or restore that waits
            for another process to make the same call.

    Raises:
        ArgumentError: *directory* is not a path, or another argument is not a positive integer.
        MissingDependencyError: Orbax is not installed.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> from scalax.sharding import MeshShardingHelper, PartitionSpec
        >>> helper = MeshShardingHelper([4, 2], ['fsdp', 'tp'])
        >>> state = helper.shard({'w': jnp.arange(8.0)}, PartitionSpec('fsdp'))
        >>> directory = tempfile.mkdtemp()
        >>> with Checkpointer(directory, save_every=10) as checkpointer:
        ...     [checkpointer.save(step, state) for step in (10, 11)]
        [True, False]
        >>> other = MeshShardingHelper([8], ['fsdp'])
        >>> Checkpointer(directory).restore(other, PartitionSpec('fsdp'), like=state)['w'].sharding.spec
        P('fsdp',)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int | None = 3,
        save_every: int = 1,
        *,
        checksums: bool = True,
        timeout: int = 1200,
    ) -> None:
        options = {'save_every': save_every, 'timeout': timeout, **({} if keep is None else {'keep': keep})}
        for name, value in options.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f'Checkpointer: {name} has to be a positive integer, got {value!r}')
        checked_flag('Checkpointer: checksums', checksums)
        self._directory = as_path(directory)
        self._keep, self._save_every = keep, save_every
        self._checksums, self._timeout = checksums, timeout
        self._steps = StepDirectory(self._directory)
        self._save_thread: SaveThread | None = None
        self._last_step: int | None = None  # saved or restored by this checkpointer
        self._restored: int | None = None
        self._lock = threading.RLock()

    @property
    def restored_step(self) -> int | None:
        """The step of the last `restore`; None before the first."""
        return self._restored

    def save(self, step: int, state: Any, *, data: Any = None, force: bool = False) -> bool:
        """Saves a tree in the background; its arrays may be donated as soon as this returns.

        Every process has to call it.

        Args:
            step: the step.
            state: any pytree of arrays, typed keys and Python numbers.
            data: this process's data iterator (anything with ``get_state`` and ``set_state``), bytes, or a
                value that JSON represents.
            force: save even at a step that `save_every` skips, such as before a shutdown.

        Returns:
            Whether it saves. It does not save between multiples of `save_every`, or at a step that this
            checkpointer has just saved or restored.

        Raises:
            ArgumentError: *step* is invalid.
            CheckpointError: the last save failed; some leaves cannot be saved; the directory holds later
                steps of another run; another writer has taken it; processes save different things.
        """
        with self._lock:
            # Imported here, so that `import scalax.checkpoint` does not import Orbax.
            from scalax.checkpoint._save import SaveThread
            from scalax.checkpoint._validation import validate_state

            error: Exception | None = None
            tree, encoded = None, None
            step = _checked_step(step)
            record_step(step)
            checked_flag('save: force', force)
            if (step % self._save_every and not force) or step == self._last_step:
                return False
            # All methods use the same name: the agreement detects processes that call different ones.
            _agreement.barrier('call', self._timeout)
            is_prepared, is_first = False, jax.process_index() == 0
            name = self._steps.new_save_name()
            try:
                tree = validate_state(NamedTree.of(state))
                encoded = None if data is None else encode_data(data)
                self.wait()
                if is_first:
                    with self._explain_save_error(step, name):
                        self._steps.prepare(step, name)
                    is_prepared = True
            except Exception as fault:  # noqa: BLE001 - raised once all processes know
                error = fault
            try:
                options = f'{step=}, keep={self._keep}, checksums={self._checksums}'
                all_processes, texts = process_collectives.all_processes(), _agreement.saved_texts(tree)
                _agreement.agree('save', all_processes, options, texts, error)
                name = _agreement.save_name_of_process_0(all_processes, name)
            except BaseException:
                if is_prepared:
                    self._steps.discard(step, name)
                raise
            assert tree is not None
            self._save_thread = SaveThread(
                self._steps,
                step,
                name,
                encoded,
                checksums=self._checksums,
                keep=self._keep,
                timeout=self._timeout,
            )
            with self._explain_save_error(step, name):
                self._save_thread.copy(dict(zip(tree.paths, tree.leaves, strict=True)))
            self._last_step = step
            return True

    def restore(
        self,
        helper: MeshShardingHelper,
        rules: RuleLike,
        like: Any,
        step: int | None = None,
        *,
        only: str | None = None,
        rename: Sequence[tuple[str, str]] = (),
        cast: bool = False,
        data: Any = None,
        verify: bool = False,
    ) -> Any:
        """Loads a tree, each array into the sharding that *rules* give it on the mesh of *helper*.

        No host holds more of an array than its devices do. Every process has to call it.

        Args:
            helper: the helper of the mesh, which may differ from the mesh of the save.
            rules: as for `MeshShardingHelper.shard`, for the tree that *like* describes.
            like: the tree to restore: a function without arguments that makes it (it is traced, not run;
                bind arguments with ``functools.partial``), or a tree of arrays or ``jax.ShapeDtypeStruct``.
            step: the step to restore; None takes the latest, and skips damaged ones with a warning.
            only: a regex: only leaves in whose path it is found are restored; the others stay as they are
                in *like*. The checkpoint may have other leaves.
            rename: (regex, replacement) pairs. The first whose regex is found in the path of a leaf in the
                checkpoint is applied to that path, as by ``re.sub``, and gives the path in *like*.
            cast: convert leaves that were saved in another dtype; otherwise they are an error.
            data: the data iterator to set to the state that this process saved.
            verify: first read all files, and compare their checksums.

        Returns:
            The tree, with the structure of *like*. Leaves that are Python numbers in *like* are restored as
            Python numbers. If *like* is a function, they are restored as arrays.

        Raises:
            ArgumentError: *step*, *only*, *rename* or *data* is invalid.
            CheckpointError: there is no such checkpoint; it is damaged; leaves are missing, extra, or of
                another shape or dtype (all are listed); processes request different steps or trees.
            ShardingError: the rules do not fit *like*.
        """
        with self._lock:
            meshes.require_devices(helper.mesh, 'restore')
            _agreement.barrier('call', self._timeout, helper.mesh)
            error: Exception | None = None
            target, local_steps = None, []
            try:
                step = None if step is None else _checked_step(step)
                checked_flag('restore: cast', cast)
                checked_flag('restore: verify', verify)
                rename = checked_pairs('rename', rename)
                if data is not None and not hasattr(data, 'set_state'):
                    raise ArgumentError(
                        f'restore: data has to be an iterator with set_state(), got {data!r}. To read a data '
                        'state that was saved as bytes or as a value, use Checkpointer.data()'
                    )
                self.wait()
                target = target_of(helper, rules, like, only)
                local_steps = complete_steps(self._directory)
            except Exception as fault:  # noqa: BLE001 - including errors of `like`; raised once all processes know
                error = fault
            with_data = '' if data is None else ', with data'
            options = f'{step=}, {only=}, {rename=}, {cast=}, {verify=}{with_data}'
            texts = target.agreement_texts() if target else ()
            _agreement.agree('restore', helper.mesh, options, texts, error)
            assert target is not None
            saved = self._choose_step(helper, local_steps, step, verify)
            # The data state may be missing on this process only.
            with _agreement.all_or_none(helper.mesh, options):
                paths = renamed_paths(saved.leaves, rename, saved.where)
                leaves = {name: saved.leaves[path] for name, path in paths.items()}
                require_fit(target.leaves, leaves, cast, bool(only), saved.where)
                state = None if data is None else saved.data()
            loading = progress(f'restoring step {saved.step}', _log)
            with loading, _agreement.all_or_none(helper.mesh, options):
                values = saved.arrays({paths[name]: leaf for name, leaf in target.leaves.items()})
            if data is not None:
                with _agreement.all_or_none(helper.mesh, options):
                    data.set_state(state)
            self._restored = self._last_step = saved.step
            return target.fill({name: values[paths[name]] for name in target.leaves})

    def latest_step(self) -> int | None:
        """Returns the latest complete step whose files have their saved sizes; None if there is no such step.

        An unfinished save does not count: `wait` for it first.
        """
        steps = complete_steps(self._directory)
        self._steps.has_listed_steps = True
        saved, _ = latest_undamaged(self._directory, steps, lambda saved: saved.damage(False))
        return None if saved is None else saved.step

    def describe(self, step: int | None = None) -> dict[str, Any]:
        """Returns leaf path -> a struct, or the type of a Python number, without loading the checkpoint.

        A typed key is described as the array of its data.

        Args:
            step: the step; the latest by default.
        """
        return self._saved(step).leaves

    def data(self, step: int | None = None) -> Any:
        """Returns the data state that this process saved with a step.

        Args:
            step: the step; by default the last restored step, or the latest if none was restored.
        """
        return self._saved(self._restored if step is None else step).data()

    def wait(self) -> None:
        """Waits until the last `save` is on the disk.

        Raises:
            CheckpointError: it could not be written.
        """
        with self._lock:
            save = self._save_thread
            if save is None:
                return
            with progress(f'saving step {save.step}', _log):
                save.join()  # after Ctrl-C, the save continues, and the next call waits for it
            self._save_thread = None
            if save.error is not None:
                self._last_step = None
                with self._explain_save_error(save.step, save.save):
                    raise save.error

    def close(self) -> None:
        """Waits as `wait` does, and ends the threads."""
        self.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(str(failure))

    def _saved(self, step: int | None) -> SavedStep:
        latest = self.latest_step() if step is None else _checked_step(step)
        if latest is None:
            raise CheckpointError(f'{self._directory} has no checkpoint')
        return find_step(self._directory, latest, complete_steps(self._directory))

    def _choose_step(
        self, helper: MeshShardingHelper, local_steps: Sequence[int], step: int | None, verify: bool
    ) -> SavedStep:
        """Chooses the step to restore, the same on every process, from the steps that this process sees."""
        steps = _agreement.common_steps(helper.mesh, local_steps)
        self._steps.has_listed_steps = True
        if step is not None:
            steps = [find_step(self._directory, step, steps).step]

        def damage(saved: SavedStep) -> list[str]:
            return _agreement.common_damage(helper.mesh, functools.partial(saved.damage, verify))

        saved, skipped = latest_undamaged(self._directory, steps, damage)
        listed = [f'step {number}: {line}' for number, lines in skipped.items() for line in lines]
        if saved is None and not skipped:
            raise CheckpointError(f'{self._directory} has no checkpoint')
        if saved is None:
            name = f'the checkpoint of step {step}' if step is not None else 'every checkpoint'
            raise CheckpointError(f'{name} in {self._directory} is damaged:\n{shown(listed)}')
        if skipped:
            self._steps.damaged |= set(skipped)
            warn(
                f'restoring step {saved.step}: later checkpoints in {self._directory} are damaged, and the '
                f'next save deletes them:\n{shown(listed)}',
                CheckpointWarning,
            )
        return saved

    @contextlib.contextmanager
    def _explain_save_error(self, step: int, name: str) -> Iterator[None]:
        """Turns an error into a CheckpointError that explains why a step could not be saved."""
        try:
            yield
        except Exception as error:
            if self._steps.is_acquired or jax.process_index():  # process 0 acquires it for all
                # Another writer that has deleted the files explains the error; its token may be unreadable.
                with contextlib.suppress(OSError):
                    self._steps.require_writer(name)
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f'step {step} could not be saved in {self._directory}; what was there before is untouched: '
                f'{type(error).__name__}: {error}'
            ) from error


def _checked_step(step: Any) -> int:
    """Returns a step as a Python int, by which folders are named; it may be an integer of NumPy or JAX."""
    with contextlib.suppress(TypeError):
        number = operator.index(step)
        if number >= 0 and not isinstance(step, bool):
            return number
    raise ArgumentError(f'step has to be an integer of at least 0, got {step!r}')
