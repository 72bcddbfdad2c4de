"""``jax.shard_map`` with rules in place of specs.

The mesh axes of ``axis_names`` are *manual*: along them the function sees local shards. The manual axes of a
resolved spec become JAX's ``in_specs`` and ``out_specs``. The other axes become shardings of the global
arrays, before and after the mapped function.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from scalax._compile.call.call_key import Call
from scalax._compile.call.resolve_arguments import resolve_arguments
from scalax._compile.call.signature import CallSignature
from scalax._compile.deferred_jit import defer_jit, jit_with_name, place_on_mesh
from scalax._compile.tracebacks import run_user_function
from scalax._core.context.active_helper import ActiveHelper
from scalax._core.context.constraints import apply_shardings, has_type, retyped_mesh, use_mesh
from scalax._core.mesh import meshes
from scalax._core.pytree import partition_specs, spec_validation
from scalax._core.pytree.partition_specs import MeshAxes
from scalax._core.pytree.spec_validation import Fault
from scalax.errors import ArgumentError, MeshError, Problem, RuleError, ShardingError
from scalax.rules._indivisible import OnIndivisible
from scalax.rules._resolve import Resolution, ResolveMode, named_sharding, resolve
from scalax.rules._rule import ShardingRule, looks_at_paths_only
from scalax.rules._rule_tree import RuleLike, is_rule


class _Required:
    """The default of a required argument for rules. None cannot be the default, because it is a rule."""

    def __repr__(self) -> str:
        return '<required>'


REQUIRED: Any = _Required()


def reject_missing(**arguments: RuleLike) -> None:
    """Raises ArgumentError if one of these arguments is `REQUIRED`."""
    for name in [name for name, value in arguments.items() if value is REQUIRED]:
        raise ArgumentError(f'shard_map needs {name}: a PartitionSpec, a rule, or a tree of them')


def shard_map(
    active: ActiveHelper,
    fun: Callable[..., Any],
    in_specs: RuleLike,
    out_specs: RuleLike,
    axis_names: Iterable[str] | None,
    check_vma: bool,
) -> Callable[..., Any]:
    """Implements `MeshShardingHelper.shard_map`. *active* is a context manager that activates the helper."""
    if not callable(fun):
        raise ArgumentError(f'shard_map takes a function first, got {type(fun).__name__}')
    signature, helper = CallSignature(fun), active.mesh_helper
    name, label = signature.name, f'shard_map of {signature.name}'
    signature.reject_unknown_names(in_specs, 'in_specs')
    _reject_shape_dependent(name, out_specs)
    names = () if axis_names is None else axis_names
    chosen = spec_validation.validated_axes('axis_names of shard_map', names, MeshAxes.of(helper.mesh))

    def run(flat_args: Sequence[Any]) -> Any:
        call, mesh = Call(signature, flat_args), retyped_mesh(helper.mesh)
        with use_mesh(mesh, label):
            axes = _axes_of(mesh, chosen, label)
            shardings = _argument_shardings(in_specs, call, axes, helper.on_indivisible)
            leaves = _reshard(call.leaves, shardings, axes)
            output_types: list[Any] = []

            def body(*shards: Any) -> tuple[Any, ...]:
                with active:
                    results = run_user_function(fun, *signature.restore(call.with_leaves(shards)))
                # Raises about leaves that are not arrays.
                resolve(None, results, mesh, mode=ResolveMode.BOUNDARY, where=_OUTPUTS.format(name))
                output_types.append(jax.tree.map(jax.typeof, results))
                return tuple(jax.tree.leaves(results))

            # The body is traced twice, to determine its outputs and to run. It is jitted so that JAX finds
            # the first trace again, and the user's code runs only once.
            jitted_body = jit_with_name(body, name)
            mapped = functools.partial(
                jax.shard_map,
                mesh=mesh,
                in_specs=tuple(axes.manual_spec(sharding.spec) for sharding in shardings),
                axis_names=axes.manual,
                check_vma=check_vma,
            )
            jax.eval_shape(mapped(lambda *shards: jitted_body(*shards)[:0], out_specs=()), *leaves)
            shardings, treedef = _output_shardings(out_specs, output_types[-1], axes, name)
            manual_specs = tuple(axes.manual_spec(sharding.spec) for sharding in shardings)
            results = mapped(jitted_body, out_specs=manual_specs)(*leaves)
            return treedef.unflatten(_reshard(results, shardings, axes))

    jitted_run = jit_with_name(run, name)

    def run_jitted(flat_args: Sequence[Any]) -> Any:
        call, mesh = Call(signature, flat_args), retyped_mesh(helper.mesh)
        meshes.require_devices(helper.mesh, f'a call of {name}')
        with use_mesh(mesh, label):
            axes = _axes_of(mesh, chosen, label)
            # With the policy 'warn', the trace of `run` gives the warning.
            policy: OnIndivisible = 'replicate' if helper.on_indivisible == 'warn' else helper.on_indivisible
            resolve_shardings = functools.partial(_argument_shardings, in_specs, call, axes, policy)
            return jitted_run(place_on_mesh(call, mesh, resolve_shardings))

    return defer_jit(fun, signature.flatten, run, run_jitted)


_OUTPUTS = 'the outputs of {!r} (out_specs)'


# The axes --------------------------------------------------------------------------------------------


class _Axes(NamedTuple):
    """The mesh of a call, and its manual axes.

    Attributes:
        mesh: the mesh, with the axis types of the caller.
        manual: the axes that are manual inside of the mapped function.
    """

    mesh: Any
    manual: frozenset[str]

    def manual_spec(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns the spec with its manual axes only."""
        only_manual = partition_specs.only_axes(spec, self.manual)
        return partition_specs.with_entries(
            partition_specs.only_reduction_axes(spec, self.manual), partition_specs.entries(only_manual)
        )


