"""The trace that the caller runs in, and the values and the state of it.

JAX has no public way to ask which transformation is at work. So it is asked for something that it gives, or
refuses, in some of them only.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state
from jax.sharding import AxisType

# The settings of jax.config that are local to a thread: relies on each having a context manager of its name.
# Without transfer_guard, which can only be set (its three directions are read instead), and thread_guard,
# which tells threads apart.
THREAD_SETTINGS = tuple(
    name
    for name in sorted(dir(jax))
    if hasattr(jax.config, f'jax_{name}') and name not in ('thread_guard', 'transfer_guard')
)

ABSTRACT = (jax.ShapeDtypeStruct, jax.core.ShapedArray)
"""What stands for an array: a ShapeDtypeStruct, or a type that ``jax.typeof`` returns.

``jax.jit`` takes both in ``lower``, ``trace`` and ``eval_shape``.
"""

# Leaves whose type needs no question. NumPy's may be masked arrays or strings, which JAX does not take.
_TYPED = (*ABSTRACT, jax.core.AbstractValue, jax.Array, np.ndarray, np.generic)

current_trace = get_opaque_trace_state
"""An object that differs for different traces. Relies on it comparing by the trace at work."""

_nothing = jax.jit(lambda: ())
_OPTIONS = re.compile(r'Got compiler_options=(\{.*?\}) specified on', re.DOTALL)


def trace_context() -> Any:
    """An object that is the same (by identity) whenever JAX's trace context is the same.

    JAX tells traces apart by it besides the arguments: x64, matmul precision, the PRNG implementation,
    ``jax.set_mesh``, names of mapped axes, and user contexts such as the bindings of annotations and the
    mapping of named axes. Relies on JAX caching the trace of a function that does nothing by it alone.
    """
    return _nothing.trace().jaxpr


def is_traced() -> bool:
    """Whether some transformation of JAX is tracing the caller.

    Relies on ``jax.sharding.get_mesh`` raising a ValueError there ("can only be used outside of jax.jit").
    """
    try:
        jax.sharding.get_mesh()
    except ValueError:
        return True
    return False


def is_compiled() -> bool:
    """Whether the caller is traced for compilation.

    Under ``jax.vmap`` or ``jax.grad`` alone JAX traces, and yet runs every operation at once. Relies on a
    constant being an array then, and a tracer otherwise.
    """
    return is_traced() and isinstance(jnp.asarray(0), jax.core.Tracer)


def is_mapped(mesh: Any, axis: str) -> bool:
    """Whether ``jax.vmap`` maps a dimension along an Explicit axis of the mesh in force.

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
    """The names of the options of ``jax.jit``. Relies on its signature naming all of them."""
    parameters = inspect.signature(jax.jit).parameters.values()
    return frozenset(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)


def compiler_options(jitted: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The *compiler_options* that a jitted function has, which is traced for these arguments.

    Relies on such a function raising a ValueError in another trace, which has them: "Got
    compiler_options={'xla_gpu_autotune_level': 0} specified on a nested jit".
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    traced = [hasattr(leaf, 'shape') and hasattr(leaf, 'dtype') for leaf in leaves]

    def call(values: list[Any]) -> Any:
        rest = iter(values)
        given = [next(rest) if each else leaf for leaf, each in zip(leaves, traced, strict=True)]
        own_args, own_kwargs = jax.tree.unflatten(tree, given)
        return jitted(*own_args, **own_kwargs)

    try:
        jax.eval_shape(call, [leaf for leaf, each in zip(leaves, traced, strict=True) if each])
    except ValueError as error:
        found = _OPTIONS.search(str(error))
        return dict(ast.literal_eval(found[1])) if found else {}
    return {}


def is_abstract(leaf: Any) -> bool:
    """Whether a leaf stands for an array, and has no value (`ABSTRACT`).

    Relies on ``jax.typeof`` returning a ``jax.core.ShapedArray`` for every array.
    """
    return isinstance(leaf, ABSTRACT)


def as_struct(leaf: Any) -> Any:
    """A struct in place of an object that has a shape and a dtype; other leaves as they are.

    Relies on ``jax.eval_shape`` taking such objects, which have no value, as ``jax.jit`` does in ``lower``,
    ``trace`` and ``eval_shape``. It takes their weak type, and no sharding.
    """
    if isinstance(leaf, _TYPED) or not (hasattr(leaf, 'shape') and hasattr(leaf, 'dtype')):
        return leaf
    try:
        jax.typeof(leaf)
    except TypeError:
        pass
    except Exception:  # noqa: BLE001 - of a view of a reference, as in `type_of`
        return leaf
    else:
        return leaf
    try:
        kind = jax.eval_shape(lambda x: x, leaf)
    except Exception:  # noqa: BLE001 - its shape or dtype is not one of arrays
        return leaf
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)


def is_reference(leaf: Any) -> bool:
    """Whether a leaf is a reference to an array, or the type of one.

    Relies on the type of a reference being a ``jax.core.AbstractValue``, and no ``jax.core.ShapedArray``.
    """
    is_type = isinstance(leaf, jax.core.AbstractValue) and not isinstance(leaf, jax.core.ShapedArray)
    return isinstance(leaf, jax.Ref) or (is_type and not is_opaque(leaf))


def type_of(leaf: Any) -> Any:
    """The type of a leaf in JAX; it has a shape and a dtype unless it `is_opaque`.

    Relies on ``jax.typeof`` raising a TypeError or an OverflowError about what JAX does not take, a
    ValueError about masked arrays, and others about views of references, which JAX takes apart itself.

    Raises:
        TypeError: JAX does not take the leaf.
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
    except Exception:  # noqa: BLE001 - of a view of a reference
        return type(leaf)


def is_opaque(kind: Any) -> bool:
    """Whether a type is not one of arrays: of a token, a view of a reference, or a hijax type.

    Relies on these, and no others, having no shape or no dtype.
    """
    return isinstance(kind, type) or not (hasattr(kind, 'shape') and hasattr(kind, 'dtype'))


def memory_space(kind: Any) -> Any:
    """The memory of values of this type; None if the type does not say so. Relies on *memory_space*."""
    return getattr(kind, 'memory_space', None)


def varying_axes(kind: Any) -> frozenset[str]:
    """The manual axes along which a value of this type differs, as far as JAX followed it in `shard_map`.

    Relies on ``manual_axis_type.varying``.
    """
    return kind.manual_axis_type.varying
