"""``jax.shard_map``, with rules in place of specs.

The mesh axes of ``axis_names`` are *manual*: along them the function sees blocks. The manual axes of a
resolved spec become the spec that JAX is given; the others go into the sharding of the whole array, before
and after.
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
from scalax._compile.deferred_jit import called, compiled, placed
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
    """Stands for rules that have not been given: None is a rule."""

    def __repr__(self) -> str:
        return '<required>'


REQUIRED: Any = _Required()


def require_given(**given: RuleLike) -> None:
    """Raises ArgumentError if one of these arguments is `REQUIRED`."""
    for name in [name for name, value in given.items() if value is REQUIRED]:
        raise ArgumentError(f'shard_map needs {name}: a PartitionSpec, a rule, or a tree of them')


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
    signature, helper = CallSignature(fun), active.mesh_helper
    name, what = signature.name, f'shard_map of {signature.name}'
    signature.reject_unknown_names(in_specs, 'in_specs')
    _reject_shape_dependent(name, out_specs)
    names = () if axis_names is None else axis_names
    chosen = spec_validation.validated_axes('axis_names of shard_map', names, MeshAxes.of(helper.mesh))

    def run(flat_args: Sequence[Any]) -> Any:
        call, mesh = Call(signature, flat_args), retyped_mesh(helper.mesh)
        with use_mesh(mesh, what):
            axes = _axes_of(mesh, chosen, what)
            shardings = _arguments(in_specs, call, axes, helper.on_indivisible)
            leaves = _resharded(call.leaves, shardings, axes)
            outputs: list[Any] = []

            def body(*blocks: Any) -> tuple[Any, ...]:
                with active:
                    results = run_user_function(fun, *signature.restore(call.with_leaves(blocks)))
                # Raises about leaves that are not arrays.
                resolve(None, results, mesh, mode=ResolveMode.BOUNDARY, where=_OUTPUTS.format(name))
                outputs.append(jax.tree.map(jax.typeof, results))
                return tuple(jax.tree.leaves(results))

            # Compiled, because it is traced twice: to learn what it returns, and to run. JAX finds the first
            # trace again, so that the user's code runs once.
            on_blocks = compiled(body, name)
            mapped = functools.partial(
                jax.shard_map,
                mesh=mesh,
                in_specs=tuple(axes.cut(sharding.spec) for sharding in shardings),
                axis_names=axes.manual,
                check_vma=check_vma,
            )
            jax.eval_shape(mapped(lambda *blocks: on_blocks(*blocks)[:0], out_specs=()), *leaves)
            shardings, treedef = _outputs(out_specs, outputs[-1], axes, name)
            cuts = tuple(axes.cut(sharding.spec) for sharding in shardings)
            results = mapped(on_blocks, out_specs=cuts)(*leaves)
            return treedef.unflatten(_resharded(results, shardings, axes))

    compiled_run = compiled(run, name)

    def at_once(flat_args: Sequence[Any]) -> Any:
        call, mesh = Call(signature, flat_args), retyped_mesh(helper.mesh)
        meshes.require_devices(helper.mesh, f'a call of {name}')
        with use_mesh(mesh, what):
            axes = _axes_of(mesh, chosen, what)
            # The trace of `run` warns.
            policy: OnIndivisible = 'replicate' if helper.on_indivisible == 'warn' else helper.on_indivisible
            wanted = functools.partial(_arguments, in_specs, call, axes, policy)
            return compiled_run(placed(call, mesh, wanted))

    return called(fun, signature.flatten, run, at_once)


_OUTPUTS = 'the outputs of {!r} (out_specs)'


# The axes --------------------------------------------------------------------------------------------


class _Axes(NamedTuple):
    """The axes of the mesh where a mapped function is called.

    Attributes:
        mesh: the mesh, with the types of axes there.
        manual: those that are manual inside.
    """

    mesh: Any
    manual: frozenset[str]

    def cut(self, spec: PartitionSpec) -> PartitionSpec:
        """The manual axes of a spec."""
        kept = partition_specs.only_axes(spec, self.manual)
        return partition_specs.with_entries(
            partition_specs.only_reduction_axes(spec, self.manual), partition_specs.entries(kept)
        )


def _axes_of(mesh: Any, chosen: Sequence[str], what: str) -> _Axes:
    """The manual axes: those *chosen*, by default all that are free.

    Raises:
        MeshError: there are none, or some cannot be manual.
    """
    free = {name for name, kind in MeshAxes.of(mesh).types.items() if kind is not AxisType.Manual}
    manual = frozenset(chosen) or frozenset(free)
    twice = sorted(manual - free)
    if twice or not manual:
        raise MeshError(
            f'{what} inside shard_map: '
            + (f'{", ".join(map(repr, twice))} is manual already' if twice else 'every axis is manual')
            + ': call the function itself, or name axes that are not (axis_names=...)'
        )
    return _Axes(mesh, manual)


# The shardings of the whole arrays -------------------------------------------------------------------


def _arguments(
    in_specs: RuleLike, call: Call, axes: _Axes, on_indivisible: OnIndivisible
) -> list[NamedSharding]:
    """The shardings of the arguments, leaf by leaf; where the rules leave one open, that of its type."""
    where = f'the arguments of {call.signature.name!r} (in_specs)'
    default = 'PartitionSpec() for replicated arguments'
    if axes.manual.issuperset(axes.mesh.axis_names):
        on_indivisible = 'replicate'  # `_reject_uneven` raises about all of them, and says what helps
    resolutions = resolve_arguments(in_specs, call, axes.mesh, 'in_specs', on_indivisible, default=default)
    _reject_uneven(resolutions, axes, where)
    types = MeshAxes.of(axes.mesh).types
    has_types = all(types[axis] is AxisType.Explicit for axis in axes.manual)
    given = _sound(resolutions, axes, where, may_be_none=has_types)
    return [
        named_sharding(axes.mesh, partition_specs.canonical(jax.typeof(leaf).sharding.spec))
        if to is None
        else to
        for leaf, to in zip(call.leaves, given, strict=True)
    ]


def _outputs(out_specs: RuleLike, types: Any, axes: _Axes, name: str) -> tuple[list[NamedSharding], Any]:
    """The shardings of the outputs, leaf by leaf, and their structure.

    Rules see ranks only: the sizes depend on what they answer.
    """
    even = 2 * axes.mesh.size  # divides, and is more than one element
    where = _OUTPUTS.format(name)
    resolution = resolve(
        out_specs,
        types,
        axes.mesh,
        mode=ResolveMode.BOUNDARY,
        where=where,
        as_leaf=lambda leaf: jax.ShapeDtypeStruct((even,) * len(leaf.shape), leaf.dtype),
    )
    shardings = _sound([resolution], axes, where, may_be_none=False)
    return [sharding for sharding in shardings if sharding is not None], resolution.treedef


def _sound(
    resolutions: Sequence[Resolution], axes: _Axes, where: str, *, may_be_none: bool
) -> list[NamedSharding | None]:
    """The shardings of several trees, leaf by leaf.

    Raises:
        ShardingError: some arrays cannot be cut into blocks so; all such leaves are named.
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
    """Why an array cannot be cut into blocks."""
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
    """Raises about arguments that a policy would leave whole: the function is written for blocks."""
    known, problems = MeshAxes.of(axes.mesh), []
    for resolution in resolutions:
        for i, answer in enumerate(resolution.decisions):
            asked, shape = answer.spec or PartitionSpec(), resolution.tree.shapes[i]
            for dim, names in spec_validation.indivisible_dims(axes.cut(asked), shape, known):
                fault = spec_validation.divisibility_fault(dim, names, shape, known)
                leaf, spec = resolution.tree.describe(i), partition_specs.text(asked)
                problems.append(Problem(fault.kind, leaf, fault.detail, spec, answer.origin, _UNEVEN))
    if problems:
        raise ShardingError(problems, str(known), where)


