"""Functions whose mesh axes have other types inside: ``jax.sharding.auto_axes`` and
``jax.sharding.explicit_axes``, with rules in place of specs.

Inside, some axes of the mesh are Auto (the compiler's) or Explicit (part of types), whatever they are
outside. The type of a value that crosses the border changes with them: along axes that are Explicit on the
far side it needs a sharding. On the way in that comes from the types of the arguments or from `in_sharding`;
on the way out from `out_sharding` or from the types of the results.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from scalax._mesh import meshes
from scalax._trace import constraints
from scalax._trace.constraints import abstract, apply_sharding, mesh_entered
from scalax._trace.contexts import ActiveHelper
from scalax._transforms.calls.call import Call, is_concrete
from scalax._transforms.calls.shardings import resolve_arguments
from scalax._transforms.calls.signature import CallSignature
from scalax._transforms.tracebacks import run_users
from scalax._transforms.wrapped import called, compiled, memory_fault, placed, signature_of, sound_shardings
from scalax._tree import specs
from scalax._tree.specs import Fault, MeshAxes, chosen_axes
from scalax.errors import ArgumentError, MeshError
from scalax.rules._prefix import RuleLike, checked
from scalax.rules._resolve import ResolveMode, named_sharding, resolve

AnyMesh = Mesh | AbstractMesh
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit

# By the type of the axes inside: what the transformation is called, and its rules.
_NAMES = {AUTO: ('auto_axes', 'out_sharding'), EXPLICIT: ('explicit_axes', 'in_sharding')}


def switched(
    inside: AxisType,
    active: ActiveHelper,
    fun: Callable[..., Any],
    axes: str | Iterable[str] | None,
    rules: RuleLike,
) -> Callable[..., Any]:
    """A function whose mesh axes have another type inside.

    Args:
        inside: the type.
        active: enters the helper.
        fun: the function.
        axes: the mesh axes that change; None for all that are not manual.
        rules: `out_sharding` of `auto_axes`, `in_sharding` of `explicit_axes`.
    """
    (api, option), helper = _NAMES[inside], active.mesh_helper
    signature = signature_of(fun, api)
    rules = checked(rules, f'{option} of {signature.name}')
    if inside is EXPLICIT:
        signature.check_names(rules, option)
    if axes is not None:
        axes = chosen_axes(f'axes of {api}', axes, MeshAxes.of(helper.mesh))
    function = _Switched(inside, active, fun, signature, axes, rules)
    compiled_run = compiled(function.run, signature.name)

    def at_once(flat_args: Sequence[Any]) -> Any:
        call = Call(signature, flat_args)
        # Outside of a compiled function JAX knows no other axis types than those of the mesh.
        with mesh_entered(helper.mesh, f'{api} of {signature.name}'):
            meshes.require_devices(helper.mesh, f'a call of {signature.name}')
            if not call.leaves:  # JAX would run it on one device
                raise ArgumentError(f'{api} of {signature.name} got no arrays: call it inside of sjit')
            return compiled_run(placed(call, helper.mesh, functools.partial(function.wanted, call)))

    return called(fun, signature.flatten, function.run, at_once)


@dataclasses.dataclass(frozen=True, eq=False)
class _Switched:
    """The function that `switched` returns, and how its calls run.

    Attributes:
        inside, active, fun, axes, rules: as given to `switched`.
        signature: the parameters of the function.
    """

    inside: AxisType
    active: ActiveHelper
    fun: Callable[..., Any]
    signature: CallSignature
    axes: Sequence[str] | None
    rules: RuleLike

    @property
    def _what(self) -> str:
        return f'{_NAMES[self.inside][0]} of {self.signature.name}'

    def run(self, flat_args: Sequence[Any]) -> Any:
        """Runs a call in a trace: the arguments cross the border, and the results come back."""
        call = Call(self.signature, flat_args)
        outer = constraints.retyped_mesh(self.active.mesh_helper.mesh)
        inner = self._inner(outer)
        with mesh_entered(outer, self._what), self.active:
            with _entered(inner):
                leaves = _crossed(call.leaves, self._arguments(call, outer, inner), outer, inner)
                results = run_users(self.fun, *self.signature.restore(call.replaced(leaves)))
            with _entered(outer):
                leaves, treedef = jax.tree.flatten(results)
                leaves = _crossed(leaves, self._outputs(results, outer, inner), inner, outer)
                return jax.tree.unflatten(treedef, leaves)

    def wanted(self, call: Call) -> list[NamedSharding]:
        """The shardings for arguments that are not on the mesh yet: those inside, else their own."""
        mesh = self.active.mesh_helper.mesh
        inner = self._inner(mesh)
        with _entered(inner):
            shardings = self._arguments(call, mesh, inner)
        return [
            named_sharding(mesh, _whole(to.spec) if to else _kept(leaf, mesh))
            for leaf, to in zip(call.leaves, shardings, strict=True)
        ]

    def _inner(self, outer: AnyMesh) -> AbstractMesh:
        """The mesh with the axis types that it has inside."""
        types = MeshAxes.of(outer).types
        names = self.axes
        if names is None:
            names = [name for name, kind in types.items() if kind is not AxisType.Manual]
        if manual := sorted(name for name in names if types[name] is AxisType.Manual):
            raise MeshError(
                f'{self._what} inside shard_map: {", ".join(map(repr, manual))} '
                f'{"is" if len(manual) == 1 else "are"} manual there, and can be nothing else: name other '
                'axes (axes=...)'
            )
        kinds = [self.inside if name in names else kind for name, kind in types.items()]
        return abstract(outer).update(axis_types=tuple(kinds))

    def _arguments(self, call: Call, outer: AnyMesh, inner: AbstractMesh) -> list[NamedSharding | None]:
        """The shardings inside that the rules give the arguments."""
        rules, where = self._side(EXPLICIT, 'arguments')
        policy = self.active.mesh_helper.on_indivisible
        rest = 'None keeps the type of an argument where no axis changes'
        resolutions = resolve_arguments(rules, call, inner, 'in_sharding', policy, rest=rest)
        return sound_shardings(resolutions, self._fault_of(EXPLICIT, outer, inner), inner, where)

    def _outputs(self, results: Any, outer: AnyMesh, inner: AbstractMesh) -> list[NamedSharding | None]:
        """The shardings outside that the rules give the results."""
        rules, where = self._side(AUTO, 'outputs')
        resolution = resolve(
            rules,
            results,
            outer,
            mode=ResolveMode.BOUNDARY,
            where=where,
            on_indivisible=self.active.mesh_helper.on_indivisible,
        )
        return sound_shardings([resolution], self._fault_of(AUTO, inner, outer), outer, where)

    def _side(self, ruled: AxisType, what: str) -> tuple[RuleLike, str]:
        """The rules of one side, which only the transformation of that type has, and its name in messages."""
        where = f'the {what} of {self.signature.name!r}'
        return (self.rules, f'{where} ({_NAMES[ruled][1]})') if self.inside is ruled else (None, where)

    def _fault_of(
        self, ruled: AxisType, near: AnyMesh, far: AnyMesh
    ) -> Callable[[NamedSharding | None], Fault | None]:
        """What is wrong with the shardings of values that cross from one mesh to the other, on one side."""
        needs_rules = self.inside is ruled and abstract(near) != abstract(far)
        names = self.axes or far.axis_names
        axes = ', '.join(axis for axis in MeshAxes.of(far).of_type(EXPLICIT) if axis in names)

        def fault(sharding: NamedSharding | None) -> Fault | None:
            if sharding is not None:
                return memory_fault(sharding, 'where axis types change, an array', _NAMES[ruled][0])
            if not needs_rules:
                return None
            side = 'inside' if ruled is EXPLICIT else 'outside'
            return Fault(
                'no-sharding',
                f'None gives no sharding along the axes that are Explicit {side} ({axes})',
                'give PartitionSpec() for what is replicated: along Explicit axes every value has a '
                'sharding.',
            )

        return fault


def _entered(mesh: AnyMesh) -> Any:
    return jax.sharding.use_abstract_mesh(abstract(mesh))


def _crossed(
    leaves: Sequence[Any], shardings: Sequence[NamedSharding | None], near: AnyMesh, far: AnyMesh
) -> list[Any]:
    """Values with their types on the *far* mesh: along Explicit axes as asked, else as they have them."""
    if abstract(near) != abstract(far):
        leaves = [
            _on_devices(_retype(_on_devices(leaf, near), near, far, to.spec if to else _type_of(leaf)), far)
            for leaf, to in zip(leaves, shardings, strict=True)
        ]
    return constraints.apply_shardings([*leaves], shardings)


def _on_devices(leaf: Any, mesh: AnyMesh) -> Any:
    """A value outside of `explicit_axes`; of host data alone JAX would compute on one device."""
    if isinstance(mesh, AbstractMesh) or EXPLICIT in mesh.axis_types:
        return leaf
    with _entered(mesh):
        return apply_sharding(leaf, constraints.unconstrained(leaf, mesh))


def _retype(leaf: Any, near: AnyMesh, far: AnyMesh, spec: PartitionSpec) -> Any:
    """A value with its type on the *far* mesh: along axes that are Explicit there as *spec* says, else open.

    Parts of sums are added up before: JAX would take a whole value for parts of a sum, leave to XLA when
    parts are added up, and beside Auto axes take parts for values.
    """
    explicit = frozenset(MeshAxes.of(far).of_type(EXPLICIT))
    has = _type_of(leaf)
    if has.unreduced:
        with _entered(near):
            summed = specs.replaced(specs.with_sums(has, has.reduced), specs.entries(has))
            leaf = constraints.reshard(leaf, NamedSharding(near, summed))
    typed = [tuple(filter(explicit.__contains__, specs.entry_axes(entry))) for entry in specs.entries(spec)]
    sums = specs.with_sums(has, has.reduced & spec.reduced & explicit)
    return jax.sharding.reshard(leaf, NamedSharding(far, specs.replaced(sums, typed)))


def _type_of(leaf: Any) -> PartitionSpec:
    return jax.typeof(leaf).sharding.spec


def _whole(spec: PartitionSpec) -> PartitionSpec:
    """The spec without unreduced and reduced axes, which a mesh may not allow on this side."""
    return PartitionSpec(*specs.entries(spec))


def _kept(leaf: Any, mesh: Mesh) -> PartitionSpec:
    """The spec of an array, if its axes are those of the mesh; else replicated."""
    sharding = leaf.sharding if is_concrete(leaf) else None
    if isinstance(sharding, NamedSharding) and constraints.has_other_types(sharding.mesh.abstract_mesh, mesh):
        return _whole(sharding.spec)
    return PartitionSpec()
