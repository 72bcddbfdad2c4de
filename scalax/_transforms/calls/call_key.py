"""When do two calls need the same shardings? The signature of a call.

A signature is the tree structure of the arguments with the shape, dtype and weak type of each leaf, the
static values with their types, and JAX's trace context. Where the arguments lie is no part of it, but what
their types say is: the type of an array on a mesh with Explicit axes holds its sharding over those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from scalax._transforms.calls.call_signature import EXTRA_KEYWORDS, CallLayout, CallSignature
from scalax._tree.paths import canonical_dtype, describe_leaf, join, optional_path
from scalax._tree.specs import MeshAxes, only_axes
from scalax.errors import ArgumentError, shown

LeafType = tuple[tuple[int, ...], Any, bool, PartitionSpec | None]


@dataclasses.dataclass(frozen=True)
class CallKey:
    """Equal for calls that take the same shardings.

    Attributes:
        treedef: the structure of the dynamic slots.
        types: (shape, dtype, weak type, spec over Explicit axes) of every leaf.
        static: (type, value) of every static slot: ``1``, ``True`` and ``1.0`` are equal, and differ.
        context: `trace_context`, on which what a function returns may depend.
        paths: the leaf paths, where trees of the same structure may have others; else None.
    """

    treedef: Any
    types: tuple[LeafType, ...]
    static: tuple[tuple[type, Any], ...]
    context: Any
    paths: tuple[str, ...] | None = None


_nothing = jax.jit(lambda: ())


def trace_context() -> Any:
    """An object that is the same (by identity) whenever JAX's trace context is the same.

    That is all that JAX tells traces apart by besides the arguments: x64, matmul precision, the PRNG
    implementation, ``jax.set_mesh``, names of mapped axes, and user contexts such as the bindings of
    annotations and the mapping of named axes. JAX caches the trace of a function that does nothing by it.
    """
    return _nothing.trace().jaxpr


def type_of(leaf: Any) -> Any:
    """What JAX calls the type of a leaf. It has a shape and a dtype unless it `is_opaque`.

    Raises:
        TypeError: JAX does not take the leaf.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    try:
        return jax.typeof(leaf)
    except ValueError as error:  # of masked arrays
        raise TypeError(str(error)) from None
    except (TypeError, OverflowError):
        raise
    except Exception:  # of a view of a reference, which JAX takes apart itself
        return type(leaf)


def is_opaque(kind: Any) -> bool:
    """Whether a type is none of arrays: of a token, a view of a reference, or defined by the user (hijax)."""
    return isinstance(kind, type) or not (hasattr(kind, 'shape') and hasattr(kind, 'dtype'))


def leaf_type(leaf: Any) -> LeafType:
    """The (shape, dtype, weak type, spec over Explicit axes or None) of a leaf, as JAX will see it.

    Raises:
        TypeError: JAX does not take the leaf as an array.
    """
    kind = type_of(leaf)
    if is_opaque(kind):
        return (), kind, False, None
    spec = explicit_spec(getattr(kind, 'sharding', None))
    return kind.shape, traced_dtype(kind), bool(getattr(kind, 'weak_type', False)), spec


def traced_dtype(kind: Any) -> Any:
    """The dtype with which JAX traces a type: without x64 it narrows that of a struct, of arrays never."""
    return canonical_dtype(kind.dtype) if isinstance(kind, jax.ShapeDtypeStruct) else kind.dtype


def explicit_spec(sharding: Any) -> PartitionSpec | None:
    """The part of a sharding that is in the type of an array; None without Explicit axes."""
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    types = MeshAxes.of(sharding.mesh).types
    return only_axes(sharding.spec, {axis for axis, kind in types.items() if kind is AxisType.Explicit})


def placement_kinds(types: Iterable[Any]) -> tuple[Any, ...]:
    """What else the types of leaves say, which no rule depends on and a traced function may."""
    # What is no array says too little of what a trace may depend on: it is equal to nothing.
    return tuple(
        object() if is_opaque(kind) else (type(kind).__name__, getattr(kind, 'memory_space', None))
        for kind in types
    )


