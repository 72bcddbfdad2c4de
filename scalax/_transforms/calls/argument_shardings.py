"""The shardings that rules give the arguments and the outputs of a call."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from scalax._follow.trail import LOST, along, of_sharding, without
from scalax._follow.types import Arguments
from scalax._trace.constraints import is_in_types
from scalax._trace.contexts import MeshOwner
from scalax._transforms.calls.call_key import Call, is_opaque, traced_dtype, type_of
from scalax._transforms.calls.call_signature import EXTRA_KEYWORDS, CallSignature
from scalax._transforms.calls.placement import Shardings
from scalax._tree.specs import Fault, MeshAxes, spec_axes, text
from scalax.errors import ArgumentError, Problem, ShardingError, StructureError
from scalax.rules._indivisible import OnIndivisible
from scalax.rules._prefix import RuleLike, is_rule
from scalax.rules._resolve import Resolution, ResolveMode, named_sharding, resolve

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
    jit_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class ArgumentShardings:
    """Resolves the rules of one sjit function for its arguments and outputs.

    Attributes:
        mesh: the helper's mesh; inside `auto_axes` and `explicit_axes` the helper's with axes of other types.
        signature: the parameters of the function.
        options: the rules.
        any_explicit: whether some mesh axis is Explicit, so that types hold shardings.
        any_rule: whether an argument has a rule.
    """

    def __init__(
        self,
        helper: MeshOwner,
        signature: CallSignature,
        options: Options,
        mesh: Mesh | AbstractMesh | None = None,
    ) -> None:
        self._helper, self.signature, self.options = weakref.ref(helper), signature, options
        self._on_indivisible = helper.on_indivisible
        self.mesh = helper.mesh if mesh is None else mesh
        self.any_explicit = AxisType.Explicit in self.mesh.axis_types
        rules = jax.tree.leaves(options.in_shardings, is_leaf=is_rule)
        self.any_rule = rules.count(None) < len(rules)

    @property
    def helper(self) -> MeshOwner:
        """The helper of the mesh. Callers hold it."""
        helper = self._helper()
        assert helper is not None
        return helper

    def arguments(self, call: Call) -> dict[int, Shardings]:
        """The shardings of every dynamic slot, leaf by leaf.

        Raises:
            ShardingError: some leaves cannot be sharded as asked; those of all arguments together.
            StructureError: the rules do not have the structure of the arguments.
        """
        shardings = self._by_slot(self.options.in_shardings, call, 'in_shardings', ResolveMode.BOUNDARY)
        if self.any_explicit and not any(map(any, shardings.values())) and _no_leaf_has_sharding(call):
            # JAX cannot know on which devices to run: on all, with the arguments replicated.
            whole = named_sharding(self.mesh, PartitionSpec())
            return {
                slot: [
                    None if _is_immovable(leaf) else whole for leaf in jax.tree.leaves(call.flat_args[slot])
                ]
                for slot in shardings
            }
        return shardings

    def constraints(self, call: Call) -> dict[int, Shardings]:
        """The shardings to which the arguments are constrained inside; empty without any."""
        rules = self.options.args_sharding_constraint
        if rules is None:
            return {}
        return self._by_slot(rules, call, 'args_sharding_constraint', ResolveMode.INTERMEDIATE)

    def followed(self, call: Call, shardings: Mapping[int, Shardings]) -> Arguments | None:
        """What is followed through the function; None if there is no batch.

        Args:
            call: the call.
            shardings: those of the arguments, or those to which they are constrained inside.

        Raises:
            ArgumentError: an argument that is said to be a batch has no sharding, or no such argument is
                there.
        """
        if self.any_explicit:  # types say where values are
            return None
        rows = self._holding_rows(call)
        if self.signature.says_batch:
            self.signature.reject_no_batch(call.flat_args)
            self._reject_unsharded(call, rows, shardings)
        return self._arguments(call, shardings, rows)

    def batch(self, call: Call, shardings: Mapping[int, Shardings]) -> Arguments | None:
        """What would be followed through the function, were it not switched off.

        Args:
            call: the call.
            shardings: as for `followed`.
        """
        if self.any_explicit:
            return None
        return self._arguments(call, shardings, self._holding_rows(call) or self._found_to_hold_rows(call))

    def why_not_followed(self, call: Call) -> str:
        """Why there is no batch to follow; empty if nothing looks like one."""
        if self.any_explicit:
            return 'on Explicit mesh axes, types say where values are'
        if jax.config.jax_disable_jit:
            return 'jax.disable_jit is in force'
        if self.signature.says_no_batch:
            return 'batch_argnums=() switches it off'
        if self.signature.says_batch:
            return 'no array of what is said to be one is on several devices'
        if self._found_to_hold_rows(call):
            return '' if self.helper.follow_batch else 'follow_batch=False of the helper switches it off'
        by_specs, others = self._placed_by_specs(call)
        sharded = [rules for rules in by_specs.values() if any(map(any, map(_spec, rules)))]
        if len(sharded) > 1 and not others:
            return 'specs place all arguments, and batch_argnums does not say which of them is the batch'
        return ''

    def _arguments(
        self, call: Call, shardings: Mapping[int, Shardings], rows: set[tuple[int, int]]
    ) -> Arguments | None:
        """What is known of the arguments if these leaves hold rows; None if no mesh axis shards them."""
        leaves = [
            ((slot, i), np.ndim(leaf), sharding)
            for slot in call.layout.dynamic
            for i, (leaf, sharding) in enumerate(
                zip(jax.tree.leaves(call.flat_args[slot]), shardings[slot], strict=True)
            )
        ]
        trails = [of_sharding(sharding, ndim) for _, ndim, sharding in leaves]
        holding = [place in rows for place, _, _ in leaves]
        batch = [trail for trail, holds in zip(trails, holding, strict=True) if holds]
        axes = frozenset(axis for trail in batch for axes in trail for axis in axes)
        if not axes:
            return None
        others = [without(trail, axes) for trail in trails]
        return Arguments(
            [mine if holds else other for mine, other, holds in zip(trails, others, holding, strict=True)],
            [LOST if holds else along(trail, axes) for trail, holds in zip(trails, holding, strict=True)],
            axes,
            placed=all(sharding is not None or not ndim for _, ndim, sharding in leaves),
        )

    def _holding_rows(self, call: Call) -> set[tuple[int, int]]:
        """The leaves that hold rows of the batch: slot and number.

        Unless the user says which: those whose rules are specs, where another argument has a rule that looks
        at paths or shapes, and that are not donated. State is placed by rules, or donated.
        """
        signature, layout = self.signature, call.layout
        if not signature.says_batch:
            return self._found_to_hold_rows(call) if self.helper.follow_batch else set()
        return {
            (slot, i)
            for slot in layout.dynamic
            for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(call.flat_args[slot]))
            if layout.slots[slot].batch
            or (
                layout.slots[slot].name == EXTRA_KEYWORDS
                and getattr(path[0], 'key', None) in signature.batch_keywords
            )
        }

    def _found_to_hold_rows(self, call: Call) -> set[tuple[int, int]]:
        """The leaves that hold rows as far as the rules tell."""
        by_specs, others = self._placed_by_specs(call)
        slots = [slot for slot in by_specs if others and not call.layout.slots[slot].donated]
        return {(slot, i) for slot in slots for i, _ in enumerate(jax.tree.leaves(call.flat_args[slot]))}

    def _placed_by_specs(self, call: Call) -> tuple[dict[int, list[Any]], list[int]]:
        """The slots that specs alone place, with these, and the slots that other rules do."""
        outside = self._rules_given(self.options.in_shardings, call)
        inside = self._rules_given(self.options.args_sharding_constraint, call)
        given = {slot: [*outside[slot], *inside[slot]] for slot in outside}
        by_specs = {
            slot: rules
            for slot, rules in given.items()
            if rules and all(isinstance(rule, PartitionSpec | NamedSharding) for rule in rules)
        }
        return by_specs, [slot for slot, rules in given.items() if rules and slot not in by_specs]

    def _rules_given(self, rules: RuleLike, call: Call) -> dict[int, list[Any]]:
        """The rules and specs that an option gives each dynamic slot."""
        if rules is None:
            return {slot: [] for slot in call.layout.dynamic}
        by_slot = self.signature.rules_by_slot(rules, call.layout, call.flat_args, '', '')
        return {
            slot: [each for each in jax.tree.leaves(rule, is_leaf=is_rule) if each is not None]
            for slot, rule in by_slot.items()
        }

    def _spec_given_but_indivisible(self, call: Call, slot: int) -> bool:
        """Whether a spec shards an argument that nothing shards: its rows do not divide, and need not."""
        outside = self._rules_given(self.options.in_shardings, call)[slot]
        given = self._rules_given(self.options.args_sharding_constraint, call)[slot] or outside
        return any(
            isinstance(each, PartitionSpec | NamedSharding)
            and spec_axes(each.spec if isinstance(each, NamedSharding) else each)
            for each in given
        )

    def _reject_unsharded(
        self, call: Call, rows: set[tuple[int, int]], shardings: Mapping[int, Shardings]
    ) -> None:
        for slot in sorted({slot for slot, _ in rows}):
            given = [shardings[slot][i] for s, i in rows if s == slot]
            sharded = any(sharding is not None and spec_axes(sharding.spec) for sharding in given)
            if not sharded and not self._spec_given_but_indivisible(call, slot):
                axis = next((name for name, size in self.mesh.shape.items() if size > 1), 'data')
                raise ArgumentError(
                    f'{call.path(slot) or "the keywords"} of {self.signature.name} is said to be a batch '
                    '(batch_argnums, batch_argnames), and nothing shards it (in_shardings, '
                    f'args_sharding_constraint): give it a spec such as PartitionSpec({axis!r}), or leave it '
                    'out'
                )

    def _by_slot(self, rules: RuleLike, call: Call, what: str, mode: ResolveMode) -> dict[int, Shardings]:
        if rules is None:
            return {slot: [None] * len(jax.tree.leaves(call.flat_args[slot])) for slot in call.layout.dynamic}
        resolutions = resolve_arguments(
            rules,
            call,
            self.mesh,
            option=what,
            where=f'the arguments of {self.signature.name!r} ({what})',
            on_indivisible=self._on_indivisible,
            mode=mode,
            as_leaf=_struct,
        )
        return {slot: each.shardings for slot, each in zip(call.layout.dynamic, resolutions, strict=True)}

    def outputs(
        self, tree: Any, call: Call, arguments: Mapping[int, Shardings]
    ) -> list[NamedSharding | None]:
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
            structs = list(map(_struct, leaves))
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
                as_leaf=_struct,
            )
            if problems := _of_no_arrays(resolution):
                raise ShardingError(problems, str(MeshAxes.of(self.mesh)), where)
            shardings = resolution.shardings
        donated = [(call.flat_args[slot], arguments[slot]) for slot in call.layout.donated]
        shardings = donated_shardings(structs, treedef, shardings, donated)
        if self.any_explicit and not any(map(len, arguments.values())):
            # Without an argument JAX does not know on which devices to run.
            shardings = [
                given or (None if _is_immovable(leaf) else self._by_type(struct))
                for given, leaf, struct in zip(shardings, leaves, structs, strict=True)
            ]
        return shardings

    def _by_type(self, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else PartitionSpec()
        return named_sharding(self.mesh, spec)


def _spec(rule: PartitionSpec | NamedSharding) -> PartitionSpec:
    return rule.spec if isinstance(rule, NamedSharding) else rule


def resolve_arguments(
    rules: RuleLike,
    call: Call,
    mesh: Mesh | AbstractMesh,
    *,
    option: str,
    where: str,
    on_indivisible: OnIndivisible,
    rest: str = 'None leaves an argument to the compiler',
    mode: ResolveMode = ResolveMode.BOUNDARY,
    as_leaf: Callable[[Any], Any] | None = None,
) -> list[Resolution]:
    """Resolves the rules of every dynamic slot of a call; one error names what is wrong with all of them.

    Args:
        rules: rules in all the forms of ``in_shardings``.
        call: the call.
        mesh: as for `scalax.rules._resolve.resolve`.
        option: the name of the option that the rules are for.
        where: as for `resolve`.
        on_indivisible: as for `resolve`.
        rest: what to give for arguments without a sharding, for messages.
        mode: as for `resolve`.
        as_leaf: as for `resolve`.

    Raises:
        ShardingError: some leaves cannot be sharded as asked.
        StructureError: rules do not have the structure of their arguments.
    """
    resolutions: list[Resolution] = []
    problems: list[Problem] = []
    misfits: list[str] = []
    by_slot = call.signature.rules_by_slot(rules, call.layout, call.flat_args, option, rest)
    for slot, rule in by_slot.items():
        tree, at = call.flat_args[slot], call.path(slot)
        try:
            resolution = resolve(
                rule,
                tree,
                mesh,
                mode=mode,
                where=where,
                at=at,
                on_indivisible=on_indivisible,
                as_leaf=as_leaf,
            )
            resolutions.append(resolution)
            problems += _of_no_arrays(resolution)
        except ShardingError as error:
            problems.extend(error.problems)
        except StructureError as error:
            misfits.append(str(error))
    if misfits:
        raise StructureError('\n'.join(misfits))
    if problems:
        raise ShardingError(problems, str(MeshAxes.of(mesh)), where)
    return resolutions


def reject_faults(
    leaves: Sequence[str],
    shardings: Sequence[NamedSharding | None],
    fault_of: Callable[[NamedSharding | None], Fault | None],
    mesh: Mesh | AbstractMesh,
    where: str,
) -> None:
    """Raises ShardingError about leaves with shardings that a transformation cannot use.

    Args:
        leaves: the leaves as messages show them.
        shardings: the sharding of each.
        fault_of: what is wrong with a sharding, or None.
        mesh: the mesh.
        where: what the tree is called in messages.
    """
    problems = []
    for leaf, sharding in zip(leaves, shardings, strict=True):
        fault = fault_of(sharding)
        if fault is not None:
            spec = '' if sharding is None else text(sharding.spec)
            problems.append(Problem(fault.kind, leaf, fault.detail, spec=spec, hint=fault.hint))
    if problems:
        raise ShardingError(problems, str(MeshAxes.of(mesh)), where)


def donated_shardings(
    outputs: Sequence[jax.ShapeDtypeStruct],
    out_tree: Any,
    given: Sequence[NamedSharding | None],
    donated: Sequence[tuple[Any, Shardings]],
) -> list[NamedSharding | None]:
    """Gives outputs without a sharding those of donated arguments.

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
    if not free:
        return result
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


