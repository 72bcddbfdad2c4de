"""Base of the jaxpr editor: the values of one jaxpr, and the partitioned equations written so far."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Container, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from scalax._jax.equations import Literal, open_jaxpr, shape_of
from scalax._jax.manual_axes import is_backward
from scalax._jax.rewriting import constants_of
from scalax._jax.tracing import memory_space
from scalax._spmd.context import PartitionContext
from scalax._spmd.operations.kernel_gradients import kernel_gradient_spec
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
    PartitionedJaxpr,
    Value,
)


class EditorBase:
    """The partitioned version of one jaxpr, under construction.

    Args:
        context: the properties of the step that all its jaxprs share.
        jaxpr: the jaxpr, open or closed.
        arguments: the properties of its arguments.
        backward: whether a backward pass calls it.
        caller: the equation that calls it; None for the jaxpr of the step.

    Attributes:
        context: the properties of the step that all its jaxprs share.
        code: makes equations.
        jaxpr: the jaxpr.
        is_step: whether it is the jaxpr of the step.
        last_equation: its last equation, whose line the conversions of results get.
        eqns: the new equations.
        values: the values so far, by the ids of their variables.
        uses: the equations that use each variable.
        constants: the new variables of the constants.
        arguments: the new variables of the arguments.
        collectives: the collectives so far.
        gathered_arguments: the indices of the arguments that are gathered.
        shards_results: whether the current equation computes a part of its results on each device.
        converts_results: whether the results of the step are being converted.
        local_rows: the placements of the rows of equations that each device runs on its local rows (after a
            local sort), by equation id.
        local_group_sizes: the sizes of each device's groups, by the id of the grouped matmul.
        result_specs: the specs along the Auto axes to which results are constrained, by equation id.
        unmerged: results of kernels with merged dimensions apart, by the id of the merged variable.
        feature_dims: for equations around features that devices shard, by equation id and axis, the sharded
            dimension of each operand that has one; None for other matmuls.
        reordered_stacks: stacks of layers in the order of a pipeline's stages, by variable id.
    """

    def __init__(
        self,
        context: PartitionContext,
        jaxpr: Any,
        arguments: Sequence[Argument],
        backward: bool,
        caller: Any,
    ) -> None:
        self.context, self.code, self.jaxpr = context, context.code, jaxpr
        self._backward, self.is_step = backward, caller is None
        inner = open_jaxpr(jaxpr)
        self.last_equation = inner.eqns[-1] if inner.eqns else caller or self.code.blank
        self.eqns: list[Any] = []
        self.collectives: list[Collective] = []
        self.gathered_arguments: set[int] = set()
        self.shards_results = self.converts_results = False
        self.local_rows: dict[int, Placements] = {}
        self.local_group_sizes: dict[int, Any] = {}
        self._bytes_gathered = 0
        self._last_use: dict[int, int] = {}  # id of gathered state -> bytes gathered before
        self.feature_dims: dict[tuple[int, int], dict[int, int] | None] = {}
        self.reordered_stacks: dict[Any, Any] = {}
        self.result_specs: dict[int, PartitionSpec] = {}
        self.unmerged: dict[int, Any] = {}
        self._microbatch_index: Any = None
        self._sliced: dict[int, tuple[Placements, list[Any]]] = {}
        self.uses = Uses(inner)
        self._trip_counts = [argument.trip_count for argument in arguments]
        self.values = {
            id(var): Value(var, context.replicated, self.code.var(var, shape_of(var)))
            for var, _ in constants_of(jaxpr)
        }
        self.constants = [value.atom for value in self.values.values()]
        self.arguments = []
        for i, (var, argument) in enumerate(zip(inner.invars, arguments, strict=True)):
            atom = self.code.var(var, local_shape(shape_of(var), argument.placements, context.sizes))
            value = Value(
                var, argument.placements, atom, i if argument.is_state else None, is_zero=argument.is_zero
            )
            value.argument = i
            self.values[id(var)] = value
            self.arguments.append(atom)

    def read(self, atom: Any) -> Value:
        """Returns the value of a variable or literal."""
        if isinstance(atom, Literal):
            # The gradient of an integer (float0) has no values.
            dtype: Any = getattr(atom.aval, 'dtype', None)
            zero = not shape_of(atom) and dtype != jax.dtypes.float0 and atom.val == 0
            return Value(atom, self.context.replicated, self.code.literal(atom), is_zero=bool(zero))
        return self.values[id(atom)]

    def producer_of(self, value: Value) -> Any:
        """Returns the equation that computes a value. Conversions of the value get its line."""
        return self._producers.get(id(value.var), self.last_equation)

    def equation_of(self, var: Any) -> Any:
        """Returns the equation that computes a variable; None for arguments and constants."""
        return self._producers.get(id(var))

    @functools.cached_property
    def _producers(self) -> dict[int, Any]:
        """The equation that computes each variable, by variable id."""
        return {id(var): equation for equation in open_jaxpr(self.jaxpr).eqns for var in equation.outvars}

    def define(self, var: Any, placements: Placements, atom: Any = None) -> Value:
        """Defines a variable of the original jaxpr, and returns its value.

        Args:
            var: the variable.
            placements: its placements.
            atom: the atom that holds it; None makes a new variable.
        """
        if atom is None:
            if self.context.is_mixed and not self.divides(shape_of(var), placements):
                raise CannotPartition(self.last_equation, f'{placements} split {shape_of(var)} unevenly')
            atom = self.code.var(var, local_shape(shape_of(var), placements, self.context.sizes))
        value = self.values[id(var)] = Value(var, placements, atom)
        return value

    def alias(self, var: Any, value: Value) -> None:
        """Defines a variable as another name of a value."""
        self.values[id(var)] = value
        self.uses.add(value.var, var)

    def divides(self, shape: Sequence[int], placements: Placements) -> bool:
        """Returns whether all devices have blocks of the same size."""
        counts = shard_counts(placements, self.context.sizes, len(shape))
        return not any(size % count for size, count in zip(shape, counts, strict=True))

    @property
    def microbatch_index(self) -> Any:
        """The variable of the index of the microbatch, in a pipeline."""
        if self._microbatch_index is None:
            self._microbatch_index = self.code.scalar_var('int32')
        return self._microbatch_index

    @property
    def microbatch_indices(self) -> list[Any]:
        """A list with that variable if some equation uses it; empty otherwise."""
        return [] if self._microbatch_index is None else [self._microbatch_index]

    def microbatch_index_of(self, inner: PartitionedJaxpr) -> list[Any]:
        """Returns a list with the index of the microbatch if an inner jaxpr takes it as first argument."""
        return [self.microbatch_index] if inner.takes_microbatch_index else []

    def is_backward(self, equation: Any) -> bool:
        """Returns whether an equation belongs to a backward pass."""
        return self._backward or is_backward(equation)

    def include(
        self,
        inner: PartitionedJaxpr,
        operands: Sequence[Value],
        times: int | None = 1,
        stacks: Container[int] = (),
    ) -> None:
        """Adds the collectives and gathered arguments of an inner jaxpr to those of this jaxpr.

        Args:
            inner: the partitioned inner jaxpr.
            operands: the operands of the call.
            times: how often it runs; None if that is not known.
            stacks: the indices of the scanned operands (xs).
        """
        for collective in inner.collectives:
            origin = collective.origin
            if isinstance(origin, int):
                origin = operands[origin].origin
            count = collective.count * (times or 0)
            self._record(dataclasses.replace(collective, count=count, origin=origin))
        for i in inner.gathered_arguments:
            if i not in stacks:
                self._record_gathered(operands[i])

    def _record(self, collective: Collective) -> None:
        self.collectives.append(collective)
        if collective.gathers_state:
            self._bytes_gathered += collective.bytes

    def _record_gathered(self, value: Value) -> None:
        """Records the argument that is gathered, or from which a gathered value is computed.

        Examples count as gathered only if no other equation uses them (which would use the local examples),
        and if the results are not sharded.
        """
        if isinstance(value.origin, int):
            self.gathered_arguments.add(value.origin)
        elif value.argument is not None and not self.shards_results and self.uses.count(value.var) == 1:
            self.gathered_arguments.add(value.argument)

    def constrain_auto(self, spec: PartitionSpec, atom: Any, equation: Any) -> Any:
        """Returns a block that is constrained to a spec along the Auto axes."""
        if all(entry is PartitionSpec.UNCONSTRAINED for entry in spec):
            return atom
        written = self.code.constraint(spec, equation, atom)
        self.eqns.append(written)
        return written.outvars[0]

    def constrain_result(self, equation: Any, value: Value) -> None:
        """Constrains the first result of an equation along the Auto axes if it has a spec there."""
        spec = self.result_specs.get(id(equation))
        if spec is None and self.context.auto.sizes:
            spec = kernel_gradient_spec(equation)
        if spec is not None:
            value.atom = self.constrain_auto(spec, value.atom, equation)

    def apart(self, name: str, atoms: Sequence[Any]) -> Sequence[Any]:
        """Returns the operands of a primitive; those of a reshape have merged dimensions apart."""
        return [self.unmerged.get(id(atom), atom) for atom in atoms] if name == 'reshape' else atoms

    def trip_count_of(self, value: Value) -> int:
        """Returns how many iterations of the enclosing loops use state that they do not change."""
        return self._trip_counts[value.origin] if isinstance(value.origin, int) else 1

    def argument_info(self, value: Value, iterations: int = 1) -> Argument:
        """Returns the properties of a value as an argument of an inner jaxpr.

        Args:
            value: the value.
            iterations: how many iterations of the inner jaxpr use it.
        """
        return value.as_argument()._replace(trip_count=iterations * self.trip_count_of(value))

    def emit(self, function: Any, key: Any, equation: Any, operands: Sequence[Any]) -> Any:
        """Writes a function of one operation, with the line of *equation*, and returns its result."""
        written = self.code.equation(function, key, equation, operands)
        self.eqns.append(written)
        return written.outvars[0]

    def _barrier(self, atom: Any, equation: Any) -> Any:
        """Returns a value after an optimization barrier, which the compiler moves no operation across."""
        self.eqns.append(self.code.barrier(equation, [atom]))
        return self.eqns[-1].outvars[0]

    def add_barrier(self, values: Sequence[Value], equation: Any) -> None:
        """Puts values behind one optimization barrier: all are computed before any of them is used."""
        written = self.code.barrier(equation, [value.atom for value in values])
        self.eqns.append(written)
        for value, atom in zip(values, written.outvars, strict=True):
            value.atom = atom
            value.clear_versions()

    def move_memory(self, atom: Any, var: Any, equation: Any) -> Any:
        """Moves a block to the memory space (host or device) of a variable."""
        space = memory_space(var.aval)
        function = functools.partial(jax.device_put, device=space)
        result = self.code.var(var, shape_of(atom))
        self.eqns.append(self.code.collective(function, ('memory', space), equation, atom, result))
        return result

    def sliced_arguments(self, eqns: Sequence[Any], results: Sequence[Any]) -> dict[int, Placements]:
        """Returns the replicated arguments of which only a block is used, with its placements."""
        return {
            i: placements
            for i, (placements, _) in self._sliced.items()
            if self._is_only_sliced(i, eqns, results)
        }

    def _is_only_sliced(self, i: int, eqns: Sequence[Any], results: Sequence[Any]) -> bool:
        """Whether the equations use an argument through its slices alone."""
        atom, slices = self.arguments[i], {*map(id, self._sliced[i][1])}
        users = [equation for equation in eqns if any(x is atom for x in equation.invars)]
        return all(id(equation) in slices for equation in users) and not any(x is atom for x in results)
