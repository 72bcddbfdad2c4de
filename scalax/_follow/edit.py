"""A jaxpr that is written anew, equation by equation, with constraints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from scalax._follow.shared import Shared
from scalax._follow.splits import Costs
from scalax._follow.trail import LOST, Trail, spec_of
from scalax._follow.types import Followed, Noted, Use
from scalax._follow.weights import Weights
from scalax._jax.equations import PLACES, DropVar, is_on_device, opened, shape_of
from scalax._jax.primitives import primitive_name
from scalax._jaxprs.user_shardings import placed_by_user


class Edit:
    """One jaxpr, and what is known of it so far.

    Here and in the attributes the keys for variables are their ids: literals are not hashable.

    Args:
        shared: what is known of all jaxprs.
        jaxpr: the jaxpr.
        trails: those of its arguments.
        use: how the jaxpr is used.

    Attributes:
        equations: the new equations.
        on_trail: variable -> its trail.
        constrained: variable -> the variable behind its constraint.
        kept: the values that are constrained, those of jaxprs inside it too.
        lost: where rows were lost, likewise.
        moved: the equations whose rows move to other devices, likewise.
        costs: what the dimensions that may stay split send either way, likewise.
        weights: its arguments without rows, and what is multiplied with them.
        replaced: operand of the equation at hand -> what stands in its place, for this equation.
        summed: the results of the loop at hand that are summed behind it.
        parts: the result of a reshape, such as a batch in parts -> the reshape, and the trail of its operand.
        users_given: the values that the user places: the results of constraints, of `jax.device_put` with a
            sharding, of a `jit` with `out_shardings`, and the arguments of one with `in_shardings`.
        users_own: these, the values that a constraint, such a move or such a `jit` takes, and the results of
            this jaxpr that `out_shardings` place.
    """

    def __init__(self, shared: Shared, jaxpr: Any, trails: Sequence[Trail], use: Use) -> None:
        self.shared, self.follow, self.jaxpr, self.use = shared, shared.follow, jaxpr, use
        inner = opened(jaxpr)
        self.on_trail = {id(var): trail for var, trail in zip(inner.invars, trails, strict=True) if trail}
        self.equations: list[Any] = []
        self.constrained: dict[int, Any] = {}
        self.kept: list[Noted] = []
        self.lost: list[Noted] = []
        self.moved: list[Noted] = []
        arguments = {var: i for i, var in enumerate(inner.invars) if not shared.has_rows(trails[i])}
        self.weights = Weights(arguments, use.rounds, shared.trails)
        self.costs = Costs(shared.splits, inner, self.weights)
        self.replaced: dict[int, Any] = {}
        self.summed: list[Any] = []
        self._there: dict[tuple[int, Trail], Any] = {}  # a variable and where it moves to -> the one there
        self.parts: dict[int, tuple[Any, Trail]] = {}
        self.users_given = {id(inner.invars[i]) for i in use.taken}
        self.users_own = {id(inner.outvars[i]) for i in use.given}
        for equation in [each for each in inner.eqns if primitive_name(each) in PLACES]:
            taken, given = placed_by_user(equation)
            self.users_own.update([id(equation.invars[i]) for i in taken])
            self.users_given.update([id(equation.outvars[i]) for i in given])
        self.users_own |= self.users_given

    def trail(self, atom: Any) -> Trail:
        """The trail of a variable or literal."""
        return self.on_trail.get(id(atom), LOST)

    def input(self, atom: Any) -> Any:
        """What stands for an operand of the equation at hand."""
        return self.replaced.get(id(atom), self.constrained.get(id(atom), atom))

    def has_open_rows(self, atom: Any) -> bool:
        """Whether a value has rows, is not in the memory of the host, and no user places it."""
        if id(atom) in self.users_own or isinstance(atom, DropVar):
            return False
        return self.shared.has_rows(self.trail(atom)) and is_on_device(atom)

    def constrain(self, var: Any, spec: PartitionSpec, equation: Any) -> None:
        """Constrains a variable, once more if it is, for all equations behind this one."""
        spec = self.shared.splits.spec(var, spec)
        added = self.shared.constraint(self.constrained.get(id(var), var), spec, equation)
        self.equations.append(added)
        self.constrained[id(var)] = added.outvars[0]

    def hold(self, equation: Any) -> None:
        """Constrains what `jax.device_put` places: compiled, JAX leaves out moves inside one memory."""
        for i, sharding in placed_by_user(equation)[1].items():
            var = equation.outvars[i]
            same = isinstance(sharding, NamedSharding) and sharding.mesh.shape == self.shared.mesh.shape
            if same and is_on_device(var) and not isinstance(var, DropVar):
                self.constrain(var, sharding.spec, equation)

    def place_before(self, var: Any, spec: PartitionSpec, equation: Any) -> None:
        """Constrains an operand of the equation at hand, and of no other."""
        added = self.shared.constraint(self.input(var), self.shared.splits.spec(var, spec), equation)
        self.equations.append(added)
        self.replaced[id(var)] = added.outvars[0]

    def move_before(self, var: Any, there: Trail, specs: Sequence[PartitionSpec], equation: Any) -> None:
        """Moves an operand of the equation at hand, by several specs; once for all that have it there."""
        if (id(var), there) not in self._there:
            for spec in specs:
                self.place_before(var, spec, equation)
            self._there[id(var), there] = self.replaced[id(var)]
        self.replaced[id(var)] = self._there[id(var), there]

    def gather_before(self, var: Any, here: Trail, there: Trail, equation: Any) -> None:
        """Gathers an operand of the equation at hand along the axes that are in the first trail alone."""
        there = there or ((),) * len(shape_of(var))
        whole = {i for i, pair in enumerate(zip(here, there, strict=True)) if pair[0] != pair[1]}
        # At both ends: else the compiler might compute it where it moves to.
        self.move_before(var, there, [spec_of(here), spec_of(there, whole)], equation)

    def note_loss(self, equation: Any, values: Sequence[Any]) -> None:
        """Takes note of an equation that lost the rows of these of its operands or results."""
        largest = max(values, key=lambda var: math.prod(shape_of(var)), default=None)
        if largest is not None and shape_of(largest):
            self.lost.append(Noted(equation, largest.aval, rows=self.trail(largest)))

    def note_move(self, equation: Any, value: Any) -> None:
        """Takes note of an equation whose rows move to this value."""
        self.moved.append(Noted(equation, value.aval))

    def inside(
        self, equation: Any, jaxpr: Any, trails: Sequence[Trail], use: Use, times: int = 1
    ) -> Followed:
        """A jaxpr of an equation, followed; what is kept, lost and moved in it is noted here as well.

        Args:
            equation: the equation.
            jaxpr: the jaxpr.
            trails: those of its arguments.
            use: how the equation uses it.
            times: how often it runs.
        """
        found = self.follow(jaxpr, trails, use)
        self.note_inside(equation, found, times)
        return found

    def note_inside(self, equation: Any, found: Followed, times: int = 1) -> None:
        """Takes note of what is kept, lost and moved in a jaxpr of an equation, which runs so often."""
        pairs = (self.kept, found.kept), (self.lost, found.lost), (self.moved, found.moved)
        for mine, theirs in pairs:
            mine += [dataclasses.replace(each, calls=(*each.calls, equation)) for each in theirs]
        self.costs.note_inside(found.gathered, found.sent, times)
