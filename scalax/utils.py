"""Utilities for JAX programs that are independent of sharding: RNG keys, float dtypes, named trees."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast, overload

import jax
import jax.numpy as jnp
import numpy as np

from scalax._core.mesh.topologies import quiet_libtpu
from scalax._core.pytree.paths import key_string, path_string
from scalax.errors import ArgumentError, RuleError, did_you_mean

__all__ = [
    'JaxRNG',
    'flatten_tree',
    'float_tensor_to_dtype',
    'float_to_dtype',
    'get_float_dtype_by_name',
    'named_tree_map',
    'print_pytree_structure',
    'quiet_libtpu',
    'tree_path_to_string',
]

Tree = TypeVar('Tree')

_FLOATS = {'bf16': jnp.bfloat16, 'fp16': jnp.float16, 'fp32': jnp.float32, 'fp64': jnp.float64}
_FLOATS |= {np.dtype(kind).name: kind for kind in _FLOATS.values()}


# One lock for all sources, because sources can be copied and pickled, and a lock cannot.
_split_lock = threading.RLock()


class JaxRNG:
    """A stateful source of PRNG keys, for use inside a pure function.

    Threads may share one: no two calls return the same key. Which thread gets which key is then not
    deterministic; for reproducible programs, give each thread its own source.

    Args:
        rng: the key to split from; old-style or typed.

    Example:
        >>> rng = JaxRNG.from_seed(0)
        >>> dropout_key = rng()
        >>> sorted(rng(['params', 'dropout']))
        ['dropout', 'params']
    """

    global_rng_generator: JaxRNG | None = None
    """The source of `next_rng`."""

    @classmethod
    def from_seed(cls, seed: int) -> JaxRNG:
        """Returns a source that starts from ``jax.random.PRNGKey(seed)``."""
        return cls(jax.random.PRNGKey(seed))

    def __init__(self, rng: jax.Array) -> None:
        self.rng = rng

    @overload
    def __call__(self, keys: None = None) -> jax.Array: ...
    @overload
    def __call__(self, keys: int) -> tuple[jax.Array, ...]: ...
    @overload
    def __call__(self, keys: Iterable[str]) -> dict[str, jax.Array]: ...
    def __call__(self, keys: int | Iterable[str] | None = None) -> Any:
        """Returns new keys.

        Args:
            keys: None for one key, a number for a tuple of keys, names for a dict of keys.

        Raises:
            ArgumentError: *keys* is none of these.
        """
        if keys is None:
            with _split_lock:
                self.rng, key = jax.random.split(self.rng)
            return key
        if isinstance(keys, int | np.integer) and keys >= 0:
            return tuple(self._split(int(keys)))
        if isinstance(keys, int | np.integer | str | bytes) or not isinstance(keys, Iterable):
            raise ArgumentError(f'JaxRNG takes a number of keys or a list of names, got {keys!r}')
        names = list(keys)
        return dict(zip(names, self._split(len(names)), strict=True))

    def _split(self, count: int) -> jax.Array:
        with _split_lock:
            split = jax.random.split(self.rng, num=count + 1)
            self.rng = split[0]
        return split[1:]

    @classmethod
    def init_global_rng(cls, seed: int) -> None:
        """Creates the global source of `next_rng`."""
        cls.global_rng_generator = cls.from_seed(seed)

    @classmethod
    def next_rng(cls, *args: Any, **kwargs: Any) -> Any:
        """Returns new keys from the global source.

        Raises:
            RuntimeError: `init_global_rng` was not called.
        """
        if cls.global_rng_generator is None:
            raise RuntimeError('call JaxRNG.init_global_rng(seed) before JaxRNG.next_rng()')
        return cls.global_rng_generator(*args, **kwargs)


def get_float_dtype_by_name(dtype: str) -> Any:
    """Returns the float dtype with a name such as ``'bf16'`` or ``'float32'``.

    Raises:
        KeyError: the name is unknown. The message lists the known names.

    Example:
        >>> get_float_dtype_by_name('bf16').dtype.name
        'bfloat16'
    """
    try:
        return _FLOATS[dtype]
    except KeyError:
        raise KeyError(f'no float dtype {dtype!r} ({did_you_mean(str(dtype), _FLOATS)})') from None


def float_tensor_to_dtype(tensor: Tree, dtype: Any) -> Tree:
    """Casts an array of floats. Anything else is returned unchanged.

    Args:
        tensor: an array, or any leaf.
        dtype: a dtype, a name that `get_float_dtype_by_name` knows, or None or '' for no cast.
    """
    if dtype is None or (isinstance(dtype, str) and dtype == ''):
        return tensor
    if isinstance(dtype, str):
        dtype = get_float_dtype_by_name(dtype)
    current = getattr(tensor, 'dtype', None)
    # Typed PRNG keys, integers, and float8 dtypes, which need a scale, are not cast.
    if isinstance(current, np.dtype) and current in map(np.dtype, set(_FLOATS.values())):
        return cast(Any, tensor).astype(dtype)
    return tensor


def float_to_dtype(tree: Tree, dtype: Any) -> Tree:
    """Casts the float arrays of a tree, as `float_tensor_to_dtype` does.

    Example:
        >>> tree = float_to_dtype({'w': np.ones(2, np.float32), 'step': np.ones(2, np.int32)}, 'bf16')
        >>> {name: leaf.dtype.name for name, leaf in tree.items()}
        {'step': 'int32', 'w': 'bfloat16'}
    """
    return jax.tree.map(lambda leaf: float_tensor_to_dtype(leaf, dtype), tree)


def tree_path_to_string(path: Iterable[Any], sep: str | None = None) -> Any:
    """Returns a tree path as one string, or as a tuple of strings if *sep* is None.

    Args:
        path: keys from ``jax.tree_util.tree_flatten_with_path``.
        sep: the separator of the keys; None for a tuple.

    Example:
        >>> [(path, _)], _ = jax.tree_util.tree_flatten_with_path({'layers': [1.0]})
        >>> tree_path_to_string(path), tree_path_to_string(path, sep='/')
        (('layers', '0'), 'layers/0')
    """
    if sep is None:
        return tuple(map(key_string, path))
    return path_string(tuple(path), sep)


def flatten_tree(
    xs: Any, is_leaf: Callable[[Any], bool] | None = None, sep: str | None = None
) -> dict[Any, Any]:
    """Returns a tree as a flat dict: leaf path -> leaf.

    Args:
        xs: the tree.
        is_leaf: as in ``jax.tree.flatten``.
        sep: as in `tree_path_to_string`.

    Raises:
        RuleError: two leaves have the same path, as in ``{'a/b': 1, 'a': {'b': 2}}``.

    Example:
        >>> flatten_tree({'a': {'b': 1, 'c': [2, 3]}}, sep='/')
        {'a/b': 1, 'a/c/0': 2, 'a/c/1': 3}
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(xs, is_leaf=is_leaf)
    named: dict[Any, Any] = {}
    for path, leaf in flat:
        name = tree_path_to_string(path, sep)
        if name in named:
            raise RuleError(f'two leaves have the path {name!r}: rename a key, or pass sep=None')
        named[name] = leaf
    return named


