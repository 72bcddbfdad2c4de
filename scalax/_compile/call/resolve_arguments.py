"""Resolution of rules to the shardings of the arguments and the outputs of a call."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from scalax._compile.call.call_key import Call, Shardings, committed_elsewhere, is_mismatched, struct_of
from scalax._compile.call.placement import MoveFunction, ReshardPolicy, place_arguments
from scalax._compile.call.signature import CallSignature
from scalax._core.context.active_helper import MeshOwner
from scalax._core.pytree.partition_specs import MeshAxes, text
from scalax._jax.tracing import is_opaque, is_reference, type_of
from scalax._spmd.options import BatchPartitioning
from scalax._spmd.pipelines.config import Pipeline
from scalax.errors import Problem, ShardingError, StructureError
from scalax.rules._indivisible import OnIndivisible
from scalax.rules._resolve import Resolution, ResolveMode, named_sharding, resolve
from scalax.rules._rule_tree import RuleLike, is_rule

# Leaves of these types have array types. Computing the type of each leaf would be slow.
_ARRAYS = jax.Array | np.ndarray

OnMismatch = Literal['error', 'reshard']


@dataclasses.dataclass(frozen=True, eq=False)
class Options:
    """The options of `MeshShardingHelper.sjit`."""

    in_shardings: RuleLike = None
    out_shardings: RuleLike = None
    static_argnums: int | Iterable[int] | None = None
    static_argnames: str | Iterable[str] | None = None
    donate_argnums: int | Iterable[int] | None = None
    donate_argnames: str | Iterable[str] | None = None
    batch_argnums: int | Iterable[int] | None = None
    batch_argnames: str | Iterable[str] | None = None
    args_sharding_constraint: RuleLike = None
    annotation_shardings: Mapping[str, RuleLike] = dataclasses.field(default_factory=dict)
    on_mismatch: OnMismatch = 'error'
    pipeline: Pipeline | None = None
    partitioning: BatchPartitioning | None = None
    jit_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class FunctionRules:
    """The rules of one sjit function, which determine the shardings of its arguments and outputs.

    Attributes:
        mesh: the helper's mesh. Inside JAX's ``auto_axes`` and ``explicit_axes``, its axes have other types.
        signature: the parameters of the function.
        options: the options of the function, with its rules.
        partition_batch: whether to find the batch among the arguments.
        any_explicit: whether some mesh axis is Explicit, so that types hold shardings.
        any_rule: whether an argument has a rule.
        is_misplaced: whether a leaf is committed to another sharding than the required one.
        resolutions: the resolutions of the first call, for warnings. None once the warnings have been given.
    """

    def __init__(
        self,
        helper: MeshOwner,
        signature: CallSignature,
        options: Options,
        mesh: Mesh | AbstractMesh | None = None,
    ) -> None:
        self.signature, self.options, self.partition_batch = signature, options, helper.partition_batch
        self._on_indivisible = helper.on_indivisible
        self.mesh = helper.mesh if mesh is None else mesh
        self.any_explicit = AxisType.Explicit in self.mesh.axis_types
        rules = jax.tree.leaves(options.in_shardings, is_leaf=is_rule)
        self.any_rule = rules.count(None) < len(rules)
        self.is_misplaced = is_mismatched if self.any_rule else committed_elsewhere
        self.resolutions: list[Resolution] | None = []

    def arguments(self, call: Call) -> Shardings:
        """Resolves the shardings of the arguments of a call.

        Raises:
            ShardingError: some leaves, of any argument, cannot be sharded as the rules specify.
            StructureError: the rules do not have the structure of the arguments.
        """
        shardings = self._resolve('in_shardings', call, ResolveMode.BOUNDARY)
        if self.any_explicit and not any(shardings) and not any(struct_of(x).sharding for x in call.leaves):
            # Without a sharding JAX does not know the devices. Replicated arguments make it use all of them.
            replicated = named_sharding(self.mesh, PartitionSpec())
            return [None if _is_immovable(leaf) else replicated for leaf in call.leaves]
        return shardings

    def constraints(self, call: Call) -> Shardings | None:
        """Resolves the shardings of ``args_sharding_constraint``, or returns None without this option."""
        if self.options.args_sharding_constraint is None:
            return None
        return self._resolve('args_sharding_constraint', call, ResolveMode.INTERMEDIATE)

    def _resolve(self, option: str, call: Call, mode: ResolveMode) -> Shardings:
        rules = getattr(self.options, option)
        if rules is None:
            return [None] * len(call.leaves)
        resolutions = resolve_arguments(rules, call, self.mesh, option, self._on_indivisible, mode, struct_of)
        if self.resolutions is not None:
            self.resolutions += resolutions
        return [sharding for resolution in resolutions for sharding in resolution.shardings]

    def outputs(self, tree: Any, call: Call, arguments: Shardings) -> list[NamedSharding | None]:
        """Resolves the sharding of each leaf of the outputs, by the rules or from a donated argument.

        Args:
            tree: the outputs of the function, inside its trace.
            call: the call.
            arguments: the shardings of the arguments.

        Raises:
            ShardingError, StructureError: as for `arguments`.
        """
        leaves, treedef = jax.tree.flatten(tree)
        shardings: list[NamedSharding | None] = [None] * len(leaves)
        if self.options.out_shardings is None and not call.layout.donated and not self.any_explicit:
            return shardings
        try:
            structs = list(map(struct_of, leaves))
        except TypeError:
            return shardings  # JAX raises about an output that is not an array
        if self.options.out_shardings is not None:
            where = f'the outputs of {self.signature.name!r} (out_shardings)'
            resolution = resolve(
                self.options.out_shardings,
                tree,
                self.mesh,
                mode=ResolveMode.BOUNDARY,
                where=where,
                on_indivisible=self._on_indivisible,
                as_leaf=struct_of,
            )
            if problems := _opaque_leaf_problems(resolution):
                raise ShardingError(problems, str(MeshAxes.of(self.mesh)), where)
            if self.resolutions is not None:
                self.resolutions.append(resolution)
            shardings = resolution.shardings
        if call.layout.donated:
            leaves_of, shardings_of = call.by_slot(call.leaves), call.by_slot(arguments)
            donated = [
                ((call.treedefs[slot], _types(map(struct_of, leaves_of[slot]))), shardings_of[slot])
                for slot in call.layout.donated
                if any(shardings_of[slot])
            ]
            shardings = donated_shardings(structs, treedef, shardings, donated)
        if self.any_explicit and not arguments:
            # Without an argument JAX does not know on which devices to run.
            shardings = [
                sharding or (None if _is_immovable(leaf) else self._sharding_in_type(struct))
                for sharding, leaf, struct in zip(shardings, leaves, structs, strict=True)
            ]
        return shardings

    def _sharding_in_type(self, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else PartitionSpec()
        return named_sharding(self.mesh, spec)


class ResolvedCall(NamedTuple):
    """A call with the shardings that the rules give its arguments.

    Attributes:
        rules: the rules.
        call: the call.
        shardings: the shardings of its leaves.
        policy: which arguments are moved.
        typed: the call with structs in place of the arguments that move. It is *call* itself if none moves.
        called_before: whether arguments may be outputs of an earlier call.
    """

    rules: FunctionRules
    call: Call
    shardings: Shardings
    policy: ReshardPolicy
    typed: Call
    called_before: bool

    def place(self, move: MoveFunction) -> Sequence[Any]:
        """Returns the flat arguments, moved by *move* to the shardings of the program."""
        return place_arguments(self.call, self.shardings, self.policy, move)


def donated_shardings(
    outputs: Sequence[jax.ShapeDtypeStruct],
    out_tree: Any,
    shardings: Sequence[NamedSharding | None],
    donated: list[tuple[Any, Shardings]],
) -> list[NamedSharding | None]:
    """Gives outputs without a sharding the shardings of donated arguments.

    If the entire output, or a top-level element of it, has exactly the structure, shapes and dtypes of a
    donated argument, it gets that argument's shardings, because only then can XLA reuse the buffers.

    Args:
        outputs: the types of the leaves of the outputs.
        out_tree: the tree structure of the outputs.
        shardings: the sharding of each leaf that the rules specify.
        donated: for each donated argument, its structure with its types, and the shardings of its leaves.
    """
    result, unmatched = list(shardings), list(donated)
    children = out_tree.children()
    starts = [0, 0, *itertools.accumulate(child.num_leaves for child in children)]
    for start, treedef in zip(starts, [out_tree, *children], strict=False):
        stop = start + treedef.num_leaves
        if start == stop or any(result[start:stop]):
            continue
        tree_type = treedef, _types(outputs[start:stop])
        match = next((pair for pair in unmatched if pair[0] == tree_type), None)
        if match:
            unmatched.remove(match)
            result[start:stop] = match[1]
    return result


def resolve_arguments(
    rules: RuleLike,
    call: Call,
    mesh: Mesh | AbstractMesh,
    option: str,
    on_indivisible: OnIndivisible,
    mode: ResolveMode = ResolveMode.BOUNDARY,
    as_leaf: Callable[[Any], Any] | None = None,
    *,
    default: str = 'None leaves an argument to the compiler',
) -> list[Resolution]:
    """Resolves the rules of every dynamic slot of a call. One error lists the problems of all slots.

    Args:
        rules: rules in any form that ``in_shardings`` accepts.
        call: the call.
        mesh: as for `scalax.rules._resolve.resolve`.
        option: the name of the option that the rules are for.
        on_indivisible: as for `resolve`.
        mode: as for `resolve`.
        as_leaf: as for `resolve`.
        default: what to write for arguments without a sharding, for messages.

    Raises:
        ShardingError: some leaves cannot be sharded as the rules specify.
        StructureError: rules do not have the structure of their arguments.
    """
    resolutions: list[Resolution] = []
    problems: list[Problem] = []
    structure_errors: list[str] = []
    where = f'the arguments of {call.signature.name!r}{"" if rules is None else f" ({option})"}'
    by_slot = call.signature.rules_by_slot(rules, call.layout, call.flat_args, option, default)
    for slot, rule in by_slot.items():
        try:
            resolution = resolve(
                rule,
                call.flat_args[slot],
                mesh,
                mode=mode,
                where=where,
                prefix=call.layout.paths[slot],
                on_indivisible=on_indivisible,
                as_leaf=as_leaf,
            )
            resolutions.append(resolution)
            problems += _opaque_leaf_problems(resolution)
        except ShardingError as error:
            problems.extend(error.problems)
        except StructureError as error:
            structure_errors.append(str(error))
    if structure_errors:
        raise StructureError('\n'.join(structure_errors))
    if problems:
        raise ShardingError(problems, str(MeshAxes.of(mesh)), where)
    return resolutions


def _opaque_leaf_problems(resolution: Resolution) -> list[Problem]:
    """Returns a problem for each leaf that rules give a sharding although its type cannot have one."""
    tree, problems = resolution.tree, []
    leaves = tree.original_leaves or tree.leaves
    for i, (leaf, sharding) in enumerate(zip(leaves, resolution.shardings, strict=True)):
        if sharding is None or isinstance(leaf, _ARRAYS) or not is_opaque(aval := type_of(leaf)):
            continue
        name = (aval if isinstance(aval, type) else type(aval)).__name__
        problems.append(
            Problem(
                'opaque',
                f'{tree.path_below(tree.prefix, i) or "(the leaf itself)"}: {name}',
                f'{name} is not an array type, so it cannot have a sharding',
                spec=text(sharding.spec),
                rule=resolution.decisions[i].origin,
                hint='give None for tokens, views of references and values of hijax types.',
            )
        )
    return problems


def _is_immovable(leaf: Any) -> bool:
    """Whether a leaf is not an array, or is a reference to an array, which only its owner may move."""
    return is_reference(leaf) or is_opaque(type_of(leaf))


def _types(leaves: Iterable[jax.ShapeDtypeStruct]) -> list[Any]:
    return [(leaf.shape, leaf.dtype) for leaf in leaves]
