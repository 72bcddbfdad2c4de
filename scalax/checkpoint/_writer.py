"""The one writer of a directory: a token in a file says who it is, and only who finds its own may write.

Nobody can know whether a job that is not heard of has died, so the newest writer takes the directory, with
its first save, and the one before it is refused at its next write. A writer looks at the token before it
begins a step, before it commits one, and before it deletes anything. Between that look and what follows
another may take the directory, which does no harm where folders are renamed at once:

- A step is written in a folder whose name holds the token, and committed by a rename, which fails where the
  step is there already.
- Who takes the directory renames the unfinished folders of others away, and only then lists the steps: a
  commit of theirs has come before that, and is in the list, or it fails. A folder that they begin later is
  never committed, because they look at the token again before that.
- What is deleted was listed before the token was looked at, so it is no step of who has come since.

In object stores nothing can be renamed at once. There a step counts from when a last file is written, the
token is all there is, and a save that its writer began before it was replaced may still write to its step.
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
from scalax.checkpoint._json_file import json_of, sync, write_bytes
from scalax.checkpoint._orbax import Path, orbax
from scalax.checkpoint._saved import ITEM, complete_steps
from scalax.errors import CheckpointError, CheckpointWarning, warn

FILE = 'writer.json'
TOKEN = 16  # characters of a token, with which the name of a save begins
_MOST = 1 << 12  # bytes of that file
_COMMITTED = 'commit_success.txt'  # what Orbax looks for where folders are not renamed


class Writer:
    """One `Checkpointer` as the writer of its directory; the first process of a job acts for all.

    Attributes:
        token: what nobody else has.
        taken: whether this writer has taken the directory, and may have lost it since.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.token = secrets.token_hex(TOKEN // 2)
        self.taken = False
        # The steps to make way for this writer's own; None until it has looked for them.
        self._replaced: list[int] | None = None
        self._saves = 0

    def require(self) -> None:
        """Returns if this is the writer still.

        Raises:
            CheckpointError: another has taken the directory; the message says who.
        """
        owner = self._owner()
        if owner and owner['token'] != self.token:
            raise self._taken(owner)

    def reason(self, error: BaseException, name: str) -> BaseException:
        """Why a save has failed: *error*, unless another has taken the directory, and deleted its files.

        Args:
            error: what came of it.
            name: of the save; on processes other than the first it holds another token than theirs.
        """
        with contextlib.suppress(CheckpointError):  # the file cannot be read either
            owner = self._owner()
            if owner and owner['token'] != name[:TOKEN]:
                return self._taken(owner)
        return error

    def prepare(self, step: int, known: Collection[int] | None, damaged: Collection[int]) -> None:
        """Makes sure that this writer may save a step; takes the directory if it is its first.

        Args:
            step: its number.
            known: the steps that were there when this writer last looked; None where it never did. Later
                ones have come from the writer that it replaces, and make way when a step is committed.
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
        """Another name for each save: the token, and a number."""
        self._saves += 1
        return f'{self.token}{self._saves % 16**8:08x}'

    def staging(self, step: int, name: str) -> Path:
        """The folder in which a step is written until it is complete, by the name of its save."""
        if not self._renames:
            return self.directory / str(step)
        return self.directory / f'{step}{_suffix()}-{name}'

    def commit(self, step: int, staging: Path) -> None:
        """Makes a step complete that was written in the folder *staging*.

        Raises:
            CheckpointError: another writer has taken the directory.
            OSError: it cannot be done.
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
            if step in replaced:  # it is the latest that there is
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

        It is looked up and not listed: clients of network file systems keep lists of folders for a minute.
        """
        final = self.directory / str(step)
        return bool((final if self._renames else final / _COMMITTED).exists())

    def prune(self, keep: int | None) -> None:
        """Deletes all but the latest steps; nothing where another writer has taken the directory."""
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
            if self._renames:  # nobody but this writer commits it, and a full disk may not rename
                staging.rmtree()
            else:  # it is that of the step, which another may be writing
                self.require()
                self.remove(staging)

    def remove(self, path: Path) -> None:
        """Deletes a folder, all of it at once for those who read; what cannot be goes with the next save."""
        with contextlib.suppress(FileNotFoundError):
            if self._renames:
                name = path.name.partition(_suffix())[0]
                path = path.rename(self.directory / f'{name}{_suffix()}-{secrets.token_hex(8)}')
            else:
                (path / _COMMITTED).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                if os.path.islink(path):  # a step that somebody has moved elsewhere
                    path.unlink()
                else:
                    path.rmtree()

    @property
    def _renames(self) -> bool:
        """Whether a step is committed by a rename, as Orbax has it for this kind of path."""
        path = orbax().path
        kind = path.atomicity_defaults.get_default_temporary_path_class(self.directory)
        return bool(kind is path.atomicity.AtomicRenameTemporaryPath)

    def _owner(self) -> dict[str, Any] | None:
        """Who has taken the directory, as the file says."""
        file = self.directory / FILE
        try:
            owner = json_of(file, _MOST)
            if not isinstance(owner, dict) or not {'token', 'host', 'pid', 'since'} <= owner.keys():
                raise ValueError('it does not say who the writer is')
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f'{file} cannot be read, so that nobody knows who writes to this directory: {error}. Delete '
                'the file if no other job does'
            ) from error
        return owner

    def _taken(self, owner: dict[str, Any]) -> CheckpointError:
        pid, host, since = (str(owner[name])[:200] for name in ('pid', 'host', 'since'))
        return CheckpointError(
            f'{self.directory} has another writer now: process {visible(pid)} on host {host!r}, since '
            f'{visible(since)}. A directory has one writer, the one that came last, and this one writes '
            'and deletes nothing there any more. If that one is to go on, end this job; if not, end that '
            'one, and make a new Checkpointer here, which takes the directory with its first save'
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
                f'step {step} cannot be saved: {self.directory} holds {_steps(later)} already, of another '
                'run or of later in this one. Restore the latest step and go on from there, or save into '
                'another directory'
            )

    def _unfinished(self) -> list[Path]:
        """The folders of saves that have not ended, and of steps that were being deleted."""
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
    """What the names of Orbax's temporary folders hold, which is no step to any version of Orbax."""
    return str(orbax().path.atomicity.TMP_DIR_SUFFIX)


def _steps(steps: Sequence[int]) -> str:
    return f'step {steps[0]}' if len(steps) == 1 else f'steps {steps[0]} to {steps[-1]}'
