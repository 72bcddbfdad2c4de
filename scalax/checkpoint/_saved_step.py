"""One saved step on the disk: its description, its arrays, its data state, and what is damaged."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from scalax._jax.orbax import Path
from scalax._tree.paths import path_string
from scalax.checkpoint import _files, _manifest
from scalax.checkpoint._description import Description, LeafDescription, describe_leaf, parse_description
from scalax.checkpoint._orbax import orbax
from scalax.errors import CheckpointError

ITEM = 'state'
FOLDER = 'scalax'  # holds what scalax writes beside the arrays
LEAVES = f'{FOLDER}/leaves.json'
MANIFEST = f'{FOLDER}/files.json'
FORMAT = 1
_ITEM_OF_MANAGER = 'default'  # what Orbax's CheckpointManager calls the only item of a step
_MOST_DATA = 1 << 30  # bytes of a data state, which is read into memory
_BYTES, _JSON = b'B', b'J'  # the first byte of a data state


@dataclasses.dataclass(frozen=True)
class SavedStep:
    """One step on the disk.

    Attributes:
        directory: the directory of all steps.
        step: its number.
    """

    directory: Path
    step: int

    @functools.cached_property
    def root(self) -> Path:
        """The folder of its arrays."""
        folder = self.directory / str(self.step)
        of_manager = folder / _ITEM_OF_MANAGER
        return of_manager if of_manager.exists() else folder / ITEM

    @property
    def _is_own(self) -> bool:
        """Whether scalax has saved it; or else Orbax alone."""
        return bool((self.root / FOLDER).exists())

    @property
    def where(self) -> str:
        """The step, as messages call it."""
        return f'the checkpoint of step {self.step} in {self.directory}'

    def damage(
        self, checksums: bool, share: tuple[int, int] = (0, 1), *, arrays: bool = False, data: bool = False
    ) -> list[str]:
        """What is wrong with its files, as far as one of several processes looks at them.

        Args:
            checksums: read all files, and compare their checksums.
            share: the number of this process, and how many there are: each of n takes every nth file.
            arrays: read also what Orbax says of its arrays, as it does before it restores one.
            data: read also the data state that this process saved, if it saved one.

        Raises:
            CheckpointError: there are no checksums to compare, or a later scalax has saved the step.
        """
        if not self.root.is_dir():
            return [f'{self.root.name} is missing']
        try:
            files = _manifest.read_manifest(self.root / MANIFEST) if self._is_own else {}
            if self._is_own and LEAVES not in files:
                raise ValueError(f'it does not list {LEAVES}')
        except FileNotFoundError:
            return [f'{MANIFEST} is missing']
        except (OSError, ValueError) as error:
            return [f'{MANIFEST} cannot be read: {error}']
        if checksums and (not files or any(file.crc32 is None for file in files.values())):
            why = 'it was saved with checksums=False' if files else 'Orbax saved it without scalax'
            raise CheckpointError(
                f'{self.where} cannot be verified, because {why}. Restore it without verify=True'
            )
        first, count = share
        if wrong := _manifest.differences(self.root, dict([*files.items()][first::count]), checksums):
            return wrong
        reads: dict[str, Callable[[], object]] = {LEAVES: lambda: self._own_description}
        if arrays or not files:
            reads['what Orbax says of its arrays'] = lambda: self._orbax_leaves
        if data and self._data_file.exists():
            reads[f'{FOLDER}/{self._data_file.name}'] = self._data_state
        for what, read in reads.items():
            try:
                read()
            except CheckpointError as error:
                if error.__cause__ is None:  # this scalax is too old for it
                    raise
                return [f'{what} cannot be read: {error.__cause__}']
        if not arrays or self._own_description is None:
            return []
        listed = {path for path, _ in self._orbax_leaves}
        lost = [leaf.path for leaf in self._own_description.leaves if leaf.path not in listed]
        return [f'leaves that Orbax does not list: {", ".join(map(repr, lost[:10]))}'] if lost else []

    def description(self) -> Description:
        """What it holds, read without loading an array.

        Raises:
            CheckpointError: its description is missing or cannot be read.
        """
        if self._own_description is not None:
            return self._own_description
        leaves = [_describe_orbax_leaf(path, leaf) for path, leaf in self._orbax_leaves]
        return Description(self.step, leaves, 0)

    @functools.cached_property
    def _own_description(self) -> Description | None:
        """The description that scalax wrote; None if Orbax saved the step without scalax.

        Raises:
            CheckpointError: it cannot be read, is not a description, or was written by a later scalax.
        """
        if not self._is_own:
            return None
        with self._reading(LEAVES):
            values = _files.read_json(self.root / LEAVES)
            if (
                isinstance(values, dict)
                and isinstance(values.get('format'), int)
                and values['format'] > FORMAT
            ):
                raise CheckpointError(
                    f'{self.where} was saved by a later scalax, and this one cannot read it'
                )
            return parse_description(self.step, values)

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
        # Not one of Orbax's checkpointers: they wait for other processes, which may have failed.
        with self._reading(), contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
            tree = handler.restore(self.root, args=arguments)
        flat, _ = jax.tree_util.tree_flatten_with_path(tree)
        return {name: leaf for path, leaf in flat if (name := path_string(path)) in targets}

    @functools.cached_property
    def _orbax_tree(self) -> Any:
        with self._reading(), contextlib.closing(orbax().PyTreeCheckpointHandler()) as handler:
            for path in self.root.iterdir():  # among them the JSON that Orbax reads whole
                if not path.is_dir():
                    _files.require_json_size(path.name, _files.file_size(path))
            return handler.metadata(self.root).tree

    @functools.cached_property
    def _orbax_leaves(self) -> list[tuple[str, Any]]:
        """The leaf paths, each with what Orbax says of the leaf."""
        flat, _ = jax.tree_util.tree_flatten_with_path(self._orbax_tree, is_leaf=_is_metadata)
        return [(path_string(path), leaf) for path, leaf in flat if _is_metadata(leaf)]

    @contextlib.contextmanager
    def _reading(self, file: str = '') -> Iterator[None]:
        """Adds to an error which checkpoint, and which file of it, could not be read."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            what = file or type(error).__name__
            raise CheckpointError(f'{self.where} cannot be read: {what}: {error}') from error

    def data(self) -> Any:
        """The data state that this process saved.

        Raises:
            CheckpointError: there is none, or another number of processes saved the step.
        """
        processes = self.description().processes
        if processes != jax.process_count():
            raise CheckpointError(
                f'{self.where} holds the data states of {processes} processes, and these are '
                f'{jax.process_count()}: each process reads other data now. Restore without data=, and set '
                'the iterator yourself'
            )
        if not self._data_file.exists():
            raise CheckpointError(f'{self.where} has no data state: save(..., data=iterator) keeps one')
        return self._data_state()

    @property
    def _data_file(self) -> Path:
        return self.root / FOLDER / f'data.{jax.process_index()}'

    def _data_state(self) -> Any:
        with self._reading(f'{FOLDER}/{self._data_file.name}'):
            return _decode_data(_files.read_bytes(self._data_file, _MOST_DATA))