def _axes_of(mesh: Any, chosen: Sequence[str], label: str) -> _Axes:
    """Returns the mesh with its manual axes: the axes *chosen*, or all axes that are not manual already.

    Raises:
        MeshError: no axis is left, or some of the chosen axes are manual already.
    """
    free = {name for name, axis_type in MeshAxes.of(mesh).types.items() if axis_type is not AxisType.Manual}
    manual = frozenset(chosen) or frozenset(free)
    already_manual = ', '.join(map(repr, sorted(manual - free)))
    if already_manual or not manual:
        raise MeshError(
            f'{label} inside shard_map: '
            + (f'{already_manual} is manual already' if already_manual else 'every axis is manual')
            + ': call the function itself, or name axes that are not (axis_names=...)'
        )
    return _Axes(mesh, manual)


# The shardings of the global arrays ------------------------------------------------------------------


def _argument_shardings(
    in_specs: RuleLike, call: Call, axes: _Axes, on_indivisible: OnIndivisible
) -> list[NamedSharding]:
    """Returns the sharding of each leaf of the arguments, by the rules or, if they give None, by its type."""
    where = f'the arguments of {call.signature.name!r} (in_specs)'
    default = 'PartitionSpec() for replicated arguments'
    if axes.manual.issuperset(axes.mesh.axis_names):
        on_indivisible = 'replicate'  # `_reject_uneven` raises about all indivisible dimensions
    resolutions = resolve_arguments(in_specs, call, axes.mesh, 'in_specs', on_indivisible, default=default)
    _reject_uneven(resolutions, axes, where)
    types = MeshAxes.of(axes.mesh).types
    has_types = all(types[axis] is AxisType.Explicit for axis in axes.manual)
    shardings = _validated_shardings(resolutions, axes, where, may_be_none=has_types)
    return [
        named_sharding(axes.mesh, partition_specs.canonical(jax.typeof(leaf).sharding.spec))
        if sharding is None
        else sharding
        for leaf, sharding in zip(call.leaves, shardings, strict=True)
    ]


def _output_shardings(
    out_specs: RuleLike, types: Any, axes: _Axes, name: str
) -> tuple[list[NamedSharding], Any]:
    """Returns the sharding of each leaf of the outputs, and their tree structure.

    Rules see the ranks of the outputs only, because the sizes of the global arrays depend on the shardings.
    """
    even_size = 2 * axes.mesh.size  # divisible by all mesh axes, and is more than one element
    where = _OUTPUTS.format(name)
    resolution = resolve(
        out_specs,
        types,
        axes.mesh,
        mode=ResolveMode.BOUNDARY,
        where=where,
        as_leaf=lambda leaf: jax.ShapeDtypeStruct((even_size,) * len(leaf.shape), leaf.dtype),
    )
    shardings = _validated_shardings([resolution], axes, where, may_be_none=False)
    return [sharding for sharding in shardings if sharding is not None], resolution.treedef


def _validated_shardings(
    resolutions: Sequence[Resolution], axes: _Axes, where: str, *, may_be_none: bool
) -> list[NamedSharding | None]:
    """Returns the sharding of each leaf of several trees.

    Raises:
        ShardingError: some arrays cannot be split into local shards. The error lists all such leaves.
    """
    problems = []
    for resolution in resolutions:
        for i, sharding in enumerate(resolution.shardings):
            fault = (None if may_be_none else _NO_BLOCKS) if sharding is None else _fault(sharding, axes)
            if fault is not None:
                spec = '' if sharding is None else partition_specs.text(sharding.spec)
                leaf = resolution.tree.describe(i)
                problems.append(Problem(fault.kind, leaf, fault.detail, spec=spec, hint=fault.hint))
    if problems:
        raise ShardingError(problems, str(MeshAxes.of(axes.mesh)), where)
    return [sharding for resolution in resolutions for sharding in resolution.shardings]


