"""Leaf paths: tree paths as ``'a/b/c'`` strings, and flat trees with named leaves.

A leaf path holds every key of the tree, undecorated and joined by ``/``: what
``jax.tree_util.keystr(path, simple=True, separator='/')`` gives, built several times faster, because
resolving a large tree spends most of its time here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

_ATTRIBUTE: dict[type, str] = {
    DictKey: 'key',
    SequenceKey: 'idx',
    GetAttrKey: 'name',
    FlattenedIndexKey: 'key',
}


FREE = PartitionSpec()
"""What rules occupy of a leaf before the first of them has decided."""


def key_string(key: Any) -> str:
    """One key of a tree path without decoration: ``DictKey('w')`` is ``'w'``."""
    attribute = _ATTRIBUTE.get(type(key))
    return str(key) if attribute is None else _text(getattr(key, attribute))


def _text(value: Any) -> str:
    """The text of a key: the same for equal keys, because JAX takes such dicts for one structure."""
    if isinstance(value, str):
        return str.__str__(value)  # an Enum that is a string prints otherwise
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not value.is_integer():
        return str(float(value))
    return str(int(value)) if isinstance(value, int | float) else str(value)


def path_string(path: Sequence[Any], separator: str = '/') -> str:
    """A tree path as one string; the path of a bare leaf is ``''``.

    Example:
        >>> path_string((DictKey('layers'), SequenceKey(0), GetAttrKey('kernel')))
        'layers/0/kernel'
    """
    # Nearly every key is a DictKey: the conditional saves a call per key for those.
    return separator.join(
        [key.key if type(key) is DictKey and type(key.key) is str else key_string(key) for key in path]
    )


def _path_strings(paths: list[tuple[Any, ...]]) -> list[str]:
    """`path_string` of each path; several times faster where all keys are those of dicts, and strings."""
    # Keys of other types may have an attribute `key` that is not their name.
    if {DictKey}.issuperset(map(type, itertools.chain.from_iterable(paths))):
        with contextlib.suppress(TypeError):
            return ['/'.join([key.key for key in path]) for path in paths]
    return [path_string(path) for path in paths]


def optional_path(path: Sequence[Any]) -> str | None:
    """`path_string`, and None where there are no keys: ``''`` is the path of one empty key too."""
    return path_string(path) if path else None


def join(prefix: str | None, path: str | None) -> str | None:
    """The path of a leaf of the subtree at *prefix*. None stands for no keys, ``''`` for an empty one.

    Example:
        >>> join('layers', 'w'), join('layers', ''), join('layers', None), join(None, 'w')
        ('layers/w', 'layers/', 'layers', 'w')
    """
    if prefix is None or path is None:
        return path if prefix is None else prefix
    return f'{prefix}/{path}'


def leaf_shape(leaf: Any) -> tuple[int, ...] | None:
    """The shape of anything JAX takes as an array, or None for what it does not take."""
    shape = getattr(leaf, 'shape', None)
    if shape is not None and hasattr(leaf, 'dtype'):
        # numpy silently drops the mask when it converts one.
        return None if isinstance(leaf, np.ma.MaskedArray) else tuple(shape)
    return () if isinstance(leaf, bool | int | float | complex) else None


def is_prng_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed PRNG keys, which numpy does not know."""
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def has_foreign_dtype(leaf: Any) -> bool:
    """Whether JAX lacks the dtype: objects, strings, dates, records, swapped bytes, other libraries'."""
    dtype = getattr(leaf, 'dtype', None)
    if dtype is None:
        return False
    if not isinstance(dtype, np.dtype):
        try:
            if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
                return False
            dtype = np.dtype(dtype)
        except TypeError:
            return True
    too_wide = dtype.itemsize > (8 if dtype.kind == 'f' else 16)
    return dtype.kind in 'OSUMm' or too_wide or not dtype.isnative or issubclass(dtype.type, np.void)


def overflowed_dtype(leaf: Any) -> Any:
    """The dtype that JAX gives a Python int which does not fit into it; None for other leaves."""
    if not isinstance(leaf, int) or isinstance(leaf, bool):
        return None
    dtype = canonical_dtype(int)
    limits = np.iinfo(dtype)
    return None if limits.min <= leaf <= limits.max else dtype


