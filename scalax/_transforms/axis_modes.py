"""Functions whose mesh axes have other types inside: ``jax.sharding.auto_axes`` and
``jax.sharding.explicit_axes``, with rules in place of specs.

Inside, some axes of the mesh are Auto (the compiler's) or Explicit (part of types), whatever they are
outside. The type of a value that crosses the border changes with them: along axes that are Explicit on the
far side it needs a sharding. On the way in that comes from the types of the arguments or from `in_sharding`;
on the way out from `out_sharding` or from the types of the results.
"""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from scalax._mesh import meshes
from scalax._trace.constraints import (
    abstract,
    apply_sharding,
    apply_shardings,
    has_other_types,
    is_compiled,
    mesh_entered,
    reshard,
    retyped_mesh,
    unconstrained,
)
from scalax._trace.contexts import ActiveHelper, hashable
from scalax._transforms.calls.call import Call, is_concrete, is_typed_by
from scalax._transforms.calls.errors import reject_deleted
from scalax._transforms.calls.placement import moved, with_moved
from scalax._transforms.calls.shardings import reject_faults, resolve_arguments
from scalax._transforms.calls.signature import CallSignature
from scalax._transforms.sjit import sjit
from scalax._transforms.tracebacks import HidingOurs
from scalax._tree import specs
from scalax._tree.specs import Fault, MeshAxes, chosen_axes
from scalax._util.lru_cache import LRUCache
from scalax.errors import ArgumentError, MeshError
from scalax.rules._prefix import RuleLike, check, key_of
from scalax.rules._resolve import Resolution, ResolveMode, named_sharding, resolve

AnyMesh = Mesh | AbstractMesh
EXPLICIT = AxisType.Explicit


def at_the_call(
    switched: type[SwitchedFunction],
    active: ActiveHelper,
    fun: Callable[..., Any],
    axes: str | Iterable[str] | None,
) -> Callable[..., Any]:
    """A function that takes its rules as a keyword of each call, as those of ``jax.sharding`` do."""
    switched(active, fun, axes, None)  # raises about a wrong function or wrong axes
    remembered: LRUCache[Any, Callable[..., Any]] = LRUCache()

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        if switched.option not in kwargs:
            renamed = f' (not {switched.option}s)' if f'{switched.option}s' in kwargs else ''
            raise ArgumentError(
                f'{switched.api} of {getattr(fun, "__name__", fun)} needs {switched.option}{renamed}: '
                f'give it to {switched.api}, or as a keyword of the call'
            )
        rules = kwargs.pop(switched.option)
        key = hashable(key_of(rules))
        found = remembered.get(key) or remembered.add(key, switched(active, fun, axes, rules).wrapper())
        return found(*args, **kwargs)

    return call


