"""Validation of a state before a save: leaves that Orbax would change or reject are errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import tensorstore

from scalax._core.pytree.paths import NamedTree, canonical_dtype, has_foreign_dtype
from scalax.checkpoint._target import require_distinct
from scalax.errors import CheckpointError, module_advice, shown_leaves


def validate_state(tree: NamedTree) -> NamedTree:
    """Checks that a tree can be saved.

    Returns:
        The tree with NumPy arrays in the dtypes that JAX gives them, in which they are saved and restored.

    Raises:
        CheckpointError: lists all leaves that cannot be saved.
    """
    require_distinct(tree.paths, 'the state')
    if not tree.leaves:
        raise CheckpointError('the state has no leaves: there is nothing to save')
    if tree.is_bare_leaf:
        raise CheckpointError("the state is a single leaf; give a tree, such as {'params': leaf}")
    leaves = [_with_jax_dtype(leaf) for leaf in tree.leaves]
    faults = [
        f'{tree.describe(i)}: {fault}'
        for i, leaf in enumerate(tree.leaves)
        if (fault := _fault(leaf, leaves[i]))
    ]
    if faults:
        advice = module_advice(tree.leaves)
        raise CheckpointError(
            f'some leaves of the state cannot be saved:\n{shown_leaves(faults)}'
            + (f'\nWhat to do:{advice}' if advice else '')
        )
    return dataclasses.replace(tree, leaves=leaves)


def _with_jax_dtype(leaf: Any) -> Any:
    """Casts a NumPy array to the dtype that JAX gives it: without x64, of 32 bits instead of 64."""
    if not isinstance(leaf, np.ndarray | np.generic) or has_foreign_dtype(leaf):
        return leaf
    dtype = canonical_dtype(leaf.dtype)
    with np.errstate(over='ignore'):  # `_fits` finds overflows
        return leaf if leaf.dtype == dtype else leaf.astype(dtype)


def _fits(leaf: Any, cast: Any) -> bool:
    """Returns whether the values of a NumPy array fit in the dtype of *cast*; precision may be lost."""
    if leaf.dtype.kind in 'iu':
        return bool((cast == leaf).all())
    return bool((np.isfinite(cast) == np.isfinite(leaf)).all())


def _is_supported(dtype: Any) -> bool:
    """Returns whether TensorStore, with which Orbax writes arrays, supports a dtype, or it is one of keys."""
    try:
        return not isinstance(dtype, np.dtype) or bool(tensorstore.dtype(dtype.name))
    except ValueError:
        return False


def _fault(leaf: Any, cast: Any) -> str:
    """Returns why a leaf cannot be saved; empty if it can.

    Args:
        leaf: the leaf.
        cast: the leaf in the dtype that JAX gives it.
    """
    if isinstance(leaf, jax.core.Tracer):
        return 'it is a value inside a traced function; save outside of it'
    if isinstance(leaf, np.ma.MaskedArray):
        return 'its mask would be lost'
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            return 'it was donated to a compiled function; save what that function returned'
        if 0 in leaf.shape:
            return 'Orbax does not write arrays without elements; leave it out'
        if isinstance(leaf, jax.Array) and jax.process_count() > 1 and leaf.is_fully_addressable:
            return (
                'it is on this process only; shard it over a mesh of all processes, or make it a numpy array'
            )
        if not isinstance(leaf, jax.Array) and has_foreign_dtype(leaf):
            return f'JAX has no arrays of dtype {leaf.dtype}'
        if not _is_supported(cast.dtype):
            return 'Orbax does not write this dtype; cast it to a wider one'
        if cast is leaf or _fits(leaf, cast):
            return ''
        return (
            f'it holds values that do not fit in {cast.dtype}, to which JAX converts {leaf.dtype}; set '
            'jax_enable_x64, or save a Python number'
        )
    if isinstance(leaf, int) and not -(2**63) <= leaf < 2**64:
        return 'it has more than 64 bits'
    return '' if isinstance(leaf, int | float) else 'only arrays, typed keys and Python numbers can be saved'
