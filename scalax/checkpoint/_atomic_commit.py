"""Directory of steps with a single writer, and the atomic commit and deletion of steps.

It is impossible to tell whether a silent job has died. So the newest writer takes over the directory with its
first save, by writing a token to a file, and the previous writer fails at its next write. Orbax has no such
rule: its `CheckpointManager` "is NOT multi-job-safe", and if two of them use one directory, one may commit
what the other has half written. The writer checks its token before it begins a step, before it commits a
step, and before it deletes anything. Another writer may take over between such a check and the next action,
which does no harm:

- A step is written in a folder whose name contains the token, and committed by a rename, which fails if the
  step already exists.
- A new writer first renames the unfinished folders of other writers, and then lists the steps. A commit of
  another writer either came before and is in the list, or fails. A folder that another writer begins later is
  never committed, because that writer checks its token again before it commits.
- Steps to delete are listed before the token is checked, so none of them belongs to a later writer.

Google Cloud Storage has no atomic rename. There a step is written in its final folder, and complete once its
last file is written. The token is the only protection, and a save that a writer began before it was replaced
may still write to its step.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import socket

from scalax._core.render.html_pages import visible
from scalax._jax import orbax
from scalax._jax.orbax import Path
from scalax.checkpoint._files import read_json, sync
from scalax.checkpoint._saved_step import FOLDER, ITEM, complete_steps
from scalax.errors import CheckpointError

_WRITER = 'writer.json'
_TOKEN_LENGTH = 16  # characters of a token


class StepDirectory:
    """A directory of steps and its writer. The first process of a job writes for all processes.

    Attributes:
        path: the directory.
        has_listed_steps: whether this writer has listed the existing steps, and may continue from them.
        is_acquired: whether this writer has taken over the directory; another writer may have done so since.
        damaged: the damaged steps that a restore has skipped, which the next save deletes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.has_listed_steps = self.is_acquired = False
        self.damaged: set[int] = set()
        self._token = secrets.token_hex(_TOKEN_LENGTH // 2)
        self._saves = 0

    def new_save_name(self) -> str:
        """Returns a new name for each save: the token and a number."""
        self._saves += 1
        return f'{self._token}{self._saves % 16**8:08x}'

    def prepare(self, step: int, name: str) -> None:
        """Creates the folder of a step and deletes unfinished folders; the first save acquires the directory.

        Args:
            step: the step.
            name: the name of the save.

        Raises:
            CheckpointError: the directory has another writer, or holds later steps.
        """
        if not self.is_acquired:
            if not self.has_listed_steps:
                self._reject_later_steps(step)
            # Otherwise acquire it before listing steps again: steps that the previous writer has saved since
            # would be rejected at each save.
            self._acquire()
        unfinished = [path for path in self.path.iterdir() if self._is_unfinished(path)]
        self.require_writer(self._token)
        for path in unfinished:
            self._remove(path)
        damaged = self.damaged.intersection(complete_steps(self.path))
        self.require_writer(self._token)
        self._reject_later_steps(step)
        for damaged_step in damaged:
            self._remove(self.path / str(damaged_step))
        self.damaged.clear()
        staging = self.staging(step, name)
        try:
            for folder in (orbax.awaited_folder(staging / ITEM), staging / ITEM / FOLDER):
                folder.mkdir(parents=True, exist_ok=True)
            _name_file(staging, name).write_text(name)
        except BaseException:
            self.discard(step, name)
            raise

    def staging(self, step: int | str, name: str) -> Path:
        """Returns the folder in which a save writes a step until it is complete."""
        return self.path / (f'{step}{orbax.unfinished_mark()}-{name}' if self._can_rename else str(step))

    def is_prepared(self, step: int, name: str) -> bool:
        """Returns whether this process sees the folder of a save, which another writer may have deleted."""
        return bool(_name_file(self.staging(step, name), name).exists())

    def commit(self, step: int, name: str) -> None:
        """Commits a step that was written in its folder.

        Raises:
            CheckpointError: another writer has taken the directory.
            OSError: the folder cannot be renamed.
        """
        self.require_writer(self._token)
        final = self.path / str(step)
        if self._can_rename:
            self.staging(step, name).rename(final)
            sync(self.path)
        else:
            for folder in (final / ITEM, final):
                (folder / orbax.COMMITTED).write_text('')

    def is_committed(self, step: int, name: str) -> bool:
        """Returns whether a step is complete, and was written by this save and not by another writer.

        It looks up the path instead of listing the folder: clients of network file systems cache listings for
        a minute.
        """
        final = self.path / str(step)
        return bool(_name_file(final, name).exists()) and orbax.is_complete(final)

    def prune(self, keep: int | None) -> None:
        """Deletes all but the latest steps, unless another writer has taken over the directory."""
        old = complete_steps(self.path)[:-keep] if keep else []
        with contextlib.suppress(CheckpointError):
            if old:
                self.require_writer(self._token)
            for step in old:
                self._remove(self.path / str(step))

    def discard(self, step: int, name: str) -> None:
        """Deletes the folder of a failed save, which only this writer could commit."""
        with contextlib.suppress(OSError, CheckpointError):
            if not self._can_rename:  # it is the final folder, to which another writer may be writing
                self.require_writer(self._token)
            self.staging(step, name).rmtree()

    def _acquire(self) -> None:
        """Takes over the directory from its current writer."""
        self.path.mkdir(parents=True, exist_ok=True)
        since = datetime.datetime.now(datetime.UTC).isoformat(' ', 'seconds')
        owner = {'token': self._token, 'host': socket.gethostname(), 'pid': os.getpid(), 'since': since}
        temporary = self.path / f'{_WRITER}.{self._token}'
        try:
            temporary.write_text(json.dumps(owner))
            sync(temporary)
            temporary.replace(self.path / _WRITER)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        self.is_acquired = True

    def require_writer(self, name: str) -> None:
        """Raises CheckpointError if another writer than that of a save has taken over the directory.

        Args:
            name: the name of the save. It contains the token of process 0, which may differ from the token of
                this process.
        """
        path = self.path / _WRITER
        try:
            owner = read_json(path)
            token, pid, host, since = (str(owner[key])[:200] for key in ('token', 'pid', 'host', 'since'))
        except FileNotFoundError:
            return
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CheckpointError(
                f'{path} cannot be read, so the writer of this directory is not known '
                f'({type(error).__name__}: {visible(str(error))[:200]}). Delete the file if no other job '
                'writes there'
            ) from error
        if token == name[:_TOKEN_LENGTH]:
            return
        raise CheckpointError(
            f'{self.path} now has another writer: process {visible(pid)} on host {host!r}, since '
            f'{visible(since)}. A directory has one writer, the most recent one; this one no longer writes '
            'or deletes anything there. To keep the other one, end this job; to keep this one, end the other '
            'and create a new Checkpointer here, which takes over the directory with its first save'
        )

    def _reject_later_steps(self, step: int) -> None:
        steps = complete_steps(self.path)
        later = [existing for existing in steps if existing >= step and existing not in self.damaged]
        if later:
            listed = f'step {later[0]}' if len(later) == 1 else f'steps {later[0]} to {later[-1]}'
            raise CheckpointError(
                f'step {step} cannot be saved: {self.path} already holds {listed}, from another run '
                'or from later in this one. Restore the latest step and continue from there, or save to '
                'another directory'
            )

    def _remove(self, path: Path) -> None:
        """Deletes a folder, atomically for readers; the next save retries files that cannot be deleted."""
        with contextlib.suppress(FileNotFoundError):
            if self._can_rename:
                step = path.name.partition(orbax.unfinished_mark())[0]
                path = path.rename(self.staging(step, secrets.token_hex(8)))
            else:
                (path / orbax.COMMITTED).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                path.rmtree()

    @property
    def _can_rename(self) -> bool:
        return orbax.commits_by_rename(self.path)

    def _is_unfinished(self, path: Path) -> bool:
        """Returns whether a folder belongs to an unfinished save, or to a step that was being deleted."""
        if self._can_rename:
            return orbax.unfinished_mark() in path.name
        return bool(path.name.isdecimal()) and not orbax.is_complete(path)


def _name_file(folder: Path, name: str) -> Path:
    """Returns the file whose name identifies the save that wrote a step."""
    return folder / ITEM / FOLDER / f'save.{name}'
