"""The pass: follows the rows of a batch through a jaxpr, and constrains values that hold them.

It goes forward, from the arguments to the results. Each equation says where the rows are in its results
(`primitives`); a primitive that is not known loses them, and then the compiler decides as ever. Gradients
are equations like others: by the time the pass sees them, JAX has derived them.

A constraint stands where the compiler has a choice: behind products of rows and weights, where rows are
looked up or scattered, and at both ends of the body of a loop. Dimensions without rows are left open. What a
user's constraint takes is not constrained before it.

Weights are not constrained. So each use gathers them, and their gradients, sums over rows, go where the
shardings of the results say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Sequence
from typing import Any

from jax.extend.core import DropVar, Literal
from jax.sharding import AbstractMesh, Mesh

from scalax._follow.constraint import constraint
from scalax._follow.jaxprs import CALLS, opened, replaced, scan_parts, shape_of
from scalax._follow.primitives import CHOICES, RULES
from scalax._follow.trail import LOST, Trail, common, merged, possible

# Loops settle after two or three rounds of following what they carry; more are not tried.
_ROUNDS = 8
_LOOPS = ('scan', 'while', 'cond')


@dataclasses.dataclass(frozen=True)
class Kept:
    """A value that is kept where it is.

    Attributes:
        aval: its shape and dtype.
        trail: the mesh axes of each dimension.
        equation: what computes it.
    """

    aval: Any
    trail: Trail
    equation: Any


@dataclasses.dataclass(frozen=True)
class Lost:
    """An equation that lost rows, without a rule for its primitive, or that divides them otherwise.

    Attributes:
        equation: the equation.
        aval: its largest result.
    """

    equation: Any
    aval: Any


@dataclasses.dataclass(frozen=True)
class Followed:
    """A jaxpr that was followed.

    Attributes:
        jaxpr: the jaxpr, with constraints.
        trails: those of its results.
        kept: the values that are constrained, those of jaxprs inside it too.
        lost: where rows were lost, likewise.
    """

    jaxpr: Any
    trails: tuple[Trail, ...]
    kept: tuple[Kept, ...] = ()
    lost: tuple[Lost, ...] = ()


def follow(
    jaxpr: Any, trails: Sequence[Trail], mesh: Mesh | AbstractMesh, batch_axes: Container[str]
) -> Followed:
    """Follows the rows of the batch from the arguments of a jaxpr.

    Args:
        jaxpr: the jaxpr, open or closed.
        trails: those of its arguments.
        mesh: a mesh of Auto axes. It is in force.
        batch_axes: the mesh axes over which rows of the batch are.
    """
    return _Follower(mesh, batch_axes).jaxpr(jaxpr, trails)


class _Follower:
    """Follows jaxprs over a mesh; one that is used in several places with the same trails stays one."""

    def __init__(self, mesh: Mesh | AbstractMesh, batch_axes: Container[str]) -> None:
        self.batch_axes = batch_axes
        self._mesh, self._sizes = mesh, dict(mesh.shape)
        # The jaxprs are kept as well, so that no other object gets their ids.
        self._known: dict[Any, tuple[Any, Followed]] = {}

    def jaxpr(self, jaxpr: Any, trails: Sequence[Trail], *, is_round: bool = False) -> Followed:
        """The jaxpr with constraints; if it is a round of a loop, on its arguments and results as well."""
        key = id(jaxpr), tuple(trails), is_round
        if key not in self._known:
            arguments = opened(jaxpr).invars
            on_trail = {var: trail for var, trail in zip(arguments, trails, strict=True) if trail}
            if on_trail and opened(jaxpr).eqns:
                found = _Edit(self, jaxpr, on_trail).made(is_round)
            else:
                found = Followed(
                    jaxpr,
                    tuple(
                        on_trail.get(var, LOST) if not isinstance(var, Literal) else LOST
                        for var in opened(jaxpr).outvars
                    ),
                )
            self._known[key] = jaxpr, found
        return self._known[key][1]

    def possible(self, trail: Trail, var: Any) -> Trail:
        """The part of a trail that a variable can have."""
        return possible(trail, shape_of(var), self._sizes)

    def has_rows(self, trail: Trail) -> bool:
        """Whether some dimension of a value holds rows of the batch."""
        return any(axis in self.batch_axes for axes in trail for axis in axes)

    def constraint(self, var: Any, trail: Trail, source_info: Any) -> Any:
        """An equation that constrains a variable."""
        return constraint(var, trail, self._mesh, source_info)


class _Edit:
    """One jaxpr, followed equation by equation.

    Args:
        follower: follows the jaxprs inside it.
        jaxpr: the jaxpr.
        on_trail: the trails of its arguments.
    """

    def __init__(self, follower: _Follower, jaxpr: Any, on_trail: dict[Any, Trail]) -> None:
        self._follower, self._jaxpr, self._on_trail = follower, jaxpr, on_trail
        self._equations: list[Any] = []
        self._constrained: dict[Any, Any] = {}  # variable -> the variable behind its constraint
        self._kept: list[Kept] = []
        self._lost: list[Lost] = []
        users = [each for each in opened(jaxpr).eqns if each.primitive.name == 'sharding_constraint']
        self._users_own = {each.invars[0] for each in users if not isinstance(each.invars[0], Literal)}

    def made(self, is_round: bool) -> Followed:
        """The jaxpr with constraints."""
        jaxpr = opened(self._jaxpr)
        first, last = jaxpr.eqns[0], jaxpr.eqns[-1]
        if is_round:
            for var in jaxpr.invars:
                self._keep(var, first)
        for equation in jaxpr.eqns:
            self._equation(equation)
        if is_round:
            for atom in jaxpr.outvars:
                if not isinstance(atom, Literal) and atom not in self._constrained:
                    self._keep(atom, last)
        results = [self._constrained_form(atom) for atom in jaxpr.outvars]
        return Followed(
            replaced(self._jaxpr, eqns=self._equations, outvars=results),
            tuple(map(self._trail, jaxpr.outvars)),
            tuple(self._kept),
            tuple(self._lost),
        )

    def _trail(self, atom: Any) -> Trail:
        return LOST if isinstance(atom, Literal) else self._on_trail.get(atom, LOST)

    def _constrained_form(self, atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else self._constrained.get(atom, atom)

    def _keep(self, var: Any, equation: Any) -> None:
        """Constrains a variable to its trail, if it has one and no constraint of the user's takes it."""
        trail = self._on_trail.get(var, LOST)
        if var in self._users_own or isinstance(var, DropVar) or not self._follower.has_rows(trail):
            return
        added = self._follower.constraint(var, trail, equation.source_info)
        self._equations.append(added)
        self._constrained[var] = added.outvars[0]
        self._kept.append(Kept(var.aval, trail, equation))

    def _equation(self, equation: Any) -> None:
        operands = [self._trail(atom) for atom in equation.invars]
        params, results = self._results(equation, operands) if any(operands) else (equation.params, ())
        changed = {} if params is equation.params else {'params': params}
        if not self._constrained.keys().isdisjoint(
            atom for atom in equation.invars if not isinstance(atom, Literal)
        ):
            changed['invars'] = list(map(self._constrained_form, equation.invars))
        self._equations.append(equation.replace(**changed) if changed else equation)
        for var, trail in zip(equation.outvars, results, strict=False):
            trail = self._follower.possible(trail, var)
            if trail:
                self._on_trail[var] = trail
                if self._is_choice(equation, operands):
                    self._keep(var, equation)

    def _is_choice(self, equation: Any, operands: Sequence[Trail]) -> bool:
        """Whether the compiler might put the results of an equation elsewhere.

        What is computed of rows alone stays with them.
        """
        name = equation.primitive.name
        return name in _LOOPS or (name in CHOICES and not all(map(self._follower.has_rows, operands)))

    def _results(self, equation: Any, operands: Sequence[Trail]) -> tuple[Any, Sequence[Trail]]:
        """The parameters of an equation, with constraints in its jaxprs, and the trails of its results."""
        name, params = equation.primitive.name, equation.params
        if name in RULES:
            results = RULES[name](equation, operands)
            if name == 'reshape' and not any(results):
                self._note_loss(equation)
            return params, results
        if name in CALLS:
            inside = self._inside(params[CALLS[name]], operands)
            return {**params, CALLS[name]: inside.jaxpr}, inside.trails
        if name == 'scan':
            return self._scan(equation, operands)
        if name == 'while':
            return self._while(equation, operands)
        if name == 'cond':
            branches = [self._inside(branch, operands[1:]) for branch in params['branches']]
            trails = zip(*(branch.trails for branch in branches), strict=True)
            return {**params, 'branches': tuple(branch.jaxpr for branch in branches)}, [
                merged(each, len(shape_of(var))) for each, var in zip(trails, equation.outvars, strict=True)
            ]
        self._note_loss(equation)
        return params, ()

    def _note_loss(self, equation: Any) -> None:
        largest = max(equation.outvars, key=lambda var: getattr(var.aval, 'size', 0), default=None)
        if largest is not None and shape_of(largest):
            self._lost.append(Lost(equation, largest.aval))

    def _inside(self, jaxpr: Any, trails: Sequence[Trail], *, is_round: bool = False) -> Followed:
        """A jaxpr of an equation; what is kept and lost in it counts."""
        found = self._follower.jaxpr(jaxpr, trails, is_round=is_round)
        self._kept.extend(found.kept)
        self._lost.extend(found.lost)
        return found

    def _scan(self, equation: Any, operands: Sequence[Trail]) -> tuple[Any, Sequence[Trail]]:
        body = equation.params['jaxpr']
        constants, carried = scan_parts(equation)
        before, behind = operands[:constants], [_row(trail) for trail in operands[constants + carried :]]

        def arguments(state: Sequence[Trail]) -> list[Trail]:
            return [*before, *state, *behind]

        state = self._settled(body, operands[constants : constants + carried], arguments)
        inside = self._inside(body, arguments(state), is_round=True)
        stacked = [((), *trail) if trail else LOST for trail in inside.trails[carried:]]
        return {**equation.params, 'jaxpr': inside.jaxpr}, [*inside.trails[:carried], *stacked]

    def _while(self, equation: Any, operands: Sequence[Trail]) -> tuple[Any, Sequence[Trail]]:
        params = equation.params
        constants = params['cond_nconsts'], params['cond_nconsts'] + params['body_nconsts']

        def arguments(state: Sequence[Trail]) -> list[Trail]:
            return [*operands[slice(*constants)], *state]

        state = self._settled(params['body_jaxpr'], operands[constants[1] :], arguments)
        inside = self._inside(params['body_jaxpr'], arguments(state), is_round=True)
        return {**params, 'body_jaxpr': inside.jaxpr}, inside.trails

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
