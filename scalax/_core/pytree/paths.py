"""Leaf paths (tree paths as ``'a/b/c'`` strings), flattened trees with named leaves, and leaf properties.

A leaf path holds every key of the tree path, undecorated and joined by ``/``. It equals
``jax.tree_util.keystr(path, simple=True, separator='/')``, and is built several times faster, because
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
"""The occupied spec of a leaf for which no rule has decided yet."""


def key_string(key: Any) -> str:
    """Returns the text of one key of a tree path: ``'w'`` for ``DictKey('w')``."""
    attribute = _ATTRIBUTE.get(type(key))
    return str(key) if attribute is None else _text(getattr(key, attribute))


def _text(value: Any) -> str:
    """Returns the text of a key. Equal keys have the same text, because JAX considers such dicts equal."""
    if isinstance(value, str):
        return str.__str__(value)  # str() of an Enum that is a string differs
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not value.is_integer():
        return str(float(value))
    return str(int(value)) if isinstance(value, int | float) else str(value)


def path_string(path: Sequence[Any], separator: str = '/') -> str:
    """Returns a tree path as one string. The path of a bare leaf is ``''``.

    Example:
        >>> path_string((DictKey('layers'), SequenceKey(0), GetAttrKey('kernel')))
        'layers/0/kernel'
    """
    # Nearly every key is a DictKey: the conditional saves a call for each of them.
    return separator.join(
        [key.key if type(key) is DictKey and type(key.key) is str else key_string(key) for key in path]
    )


def _path_strings(paths: list[tuple[Any, ...]]) -> list[str]:
    """Returns the `path_string` of each path, several times faster if all keys are strings in dicts."""
    # Keys of other types may have an attribute `key` that is not their name.
    if {DictKey}.issuperset(map(type, itertools.chain.from_iterable(paths))):
        with contextlib.suppress(TypeError):
            return ['/'.join([key.key for key in path]) for path in paths]
    return [path_string(path) for path in paths]


def optional_path(path: Sequence[Any]) -> str | None:
    """Returns the `path_string`, or None for a path without keys (``''`` is the path of an empty key)."""
    return path_string(path) if path else None


def join(prefix: str | None, path: str | None) -> str | None:
    """Returns the path of a leaf in the subtree at *prefix*. None is a path without keys.

    Example:
        >>> join('layers', 'w'), join('layers', ''), join('layers', None), join(None, 'w')
        ('layers/w', 'layers/', 'layers', 'w')
    """
    if prefix is None or path is None:
        return path if prefix is None else prefix
    return f'{prefix}/{path}'


def leaf_shape(leaf: Any) -> tuple[int, ...] | None:
    """Returns the shape of a leaf, or None if JAX does not accept it as an array."""
    shape = getattr(leaf, 'shape', None)
    if shape is not None and hasattr(leaf, 'dtype'):
        # numpy silently drops the mask in conversions.
        return None if isinstance(leaf, np.ma.MaskedArray) else tuple(shape)
    return () if isinstance(leaf, bool | int | float | complex) else None


def is_prng_key(leaf: Any) -> bool:
    """Returns whether a leaf is an array of typed PRNG keys, which numpy does not support."""
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def has_foreign_dtype(leaf: Any) -> bool:
    """Returns whether JAX does not support the dtype: objects, strings, dates, records, swapped bytes."""
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
    """Returns the dtype that JAX gives to a Python int that does not fit in it, or None for other leaves."""
    if not isinstance(leaf, int) or isinstance(leaf, bool):
        return None
    dtype = canonical_dtype(int)
    limits = np.iinfo(dtype)
    return None if limits.min <= leaf <= limits.max else dtype


def canonical_dtype(dtype: Any) -> Any:
    """Returns the dtype that an array of *dtype* has on devices: without x64, float64 becomes float32."""
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)


def dtype_on_devices(leaf: Any) -> Any:
    """Returns the dtype that a leaf has on devices. A ``jax.Array`` keeps its own, even without x64."""
    if isinstance(leaf, jax.Array):
        return leaf.dtype
    return canonical_dtype(leaf.dtype) if hasattr(leaf, 'dtype') else jax.typeof(leaf).dtype


def is_weakly_typed(leaf: Any) -> bool:
    """Returns whether JAX gives the leaf a weak type, like a Python number."""
    return bool(getattr(leaf if hasattr(leaf, 'dtype') else jax.typeof(leaf), 'weak_type', False))


def tree_type(tree: Any) -> Any:
    """Returns the structure of a tree with the shapes and dtypes of its leaves, as a key to compare."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf_shape(leaf), str(dtype_on_devices(leaf))) for leaf in leaves)


@functools.lru_cache(maxsize=64)
def element_bits(dtype: Any) -> int:
    """Returns the bits of one element on a device, where two int4 share a byte."""
    # JAX cannot count the bits of PRNG keys and of float0, the dtype of gradients of integers.
    has_only_bytes = jax.dtypes.issubdtype(dtype, jax.dtypes.extended) or dtype == jax.dtypes.float0
    return int(8 * dtype.itemsize if has_only_bytes else jax.dtypes.itemsize_bits(dtype))


