"""The trace that the caller runs in: its kind, its context, and the types of its values.

JAX has no public way to query which transformation is active. So these functions try something that works in
some transformations only.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state
from jax.sharding import AxisType

# The settings of jax.config that are local to a thread. Relies on each having a context manager of its name.
# Without transfer_guard, which can only be set (its three directions are read instead), and thread_guard,
# which depends on the thread.
THREAD_SETTINGS = tuple(
    name
    for name in sorted(dir(jax))
    if hasattr(jax.config, f'jax_{name}') and name not in ('thread_guard', 'transfer_guard')
)

ABSTRACT = (jax.ShapeDtypeStruct, jax.core.ShapedArray)
"""Abstract arrays: a ShapeDtypeStruct, or a type that ``jax.typeof`` returns.

``jax.jit`` accepts both in ``lower``, ``trace`` and ``eval_shape``.
"""

# Leaves with a known type. NumPy arrays may be masked or of strings, which JAX does not accept.
_TYPED = (*ABSTRACT, jax.core.AbstractValue, jax.Array, np.ndarray, np.generic)

current_trace = get_opaque_trace_state
"""Returns an object that differs for different traces. Relies on it comparing by the current trace."""

_nothing = jax.jit(lambda: ())
_OPTIONS = re.compile(r'Got compiler_options=(\{.*?\}) specified on', re.DOTALL)


def trace_context() -> Any:
    """Returns an object that is the same (by identity) whenever JAX's trace context is the same.

    The trace context is the part of JAX's cache keys besides the arguments: x64, matmul precision, the PRNG
    implementation, ``jax.set_mesh``, names of mapped axes, and user contexts such as the bindings of
    annotations and the mapping of named axes. Relies on JAX caching the trace of an empty function by it.
    """
    return _nothing.trace().jaxpr


def is_traced() -> bool:
    """Returns whether a transformation of JAX is tracing the caller.

    Relies on ``jax.sharding.get_mesh`` raising a ValueError there ("can only be used outside of jax.jit").
    """
    try:
        jax.sharding.get_mesh()
    except ValueError:
        return True
    return False


def is_compiled() -> bool:
    """Returns whether the caller is traced for compilation.

    Under ``jax.vmap`` or ``jax.grad`` alone JAX traces, but runs every operation immediately. Relies on a
    constant being an array then, and a tracer otherwise.
    """
    return is_traced() and isinstance(jnp.asarray(0), jax.core.Tracer)


def is_mapped(mesh: Any, axis: str) -> bool:
    """Returns whether ``jax.vmap`` maps a dimension along an Explicit axis of the ambient mesh.

    Relies on ``jax.shard_map`` along that axis raising a ValueError there.
    """
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if types[axis] is not AxisType.Explicit or not is_traced():
        return False
    try:
        jax.eval_shape(jax.shard_map(tuple, mesh=mesh, in_specs=(), out_specs=(), axis_names={axis}))
    except ValueError:
        return True
    return False


@functools.cache
def jit_options() -> frozenset[str]:
    """Returns the names of the options of ``jax.jit``. Relies on its signature naming all of them."""
    parameters = inspect.signature(jax.jit).parameters.values()
    return frozenset(param.name for param in parameters if param.kind is param.KEYWORD_ONLY)


def compiler_options(jitted: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the *compiler_options* of a jitted function, which is traced for these arguments.

    Relies on such a function raising a ValueError in another trace, which has them: "Got
    compiler_options={'xla_gpu_autotune_level': 0} specified on a nested jit".
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(leaf, 'shape') and hasattr(leaf, 'dtype') for leaf in leaves]

    def call(arrays: list[Any]) -> Any:
        arrays_left = iter(arrays)
        pairs = zip(leaves, is_array, strict=True)
        traced_leaves = [next(arrays_left) if is_array else leaf for leaf, is_array in pairs]
        traced_args, traced_kwargs = jax.tree.unflatten(tree, traced_leaves)
        return jitted(*traced_args, **traced_kwargs)

    try:
        jax.eval_shape(call, list(itertools.compress(leaves, is_array)))
    except ValueError as error:
        match = _OPTIONS.search(str(error))
        return dict(ast.literal_eval(match[1])) if match else {}
    return {}


def is_abstract(leaf: Any) -> bool:
    """Returns whether a leaf is an abstract array (`ABSTRACT`).

    Relies on ``jax.typeof`` returning a ``jax.core.ShapedArray`` for every array.
    """
    return isinstance(leaf, ABSTRACT)


def as_struct(leaf: Any) -> Any:
    """Returns a struct for an object with a shape and a dtype but no value; other leaves unchanged.

    Relies on ``jax.eval_shape`` accepting such objects, as ``jax.jit`` does in ``lower``, ``trace`` and
    ``eval_shape``. It uses their weak type, and ignores their sharding.
    """
    if isinstance(leaf, _TYPED) or not (hasattr(leaf, 'shape') and hasattr(leaf, 'dtype')):
        return leaf
    try:
        jax.typeof(leaf)
    except TypeError:
        pass
    except Exception:  # noqa: BLE001 - about a view of a reference, as in `type_of`
        return leaf
    else:
        return leaf
    try:
        kind = jax.eval_shape(lambda x: x, leaf)
    except Exception:  # noqa: BLE001 - about a shape or dtype that arrays cannot have
        return leaf
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)


def is_reference(leaf: Any) -> bool:
    """Returns whether a leaf is a reference to an array, or the type of a reference.

    Relies on the type of a reference being a ``jax.core.AbstractValue``, but not a ``jax.core.ShapedArray``.
    """
    is_type = isinstance(leaf, jax.core.AbstractValue) and not isinstance(leaf, jax.core.ShapedArray)
    return isinstance(leaf, jax.Ref) or (is_type and not is_opaque(leaf))


def type_of(leaf: Any) -> Any:
    """Returns the type of a leaf in JAX; it has a shape and a dtype unless it `is_opaque`.

    Relies on ``jax.typeof`` raising a TypeError or an OverflowError about leaves that JAX does not accept, a
    ValueError about masked arrays, and other errors about views of references, which JAX flattens itself.

    Raises:
        TypeError: JAX does not accept the leaf.
        OverflowError: an integer has more bits than JAX has.
    """
    if is_abstract(leaf) or (is_reference(leaf) and not isinstance(leaf, jax.Ref)):
        return leaf
    try:
        return jax.typeof(leaf)
    except ValueError as error:
        raise TypeError(str(error)) from None
    except (TypeError, OverflowError):
        raise
    except Exception:  # noqa: BLE001 - about a view of a reference
        return type(leaf)


def is_opaque(kind: Any) -> bool:
    """Returns whether a type is not an array type: of a token, a view of a reference, or a hijax type.

    Relies on only these types having no shape or no dtype.
    """
    return isinstance(kind, type) or not (hasattr(kind, 'shape') and hasattr(kind, 'dtype'))


def memory_space(kind: Any) -> Any:
    """Returns the memory space of a type; None if it has none. Relies on *memory_space*."""
    return getattr(kind, 'memory_space', None)


def varying_axes(kind: Any) -> frozenset[str]:
    """Returns the manual axes along which a value of this type varies, as `shard_map` tracks it.

    Relies on ``manual_axis_type.varying``.
    """
    return kind.manual_axis_type.varying
