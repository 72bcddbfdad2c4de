"""How does part of a program run with mesh axes of another type? ``jax.sharding.auto_axes`` and
``jax.sharding.explicit_axes``, with rules in place of specs.

Inside, some axes of the mesh are Auto (the compiler's) or Explicit (part of types), whatever they are
outside. A value that crosses the border changes its type with them: along axes that are Explicit on the far
side somebody has to say how it lies. On the way in, that are the types of the arguments or `in_sharding`; on
the way out, `out_sharding` or the types of the results.
"""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from scalax._mesh import meshes
from scalax._trace.constraints import (
    abstract,
    apply_sharding,
    has_other_types,
    is_compiled,
    mesh_entered,
    mesh_in_force,
    reshard,
)
from scalax._trace.contexts import ActiveHelper, hashable
from scalax._transforms.calls.argument_shardings import resolve_slots
from scalax._transforms.calls.call_signature import CallSignature
from scalax._transforms.calls.placement import is_concrete, is_typed_by, moved
from scalax._transforms.calls.placement_errors import reject_deleted
from scalax._transforms.sjit import sjit
from scalax._transforms.tracebacks import arose_below, hide_ours
from scalax._tree import specs
from scalax._tree.specs import MeshAxes
from scalax._util.lru_cache import LRUCache
from scalax.errors import ArgumentError, MeshError, Problem, ShardingError
from scalax.rules._prefix import RuleLike, check, key_of
from scalax.rules._resolve import Resolution, ResolveMode, named_sharding, resolve

AnyMesh = Mesh | AbstractMesh
EXPLICIT = AxisType.Explicit


def auto_axes(
    active: ActiveHelper,
    fun: Callable[..., Any],
    axes: str | Iterable[str] | None,
    out_sharding: RuleLike,
) -> Callable[..., Any]:
    """See `MeshShardingHelper.auto_axes`, which is documented for users; *active* enters the helper."""
    return _Auto(active, fun, axes, out_sharding).wrapper()


def explicit_axes(
    active: ActiveHelper,
    fun: Callable[..., Any],
    axes: str | Iterable[str] | None,
    in_sharding: RuleLike,
) -> Callable[..., Any]:
    """See `MeshShardingHelper.explicit_axes`, which is documented for users; *active* enters the helper."""
    return _Explicit(active, fun, axes, in_sharding).wrapper()


def at_the_call(
    switch: Callable[[RuleLike], Callable[..., Any]], fun: Callable[..., Any], api: str, option: str
) -> Callable[..., Any]:
    """A function that takes its rules as a keyword of each call, as those of ``jax.sharding`` do.

    Args:
        switch: gives *fun* with the axis types that it has inside, for rules.
        fun: the function.
        api: what is called, for errors.
        option: the keyword.
    """
    switch(None)  # what is wrong whatever the rules are
    remembered: LRUCache[Any, Callable[..., Any]] = LRUCache()

    @functools.wraps(fun)
    def switched(*args: Any, **kwargs: Any) -> Any:
        if option not in kwargs:
            raise ArgumentError(
                f'{api} of {getattr(fun, "__name__", fun)} needs {option}: give it to {api}, or as a keyword '
                f'of the call'
            )
        rules = kwargs.pop(option)
        key = hashable(key_of(rules))
        found = remembered.get(key) or remembered.add(key, switch(rules))
        return found(*args, **kwargs)

    return switched