def named_tree_map(
    f: Callable[..., Any],
    tree: Any,
    *rest: Any,
    is_leaf: Callable[[Any], bool] | None = None,
    sep: str | None = None,
) -> Any:
    """Maps a function over a tree, like ``jax.tree.map``, with the leaf path as its first argument.

    Args:
        f: called as ``f(path, leaf, *other_leaves)``.
        tree: the tree.
        *rest: more trees of the same structure.
        is_leaf: as in ``jax.tree.map``.
        sep: as in `tree_path_to_string`.

    Example:
        >>> named_tree_map(lambda path, x: f'{path}={x}', {'a': {'b': 1}}, sep='/')
        {'a': {'b': 'a/b=1'}}
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, *others: f(tree_path_to_string(path, sep), leaf, *others),
        tree,
        *rest,
        is_leaf=is_leaf,
    )


def print_pytree_structure(tree: Any, sep: str = '/', is_leaf: Callable[[Any], bool] | None = None) -> None:
    """Prints the path, shape and dtype of every leaf.

    Example:
        >>> print_pytree_structure({'w': np.zeros((2, 3), np.float32), 'name': 'x'})
        name: shape: none, dtype: none
        w: shape: (2, 3), dtype: float32
    """

    def line(path: str, leaf: Any) -> None:
        print(f'{path}: shape: {getattr(leaf, "shape", "none")}, dtype: {getattr(leaf, "dtype", "none")}')

    named_tree_map(line, tree, is_leaf=is_leaf, sep=sep)
