"""The single writer of a checkpoint directory, identified by a token in a file.

Nothing tells whether a silent job has died, so the newest writer takes over the directory with its first
save, and the previous one is refused at its next write. A writer checks the token before it begins a step,
before it commits one, and before it deletes anything. Another writer may take over between such a check and
what follows it. Where a rename is atomic, this does no harm:

- A step is written in a folder whose name holds the token, and committed by a rename, which fails if the
  step already exists.
- A new writer first renames the unfinished folders of others away, and only then lists the steps: a commit of
  theirs either came before and is in the list, or fails. A folder that they begin later is never committed,
  because they check the token again before they commit.
- Steps to delete are listed before the token is checked, so none of them belongs to a later writer.

Object stores have no atomic rename. There a step is complete once its last file is written, the token is the
only protection, and a save that a writer began before it was replaced may still write to its step.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import socket
from collections.abc import Collection, Sequence
from typing import Any

from scalax._report.pages import visible
from scalax.checkpoint._files import Path, orbax, read_json, sync, write_bytes
from scalax.checkpoint._saved_step import ITEM, complete_steps
from scalax.errors import CheckpointError, CheckpointWarning, warn

FILE = 'writer.json'
TOKEN_LENGTH = 16  # characters of a token; the name of a save begins with it
_MOST_BYTES = 1 << 12  # of that file
_COMMITTED = 'commit_success.txt'  # marks a complete step for Orbax where folders cannot be renamed


class Writer:
    """One `Checkpointer` as the writer of its directory; the first process of a job acts for all.

    Attributes:
        token: unique to this writer.
        taken: whether this writer has taken the directory; it may have lost it since.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.token = secrets.token_hex(TOKEN_LENGTH // 2)
        self.taken = False
        # Steps of the writer before, set aside when a step of this one is complete; None until looked for.
        self._replaced: list[int] | None = None
        self._saves = 0

    def require(self) -> None:
        """Returns if this is still the writer of the directory.

        Raises:
            CheckpointError: another one has taken the directory; the message says who.
        """
        owner = self._owner()
        if owner and owner['token'] != self.token:
            raise self._taken_over_error(owner)

    def reason(self, error: BaseException, name: str) -> BaseException:
        """Why a save failed: *error*, unless another writer has taken the directory and deleted its files.

        Args:
            error: the error of the save.
            name: the name of the save. It holds the token of process 0, which may differ from this writer's.
        """
        with contextlib.suppress(CheckpointError):  # the file of the token cannot be read either
            owner = self._owner()
            if owner and owner['token'] != name[:TOKEN_LENGTH]:
                return self._taken_over_error(owner)
        return error

    def prepare(self, step: int, known: Collection[int] | None, damaged: Collection[int]) -> None:
        """Checks that this writer may save a step; takes the directory at its first save.

        Args:
            step: its number.
            known: the steps that existed when this writer last looked; None if it never did. Later ones come
                from the writer that it replaces, and are set aside when a step is committed.
            damaged: the steps to delete.

        Raises:
            CheckpointError: the directory has another writer, or holds later steps.
        """
        if not self.taken:
            self._refuse(step, [one for one in self._later(step, damaged) if known is None or one in known])
            self._take()
            self.taken = True
        unfinished = self._unfinished()
        self.require()
        for path in unfinished:
            self.remove(path)
        if self._replaced is None:
            self._replaced = [] if known is None else self._later(step, damaged)
            self._warn_of_replaced()
        later = self._later(step, [*damaged, *self._replaced])
        there = [one for one in complete_steps(self.directory) if one in damaged]
        self.require()
        self._refuse(step, later)
        for one in there:
            self.remove(self.directory / str(one))

    def name(self) -> str:
        """A new name for each save: the token, and a number."""
        self._saves += 1
        return f'{self.token}{self._saves % 16**8:08x}'

    def staging(self, step: int, name: str) -> Path:
        """The folder in which a save of this name writes a step until it is complete."""
        if not self._renames:
            return self.directory / str(step)
        return self.directory / f'{step}{_suffix()}-{name}'

    def commit(self, step: int, staging: Path) -> None:
        """Completes a step that was written in the folder *staging*.

        Raises:
            CheckpointError: another writer has taken the directory.
            OSError: the folder cannot be renamed.
        """
        self.require()
        final = self.directory / str(step)
        if not self._renames:
            for folder in (final / ITEM, final):
                (folder / _COMMITTED).write_text('')
            return
        replaced = self._replaced or []
        if step in replaced:
            self._set_aside(step)
        try:
            staging.rename(final)
        except OSError:
            if step in replaced:  # it is still the latest step
                with contextlib.suppress(OSError):
                    self._aside(step).rename(final)
            raise
        self._replaced = [one for one in replaced if one != step]
        for one in self._replaced:
            self._set_aside(one)
        self._replaced = []
        sync(self.directory)

    def committed(self, step: int) -> bool:
        """Whether a step is complete, as this process sees it.

        The path is looked up, not listed: clients of network file systems cache listings for a minute.
        """
        final = self.directory / str(step)
        return bool((final if self._renames else final / _COMMITTED).exists())

    def prune(self, keep: int | None) -> None:
        """Deletes all but the latest steps; deletes nothing if another writer has taken the directory."""
        old = complete_steps(self.directory)[:-keep] if keep else []
        if not old:
            return
        with contextlib.suppress(CheckpointError):
            self.require()
            for step in old:
                self.remove(self.directory / str(step))

    def discard(self, staging: Path) -> None:
        """Deletes the folder of a save that has failed."""
        with contextlib.suppress(OSError, CheckpointError):
            if self._renames:  # only this writer commits the folder, and a full disk may refuse to rename it
                staging.rmtree()
            else:  # the folder is the step itself, which another writer may be writing
                self.require()
                self.remove(staging)

    def remove(self, path: Path) -> None:
        """Deletes a folder, atomically for readers; what cannot be deleted now goes with the next save."""
        with contextlib.suppress(FileNotFoundError):
            if self._renames:
                name = path.name.partition(_suffix())[0]
                path = path.rename(self.directory / f'{name}{_suffix()}-{secrets.token_hex(8)}')
            else:
                (path / _COMMITTED).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                if os.path.islink(path):  # somebody has moved the step elsewhere
                    path.unlink()
                else:
                    path.rmtree()

    @property
    def _renames(self) -> bool:
        """Whether a step is committed by a rename, as Orbax does for this kind of path."""
        path = orbax().path
        kind = path.atomicity_defaults.get_default_temporary_path_class(self.directory)
        return bool(kind is path.atomicity.AtomicRenameTemporaryPath)

    def _owner(self) -> dict[str, Any] | None:
        """The writer of the directory, as the file says; None if there is none."""
        file = self.directory / FILE
        try:
            owner = read_json(file, _MOST_BYTES)
            if not isinstance(owner, dict) or not {'token', 'host', 'pid', 'since'} <= owner.keys():
                raise ValueError('it does not say who the writer is')
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f'{file} cannot be read, so the writer of this directory is not known: {error}. Delete the '
                'file if no other job writes there'
            ) from error
        return owner

    def _taken_over_error(self, owner: dict[str, Any]) -> CheckpointError:
        pid, host, since = (str(owner[name])[:200] for name in ('pid', 'host', 'since'))
        return CheckpointError(
            f'{self.directory} has another writer now: process {visible(pid)} on host {host!r}, since '
            f'{visible(since)}. A directory has one writer, the one that came last, and this one writes '
            'and deletes nothing there any more. To keep the other one, end this job; to keep this one, end '
            'the other and make a new Checkpointer here, which takes the directory with its first save'
        )

    def _take(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        since = datetime.datetime.now(datetime.UTC).isoformat(' ', 'seconds')
        owner = {'token': self.token, 'host': socket.gethostname(), 'pid': os.getpid(), 'since': since}
        written = self.directory / f'{FILE}.{self.token}'
        try:
            write_bytes(written, json.dumps(owner).encode())
            written.replace(self.directory / FILE)
        except OSError:
            with contextlib.suppress(OSError):
                written.unlink(missing_ok=True)
            raise

    def _later(self, step: int, without: Collection[int]) -> list[int]:
        return [one for one in complete_steps(self.directory) if one >= step and one not in without]

    def _refuse(self, step: int, later: Sequence[int]) -> None:
        if later:
            raise CheckpointError(
                f'step {step} cannot be saved: {self.directory} holds {_steps(later)} already, from another '
                'run or from later in this one. Restore the latest step and go on from there, or save into '
                'another directory'
            )

    def _unfinished(self) -> list[Path]:
        """The folders of unfinished saves, and of steps that were being deleted."""
        paths = [path for path in self.directory.iterdir() if path.is_dir()]
        if self._renames:
            return [path for path in paths if _suffix() in path.name]
        return [path for path in paths if path.name.isdecimal() and not (path / _COMMITTED).exists()]

    def _warn_of_replaced(self) -> None:
        if self._replaced and not self._renames:
            replaced, self._replaced = self._replaced, []
            self._refuse(min(replaced), replaced)
        if self._replaced:
            warn(
                f'{self.directory} holds {_steps(self._replaced)}, saved by the writer that this one '
                'replaces after this one had looked for steps; when its own step is complete they are kept '
                f'as {self._replaced[0]}.replaced-by-{self.token}, which no restore looks at',
                CheckpointWarning,
            )

    def _set_aside(self, step: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self.directory / str(step)).rename(self._aside(step))

    def _aside(self, step: int) -> Path:
        return self.directory / f'{step}.replaced-by-{self.token}'


def _suffix() -> str:
    """The mark of Orbax's temporary folders, which no version of Orbax takes for steps."""
    return str(orbax().path.atomicity.TMP_DIR_SUFFIX)


def _steps(steps: Sequence[int]) -> str:
    return f'step {steps[0]}' if len(steps) == 1 else f'steps {steps[0]} to {steps[-1]}'