def array_bytes(aval: Any) -> int:
    """Returns the bytes of a global array, given its type."""
    return -(-math.prod(aval.shape) * element_bits(aval.dtype) // 8)


def describe_leaf(path: str, leaf: Any) -> str:
    """Returns the path and the type of a leaf, as error messages show it: ``params/w: float32[8, 16]``.

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
    """Returns the text of the type of an array or a Python number.

    Example:
        >>> import numpy as np
        >>> leaf_text(np.zeros((8, 16), np.float32)), leaf_text(1.0)
        ('float32[8, 16]', 'Python float')
    """
    if hasattr(leaf, 'shape'):
        return type_text(leaf.dtype, leaf.shape)
    return f'Python {type(leaf).__name__}'


def type_text(dtype: Any, shape: Iterable[int]) -> str:
    """Returns the text of an array type: ``float32[8, 16]``."""
    return f'{dtype}{list(shape)}'


@dataclasses.dataclass(frozen=True, eq=False)
class NamedTree:
    """A flattened pytree, or some of its leaves: the form in which rules see a tree.

    Attributes:
        paths: the leaf paths.
        leaves: the leaves; anything with a shape and a dtype, or Python scalars.
        shapes: the shapes of the leaves; ``()`` for leaves that are not arrays.
        treedef: the structure of the full tree.
        occupied: for each leaf the dimensions and axes that earlier rules use, as in ``a & b``.
        prefix: the path of the tree in the user's tree, for messages; None if it is the user's tree.
        full_tree: the tree from which these leaves were selected; None if these are all leaves.
        indices: the indices of these leaves in the full tree.
        original_leaves: the leaves to show in messages, if rules see different ones.
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
        """Flattens a pytree. A leaf that is not an array gets the shape ``()``.

        Args:
            pytree: the tree.
            prefix: the path of the tree in a larger tree, if any.
            as_leaf: converts a leaf to the one that rules see. The tree itself is not rebuilt, because nodes
                of other libraries may reject leaves that are not arrays.
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
        original_leaves = [] if as_leaf is None else [leaf for _, leaf in flat]
        is_bare_leaf = jax.tree_util.treedef_is_leaf(treedef)
        return cls(
            paths,
            leaves,
            shapes,
            treedef,
            [FREE] * len(leaves),
            prefix,
            original_leaves=original_leaves,
            is_bare_leaf=is_bare_leaf,
        )

    def __len__(self) -> int:
        return len(self.paths)

    def select(self, indices: Sequence[int]) -> NamedTree:
        """Returns the leaves at *indices*, for which a nested rule decides."""

        def selected(items: Sequence[Any]) -> list[Any]:
            return [items[i] for i in indices] if items else []

        full_tree, full_indices = self.root()
        return dataclasses.replace(
            self,
            paths=selected(self.paths),
            leaves=selected(self.leaves),
            shapes=selected(self.shapes),
            full_tree=full_tree,
            indices=selected(full_indices),
            occupied=selected(self.occupied),
            original_leaves=selected(self.original_leaves),
        )

    def with_occupied(self, occupied: list[PartitionSpec]) -> NamedTree:
        """Returns the same leaves with other occupied specs."""
        return dataclasses.replace(self, occupied=occupied)

    def without_leading_dims(self, dims: int) -> NamedTree:
        """Returns the leaves without their leading dimensions (stacks of layers), with nothing occupied."""
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
        """Returns the number of leading dimensions (stacks of layers) of a leaf that rules do not see."""
        return (
            len(leaf_shape(self.original_leaves[index]) or ()) - len(self.shapes[index])
            if self.original_leaves
            else 0
        )

    def root(self) -> tuple[NamedTree, Sequence[int]]:
        """Returns the full tree, and the indices of these leaves in it."""
        return (self, range(len(self))) if self.full_tree is None else (self.full_tree, self.indices)

    def path_below(self, at: str | None, index: int) -> str:
        """Returns the path of a leaf in a tree that holds this one at the path *at*."""
        return join(at, None if self.is_bare_leaf else self.paths[index]) or ''

    def path_text(self, index: int) -> str:
        """Returns the path of a leaf as rules see it, and the path where it begins, for messages."""
        inside = '' if self.prefix is None else f' (inside {self.prefix!r})'
        return f'{self.paths[index]!r}{inside}'

    def describe(self, index: int) -> str:
        """Returns the path and type of a leaf, as error messages show them."""
        return describe_leaf(
            self.path_below(self.prefix, index), (self.original_leaves or self.leaves)[index]
        )

    @functools.cached_property
    def tree(self) -> Any:
        """The pytree, with structs in place of Python scalars: every leaf has a shape and a dtype."""
        return self.treedef.unflatten(map(with_shape, self.leaves))


def with_shape(leaf: Any) -> Any:
    """Returns the leaf, or a struct in place of a Python scalar."""
    return leaf if hasattr(leaf, 'shape') else jax.ShapeDtypeStruct((), jax.dtypes.result_type(leaf))
