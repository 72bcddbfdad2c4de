"""The pass: follows the rows of a batch through a jaxpr, and constrains values that hold them.

It goes forward, from the arguments to the results. Each equation says where the rows are in its results
(`scalax._jaxprs.dims`); a primitive that is not known loses them, and then the compiler decides as ever.
Gradients are equations like others: by the time the pass sees them, JAX has derived them.

A constraint stands where the compiler has a choice: behind products of rows and weights, where rows are
looked up or scattered, and at both ends of the body of a loop. Dimensions without rows are left open. What a
user's constraint takes is not constrained before it.

Weights are not constrained. So each use gathers them, and their gradients, sums over rows, go where the
shardings of the results say. Loops that multiply few rows in a round are an exception (`weights`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from scalax._follow.columns import Columns
from scalax._follow.dealt import DEALT, dealt
from scalax._follow.edit import Edit
from scalax._follow.experts import scattered
from scalax._follow.kernels import split_of
from scalax._follow.loops import follow_loop
from scalax._follow.moves import Move, move_to_weight
from scalax._follow.operands import place_operands
from scalax._follow.ragged import on_own_rows
from scalax._follow.said import SAID, placed_at, placed_by_user, said_trails
from scalax._follow.shared import Shared
from scalax._follow.trail import LOST, LOSTS, Trail, along, axes_of, closed_spec_of, merged, spec_of
from scalax._follow.types import ONCE, Arguments, Followed, Kept, Use
from scalax._jax.equations import CALLS, LOOPS, WITH_JAXPRS, Literal, branches, called, opened, shape_of
from scalax._jax.kernels import is_interpreted
from scalax._jax.primitives import KERNEL, primitive_name
from scalax._jax.rewriting import replaced, with_jaxprs, with_operands
from scalax._jaxprs.dims import ELEMENTWISE, PRODUCTS, UNKNOWN

# Operands of different layouts meet in these, and the compiler chooses where their results are.
CHOICES = PRODUCTS | {
    *('gather', 'sort', 'scatter', 'scatter-add', 'select_and_scatter_add'),
    *('reduce_window_max', 'reduce_window_sum'),
}


def follow(jaxpr: Any, arguments: Arguments, mesh: Mesh | AbstractMesh) -> Followed:
    """Follows the rows of the batch from the arguments of a jaxpr.

    Args:
        jaxpr: the jaxpr, open or closed.
        arguments: what is known of its arguments.
        mesh: a mesh of Auto axes. It is in force.
    """
    shared = Shared(mesh, arguments, jaxpr)
    found = _Follower(shared).jaxpr(jaxpr, arguments.trails)
    # The compiler moves no rows to kernels.
    return dataclasses.replace(found, is_open=found.gathered > found.sent and not shared.has_kernels)


class _Follower:
    """Follows the jaxprs of a function; one that is used in several places with the same trails stays one.

    Args:
        shared: what is known of all of them.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        # The jaxprs are kept as well, so that no other object gets their ids.
        self._known: dict[Any, tuple[Any, Followed]] = {}

    def jaxpr(self, jaxpr: Any, trails: Sequence[Trail], use: Use = ONCE) -> Followed:
        """The jaxpr with constraints.

        Args:
            jaxpr: the jaxpr.
            trails: those of its arguments.
            use: how it is used.
        """
        key = id(jaxpr), tuple(trails), use
        if key not in self._known:
            arguments = opened(jaxpr).invars
            on_trail = {id(var): trail for var, trail in zip(arguments, trails, strict=True) if trail}
            if (on_trail or self._shared.resumes) and opened(jaxpr).eqns:
                edit = self._pass(jaxpr, on_trail, use)
                found = edit.made()
                if edit.columns.better_whole:
                    found = self._pass(jaxpr, on_trail, use, edit.columns.better_whole).made()
            else:
                found = self._pass(jaxpr, on_trail, use).unchanged()
            self._known[key] = jaxpr, found
        return self._known[key][1]

    def _pass(self, jaxpr: Any, on_trail: dict[int, Trail], use: Use, whole: Container[int] = ()) -> _Pass:
        return _Pass(self._shared, self.jaxpr, jaxpr, dict(on_trail), use, whole=whole)


