"""What shardings do the rules give the arguments and the outputs of a call?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from scalax._context import MeshOwner
from scalax._paths import canonical_dtype
from scalax._prefix import RuleLike
from scalax._resolve import Use, named_sharding, resolve
from scalax._sjit._convention import Convention, Layout
from scalax._sjit._placement import Shardings
from scalax._sjit._signature import slot_path
from scalax._spec import MeshAxes, OnIndivisible
from scalax.errors import Problem, ShardingError, StructureError

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


@dataclasses.dataclass(frozen=True, eq=False)
class Outputs:
    """What a traced function returns: the types of the leaves, and the structure.

    They stay apart until a rule needs the tree: nodes of other libraries may refuse to hold types.
    """

    leaves: Sequence[jax.ShapeDtypeStruct]
    treedef: Any

    @classmethod
    def of(cls, traced: Any) -> Outputs:
        """The outputs of what ``jit(...).trace(...)`` returned."""
        return cls(list(map(_struct_of, traced.jaxpr.out_avals)), traced.out_tree)

    @property
    def tree(self) -> Any:
        """The outputs as a tree of ShapeDtypeStruct."""
        return self.treedef.unflatten(self.leaves)


class Boundary:
    """Resolves the rules of one sjit function for its arguments and outputs."""

    def __init__(self, helper: MeshOwner, convention: Convention, options: Options) -> None:
        self._helper, self._convention, self._options = helper, convention, options
        self.any_explicit = AxisType.Explicit in helper.mesh.axis_types

    def arguments(self, layout: Layout, row: Sequence[Any]) -> dict[int, Shardings]:
        """The shardings of every dynamic slot, leaf by leaf.

        Raises:
            ShardingError: some leaves cannot be sharded as asked; those of all arguments together.
            StructureError: the rules do not have the structure of the arguments.
        """
        rules = self._options.in_shardings
        return self._by_slot(rules, layout, row, 'in_shardings', Use.BOUNDARY)

    def constraints(self, layout: Layout, row: Sequence[Any]) -> dict[int, Shardings]:
        """The shardings to which the arguments are constrained inside; empty without any."""
        rules = self._options.args_sharding_constraint
        if rules is None:
            return {}
        return self._by_slot(rules, layout, row, 'args_sharding_constraint', Use.INTERMEDIATE)

    def _by_slot(
        self, rules: RuleLike, layout: Layout, row: Sequence[Any], what: str, use: Use
    ) -> dict[int, Shardings]:
        return resolve_slots(
            self._convention.rules_by_slot(rules, row, what),
            layout,
            row,
            mesh=self._helper.mesh,
            use=use,
            where=f'the arguments of {self._convention.name!r} ({what})',
            on_indivisible=self._helper.on_indivisible,
            as_leaf=_as_struct,
        )

    def outputs(
        self,
        outputs: Outputs,
        layout: Layout,
        row: Sequence[Any],
        arguments: Mapping[int, Shardings],
    ) -> list[NamedSharding | None]:
        """The shardings of the outputs, leaf by leaf: what the rules say, then what donation asks for.

        Args:
            outputs: what the function returns.
            layout: the slots.
            row: the call.
            arguments: what `arguments` gave.

        Raises:
            ShardingError, StructureError: as for `arguments`.
        """
        shardings: list[NamedSharding | None] = [None] * len(outputs.leaves)
        if self._options.out_shardings is not None:
            shardings = resolve(
                self._options.out_shardings,
                outputs.tree,
                self._helper.mesh,
                use=Use.BOUNDARY,
                where=f'the outputs of {self._convention.name!r} (out_shardings)',
                on_indivisible=self._helper.on_indivisible,
            ).shardings
        donated = [(row[slot], arguments[slot]) for slot in layout.donated]
        if any(any(wanted) for _, wanted in donated):
            shardings = donated_shardings(outputs, shardings, donated)
        if self._types_decide(arguments):
            shardings = [
                given or self._by_type(leaf) for given, leaf in zip(shardings, outputs.leaves, strict=True)
            ]
        return shardings

    def _types_decide(self, arguments: Mapping[int, Shardings]) -> bool:
        """Whether outputs are given the shardings of their types.

        With Explicit axes and no argument that rules place, JAX may not know on which devices to run.
        The types say so; but where some axes are Auto they do not say all, so that they are used only
        when there is no argument at all.
        """
        if AxisType.Auto in self._helper.mesh.axis_types:
            return self.any_explicit and not any(map(len, arguments.values()))
        return self.any_explicit and not any(any(wanted) for wanted in arguments.values())

    def _by_type(self, leaf: Any) -> NamedSharding:
        sharding, spec = getattr(leaf, 'sharding', None), PartitionSpec()
        if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
            spec = sharding.spec
        return named_sharding(self._helper.mesh, spec)


def resolve_slots(
    rules: Mapping[int, RuleLike],
    layout: Layout,
    row: Sequence[Any],
    *,
    mesh: Mesh | AbstractMesh,
    use: Use,
    where: str,
    on_indivisible: OnIndivisible,
    as_leaf: Callable[[Any], Any] | None = None,
) -> dict[int, Shardings]:
    """The shardings of every dynamic slot of a call, leaf by leaf; what is wrong is said of all together.

    Args:
        rules: the rules of each dynamic slot.
        layout: the slots.
        row: the call.
        mesh: see `scalax._resolve.resolve`, as for those that follow.
        use: see above.
        where: see above.
        on_indivisible: see above.
        as_leaf: see above.

    Raises:
        ShardingError: some leaves cannot be sharded as asked.
        StructureError: rules do not have the structure of their arguments.
    """
    shardings: dict[int, Shardings] = {}
    problems: list[Problem] = []
    misfits: list[str] = []
    for slot in layout.dynamic:
        try:
            shardings[slot] = resolve(
                rules[slot],
                row[slot],
                mesh,
                use=use,
                where=where,
                at=slot_path(layout, slot, ''),
                on_indivisible=on_indivisible,
                as_leaf=as_leaf,
            ).shardings
        except ShardingError as error:
            problems.extend(error.problems)
        except StructureError as error:
            misfits.append(str(error))
    if misfits:
        raise StructureError('\n'.join(misfits))
    if problems:
        raise ShardingError(problems, str(MeshAxes.of(mesh)), where)
    return shardings


def donated_shardings(
    outputs: Outputs,
    given: Sequence[NamedSharding | None],
    donated: Sequence[tuple[Any, Shardings]],
) -> list[NamedSharding | None]:
    """Gives outputs that nobody spoke about the shardings of donated arguments.

    The whole output, or a top-level element of it, with exactly the structure, shapes and dtypes of a
    donated argument takes that argument's shardings: only then can XLA reuse the buffers.

    Args:
        outputs: what the function returns.
        given: the shardings asked for, leaf by leaf.
        donated: each donated argument with the shardings of its leaves.
    """
    result = list(given)
    free = []
    for tree, shardings in donated:
        leaves, treedef = jax.tree.flatten(tree)
        if any(shardings):
            free.append(((treedef, _types(map(_as_struct, leaves))), shardings))
    for start, treedef in _elements(outputs.treedef):
        stop = start + treedef.num_leaves
        if start == stop or any(result[start:stop]):
            continue
        kind = treedef, _types(outputs.leaves[start:stop])
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


def _as_struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """A leaf without its data: rules see shapes and dtypes only."""
    kind = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    return jax.ShapeDtypeStruct(kind.shape, canonical_dtype(kind.dtype))


def _struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    """An abstract value as a ShapeDtypeStruct, with its sharding where its type has one."""
    sharding = getattr(aval, 'sharding', None)
    if sharding is None or sharding.mesh.empty:
        sharding = None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