class SwitchedFunction(abc.ABC):
    """A function whose mesh axes have another type inside.

    Args:
        active: enters the helper.
        fun: the function.
        axes: the mesh axes that change; None for all that are not manual.
        rules: the `option` of the `api`.
    """

    api: str
    option: str
    inside: AxisType

    def __init__(
        self,
        active: ActiveHelper,
        fun: Callable[..., Any],
        axes: str | Iterable[str] | None,
        rules: RuleLike,
    ) -> None:
        if not callable(fun):
            raise ArgumentError(f'{self.api} takes a function first, got {type(fun).__name__}')
        self._active, self._fun, self._rules = active, fun, rules
        self._signature = CallSignature(fun)
        self.name = self._signature.name
        check(rules, f'{self.option} of {self.name}')
        if self.inside is EXPLICIT:
            self._signature.check_names(rules, self.option)
        known = MeshAxes.of(active.mesh_helper.mesh)
        self._chosen = None if axes is None else frozenset(chosen_axes(f'axes of {self.api}', axes, known))

    def wrapper(self) -> Callable[..., Any]:
        """The function for users, with the name and parameters of their own."""

        def body(*flat_args: Any) -> Any:
            return self._run(flat_args)

        body.__name__ = body.__qualname__ = self.name
        compiled = jax.jit(body)

        @functools.lru_cache(maxsize=8)
        def without_arrays(structure: Any) -> Callable[[], Any]:
            # JAX cannot know on which devices to run: sjit runs it on those of the mesh.
            out_shardings = None if self.inside is EXPLICIT else self._rules
            helper, flat_args = self._active.mesh_helper, structure.unflatten([])
            return sjit(helper, lambda: self._run(flat_args), out_shardings=out_shardings)

        @functools.wraps(self._fun)
        def switched(*args: Any, **kwargs: Any) -> Any:
            flat_args = self._signature.flatten(args, kwargs)
            with _users_code:
                if is_compiled():
                    return self._run(flat_args)
                # Outside of a compiled function JAX knows no other axis types than those of the mesh.
                with self._mesh_entered(self._active.mesh_helper.mesh):
                    if jax.tree.leaves(flat_args):
                        return compiled(*self._placed(flat_args))
                    return without_arrays(jax.tree.structure(flat_args))()

        return switched

    def _mesh_entered(self, mesh: AnyMesh) -> contextlib.AbstractContextManager[Any]:
        return mesh_entered(mesh, f'{self.api} of {self.name}')

    def _run(self, flat_args: Sequence[Any]) -> Any:
        """The function, traced with the other axis types."""
        outer = retyped_mesh(self._active.mesh_helper.mesh)
        inner = self._inner(outer)
        leaves, treedef = jax.tree.flatten(flat_args)
        with self._mesh_entered(outer), self._active:
            with _entered(inner):
                leaves = self._enter(flat_args, leaves, outer, inner)
                results = self._results(jax.tree.unflatten(treedef, leaves))
            with _entered(outer):
                return self._leave(results, outer, inner)

    def _results(self, flat_args: Sequence[Any]) -> Any:
        args, keywords = self._signature.restore(flat_args)
        return self._fun(*args, **keywords)

    def _inner(self, outer: AnyMesh) -> AbstractMesh:
        types = MeshAxes.of(outer).types
        chosen = self._chosen
        if chosen is None:
            chosen = frozenset(name for name, kind in types.items() if kind is not AxisType.Manual)
        manual = sorted(name for name in chosen if types[name] is AxisType.Manual)
        if manual:
            raise MeshError(
                f'{self.api} of {self.name} inside shard_map: {", ".join(map(repr, manual))} '
                f'{"is" if len(manual) == 1 else "are"} manual there, and can be nothing else: name other '
                'axes (axes=...)'
            )
        kinds = [self.inside if name in chosen else kind for name, kind in types.items()]
        return abstract(outer).update(axis_types=tuple(kinds))

    def _placed(self, flat_args: Sequence[Any]) -> Any:
        """The arguments of a call outside of any compiled function, on the devices of the mesh."""
        mesh = self._active.mesh_helper.mesh
        meshes.require_devices(mesh, f'a call of {self.name}')
        reject_deleted(Call(self._signature, flat_args))
        leaves, wanted = jax.tree.leaves(flat_args), self._wanted(flat_args, mesh)
        targets = {i: wanted[i] for i, leaf in enumerate(leaves) if not _stays_on(leaf, mesh)}
        return with_moved(flat_args, targets, moved)

    @abc.abstractmethod
    def _wanted(self, flat_args: Sequence[Any], mesh: Mesh) -> list[NamedSharding]:
        """The shardings of arguments that are not on the mesh."""

    @abc.abstractmethod
    def _enter(
        self, flat_args: Sequence[Any], leaves: Sequence[Any], outer: AnyMesh, inner: AbstractMesh
    ) -> list[Any]:
        """The arguments with their types on the way in."""

    @abc.abstractmethod
    def _leave(self, results: Any, outer: AnyMesh, inner: AbstractMesh) -> Any:
        """The results with their types on the way out."""

    def _resolved(
        self, rules: RuleLike, flat_args: Sequence[Any], mesh: AnyMesh, where: str
    ) -> list[Resolution]:
        """The rules of each argument, resolved."""
        return resolve_arguments(
            rules,
            Call(self._signature, flat_args),
            mesh,
            option=self.option,
            rest='None keeps the type of an argument where no axis changes',
            where=f'the arguments of {self.name!r}{where}',
            on_indivisible=self._active.mesh_helper.on_indivisible,
        )

    def _reject(
        self, leaves: Sequence[str], given: Sequence[NamedSharding | None], to: AnyMesh, changes: bool
    ) -> None:
        """Raises about values that cannot cross the border as asked.

        Args:
            leaves: the values, as messages show them.
            given: the sharding that the rules give each.
            to: the mesh on the far side.
            changes: whether some axis has another type there.
        """
        names = self._chosen or to.axis_names
        axes = ', '.join(axis for axis in MeshAxes.of(to).of_type(EXPLICIT) if axis in names)
        side, what = ('inside', 'arguments') if self.inside is EXPLICIT else ('outside', 'outputs')
        memory = named_sharding(to, PartitionSpec()).memory_kind
        no_sharding = Fault(
            'no-sharding',
            f'None does not say how it is sharded along axes that are Explicit {side} ({axes})',
            'give PartitionSpec() for what is replicated: along Explicit axes every value has a sharding.',
        )

        def fault(sharding: NamedSharding | None) -> Fault | None:
            if sharding is None:
                return no_sharding if changes else None
            if sharding.memory_kind == memory:
                return None
            return Fault(
                'memory-kind',
                f'where axis types change, an array cannot be placed in {sharding.memory_kind!r}',
                f'give rules without a memory kind, and move arrays outside of {self.api}.',
            )

        reject_faults(leaves, given, fault, to, f'the {what} of {self.name!r} ({self.option})')


