"""A call with its flattened leaves, predicates of a leaf, and the key of the call.

Calls with equal keys take the same shardings. A key is the tree structure of the arguments with the shape,
dtype and weak type of each leaf, the static values with their types, and JAX's trace context. The key does
not depend on where arguments are placed, except through their types: the type of an array on a mesh with
Explicit axes holds its sharding over these axes.
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
from scalax._core.pytree.ambiguous_paths import ambiguous_paths
from scalax._core.pytree.partition_specs import MeshAxes, only_axes
from scalax._core.pytree.paths import canonical_dtype, describe_leaf, join, optional_path
from scalax._jax.tracing import is_abstract, is_opaque, trace_context, type_of
from scalax.errors import ArgumentError, module_advice, shown_leaves

LeafValue = TypeVar('LeafValue')
Shardings = Sequence[NamedSharding | None]
"""The sharding that rules give each leaf of a call, in the order of the leaves, or None."""

LeafType = tuple[tuple[int, ...], Any, bool, PartitionSpec | None]


class Call:
    """The arguments of one call, as slots and as leaves.

    Args:
        signature: the parameters of the function.
        flat_args: the argument of each slot.

    Attributes:
        layout: the slots.
        leaves: the leaves of the dynamic slots.
        treedef: the structure of the list of dynamic slots.
    """

    def __init__(self, signature: CallSignature, flat_args: Sequence[Any]) -> None:
        self.signature, self.flat_args = signature, flat_args
        self.layout: CallLayout = signature.layout_of(flat_args)
        data = [flat_args[slot] for slot in self.layout.dynamic]
        self.leaves: list[Any]
        self.treedef: Any
        self.leaves, self.treedef = jax.tree.flatten(data)

    @functools.cached_property
    def treedefs(self) -> dict[int, Any]:
        """The tree structure of each dynamic slot."""
        return dict(zip(self.layout.dynamic, self.treedef.children(), strict=True))

    def by_slot(self, values: Sequence[LeafValue]) -> dict[int, Sequence[LeafValue]]:
        """Splits a list with one value per leaf into one list per slot."""
        rest = iter(values)
        return {
            slot: [*itertools.islice(rest, treedef.num_leaves)] for slot, treedef in self.treedefs.items()
        }

    def with_leaves(self, leaves: Iterable[Any]) -> list[Any]:
        """Returns the flat arguments with other leaves."""
        flat_args = list(self.flat_args)
        for slot, tree in zip(self.layout.dynamic, self.treedef.unflatten(leaves), strict=True):
            flat_args[slot] = tree
        return flat_args

    @functools.cached_property
    def leaf_paths(self) -> list[tuple[int, Sequence[Any]]]:
        """The slot of each leaf, and its key path inside of the slot."""
        return [
            (slot, path)
            for slot in self.layout.dynamic
            for path, _ in jax.tree_util.tree_flatten_with_path(self.flat_args[slot])[0]
        ]

    def path(self, index: int) -> str:
        """Returns the path of a leaf in messages: the argument, then the path inside of it."""
        slot, path = self.leaf_paths[index]
        return join(self.layout.paths[slot], optional_path(path)) or ''

    def describe(self, index: int) -> str:
        """Returns the path and the type of a leaf for messages."""
        return describe_leaf(self.path(index), self.leaves[index])

    def list_leaves(self, flags: Sequence[bool]) -> str:
        """Lists the leaves whose flag is set, one per line, for messages."""
        return shown_leaves(self.describe(i) for i, is_listed in enumerate(flags) if is_listed)


# The key of a call ------------------------------------------------------------------------------------


class CallKey(NamedTuple):
    """The cache key of a call. Calls with equal keys take the same shardings.

    Attributes:
        treedef: the tree structure of the dynamic slots.
        types: (shape, dtype, weak type, spec over Explicit axes) of every leaf.
        static: (type, value) of every static slot. The type tells ``1``, ``True`` and ``1.0`` apart.
        context: JAX's trace context, on which the outputs of a function may depend.
        any_explicit: whether the type of some leaf holds a sharding.
        paths: the leaf paths, if trees of the same structure may have different paths. Otherwise None.
    """

    treedef: Any
    types: tuple[LeafType, ...]
    static: tuple[tuple[type, Any], ...]
    context: Any
    any_explicit: bool
    paths: tuple[str, ...] | None = None


def call_key(call: Call) -> CallKey:
    """Returns the key of a call.

    Raises:
        ArgumentError: a leaf is not an array, or a static value cannot be hashed.
        OverflowError: an integer is too large for JAX's integer dtypes.
    """
    try:
        types = tuple(map(leaf_type, call.leaves))
    except TypeError:
        raise _not_arrays(call) from None
    except OverflowError as error:
        wrong = call.list_leaves([_has_no_type(leaf, OverflowError) for leaf in call.leaves])
        raise OverflowError(
            f'{call.signature.name} got numbers that are too large ({error}):\n{wrong}'
        ) from None
    static = _static_key(call) if call.layout.static else ()
    paths = None
    if nodes := call.signature.ambiguous_nodes(call.treedef):
        data = [call.flat_args[slot] for slot in call.layout.dynamic]
        paths = ambiguous_paths(data, nodes)
    any_explicit = bool([spec for *_, spec in types if spec is not None])
    return CallKey(call.treedef, types, static, trace_context(), any_explicit, paths)


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


# Types and predicates of a leaf -----------------------------------------------------------------------


def leaf_type(leaf: Any) -> LeafType:
    """Returns the (shape, dtype, weak type, spec over Explicit axes or None) with which JAX traces a leaf.

    Raises:
        TypeError: JAX does not accept the leaf as an array.
    """
    aval = jax.typeof(leaf) if isinstance(leaf, jax.Array) else type_of(leaf)
    if type(aval) is jax.core.ShapedArray:  # the common case, with few calls
        any_explicit = AxisType.Explicit in aval.sharding.mesh.axis_types
        return aval.shape, aval.dtype, aval.weak_type, explicit_spec(aval.sharding) if any_explicit else None
    if is_opaque(aval):
        return (), aval, False, None
    spec = explicit_spec(getattr(aval, 'sharding', None))
    return aval.shape, traced_dtype(aval), bool(getattr(aval, 'weak_type', False)), spec


def traced_dtype(aval: Any) -> Any:
    """Returns the dtype with which JAX traces a type.

    Without x64, JAX narrows the dtype of a ``ShapeDtypeStruct``, but never the dtype of an array.
    """
    return canonical_dtype(aval.dtype) if isinstance(aval, jax.ShapeDtypeStruct) else aval.dtype


def sharding_in_type(aval: Any) -> NamedSharding | None:
    """Returns the sharding that is part of a type, or None without Explicit axes."""
    sharding = getattr(aval, 'sharding', None)
    any_explicit = isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types
    return sharding if any_explicit else None


def explicit_spec(sharding: Any) -> PartitionSpec | None:
    """Returns the spec over Explicit axes, which is part of an array's type, or None without such axes."""
    if not has_explicit_axes(sharding):
        return None
    return only_axes(sharding.spec, MeshAxes.of(sharding.mesh).of_type(AxisType.Explicit))


