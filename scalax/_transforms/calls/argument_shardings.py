"""What shardings do the rules give the arguments and the outputs of a call?"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from scalax._trace.contexts import MeshOwner
from scalax._transforms.calls.call_key import explicit_spec, is_opaque, slot_path, traced_dtype, type_of
from scalax._transforms.calls.call_signature import CallLayout, CallSignature
from scalax._transforms.calls.placement import Shardings
from scalax._tree.paths import join, optional_path
from scalax._tree.specs import MeshAxes, OnIndivisible
from scalax.errors import Problem, ShardingError, StructureError
from scalax.rules._prefix import RuleLike, is_rule
from scalax.rules._resolve import Resolution, ResolveMode, named_sharding, resolve

OnMismatch = Literal['error', 'reshard']


@dataclasses.dataclass(frozen=True, eq=False)
class Options:
    """What the user said to sjit; see `MeshShardingHelper.sjit`."""

    in_shardings: RuleLike = None
    out_shardings: RuleLike = None
    args_sharding_constraint: RuleLike = None
    annotation_shardings: Mapping[str, RuleLike] = dataclasses.field(default_factory=dict)
    on_mismatch: OnMismatch = 'error'
    jit_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


class ArgumentShardings:
    """Resolves the rules of one sjit function for its arguments and outputs.

    Attributes:
        mesh: the helper's mesh; inside `auto_axes` and `explicit_axes` the helper's with axes of other types.
        signature: how the function is called.
        options: the rules.
        any_explicit: whether some mesh axis is Explicit, so that types say how arrays lie.
        any_rule: whether some rule speaks about arguments.
    """

    def __init__(
        self,
        helper: MeshOwner,
        signature: CallSignature,
        options: Options,
        mesh: Mesh | AbstractMesh | None = None,
    ) -> None:
        self._helper, self.signature, self.options = weakref.ref(helper), signature, options
        self.mesh = helper.mesh if mesh is None else mesh
        self.any_explicit = AxisType.Explicit in self.mesh.axis_types
        self.any_rule = any(
            rule is not None for rule in jax.tree.leaves(options.in_shardings, is_leaf=is_rule)
        )

    @property
    def helper(self) -> MeshOwner:
        """Whose mesh it is; whoever calls holds it."""
        helper = self._helper()
        assert helper is not None
        return helper

    def arguments(self, layout: CallLayout, flat_args: Sequence[Any]) -> dict[int, Shardings]:
        """The shardings of every dynamic slot, leaf by leaf.

        Raises:
            ShardingError: some leaves cannot be sharded as asked; those of all arguments together.
            StructureError: the rules do not have the structure of the arguments.
        """
        rules = self.options.in_shardings
        shardings = self._by_slot(rules, layout, flat_args, 'in_shardings', ResolveMode.BOUNDARY)
        if self.any_explicit and not any(map(any, shardings.values())) and _nowhere(layout, flat_args):
            # Nothing says on which devices to run, and JAX cannot know: on all, with all of the arguments.
            whole = named_sharding(self.mesh, PartitionSpec())
            return {
                slot: [None if _stays(leaf) else whole for leaf in jax.tree.leaves(flat_args[slot])]
                for slot in shardings
            }
        return shardings

    def constraints(self, layout: CallLayout, flat_args: Sequence[Any]) -> dict[int, Shardings]:
        """The shardings to which the arguments are constrained inside; empty without any."""
        rules = self.options.args_sharding_constraint
        if rules is None:
            return {}
        return self._by_slot(rules, layout, flat_args, 'args_sharding_constraint', ResolveMode.INTERMEDIATE)

    def _by_slot(
        self, rules: RuleLike, layout: CallLayout, flat_args: Sequence[Any], what: str, mode: ResolveMode
    ) -> dict[int, Shardings]:
        by_slot = resolve_slots(
            self.signature.rules_by_slot(rules, flat_args, what),
            layout,
            flat_args,
            mesh=self.mesh,
            mode=mode,
            where=f'the arguments of {self.signature.name!r} ({what})',
            on_indivisible=self.helper.on_indivisible,
            as_leaf=_struct,
        )
        return {slot: resolution.shardings for slot, resolution in by_slot.items()}

    def outputs(
        self,
        tree: Any,
        layout: CallLayout,
        flat_args: Sequence[Any],
        arguments: Mapping[int, Shardings],
    ) -> list[NamedSharding | None]:
        """The shardings of the outputs, leaf by leaf: what the rules say, then what donation asks for.

        Args:
            tree: what the function returns, inside its trace.
            layout: the slots.
            flat_args: the call.
            arguments: what `arguments` gave.

        Raises:
            ShardingError, StructureError: as for `arguments`.
        """
        leaves, treedef = jax.tree.flatten(tree)
        shardings: list[NamedSharding | None] = [None] * len(leaves)
        try:
            structs = list(map(_struct, leaves))
        except TypeError:
            return shardings  # JAX says what is wrong with an output that is no array
        if self.options.out_shardings is not None:
            where = f'the outputs of {self.signature.name!r} (out_shardings)'
            resolution = resolve(
                self.options.out_shardings,
                tree,
                self.mesh,
                mode=ResolveMode.BOUNDARY,
                where=where,
                on_indivisible=self.helper.on_indivisible,
                as_leaf=_struct,
            )
            if problems := _of_no_arrays(resolution, tree, None):
                raise ShardingError(problems, str(MeshAxes.of(self.mesh)), where)
            shardings = resolution.shardings
        donated = [(flat_args[slot], arguments[slot]) for slot in layout.donated]
        if any(any(wanted) for _, wanted in donated):
            shardings = donated_shardings(structs, treedef, shardings, donated)
        if self.any_explicit and not any(map(len, arguments.values())):
            # Without an argument JAX does not know on which devices to run.
            shardings = [
                given or (None if _stays(leaf) else self._by_type(struct))
                for given, leaf, struct in zip(shardings, leaves, structs, strict=True)
            ]
        return shardings

    def _by_type(self, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else PartitionSpec()
        return named_sharding(self.mesh, spec)


def resolve_slots(
    rules: Mapping[int, RuleLike],
    layout: CallLayout,
    flat_args: Sequence[Any],
    *,
    mesh: Mesh | AbstractMesh,
    mode: ResolveMode,
    where: str,
    on_indivisible: OnIndivisible,
    as_leaf: Callable[[Any], Any] | None = None,
) -> dict[int, Resolution]:
    """Resolves the rules of every dynamic slot of a call; what is wrong is said of all together.

    Args:
        rules: the rules of each dynamic slot.
        layout: the slots.
        flat_args: the call.
        mesh: see `scalax.rules._resolve.resolve`, as for those that follow.
        mode: see above.
        where: see above.
        on_indivisible: see above.
        as_leaf: see above.

    Raises:
        ShardingError: some leaves cannot be sharded as asked.
        StructureError: rules do not have the structure of their arguments.
    """
    by_slot: dict[int, Resolution] = {}
    problems: list[Problem] = []
    misfits: list[str] = []
    for slot in layout.dynamic:
        try:
            by_slot[slot] = resolve(
                rules[slot],
                flat_args[slot],
                mesh,
                mode=mode,
                where=where,
                at=slot_path(layout, slot),
                on_indivisible=on_indivisible,
                as_leaf=as_leaf,
            )
            problems += _of_no_arrays(by_slot[slot], flat_args[slot], slot_path(layout, slot))
        except ShardingError as error:
            problems.extend(error.problems)
        except StructureError as error:
            misfits.append(str(error))
    if misfits:
        raise StructureError('\n'.join(misfits))
    if problems:
        raise ShardingError(problems, str(MeshAxes.of(mesh)), where)
    return by_slot


def donated_shardings(
    outputs: Sequence[jax.ShapeDtypeStruct],
    out_tree: Any,
    given: Sequence[NamedSharding | None],
    donated: Sequence[tuple[Any, Shardings]],
) -> list[NamedSharding | None]:
    """Gives outputs that nobody spoke about the shardings of donated arguments.

    The whole output, or a top-level element of it, with exactly the structure, shapes and dtypes of a
    donated argument takes that argument's shardings: only then can XLA reuse the buffers.

    Args:
        outputs: the types of what the function returns.
        out_tree: the structure of it.
        given: the shardings asked for, leaf by leaf.
        donated: each donated argument with the shardings of its leaves.
    """
    result = list(given)
    free = []
    for tree, shardings in donated:
        leaves, treedef = jax.tree.flatten(tree)
        if any(shardings):
            free.append(((treedef, _types(map(_struct, leaves))), shardings))
    for start, treedef in _elements(out_tree):
        stop = start + treedef.num_leaves
        if start == stop or any(result[start:stop]):
            continue
        kind = treedef, _types(outputs[start:stop])
        match = next((pair for pair in free if pair[0] == kind), None)
        if match:
            free.remove(match)
            result[start:stop] = match[1]
    return result


def _elements(treedef: Any) -> list[tuple[int, Any]]:
    """A structure and its top-level elements, each with the number of its first leaf."""
    elements = [(0, treedef)]
    start = 0
    for child in treedef.children():
        elements.append((start, child))
        start += child.num_leaves
    return elements


def _types(leaves: Iterable[jax.ShapeDtypeStruct]) -> list[Any]:
    return [(leaf.shape, leaf.dtype) for leaf in leaves]


def _nowhere(layout: CallLayout, flat_args: Sequence[Any]) -> bool:
    """Whether no argument has a type that says where it lies."""
    return all(
        _struct(leaf).sharding is None for slot in layout.dynamic for leaf in jax.tree.leaves(flat_args[slot])
    )


def _of_no_arrays(resolution: Resolution, tree: Any, at: str | None) -> list[Problem]:
    """What is wrong where rules give shardings to what is no array."""
    if not any(is_opaque(type_of(leaf)) for leaf in jax.tree.leaves(tree)):
        return []
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    problems = []
    for (path, leaf), answer, sharding in zip(flat, resolution.decisions, resolution.shardings, strict=True):
        kind = type_of(leaf)
        if sharding is not None and is_opaque(kind):
            name = (kind if isinstance(kind, type) else type(kind)).__name__
            problems.append(
                Problem(
                    'no-array',
                    f'{join(at, optional_path(path)) or "(the leaf itself)"}: {name}',
                    f'{name} is no type of arrays, and has no sharding',
                    spec=str(sharding.spec),
                    rule=answer.origin,
                    hint='give None for what is no array.',
                )
            )
    return problems


def _stays(leaf: Any) -> bool:
    """Whether a leaf is no array, or a reference to one, which nobody but its owner moves."""
    return isinstance(leaf, jax.Ref) or is_opaque(type_of(leaf))


def _struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """A leaf without its data: rules see shapes and dtypes, and where types say that they lie."""
    kind = type_of(leaf)
    if is_opaque(kind):
        return jax.ShapeDtypeStruct((), bool)
    sharding = getattr(kind, 'sharding', None)
    if explicit_spec(sharding) is None:
        sharding = None  # not part of the type: calls that lie otherwise share what rules say
    return jax.ShapeDtypeStruct(kind.shape, traced_dtype(kind), sharding=sharding)