class _Pass(Edit):
    """The pass over one jaxpr.

    Args:
        shared, follow, jaxpr, on_trail, use: as for `Edit`.
        whole: the results of products whose columns are whole, as `Columns` found before.

    Attributes:
        columns: what becomes of columns.
    """

    def __init__(self, *args: Any, whole: Container[int] = ()) -> None:
        super().__init__(*args)
        self._whole, self.columns = whole, Columns(self.shared.trails)

    def unchanged(self) -> Followed:
        """The jaxpr as it is: there is nothing to constrain."""
        jaxpr = opened(self.jaxpr)
        for equation in jaxpr.eqns:
            self.weights.note(equation, [LOST] * len(equation.invars))
        passed = self.weights.passed(jaxpr.outvars)
        return Followed(self.jaxpr, tuple(map(self.trail, jaxpr.outvars)), passed=passed)

    def made(self) -> Followed:
        """The jaxpr with constraints."""
        jaxpr, before = opened(self.jaxpr), self.use.before
        first, last = jaxpr.eqns[0], jaxpr.eqns[-1]
        if before is not None:
            # Stacks are constrained before the loop. A constraint of their elements as well can cost a copy
            # of all that rounds have saved: the compiler then reads it in another order than it is stored in.
            for var in filter(self.may_keep, jaxpr.invars[:before]):
                self.constrain(var, spec_of(self.trail(var)), first)
        for equation in jaxpr.eqns:
            self._equation(equation)
        if before is not None:
            for atom in jaxpr.outvars:
                if id(atom) not in self.constrained and self.may_keep(atom):
                    self.constrain(atom, spec_of(self.trail(atom)), last)
        results = [self.constrained.get(id(atom), atom) for atom in jaxpr.outvars]
        return Followed(
            replaced(self.jaxpr, eqns=self.equations, outvars=results),
            tuple(map(self.trail, jaxpr.outvars)),
            tuple(self.kept),
            tuple(self.lost),
            tuple(self.moves),
            self.gathered,
            self.sent,
            False,
            self.weights.multiplied,
            self.weights.passed(jaxpr.outvars),
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
        if name == KERNEL:
            placed, results = self._kernel(equation, operands)
        else:
            placed, results = self._results(equation, operands)
        for place in experts:
            results = [scattered(trails.dims(equation), place, operands, results[0])]
        is_dealt = name in DEALT and self._loses_rows(equation, operands, results)
        if is_dealt:
            results = dealt(equation, operands, results, trails)
            if any(map(trails.has_rows, results)):
                self.note_move(equation, equation.outvars[0])
        move = None
        if name in PRODUCTS and not experts:
            move = move_to_weight(self, equation, operands, results)
        if name == 'ragged_dot_general':
            placed = on_own_rows(equation, operands, trails, self.shared.mesh)
        if move is not None:
            self.note_move(equation, equation.invars[move.weight])
        self.weights.note(equation, operands, results, self._staying(equation, operands, experts, move))
        self._append(placed, ids)
        # What is computed of rows alone stays with them. Of other results the compiler decides.
        is_choice = (
            name in LOOPS
            or name == KERNEL
            or is_dealt
            or (name in CHOICES and not all(map(trails.has_rows, operands)))
        )
        for var, whole in zip(equation.outvars, results, strict=False):
            trail = self._noted(var, whole)
            if trail and is_choice and self.may_keep(var):
                spec = spec_of(trail, self._whole_dims(equation, operands))
                if move is not None:  # at both ends: else the compiler might gather the weight
                    self.constrain(var, move.result, equation)
                self.constrain(var, spec, equation)
                self.kept.append(Kept(var.aval, self.shared.splits.spec(var, spec), equation))
        if (
            name not in SAID
            and name not in WITH_JAXPRS
            and self._loses_rows(equation, operands, [*map(self.trail, equation.outvars)])
        ):
            self.note_loss(equation, equation.outvars)
        if name == 'device_put':
            self.hold(equation)
        if self.shared.has_columns and equation.outvars:
            self.columns.note(equation, operands, self.trail(equation.outvars[0]))
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
        whole = self.shared.trails.merged(tuple(operands), len(shape_of(equation.outvars[0])))
        self.weights.note(equation, operands)
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
        if not whole:
            return LOST
        trails = self.shared.trails
        trail = trails.possible(whole, shape_of(var))
        if id(var) in self._whole:
            trail = along(trail, trails.batch_axes)
        if trail:
            self.on_trail[id(var)] = trail
        return trail

    def _loses_rows(self, equation: Any, operands: Sequence[Trail], results: Sequence[Trail]) -> bool:
        """Whether operands have rows, no result has, and these were not just summed over."""
        shared = self.shared
        rows = [place for place, trail in enumerate(operands) if shared.has_rows(trail)]
        if not rows or any(map(shared.has_rows, results)):
            return False
        if primitive_name(equation) in ('scatter-add', 'scatter-sub'):
            return not self._is_small_sum(equation, operands)
        dims = shared.trails.dims(equation)
        kept = [along(operands[place], shared.trails.batch_axes) for place in rows]
        return any(
            axes and i not in dims.summed_of(place)
            for place, trail in zip(rows, kept, strict=True)
            for i, axes in enumerate(trail)
        )

    def _is_small_sum(self, equation: Any, operands: Sequence[Trail]) -> bool:
        """Whether a sum of scattered rows is the gradient of a table, or smaller than a device's own rows."""
        table, _, updates = map(shape_of, equation.invars)
        sizes = self.shared.trails.sizes
        devices = math.prod(sizes[axis] for axis in axes_of(operands[2]) | axes_of(operands[1]))
        return table in self.shared.tables or math.prod(table) * devices <= math.prod(updates)

    def _kernel(self, equation: Any, operands: Sequence[Trail]) -> tuple[Any, Sequence[Trail]]:
        """A kernel that runs on each device with its rows, if it may, and the trails of its results."""
        has_rows = self.shared.has_rows
        split = split_of(equation, operands, self.shared.mesh, has_rows)
        if split is None or not any(map(has_rows, split.results)):
            return equation, ()
        if is_interpreted(equation):
            return equation, split.results
        self.shared.has_kernels = True
        return split.equation_on_rows(), split.results

    def _whole_dims(self, equation: Any, operands: Sequence[Trail]) -> set[int]:
        """The dimensions of a result that are those of weights: if these do not shard them, nothing does."""
        name = primitive_name(equation)
        if name == KERNEL:
            return set(range(max(len(shape_of(var)) for var in equation.outvars)))
        if name != 'gather' and name not in PRODUCTS:
            return set()
        dims = self.shared.trails.dims(equation)
        weights = [
            place
            for place, atom in enumerate(equation.invars)
            if self.shared.placed
            and not self.shared.has_rows(operands[place])
            and not isinstance(atom, Literal)
            and atom not in self.shared.from_batch
        ]
        return {dim for place in weights for dim in dims.own(place)}

    def _results(self, equation: Any, operands: Sequence[Trail]) -> tuple[Any, Sequence[Trail]]:
        """An equation with constraints in its jaxprs, and the trails of its results."""
        name = primitive_name(equation)
        if name in SAID:
            return equation, [*map(self.shared.said, said_trails(equation, operands), equation.outvars)]
        if not any(operands) and not (name in WITH_JAXPRS and self._may_matter(equation)):
            return equation, ()
        if self.shared.trails.dims(equation) is not UNKNOWN:
            if name == 'dot_general':
                operands = self.shared.beside_weights(operands)
            results = self.shared.trails.through(equation, operands)
            if name == 'reshape':
                self.parts[id(equation.outvars[0])] = equation, operands[0]
            return equation, results
        if name in CALLS:
            taken, given = placed_by_user(equation)
            operands = self._placed(taken, operands, equation.invars)
            use = Use(taken=tuple(taken), given=tuple(given))
            inside = self.inside(equation, called(equation), operands, use)
            self.weights.note_call(equation.invars, inside.multiplied)
            if inside.multiplied:
                self.columns.note_use(equation.invars)
            self.weights.note_results(equation.invars, equation.outvars, inside.passed, inside.summed)
            results = self._placed(given, inside.trails, equation.outvars)
            return with_jaxprs(equation, inside.jaxpr), results
        if name in ('scan', 'while'):
            return follow_loop(self, equation, operands)
        if name == 'cond':
            found = [self.inside(equation, branch, operands[1:]) for branch in branches(equation)]
            for branch in found:
                self.weights.note_call(equation.invars[1:], branch.multiplied)
            trails = zip(*(branch.trails for branch in found), strict=True)
            return with_jaxprs(equation, *[branch.jaxpr for branch in found]), [
                merged(each, len(shape_of(var))) for each, var in zip(trails, equation.outvars, strict=True)
            ]
        return equation, ()

    def _placed(
        self, places: Mapping[int, Any], trails: Sequence[Trail], atoms: Sequence[Any]
    ) -> list[Trail]:
        """The trails of operands or results of a `jit` whose user places these."""
        found = list(trails)
        for i, sharding in places.items():
            found[i] = self.shared.said(placed_at(sharding, found[i], atoms[i]), atoms[i])
        return found

    def _may_matter(self, equation: Any) -> bool:
        """Whether an equation with jaxprs has rows inside, or gives weights that others multiply."""
        if self.shared.resumes or any(placed_by_user(equation)):
            return True
        return primitive_name(equation) in CALLS and any(map(self.weights.is_weight, equation.invars))