class _Switched(abc.ABC):
    """A function whose mesh axes have another type inside."""

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
        known = MeshAxes.of(active.mesh_helper.mesh)
        self._chosen = None if axes is None else specs.chosen_axes(f'axes of {self.api}', axes, known)

    def wrapper(self) -> Callable[..., Any]:
        """What users call: the function with its own name and parameters."""
        fun, signature = self._fun, self._signature

        def body(*flat_args: Any) -> Any:
            return self._run(flat_args)

        body.__name__ = body.__qualname__ = self.name
        compiled = jax.jit(body)

        @functools.lru_cache(maxsize=8)
        def without_arrays(structure: Any) -> Callable[[], Any]:
            # Nothing says on which devices to run: sjit knows.
            out_shardings = None if self.inside is EXPLICIT else self._rules
            helper, flat_args = self._active.mesh_helper, structure.unflatten([])
            return sjit(helper, lambda: self._run(flat_args), out_shardings=out_shardings, jit_kwargs={})

        def call(flat_args: Sequence[Any]) -> Any:
            if is_compiled():
                return self._run(flat_args)
            # Outside of a compiled function JAX knows no other axis types than those of the mesh.
            with mesh_entered(self._active.mesh_helper.mesh, f'{self.api} of {self.name}'):
                if jax.tree.leaves(flat_args):
                    return compiled(*self._placed(flat_args))
                return without_arrays(jax.tree.structure(flat_args))()

        @functools.wraps(fun)
        def switched(*args: Any, **kwargs: Any) -> Any:
            flat_args = signature.flatten(args, kwargs)
            try:
                return call(flat_args)
            except Exception as error:
                if arose_below(error, _Switched._results.__code__):
                    hide_ours(error)
                raise

        return switched

    def _run(self, flat_args: Sequence[Any]) -> Any:
        """The function, traced with the other axis types."""
        outer = mesh_in_force(self._active.mesh_helper.mesh)
        inner = self._inner(outer)
        flat: tuple[list[Any], Any] = jax.tree.flatten(flat_args)
        leaves, treedef = flat
        with mesh_entered(outer, f'{self.api} of {self.name}'), self._active:
            with _entered(inner):
                leaves = self._enter(flat_args, leaves, outer, inner)
                results = self._results(treedef.unflatten(leaves))
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
        flat: tuple[list[Any], Any] = jax.tree.flatten(flat_args)
        leaves, treedef = flat
        reject_deleted(self._signature, self._signature.layout_of(flat_args), flat_args)
        wanted = self._wanted(flat_args, mesh)
        stays = [_lies_on(leaf, mesh) for leaf in leaves]
        arrived = iter(
            moved(
                [leaf for leaf, stay in zip(leaves, stays, strict=True) if not stay],
                [sharding for sharding, stay in zip(wanted, stays, strict=True) if not stay],
            )
        )
        return treedef.unflatten(
            [leaf if stay else next(arrived) for leaf, stay in zip(leaves, stays, strict=True)]
        )

    @abc.abstractmethod
    def _wanted(self, flat_args: Sequence[Any], mesh: Mesh) -> list[NamedSharding]:
        """Where the arguments go that lie elsewhere."""

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
        """What rules say of each argument."""
        layout = self._signature.layout_of(flat_args)
        by_slot = resolve_slots(
            self._signature.rules_by_slot(
                rules, flat_args, self.option, '', 'None keeps the type of an argument where no axis changes'
            ),
            layout,
            flat_args,
            mesh=mesh,
            mode=ResolveMode.BOUNDARY,
            where=f'the arguments of {self.name!r}{where}',
            on_indivisible=self._active.mesh_helper.on_indivisible,
        )
        return [by_slot[slot] for slot in layout.dynamic]

    def _reject(
        self, leaves: Sequence[str], given: Sequence[NamedSharding | None], to: AnyMesh, changes: bool
    ) -> None:
        """Raises about values that cannot cross the border as asked.

        Args:
            leaves: the values, as messages show them.
            given: what the rules say of each.
            to: the mesh on the side that they come to.
            changes: whether some axis has another type there.
        """
        names = self._chosen or to.axis_names
        types = MeshAxes.of(to).types
        axes = ', '.join(axis for axis, kind in types.items() if axis in names and kind is EXPLICIT)
        side, what = ('inside', 'arguments') if self.inside is EXPLICIT else ('outside', 'outputs')
        memory = named_sharding(to, PartitionSpec()).memory_kind
        problems = []
        for leaf, sharding in zip(leaves, given, strict=True):
            if sharding is None and changes:
                problems.append(
                    Problem(
                        'no-sharding',
                        leaf,
                        f'None leaves open how it lies along axes that are Explicit {side} ({axes})',
                        hint='give PartitionSpec() for what is replicated: along Explicit axes every value '
                        'has a sharding.',
                    )
                )
            elif sharding is not None and sharding.memory_kind != memory:
                problems.append(
                    Problem(
                        'memory-kind',
                        leaf,
                        f'where axis types change nothing can be asked to lie in {sharding.memory_kind!r}',
                        hint=f'give rules without a memory kind, and move arrays outside of {self.api}.',
                    )
                )
        if problems:
            where = f'the {what} of {self.name!r} ({self.option})'
            raise ShardingError(problems, str(MeshAxes.of(to)), where)


class _Auto(_Switched):
    api, option, inside = 'auto_axes', 'out_sharding', AxisType.Auto

    def _enter(
        self, flat_args: Sequence[Any], leaves: Sequence[Any], outer: AnyMesh, inner: AbstractMesh
    ) -> list[Any]:
        self._resolved(None, flat_args, outer, '')  # names what is no array
        if abstract(outer) == inner:
            return list(leaves)
        return [_crossed(leaf, outer, inner, _type_of(leaf)) for leaf in leaves]

    def _wanted(self, flat_args: Sequence[Any], mesh: Mesh) -> list[NamedSharding]:
        self._resolved(None, flat_args, mesh, '')  # before JAX is given what is no array
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
                _crossed(leaf, inner, outer, sharding.spec if sharding else PartitionSpec())
                for leaf, sharding in zip(leaves, shardings, strict=True)
            ]
        applied = [
            leaf if sharding is None else apply_sharding(leaf, sharding)
            for leaf, sharding in zip(leaves, shardings, strict=True)
        ]
        return resolution.treedef.unflatten(applied)


