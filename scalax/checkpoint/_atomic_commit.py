"""One writer of a directory of steps, and the atomic commit of steps and of their deletion.

Nothing tells whether a silent job has died, so the newest writer takes the directory with its first save, by
a token in a file, and the one before is refused at its next write. Orbax has no such rule: its
`CheckpointManager` "is NOT multi-job-safe", and of two on one directory one commits what the other has half
written. The writer checks its token before it begins a step, before it commits one, and before it deletes
anything. Another writer may take over between such a check and what follows it, which does no harm:

- A step is written in a folder whose name holds the token, and committed by a rename, which fails if the
  step already exists.
- A new writer first renames the unfinished folders of others away, and only then lists the steps: a commit of
  theirs either came before and is in the list, or fails. A folder that they begin later is never committed,
  because they check the token again before they commit.
- Steps to delete are listed before the token is checked, so none of them belongs to a later writer.

Google Cloud Storage has no atomic rename. There a step is written in its own folder, and complete once its
last file is written; the token is the only protection, and a save that a writer began before it was replaced
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
    """A directory of steps, as its writer changes it; the first process of a job does so for all.

    Attributes:
        path: the directory.
        looked: whether this writer knows which steps there were, and may go on from them.
        taken: whether it has taken the directory; it may have lost it since.
        damaged: steps that were passed over, which the next save deletes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.looked = self.taken = False
        self.damaged: set[int] = set()
        self._token = secrets.token_hex(_TOKEN_LENGTH // 2)
        self._saves = 0

    def name_of_save(self) -> str:
        """A new name for each save: the token, and a number."""
        self._saves += 1
        return f'{self._token}{self._saves % 16**8:08x}'

    def prepare(self, step: int, name: str) -> None:
        """Makes room for a step, and its folder; takes the directory at the first save.

        Args:
            step: its number.
            name: the name of the save.

        Raises:
            CheckpointError: the directory has another writer, or holds later steps.
        """
        if not self.taken:
            if not self.looked:
                self._refuse_later(step)
            # Else before it looks again: what the one before has saved since would be refused each time.
            self._take()
        unfinished = [path for path in self.path.iterdir() if self._is_unfinished(path)]
        self.require_writer(self._token)
        for path in unfinished:
            self._remove(path)
        damaged = self.damaged.intersection(complete_steps(self.path))
        self.require_writer(self._token)
        self._refuse_later(step)
        for one in damaged:
            self._remove(self.path / str(one))
        self.damaged.clear()
        staging = self.staging(step, name)
        try:
            for folder in (orbax.awaited_folder(staging / ITEM), staging / ITEM / FOLDER):
                folder.mkdir(parents=True, exist_ok=True)
            _mark(staging, name).write_text(name)
        except BaseException:
            self.discard(step, name)
            raise

    def staging(self, step: int | str, name: str) -> Path:
        """The folder in which a save of this name writes a step until it is complete."""
        return self.path / (f'{step}{orbax.unfinished_mark()}-{name}' if self._renames else str(step))

    def is_prepared(self, step: int, name: str) -> bool:
        """Whether this process sees the folder of a save, which another writer may have deleted."""
        return bool(_mark(self.staging(step, name), name).exists())

    def commit(self, step: int, name: str) -> None:
        """Completes a step that was written in its folder.

        Raises:
            CheckpointError: another writer has taken the directory.
            OSError: the folder cannot be renamed.
        """
        self.require_writer(self._token)
        final = self.path / str(step)
        if self._renames:
            self.staging(step, name).rename(final)
            sync(self.path)
        else:
            for folder in (final / ITEM, final):
                (folder / orbax.COMMITTED).write_text('')

    def is_committed(self, step: int, name: str) -> bool:
        """Whether a step is complete and of this save: another writer may have saved the same step.

        The path is looked up, not listed: clients of network file systems cache listings for a minute.
        """
        final = self.path / str(step)
        return bool(_mark(final, name).exists()) and orbax.is_complete(final)

    def prune(self, keep: int | None) -> None:
        """Deletes all but the latest steps; deletes nothing if another writer has taken the directory."""
        old = complete_steps(self.path)[:-keep] if keep else []
        with contextlib.suppress(CheckpointError):
            if old:
                self.require_writer(self._token)
            for step in old:
                self._remove(self.path / str(step))

    def discard(self, step: int, name: str) -> None:
        """Deletes the folder of a save that has failed; only this writer commits it."""
        with contextlib.suppress(OSError, CheckpointError):
            if not self._renames:  # the folder is the step itself, which another writer may be writing
                self.require_writer(self._token)
            self.staging(step, name).rmtree()

    def _take(self) -> None:
        """Takes the directory from whoever has it."""
        self.path.mkdir(parents=True, exist_ok=True)
        since = datetime.datetime.now(datetime.UTC).isoformat(' ', 'seconds')
        owner = {'token': self._token, 'host': socket.gethostname(), 'pid': os.getpid(), 'since': since}
        written = self.path / f'{_WRITER}.{self._token}'
        try:
            written.write_text(json.dumps(owner))
            sync(written)
            written.replace(self.path / _WRITER)
        except OSError:
            with contextlib.suppress(OSError):
                written.unlink()
            raise
        self.taken = True

    def require_writer(self, name: str) -> None:
        """Raises CheckpointError if another writer than that of a save has the directory.

        Args:
            name: the name of the save. It holds the token of process 0, which may differ from this one's.
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

    def _refuse_later(self, step: int) -> None:
        later = [one for one in complete_steps(self.path) if one >= step and one not in self.damaged]
        if later:
            listed = f'step {later[0]}' if len(later) == 1 else f'steps {later[0]} to {later[-1]}'
            raise CheckpointError(
                f'step {step} cannot be saved: {self.path} already holds {listed}, from another run '
                'or from later in this one. Restore the latest step and continue from there, or save to '
                'another directory'
            )

    def _remove(self, path: Path) -> None:
        """Deletes a folder, atomically for readers; what cannot be deleted now goes with the next save."""
        with contextlib.suppress(FileNotFoundError):
            if self._renames:
                step = path.name.partition(orbax.unfinished_mark())[0]
                path = path.rename(self.staging(step, secrets.token_hex(8)))
            else:
                (path / orbax.COMMITTED).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                path.rmtree()

    @property
    def _renames(self) -> bool:
        return orbax.commits_by_rename(self.path)

    def _is_unfinished(self, path: Path) -> bool:
        """Whether a folder is of an unfinished save, or of a step that was being deleted."""
        if self._renames:
            return orbax.unfinished_mark() in path.name
        return bool(path.name.isdecimal()) and not orbax.is_complete(path)


def _mark(folder: Path, name: str) -> Path:
    """The file that says of which save a step is."""
    return folder / ITEM / FOLDER / f'save.{name}'
