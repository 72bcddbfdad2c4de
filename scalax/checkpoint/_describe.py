"""What did the tree of a checkpoint look like? Read from one small file, without loading an array."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding

from scalax import _spec
from scalax._paths import NamedTree, canonical_dtype
from scalax._spec import axis_sizes_text
from scalax.explain._table import table
from scalax.explain._text import columns


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
        counts = f'{len(self.leaves)} {"leaf" if len(self.leaves) == 1 else "leaves"} of step {self.step}'
        by = f'{self.processes} process{"" if self.processes == 1 else "es"}' if self.processes else 'Orbax'
        on = f' on the mesh {" and ".join(f"({mesh})" for mesh in meshes)}' if meshes else ''
        return '\n'.join([*table(cells, columns(None), 0, -1), '', f'{counts}, saved by {by}{on}'])


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
        spec, mesh = _spec.text(sharding.spec), dict(sharding.mesh.shape)
    return LeafDescription(path, tuple(leaf.shape), str(leaf.dtype), 'array', spec, mesh)