class _Explicit(_Switched):
    api, option, inside = 'explicit_axes', 'in_sharding', EXPLICIT

    def __init__(
        self,
        active: ActiveHelper,
        fun: Callable[..., Any],
        axes: str | Iterable[str] | None,
        rules: RuleLike,
    ) -> None:
        super().__init__(active, fun, axes, rules)
        self._signature.check_names(rules, self.option)

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
                leaf = apply_sharding(_crossed(leaf, outer, inner, sharding.spec), sharding)
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
        """How each argument is to lie inside."""
        resolutions = self._resolved(self._rules, flat_args, inner, ' (in_sharding)')
        shardings = [sharding for resolution in resolutions for sharding in resolution.shardings]
        leaves = [text for resolution in resolutions for text in resolution.tree.descriptions]
        self._reject(leaves, shardings, inner, changes)
        return shardings

    def _leave(self, results: Any, outer: AnyMesh, inner: AbstractMesh) -> Any:
        resolve(None, results, outer, mode=ResolveMode.BOUNDARY, where=f'the outputs of {self.name!r}')
        if abstract(outer) == inner:
            return results
        results = jax.tree.map(lambda leaf: _crossed(leaf, inner, outer, _type_of(leaf)), results)
        if EXPLICIT in outer.axis_types:
            return results
        # As on the way in: a constraint that asks for nothing but the devices of the mesh.
        return jax.tree.map(lambda leaf: apply_sharding(leaf, _anyhow(leaf, outer)), results)


@contextlib.contextmanager
def _entered(mesh: AnyMesh) -> Iterator[None]:
    with jax.sharding.use_abstract_mesh(abstract(mesh)):
        yield


def _whole(spec: PartitionSpec) -> PartitionSpec:
    """The spec without unreduced and reduced axes, which a mesh may not allow on this side."""
    return PartitionSpec(*specs.entries(spec))


def _type_of(leaf: Any) -> PartitionSpec:
    return jax.typeof(leaf).sharding.spec


def _crossed(leaf: Any, came: AnyMesh, to: AnyMesh, asked: PartitionSpec) -> Any:
    """A value with its type on the mesh *to*: as asked, what is Explicit there. The rest stays open.

    Only sums that both sides have cross, and none to where an axis is Auto. JAX would declare a whole value
    to be parts of a sum, leave it to XLA when parts are added up, and beside Auto axes take parts for values.
    """
    types = MeshAxes.of(to).types
    explicit = {name for name, kind in types.items() if kind is EXPLICIT}
    has = _type_of(leaf)
    kept = has.unreduced & asked.unreduced & explicit
    if AxisType.Auto in types.values():
        kept = frozenset()
    if kept != has.unreduced:
        with _entered(came):
            summed = specs.replaced(specs.with_sums(has, kept | has.reduced), specs.entries(has))
            leaf = reshard(leaf, NamedSharding(came, summed))
    typed = [tuple(filter(explicit.__contains__, specs.entry_axes(entry))) for entry in specs.entries(asked)]
    sums = specs.with_sums(has, kept | (has.reduced & asked.reduced & explicit))
    return jax.sharding.reshard(leaf, NamedSharding(to, specs.replaced(sums, typed)))


def _anyhow(leaf: Any, mesh: AnyMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*[specs.UNCONSTRAINED] * len(jax.typeof(leaf).shape)))


def _lies_on(leaf: Any, mesh: Mesh) -> bool:
    """Whether an argument stays where it is: on these devices, with a type of this mesh."""
    if isinstance(leaf, jax.core.Tracer):
        # In the hands of a transformation that runs at once. What its type says of no mesh may lie anywhere.
        return EXPLICIT not in mesh.axis_types or not jax.typeof(leaf).sharding.mesh.empty
    if not is_concrete(leaf) or not leaf.committed or not isinstance(leaf.sharding, NamedSharding):
        return False
    return list(leaf.sharding.mesh.devices.flat) == list(mesh.devices.flat) and is_typed_by(leaf, mesh)


def _kept(leaf: Any, mesh: Mesh) -> PartitionSpec:
    """How an array lies, if its axes are those of the mesh; else replicated."""
    sharding = leaf.sharding if is_concrete(leaf) else None
    if isinstance(sharding, NamedSharding) and has_other_types(sharding.mesh.abstract_mesh, mesh):
        return _whole(sharding.spec)
    return PartitionSpec()