def complete_steps(directory: Path) -> list[int]:
    """The steps that were saved completely, in ascending order."""
    if not directory.is_dir():
        return []
    names = orbax().path.step.standard_name_format()
    return sorted(found.step for found in names.find_all(directory))


def find_step(directory: Path, step: int, steps: Sequence[int]) -> SavedStep:
    """One of the *steps* of a directory.

    Raises:
        CheckpointError: it is not among them.
    """
    if step not in steps:
        has = f'it has {", ".join(map(str, steps[-10:]))}' if steps else 'it has none'
        raise CheckpointError(f'{directory} has no checkpoint of step {step!r}: {has}')
    return SavedStep(directory, step)


def latest_undamaged(
    directory: Path, steps: Sequence[int], damage: Callable[[SavedStep], list[str]]
) -> tuple[SavedStep | None, dict[int, list[str]]]:
    """The latest step without damage, and what is wrong with later ones."""
    passed: dict[int, list[str]] = {}
    for step in sorted(steps, reverse=True):
        saved = SavedStep(directory, step)
        wrong = damage(saved)
        if not wrong:
            return saved, passed
        passed[step] = wrong
    return None, passed


def encode_data(data: Any) -> bytes:
    """The state of an iterator that has ``get_state``, or a value, as bytes.

    Raises:
        CheckpointError: it is neither bytes nor JSON, or too large.
    """
    state = data.get_state() if hasattr(data, 'get_state') else data
    try:
        encoded = _BYTES + state if isinstance(state, bytes) else _JSON + json.dumps(state).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f'data={type(data).__name__}: its state, a {type(state).__name__}, is neither bytes nor JSON '
            f'({error}). Give an iterator with get_state() and set_state(), bytes, or what json.dumps takes'
        ) from error
    if len(encoded) > _MOST_DATA:
        raise CheckpointError(f'data: its state has {len(encoded)} bytes, and at most {_MOST_DATA} are kept')
    return encoded


def _decode_data(encoded: bytes) -> Any:
    """Reverses `encode_data`, as far as JSON keeps what it is given (tuples become lists).

    Raises:
        ValueError: `encode_data` did not write it.
    """
    kind, state = encoded[:1], encoded[1:]
    if kind not in (_BYTES, _JSON):
        raise ValueError('it is neither bytes nor JSON')
    try:  # not as strictly as other files: states may hold NaN
        return state if kind == _BYTES else json.loads(state)
    except RecursionError:
        raise ValueError('it is nested too deeply') from None


def _is_metadata(node: Any) -> bool:
    return hasattr(node, 'shape') and hasattr(node, 'dtype')


def _describe_orbax_leaf(path: str, leaf: Any) -> LeafDescription:
    """A leaf that Orbax saved without scalax."""
    if isinstance(leaf, orbax().metadata.ScalarMetadata):
        return describe_leaf(path, {'b': bool, 'i': int}.get(leaf.dtype.kind, float))
    return describe_leaf(path, leaf)
