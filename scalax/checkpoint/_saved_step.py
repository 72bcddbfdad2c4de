"""One saved step on the disk: its leaves, its arrays, its data state, and what is damaged."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from scalax._core.pytree.paths import is_weakly_typed, path_string
from scalax._core.render.html_pages import visible
from scalax._core.util import strict_json
from scalax._data.host.transfer import weakly_typed
from scalax._jax.orbax import Path, is_complete
from scalax.checkpoint import _manifest
from scalax.checkpoint._files import orbax
from scalax.errors import CheckpointError

ITEM = 'state'
FOLDER = 'scalax'  # holds what scalax writes beside the arrays
MANIFEST = f'{FOLDER}/files.json'
_ITEM_OF_MANAGER = 'default'  # what Orbax's CheckpointManager calls the only item of a step
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
    def where(self) -> str:
        """The step, as messages call it."""
        return f'the checkpoint of step {self.step} in {self.directory}'

    def damage(self, checksums: bool, share: tuple[int, int] = (0, 1)) -> list[str]:
        """What is wrong with its files, as far as one of several processes looks at them.

        Args:
            checksums: read all files, and compare their checksums.
            share: the number of this process, and how many there are: each of n takes every nth file.

        Raises:
            CheckpointError: there are no checksums to compare.
        """
        if not self.root.is_dir():
            return [f'{self.root.name} is missing']
        try:
            is_own = (self.root / FOLDER).exists()  # or Orbax has saved it without scalax
            files = _manifest.read_manifest(self.root / MANIFEST) if is_own else {}
        except (OSError, ValueError) as error:
            return [f'{MANIFEST} cannot be read: {error}']
        if checksums and (not files or any(file.crc32 is None for file in files.values())):
            raise CheckpointError(
                f'{self.where} cannot be verified, because it was saved without checksums. Restore it '
                'without verify=True'
            )
        first, count = share
        share_of_files = dict([*files.items()][first::count])
        if differences := _manifest.differences(self.root, share_of_files, checksums):
            return differences
        try:
            self.leaves  # noqa: B018 - a step without a manifest may be an empty folder
        except CheckpointError as error:
            # Only files that are gone: the next save deletes damaged steps, and another Orbax may read this.
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            return [visible(str(error.__cause__))]
        return []

    @functools.cached_property
    def leaves(self) -> dict[str, Any]:
        """By leaf path, a struct or the type of a Python number; of typed keys the data.

        Raises:
            CheckpointError: they cannot be read.
        """
        tree = self._orbax_tree
        with self._reading():
            flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_metadata)
            return {path_string(path): _leaf(said) for path, said in flat if _is_metadata(said)}

    def arrays(self, targets: Mapping[str, Any]) -> dict[str, Any]:
        """Reads leaves, each straight into its sharding.

        Args:
            targets: by path, structs with shardings, or the types of Python numbers.

        Raises:
            CheckpointError: they cannot be read, or a typed key is of another kind.
        """
        ocp = orbax()

        def target(path: Any, leaf: Any) -> Any:
            name = path_string(path)
            if name not in targets:
                return ocp.PLACEHOLDER
            saved, wanted = self.leaves[name], targets[name]
            # A Python number is read as it is: Orbax would make an array of its last bits.
            kind = saved if isinstance(saved, type) else wanted
            return kind() if isinstance(kind, type) else kind

        item = jax.tree_util.tree_map_with_path(target, self._orbax_tree, is_leaf=_is_metadata)
        arguments = ocp.args.PyTreeRestore(
            item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item)
        )
        # Not one of Orbax's checkpointers: they wait for other processes, which may have failed.
        with self._reading(), contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
            tree = handler.restore(self.root, args=arguments)
        flat, _ = jax.tree_util.tree_flatten_with_path(tree)
        found = {name: leaf for path, leaf in flat if (name := path_string(path)) in targets}
        found |= {
            name: self._converted(name, found[name], wanted)
            for name, wanted in targets.items()
            if isinstance(self.leaves[name], type)
        }
        for name, wanted in targets.items():
            if isinstance(wanted, type):
                continue
            # Orbax restores keys as what they were, whatever is asked for.
            if found[name].dtype != wanted.dtype:
                raise CheckpointError(
                    f'{self.where}: {name} has dtype {found[name].dtype}, but {wanted.dtype} was requested'
                )
            if is_weakly_typed(wanted):
                found[name] = weakly_typed(found[name])
        return found

    def _converted(self, name: str, number: Any, wanted: Any) -> Any:
        """A Python number as the array, or as the other kind of number, that is asked for."""
        try:
            if isinstance(wanted, type):
                return wanted(number)
            value = np.asarray(number, wanted.dtype)
        except (OverflowError, ValueError):
            kind = getattr(wanted, 'dtype', 'int')
            raise CheckpointError(
                f'{self.where}: {name} is {number}, which does not fit in {kind}. To restore a Python '
                f'{type(number).__name__}, give like as a tree that has one there (a function turns Python '
                'numbers into arrays)'
            ) from None
        return jax.make_array_from_callback((), wanted.sharding, lambda _: value)

    @functools.cached_property
    def _orbax_tree(self) -> Any:
        with self._reading(), contextlib.closing(orbax().PyTreeCheckpointHandler()) as handler:
            return handler.metadata(self.root).tree

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Adds to an error which checkpoint could not be read."""
        try:
            yield
        except Exception as error:
            raise CheckpointError(f'{self.where} cannot be read: {type(error).__name__}: {error}') from error

    def data(self) -> Any:
        """The data state that this process saved.

        Raises:
            CheckpointError: there is none, another number of processes saved the step, or it is damaged.
        """
        file = self.root / data_file()
        if not file.exists():
            others = sorted(path.name for path in file.parent.glob('data.*'))
            raise CheckpointError(
                f'{self.where} has no {file.name}, the data state of this process, which save(..., '
                f'data=iterator) writes: it has {", ".join(others) or "none"}. If another number of '
                'processes saved it, restore without data=, and set the iterator yourself'
            )
        with self._reading():
            return _decode_data(file.read_bytes())


