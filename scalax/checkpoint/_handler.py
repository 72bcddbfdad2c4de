"""What does a checkpoint hold besides the arrays? Orbax's handler for pytrees, and files of scalax beside it.

Beside the arrays lies a folder ``scalax``: ``leaves.json`` says what the tree looked like, ``data.N`` is what
process N gave as its data state, and ``files.json`` lists all files with their sizes and checksums. The last
is written when all else is, and before Orbax renames the folder of the step, which is what makes it complete.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from scalax.checkpoint import _manifest
from scalax.checkpoint._describe import LeafDescription
from scalax.checkpoint._manifest import FOLDER, names_below
from scalax.checkpoint._orbax import Path
from scalax.checkpoint._saved import FORMAT, LEAVES


class StateHandler(ocp.StandardCheckpointHandler):
    """Saves a pytree as Orbax does, with a description, the data state and checksums beside it."""

    _checksums = True

    async def async_save(self, directory: Path, args: StateSave) -> Any:
        """Copies the arrays to the host, and returns what is left to do, which runs behind."""
        self._checksums = args.checksums  # no other save begins before this one has ended
        futures = await super().async_save(directory, args=ocp.args.StandardSave(args.item)) or []
        return [*futures, _Afterwards(lambda: self._write_own(directory, args))]

    def _write_own(self, directory: Path, args: StateSave) -> None:
        """What each process writes, when its arrays are on the disk."""
        me = jax.process_index()
        folder = directory / FOLDER
        folder.mkdir(exist_ok=True)
        if me == 0:
            leaves = [dataclasses.asdict(leaf) for leaf in args.leaves]
            head = {'format': FORMAT, 'processes': jax.process_count(), 'leaves': leaves}
            (folder / LEAVES).write_text(json.dumps(head))
        own = [*names_below(directory, f'ocdbt.process_{me}')]
        if args.data is not None:
            (folder / f'data.{me}').write_bytes(args.data)
            own.append(f'{FOLDER}/data.{me}')
        _manifest.write(folder / f'files.{me}', _manifest.measured(directory, own, self._checksums))

    def finalize(self, directory: Path) -> None:
        """What one process does when all have written; after it, the checkpoint is complete."""
        super().finalize(directory)
        files: dict[str, _manifest.File] = {}
        for process in range(jax.process_count()):
            part = directory / FOLDER / f'files.{process}'
            files |= _manifest.read(part)
            part.unlink()
        rest = [name for name in names_below(directory) if name not in files]
        files |= _manifest.measured(directory, rest, self._checksums)
        _manifest.write(_manifest.manifest_of(directory), files)


@ocp.args.register_with_handler(StateHandler, for_save=True)
@dataclasses.dataclass
class StateSave(ocp.args.CheckpointArgs):
    """What is saved: the tree, what there is to say of its leaves, and this process's data state."""

    item: Any
    leaves: Sequence[LeafDescription]
    data: bytes | None
    checksums: bool


@ocp.args.register_with_handler(StateHandler, for_restore=True)
@dataclasses.dataclass
class StateRestore(ocp.args.StandardRestore):
    """For Orbax, which wants arguments for both ways; scalax restores otherwise."""


@dataclasses.dataclass
class _Afterwards:
    """Something to do when all that stands before it is done: Orbax asks for results in order."""

    action: Callable[[], None]

    def result(self, timeout: float | None = None) -> None:
        self.action()

    def cancel(self) -> None:
        """Nothing runs before `result` is asked for."""
