"""Compares the behaviour of `jax.jit` and `sjit` in a case, aspect by aspect."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tests.support.jit_cases import EXPLICIT, HELPER, TRACES, Case

_NANS = 'Invalid nan value encountered'  # JAX logs this once for each jaxpr in which it searches for the NaN


def differences(case: Case) -> dict[str, tuple[Any, Any]]:
    """Returns the aspects in which they differ, with the values of `jax.jit` and `sjit`."""
    helper = EXPLICIT if case.explicit else HELPER
    of_sjit, of_jax = (_observed(case, jit, helper.mesh) for jit in (helper.sjit, jax.jit))
    assert (of_jax['error'] is not None) == case.raises, f'jax.jit: {of_jax["error"]}'
    differing = {
        aspect: (of_jax[aspect], of_sjit[aspect]) for aspect in of_jax if of_jax[aspect] != of_sjit[aspect]
    }
    return {'error': differing['error']} if 'error' in differing else differing


def _observed(case: Case, jit: Any, mesh: jax.sharding.Mesh) -> Mapping[str, Any]:
    """Runs a case through one wrapper.

    The aspects: ``error``, its class; ``tree``, the structure of the result; ``values``, ``types``
    (dtypes, weak types, shapes, kinds of objects) and ``shardings`` of its leaves; ``traces``, the number of
    runs of the user's code; ``warnings``, their classes; ``output``, the printed lines.
    """
    TRACES.clear()
    error, result, printed = None, None, io.StringIO()
    with warnings.catch_warnings(record=True) as warned, contextlib.ExitStack() as stack:
        warnings.simplefilter('always')
        if case.explicit:
            stack.enter_context(jax.set_mesh(mesh))
        stack.enter_context(contextlib.redirect_stdout(printed))
        try:
            result = case.run(jit)
            jax.effects_barrier()
        except Exception as raised:
            error = type(raised)
    leaves, tree = jax.tree.flatten(result)
    return {
        'error': error,
        'tree': tree,
        'values': [_value(leaf) for leaf in leaves],
        'types': [_type(leaf) for leaf in leaves],
        'shardings': [_sharding(leaf) for leaf in leaves],
        'traces': list(map(repr, TRACES)),
        'warnings': sorted({warning.category.__name__ for warning in warned}),
        'output': sorted(line for line in printed.getvalue().splitlines() if _NANS not in line),
    }


def _value(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return 'deleted'
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return np.asarray(leaf).tobytes()
    return repr(leaf)


def _type(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return type(leaf).__name__
    return (
        type(leaf).__name__,
        str(leaf.dtype),
        leaf.shape,
        str(jax.typeof(leaf)),
        getattr(leaf, 'weak_type', None),
    )


def _sharding(leaf: Any) -> Any:
    """Returns a sharding in a form in which equivalent shardings are equal."""
    sharding = getattr(leaf, 'sharding', None)
    if not isinstance(sharding, jax.sharding.Sharding):
        return None
    if not isinstance(leaf, jax.Array) or isinstance(
        sharding.mesh if hasattr(sharding, 'mesh') else None, jax.sharding.AbstractMesh
    ):
        return str(sharding)
    places = sharding.devices_indices_map(leaf.shape)
    blocks = sorted((device.id, str(index)) for device, index in places.items())
    return type(sharding).__name__, blocks, sharding.memory_kind, leaf.committed