def data_file() -> str:
    """The file of the data state of this process."""
    return f'{FOLDER}/data.{jax.process_index()}-of-{jax.process_count()}'


def complete_steps(directory: Path) -> list[int]:
    """The steps that were saved completely, in ascending order."""
    if not directory.is_dir():
        return []
    steps = [path for path in directory.iterdir() if path.name.isdecimal()]
    return sorted(int(path.name) for path in steps if is_complete(path))


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
        CheckpointError: it is neither bytes nor JSON.
    """
    state = data.get_state() if hasattr(data, 'get_state') else data
    try:
        if isinstance(state, bytes):
            return _BYTES + state
        text = json.dumps(state)
        # What a restore would refuse or change, such as two keys with one text, is an error now.
        if json.dumps(strict_json.parse(text.encode())) != text:
            raise ValueError('it has an integer of more than 100 digits')
        return _JSON + text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f'data={type(data).__name__}: its state, a {type(state).__name__}, is neither bytes nor JSON '
            f'({error}). Give an iterator with get_state() and set_state(), bytes, or what json.dumps takes'
        ) from error


def _decode_data(encoded: bytes) -> Any:
    """Reverses `encode_data`, as far as JSON keeps what it is given (tuples become lists).

    Raises:
        ValueError: `encode_data` did not write it.
    """
    kind, state = encoded[:1], encoded[1:]
    if kind not in (_BYTES, _JSON):
        raise ValueError('its data state is neither bytes nor JSON')
    return state if kind == _BYTES else strict_json.parse(state)


def _is_metadata(node: Any) -> bool:
    return hasattr(node, 'shape') and hasattr(node, 'dtype')


def _leaf(said: Any) -> Any:
    """A leaf, from what Orbax says of it."""
    if isinstance(said, orbax().metadata.ScalarMetadata):
        return {'b': bool, 'i': int, 'u': int}.get(said.dtype.kind, float)
    return jax.ShapeDtypeStruct(said.shape, said.dtype)
