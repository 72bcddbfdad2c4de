"""The single writer of a directory of steps, identified by a token in a file.

Nothing tells whether a silent job has died, so the newest writer takes the directory with its first save,
and the previous one is refused at its next write. Orbax has no such rule: its `CheckpointManager` "is NOT
multi-job-safe", and two of them on one directory take half-written steps for whole.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import socket
from typing import Any

from scalax._jax.orbax import Path
from scalax._report.pages import visible
from scalax.checkpoint._files import read_json, sync
from scalax.errors import CheckpointError

_FILE = 'writer.json'
_MOST_BYTES = 1 << 12  # of that file
_TOKEN_LENGTH = 16  # characters of a token


class SingleWriter:
    """One `Checkpointer` as the writer of its directory; the first process of a job acts for all.

    Attributes:
        taken: whether this writer has taken the directory; it may have lost it since.
        token: unique to this writer.
    """

    def __init__(self, directory: Path) -> None:
        self.taken = False
        self.token = secrets.token_hex(_TOKEN_LENGTH // 2)
        self._directory, self._file = directory, directory / _FILE
        self._saves = 0

    def name_of_save(self) -> str:
        """A new name for each save: the token, and a number."""
        self._saves += 1
        return f'{self.token}{self._saves % 16**8:08x}'

    def take(self) -> None:
        """Takes the directory from whoever has it."""
        self._directory.mkdir(parents=True, exist_ok=True)
        since = datetime.datetime.now(datetime.UTC).isoformat(' ', 'seconds')
        owner = {'token': self.token, 'host': socket.gethostname(), 'pid': os.getpid(), 'since': since}
        written = self._directory / f'{_FILE}.{self.token}'
        try:
            written.write_bytes(json.dumps(owner).encode())
            sync(written)
            written.replace(self._file)
        except OSError:
            with contextlib.suppress(OSError):
                written.unlink(missing_ok=True)
            raise
        self.taken = True

    def require(self) -> None:
        """Returns if this is still the writer of the directory.

        Raises:
            CheckpointError: another one has taken the directory; the message says who.
        """
        error = self._taken_over(self.token)
        if error is not None:
            raise error

    def reason(self, error: BaseException, name: str) -> BaseException:
        """Why a save failed: *error*, unless another writer has taken the directory and deleted its files.

        Args:
            error: the error of the save.
            name: the name of the save. It holds the token of process 0, which may differ from this writer's.
        """
        with contextlib.suppress(CheckpointError):  # the file of the token cannot be read either
            return self._taken_over(name[:_TOKEN_LENGTH]) or error
        return error

    def _taken_over(self, token: str) -> CheckpointError | None:
        """The error that says which writer other than that of a token has the directory; None if none has."""
        try:
            owner: Any = read_json(self._file, _MOST_BYTES)
            if not isinstance(owner, dict) or not {'token', 'host', 'pid', 'since'} <= owner.keys():
                raise ValueError('it does not say who the writer is')
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f'{self._file} cannot be read, so the writer of this directory is not known: {error}. Delete '
                'the file if no other job writes there'
            ) from error
        if owner['token'] == token:
            return None
        pid, host, since = (str(owner[name])[:200] for name in ('pid', 'host', 'since'))
        return CheckpointError(
            f'{self._directory} has another writer now: process {visible(pid)} on host {host!r}, since '
            f'{visible(since)}. A directory has one writer, the one that came last, and this one writes '
            'and deletes nothing there any more. To keep the other one, end this job; to keep this one, end '
            'the other and make a new Checkpointer here, which takes the directory with its first save'
        )