def canonical_dtype(dtype: Any) -> Any:
    """The dtype that an array of *dtype* has on the devices: without x64, float64 is float32."""
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)


def dtype_on_devices(leaf: Any) -> Any:
    """The dtype that a leaf has on devices: a ``jax.Array`` keeps its own, also a wide one without x64."""
    if isinstance(leaf, jax.Array):
        return leaf.dtype
    return canonical_dtype(leaf.dtype) if hasattr(leaf, 'dtype') else jax.typeof(leaf).dtype


def is_weakly_typed(leaf: Any) -> bool:
    """Whether JAX gives the leaf a weak type, as to a Python number: it takes the dtypes of others."""
    return bool(getattr(leaf if hasattr(leaf, 'dtype') else jax.typeof(leaf), 'weak_type', False))


def tree_type(tree: Any) -> Any:
    """What two trees of the same structure, shapes and dtypes have in common."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf_shape(leaf), str(dtype_on_devices(leaf))) for leaf in leaves)


@functools.lru_cache(maxsize=64)
def element_bits(dtype: Any) -> int:
    """The bits of one element on a device, where two int4 share a byte."""
    # Of PRNG keys, and of gradients of integers, which take nothing.
    counted = jax.dtypes.issubdtype(dtype, jax.dtypes.extended) or dtype == jax.dtypes.float0
    return int(8 * dtype.itemsize if counted else jax.dtypes.itemsize_bits(dtype))


def array_bytes(aval: Any) -> int:
    """Returns the bytes of an array of all devices together, given its type."""
    return -(-math.prod(aval.shape) * element_bits(aval.dtype) // 8)


def describe_leaf(path: str, leaf: Any) -> str:
    """A leaf as error messages show it: ``params/w: float32[8, 16]``.

    Example:
        >>> import numpy as np
        >>> describe_leaf('params/w', np.zeros((8, 16), np.float32))
        'params/w: float32[8, 16]'
        >>> describe_leaf('', 1.0)
        '(the leaf itself): Python float'
    """
    name = path or '(the leaf itself)'
    if leaf_shape(leaf) is None:
        kind = type(leaf)
        remedy = ' (.filled() makes a plain array of it)' if isinstance(leaf, np.ma.MaskedArray) else ''
        module = '' if kind.__module__ == 'builtins' else f'{kind.__module__}.'
        return f'{name}: {module}{kind.__qualname__}{remedy}'
    return f'{name}: {leaf_text(leaf)}'


def leaf_text(leaf: Any) -> str:
    """An array or a Python number without its values.

    Example:
        >>> import numpy as np
        >>> leaf_text(np.zeros((8, 16), np.float32)), leaf_text(1.0)
        ('float32[8, 16]', 'Python float')
    """
    if hasattr(leaf, 'shape'):
        return type_text(leaf.dtype, leaf.shape)
    return f'Python {type(leaf).__name__}'


def type_text(dtype: Any, shape: Iterable[int]) -> str:
    """The type of an array as messages show it: ``float32[8, 16]``."""
    return f'{dtype}{list(shape)}'


@dataclasses.dataclass(frozen=True, eq=False)
class NamedTree:
    """A flattened pytree, or some of its leaves: the form in which rules see a tree.

    Attributes:
        paths: the leaf paths.
        leaves: the leaves; anything with a shape and a dtype, or Python scalars.
        shapes: their shapes; ``()`` for what is not an array.
        treedef: the structure of the whole tree.
        occupied: for each leaf the spec of the rules that decided before, in ``a & b``.
        prefix: the path of the tree in the one that the user gave, for messages; None for that one itself.
        full_tree: the tree that these leaves were selected from; None if these are all.
        indices: where these leaves are in the whole tree.
        original_leaves: the leaves as messages show them, where rules see others.
        is_bare_leaf: whether the tree is one leaf without a key. (``''`` is also the path of an empty key.)
    """

    paths: Sequence[str]
    leaves: Sequence[Any]
    shapes: Sequence[tuple[int, ...]]
    treedef: Any
    occupied: list[PartitionSpec]
    prefix: str | None = None
    full_tree: NamedTree | None = None
    indices: Sequence[int] = ()
    original_leaves: Sequence[Any] = ()
    is_bare_leaf: bool = False

    @classmethod
    def of(
        cls, pytree: Any, prefix: str | None = None, as_leaf: Callable[[Any], Any] | None = None
    ) -> NamedTree:
        """Flattens *pytree*. A leaf that is not an array gets the shape ``()``.

        Args:
            pytree: the tree.
            prefix: its path in a larger tree, if any.
            as_leaf: what rules see in place of each leaf. The tree itself is not rebuilt, because nodes
                of other libraries may refuse to hold anything but arrays.
        """
        flat, treedef = jax.tree_util.tree_flatten_with_path(pytree)
        paths = _path_strings([path for path, _ in flat])
        leaves = [leaf if as_leaf is None else as_leaf(leaf) for _, leaf in flat]
        try:
            shapes = [leaf.shape for leaf in leaves]
            if not {tuple}.issuperset(map(type, shapes)):
                shapes = [leaf_shape(leaf) or () for leaf in leaves]
        except AttributeError:
            shapes = [leaf_shape(leaf) or () for leaf in leaves]
        shown = [] if as_leaf is None else [leaf for _, leaf in flat]
        bare = jax.tree_util.treedef_is_leaf(treedef)
        free = [FREE] * len(leaves)
        return cls(paths, leaves, shapes, treedef, free, prefix, original_leaves=shown, is_bare_leaf=bare)

    def __len__(self) -> int:
        return len(self.paths)

    def select(self, indices: Sequence[int]) -> NamedTree:
        """The leaves at *indices*, as the part of a tree that a nested rule decides about."""

        def rows(column: Sequence[Any]) -> list[Any]:
            return [column[i] for i in indices] if column else []

        whole, places = self.root()
        return dataclasses.replace(
            self,
            paths=rows(self.paths),
            leaves=rows(self.leaves),
            shapes=rows(self.shapes),
            full_tree=whole,
            indices=rows(places),
            occupied=rows(self.occupied),
            original_leaves=rows(self.original_leaves),
        )

    def with_occupied(self, occupied: list[PartitionSpec]) -> NamedTree:
        """The same leaves, with the specs of the rules that decided before."""
        return dataclasses.replace(self, occupied=occupied)

    def without_leading_dims(self, dims: int) -> NamedTree:
        """The same leaves without their first dimensions, which are stacks of layers; nothing is occupied."""
        shapes = [shape[dims:] for shape in self.shapes]
        return dataclasses.replace(
            self,
            leaves=[
                jax.ShapeDtypeStruct(shape, leaf.dtype) if hasattr(leaf, 'dtype') else leaf
                for leaf, shape in zip(self.leaves, shapes, strict=True)
            ],
            shapes=shapes,
            full_tree=self.full_tree and self.full_tree.without_leading_dims(dims),
            occupied=[FREE] * len(shapes),
            original_leaves=self.original_leaves or self.leaves,
        )

    def num_stacked_dims(self, index: int) -> int:
        """How many first dimensions of leaf number *index* are stacks of layers, which rules do not see."""
        return (
            len(leaf_shape(self.original_leaves[index]) or ()) - len(self.shapes[index])
            if self.original_leaves
            else 0
        )

    def root(self) -> tuple[NamedTree, Sequence[int]]:
        """The whole tree, and where these leaves are in it."""
        return (self, range(len(self))) if self.full_tree is None else (self.full_tree, self.indices)

    def path_below(self, at: str | None, index: int) -> str:
        """The path of leaf number *index* in a tree that has this one at *at*."""
        return join(at, None if self.is_bare_leaf else self.paths[index]) or ''

    def path_text(self, index: int) -> str:
        """The path of leaf number *index* as rules see it, and where it begins, for messages."""
        inside = '' if self.prefix is None else f' (inside {self.prefix!r})'
        return f'{self.paths[index]!r}{inside}'

    def describe(self, index: int) -> str:
        """Leaf number *index* as error messages show it."""
        return describe_leaf(
            self.path_below(self.prefix, index), (self.original_leaves or self.leaves)[index]
        )

    @functools.cached_property
    def tree(self) -> Any:
        """The pytree itself, with structs for Python scalars: every leaf has a shape and a dtype."""
        return self.treedef.unflatten(map(with_shape, self.leaves))


def with_shape(leaf: Any) -> Any:
    """The leaf, or a struct for a Python scalar."""
    return leaf if hasattr(leaf, 'shape') else jax.ShapeDtypeStruct((), jax.dtypes.result_type(leaf))
