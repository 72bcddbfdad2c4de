"""How does a function run on each device's own block? ``jax.shard_map``, with rules in place of specs.

The mesh axes of ``axis_names`` are *manual*: along them the function sees blocks. Of what a rule says about
a leaf, the manual axes become the spec that JAX is given; the others go where they belong, into the
sharding of the whole array before and after.
"""

from __future__ import annotations

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
    mesh_in_force,
)
from scalax._trace.contexts import ActiveHelper
from scalax._transforms.calls.argument_shardings import resolve_slots
from scalax._transforms.calls.call_signature import CallSignature
from scalax._transforms.calls.placement import is_typed_by
from scalax._transforms.calls.placement_errors import lies_elsewhere, reject_deleted
from scalax._transforms.tracebacks import arose_below, hide_ours
from scalax._tree import specs
from scalax._tree.specs import MeshAxes
from scalax.errors import ArgumentError, MeshError, Problem, RuleError, ShardingError
from scalax.rules._base import ShardingRule, looks_at_paths_only
from scalax.rules._prefix import RuleLike, is_rule
from scalax.rules._resolve import Resolution, ResolveMode, named_sharding, resolve, with_types


def shard_map(
    active: ActiveHelper,
    fun: Callable[..., Any],
    in_specs: RuleLike,
    out_specs: RuleLike,
    axis_names: Iterable[str] | None,
    check_vma: bool,
) -> Callable[..., Any]:
    """See `MeshShardingHelper.shard_map`, which is documented for users; *active* enters the helper."""
    if not callable(fun):
        raise ArgumentError(f'shard_map takes a function first, got {type(fun).__name__}')
    signature = CallSignature(fun)
    signature.check_names(in_specs, 'in_specs')
    _reject_needy(signature.name, out_specs)
    axes = MeshAxes.of(active.mesh_helper.mesh)
    chosen = specs.chosen_axes('axis_names of shard_map', () if axis_names is None else axis_names, axes)

    def run(*flat_args: Any) -> Any:
        return _Mapped(active, signature, chosen, check_vma).call(fun, flat_args, in_specs, out_specs)

    run.__name__ = run.__qualname__ = signature.name
    compiled = jax.jit(run)

    @functools.wraps(fun)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        flat_args = signature.flatten(args, kwargs)
        try:
            if is_compiled():
                return run(*flat_args)
            here = _Mapped(active, signature, chosen, check_vma)
            with mesh_entered(here.mesh, f'shard_map of {signature.name}'):
                return compiled(*here.placed(flat_args, in_specs))
        except Exception as error:
            if arose_below(error, _Mapped.on_blocks.__code__):
                hide_ours(error)
            raise

    return mapped


