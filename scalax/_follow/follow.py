"""The pass: follows the rows of a batch through a jaxpr, and constrains values that hold them.

It goes forward, from the arguments to the results. Each equation says where the rows are in its results
(`primitives`); a primitive that is not known loses them, and then the compiler decides as ever. Gradients
are equations like others: by the time the pass sees them, JAX has derived them.

A constraint stands where the compiler has a choice: behind products of rows and weights, where rows are
looked up or scattered, and at both ends of the body of a loop. Dimensions without rows are left open. What a
user's constraint takes is not constrained before it.

Weights are not constrained. So each use gathers them, and their gradients, sums over rows, go where the
shardings of the results say. Loops that multiply few rows in a round are an exception (`weights`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import DropVar, Literal
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from scalax._follow.constraint import closed_spec_of, constraint, spec_of
from scalax._follow.dependence import Dependence
from scalax._follow.experts import Stored, move_to_experts, scattered, stay, way
from scalax._follow.jaxprs import CALLS, LOOPS, WITH_JAXPRS, opened, replaced, scan_parts, shape_of
from scalax._follow.kernels import KERNEL, split_of
from scalax._follow.meetings import SIDE_BY_SIDE, whole_beside, whole_factors
from scalax._follow.primitives import CHOICES, ELEMENTWISE, RULES, SAID, columns_of_table, own_dims, redealt
from scalax._follow.trail import LOST, LOSTS, Trail, Trails, axes_of, common, merged, without
from scalax._follow.weights import FEW_ROWS, Products, Weights

# Loops settle after two or three rounds of following what they carry; more are not tried.
_ROUNDS = 8
_WITH_TABLES = ('gather', 'scatter-add', 'scatter_add')


@dataclasses.dataclass(frozen=True, eq=False)
class Arguments:
    """What is known of the arguments of a jaxpr.

    Attributes:
        trails: their trails: of batches the rows; of others the mesh axes that shard no rows.
        stored: of arguments that are not batches, the dimensions that axes of the batch shard, as FSDP does.
        batch_axes: the mesh axes that shard rows.
        placed: whether it is known where each of them is; else the compiler decides about some.
    """

    trails: Sequence[Trail]
    stored: Sequence[Trail]
    batch_axes: frozenset[str]
    placed: bool = True


@dataclasses.dataclass(frozen=True)
class Kept:
    """A value that is kept where it is.

    Attributes:
        aval: its shape and dtype.
        spec: its sharding.
        equation: what computes it.
        calls: the equations in whose jaxprs that is, from the innermost one outwards.
    """

    aval: Any
    spec: PartitionSpec
    equation: Any
    calls: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Lost:
    """An equation that lost rows: its primitive has no rule, or the rows of its results do not divide.

    Attributes:
        equation: the equation.
        aval: its largest result.
        calls: as for `Kept`.
    """

    equation: Any
    aval: Any
    calls: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class FewRows:
    """What products multiply, where the weights are more than the rows: to move the rows takes less.

    Attributes:
        weights: the elements of weights that would be gathered, in all products.
        rows: those of the rows, or of their products if these are smaller; and of the gradients that the
            compiler would add up: of tables, and in each round of a loop.
    """

    weights: int
    rows: int


@dataclasses.dataclass(frozen=True)
class Followed:
    """A jaxpr that was followed.

    Attributes:
        jaxpr: the jaxpr, with constraints.
        trails: those of its results.
        kept: the values that are constrained, those of jaxprs inside it too.
        lost: where rows were lost, likewise.
        multiplied: the arguments without rows that are multiplied with rows, by number, and these products.
        passed: the results that are arguments without rows, or parts of them: number -> number.
        summed: the results that are sums over few rows, by number.
        few_rows: why nothing is followed, if the weights are more than the rows.
    """

    jaxpr: Any
    trails: tuple[Trail, ...]
    kept: tuple[Kept, ...] = ()
    lost: tuple[Lost, ...] = ()
    multiplied: Mapping[int, Products] = dataclasses.field(default_factory=dict)
    passed: Mapping[int, int] = dataclasses.field(default_factory=dict)
    summed: frozenset[int] = frozenset()
    few_rows: FewRows | None = None


def follow(jaxpr: Any, arguments: Arguments, mesh: Mesh | AbstractMesh) -> Followed:
    """Follows the rows of the batch from the arguments of a jaxpr, unless they are few.

    Args:
        jaxpr: the jaxpr, open or closed.
        arguments: what is known of its arguments.
        mesh: a mesh of Auto axes. It is in force.
    """
    follower = _Follower(mesh, arguments, jaxpr)
    found = follower.jaxpr(jaxpr, arguments.trails)
    products = [each for i, each in found.multiplied.items() if arguments.stored[i]]
    weights = sum(each.weights for each in products)
    rows = sum(each.moved for each in products) + sum(follower.sums.values())
    # The compiler does not move rows to kernels; JAX would refuse these.
    if weights > rows and not follower.has_kernels:
        return Followed(jaxpr, (LOST,) * len(found.trails), few_rows=FewRows(weights, rows))
    return found


class _Follower:
    """Follows jaxprs over a mesh; one that is used in several places with the same trails stays one.

    Args:
        mesh: the mesh.
        arguments: those of the jaxpr that has all others in it.
        whole: this jaxpr.

    Attributes:
        mesh: the mesh.
        trails: answers about trails.
        has_rows: tells whether some dimension of a trail holds rows of the batch.
        placed: as for `Arguments`.
        from_batch: the variables that depend on the batch.
        stored: where weights are over the axes of the batch.
        tables: the shapes of weights that rows are looked up in, and where these are over the batch's axes.
        sums: equation, by its id -> the elements of sums over rows that each device would add up with
            others, if rows did not move to a table, or in each round of a loop.
        has_kernels: whether there were kernels that run on each device with its rows.
        resumes: whether users say where some of these are, so that rows may be found again.
    """

    def __init__(self, mesh: Mesh | AbstractMesh, arguments: Arguments, whole: Any) -> None:
        self.placed = arguments.placed
        self.tables: dict[tuple[int, ...], Trail] = {}
        self.sums: dict[int, int] = {}
        self.mesh = mesh
        self.trails = Trails(dict(mesh.shape), arguments.batch_axes)
        self.has_rows = self.trails.has_rows
        self.from_batch = Dependence(whole, list(map(self.has_rows, arguments.trails)))
        self.stored = Stored(whole, arguments.stored, self.trails, self.from_batch)
        self.has_kernels = False
        self.resumes = not SAID.isdisjoint(self.from_batch.primitives)
        # The jaxprs are kept as well, so that no other object gets their ids.
        self._known: dict[Any, tuple[Any, Followed]] = {}

    def jaxpr(self, jaxpr: Any, trails: Sequence[Trail], *, before: int | None = None) -> Followed:
        """The jaxpr with constraints.

        Args:
            jaxpr: the jaxpr.
            trails: those of its arguments.
            before: if it is a round of a loop, how many of these are no elements of stacks. They come first,
                and are constrained as well, and so are its results.
        """
        key = id(jaxpr), tuple(trails), before
        if key not in self._known:
            arguments = opened(jaxpr).invars
            on_trail = {id(var): trail for var, trail in zip(arguments, trails, strict=True) if trail}
            if (on_trail or self.resumes) and opened(jaxpr).eqns:
                found = _Edit(self, jaxpr, on_trail).made(before)
            else:
                found = _Edit(self, jaxpr, on_trail).unchanged()
            self._known[key] = jaxpr, found
        return self._known[key][1]

    def possible(self, trail: Trail, var: Any) -> Trail:
        """The part of a trail that a variable can have."""
        return self.trails.possible(trail, shape_of(var))

    def beside_weights(self, operands: Sequence[Trail]) -> list[Trail]:
        """The operands of a product of rows and a weight: mesh axes of the weight that shard no rows.

        They shard its columns, or are summed over, and no other dimension of the rows: a residual that is
        split over them is gathered before the product.
        """
        weights = [trail for trail in operands if not self.has_rows(trail)]
        if len(weights) != 1:
            return list(operands)
        taken = axes_of(weights[0]) - self.trails.batch_axes
        return [without(trail, taken) if self.has_rows(trail) else trail for trail in operands]

    def without_rows(self, trail: Trail) -> Trail:
        """A trail along the mesh axes that shard no rows."""
        return without(trail, self.trails.batch_axes)

    def said(self, trail: Trail, var: Any) -> Trail:
        """What users say of a variable: of one that does not depend on the batch, nothing about rows."""
        unknown = {axis for axes in trail for axis in axes if self.trails.sizes.get(axis, 1) == 1}
        return without(trail, unknown if var in self.from_batch else unknown | self.trails.batch_axes)

    def constraint(self, var: Any, spec: PartitionSpec, source_info: Any) -> Any:
        """An equation that constrains a variable."""
        return constraint(var, spec, self.mesh, source_info)


class _Edit:
    """One jaxpr, followed equation by equation.

    Args:
        follower: follows the jaxprs inside it.
        jaxpr: the jaxpr.
        on_trail: the trails of its arguments. Here and below the keys for variables are their ids: literals
            are not hashable.
    """

    def __init__(self, follower: _Follower, jaxpr: Any, on_trail: dict[int, Trail]) -> None:
        self._follower, self._jaxpr, self._on_trail = follower, jaxpr, on_trail
        self._equations: list[Any] = []
        self._constrained: dict[int, Any] = {}  # variable -> the variable behind its constraint
        self._kept: list[Kept] = []
        self._lost: list[Lost] = []
        arguments = {
            var: i
            for i, var in enumerate(opened(jaxpr).invars)
            if not follower.has_rows(on_trail.get(id(var), LOST))
        }
        self._weights = Weights(arguments, follower.trails)
        # Of the loop at hand: operands that are placed otherwise before it, and results summed behind it.
        self._replaced: dict[int, Any] = {}
        self._summed: list[Any] = []
        self._moved: dict[tuple[int, Trail], Any] = {}  # a variable and where it moves to -> what moved
        # Batches in parts: the reshape, and the trail of its operand.
        self._parts: dict[int, tuple[Any, Trail]] = {}
        users = [each for each in opened(jaxpr).eqns if each.primitive.name == 'sharding_constraint']
        taken = {id(each.invars[0]) for each in users}
        self._users_given = {id(each.outvars[0]) for each in users}
        self._users_own = taken | self._users_given

    def unchanged(self) -> Followed:
        """The jaxpr as it is: there is nothing to constrain."""
        jaxpr = opened(self._jaxpr)
        for equation in jaxpr.eqns:
            self._weights.note(equation, [LOST] * len(equation.invars))
        passed = self._weights.passed(jaxpr.outvars)
        return Followed(self._jaxpr, tuple(map(self._trail, jaxpr.outvars)), passed=passed)

    def made(self, before: int | None) -> Followed:
        """The jaxpr with constraints."""
        jaxpr = opened(self._jaxpr)
        first, last = jaxpr.eqns[0], jaxpr.eqns[-1]
        if before is not None:
            # Stacks are constrained before the loop. A constraint of their elements as well can cost a copy
            # of all that rounds have saved: the compiler then reads it in another order than it is stored in.
            for var in filter(self._may_keep, jaxpr.invars[:before]):
                self._constrain(var, spec_of(self._trail(var)), first)
        for equation in jaxpr.eqns:
            self._equation(equation)
        if before is not None:
            for atom in jaxpr.outvars:
                if id(atom) not in self._constrained and self._may_keep(atom):
                    self._constrain(atom, spec_of(self._trail(atom)), last)
        results = [self._constrained.get(id(atom), atom) for atom in jaxpr.outvars]
        return Followed(
            replaced(self._jaxpr, eqns=self._equations, outvars=results),
            tuple(map(self._trail, jaxpr.outvars)),
            tuple(self._kept),
            tuple(self._lost),
            self._weights.multiplied,
            self._weights.passed(jaxpr.outvars),
            frozenset(i for i, atom in enumerate(jaxpr.outvars) if self._weights.is_sum(atom)),
        )

    def _trail(self, atom: Any) -> Trail:
        return self._on_trail.get(id(atom), LOST)

    def _input(self, atom: Any) -> Any:
        return self._replaced.get(id(atom), self._constrained.get(id(atom), atom))

    def _may_keep(self, var: Any) -> bool:
        """Whether a variable has rows, is not in the memory of the host, and no constraint of the user's."""
        if id(var) in self._users_own or isinstance(var, DropVar):
            return False
        # A constraint would bring a value back from there.
        space = getattr(var.aval, 'memory_space', jax.memory.Space.Device)
        return space == jax.memory.Space.Device and self._follower.has_rows(self._trail(var))

    def _constrain(self, var: Any, spec: PartitionSpec, equation: Any) -> None:
        added = self._follower.constraint(var, spec, equation.source_info)
        self._equations.append(added)
        self._constrained[id(var)] = added.outvars[0]

    def _equation(self, equation: Any) -> None:
        name, trails = equation.primitive.name, self._follower.trails
        ids = [*map(id, equation.invars)]
        operands = [*map(self._on_trail.get, ids, LOSTS)]
        self._replaced, self._summed, placed = {}, [], equation
        experts = self._experts(equation, operands) if name == 'dot_general' else ()
        if name == 'dot_general' and all(map(trails.has_rows, operands)):
            self._gather_factors(equation, operands)
        if name in SIDE_BY_SIDE and len({*operands}) > 1:
            self._keep_beside(equation, operands)
        if name in _WITH_TABLES:
            self._move_to_table(equation, operands)
        if name in ELEMENTWISE:  # most equations
            ndim = len(getattr(equation.outvars[0].aval, 'shape', ()))
            results: Sequence[Trail] = [trails.merged(tuple(operands), ndim)] * len(equation.outvars)
            params = equation.params
        elif name == KERNEL:
            placed, results = self._kernel(equation, operands)
            params = placed.params
        else:
            params, results = self._results(equation, operands)
        for place in experts:
            results = [scattered(equation, place, operands, results[0])]
        self._weights.note(equation, operands, results, experts)
        changed = {} if params is placed.params else {'params': params}
        if not (self._constrained.keys().isdisjoint(ids) and self._replaced.keys().isdisjoint(ids)):
            changed['invars'] = [*map(self._input, equation.invars)]
        self._equations.append(placed.replace(**changed) if changed else placed)
        # What is computed of rows alone stays with them. Of other results the compiler decides.
        is_choice = (
            name in LOOPS or name == KERNEL or (name in CHOICES and not all(map(trails.has_rows, operands)))
        )
        for var, whole in zip(equation.outvars, results, strict=False):
            trail = trails.possible(whole, getattr(var.aval, 'shape', ()))
            if trail != whole and trails.has_rows(whole) and not trails.has_rows(trail):
                self._note_loss(equation)
            if trail:
                self._on_trail[id(var)] = trail
                if is_choice and self._may_keep(var):
                    spec = spec_of(trail, self._whole_dims(equation, operands))
                    self._constrain(var, spec, equation)
                    self._kept.append(Kept(var.aval, spec, equation))
        for var in self._summed:
            self._constrain(var, closed_spec_of(self._trail(var), len(shape_of(var))), equation)

    def _kernel(self, equation: Any, operands: Sequence[Trail]) -> tuple[Any, Sequence[Trail]]:
        """A kernel that runs on each device with its rows, if it may, and the trails of its results."""
        has_rows = self._follower.has_rows
        split = split_of(equation, operands, self._follower.mesh, has_rows)
        if split is None or not any(map(has_rows, split.results)):
            if any(map(has_rows, operands)):
                self._note_loss(equation)
            return equation, ()
        if equation.params['interpret']:  # for tests; the compiler partitions it as other code
            return equation, split.results
        self._follower.has_kernels = True
        return split.equation_on_rows(), split.results

    def _experts(self, equation: Any, operands: list[Trail]) -> Sequence[int]:
        """The weights of a product to which rows move, by number. *operands* gets the new trail of these."""
        _, (batch, _) = equation.params['dimension_numbers']
        if not batch or not any(operands):
            return ()
        stored = [self._follower.stored.of(atom) for atom in equation.invars]
        move = move_to_experts(equation, operands, stored, self._follower.trails.sizes)
        if move is not None:
            place, var = move[0], equation.invars[move[0]]
            trail = self._follower.possible(move[1], var)
            if trail and self._may_keep(var):
                stops, dim = way(equation, place, operands, trail, self._follower.trails.sizes)
                trail = stops[-1]
                if (id(var), trail) not in self._moved:
                    # At both ends: else the compiler might compute it where it moves to.
                    for stop in stops:
                        self._place_before(var, spec_of(stop, dim), equation)
                    self._moved[id(var), trail] = self._replaced[id(var)]
                self._replaced[id(var)] = self._moved[id(var), trail]
                operands[place] = trail
        staying = stay(equation, operands, stored)
        for place in staying:  # the result is where the rows are
            operands[place] = without(operands[place], axes_of(operands[1 - place]))
        return staying

    def _gather_factors(self, equation: Any, operands: list[Trail]) -> None:
        """Gathers the operands of a product of rows with rows, if that takes less than to add up its sums."""
        contracted, _ = equation.params['dimension_numbers']
        for place, trail in enumerate(whole_factors(equation, operands, self._follower.trails)):
            if trail != operands[place] and self._has_open_rows(equation.invars[place]):
                self._place_before(equation.invars[place], spec_of(trail, contracted[place]), equation)
                operands[place] = trail

    def _keep_beside(self, equation: Any, operands: Sequence[Trail]) -> None:
        """Keeps what is stacked with split values whole: else the compiler splits what computed it too."""
        for place, dims in enumerate(whole_beside(equation, operands, self._follower.trails)):
            var = equation.invars[place]
            if dims and self._follower.placed and self._has_open_rows(var):
                self._place_before(var, spec_of(operands[place], dims), equation)

    def _move_to_table(self, equation: Any, operands: list[Trail]) -> None:
        """Rows move to the gradient of a table, a sum of scattered ones, if the table has more elements.

        Else each device would have a sum of the size of its part of the table, and all would add these up.
        Where axes of the rows shard the columns of the table, rows become columns over these.
        """
        name, follower, shape = equation.primitive.name, self._follower, shape_of(equation.invars[0])
        if name == 'gather' and equation.invars[0] not in follower.from_batch:
            stored = follower.stored.of(equation.invars[0])
            follower.tables[shape] = common(stored, follower.tables.get(shape, stored))
        if name == 'gather' or shape not in follower.tables:
            return
        table, _, updates = equation.invars
        if not self._has_open_rows(updates) or table.aval.size <= updates.aval.size:
            return
        columns = columns_of_table(equation, follower.tables[shape])
        if not follower.has_rows(RULES[name](equation, operands)[0]):
            axes = axes_of(follower.tables[shape])
            # Where the axes of the rows shard the table too, the compiler moves rows to it by itself.
            if not axes.issuperset(follower.trails.batch_axes.intersection(axes_of(operands[2]))):
                shards = math.prod(follower.trails.sizes[axis] for axis in axes)
                follower.sums[id(equation)] = table.aval.size // shards
            for place in (1, 2):
                if self._has_open_rows(equation.invars[place]):
                    if axes_of(columns):  # as for experts: at both ends
                        self._place_before(equation.invars[place], spec_of(operands[place]), equation)
                    operands[place] = follower.without_rows(operands[place])
                    ndim = len(shape_of(equation.invars[place]))
                    there = merged((columns, operands[place]), ndim) if place == 2 else operands[place]
                    self._place_before(equation.invars[place], closed_spec_of(there, ndim), equation)

    def _has_open_rows(self, atom: Any) -> bool:
        """Whether a value has rows that no constraint of a user places."""
        return not isinstance(atom, Literal) and self._may_keep(atom)

    def _whole_dims(self, equation: Any, operands: Sequence[Trail]) -> set[int]:
        """The dimensions of a result that are those of weights: if these do not shard them, nothing does."""
        if equation.primitive.name == KERNEL:
            return set(range(max(len(shape_of(var)) for var in equation.outvars)))
        weights = [
            place
            for place, atom in enumerate(equation.invars)
            if self._follower.placed
            and not self._follower.has_rows(operands[place])
            and not isinstance(atom, Literal)
            and atom not in self._follower.from_batch
        ]
        return {dim for place in weights for dim in own_dims(equation, place)}

    def _results(self, equation: Any, operands: Sequence[Trail]) -> tuple[Any, Sequence[Trail]]:
        """The parameters of an equation, with constraints in its jaxprs, and the trails of its results."""
        name, params = equation.primitive.name, equation.params
        if name in SAID:
            said = zip(RULES[name](equation, operands), equation.outvars, strict=True)
            return params, [self._follower.said(trail, var) for trail, var in said]
        if not any(operands) and not (name in WITH_JAXPRS and self._may_matter(equation)):
            return params, ()
        if name in RULES:
            if name == 'dot_general':
                operands = self._follower.beside_weights(operands)
            results = RULES[name](equation, operands)
            if name == 'reshape':
                self._parts[id(equation.outvars[0])] = equation, operands[0]
            if name in ('reshape', 'sort') and not any(results):
                self._note_loss(equation)
            return params, results
        if name in CALLS:
            inside = self._inside(equation, params[CALLS[name]], operands)
            self._weights.note_call(equation.invars, inside.multiplied)
            self._weights.note_results(equation.invars, equation.outvars, inside.passed, inside.summed)
            return {**params, CALLS[name]: inside.jaxpr}, inside.trails
        if name == 'scan':
            return self._scan(equation, operands)
        if name == 'while':
            return self._while(equation, operands)
        if name == 'cond':
            branches = [self._inside(equation, branch, operands[1:]) for branch in params['branches']]
            for branch in branches:
                self._weights.note_call(equation.invars[1:], branch.multiplied)
            trails = zip(*(branch.trails for branch in branches), strict=True)
            return {**params, 'branches': tuple(branch.jaxpr for branch in branches)}, [
                merged(each, len(shape_of(var))) for each, var in zip(trails, equation.outvars, strict=True)
            ]
        self._note_loss(equation)
        return params, ()

    def _may_matter(self, equation: Any) -> bool:
        """Whether an equation with jaxprs has rows inside, or gives weights that others multiply."""
        called = equation.primitive.name in CALLS
        return self._follower.resumes or (called and any(map(self._weights.is_weight, equation.invars)))

    def _note_loss(self, equation: Any) -> None:
        largest = max(equation.outvars, key=lambda var: getattr(var.aval, 'size', 0), default=None)
        if largest is not None and shape_of(largest):
            self._lost.append(Lost(equation, largest.aval))

    def _inside(
        self, equation: Any, jaxpr: Any, trails: Sequence[Trail], *, before: int | None = None
    ) -> Followed:
        """A jaxpr of an equation; what is kept and lost in it counts."""
        found = self._follower.jaxpr(jaxpr, trails, before=before)
        self._kept += [dataclasses.replace(each, calls=(*each.calls, equation)) for each in found.kept]
        self._lost += [dataclasses.replace(each, calls=(*each.calls, equation)) for each in found.lost]
        return found

    def _scan(self, equation: Any, operands: Sequence[Trail]) -> tuple[Any, Sequence[Trail]]:
        body = equation.params['jaxpr']
        constants, carried = scan_parts(equation)
        stacks = [*zip(equation.invars, operands, strict=True)][constants + carried :]
        before, behind = operands[:constants], [self._of_stack(*stack, equation) for stack in stacks]

        def arguments(state: Sequence[Trail]) -> list[Trail]:
            return [*before, *state, *behind]

        state = self._settled(body, operands[constants : constants + carried], arguments)
        inside = self._inside(equation, body, arguments(state), before=constants + carried)
        self._gather_before(equation, range(constants), inside)
        self._sum_behind(equation, carried, inside)
        self._weights.note_loop(equation.invars, inside.multiplied, constants, equation.params['length'])
        stacked = [((), *trail) if trail else LOST for trail in inside.trails[carried:]]
        return {**equation.params, 'jaxpr': inside.jaxpr}, [*inside.trails[:carried], *stacked]

    def _of_stack(self, atom: Any, trail: Trail, equation: Any) -> Trail:
        """The trail of the elements that a loop takes of a stack."""
        row = _row(trail)
        if row or not trail or id(atom) not in self._parts:
            if row and id(atom) not in self._constrained and self._has_open_rows(atom):
                self._place_before(atom, spec_of(trail), equation)
            return row
        parts = self._follower.possible(redealt(*self._parts[id(atom)]), atom)
        if not parts:
            return LOST
        # The rows of each part are dealt to all devices; else a device would have whole parts.
        self._place_before(atom, spec_of(parts), equation)
        return _row(parts)

    def _place_before(self, var: Any, spec: PartitionSpec, equation: Any) -> None:
        """Constrains an operand of the equation at hand, and of no other."""
        added = self._follower.constraint(self._input(var), spec, equation.source_info)
        self._equations.append(added)
        self._replaced[id(var)] = added.outvars[0]

    def _while(self, equation: Any, operands: Sequence[Trail]) -> tuple[Any, Sequence[Trail]]:
        params = equation.params
        constants = params['cond_nconsts'], params['cond_nconsts'] + params['body_nconsts']

        def arguments(state: Sequence[Trail]) -> list[Trail]:
            return [*operands[slice(*constants)], *state]

        state = self._settled(params['body_jaxpr'], operands[constants[1] :], arguments)
        given = arguments(state)
        inside = self._inside(equation, params['body_jaxpr'], given, before=len(given))
        self._gather_before(equation, range(*constants), inside)
        of_rounds = equation.invars[constants[0] :]
        self._weights.note_loop(of_rounds, inside.multiplied, params['body_nconsts'], 1)
        self._sum_behind(equation, len(state), inside)
        return {**params, 'body_jaxpr': inside.jaxpr}, inside.trails

    def _gather_before(self, equation: Any, places: range, inside: Followed) -> None:
        """Gathers the weights at these operands of a loop, if each round multiplies few rows with them.

        What depends on the batch is no weight: it may be large, and its rows were lost.
        """
        for i, place in enumerate(places):
            var = equation.invars[place]
            given = id(var) in self._users_given
            if isinstance(var, Literal) or given or var in self._follower.from_batch:
                continue
            if i in inside.multiplied and inside.multiplied[i].rows < FEW_ROWS:
                spec = closed_spec_of(self._trail(var), len(shape_of(var)))
                self._place_before(var, spec, equation)

    def _sum_behind(self, equation: Any, carried: int, inside: Followed) -> None:
        """Leaves sums over few rows of a round whole: devices add them up once, behind the loop."""
        summed = [
            (var, inside.trails[i])
            for i, var in enumerate(equation.outvars[:carried])
            if i in inside.summed
            and not self._follower.has_rows(inside.trails[i])
            and shape_of(var)
            and not isinstance(var, DropVar)
            and id(var) not in self._users_own
        ]
        self._summed = [var for var, _ in summed]
        # The compiler alone adds them up in each round.
        elements = sum(self._weights.size_without_rows(*each) for each in summed)
        self._follower.sums[id(equation)] = elements * equation.params.get('length', 1)

    def _settled(
        self, body: Any, first: Sequence[Trail], arguments: Callable[[Sequence[Trail]], list[Trail]]
    ) -> list[Trail]:
        """The trails of what a loop carries: those of the first round or of what a round returns.

        State that begins as zeros has rows from the first round on. Rows that a round loses are not kept.
        """
        state = list(first)
        variables = opened(body).outvars[: len(state)]

        def returned() -> Sequence[Trail]:
            return self._follower.jaxpr(body, arguments(state)).trails[: len(state)]

        for _ in range(_ROUNDS):
            grown = [
                self._follower.possible(merged(pair, len(shape_of(var))), var)
                for *pair, var in zip(state, returned(), variables, strict=True)
            ]
            if grown == state:
                break
            state = grown
        for _ in range(_ROUNDS):
            kept = [common(*pair) for pair in zip(state, returned(), strict=True)]
            if kept == state:
                break
            state = kept
        return state


def _row(trail: Trail) -> Trail:
    """The trail of one element of a stack."""
    return trail[1:] if any(trail[1:]) else LOST