def dynamic_slots(layout: CallLayout, flat_args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of a call that are data."""
    return tuple(flat_args[i] for i in layout.dynamic)


def dynamic_leaves(layout: CallLayout, flat_args: Sequence[Any]) -> tuple[list[Any], Any]:
    """The leaves and the structure of the dynamic slots together."""
    return jax.tree.flatten(dynamic_slots(layout, flat_args))


def call_key(signature: CallSignature, layout: CallLayout, flat_args: Sequence[Any]) -> CallKey:
    """The signature of a call.

    Raises:
        ArgumentError: a leaf that is not an array, an integer of more bits than JAX has, or a static value
            that cannot be hashed.
    """
    leaves, treedef = dynamic_leaves(layout, flat_args)
    try:
        types = tuple(map(leaf_type, leaves))
    except (TypeError, OverflowError) as error:
        raise (_not_arrays if isinstance(error, TypeError) else _too_large)(
            signature, layout, flat_args
        ) from None
    static = _static_key(signature, layout, flat_args)
    paths = signature.uncertain_paths(dynamic_slots(layout, flat_args), treedef)
    return CallKey(treedef, types, static, trace_context(), paths)


def _static_key(
    signature: CallSignature, layout: CallLayout, flat_args: Sequence[Any]
) -> tuple[tuple[type, Any], ...]:
    for i in layout.static:
        try:
            hash(flat_args[i])
        except TypeError as error:
            raise ArgumentError(
                f'{signature.name}: static argument {layout.slots[i].name!r} is a '
                f'{type(flat_args[i]).__name__} and cannot be hashed ({error}). Static arguments are part of '
                'the compiled program: pass something immutable (a tuple, a frozen dataclass), or do '
                'not make it static.'
            ) from None
    return tuple((type(flat_args[i]), flat_args[i]) for i in layout.static)


def slot_path(layout: CallLayout, slot: int, path: Sequence[Any] = ()) -> str | None:
    """A leaf of an argument as messages name it: the argument, then the path inside; None for neither."""
    name = layout.slots[slot].name
    return join(None if name == EXTRA_KEYWORDS else name, optional_path(path))


def _not_arrays(signature: CallSignature, layout: CallLayout, flat_args: Sequence[Any]) -> ArgumentError:
    hints = ''.join(f'\nWhat to do: {hint}' for hint in _hints(layout, flat_args))
    listed = shown(_raising(TypeError, layout, flat_args))
    return ArgumentError(f'{signature.name} got leaves that are not arrays:\n{listed}{hints}')


_OF_ARGUMENTS = 'pass arrays or numbers, or name such arguments in static_argnums or static_argnames.'
_OF_TREES = (
    'what is in a tree that holds arrays too cannot be static: take it out, and close over it. '
    'Of a module of equinox eqx.partition(module, eqx.is_array) gives both parts, for eqx.combine inside; '
    'scalax.axes.named_jit compiles with whole modules.'
)


def _hints(layout: CallLayout, flat_args: Sequence[Any]) -> list[str]:
    """What to do about leaves that are no arrays: another thing where they are among arrays."""
    hints = set()
    for slot in layout.dynamic:
        leaves = jax.tree.leaves(flat_args[slot])
        taken = [leaf for leaf in leaves if not _raises(TypeError, leaf)]
        if len(taken) < len(leaves):
            hints.add(_OF_TREES if any(hasattr(leaf, 'dtype') for leaf in taken) else _OF_ARGUMENTS)
    return sorted(hints)


def _raises(kind: type[Exception], leaf: Any) -> bool:
    """Whether JAX raises such an error about a leaf."""
    try:
        leaf_type(leaf)
    except (TypeError, OverflowError) as error:
        return isinstance(error, kind)
    return False


def _too_large(signature: CallSignature, layout: CallLayout, flat_args: Sequence[Any]) -> ArgumentError:
    return ArgumentError(
        f'{signature.name} got integers that do not fit in {canonical_dtype(int)}, which JAX makes of a '
        f'Python int:\n{shown(_raising(OverflowError, layout, flat_args))}\n'
        'What to do: split them, or name such arguments in static_argnums or static_argnames; jax_enable_x64 '
        'allows 64 bits.'
    )


def _raising(kind: type[Exception], layout: CallLayout, flat_args: Sequence[Any]) -> Iterator[str]:
    """The leaves of which JAX raises such errors, as messages name them."""
    for slot in layout.dynamic:
        for path, leaf in jax.tree_util.tree_flatten_with_path(flat_args[slot])[0]:
            if _raises(kind, leaf):
                yield describe_leaf(slot_path(layout, slot, path) or '', leaf)
