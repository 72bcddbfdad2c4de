"""Saved step on the disk: its leaves, arrays and data state, and its damage."""

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
FOLDER = 'scalax'  # for the files that scalax writes beside the arrays
MANIFEST = f'{FOLDER}/files.json'
_ITEM_OF_MANAGER = 'default'  # the name of the only item of a step in Orbax's CheckpointManager
_BYTES, _JSON = b'B', b'J'  # the first byte of a data state


@dataclasses.dataclass(frozen=True)
class SavedStep:
    """A saved step.

    Attributes:
        directory: the directory of all steps.
        step: the step.
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
        """The name of the step in messages."""
        return f'the checkpoint of step {self.step} in {self.directory}'

    def damage(self, checksums: bool, share: tuple[int, int] = (0, 1)) -> list[str]:
        """Returns the damage of its files.

        Args:
            checksums: whether to read the files, and compare their checksums.
            share: the position of this process and the number of processes n: each checks every nth file.

        Raises:
            CheckpointError: the step was saved without checksums.
        """
        if not self.root.is_dir():
            return [f'{self.root.name} is missing']
        try:
            has_manifest = (self.root / FOLDER).exists()  # otherwise Orbax saved the step without scalax
            files = _manifest.read_manifest(self.root / MANIFEST) if has_manifest else {}
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
            # Only missing files are damage: the next save deletes damaged steps, and another version of Orbax
            # may be able to read this one.
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            return [visible(str(error.__cause__))]
        return []

    @functools.cached_property
    def leaves(self) -> dict[str, Any]:
        """Leaf path -> a struct (of the data, for typed keys), or the type of a Python number.

        Raises:
            CheckpointError: the leaves cannot be read.
        """
        tree = self._orbax_tree
        with self._reading():
            flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_metadata)
            return {
                path_string(path): _leaf_of(metadata) for path, metadata in flat if _is_metadata(metadata)
            }

    def arrays(self, targets: Mapping[str, Any]) -> dict[str, Any]:
        """Reads leaves, each into its sharding.

        Args:
            targets: leaf path -> a struct with a sharding, or the type of a Python number.

        Raises:
            CheckpointError: the leaves cannot be read, or a typed key has another implementation.
        """
        ocp = orbax()

        def orbax_target(path: Any, _: Any) -> Any:
            name = path_string(path)
            if name not in targets:
                return ocp.PLACEHOLDER
            saved = self.leaves[name]
            # Python numbers are read unchanged: Orbax would make an array of their last bits.
            target = saved if isinstance(saved, type) else targets[name]
            return target() if isinstance(target, type) else target

        item = jax.tree_util.tree_map_with_path(orbax_target, self._orbax_tree, is_leaf=_is_metadata)
        arguments = ocp.args.PyTreeRestore(
            item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item)
        )
        # Orbax's checkpointers are not used, because they wait for other processes, which may have failed.
        with self._reading(), contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
            tree = handler.restore(self.root, args=arguments)
        flat, _ = jax.tree_util.tree_flatten_with_path(tree)
        leaves = {name: leaf for path, leaf in flat if (name := path_string(path)) in targets}
        leaves |= {
            name: self._convert_number(name, leaves[name], target)
            for name, target in targets.items()
            if isinstance(self.leaves[name], type)
        }
        for name, target in targets.items():
            if isinstance(target, type):
                continue
            # Orbax restores keys with their saved implementation, whatever was requested.
            if leaves[name].dtype != target.dtype:
                raise CheckpointError(
                    f'{self.where}: {name} has dtype {leaves[name].dtype}, but {target.dtype} was requested'
                )
            if is_weakly_typed(target):
                leaves[name] = weakly_typed(leaves[name])
        return leaves

    def _convert_number(self, name: str, number: Any, target: Any) -> Any:
        """Converts a Python number to the requested array or type of number."""
        try:
            if isinstance(target, type):
                return target(number)
            value = np.asarray(number, target.dtype)
        except (OverflowError, ValueError):
            kind = getattr(target, 'dtype', 'int')
            raise CheckpointError(
                f'{self.where}: {name} is {number}, which does not fit in {kind}. To restore a Python '
                f'{type(number).__name__}, give like as a tree that has one there (a function turns Python '
                'numbers into arrays)'
            ) from None
        return jax.make_array_from_callback((), target.sharding, lambda _: value)

    @functools.cached_property
    def _orbax_tree(self) -> Any:
        with self._reading(), contextlib.closing(orbax().PyTreeCheckpointHandler()) as handler:
            return handler.metadata(self.root).tree

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Adds the name of the step to an error."""
        try:
            yield
        except Exception as error:
            raise CheckpointError(f'{self.where} cannot be read: {type(error).__name__}: {error}') from error

    def data(self) -> Any:
        """Returns the data state that this process saved.

        Raises:
            CheckpointError: the step has no data state, or was saved by another number of processes; or the
                data state is damaged.
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
    """Returns the path of the data state of this process."""
    return f'{FOLDER}/data.{jax.process_index()}-of-{jax.process_count()}'


def complete_steps(directory: Path) -> list[int]:
    """Returns the complete steps in ascending order."""
    if not directory.is_dir():
        return []
    steps = [path for path in directory.iterdir() if path.name.isdecimal()]
    return sorted(int(path.name) for path in steps if is_complete(path))


def find_step(directory: Path, step: int, steps: Sequence[int]) -> SavedStep:
    """Returns a step of a directory, which has to be one of *steps*.

    Raises:
        CheckpointError: it is not one of them.
    """
    if step not in steps:
        has = f'it has {", ".join(map(str, steps[-10:]))}' if steps else 'it has none'
        raise CheckpointError(f'{directory} has no checkpoint of step {step!r}: {has}')
    return SavedStep(directory, step)


def latest_undamaged(
    directory: Path, steps: Sequence[int], damage: Callable[[SavedStep], list[str]]
) -> tuple[SavedStep | None, dict[int, list[str]]]:
    """Returns the latest undamaged step, and step -> damage for later steps."""
    skipped: dict[int, list[str]] = {}
    for step in sorted(steps, reverse=True):
        saved = SavedStep(directory, step)
        lines = damage(saved)
        if not lines:
            return saved, skipped
        skipped[step] = lines
    return None, skipped


def encode_data(data: Any) -> bytes:
    """Encodes the state of an iterator that has ``get_state``, or a value, as bytes.

    Raises:
        CheckpointError: the state is neither bytes nor JSON.
    """
    state = data.get_state() if hasattr(data, 'get_state') else data
    try:
        if isinstance(state, bytes):
            return _BYTES + state
        text = json.dumps(state)
        # A value that JSON changes, such as a dict with the keys 1 and '1', is an error now.
        if json.dumps(strict_json.parse(text.encode())) != text:
            raise ValueError('it has an integer of more than 100 digits')
        return _JSON + text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f'data={type(data).__name__}: its state, a {type(state).__name__}, is neither bytes nor JSON '
            f'({error}). Give an iterator with get_state() and set_state(), bytes, or what json.dumps takes'
        ) from error


def _decode_data(encoded: bytes) -> Any:
    """Decodes the result of `encode_data`; JSON turns tuples into lists.

    Raises:
        ValueError: it is not a result of `encode_data`.
    """
    kind, state = encoded[:1], encoded[1:]
    if kind not in (_BYTES, _JSON):
        raise ValueError('its data state is neither bytes nor JSON')
    return state if kind == _BYTES else strict_json.parse(state)


def _is_metadata(node: Any) -> bool:
    return hasattr(node, 'shape') and hasattr(node, 'dtype')


def _leaf_of(metadata: Any) -> Any:
    """Converts the metadata of a leaf to a struct, or to the type of a Python number."""
    if isinstance(metadata, orbax().metadata.ScalarMetadata):
        return {'b': bool, 'i': int, 'u': int}.get(metadata.dtype.kind, float)
    return jax.ShapeDtypeStruct(metadata.shape, metadata.dtype)
