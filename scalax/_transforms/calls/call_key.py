"""A call, and its key: calls of equal keys take the same shardings.

A key is the tree structure of the arguments with the shape, dtype and weak type of each leaf, the static
values with their types, and JAX's trace context. Where arguments are placed is no part of it, except for what
their types say: the type of an array on a mesh with Explicit axes holds its sharding over those.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from scalax._trace.constraints import is_in_types
from scalax._transforms.calls.call_signature import EXTRA_KEYWORDS, CallLayout, CallSignature
from scalax._tree.paths import canonical_dtype, describe_leaf, join, optional_path
from scalax._tree.specs import MeshAxes, only_axes
from scalax.errors import ArgumentError, shown_leaves

LeafType = tuple[tuple[int, ...], Any, bool, PartitionSpec | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one call, slot by slot.

    Attributes:
        signature: the parameters of the function.
        layout: the slots.
        flat_args: the argument of each slot.
    """

    signature: CallSignature
    layout: CallLayout
    flat_args: Sequence[Any]

    @classmethod
    def of(cls, signature: CallSignature, flat_args: Sequence[Any]) -> Call:
        """The call of a function with these arguments."""
        return cls(signature, signature.layout_of(flat_args), flat_args)

    @functools.cached_property
    def data(self) -> list[Any]:
        """The arguments that are not static."""
        return [self.flat_args[slot] for slot in self.layout.dynamic]

    def leaves(self) -> Iterator[tuple[int, Any, Any]]:
        """Every leaf of the data: its slot, its path inside, and the leaf."""
        for slot in self.layout.dynamic:
            for path, leaf in jax.tree_util.tree_flatten_with_path(self.flat_args[slot])[0]:
                yield slot, path, leaf

    def path(self, slot: int, path: Sequence[Any] = ()) -> str | None:
        """The path of a leaf in messages: the argument, then the path inside; None for neither."""
        name = self.layout.slots[slot].name
        return join(None if name == EXTRA_KEYWORDS else name, optional_path(path))

    def describe(self, slot: int, path: Sequence[Any], leaf: Any) -> str:
        """A leaf as messages show it."""
        return describe_leaf(self.path(slot, path) or '', leaf)


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


def call_key(call: Call) -> CallKey:
    """The key of a call.

    Raises:
        ArgumentError: a leaf that is not an array, an integer of more bits than JAX has, or a static value
            that cannot be hashed.
    """
    data = call.data
    leaves, treedef = jax.tree.flatten(data)
    try:
        types = tuple(map(leaf_type, leaves))
    except TypeError:
        raise _not_arrays(call) from None
    except OverflowError:
        raise _too_large(call) from None
    static = _static_key(call) if call.layout.static else ()
    return CallKey(treedef, types, static, trace_context(), call.signature.uncertain_paths(data, treedef))


_nothing = jax.jit(lambda: ())


def trace_context() -> Any:
    """An object that is the same (by identity) whenever JAX's trace context is the same.

    JAX tells traces apart by it besides the arguments: x64, matmul precision, the PRNG implementation,
    ``jax.set_mesh``, names of mapped axes, and user contexts such as the bindings of annotations and the
    mapping of named axes. JAX caches the trace of a function that does nothing by it.
    """
    return _nothing.trace().jaxpr