class AutoAxes(SwitchedFunction):
    """A function that runs with mesh axes of type Auto, and what its results are outside."""

    api, option, inside = 'auto_axes', 'out_sharding', AxisType.Auto

    def _enter(
        self, flat_args: Sequence[Any], leaves: Sequence[Any], outer: AnyMesh, inner: AbstractMesh
    ) -> list[Any]:
        self._resolved(None, flat_args, outer, '')  # raises about leaves that are not arrays
        if abstract(outer) == inner:
            return list(leaves)
        return [_retype(leaf, outer, inner, _type_of(leaf)) for leaf in leaves]

    def _wanted(self, flat_args: Sequence[Any], mesh: Mesh) -> list[NamedSharding]:
        self._resolved(None, flat_args, mesh, '')  # as above, before JAX sees them
        return [named_sharding(mesh, _kept(leaf, mesh)) for leaf in jax.tree.leaves(flat_args)]

    def _leave(self, results: Any, outer: AnyMesh, inner: AbstractMesh) -> Any:
        where = f'the outputs of {self.name!r} (out_sharding)'
        resolution = resolve(
            self._rules,
            results,
            outer,
            mode=ResolveMode.BOUNDARY,
            where=where,
            on_indivisible=self._active.mesh_helper.on_indivisible,
        )
        leaves, shardings = resolution.tree.leaves, resolution.shardings
        changes = abstract(outer) != inner
        self._reject(resolution.tree.descriptions, shardings, outer, changes)
        if changes:
            leaves = [
                _retype(leaf, inner, outer, sharding.spec if sharding else PartitionSpec())
                for leaf, sharding in zip(leaves, shardings, strict=True)
            ]
        return apply_shardings(jax.tree.unflatten(resolution.treedef, leaves), shardings)


