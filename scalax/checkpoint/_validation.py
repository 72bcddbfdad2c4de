"""What can be saved: leaves that Orbax changes or refuses are named before anything is written."""

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
        The tree as it is saved: numpy arrays in the dtypes that JAX gives them, in which they are restored.

    Raises:
        CheckpointError: names every leaf that cannot be saved.
    """
    require_distinct(tree.paths, 'the state')
    if not tree.leaves:
        raise CheckpointError('the state has no leaves: there is nothing to save')
    if tree.is_bare_leaf:
        raise CheckpointError("the state is a single leaf; give a tree, such as {'params': leaf}")
    leaves = [_as_jax_holds(leaf) for leaf in tree.leaves]
    found = [
        f'{tree.describe(i)}: {why}'
        for i, leaf in enumerate(tree.leaves)
        if (why := _reason_against(leaf, leaves[i]))
    ]
    if found:
        advice = module_advice(tree.leaves)
        raise CheckpointError(
            f'some leaves of the state cannot be saved:\n{shown_leaves(found)}'
            + (f'\nWhat to do:{advice}' if advice else '')
        )
    return dataclasses.replace(tree, leaves=leaves)


def _as_jax_holds(leaf: Any) -> Any:
    """A leaf as JAX holds it: without x64, a numpy array of 64 bits has 32."""
    if not isinstance(leaf, np.ndarray | np.generic) or has_foreign_dtype(leaf):
        return leaf
    dtype = canonical_dtype(leaf.dtype)
    with np.errstate(over='ignore'):  # overflows are found by comparing values
        return leaf if leaf.dtype == dtype else leaf.astype(dtype)


def _fits(leaf: Any, held: Any) -> bool:
    """Whether the values of a numpy array fit in the dtype that JAX gives it; digits may be lost."""
    if leaf.dtype.kind in 'iu':
        return bool((held == leaf).all())
    return bool((np.isfinite(held) == np.isfinite(leaf)).all())


def _is_stored(dtype: Any) -> bool:
    """Whether TensorStore, in which Orbax writes arrays, has a dtype; of keys the data is written."""
    try:
        return not isinstance(dtype, np.dtype) or bool(tensorstore.dtype(dtype.name))
    except ValueError:
        return False


def _reason_against(leaf: Any, held: Any) -> str:
    """Why a leaf cannot be saved; empty if it can.

    Args:
        leaf: the leaf.
        held: the same as JAX holds it.
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
        if not _is_stored(held.dtype):
            return 'Orbax does not write this dtype; cast it to a wider one'
        if held is leaf or _fits(leaf, held):
            return ''
        return (
            f'it holds values that do not fit in {held.dtype}, to which JAX converts {leaf.dtype}; set '
            'jax_enable_x64, or save a Python number'
        )
    if isinstance(leaf, int) and not -(2**63) <= leaf < 2**64:
        return 'it has more than 64 bits'
    return '' if isinstance(leaf, int | float) else 'only arrays, typed keys and Python numbers can be saved'