class _Mapped:
    """One call of a mapped function: the mesh as it is here, and which of its axes are manual."""

    def __init__(
        self, active: ActiveHelper, signature: CallSignature, chosen: frozenset[str], check_vma: bool
    ) -> None:
        self._active, self._signature, self._check_vma = active, signature, check_vma
        self.mesh = mesh_in_force(active.mesh_helper.mesh)
        self._axes = MeshAxes.of(self.mesh)
        free = [name for name, kind in self._axes.types.items() if kind is not AxisType.Manual]
        with mesh_entered(self.mesh, f'shard_map of {signature.name}'):
            self._mapped = [name for name in free if is_mapped(self.mesh, name)]
        self._manual = chosen or frozenset(free).difference(self._mapped)
        self._memory = named_sharding(self.mesh, PartitionSpec()).memory_kind
        taken, mapped = sorted(self._manual.difference(free)), sorted(self._manual.intersection(self._mapped))
        if mapped or (self._mapped and not self._manual):
            axes = ', '.join(map(repr, mapped or self._mapped))
            raise MeshError(
                f'shard_map of {signature.name} inside jax.vmap: a dimension that is mapped lies along '
                f'{axes}, which cannot be manual too: name other axes (axis_names=...)'
            )
        if taken or not self._manual:
            raise MeshError(
                f'shard_map of {signature.name} inside shard_map: '
                + (f'{", ".join(map(repr, taken))} is manual already' if taken else 'every axis is manual')
                + ': call the function itself, or name axes that are not (axis_names=...)'
            )

    def call(self, fun: Callable[..., Any], flat_args: Sequence[Any], in_specs: Any, out_specs: Any) -> Any:
        """Runs *fun* on blocks of the arguments."""
        with mesh_entered(self.mesh, f'shard_map of {self._signature.name}'):
            return self._call(fun, flat_args, in_specs, out_specs)

    def placed(self, flat_args: Sequence[Any], in_specs: Any) -> Any:
        """The arguments of a call outside of any compiled function, on the devices of the mesh."""
        flat: tuple[list[Any], Any] = jax.tree.flatten(flat_args)
        leaves, treedef = flat
        shardings = self._inputs(flat_args, leaves, in_specs)
        return treedef.unflatten(map(self._on_mesh, leaves, shardings))

    def _call(self, fun: Callable[..., Any], flat_args: Sequence[Any], in_specs: Any, out_specs: Any) -> Any:
        flat: tuple[list[Any], Any] = jax.tree.flatten(flat_args)
        leaves, treedef = flat
        shardings = self._inputs(flat_args, leaves, in_specs)
        cuts, leaves = [self._cut(sharding.spec) for sharding in shardings], self._laid(leaves, shardings)
        run = functools.partial(
            jax.shard_map,
            mesh=self.mesh,
            in_specs=tuple(cuts),
            axis_names=self._manual,
            check_vma=self._check_vma,
        )

        # Compiled, because it is traced twice: to learn what it returns, and to run. JAX runs the user's
        # code only once, since it finds the trace again.
        def body(*blocks: Any) -> Any:
            results = self.on_blocks(fun, treedef.unflatten(blocks))
            where = f'the outputs of {self._signature.name!r} (out_specs)'
            # Names what is no array.
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
        return out_treedef.unflatten(self._laid(results, shardings))

    def on_blocks(self, fun: Callable[..., Any], flat_args: Sequence[Any]) -> Any:
        """What *fun* returns for the blocks of a call."""
        with self._active:
            args, keywords = self._signature.restore(flat_args)
            return fun(*args, **keywords)

    def _inputs(
        self, flat_args: Sequence[Any], leaves: Sequence[Any], in_specs: RuleLike
    ) -> list[NamedSharding]:
        """The shardings of the arguments, leaf by leaf."""
        layout = self._signature.layout_of(flat_args)
        reject_deleted(self._signature, layout, flat_args)
        where = f'the arguments of {self._signature.name!r} (in_specs)'
        by_slot = resolve_slots(
            self._signature.rules_by_slot(
                in_specs, flat_args, 'in_specs', '', 'PartitionSpec() for what every device has whole'
            ),
            layout,
            flat_args,
            mesh=self.mesh,
            mode=ResolveMode.BOUNDARY,
            where=where,
            on_indivisible=self._active.mesh_helper.on_indivisible,
        )
        resolutions = [by_slot[slot] for slot in layout.dynamic]
        said = [sharding for resolution in resolutions for sharding in resolution.shardings]
        self._reject_uneven(resolutions, where)
        self._reject([text for each in resolutions for text in each.tree.descriptions], said, where)
        return [
            self._of_type(leaf) if sharding is None else sharding
            for leaf, sharding in zip(leaves, said, strict=True)
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
        """Raises about the leaves for which it is not known how they are cut."""
        problems = []
        inferred = not outputs and all(self._axes.types[axis] is AxisType.Explicit for axis in self._manual)
        for leaf, sharding in zip(leaves, shardings, strict=True):
            if sharding is None and not inferred:
                problems.append(
                    Problem(
                        'no-sharding',
                        leaf,
                        'None leaves open into which blocks it is cut',
                        hint='give PartitionSpec() for what every device has whole; only arguments over '
                        'axes of type Explicit may be None, which takes their own blocks.',
                    )
                )
            elif sharding is not None and (used := self._mapped_of(sharding.spec)):
                problems.append(
                    Problem(
                        'mapped-axis',
                        leaf,
                        f'a dimension that jax.vmap maps lies along {used!r} already',
                        spec=str(sharding.spec),
                        hint='name the axes of the other dimensions only, or map an array that does not lie '
                        'along this one.',
                    )
                )
            elif sharding is not None and sharding.memory_kind != self._memory:
                problems.append(
                    Problem(
                        'memory-kind',
                        leaf,
                        f'a block cannot be asked to lie in {sharding.memory_kind!r}',
                        hint='give rules without a memory kind, and move arrays outside of shard_map.',
                    )
                )
            elif sharding is not None and (mixed := self._interleaved(sharding.spec)):
                problems.append(
                    Problem(
                        'manual-order',
                        leaf,
                        f'a dimension has {mixed[0]!r}, which is not manual, before {mixed[1]!r}, which is',
                        spec=specs.text(sharding.spec),
                        hint='within a dimension the manual axes (axis_names) come first: blocks are cut '
                        'before the compiler divides them further.',
                    )
                )
        if problems:
            raise ShardingError(problems, str(self._axes), where)

    def _reject_uneven(self, resolutions: Sequence[Resolution], where: str) -> None:
        """Raises about arguments that a policy would leave whole: blocks are what *fun* means."""
        problems = []
        for resolution in resolutions:
            for i, (answer, shape) in enumerate(
                zip(resolution.decisions, resolution.tree.shapes, strict=True)
            ):
                cut = PartitionSpec() if answer.spec is None else self._cut(answer.spec)
                for dim, names in specs.indivisible(cut, shape, self._axes):
                    fault = specs.divisibility_fault(dim, names, shape, self._axes)
                    problems.append(
                        Problem(
                            fault.kind,
                            resolution.tree.describe(i),
                            fault.detail,
                            spec=str(answer.spec),
                            rule=answer.origin,
                            hint='pad or change the array: whatever on_indivisible says, a dimension is not '
                            'left whole along manual axes: every device would compute with all of it.',
                        )
                    )
        if problems:
            raise ShardingError(problems, str(self._axes), where)

    def _mapped_of(self, spec: PartitionSpec) -> str | None:
        """A mesh axis of a spec along which a dimension lies that ``jax.vmap`` maps."""
        return next((axis for axis in specs.spec_axes(spec) if axis in self._mapped), None)

    def _interleaved(self, spec: PartitionSpec) -> tuple[str, str] | None:
        for entry in specs.entries(spec):
            names = specs.entry_axes(entry)
            for before, after in itertools.pairwise(names):
                if before not in self._manual and after in self._manual:
                    return before, after
        return None

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
        """An array on other devices, of another type or parts of other sums, moved: JAX would refuse it."""
        mesh = self.mesh
        if isinstance(mesh, AbstractMesh) or isinstance(leaf, jax.core.Tracer):
            return leaf
        sums = sharding.spec.unreduced or resharding.unreduced_axes(leaf)
        if not sums and not lies_elsewhere(leaf, mesh) and is_typed_by(leaf, mesh):
            return leaf
        return resharding.device_put([leaf], [sharding])[0]

    def _laid(self, leaves: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
        """The arrays, sharded as was asked along every axis that JAX does not see to."""
        wanted = [self._asked(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]
        return apply_shardings(list(leaves), wanted)

    def _asked(self, leaf: Any, sharding: NamedSharding) -> NamedSharding | None:
        """What has to be asked of JAX: the type over Explicit axes, and the axes that are not manual."""
        spec = sharding.spec
        own = {*specs.spec_axes(spec), *spec.unreduced, *spec.reduced} - self._manual
        explicit = AxisType.Explicit in self._axes.types.values()
        if not own and not explicit:
            return None
        rank = len(jax.typeof(leaf).shape)
        entries = [*specs.entries(spec), *[None] * rank][:rank]
        now = with_types(PartitionSpec(*[specs.UNCONSTRAINED] * rank), leaf) if explicit else [()] * rank
        # Along Auto axes that are not manual, what is not spoken of is the compiler's.
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


def is_mapped(mesh: Any, axis: str) -> bool:
    """Whether ``jax.vmap`` maps a dimension along an Explicit axis, which ``shard_map`` then refuses."""
    if MeshAxes.of(mesh).types[axis] is not AxisType.Explicit or not is_traced():
        return False
    try:
        jax.eval_shape(jax.shard_map(tuple, mesh=mesh, in_specs=(), out_specs=(), axis_names={axis}))
    except ValueError:
        return True
    return False


def _reject_needy(name: str, out_specs: RuleLike) -> None:
    """Raises RuleError about rules for outputs whose answers depend on more than paths."""
    for rule in jax.tree.leaves(out_specs, is_leaf=is_rule):
        if isinstance(rule, ShardingRule) and not looks_at_paths_only(rule):
            raise RuleError(
                f'out_specs of {name} (shard_map) holds {rule!r}, which looks at more than paths: the shape '
                'of an output depends on its spec, so the spec cannot depend on the shape. Give '
                'PartitionSpecs, or a TreePathShardingRule of them.'
            )