class ExplicitAxes(SwitchedFunction):
    """A function that runs with mesh axes of type Explicit, and what its arguments are inside."""

    api, option, inside = 'explicit_axes', 'in_sharding', EXPLICIT

    def _enter(
        self, flat_args: Sequence[Any], leaves: Sequence[Any], outer: AnyMesh, inner: AbstractMesh
    ) -> list[Any]:
        shardings = self._inside(flat_args, inner, changes=abstract(outer) != inner)
        entered = []
        for leaf, sharding in zip(leaves, shardings, strict=True):
            if sharding is not None:
                if EXPLICIT not in outer.axis_types:
                    # On the mesh with its devices: of host data alone JAX would compute on one.
                    with _entered(outer):
                        leaf = apply_sharding(leaf, named_sharding(outer, _whole(sharding.spec)))
                leaf = apply_sharding(_retype(leaf, outer, inner, sharding.spec), sharding)
            entered.append(leaf)
        return entered

    def _wanted(self, flat_args: Sequence[Any], mesh: Mesh) -> list[NamedSharding]:
        inner = self._inner(mesh)
        with _entered(inner):
            shardings = self._inside(flat_args, inner, changes=abstract(mesh) != inner)
        return [
            named_sharding(mesh, PartitionSpec() if sharding is None else _whole(sharding.spec))
            for sharding in shardings
        ]

    def _inside(
        self, flat_args: Sequence[Any], inner: AbstractMesh, changes: bool
    ) -> list[NamedSharding | None]:
        """The sharding of each argument inside."""
        resolutions = self._resolved(self._rules, flat_args, inner, ' (in_sharding)')
        shardings = [sharding for resolution in resolutions for sharding in resolution.shardings]
        leaves = [text for resolution in resolutions for text in resolution.tree.descriptions]
        self._reject(leaves, shardings, inner, changes)
        return shardings

    def _leave(self, results: Any, outer: AnyMesh, inner: AbstractMesh) -> Any:
        resolve(None, results, outer, mode=ResolveMode.BOUNDARY, where=f'the outputs of {self.name!r}')
        if abstract(outer) == inner:
            return results
        results = jax.tree.map(lambda leaf: _retype(leaf, inner, outer, _type_of(leaf)), results)
        if EXPLICIT in outer.axis_types:
            return results
        # As on the way in: a constraint that asks for nothing but the devices of the mesh.
        return jax.tree.map(lambda leaf: apply_sharding(leaf, unconstrained(leaf, outer)), results)


_users_code = HidingOurs(SwitchedFunction._results.__code__)


def _entered(mesh: AnyMesh) -> Any:
    return jax.sharding.use_abstract_mesh(abstract(mesh))


def _whole(spec: PartitionSpec) -> PartitionSpec:
    """The spec without unreduced and reduced axes, which a mesh may not allow on this side."""
    return PartitionSpec(*specs.entries(spec))


def _type_of(leaf: Any) -> PartitionSpec:
    return jax.typeof(leaf).sharding.spec


def _retype(leaf: Any, from_mesh: AnyMesh, to_mesh: AnyMesh, spec: PartitionSpec) -> Any:
    """A value with its type on *to_mesh*: along axes that are Explicit there as *spec* says, else open.

    Parts of sums cross only where both sides have them and no axis is Auto. JAX would take a whole value for
    parts of a sum, leave to XLA when parts are added up, and beside Auto axes take parts for values.
    """
    explicit = frozenset(MeshAxes.of(to_mesh).of_type(EXPLICIT))
    has = _type_of(leaf)
    kept = has.unreduced & spec.unreduced & explicit
    if AxisType.Auto in to_mesh.axis_types:
        kept = frozenset()
    if kept != has.unreduced:
        with _entered(from_mesh):
            summed = specs.replaced(specs.with_sums(has, kept | has.reduced), specs.entries(has))
            leaf = reshard(leaf, NamedSharding(from_mesh, summed))
    typed = [tuple(filter(explicit.__contains__, specs.entry_axes(entry))) for entry in specs.entries(spec)]
    sums = specs.with_sums(has, kept | (has.reduced & spec.reduced & explicit))
    return jax.sharding.reshard(leaf, NamedSharding(to_mesh, specs.replaced(sums, typed)))


def _stays_on(leaf: Any, mesh: Mesh) -> bool:
    """Whether an argument stays where it is: on these devices, with a type of this mesh."""
    if isinstance(leaf, jax.core.Tracer):
        # Of a transformation that runs at once. Where its type has no mesh, it may be on any devices.
        return EXPLICIT not in mesh.axis_types or not jax.typeof(leaf).sharding.mesh.empty
    if not is_concrete(leaf) or not leaf.committed or not isinstance(leaf.sharding, NamedSharding):
        return False
    return list(leaf.sharding.mesh.devices.flat) == list(mesh.devices.flat) and is_typed_by(leaf, mesh)


def _kept(leaf: Any, mesh: Mesh) -> PartitionSpec:
    """The spec of an array, if its axes are those of the mesh; else replicated."""
    sharding = leaf.sharding if is_concrete(leaf) else None
    if isinstance(sharding, NamedSharding) and has_other_types(sharding.mesh.abstract_mesh, mesh):
        return _whole(sharding.spec)
    return PartitionSpec()
