"""What lies on the disk for one step, and how is it read?"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from scalax._tree.paths import canonical_dtype, path_string
from scalax.checkpoint import _manifest
from scalax.checkpoint._describe import Description, LeafDescription, decoded
from scalax.checkpoint._json_file import bytes_of, json_of, require_size
from scalax.checkpoint._manifest import FOLDER
from scalax.checkpoint._orbax import Path, orbax
from scalax.errors import CheckpointError

ITEM = 'state'
_BY_HAND = 'default'  # what Orbax's CheckpointManager calls the only item of a step
LEAVES = 'leaves.json'
_READ_BY_ORBAX = ('_METADATA', '_sharding')  # JSON, all of it at once
FORMAT = 1
MOST_DATA = 1 << 30
"""Bytes of a data state: they are read into memory."""


class _OfLaterScalax(Exception):
    """A checkpoint has a format that this scalax does not know."""


def complete_steps(directory: Path) -> list[int]:
    """The steps that were saved to the end, in ascending order."""
    if not directory.is_dir():
        return []
    names = orbax().path.step.standard_name_format()
    return sorted(found.step for found in names.find_all(directory))


@dataclasses.dataclass(frozen=True)
class Saved:
    """One step on the disk.

    Attributes:
        directory: of all steps.
        step: its number.
    """

    directory: Path
    step: int

    @functools.cached_property
    def root(self) -> Path:
        """Where its arrays lie."""
        folder = self.directory / str(self.step)
        by_hand = folder / _BY_HAND
        return by_hand if by_hand.exists() else folder / ITEM

    @property
    def where(self) -> str:
        """The step, as messages call it."""
        return f'the checkpoint of step {self.step} in {self.directory}'

    def damage(self, checksums: bool, share: tuple[int, int] = (0, 1)) -> list[str]:
        """What is wrong with its files, as far as one of several processes looks at them.

        Args:
            checksums: read all files, and compare their checksums.
            share: the number of this process, and how many there are: each takes every so many-th file.

        Raises:
            CheckpointError: there are no checksums to compare.
        """
        if not self.root.is_dir():
            return [f'{self.root.name} is missing']
        manifest = _manifest.manifest_of(self.root)
        if not manifest.exists():
            if (self.root / FOLDER).exists():
                return [f'{FOLDER}/{manifest.name} is missing']
            self._require_checksums(not checksums, 'Orbax saved it without scalax')
            return []
        try:
            files = _manifest.read(manifest)
            if f'{FOLDER}/{LEAVES}' not in files:
                raise ValueError(f'it does not list {FOLDER}/{LEAVES}')
        except (OSError, ValueError) as error:
            return [f'{FOLDER}/{manifest.name} cannot be read: {error}']
        known = all(file.crc32 is not None for file in files.values())
        self._require_checksums(not checksums or known, 'it was saved with checksums=False')
        first, count = share
        if wrong := _manifest.differences(self.root, dict([*files.items()][first::count]), checksums):
            return wrong
        try:
            self._own_description()
        except _OfLaterScalax:
            pass  # it is whole, as far as this scalax can tell
        except (OSError, ValueError) as error:
            return [f'{FOLDER}/{LEAVES} cannot be read: {error}']
        return []

    def _require_checksums(self, there: bool, why: str) -> None:
        if not there:
            raise CheckpointError(
                f'{self.where} cannot be verified, because {why}. Restore it without verify=True'
            )

    def unreadable(self) -> list[str]:
        """What is wrong with what a restore reads before it reads arrays, and `damage` does not read."""
        try:
            self._orbax_tree  # noqa: B018
        except CheckpointError as error:
            return [f'what Orbax says of its arrays cannot be read: {error.__cause__}']
        return []

    def description(self) -> Description:
        """What it holds, without loading an array.

        Raises:
            CheckpointError: nothing says so.
        """
        try:
            own = self._own_description()
        except _OfLaterScalax:
            raise CheckpointError(
                f'{self.where} was saved by a later scalax, and this one cannot read it'
            ) from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f'{self.where} cannot be read: {FOLDER}/{LEAVES}: {error}') from error
        if own is not None:
            return own
        return Description(self.step, [_by_hand(path, leaf) for path, leaf in self._orbax_leaves()], 0)

    @functools.cached_property
    def _head(self) -> Any:
        """The JSON in which scalax describes it."""
        return json_of(self.root / FOLDER / LEAVES)

    def _own_description(self) -> Description | None:
        """What scalax has written of it; None if nothing, because Orbax saved it without scalax.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no description.
            _OfLaterScalax: it is one of a later scalax.
        """
        if not (self.root / FOLDER / LEAVES).exists():
            return None
        head = self._head
        if isinstance(head, dict) and isinstance(head.get('format'), int) and head['format'] > FORMAT:
            raise _OfLaterScalax
        return decoded(self.step, head)

    def arrays(self, targets: Mapping[str, Any]) -> dict[str, Any]:
        """Reads leaves, each straight into its sharding.

        Args:
            targets: by path, structs with shardings, or the types of Python numbers.
        """
        ocp = orbax()

        def target(path: Any, leaf: Any) -> Any:
            wanted = targets.get(path_string(path), ocp.PLACEHOLDER)
            return wanted() if isinstance(wanted, type) else wanted

        item = jax.tree_util.tree_map_with_path(target, self._orbax_tree, is_leaf=_is_metadata)
        arguments = ocp.args.PyTreeRestore(
            item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item)
        )
        # The handler by itself: Orbax's checkpointers wait for other processes, which may have failed.
        with self._reading(), contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
            tree = handler.restore(self.root, args=arguments)
        flat, _ = jax.tree_util.tree_flatten_with_path(tree)
        return {name: leaf for path, leaf in flat if (name := path_string(path)) in targets}

    def data(self, process: int) -> bytes | None:
        """The data state that a process saved; None if it saved none.

        Raises:
            OSError: it cannot be read.
            ValueError: it is too large.
        """
        file = self.root / FOLDER / f'data.{process}'
        return bytes_of(file, MOST_DATA) if file.exists() else None

    @functools.cached_property
    def _orbax_tree(self) -> Any:
        with self._reading(), contextlib.closing(orbax().PyTreeCheckpointHandler()) as handler:
            for name in _READ_BY_ORBAX:
                require_size(self.root / name)
            return handler.metadata(self.root).tree

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Says which checkpoint it was that could not be read."""
        try:
            yield
        except Exception as error:
            raise CheckpointError(f'{self.where} cannot be read: {type(error).__name__}: {error}') from error

    def _orbax_leaves(self) -> list[tuple[str, Any]]:
        flat, _ = jax.tree_util.tree_flatten_with_path(self._orbax_tree, is_leaf=_is_metadata)
        return [(path_string(path), leaf) for path, leaf in flat if _is_metadata(leaf)]