def struct_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns a leaf as rules see it: its shape, its dtype, and the sharding that is part of its type."""
    aval = jax.typeof(leaf) if isinstance(leaf, jax.Array) else type_of(leaf)
    if type(aval) is not jax.core.ShapedArray and is_opaque(aval):
        return jax.ShapeDtypeStruct((), bool)
    # A sharding outside of the type is left out: rules give all arrays of a type the same answer.
    sharding = sharding_in_type(aval)
    if sharding is None:
        return _struct(aval.shape, traced_dtype(aval))
    return jax.ShapeDtypeStruct(aval.shape, traced_dtype(aval), sharding=sharding)


@functools.lru_cache(maxsize=4096)  # many layers have the same types, and rules see each leaf several times
def _struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def is_deleted(leaf: Any) -> bool:
    """Whether the buffers of an array have been deleted."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted()


def is_concrete(leaf: Any) -> bool:
    """Whether a leaf is a jax.Array with buffers, rather than a tracer, numpy data or a struct."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def has_explicit_type(leaf: Any) -> bool:
    """Whether an array, or a struct or type that stands for one, has a type of a mesh with Explicit axes."""
    return (is_concrete(leaf) or is_abstract(leaf)) and has_explicit_axes(leaf.sharding)


def type_matches(leaf: Any, sharding: NamedSharding) -> bool:
    """Whether the type of a leaf has the spec of a sharding over Explicit axes."""
    return explicit_spec(jax.typeof(leaf).sharding) == explicit_spec(sharding)


def same_types(first: Any, second: Any) -> bool:
    """Whether two meshes, with devices or without, give arrays the same types."""
    return (dict(first.shape), first.axis_types) == (dict(second.shape), second.axis_types)


def type_fits_mesh(leaf: Any, mesh: Any) -> bool:
    """Whether a function that is traced on *mesh* accepts the type of an array."""
    if not is_concrete(leaf):
        return True
    leaf_mesh = leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else None
    if AxisType.Explicit not in mesh.axis_types and not has_explicit_axes(leaf.sharding):
        return True  # types without a sharding are equal on all meshes of Auto axes
    return leaf_mesh is not None and same_types(leaf_mesh, mesh)


def is_foreign(leaf: Any, mesh: Any) -> bool:
    """Whether a tracer has a type of a mesh with Explicit axes other than *mesh*."""
    if not isinstance(leaf, jax.core.Tracer):
        return False
    sharding = sharding_in_type(type_of(leaf))
    return sharding is not None and not same_types(sharding.mesh, mesh)


def is_mismatched(leaf: Any, sharding: NamedSharding | None) -> bool:
    """Whether an array is committed to another sharding than required, so that ``jax.jit`` rejects it.

    If the required sharding is fully replicated, JAX accepts a fully replicated array on any devices.
    """
    if sharding is None or not committed_elsewhere(leaf, sharding):
        return False
    if isinstance(leaf, jax.Ref):
        return True
    replicated = leaf.sharding.is_fully_replicated and sharding.is_fully_replicated
    return not (replicated and leaf.sharding.memory_kind == sharding.memory_kind)


def committed_elsewhere(leaf: Any, sharding: NamedSharding | None) -> bool:
    """Whether an array, or a reference to one, is committed to a sharding other than *sharding*."""
    if sharding is None or isinstance(leaf, jax.core.Tracer) or isinstance(sharding.mesh, AbstractMesh):
        return False
    committed = isinstance(leaf, jax.Ref) or (isinstance(leaf, jax.Array) and leaf.committed)
    return committed and not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def is_single_device(leaf: Any) -> bool:
    """Whether an array with more than one element is on a single device."""
    concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return concrete and leaf.size > 1 and len(leaf.sharding.device_set) == 1


# Errors about leaves that JAX does not accept -----------------------------------------------------------


def _not_arrays(call: Call) -> ArgumentError:
    wrong = [_has_no_type(leaf, TypeError) for leaf in call.leaves]
    return ArgumentError(
        f'{call.signature.name} got leaves that are not arrays:\n{call.list_leaves(wrong)}\n'
        'What to do: pass arrays or numbers, or name such arguments in static_argnums or static_argnames.\n'
        'What to do: leaves of a tree that also holds arrays cannot be static: take them out, and close over '
        f'them.{module_advice(call.leaves)}'
    )


def _has_no_type(leaf: Any, error_type: type[Exception]) -> bool:
    """Whether JAX rejects a leaf with an error of this type."""
    try:
        leaf_type(leaf)
    except (TypeError, OverflowError) as error:
        return isinstance(error, error_type)
    return False
