"""A call as JAX sees it: its leaves, flattened once, what is known of each, and the key of the call.

Calls of equal keys take the same shardings. A key is the tree structure of the arguments with the shape,
dtype and weak type of each leaf, the static values with their types, and JAX's trace context. Where arguments
are placed is no part of it, except for what their types say: the type of an array on a mesh with Explicit
axes holds its sharding over those.

What is one for each leaf of a call, in their order, is a column: shardings, types, flags.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from scalax._compile.call.signature import CallLayout, CallSignature
from scalax._core.context.constraints import has_explicit_axes
from scalax._core.pytree.partition_specs import MeshAxes, only_axes
from scalax._core.pytree.path_identity import uncertain_paths
from scalax._core.pytree.paths import canonical_dtype, describe_leaf, join, optional_path
from scalax._jax.tracing import is_abstract, is_opaque, trace_context, type_of
from scalax.errors import ArgumentError, module_advice, shown_leaves

Column = TypeVar('Column')
Shardings = Sequence[NamedSharding | None]
"""A column: the sharding that rules give each leaf; None where they give none."""

LeafType = tuple[tuple[int, ...], Any, bool, PartitionSpec | None]


class Call:
    """The arguments of one call.

    Args:
        signature: the parameters of the function.
        flat_args: the argument of each slot.

    Attributes:
        layout: the slots.
        leaves: the leaves of the slots that hold data.
        treedef: the structure of the list of these slots.
    """

    def __init__(self, signature: CallSignature, flat_args: Sequence[Any]) -> None:
        self.signature, self.flat_args = signature, flat_args
        self.layout: CallLayout = signature.layout_of(flat_args)
        data = [flat_args[slot] for slot in self.layout.dynamic]
        self.leaves: list[Any]
        self.treedef: Any
        self.leaves, self.treedef = jax.tree.flatten(data)

    @functools.cached_property
    def trees(self) -> dict[int, Any]:
        """The structure of each slot that holds data."""
        return dict(zip(self.layout.dynamic, self.treedef.children(), strict=True))

    def by_slot(self, column: Sequence[Column]) -> dict[int, Sequence[Column]]:
        """A column, divided by slots."""
        rest = iter(column)
        return {slot: [*itertools.islice(rest, tree.num_leaves)] for slot, tree in self.trees.items()}

    def replaced(self, leaves: Iterable[Any]) -> list[Any]:
        """The flat arguments with other leaves."""
        flat_args = list(self.flat_args)
        for slot, tree in zip(self.layout.dynamic, self.treedef.unflatten(leaves), strict=True):
            flat_args[slot] = tree
        return flat_args

    @functools.cached_property
    def places(self) -> list[tuple[int, Sequence[Any]]]:
        """A column: the slot of each leaf, and its path inside."""
        return [
            (slot, path)
            for slot in self.layout.dynamic
            for path, _ in jax.tree_util.tree_flatten_with_path(self.flat_args[slot])[0]
        ]

    def path(self, index: int) -> str:
        """The path of a leaf in messages: the argument, then the path inside."""
        slot, path = self.places[index]
        return join(self.layout.paths[slot], optional_path(path)) or ''

    def describe(self, index: int) -> str:
        """A leaf as messages show it."""
        return describe_leaf(self.path(index), self.leaves[index])

    def shown(self, wrong: Sequence[bool]) -> str:
        """The leaves that a column marks, as messages list them."""
        return shown_leaves(self.describe(i) for i, is_wrong in enumerate(wrong) if is_wrong)


# The key of a call ------------------------------------------------------------------------------------


class CallKey(NamedTuple):
    """Equal for calls that take the same shardings.

    Attributes:
        treedef: the structure of the dynamic slots.
        types: (shape, dtype, weak type, spec over Explicit axes) of every leaf.
        static: (type, value) of every static slot: ``1``, ``True`` and ``1.0`` are equal, and differ.
        context: JAX's trace context, on which what a function returns may depend.
        any_explicit: whether the type of some leaf holds a sharding.
        paths: the leaf paths, where trees of the same structure may have others; else None.
    """

    treedef: Any
    types: tuple[LeafType, ...]
    static: tuple[tuple[type, Any], ...]
    context: Any
    any_explicit: bool
    paths: tuple[str, ...] | None = None


def call_key(call: Call) -> CallKey:
    """The key of a call.

    Raises:
        ArgumentError: a leaf that is not an array, or a static value that cannot be hashed.
        OverflowError: an integer has more bits than JAX has.
    """
    try:
        types = tuple(map(leaf_type, call.leaves))
    except TypeError:
        raise _not_arrays(call) from None
    except OverflowError as error:
        wrong = call.shown([_has_no_type(leaf, OverflowError) for leaf in call.leaves])
        raise OverflowError(
            f'{call.signature.name} got numbers that are too large ({error}):\n{wrong}'
        ) from None
    static = _static_key(call) if call.layout.static else ()
    paths = None
    if nodes := call.signature.uncertain_nodes(call.treedef):
        data = [call.flat_args[slot] for slot in call.layout.dynamic]
        paths = uncertain_paths(data, nodes)
    explicit = bool([spec for *_, spec in types if spec is not None])
    return CallKey(call.treedef, types, static, trace_context(), explicit, paths)


def _static_key(call: Call) -> tuple[tuple[type, Any], ...]:
    for slot in call.layout.static:
        value = call.flat_args[slot]
        try:
            hash(value)
        except TypeError as error:
            raise ArgumentError(
                f'{call.signature.name}: static argument {call.layout.names[slot]!r} is a '
                f'{type(value).__name__} and cannot be hashed ({error}). Static arguments are part of '
                'the compiled program: pass something immutable (a tuple, a frozen dataclass), or do '
                'not make it static.'
            ) from None
    return tuple((type(call.flat_args[slot]), call.flat_args[slot]) for slot in call.layout.static)


# What is known of a leaf ------------------------------------------------------------------------------


def leaf_type(leaf: Any) -> LeafType:
    """The (shape, dtype, weak type, spec over Explicit axes or None) of a leaf, as JAX will see it.

    Raises:
        TypeError: JAX does not take the leaf as an array.
    """
    kind = jax.typeof(leaf) if isinstance(leaf, jax.Array) else type_of(leaf)
    if type(kind) is jax.core.ShapedArray:  # as nearly always: the rest, without a call for each question
        explicit = AxisType.Explicit in kind.sharding.mesh.axis_types
        return kind.shape, kind.dtype, kind.weak_type, explicit_spec(kind.sharding) if explicit else None
    if is_opaque(kind):
        return (), kind, False, None
    spec = explicit_spec(getattr(kind, 'sharding', None))
    return kind.shape, traced_dtype(kind), bool(getattr(kind, 'weak_type', False)), spec


def traced_dtype(kind: Any) -> Any:
    """The dtype with which JAX traces a type: without x64 it narrows that of a struct, never of an array."""
    return canonical_dtype(kind.dtype) if isinstance(kind, jax.ShapeDtypeStruct) else kind.dtype


def sharding_in_type(kind: Any) -> NamedSharding | None:
    """The sharding that is part of a type; None without Explicit axes."""
    sharding = getattr(kind, 'sharding', None)
    explicit = isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types
    return sharding if explicit else None


def explicit_spec(sharding: Any) -> PartitionSpec | None:
    """The part of a sharding that is in the type of an array; None without Explicit axes."""
    if not has_explicit_axes(sharding):
        return None
    return only_axes(sharding.spec, MeshAxes.of(sharding.mesh).of_type(AxisType.Explicit))


def struct_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """A leaf as rules see it: shape, dtype, and the sharding that is part of its type."""
    kind = jax.typeof(leaf) if isinstance(leaf, jax.Array) else type_of(leaf)
    if type(kind) is not jax.core.ShapedArray and is_opaque(kind):
        return jax.ShapeDtypeStruct((), bool)
    # What is not part of the type is left out: rules decide alike for arrays of any sharding.
    sharding = sharding_in_type(kind)
    if sharding is None:
        return _struct(kind.shape, traced_dtype(kind))
    return jax.ShapeDtypeStruct(kind.shape, traced_dtype(kind), sharding=sharding)


@functools.lru_cache(maxsize=4096)  # layers are alike, and rules see each leaf several times
def _struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def is_deleted(leaf: Any) -> bool:
    """Whether the buffers of an array are gone."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted()