def type_of(leaf: Any) -> Any:
    """The type of a leaf in JAX. It has a shape and a dtype unless it `is_opaque`.

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
    except Exception:  # noqa: BLE001 - of a view of a reference, which JAX takes apart itself
        return type(leaf)


def is_opaque(kind: Any) -> bool:
    """Whether a type is not one of arrays: of a token, a view of a reference, or a hijax type."""
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
    """The dtype with which JAX traces a type: without x64 it narrows that of a struct, never of an array."""
    return canonical_dtype(kind.dtype) if isinstance(kind, jax.ShapeDtypeStruct) else kind.dtype


def explicit_spec(sharding: Any) -> PartitionSpec | None:
    """The part of a sharding that is in the type of an array; None without Explicit axes."""
    if not is_in_types(sharding):
        return None
    return only_axes(sharding.spec, MeshAxes.of(sharding.mesh).of_type(AxisType.Explicit))


def placement_kinds(types: Iterable[Any]) -> list[Any]:
    """The part of types that no rule depends on, and a traced function may."""
    # A trace may depend on more of an opaque type: it equals nothing.
    return [
        object() if is_opaque(kind) else (type(kind).__name__, getattr(kind, 'memory_space', None))
        for kind in types
    ]


def _static_key(call: Call) -> tuple[tuple[type, Any], ...]:
    for slot in call.layout.static:
        value = call.flat_args[slot]
        try:
            hash(value)
        except TypeError as error:
            raise ArgumentError(
                f'{call.signature.name}: static argument {call.layout.slots[slot].name!r} is a '
                f'{type(value).__name__} and cannot be hashed ({error}). Static arguments are part of '
                'the compiled program: pass something immutable (a tuple, a frozen dataclass), or do '
                'not make it static.'
            ) from None
    return tuple((type(call.flat_args[slot]), call.flat_args[slot]) for slot in call.layout.static)


_OF_ARGUMENTS = 'pass arrays or numbers, or name such arguments in static_argnums or static_argnames.'
_OF_TREES = (
    'what is in a tree that holds arrays too cannot be static: take it out, and close over it. '
    'Of a module of equinox eqx.partition(module, eqx.is_array) gives both parts, for eqx.combine inside; '
    'scalax.axes.named_jit compiles with whole modules.'
)


def _not_arrays(call: Call) -> ArgumentError:
    hints = set()
    for tree in call.data:
        leaves = jax.tree.leaves(tree)
        arrays = [leaf for leaf in leaves if not _raises(TypeError, leaf)]
        if len(arrays) < len(leaves):
            hints.add(_OF_TREES if any(hasattr(leaf, 'dtype') for leaf in arrays) else _OF_ARGUMENTS)
    lines = ''.join(f'\nWhat to do: {hint}' for hint in sorted(hints))
    return ArgumentError(
        f'{call.signature.name} got leaves that are not arrays:\n{_leaves_raising(TypeError, call)}{lines}'
    )


def note_flags(error: jax.errors.TracerBoolConversionError, call: Call) -> None:
    """Adds to an error about the value of a traced bool which ones a call has in trees, as equinox has."""
    flags = shown_leaves(call.describe(*leaf) for leaf in call.leaves() if leaf[1] and _is_flag(leaf[-1]))
    if flags:
        error.add_note(
            f'{call.signature.name} got flags in trees, and they are traced as arrays are (sjit and '
            f'helper.shard make arrays of Python bools):\n{flags}\nWhat to do: {_OF_TREES}'
        )


def _is_flag(leaf: Any) -> bool:
    array = getattr(leaf, 'shape', None), getattr(leaf, 'dtype', None)
    return isinstance(leaf, bool) or array == ((), bool)


def _too_large(call: Call) -> ArgumentError:
    return ArgumentError(
        f'{call.signature.name} got integers that do not fit in {canonical_dtype(int)}, which JAX makes of a '
        f'Python int:\n{_leaves_raising(OverflowError, call)}\n'
        'What to do: split them, or name such arguments in static_argnums or static_argnames; jax_enable_x64 '
        'allows 64 bits.'
    )


def _leaves_raising(kind: type[Exception], call: Call) -> str:
    return shown_leaves(call.describe(*leaf) for leaf in call.leaves() if _raises(kind, leaf[-1]))


def _raises(kind: type[Exception], leaf: Any) -> bool:
    """Whether JAX raises such an error about a leaf."""
    try:
        leaf_type(leaf)
    except (TypeError, OverflowError) as error:
        return isinstance(error, kind)
    return False