def _no_leaf_has_sharding(call: Call) -> bool:
    """Whether no argument has a type that holds a sharding."""
    return all(_struct(leaf).sharding is None for leaf in jax.tree.leaves(call.data))


def _of_no_arrays(resolution: Resolution) -> list[Problem]:
    """The problems of leaves that are no arrays and are given a sharding."""
    tree, problems = resolution.tree, []
    leaves = tree.shown or tree.leaves
    for i, (leaf, sharding) in enumerate(zip(leaves, resolution.shardings, strict=True)):
        if sharding is not None and is_opaque(kind := type_of(leaf)):
            name = (kind if isinstance(kind, type) else type(kind)).__name__
            problems.append(
                Problem(
                    'no-array',
                    f'{tree.path_below(tree.prefix, i) or "(the leaf itself)"}: {name}',
                    f'{name} is no type of arrays, and has no sharding',
                    spec=text(sharding.spec),
                    rule=resolution.decisions[i].origin,
                    hint='give None for what is no array.',
                )
            )
    return problems


def _is_immovable(leaf: Any) -> bool:
    """Whether a leaf is no array, or a reference to one, which only its owner moves."""
    return isinstance(leaf, jax.Ref) or is_opaque(type_of(leaf))


def _struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """A leaf as rules see it: shape, dtype, and the sharding that is part of its type."""
    kind = type_of(leaf)
    if is_opaque(kind):
        return jax.ShapeDtypeStruct((), bool)
    sharding = getattr(kind, 'sharding', None)
    if not is_in_types(sharding):
        sharding = None  # not part of the type: rules decide alike for arrays of any sharding
    return jax.ShapeDtypeStruct(kind.shape, traced_dtype(kind), sharding=sharding)
