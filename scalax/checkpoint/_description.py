"""Descriptions of checkpoints: what each leaf was, and how that differs from what a restore asks for.

A description is read from one small file, without loading an array. Orbax's own describes a typed key as the
uint32 array of its data, and does not say how many processes have saved the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
from jax.sharding import NamedSharding

from scalax._report import saved as saved_json
from scalax._report.pages import visible
from scalax._report.tables import table, terminal_width
from scalax._tree import specs
from scalax._tree.paths import canonical_dtype, type_text
from scalax._tree.specs import axis_sizes_text
from scalax.errors import CheckpointError, near_names, plural, shown_leaves


@dataclasses.dataclass(frozen=True)
class LeafDescription:
    """One leaf as it was saved.

    Attributes:
        path: its leaf path.
        shape: its global shape.
        dtype: its dtype, such as ``'bfloat16'`` or ``'key<fry>'``.
        kind: ``'array'``, or ``'int'``, ``'float'`` or ``'bool'`` for a Python number.
        spec: its PartitionSpec as text; empty for one on a single device or on the host.
        mesh: the mesh axes with their sizes; empty if there was no mesh.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    kind: Literal['array', 'int', 'float', 'bool'] = 'array'
    spec: str = ''
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def array(self) -> str:
        """What it is, without its path, such as ``'float32[8, 16]'`` or ``'Python int'``."""
        return type_text(self.dtype, self.shape) if self.kind == 'array' else f'Python {self.kind}'

    def __str__(self) -> str:
        return f'{self.path or "(the leaf itself)"}: {self.array}'


@dataclasses.dataclass(frozen=True)
class Description:
    """What one checkpoint holds; prints as a table.

    Attributes:
        step: its step.
        leaves: its leaves, in tree order.
        processes: the number of processes that saved it; 0 if Orbax saved it without scalax.
    """

    step: int
    leaves: Sequence[LeafDescription]
    processes: int

    @property
    def by_path(self) -> dict[str, LeafDescription]:
        """The leaves by their paths."""
        return {leaf.path: leaf for leaf in self.leaves}

    def __str__(self) -> str:
        cells = [('path', 'array', 'spec')]
        for leaf in self.leaves:
            cells.append((leaf.path or '(the leaf itself)', leaf.array, leaf.spec))
        meshes = dict.fromkeys(axis_sizes_text(leaf.mesh) for leaf in self.leaves if leaf.mesh)
        counts = f'{plural(len(self.leaves), "leaf", "leaves")} of step {self.step}'
        by = plural(self.processes, 'process', 'processes') if self.processes else 'Orbax'
        on = f' on the mesh {" and ".join(f"({mesh})" for mesh in meshes)}' if meshes else ''
        return '\n'.join([*table(cells, terminal_width(None), 0, -1), '', f'{counts}, saved by {by}{on}'])


class Head(NamedTuple):
    """The file that describes a step, as JSON has it."""

    format: int
    processes: int
    leaves: tuple[LeafDescription, ...]


def parse_description(step: int, values: Any) -> Description:
    """The description of a step, from the JSON that was saved with it.

    Raises:
        ValueError: it is not a description.
    """
    head = saved_json.built(Head, values)
    if len({leaf.path for leaf in head.leaves}) != len(head.leaves):
        raise ValueError('it has several leaves with one path')
    return Description(step, head.leaves, head.processes)


def describe_leaf(path: str, leaf: Any) -> LeafDescription:
    """Describes a leaf to save or to restore: an array, a struct, a Python number or its type."""
    if not hasattr(leaf, 'dtype'):
        kind = leaf if isinstance(leaf, type) else type(leaf)
        return LeafDescription(path, (), str(canonical_dtype(kind)), cast(Any, kind.__name__))
    sharding = getattr(leaf, 'sharding', None)
    spec, mesh = '', {}
    if isinstance(sharding, NamedSharding):
        spec, mesh = specs.text(sharding.spec), dict(sharding.mesh.shape)
    return LeafDescription(path, tuple(leaf.shape), str(leaf.dtype), 'array', spec, mesh)


_NEAR = 10  # missing leaves that are compared with those that are there
_HINTS = {
    'missing': 'give rename=[(regex, replacement)] where leaves have other paths in the checkpoint, or '
    'only=regex to restore those that are there',
    'extra': 'give only=regex to restore a part of a checkpoint',
    'shape': 'make like as it was when the checkpoint was saved; describe(step) lists its leaves',
    'dtype': 'give cast=True to convert, or ask for the dtype that was saved',
}


def require_fit(
    wanted: Mapping[str, Any], saved: Mapping[str, LeafDescription], cast: bool, partial: bool, where: str
) -> None:
    """Checks that a checkpoint holds the tree that a restore asks for.

    Args:
        wanted: by path, structs, or the types of Python numbers.
        saved: by path as `wanted` has them, the leaves of the checkpoint.
        cast: whether dtypes may differ.
        partial: whether the checkpoint may hold more.
        where: the checkpoint, for the message.

    Raises:
        CheckpointError: names every leaf that is missing, extra, or of another shape or dtype.
    """
    asked = {path: describe_leaf(path, target) for path, target in wanted.items()}
    extra = [path for path in saved if path not in asked]
    missing = [path for path in asked if path not in saved]
    # Of many, the first: the hints of others are alike, and each would be a line of its own.
    hinted = missing if len(missing) <= _NEAR else missing[:1]
    kinds: dict[str, None] = {}
    found = []
    for path, leaf in asked.items():
        was = saved.get(path)
        if was is None:
            kinds['missing'] = None
            near = [str(saved[name]) for name in near_names(path, extra)] if path in hinted else []
            has = f' (the checkpoint has {" and ".join(near)})' if near else ''
            found.append(f'{leaf} is missing{has}')
        elif leaf.shape != was.shape or (leaf.dtype != was.dtype and not cast):
            kinds['shape' if leaf.shape != was.shape else 'dtype'] = None
            found.append(f'{leaf} is asked for, and {was.array} was saved')
    for path in () if partial else extra:
        if 'missing' not in kinds:  # whose hint covers both
            kinds['extra'] = None
        found.append(f'{dataclasses.replace(saved[path], path=path)} is in the checkpoint only')
    if found:
        count = 'one leaf differs' if len(found) == 1 else f'{len(found)} leaves differ'
        listed = shown_leaves(map(visible, found))
        hints = ''.join(f'\nWhat to do: {_HINTS[kind]}.' for kind in kinds)
        raise CheckpointError(f'{where} does not hold what is asked for; {count}:\n{listed}{hints}')


def with_typed_keys(
    wanted: Mapping[str, Any], saved: Mapping[str, LeafDescription]
) -> dict[str, LeafDescription]:
    """The leaves of a checkpoint that Orbax wrote without scalax, with typed keys where such are wanted.

    Orbax describes a typed key as the uint32 array of its data.
    """
    leaves = dict(saved)
    for path, target in wanted.items():
        leaf = saved.get(path)
        is_key = hasattr(target, 'dtype') and jax.dtypes.issubdtype(target.dtype, jax.dtypes.prng_key)
        if leaf is not None and leaf.dtype == 'uint32' and is_key and leaf.shape:
            leaves[path] = dataclasses.replace(leaf, shape=leaf.shape[:-1], dtype=str(target.dtype))
    return leaves
