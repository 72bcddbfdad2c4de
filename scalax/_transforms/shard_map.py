"""``jax.shard_map``, with rules in place of specs.

The mesh axes of ``axis_names`` are *manual*: along them the function sees blocks. The manual axes of a
resolved spec become the spec that JAX is given; the others go into the sharding of the whole array, before
and after.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from scalax._trace import resharding
from scalax._trace.constraints import (
    apply_shardings,
    has_type,
    is_compiled,
    is_traced,
    mesh_entered,
    retyped_mesh,
)
from scalax._trace.contexts import ActiveHelper
from scalax._transforms.calls.call import Call, is_typed_by, on_other_devices
from scalax._transforms.calls.errors import reject_deleted
from scalax._transforms.calls.shardings import reject_faults, resolve_arguments
from scalax._transforms.calls.signature import CallSignature
from scalax._transforms.tracebacks import HidingOurs
from scalax._tree import specs
from scalax._tree.specs import Fault, MeshAxes
from scalax.errors import ArgumentError, MeshError, Problem, RuleError, ShardingError
from scalax.rules._prefix import RuleLike, is_rule
from scalax.rules._resolve import Resolution, ResolveMode, named_sharding, resolve, with_types
from scalax.rules._rule import ShardingRule, looks_at_paths_only


def shard_map(
    active: ActiveHelper,
    fun: Callable[..., Any],
    in_specs: RuleLike,
    out_specs: RuleLike,
    axis_names: Iterable[str] | None,
    check_vma: bool,
) -> Callable[..., Any]:
    """Maps a function over blocks of its arguments, as rules cut them; *active* enters the helper."""
    if not callable(fun):
        raise ArgumentError(f'shard_map takes a function first, got {type(fun).__name__}')
    signature = CallSignature(fun)
    signature.check_names(in_specs, 'in_specs')
    _reject_shape_dependent(signature.name, out_specs)
    axes = MeshAxes.of(active.mesh_helper.mesh)
    names = () if axis_names is None else axis_names
    chosen = frozenset(specs.chosen_axes('axis_names of shard_map', names, axes))

    def run(*flat_args: Any) -> Any:
        here = _Mapped(active, signature, chosen, check_vma)
        with here.entered():
            return here.call(fun, flat_args, in_specs, out_specs)

    run.__name__ = run.__qualname__ = signature.name
    compiled = jax.jit(run)

    @functools.wraps(fun)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        flat_args = signature.flatten(args, kwargs)
        with _users_code:
            if is_compiled():
                return run(*flat_args)
            here = _Mapped(active, signature, chosen, check_vma)
            with here.entered():
                return compiled(*here.placed(flat_args, in_specs))

    return mapped


class _Mapped:
    """One call of a mapped function: the mesh as it is here, and which of its axes are manual."""

    def __init__(
        self, active: ActiveHelper, signature: CallSignature, chosen: frozenset[str], check_vma: bool
    ) -> None:
        self._active, self._signature, self._check_vma = active, signature, check_vma
        self.mesh = retyped_mesh(active.mesh_helper.mesh)
        self._axes = MeshAxes.of(self.mesh)
        free = [name for name, kind in self._axes.types.items() if kind is not AxisType.Manual]
        with self.entered():
            self._mapped = [name for name in free if is_mapped(self.mesh, name)]
        self._manual = chosen or frozenset(free).difference(self._mapped)
        self._memory = named_sharding(self.mesh, PartitionSpec()).memory_kind
        manual = sorted(self._manual.difference(free))
        mapped = sorted(self._manual.intersection(self._mapped))
        if mapped or (self._mapped and not self._manual):
            axes = ', '.join(map(repr, mapped or self._mapped))
            raise MeshError(
                f'shard_map of {signature.name} inside jax.vmap: a dimension that is mapped is sharded along '
                f'{axes}, which cannot be manual too: name other axes (axis_names=...)'
            )
        if manual or not self._manual:
            raise MeshError(
                f'shard_map of {signature.name} inside shard_map: '
                + (f'{", ".join(map(repr, manual))} is manual already' if manual else 'every axis is manual')
                + ': call the function itself, or name axes that are not (axis_names=...)'
            )

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """A context manager in which the mesh is in force."""
        return mesh_entered(self.mesh, f'shard_map of {self._signature.name}')

    def placed(self, flat_args: Sequence[Any], in_specs: Any) -> Any:
        """The arguments of a call outside of any compiled function, on the devices of the mesh."""
        leaves, treedef = jax.tree.flatten(flat_args)
        shardings = self._inputs(flat_args, leaves, in_specs)
        return jax.tree.unflatten(treedef, map(self._on_mesh, leaves, shardings))

    def call(self, fun: Callable[..., Any], flat_args: Sequence[Any], in_specs: Any, out_specs: Any) -> Any:
        """Runs *fun* on blocks of the arguments."""
        leaves, treedef = jax.tree.flatten(flat_args)
        shardings = self._inputs(flat_args, leaves, in_specs)
        cuts, leaves = (
            [self._cut(sharding.spec) for sharding in shardings],
            self._reshard_all(leaves, shardings),
        )
        run = functools.partial(
            jax.shard_map,
            mesh=self.mesh,
            in_specs=tuple(cuts),
            axis_names=self._manual,
            check_vma=self._check_vma,
        )

        # Compiled, because it is traced twice: to learn what it returns, and to run. JAX finds the first
        # trace again, so that the user's code runs once.
        def body(*blocks: Any) -> Any:
            results = self.on_blocks(fun, jax.tree.unflatten(treedef, blocks))
            where = f'the outputs of {self._signature.name!r} (out_specs)'
            # Raises about leaves that are not arrays.
            resolve(None, results, self.mesh, mode=ResolveMode.BOUNDARY, where=where)
            return results

        body.__name__ = body.__qualname__ = self._signature.name
        compiled = jax.jit(body)

        returned: list[Any] = []

        def look(*blocks: Any) -> tuple[()]:
            returned.append(jax.tree.map(jax.typeof, compiled(*blocks)))
            return ()

        jax.eval_shape(run(look, out_specs=()), *leaves)
        shardings, out_treedef = self._outputs(out_specs, returned[-1])

        def leaves_of(*blocks: Any) -> tuple[Any, ...]:
            return tuple(jax.tree.leaves(compiled(*blocks)))

        leaves_of.__name__ = leaves_of.__qualname__ = self._signature.name  # as JAX's messages call it
        results = run(leaves_of, out_specs=tuple(self._cut(sharding.spec) for sharding in shardings))(*leaves)
        return out_treedef.unflatten(self._reshard_all(results, shardings))

    def on_blocks(self, fun: Callable[..., Any], flat_args: Sequence[Any]) -> Any:
        """The results of *fun* for the blocks of a call."""
        with self._active:
            args, keywords = self._signature.restore(flat_args)
            return fun(*args, **keywords)

    def _inputs(
        self, flat_args: Sequence[Any], leaves: Sequence[Any], in_specs: RuleLike
    ) -> list[NamedSharding]:
        """The shardings of the arguments, leaf by leaf."""
        call = Call(self._signature, flat_args)
        reject_deleted(call)
        where = f'the arguments of {self._signature.name!r} (in_specs)'
        resolutions = resolve_arguments(
            in_specs,
            call,
            self.mesh,
            option='in_specs',
            rest='PartitionSpec() for what every device has whole',
            where=where,
            on_indivisible=self._active.mesh_helper.on_indivisible,
        )
        given = [sharding for resolution in resolutions for sharding in resolution.shardings]
        self._reject_uneven(resolutions, where)
        self._reject([text for each in resolutions for text in each.tree.descriptions], given, where)
        return [
            self._of_type(leaf) if sharding is None else sharding
            for leaf, sharding in zip(leaves, given, strict=True)
        ]

    def _outputs(self, out_specs: RuleLike, outputs: Any) -> tuple[list[NamedSharding], Any]:
        """The shardings of the outputs, leaf by leaf, and their structure.

        Rules see ranks only: the sizes depend on what they answer.
        """
        even = 2 * self._axes.size(tuple(self._axes.sizes))  # divides, and is more than one element
        where = f'the outputs of {self._signature.name!r} (out_specs)'
        resolution = resolve(
            out_specs,
            outputs,
            self.mesh,
            mode=ResolveMode.BOUNDARY,
            where=where,
            as_leaf=lambda leaf: jax.ShapeDtypeStruct((even,) * len(leaf.shape), leaf.dtype),
        )
        self._reject(resolution.tree.descriptions, resolution.shardings, where, outputs=True)
        return [sharding for sharding in resolution.shardings if sharding is not None], resolution.treedef

    def _reject(
        self,
        leaves: Sequence[str],
        shardings: Sequence[NamedSharding | None],
        where: str,
        outputs: bool = False,
    ) -> None:
        """Raises about leaves that cannot be cut into blocks."""
        inferred = not outputs and all(self._axes.types[axis] is AxisType.Explicit for axis in self._manual)
        reject_faults(leaves, shardings, functools.partial(self._fault, inferred=inferred), self.mesh, where)

    def _fault(self, sharding: NamedSharding | None, *, inferred: bool) -> Fault | None:
        """Why an array cannot be cut into blocks; *inferred* where None takes those of its type."""
        if sharding is None:
            return None if inferred else _NO_BLOCKS
        if used := [axis for axis in specs.spec_axes(sharding.spec) if axis in self._mapped]:
            return Fault(
                'mapped-axis',
                f'a dimension that jax.vmap maps is sharded along {used[0]!r} already',
                'name the axes of the other dimensions only, or map an array that is not sharded along this '
                'one.',
            )
        if sharding.memory_kind != self._memory:
            return Fault(
                'memory-kind',
                f'a block cannot be placed in {sharding.memory_kind!r}',
                'give rules without a memory kind, and move arrays outside of shard_map.',
            )
        for entry in specs.entries(sharding.spec):
            for before, after in itertools.pairwise(specs.entry_axes(entry)):
                if before not in self._manual and after in self._manual:
                    return Fault(
                        'manual-order',
                        f'a dimension has {before!r}, which is not manual, before {after!r}, which is',
                        'within a dimension the manual axes (axis_names) come first: blocks are cut before '
                        'the compiler divides them further.',
                    )
        return None

    def _reject_uneven(self, resolutions: Sequence[Resolution], where: str) -> None:
        """Raises about arguments that a policy would leave whole: *fun* is written for blocks."""
        problems = []
        for resolution in resolutions:
            for i, (answer, shape) in enumerate(
                zip(resolution.decisions, resolution.tree.shapes, strict=True)
            ):
                if answer.spec is None:
                    continue
                for dim, names in specs.indivisible(self._cut(answer.spec), shape, self._axes):
                    fault = specs.divisibility_fault(dim, names, shape, self._axes)
                    problems.append(
                        Problem(
                            fault.kind,
                            resolution.tree.describe(i),
                            fault.detail,
                            spec=specs.text(answer.spec),
                            rule=answer.origin,
                            hint='pad or change the array: whatever on_indivisible says, a dimension is not '
                            'left whole along manual axes: every device would compute with all of it.',
                        )
                    )
        if problems:
            raise ShardingError(problems, str(self._axes), where)

    def _cut(self, spec: PartitionSpec) -> PartitionSpec:
        """The manual axes of a spec."""
        kept = specs.only_axes(spec, self._manual)
        return specs.replaced(specs.with_sums(spec, self._manual), specs.entries(kept))

    def _of_type(self, leaf: Any) -> NamedSharding:
        """The sharding that the type of an argument has over Explicit axes."""
        kind = jax.typeof(leaf)
        spec = PartitionSpec(*[specs.UNCONSTRAINED] * len(kind.shape))
        return named_sharding(self.mesh, specs.replaced(kind.sharding.spec, with_types(spec, leaf)))

    def _on_mesh(self, leaf: Any, sharding: NamedSharding) -> Any:
        """The array, moved if JAX would refuse it: from other devices, of another type, of other sums."""
        mesh = self.mesh
        if isinstance(mesh, AbstractMesh) or isinstance(leaf, jax.core.Tracer):
            return leaf
        sums = sharding.spec.unreduced or resharding.unreduced_axes(leaf)
        if not sums and not on_other_devices(leaf, mesh) and is_typed_by(leaf, mesh):
            return leaf
        return resharding.device_put([leaf], [sharding])[0]

    def _reshard_all(self, leaves: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
        """The arrays, with the requested shardings along every axis that JAX does not handle itself."""
        wanted = [
            self._wanted_sharding(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)
        ]
        return apply_shardings(list(leaves), wanted)

    def _wanted_sharding(self, leaf: Any, sharding: NamedSharding) -> NamedSharding | None:
        """The sharding to apply: the type over Explicit axes, and the axes that are not manual."""
        spec = sharding.spec
        own = {*specs.spec_axes(spec), *spec.unreduced, *spec.reduced} - self._manual
        explicit = AxisType.Explicit in self._axes.types.values()
        if not own and not explicit:
            return None
        rank = len(jax.typeof(leaf).shape)
        entries = [*specs.entries(spec), *[None] * rank][:rank]
        now = with_types(PartitionSpec(*[specs.UNCONSTRAINED] * rank), leaf) if explicit else [()] * rank
        # Along Auto axes that are not manual, the compiler decides what the spec leaves open.
        free = specs.UNCONSTRAINED if AxisType.Auto in self._axes.types.values() else ()
        wanted: list[Any] = []
        for entry, has in zip(entries, now, strict=True):
            names = specs.entry_axes(entry)
            if own.isdisjoint(names):
                names = (*names, *[a for a in has if a not in self._manual and a not in own])
            wanted.append(names or free)
        typed = specs.replaced(spec, [() if entry is free else entry for entry in wanted])
        if not own and has_type(leaf, self.mesh, typed):
            return None
        return sharding.update(spec=specs.replaced(spec, wanted))


_users_code = HidingOurs(_Mapped.on_blocks.__code__)
_NO_BLOCKS = Fault(
    'no-sharding',
    'None leaves open into which blocks it is cut',
    'give PartitionSpec() for what every device has whole; only arguments over axes of type Explicit may be '
    'None, which takes their own blocks.',
)


def is_mapped(mesh: Any, axis: str) -> bool:
    """Whether ``jax.vmap`` maps a dimension along an Explicit axis, which ``shard_map`` then refuses."""
    if MeshAxes.of(mesh).types[axis] is not AxisType.Explicit or not is_traced():
        return False
    try:
        jax.eval_shape(jax.shard_map(tuple, mesh=mesh, in_specs=(), out_specs=(), axis_names={axis}))
    except ValueError:
        return True
    return False


def _reject_shape_dependent(name: str, out_specs: RuleLike) -> None:
    """Raises RuleError about rules for outputs whose answers depend on more than paths."""
    for rule in jax.tree.leaves(out_specs, is_leaf=is_rule):
        if isinstance(rule, ShardingRule) and not looks_at_paths_only(rule):
            raise RuleError(
                f'out_specs of {name} (shard_map) holds {rule!r}, which looks at more than paths: the shape '
                'of an output depends on its spec, so the spec cannot depend on the shape. Give '
                'PartitionSpecs, or a TreePathShardingRule of them.'
            )
