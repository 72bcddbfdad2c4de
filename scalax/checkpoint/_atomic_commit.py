"""The atomic commit of steps, and their deletion, by the single writer of a directory.

The writer checks its token before it begins a step, before it commits one, and before it deletes anything.
Another writer may take over between such a check and what follows it. Where a rename is atomic, this does no
harm:

- A step is written in a folder whose name holds the token, and committed by a rename, which fails if the
  step already exists. Orbax gives every writer of a step one name for this folder, deletes it where it is
  there already, and deletes a step that is there: what one has half written, another commits.
- A new writer first renames the unfinished folders of others away, and only then lists the steps: a commit of
  theirs either came before and is in the list, or fails. A folder that they begin later is never committed,
  because they check the token again before they commit.
- Steps to delete or set aside are listed before the token is checked, so none of them belongs to a later
  writer.

Object stores have no atomic rename. There a step is complete once its last file is written, the token is the
only protection, and a save that a writer began before it was replaced may still write to its step.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Sequence

from scalax._jax import orbax
from scalax._jax.orbax import COMMITTED, Path
from scalax.checkpoint._files import sync
from scalax.checkpoint._saved_step import FOLDER, ITEM, complete_steps
from scalax.checkpoint._single_writer import SingleWriter
from scalax.errors import CheckpointError, CheckpointWarning, warn


class StepDirectory:
    """A directory of steps, as its writer changes it; the first process of a job does so for all.

    Attributes:
        path: the directory.
        writer: this process as its writer.
        damaged: steps that were passed over, which the next save deletes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer = SingleWriter(path)
        self.damaged: set[int] = set()
        # The steps at the last look before the first save; None before a look. Later ones come from the
        # writer that this one replaces.
        self._known: set[int] | None = None
        # Those, to be set aside when a step of this writer is complete; None until they are looked for.
        self._replaced: list[int] | None = None

    def looked(self, steps: Iterable[int]) -> None:
        """Notes which steps there were, as this writer may go on from them."""
        if not self.writer.taken:
            self._known = set(steps)

    def prepare(self, step: int, name: str) -> None:
        """Makes room for a step, and its folder; takes the directory at the first save.

        Args:
            step: its number.
            name: the name of the save.

        Raises:
            CheckpointError: the directory has another writer, or holds later steps.
        """
        if not self.writer.taken:
            later = self._later(step)
            known = set(later) if self._known is None else self._known
            self._refuse(step, [one for one in later if one in known])
            self.writer.take()
        unfinished = self._unfinished()
        self.writer.require()
        for path in unfinished:
            self.remove(path)
        later = self._later(step)
        if self._replaced is None:
            self._replaced = [] if self._known is None or not self._renames else later
            if self._replaced:
                warn(
                    f'{self.path} holds {_listed(later)}, saved by the writer that this one replaces after '
                    'this one had looked for steps; when its own step is complete they are kept as '
                    f'{self._aside(later[0]).name}, which no restore looks at',
                    CheckpointWarning,
                )
        damaged = self.damaged.intersection(complete_steps(self.path))
        self.writer.require()
        self._refuse(step, [one for one in later if one not in self._replaced])
        for one in damaged:
            self.remove(self.path / str(one))
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
        self.writer.require()
        staging, final = self.staging(step, name), self.path / str(step)
        if not self._renames:
            for folder in (final / ITEM, final):
                (folder / COMMITTED).write_text('')
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
        sync(self.path)

    def is_committed(self, step: int, name: str) -> bool:
        """Whether a step is complete and of this save: another writer may have saved the same step.

        The paths are looked up, not listed: clients of network file systems cache listings for a minute.
        """
        final = self.path / str(step)
        return bool(_mark(final, name).exists() and (self._renames or (final / COMMITTED).exists()))

    def prune(self, keep: int | None) -> None:
        """Deletes all but the latest steps; deletes nothing if another writer has taken the directory."""
        old = complete_steps(self.path)[:-keep] if keep else []
        with contextlib.suppress(CheckpointError):
            if old:
                self.writer.require()
            for step in old:
                self.remove(self.path / str(step))

    def discard(self, step: int, name: str) -> None:
        """Deletes the folder of a save that has failed."""
        staging = self.staging(step, name)
        with contextlib.suppress(OSError, CheckpointError):
            if self._renames:  # only this writer commits the folder, and a full disk may refuse to rename it
                staging.rmtree()
            else:  # the folder is the step itself, which another writer may be writing
                self.writer.require()
                self.remove(staging)

    def remove(self, path: Path) -> None:
        """Deletes a folder, atomically for readers; what cannot be deleted now goes with the next save."""
        with contextlib.suppress(FileNotFoundError):
            if self._renames:
                step = path.name.partition(orbax.unfinished_mark())[0]
                path = path.rename(self.staging(step, secrets.token_hex(8)))
            else:
                (path / COMMITTED).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                if os.path.islink(path):  # somebody has moved the step elsewhere
                    path.unlink()
                else:
                    path.rmtree()

    @property
    def _renames(self) -> bool:
        return orbax.commits_by_rename(self.path)

    def _later(self, step: int) -> list[int]:
        return [one for one in complete_steps(self.path) if one >= step and one not in self.damaged]

    def _refuse(self, step: int, later: Sequence[int]) -> None:
        if later:
            raise CheckpointError(
                f'step {step} cannot be saved: {self.path} holds {_listed(later)} already, from another run '
                'or from later in this one. Restore the latest step and go on from there, or save into '
                'another directory'
            )

    def _unfinished(self) -> list[Path]:
        """The folders of unfinished saves, and of steps that were being deleted."""
        paths = [path for path in self.path.iterdir() if path.is_dir()]
        if self._renames:
            return [path for path in paths if orbax.unfinished_mark() in path.name]
        return [path for path in paths if path.name.isdecimal() and not (path / COMMITTED).exists()]

    def _set_aside(self, step: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self.path / str(step)).rename(self._aside(step))

    def _aside(self, step: int) -> Path:
        return self.path / f'{step}.replaced-by-{self.writer.token}'


def _mark(folder: Path, name: str) -> Path:
    """The file that says of which save a step is."""
    return folder / ITEM / FOLDER / f'save.{name}'


def _listed(steps: Sequence[int]) -> str:
    return f'step {steps[0]}' if len(steps) == 1 else f'steps {steps[0]} to {steps[-1]}'
