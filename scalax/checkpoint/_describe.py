"""What did the tree of a checkpoint look like? Read from one small file, without loading an array."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding

from scalax._report.tables import table, terminal_width
from scalax._tree import specs
from scalax._tree.paths import NamedTree, canonical_dtype
from scalax._tree.specs import axis_sizes_text
from scalax.errors import plural

_KINDS = ('array', 'int', 'float', 'bool')


@dataclasses.dataclass(frozen=True)
class LeafDescription:
    """One leaf as it was saved.

    Attributes:
        path: its leaf path.
        shape: its global shape.
        dtype: its dtype, such as ``'bfloat16'`` or ``'key<fry>'``.
        kind: ``'array'``, or ``'int'``, ``'float'`` or ``'bool'`` for a Python number.
        spec: its PartitionSpec as text; empty where it lay on one device, or on the host.
        mesh: the mesh axes with their sizes; empty where there was none.
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
        return f'{self.dtype}{list(self.shape)}' if self.kind == 'array' else f'Python {self.kind}'

    def __str__(self) -> str:
        return f'{self.path or "(the leaf itself)"}: {self.array}'


@dataclasses.dataclass(frozen=True)
class Description:
    """What one checkpoint holds; prints as a table.

    Attributes:
        step: its step.
        leaves: its leaves, in tree order.
        processes: the number of processes that saved it; 0 where Orbax did without scalax.
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
        by = f'{plural(self.processes, "process", "processes")}' if self.processes else 'Orbax'
        on = f' on the mesh {" and ".join(f"({mesh})" for mesh in meshes)}' if meshes else ''
        return '\n'.join([*table(cells, terminal_width(None), 0, -1), '', f'{counts}, saved by {by}{on}'])


def decoded(step: int, head: Any) -> Description:
    """The description of a step, from the JSON that was saved with it.

    Raises:
        ValueError: it is no such description.
    """
    if not isinstance(head, dict) or type(head.get('processes')) is not int or head['processes'] < 0:
        raise ValueError('it does not say how many processes have saved it')
    if not isinstance(head.get('leaves'), list):
        raise ValueError('it has no list of leaves')
    leaves = [_decoded(entry) for entry in head['leaves']]
    if len({leaf.path for leaf in leaves}) != len(leaves):
        raise ValueError('it has several leaves with one path')
    return Description(step, leaves, head['processes'])


def _decoded(entry: Any) -> LeafDescription:
    fields = dataclasses.fields(LeafDescription)
    if isinstance(entry, dict) and entry.keys() == {field.name for field in fields}:
        shape, mesh = entry['shape'], entry['mesh']
        texts = all(isinstance(entry[name], str) for name in ('path', 'dtype', 'spec'))
        sizes = [*shape, *mesh.values()] if isinstance(shape, list) and isinstance(mesh, dict) else [None]
        if texts and entry['kind'] in _KINDS and all(type(size) is int and size >= 0 for size in sizes):
            return LeafDescription(**{**entry, 'shape': tuple(shape)})
    raise ValueError(f'it has an entry that describes no leaf: {reprlib.repr(entry)}')


def described(tree: NamedTree) -> list[LeafDescription]:
    """What there is to say of each leaf of a tree that is to be saved."""
    return [_described(path, leaf) for path, leaf in zip(tree.paths, tree.leaves, strict=True)]


def _described(path: str, leaf: Any) -> LeafDescription:
    if not hasattr(leaf, 'dtype'):
        kind = type(leaf).__name__
        return LeafDescription(path, (), str(canonical_dtype(type(leaf))), kind)
    sharding = getattr(leaf, 'sharding', None)
    spec, mesh = '', {}
    if isinstance(sharding, NamedSharding):
        spec, mesh = specs.text(sharding.spec), dict(sharding.mesh.shape)
    return LeafDescription(path, tuple(leaf.shape), str(leaf.dtype), 'array', spec, mesh)
