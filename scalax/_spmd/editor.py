"""One jaxpr while it is partitioned: its values so far, and the equations that are written."""

from __future__ import annotations

import functools
from collections.abc import Container, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from scalax._jax.equations import Literal, opened, shape_of
from scalax._jax.manual_axes import is_backward
from scalax._jax.rewriting import constants_of
from scalax._jax.tracing import memory_space
from scalax._spmd.context import Shared
from scalax._spmd.placements.collectives import Collective
from scalax._spmd.placements.placement import (
    Placements,
    local_shape,
    shard_counts,
)
from scalax._spmd.uses import Uses
from scalax._spmd.values import (
    Argument,
    CannotPartition,
    MappedBlocks,
    Partitioned,
    Value,
)


class Editor:
    """One jaxpr while it is partitioned.

    Args:
        shared: what is known of all jaxprs.
        jaxpr: the jaxpr, open or closed.
        arguments: what is known of its arguments.
        backward: whether it is called in a backward pass.
        at: the equation that has it inside; None of the jaxpr of a step.

    Attributes:
        shared: what is known of all jaxprs.
        code: makes equations.
        jaxpr: the jaxpr.
        is_step: whether it is that of the step.
        last: its last equation, for what is written behind all of them.
        eqns: the new equations.
        values: the values so far, by the ids of their variables.
        uses: the equations that take each variable.
        constants: the new variables of the constants.
        arguments: the new variables of the arguments.
        collectives: the collectives so far.
        gathered: the arguments, by number, that are gathered.
        shares_results: whether the equation that is written has results of which each device has a share.
        ends_step: whether the results of the step are converted.
        on_rows: by the ids of equations that each device runs on its own rows, the placements of the rows.
        group_sizes: by the ids of products of rows in groups, the sizes of each device's own groups.
        mapped_blocks: by the ids of variables, results of `shard_map` before their blocks are joined.
        changed: stacks of layers in the order in which a pipeline takes them, by the ids of the variables.
    """

    def __init__(
        self,
        shared: Shared,
        jaxpr: Any,
        arguments: Sequence[Argument],
        backward: bool,
        at: Any,
    ) -> None:
        self.shared, self.code, self.jaxpr = shared, shared.code, jaxpr
        self._backward, self.is_step = backward, at is None
        inner = opened(jaxpr)
        self.last = inner.eqns[-1] if inner.eqns else at or self.code.blank
        self.eqns: list[Any] = []
        self.collectives: list[Collective] = []
        self.gathered: set[int] = set()
        self.shares_results = self.ends_step = False
        self.on_rows: dict[int, Placements] = {}
        self.group_sizes: dict[int, Any] = {}
        self._bytes_gathered = 0
        self._last_use: dict[int, int] = {}  # of gathered state -> the bytes that were gathered by then
        self.changed: dict[Any, Any] = {}
        self.mapped_blocks: dict[int, MappedBlocks] = {}
        self._number: Any = None
        self._sliced: dict[int, tuple[Placements, list[Any]]] = {}
        self.uses = Uses(inner)
        self._rounds = [argument.rounds for argument in arguments]
        self.values = {
            id(var): Value(var, shared.replicated, self.code.var(var, shape_of(var)))
            for var, _ in constants_of(jaxpr)
        }
        self.constants = [value.atom for value in self.values.values()]
        self.arguments = []
        for i, (var, argument) in enumerate(zip(inner.invars, arguments, strict=True)):
            atom = self.code.var(var, local_shape(shape_of(var), argument.placements, shared.sizes))
            value = Value(
                var, argument.placements, atom, i if argument.is_state else None, is_zero=argument.is_zero
            )
            value.argument = i
            self.values[id(var)] = value
            self.arguments.append(atom)

    def read(self, atom: Any) -> Value:
        """Returns the value of a variable or literal."""
        if isinstance(atom, Literal):
            # The gradient of an integer has no values.
            dtype: Any = getattr(atom.aval, 'dtype', None)
            zero = not shape_of(atom) and dtype != jax.dtypes.float0 and atom.val == 0
            return Value(atom, self.shared.replicated, self.code.literal(atom), is_zero=bool(zero))
        return self.values[id(atom)]

    def maker_of(self, value: Value) -> Any:
        """Returns the equation that computes a value: what converts the value is of the same line."""
        return self._makers.get(id(value.var), self.last)

    @functools.cached_property
    def _makers(self) -> dict[int, Any]:
        """The equations that compute variables, by the ids of these."""
        return {id(var): equation for equation in opened(self.jaxpr).eqns for var in equation.outvars}

    def define(self, var: Any, placements: Placements, atom: Any = None) -> Value:
        """Defines a variable, and returns its value; without an *atom* with a new variable for it."""
        if atom is None:
            if self.shared.is_mixed and not self.divides(shape_of(var), placements):
                raise CannotPartition(self.last, f'{placements} split {shape_of(var)} unevenly')
            atom = self.code.var(var, local_shape(shape_of(var), placements, self.shared.sizes))
        value = self.values[id(var)] = Value(var, placements, atom)
        return value

    def alias(self, var: Any, value: Value) -> None:
        """Defines a variable as another name of a value."""
        self.values[id(var)] = value
        self.uses.add(value.var, var)

    def divides(self, shape: Sequence[int], placements: Placements) -> bool:
        """Whether blocks in these placements have the same size on all devices."""
        counts = shard_counts(placements, self.shared.sizes, len(shape))
        return not any(size % count for size, count in zip(shape, counts, strict=True))

    @property
    def number(self) -> Any:
        """The variable of the number of the microbatch, in a pipeline."""
        if self._number is None:
            self._number = self.code.scalar('int32')
        return self._number

    @property
    def numbers(self) -> list[Any]:
        """The same if something takes it, in a list."""
        return [] if self._number is None else [self._number]

    def is_backward(self, equation: Any) -> bool:
        """Whether an equation is of a backward pass."""
        return self._backward or is_backward(equation)

    def include(
        self,
        inner: Partitioned,
        operands: Sequence[Value],
        times: int | None = 1,
        stacks: Container[int] = (),
    ) -> None:
        """Takes note of what a jaxpr inside does with these operands, so many times.

        Args:
            inner: the jaxpr inside.
            operands: the operands.
            times: how often it runs; None if that is not known.
            stacks: the operands, by number, of which it takes an element at a time.
        """
        for each in inner.collectives:
            origin = operands[each.of].origin if isinstance(each.of, int) else each.of
            self._list(
                Collective(
                    each.kind,
                    each.axes,
                    each.bytes,
                    each.count * (times or 0),
                    each.equation,
                    origin,
                    each.what,
                    each.value,
                    each.is_backward,
                    each.number,
                    each.reduce_op,
                )
            )
        for i in inner.gathered:
            if i not in stacks:
                self._note_gathered(operands[i])

    def _list(self, collective: Collective) -> None:
        self.collectives.append(collective)
        if collective.gathers_state:
            self._bytes_gathered += collective.bytes

    def _note_gathered(self, value: Value) -> None:
        """Takes note of an argument that is gathered, or of that whose form a gathered value is.

        Examples that something else uses as well count as not gathered: each device uses its own ones there.
        So do those of which each device computes a share of the results.
        """
        if isinstance(value.origin, int):
            self.gathered.add(value.origin)
        elif value.argument is not None and not self.shares_results and self.uses.count(value.var) == 1:
            self.gathered.add(value.argument)

    def constrain_auto(self, spec: PartitionSpec, atom: Any, equation: Any) -> Any:
        """Returns a block that is constrained along other mesh axes than those of the batch."""
        if all(entry is PartitionSpec.UNCONSTRAINED for entry in spec):
            return atom
        written = self.code.constraint(spec, equation, atom)
        self.eqns.append(written)
        return written.outvars[0]

    def rounds_of(self, value: Value) -> int:
        """Returns how often loops around it take state that they do not change."""
        return self._rounds[value.origin] if isinstance(value.origin, int) else 1

    def emit_of(self, function: Any, key: Any, equation: Any, operands: Sequence[Any]) -> Any:
        """Returns the result of a function of one operation, written for an equation."""
        written = self.code.equation(function, key, equation, operands)
        self.eqns.append(written)
        return written.outvars[0]

    def _barrier(self, atom: Any, equation: Any) -> Any:
        """Returns a value behind a barrier, which the compiler moves nothing across."""
        self.eqns.append(self.code.barrier(equation, atom))
        return self.eqns[-1].outvars[0]

    def tie(self, values: Sequence[Value], equation: Any) -> None:
        """Puts values behind one barrier, so that all of them are computed before any of them is used."""
        function, key = _barrier_of_all, ('barrier of all', len(values))
        written = self.code.equation(function, key, equation, [value.atom for value in values])
        self.eqns.append(written)
        for value, atom in zip(values, written.outvars, strict=True):
            value.atom = atom
            value.forget()

    def move_memory(self, atom: Any, var: Any, equation: Any) -> Any:
        """Returns what stands for a block in the memory of a variable, the host's or that of devices."""
        space = memory_space(var.aval)
        function = functools.partial(jax.device_put, device=space)
        result = self.code.var(var, shape_of(atom))
        self.eqns.append(self.code.exchange(function, ('memory', space), equation, atom, result))
        return result

    def only_sliced(self, eqns: Sequence[Any], results: Sequence[Any]) -> dict[int, Placements]:
        """Returns the replicated arguments of which these equations use blocks only, and where these are."""
        return {i: each[0] for i, each in self._sliced.items() if self._is_only_sliced(i, eqns, results)}

    def _is_only_sliced(self, i: int, eqns: Sequence[Any], results: Sequence[Any]) -> bool:
        """Whether blocks of an argument are used, and not all of it."""
        atom, slices = self.arguments[i], {*map(id, self._sliced[i][1])}
        used = [eqn for eqn in eqns if any(x is atom for x in eqn.invars)]
        return all(id(eqn) in slices for eqn in used) and not any(x is atom for x in results)


def _barrier_of_all(*values: Any) -> Any:
    return jax.lax.optimization_barrier(values)