_UNEVEN = (
    'pad or change the array. on_indivisible does not apply along manual axes: every device would compute '
    'with the entire dimension.'
)


def _reject_shape_dependent(name: str, out_specs: RuleLike) -> None:
    """Raises RuleError about rules for outputs whose answers depend on more than paths."""
    for rule in jax.tree.leaves(out_specs, is_leaf=is_rule):
        if isinstance(rule, ShardingRule) and not looks_at_paths_only(rule):
            raise RuleError(
                f'out_specs of {name} (shard_map) holds {rule!r}, which looks at more than paths: the shape '
                'of an output depends on its spec, so the spec cannot depend on the shape. Give '
                'PartitionSpecs, or a TreePathShardingRule of them.'
            )


def _resharded(leaves: Sequence[Any], shardings: Sequence[NamedSharding], axes: _Axes) -> list[Any]:
    """The arrays, with the requested shardings along every axis that JAX does not handle itself."""
    wanted = [_wanted(leaf, sharding, axes) for leaf, sharding in zip(leaves, shardings, strict=True)]
    return apply_shardings([*leaves], wanted)


def _wanted(leaf: Any, sharding: NamedSharding, axes: _Axes) -> NamedSharding | None:
    """The sharding to apply: the type over Explicit axes, and the axes that are not manual."""
    spec, types = sharding.spec, axes.mesh.axis_types
    own = {*partition_specs.spec_axes(spec), *spec.unreduced, *spec.reduced} - axes.manual
    if not own and AxisType.Explicit not in types:
        return None
    kind = jax.typeof(leaf)
    # Along Auto axes that are not manual, the compiler decides what the spec leaves open.
    free = partition_specs.UNCONSTRAINED if AxisType.Auto in types else ()
    wanted: list[Any] = []
    for entry, has in itertools.zip_longest(
        partition_specs.entries(spec), partition_specs.entries(kind.sharding.spec)
    ):
        names = partition_specs.entry_axes(entry)
        if own.isdisjoint(names):
            names += tuple(
                a for a in partition_specs.entry_axes(has) if a not in axes.manual and a not in own
            )
        wanted.append(names or free)
    typed = partition_specs.with_entries(spec, [() if entry is free else entry for entry in wanted])
    if not own and has_type(leaf, axes.mesh, typed):
        return None
    return sharding.update(spec=partition_specs.with_entries(spec, wanted))
