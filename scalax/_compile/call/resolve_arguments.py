"""The shardings that rules give the arguments and the outputs of a call."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from scalax._compile.call.call_key import Call, Shardings, committed_elsewhere, is_mismatched, struct_of
from scalax._compile.call.placement import Move, Moves, place
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

# Their types are array types: looking them up would cost time for each leaf.
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
    """The rules of one sjit function, which give the arguments and the outputs of its calls shardings.

    Attributes:
        mesh: the helper's mesh; inside ``auto_axes`` and ``explicit_axes`` of JAX with axes of other types.
        signature: the parameters of the function.
        options: the rules.
        partition_batch: whether to find the batch among the arguments.
        any_explicit: whether some mesh axis is Explicit, so that types hold shardings.
        any_rule: whether an argument has a rule; else JAX only has to know where to run.
        is_wrong: whether a leaf is committed to another sharding than it is asked to have.
        resolutions: what the rules made of a call; None once a call has been looked at for warnings.
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
        self.is_wrong = is_mismatched if self.any_rule else committed_elsewhere
        self.resolutions: list[Resolution] | None = []

    def arguments(self, call: Call) -> Shardings:
        """The shardings of the arguments of a call.

        Raises:
            ShardingError: some leaves cannot be sharded as asked; those of all arguments together.
            StructureError: the rules do not have the structure of the arguments.
        """
        shardings = self._resolved('in_shardings', call, ResolveMode.BOUNDARY)
        if self.any_explicit and not any(shardings) and not any(struct_of(x).sharding for x in call.leaves):
            # JAX cannot know on which devices to run: on all, with the arguments replicated.
            whole = named_sharding(self.mesh, PartitionSpec())
            return [None if _is_immovable(leaf) else whole for leaf in call.leaves]
        return shardings

    def constraints(self, call: Call) -> Shardings | None:
        """The shardings to which the arguments are constrained inside; None without any."""
        if self.options.args_sharding_constraint is None:
            return None
        return self._resolved('args_sharding_constraint', call, ResolveMode.INTERMEDIATE)

    def _resolved(self, option: str, call: Call, mode: ResolveMode) -> Shardings:
        rules = getattr(self.options, option)
        if rules is None:
            return [None] * len(call.leaves)
        resolutions = resolve_arguments(rules, call, self.mesh, option, self._on_indivisible, mode, struct_of)
        if self.resolutions is not None:
            self.resolutions += resolutions
        return [sharding for resolution in resolutions for sharding in resolution.shardings]

    def outputs(self, tree: Any, call: Call, arguments: Shardings) -> list[NamedSharding | None]:
        """The shardings of the outputs, leaf by leaf: those of the rules, then those of donated arguments.

        Args:
            tree: what the function returns, inside its trace.
            call: the call.
            arguments: what `arguments` gave.

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
            if problems := _opaque_with_sharding(resolution):
                raise ShardingError(problems, str(MeshAxes.of(self.mesh)), where)
            if self.resolutions is not None:
                self.resolutions.append(resolution)
            shardings = resolution.shardings
        if call.layout.donated:
            leaves_of, shardings_of = call.by_slot(call.leaves), call.by_slot(arguments)
            donated = [
                ((call.trees[slot], _types(map(struct_of, leaves_of[slot]))), shardings_of[slot])
                for slot in call.layout.donated
                if any(shardings_of[slot])
            ]
            shardings = donated_shardings(structs, treedef, shardings, donated)
        if self.any_explicit and not arguments:
            # Without an argument JAX does not know on which devices to run.
            shardings = [
                given or (None if _is_immovable(leaf) else self._by_type(struct))
                for given, leaf, struct in zip(shardings, leaves, structs, strict=True)
            ]
        return shardings

    def _by_type(self, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else PartitionSpec()
        return named_sharding(self.mesh, spec)


class ReadCall(NamedTuple):
    """A call with the shardings that the rules give its arguments.

    Attributes:
        rules: the rules.
        call: the call.
        shardings: the shardings of its leaves.
        moves: which arguments are moved.
        typed: the call as JAX will see it, with structs for arguments that move; the same call if none does.
        called_before: whether arguments may be outputs of an earlier call.
    """

    rules: FunctionRules
    call: Call
    shardings: Shardings
    moves: Moves
    typed: Call
    called_before: bool

    def placed(self, move: Move) -> Sequence[Any]:
        """The flat arguments where the program takes them."""
        return place(self.call, self.shardings, self.moves, move)


def donated_shardings(
    outputs: Sequence[jax.ShapeDtypeStruct],
    out_tree: Any,
    given: Sequence[NamedSharding | None],
    donated: list[tuple[Any, Shardings]],
) -> list[NamedSharding | None]:
    """Gives outputs without a sharding those of donated arguments.

    The whole output, or a top-level element of it, with exactly the structure, shapes and dtypes of a
    donated argument takes that argument's shardings: only then can XLA reuse the buffers.

    Args:
        outputs: the types of what the function returns.
        out_tree: the structure of it.
        given: the shardings asked for, leaf by leaf.
        donated: of each donated argument its structure with its types, and the shardings of its leaves.
    """
    result, free = list(given), list(donated)
    children = out_tree.children()
    starts = [0, 0, *itertools.accumulate(child.num_leaves for child in children)]
    for start, treedef in zip(starts, [out_tree, *children], strict=False):
        stop = start + treedef.num_leaves
        if start == stop or any(result[start:stop]):
            continue
        kind = treedef, _types(outputs[start:stop])
        match = next((pair for pair in free if pair[0] == kind), None)
        if match:
            free.remove(match)
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
    rest: str = 'None leaves an argument to the compiler',
) -> list[Resolution]:
    """Resolves the rules of every dynamic slot of a call; one error names what is wrong with all of them.

    Args:
        rules: rules in all the forms of ``in_shardings``.
        call: the call.
        mesh: as for `scalax.rules._resolve.resolve`.
        option: the name of the option that the rules are for.
        on_indivisible: as for `resolve`.
        mode: as for `resolve`.
        as_leaf: as for `resolve`.
        rest: what to give for arguments without a sharding, for messages.

    Raises:
        ShardingError: some leaves cannot be sharded as asked.
        StructureError: rules do not have the structure of their arguments.
    """
    resolutions: list[Resolution] = []
    problems: list[Problem] = []
    misfits: list[str] = []
    where = f'the arguments of {call.signature.name!r}{"" if rules is None else f" ({option})"}'
    by_slot = call.signature.rules_by_slot(rules, call.layout, call.flat_args, option, rest)
    for slot, rule in by_slot.items():
        try:
            resolution = resolve(
                rule,
                call.flat_args[slot],
                mesh,
                mode=mode,
                where=where,
                at=call.layout.paths[slot],
                on_indivisible=on_indivisible,
                as_leaf=as_leaf,
            )
            resolutions.append(resolution)
            problems += _opaque_with_sharding(resolution)
        except ShardingError as error:
            problems.extend(error.problems)
        except StructureError as error:
            misfits.append(str(error))
    if misfits:
        raise StructureError('\n'.join(misfits))
    if problems:
        raise ShardingError(problems, str(MeshAxes.of(mesh)), where)
    return resolutions


def _opaque_with_sharding(resolution: Resolution) -> list[Problem]:
    """The problems of leaves that rules give a sharding, and whose types cannot have one."""
    tree, problems = resolution.tree, []
    leaves = tree.original_leaves or tree.leaves
    for i, (leaf, sharding) in enumerate(zip(leaves, resolution.shardings, strict=True)):
        if sharding is None or isinstance(leaf, _ARRAYS) or not is_opaque(kind := type_of(leaf)):
            continue
        name = (kind if isinstance(kind, type) else type(kind)).__name__
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
    """Whether a leaf is no array, or a reference to one, which only its owner moves."""
    return is_reference(leaf) or is_opaque(type_of(leaf))


def _types(leaves: Iterable[jax.ShapeDtypeStruct]) -> list[Any]:
    return [(leaf.shape, leaf.dtype) for leaf in leaves]