def is_concrete(leaf: Any) -> bool:
    """Whether a leaf is a jax.Array with buffers, rather than a tracer, numpy data or a struct."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def is_explicit(leaf: Any) -> bool:
    """Whether an array, or what stands for one, has a type of a mesh with Explicit axes."""
    return (is_concrete(leaf) or is_abstract(leaf)) and has_explicit_axes(leaf.sharding)


def has_type(leaf: Any, sharding: NamedSharding) -> bool:
    """Whether the type of a leaf agrees with a sharding over Explicit axes."""
    return explicit_spec(jax.typeof(leaf).sharding) == explicit_spec(sharding)


def same_types(first: Any, second: Any) -> bool:
    """Whether two meshes, with devices or without, give arrays the same types."""
    return (dict(first.shape), first.axis_types) == (dict(second.shape), second.axis_types)


def is_typed_by(leaf: Any, mesh: Any) -> bool:
    """Whether a function that is traced on *mesh* takes the type of an array."""
    if not is_concrete(leaf):
        return True
    own = leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else None
    if AxisType.Explicit not in mesh.axis_types and not has_explicit_axes(leaf.sharding):
        return True  # on Auto axes any type of such is
    return own is not None and same_types(own, mesh)


def is_foreign(leaf: Any, mesh: Any) -> bool:
    """Whether a value of a trace has a type of another mesh with Explicit axes than *mesh*."""
    if not isinstance(leaf, jax.core.Tracer):
        return False
    sharding = sharding_in_type(type_of(leaf))
    return sharding is not None and not same_types(sharding.mesh, mesh)


def is_mismatched(leaf: Any, sharding: NamedSharding | None) -> bool:
    """Whether an array is committed to another sharding than asked, so that ``jax.jit`` refuses it.

    Where whole copies are asked for, JAX takes a whole copy on any device.
    """
    if sharding is None or not committed_elsewhere(leaf, sharding):
        return False
    if isinstance(leaf, jax.Ref):
        return True
    whole = leaf.sharding.is_fully_replicated and sharding.is_fully_replicated
    return not (whole and leaf.sharding.memory_kind == sharding.memory_kind)


def committed_elsewhere(leaf: Any, sharding: NamedSharding | None) -> bool:
    """Whether an array, or a reference to one, is committed to anything but *sharding*."""
    if sharding is None or isinstance(leaf, jax.core.Tracer) or isinstance(sharding.mesh, AbstractMesh):
        return False
    committed = isinstance(leaf, jax.Ref) or (isinstance(leaf, jax.Array) and leaf.committed)
    return committed and not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def left_alone(leaf: Any) -> bool:
    """Whether an array of several elements is on one device."""
    concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return concrete and leaf.size > 1 and len(leaf.sharding.device_set) == 1


# Errors about leaves that JAX does not take -------------------------------------------------------------


def _not_arrays(call: Call) -> ArgumentError:
    wrong = [_has_no_type(leaf, TypeError) for leaf in call.leaves]
    return ArgumentError(
        f'{call.signature.name} got leaves that are not arrays:\n{call.shown(wrong)}\n'
        'What to do: pass arrays or numbers, or name such arguments in static_argnums or static_argnames.\n'
        'What to do: leaves of a tree that also holds arrays cannot be static: take them out, and close over '
        f'them.{module_advice(call.leaves)}'
    )


def _has_no_type(leaf: Any, kind: type[Exception]) -> bool:
    """Whether JAX refuses a leaf with an error of this kind."""
    try:
        leaf_type(leaf)
    except (TypeError, OverflowError) as error:
        return isinstance(error, kind)
    return False
