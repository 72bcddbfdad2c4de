"""Descriptions of checkpoints: what each leaf was, and how that differs from what a restore asks for.

A description is read from one small file, without loading an array. Orbax's own describes a typed key as the
uint32 array of its data, and does not say how many processes have saved the step.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from scalax._report.pages import visible
from scalax._report.tables import table, terminal_width
from scalax._tree import specs
from scalax._tree.paths import canonical_dtype, type_text
from scalax._tree.specs import axis_sizes_text
from scalax._util.folding import MOST_RUNS, Fold, fold, times
from scalax.errors import CheckpointError, near_names, plural

_KINDS = ('array', 'int', 'float', 'bool')


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
    kind: str = 'array'
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


def parse_description(step: int, values: Any) -> Description:
    """The description of a step, from the JSON that was saved with it.

    Raises:
        ValueError: it is not a description.
    """
    if not isinstance(values, dict) or type(values.get('processes')) is not int or values['processes'] < 0:
        raise ValueError('it does not say how many processes have saved it')
    if not isinstance(values.get('leaves'), list):
        raise ValueError('it has no list of leaves')
    leaves = [_parse_leaf(entry) for entry in values['leaves']]
    if len({leaf.path for leaf in leaves}) != len(leaves):
        raise ValueError('it has several leaves with one path')
    return Description(step, leaves, values['processes'])


def _parse_leaf(entry: Any) -> LeafDescription:
    fields = dataclasses.fields(LeafDescription)
    if isinstance(entry, dict) and entry.keys() == {field.name for field in fields}:
        shape, mesh = entry['shape'], entry['mesh']
        texts = all(isinstance(entry[name], str) for name in ('path', 'dtype', 'spec'))
        sizes = [*shape, *mesh.values()] if isinstance(shape, list) and isinstance(mesh, dict) else [None]
        if texts and entry['kind'] in _KINDS and all(type(size) is int and size >= 0 for size in sizes):
            return LeafDescription(**{**entry, 'shape': tuple(shape)})
    raise ValueError(f'it has an entry that does not describe a leaf: {reprlib.repr(entry)}')


def describe_leaf(path: str, leaf: Any) -> LeafDescription:
    """Describes a leaf to save or to restore: an array, a struct, a Python number or its type."""
    if not hasattr(leaf, 'dtype'):
        kind = leaf if isinstance(leaf, type) else type(leaf)
        return LeafDescription(path, (), str(canonical_dtype(kind)), kind.__name__)
    sharding = getattr(leaf, 'sharding', None)
    spec, mesh = '', {}
    if isinstance(sharding, NamedSharding):
        spec, mesh = specs.text(sharding.spec), dict(sharding.mesh.shape)
    return LeafDescription(path, tuple(leaf.shape), str(leaf.dtype), 'array', spec, mesh)


_SHOWN = 10
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
    found = list(_problems(asked, saved, cast, partial))
    if found:
        count = 'one leaf differs' if len(found) == 1 else f'{len(found)} leaves differ'
        kinds = dict.fromkeys(one.kind for one in found)
        if 'missing' in kinds:
            kinds.pop('extra', None)  # the hint about missing leaves covers both
        hints = ''.join(f'\nWhat to do: {_HINTS[kind]}.' for kind in kinds)
        # A leaf that is wrong in many layers is listed once.
        folds = fold((one.leaf.path, (one.kind, one.leaf.array, one.more)) for one in found)
        extra = [path for path in saved if path not in wanted]
        lines = [_line(item, found[item.first], saved, extra) for item in folds[:_SHOWN]]
        rest = sum(item.count for item in folds[_SHOWN:])
        lines += [f'... and {rest} more'] if rest else []
        listed = ''.join(f'\n  {visible(line)}' for line in lines)
        raise CheckpointError(f'{where} does not hold what is asked for; {count}:{listed}{hints}')


class _Problem(NamedTuple):
    """What is wrong with one leaf.

    Attributes:
        kind: ``'missing'``, ``'extra'``, ``'shape'`` or ``'dtype'``.
        leaf: the leaf that is asked for; an extra one as it was saved.
        more: the rest of the message.
    """

    kind: str
    leaf: LeafDescription
    more: str = ''


def _problems(
    asked: Mapping[str, LeafDescription], saved: Mapping[str, LeafDescription], cast: bool, partial: bool
) -> Iterator[_Problem]:
    for path, leaf in asked.items():
        if path not in saved:
            yield _Problem('missing', leaf)
        elif leaf.shape != saved[path].shape:
            yield _Problem('shape', leaf, f' is asked for, and {saved[path].array} was saved')
        elif not cast and leaf.dtype != saved[path].dtype:
            yield _Problem('dtype', leaf, f' is asked for, and {saved[path].array} was saved')
    for path, leaf in saved.items():
        if path not in asked and not partial:
            yield _Problem('extra', dataclasses.replace(leaf, path=path), ' is in the checkpoint only')


def _line(item: Fold, problem: _Problem, saved: Mapping[str, LeafDescription], extra: Sequence[str]) -> str:
    """One line of the message, for one leaf or several folded into one."""
    near = near_names(problem.leaf.path, extra) if problem.kind == 'missing' else []
    near = near[: 2 if item.count == 1 else 1]  # that of another layer says nothing of all of them
    has = f' (the checkpoint has {" and ".join(str(saved[name]) for name in near)})' if near else ''
    name = item.short_name(MOST_RUNS) or '(the leaf itself)'
    return f'{problem.kind}: {name}: {times(item.count)}{problem.leaf.array}{problem.more}{has}'


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