def _is_metadata(node: Any) -> bool:
    return hasattr(node, 'shape') and hasattr(node, 'dtype')


def _by_hand(path: str, leaf: Any) -> LeafDescription:
    """A leaf that Orbax saved without scalax."""
    if isinstance(leaf, orbax().metadata.ScalarMetadata):
        kind = {'b': bool, 'i': int}.get(leaf.dtype.kind, float)
        return LeafDescription(path, (), str(canonical_dtype(kind)), kind.__name__)
    return LeafDescription(path, tuple(leaf.shape), str(leaf.dtype))


def found(directory: Path, step: int, steps: Sequence[int]) -> Saved:
    """One of the *steps* of a directory.

    Raises:
        CheckpointError: there is none of this number.
    """
    if step not in steps:
        raise CheckpointError(f'{directory} has no checkpoint of step {step!r}: {_listed(steps)}')
    return Saved(directory, step)


def _listed(steps: Sequence[int]) -> str:
    return f'it has {", ".join(map(str, steps[-10:]))}' if steps else 'it has none'


def choose(
    directory: Path, steps: Sequence[int], damage: Callable[[Saved], list[str]]
) -> tuple[Saved | None, dict[int, list[str]]]:
    """The latest step without damage, and what is wrong with later ones."""
    passed: dict[int, list[str]] = {}
    for step in sorted(steps, reverse=True):
        saved = Saved(directory, step)
        wrong = damage(saved)
        if not wrong:
            return saved, passed
        passed[step] = wrong
    return None, passed
