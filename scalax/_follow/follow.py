"""The pass: follows the rows of a batch through a jaxpr, and constrains values that hold them.

It goes forward, from the arguments to the results. Each equation says where the rows are in its results
(`scalax._jaxprs.dims`); a primitive that is not known loses them, and then the compiler decides as ever.
Gradients are equations like others: by the time the pass sees them, JAX has derived them.

A constraint stands where the compiler has a choice: behind products of rows and weights, where rows are
looked up or scattered, and at both ends of the body of a loop. Dimensions without rows are left open. What a
user's constraint takes is not constrained before it.

Weights are not constrained. So each use gathers them, and their gradients, sums over rows, go where the
shardings of the results say. There are exceptions: loops that multiply few rows in a round (`weights`), rows
that move to experts (`experts`), few rows that move to a weight (`moves`), and columns of weights that stay
split (`splits`).
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from scalax._follow import kernels
from scalax._follow.columns import Columns
from scalax._follow.dealt import DEALT, TAKEN, dealt, may_move
from scalax._follow.edit import Edit
from scalax._follow.experts import scattered
from scalax._follow.loops import follow_loop
from scalax._follow.moves import move_to_weight
from scalax._follow.operands import place_operands
from scalax._follow.ragged import on_own_rows
from scalax._follow.shared import Shared
from scalax._follow.trail import LOST, LOSTS, Trail, along, axes_of, closed_spec_of, merged, spec_of, without
from scalax._follow.types import ONCE, Arguments, Followed, Move, Noted, Use
from scalax._jax.equations import CALLS, LOOPS, WITH_JAXPRS, branches, called, mapped, opened, shape_of
from scalax._jax.primitives import KERNEL, primitive_name
from scalax._jax.rewriting import replaced, with_jaxprs, with_operands
from scalax._jaxprs.dims import ELEMENTWISE, PRODUCTS, UNKNOWN
from scalax._jaxprs.user_shardings import SAID, placed_by_user

# Operands of different layouts meet in these, and the compiler chooses where their results are.
CHOICES = PRODUCTS | {
    *('gather', 'sort', 'scatter', 'scatter-add', 'select_and_scatter_add'),
    *('reduce_window_max', 'reduce_window_sum'),
}
# Results of these that have rows are kept, also if all of their operands have rows.
_KEPT = LOOPS | {KERNEL}
# Rows that these lose are noted elsewhere, or are where users say.
_TOLD = SAID | WITH_JAXPRS


def follow(jaxpr: Any, arguments: Arguments, mesh: Mesh | AbstractMesh) -> Followed:
    """Follows the rows of the batch from the arguments of a jaxpr.

    Args:
        jaxpr: the jaxpr, open or closed.
        arguments: what is known of its arguments.
        mesh: a mesh of Auto axes. It is in force.
    """
    follower = _Follower(mesh, arguments, jaxpr)
    found = follower.follow(jaxpr, arguments.trails)
    if follower.splits.choose(found.gathered, found.sent):
        follower.known = {
            key: each for key, each in follower.known.items() if not follower.splits.are_in(key[0])
        }
        found = follower.follow(jaxpr, arguments.trails)
    return dataclasses.replace(found, ordered=follower.ordered, has_matrices=follower.has_matrices)


class _Follower(Shared):
    """Follows the jaxprs of a function; one that is used in several places with the same trails stays one."""

    def __init__(self, mesh: Mesh | AbstractMesh, arguments: Arguments, whole: Any) -> None:
        super().__init__(mesh, arguments, whole)
        self.known: dict[Any, Followed] = {}

    def follow(self, jaxpr: Any, trails: Sequence[Trail], use: Use = ONCE) -> Followed:
        key = jaxpr, tuple(trails), use
        if key not in self.known:
            first = _Pass(self, *key)
            found, whole = first.made(), first.columns.better_whole
            self.known[key] = _Pass(self, *key, whole=whole).made() if whole else found
        return self.known[key]


class _Pass(Edit):
    """The pass over one jaxpr.

    Args:
        shared, jaxpr, trails, use: as for `Edit`.
        whole: the results of products whose columns are whole, as `Columns` found before.

    Attributes:
        columns: what becomes of columns.
    """

    def __init__(self, *args: Any, whole: Container[int] = ()) -> None:
        super().__init__(*args)
        self._whole, self.columns = whole, Columns(self.shared.trails)

    def made(self) -> Followed:
        """The jaxpr with constraints; the same one if it needs none."""
        jaxpr = opened(self.jaxpr)
        before = self.use.before if jaxpr.eqns else None
        if before is not None:
            # Stacks are constrained before the loop. A constraint of their elements as well can cost a copy
            # of all that rounds have saved: the compiler then reads it in another order than it is stored in.
            for var in filter(self.has_open_rows, jaxpr.invars[:before]):
                self.constrain(var, spec_of(self.trail(var)), jaxpr.eqns[0])
        for equation in jaxpr.eqns:
            self._equation(equation)
        if before is not None:
            for atom in jaxpr.outvars:
                if id(atom) not in self.constrained and self.has_open_rows(atom):
                    self.constrain(atom, spec_of(self.trail(atom)), jaxpr.eqns[-1])
        results = [self.constrained.get(id(atom), atom) for atom in jaxpr.outvars]
        same = len(self.equations) == len(jaxpr.eqns) and all(map(operator.is_, self.equations, jaxpr.eqns))
        return Followed(
            self.jaxpr if same else replaced(self.jaxpr, eqns=self.equations, outvars=results),
            tuple(map(self.trail, jaxpr.outvars)),
            self.kept,
            self.lost,
            self.moved,
            self.costs.gathered,
            self.costs.sent,
            self.weights.multiplied,
            frozenset(i for i, atom in enumerate(jaxpr.outvars) if self.weights.is_sum(atom)),
        )

    def _equation(self, equation: Any) -> None:
        name, trails = primitive_name(equation), self.shared.trails
        ids = [*map(id, equation.invars)]
        operands = [*map(self.on_trail.get, ids, LOSTS)]
        if name in ELEMENTWISE:  # most equations
            self._elementwise(equation, ids, operands)
            return
        self.replaced, self.summed = {}, []
        experts = place_operands(self, equation, operands)
        placed, results = self._results(equation, operands)
        for place in experts:
            results = [scattered(trails.dims(equation), place, operands, results[0])]
        is_dealt = name in DEALT and self._loses_rows(equation, operands, results)
        if is_dealt:
            results = dealt(equation, operands, results, trails)
            if any(map(trails.has_rows, results)) and may_move(equation, operands, self):
                self.note_move(equation, equation.outvars[0])
        move = move_to_weight(self, equation, operands, results) if name in PRODUCTS and not experts else None
        if name == 'dot_general' and not any(map(self.shared.has_rows, operands)):
            self.shared.has_matrices = True
        if name in self.shared.ordered:
            self.shared.ordered[name][equation] = operands
        if name == 'ragged_dot_general':
            placed = on_own_rows(equation, operands, trails, self.shared.mesh)
        if move is not None:
            self.note_move(equation, equation.invars[move.weight])
        staying = self._staying(equation, operands, experts, move)
        self.weights.note(equation, operands, staying)
        if self.shared.splits.possible and name not in WITH_JAXPRS:
            self.costs.note(equation, operands, results, staying, move)
        self._append(placed, ids)
        # What is computed of rows alone stays with them. Elsewhere the compiler has a choice, which is made
        # here, but for convolutions of few rows: XLA fails at some whose rows we move to the kernel. Where
        # other mesh axes shard columns of kernels, it is made for all convolutions.
        is_open = (
            name == 'conv_general_dilated'
            and not self.shared.has_columns
            and self.shared.splits.has_few_rows(equation)
        )
        is_mixed = name in CHOICES and not is_open and not all(map(trails.has_rows, operands))
        is_choice = is_dealt or is_mixed or name in _KEPT
        for var, whole in zip(equation.outvars, results, strict=False):
            trail = self._noted(var, whole)
            if trail and is_choice and self.has_open_rows(var):
                spec = spec_of(trail, self._whole_dims(equation))
                before = self.shared.splits.sums(equation, spec) if move is None else move.result
                if before is not None:  # at both ends: else the compiler might gather the weight
                    self.constrain(var, before, equation)
                self.constrain(var, spec, equation)
                self.kept.append(Noted(equation, var.aval, spec=self.shared.splits.spec(var, spec)))
        found = [*map(self.trail, equation.outvars)]
        if name not in _TOLD and self._loses_rows(equation, operands, found):
            self.note_loss(equation, equation.invars[:1] if name == 'dynamic_slice' else equation.outvars)
        elif name in TAKEN and not is_dealt and may_move(equation, operands, self):
            self.note_move(equation, equation.outvars[0])
        if name == 'device_put':
            self.hold(equation)
        if self.shared.has_columns and found:
            self.columns.note(equation, operands, found[0])
        for var in self.summed:
            self.constrain(var, closed_spec_of(self.trail(var), len(shape_of(var))), equation)

    def _staying(
        self, equation: Any, operands: Sequence[Trail], experts: Sequence[int], move: Move | None
    ) -> Sequence[int]:
        """The operands of a product that are weights and are not gathered for it, by number."""
        if experts or move is not None or primitive_name(equation) not in PRODUCTS:
            return experts if move is None else [move.weight]
        dims, found = self.shared.trails.dims(equation), []
        for weight, rows in ((0, 1), (1, 0)):
            stored, summed = axes_of(self.shared.stored.of(equation.invars[weight])), dims.summed_of(rows)
            own = [each for i, each in enumerate(operands[rows]) if i not in summed]
            is_split = self.shared.splits.dim(equation.invars[weight]) is not None
            if stored and (is_split or stored.isdisjoint(axes_of(own))):
                found.append(weight)
        return found

    def _elementwise(self, equation: Any, ids: Sequence[int], operands: Sequence[Trail]) -> None:
        """An equation whose results are where its operands are; nothing is constrained for it."""
        self.replaced = {}
        self._append(equation, ids)
        self.weights.note(equation, operands)
        if not any(operands):  # as in an optimizer
            return
        whole = self.shared.trails.merged(tuple(operands), len(shape_of(equation.outvars[0])))
        for var in equation.outvars:
            self._noted(var, whole)
        if self.shared.has_columns:
            self.columns.note(equation, operands, self.trail(equation.outvars[0]))

    def _append(self, equation: Any, ids: Sequence[int]) -> None:
        """Appends an equation, with what stands for its operands now."""
        if not (self.constrained.keys().isdisjoint(ids) and self.replaced.keys().isdisjoint(ids)):
            equation = with_operands(equation, [*map(self.input, equation.invars)])
        self.equations.append(equation)

    def _noted(self, var: Any, whole: Trail) -> Trail:
        """The part of a trail that a result can have, which is noted."""
        trails = self.shared.trails
        trail = trails.possible(whole, shape_of(var)) if whole else LOST
        if id(var) in self._whole:
            trail = along(trail, trails.batch_axes)
        if trail:
            self.on_trail[id(var)] = trail
        return trail

    def _loses_rows(self, equation: Any, operands: Sequence[Trail], results: Sequence[Trail]) -> bool:
        """Whether operands have rows, no result has, and these were not just summed over."""
        has_rows, trails = self.shared.has_rows, self.shared.trails
        if any(map(has_rows, results)) or not any(map(has_rows, operands)):
            return False
        if primitive_name(equation) in ('scatter-add', 'scatter-sub'):
            return not self._is_small_sum(equation, operands)
        return any(
            not trails.batch_axes.isdisjoint(axes) and i not in trails.dims(equation).summed_of(place)
            for place, trail in enumerate(operands)
            for i, axes in enumerate(trail)
        )

    def _is_small_sum(self, equation: Any, operands: Sequence[Trail]) -> bool:
        """Whether a sum of scattered rows is the gradient of a table, or smaller than a device's own rows."""
        table, _, updates = map(shape_of, equation.invars)
        devices = self.shared.trails.shards(axes_of(operands[2]) | axes_of(operands[1]))
        return table in self.shared.tables or math.prod(table) * devices <= math.prod(updates)

    def _whole_dims(self, equation: Any) -> Container[int]:
        """The dimensions of a result that are those of weights: if these do not shard them, nothing does."""
        name = primitive_name(equation)
        if name == KERNEL:
            return range(max(len(shape_of(var)) for var in equation.outvars))
        if not self.shared.placed or (name != 'gather' and name not in PRODUCTS):
            return ()
        own = self.shared.trails.dims(equation).own
        weights = [i for i, atom in enumerate(equation.invars) if atom not in self.shared.from_batch]
        return {dim for weight in weights for dim in own(weight)}

    def _results(self, equation: Any, operands: Sequence[Trail]) -> tuple[Any, Sequence[Trail]]:
        """An equation with constraints in its jaxprs, and the trails of its results."""
        name = primitive_name(equation)
        if name == 'shard_map':
            equation = self._mapped(equation, operands)
        if name in SAID:
            before = operands if name != 'shard_map' else [LOST] * len(equation.outvars)
            return equation, self._placed(placed_by_user(equation)[1], before, equation.outvars)
        if not any(operands) and name not in WITH_JAXPRS:
            return equation, ()
        if name == KERNEL:
            placed, results = kernels.on_own_rows(equation, operands, self.shared.mesh, self.shared.has_rows)
            return placed, results
        if self.shared.trails.dims(equation) is not UNKNOWN:
            if name == 'dot_general':
                operands = self.shared.beside_weights(operands)
            results = self.shared.trails.through(equation, operands)
            if name == 'reshape':
                self.parts[id(equation.outvars[0])] = equation, operands[0]
            return equation, results
        if name in ('scan', 'while'):
            return follow_loop(self, equation, operands)
        if name not in WITH_JAXPRS:
            return equation, ()
        taken, given = placed_by_user(equation)
        operands = self._placed(taken, operands, equation.invars)
        use = Use(taken=tuple(taken), given=tuple(given))
        # A call is a `cond` of one branch.
        jaxprs, first = ([called(equation)], 0) if name in CALLS else (branches(equation), 1)
        found = [self.inside(equation, each, operands[first:], use) for each in jaxprs]
        for each in found:
            self.weights.note_loop(equation.invars[first:], each.multiplied)
            if each.multiplied:
                self.columns.note_use(equation.invars)
        if name in CALLS:
            self.weights.note_sums(equation.outvars, found[0].summed)
        trails = zip(equation.outvars, *[each.trails for each in found], strict=True)
        results = [merged(each, len(shape_of(var))) for var, *each in trails]
        placed = self._placed(given, results, equation.outvars)
        return with_jaxprs(equation, *[each.jaxpr for each in found]), placed

    def _mapped(self, equation: Any, operands: Sequence[Trail]) -> Any:
        """A `shard_map`, followed inside along the mesh axes of rows that are not manual there."""
        jaxpr, mesh = mapped(equation)
        manual = {*mesh.manual_axes}
        axes = self.shared.trails.batch_axes - manual
        trails = [without(trail, manual) for trail in operands]
        if not axes or not any(along(trail, axes) for trail in trails):
            return equation
        stored = [without(self.shared.stored.of(atom), manual) for atom in equation.invars]
        arguments = Arguments(trails, stored, axes, self.shared.placed)
        with jax.sharding.use_abstract_mesh(mesh):
            found = follow(jaxpr, arguments, mesh)
        self.note_inside(equation, found)
        return with_jaxprs(equation, found.jaxpr)

    def _placed(
        self, places: Mapping[int, Any], trails: Sequence[Trail], atoms: Sequence[Any]
    ) -> list[Trail]:
        """The trails of operands or results of which the user places these."""
        pairs = enumerate(zip(trails, atoms, strict=True))
        return [
            self.shared.placed_at(places[i], trail, atom) if i in places else trail
            for i, (trail, atom) in pairs
        ]