def _fault(sharding: NamedSharding, axes: _Axes) -> Fault | None:
    """Returns why an array cannot be split into local shards, or None."""
    for entry in partition_specs.entries(sharding.spec):
        for before, after in itertools.pairwise(partition_specs.entry_axes(entry)):
            if before not in axes.manual and after in axes.manual:
                return Fault(
                    'manual-order',
                    f'a dimension has {before!r}, which is not manual, before {after!r}, which is',
                    'within a dimension the manual axes (axis_names) come first: blocks are cut before the '
                    'compiler divides them further.',
                )
    if sharding.memory_kind == named_sharding(sharding.mesh, PartitionSpec()).memory_kind:
        return None
    return Fault(
        'memory-kind',
        f'a block cannot be placed in {sharding.memory_kind!r}',
        'give rules without a memory kind, and move arrays outside of shard_map.',
    )


_NO_BLOCKS = Fault(
    'no-sharding',
    'None does not determine the blocks',
    'give PartitionSpec() for replicated arguments; only arguments over axes of type Explicit may be None, '
    'which takes their own blocks.',
)


def _reject_uneven(resolutions: Sequence[Resolution], axes: _Axes, where: str) -> None:
    """Raises about arguments that a policy would replicate, because the function expects local shards."""
    mesh_axes, problems = MeshAxes.of(axes.mesh), []
    for resolution in resolutions:
        for i, answer in enumerate(resolution.decisions):
            answer_spec, shape = answer.spec or PartitionSpec(), resolution.tree.shapes[i]
            for dim, names in spec_validation.indivisible_dims(
                axes.manual_spec(answer_spec), shape, mesh_axes
            ):
                fault = spec_validation.divisibility_fault(dim, names, shape, mesh_axes)
                leaf, spec = resolution.tree.describe(i), partition_specs.text(answer_spec)
                problems.append(Problem(fault.kind, leaf, fault.detail, spec, answer.origin, _UNEVEN))
    if problems:
        raise ShardingError(problems, str(mesh_axes), where)


_UNEVEN = (
    'pad or change the array. on_indivisible does not apply along manual axes: every device would compute '
    'with the entire dimension.'
)


def _reject_shape_dependent(name: str, out_specs: RuleLike) -> None:
    """Raises RuleError about rules for outputs whose answers depend on more than leaf paths."""
    for rule in jax.tree.leaves(out_specs, is_leaf=is_rule):
        if isinstance(rule, ShardingRule) and not looks_at_paths_only(rule):
            raise RuleError(
                f'out_specs of {name} (shard_map) holds {rule!r}, which looks at more than paths: the shape '
                'of an output depends on its spec, so the spec cannot depend on the shape. Give '
                'PartitionSpecs, or a TreePathShardingRule of them.'
            )


def _reshard(leaves: Sequence[Any], shardings: Sequence[NamedSharding], axes: _Axes) -> list[Any]:
    """Reshards global arrays along the axes that ``jax.shard_map`` does not handle."""
    targets = [_target(leaf, sharding, axes) for leaf, sharding in zip(leaves, shardings, strict=True)]
    return apply_shardings([*leaves], targets)


def _target(leaf: Any, sharding: NamedSharding, axes: _Axes) -> NamedSharding | None:
    """Returns the sharding to apply to a global array, or None if ``jax.shard_map`` applies all of it.

    It is needed over Explicit axes, where it is part of the type, and over axes that are not manual.
    """
    spec, types = sharding.spec, axes.mesh.axis_types
    not_manual = {*partition_specs.spec_axes(spec), *spec.unreduced, *spec.reduced} - axes.manual
    if not not_manual and AxisType.Explicit not in types:
        return None
    type_spec = jax.typeof(leaf).sharding.spec
    # Along Auto axes that are not manual, the compiler shards the dimensions that the spec leaves open.
    free = partition_specs.UNCONSTRAINED if AxisType.Auto in types else ()
    target: list[Any] = []
    for entry, type_entry in itertools.zip_longest(
        partition_specs.entries(spec), partition_specs.entries(type_spec)
    ):
        names = partition_specs.entry_axes(entry)
        if not_manual.isdisjoint(names):
            names += tuple(
                axis
                for axis in partition_specs.entry_axes(type_entry)
                if axis not in axes.manual and axis not in not_manual
            )
        target.append(names or free)
    typed = partition_specs.with_entries(spec, [() if entry is free else entry for entry in target])
    if not not_manual and has_type(leaf, axes.mesh, typed):
        return None
    return sharding.update(spec=partition_specs.with_entries(spec, target))
