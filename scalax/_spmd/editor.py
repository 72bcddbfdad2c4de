"""One jaxpr while it is partitioned: its values, and their conversions between placements."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from scalax._jax.equations import Literal, is_on_device, opened, shape_of, size_of
from scalax._jax.manual import is_backward, local_params
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import constants_of
from scalax._jax.tracing import memory_space
from scalax._spmd.batch.replicated_parts import part_function, part_operands
from scalax._spmd.context import Shared
from scalax._spmd.placements.auto_axes import NO_AXES, AutoDims
from scalax._spmd.placements.collectives import RESULT, SENDING, Collective, What
from scalax._spmd.placements.placement import (
    REPLICATE,
    SUM,
    Partial,
    Placement,
    Placements,
    Shard,
    local_shape,
    redistribute,
    shard_counts,
)
from scalax._spmd.placements.state_forms import is_gathered_as_operands
from scalax._spmd.uses import Uses
from scalax._spmd.values import (
    Argument,
    CannotPartition,
    MappedBlocks,
    Origin,
    Partitioned,
    Value,
    is_replicated,
    without_state,
)

_PRODUCTS = frozenset(('conv_general_dilated', 'dot_general', 'ragged_dot_general'))


class Edit:
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

    def convert(
        self,
        value: Value,
        target: Placements,
        equation: Any,
        what: What | None = None,
        *,
        keeps_state: bool = False,
    ) -> Any:
        """Returns what stands for a value in other placements, for an equation.

        Args:
            value: the value.
            target: the placements.
            equation: the equation.
            what: what it is, if that is not known of the value.
            keeps_state: whether a backward pass takes the state that was gathered for the forward pass.
        """
        if target == value.placements:
            return value.atom
        if value.is_zero:
            target = tuple([REPLICATE if isinstance(x, Partial) else x for x in target])
        source, plain = without_state(value.placements), without_state(target)
        if plain == source:
            return value.atom
        again = self.shared.options.reshard_after_forward and not keeps_state
        backward = again and value.is_state and self.is_backward(equation)
        key = plain, backward
        if backward and key not in value.versions and self._is_held(value, plain):
            value.remember(key, value.versions[plain, False])
        if key not in value.versions:
            if self.shared.is_mixed and not self.divides(value.shape, plain):
                raise CannotPartition(equation, f'{plain} split {value.shape} unevenly')
            whole = (self.shared.replicated, False)
            is_part = not has_partial(plain) and not is_replicated(plain)
            if value.is_replicated or (whole in value.versions and is_part):
                atom = self._part(value, target, equation)
            elif is_replicated(plain) and is_gathered_as_operands(value, self.read, self.uses):
                maker = value.narrow_maker
                atoms = [self.convert(self.read(operand), plain, equation) for operand in maker.invars]
                atom = self.code.var(value.var, value.shape)
                params = local_params(maker, [*map(shape_of, atoms)], [value.shape])
                self.eqns.append(self.code.local(maker, atoms, [atom], **params))
            else:
                atom = value.atom
                if backward and (plain, False) in value.versions:
                    # XLA would merge the two gathers, and keep the gathered state in between.
                    atom = self._barrier(atom, equation)
                atom = self._exchange(value, atom, source, plain, equation, what)
            value.remember(key, atom)
        atom = value.versions[key]
        if value.is_state:
            self._last_use[id(atom)] = self._bytes_gathered
        return atom

    def _is_held(self, value: Value, placements: Placements) -> bool:
        """Whether state that a forward pass gathered is held until the backward pass uses it.

        The passes gather state apart, so that none is held in between. But if the forward pass ends with
        it, and gathers less than its size behind it, a second gather would free nothing.
        """
        atom = value.versions.get((placements, False))
        if atom is None:
            return False
        size = math.prod(shape_of(atom)) * atom.aval.dtype.itemsize
        return self._bytes_gathered - self._last_use[id(atom)] < size

    def _exchange(
        self,
        value: Value,
        atom: Any,
        source: Placements,
        target: Placements,
        equation: Any,
        said: What | None = None,
    ) -> Any:
        origin = value.origin
        what: What = 'examples'
        if said is not None:
            what = said
        elif value.has_sum:
            what, origin = 'sum', RESULT if self.ends_step else origin
            layout = self.shared.wanted.of(value.var)
            if layout is not None and layout.path is None:
                origin = RESULT
            elif layout is not None:
                origin, what = layout.path, 'gradient'
        elif origin is not None or value.is_state:
            what = 'weight'
        if what == 'examples':
            origin = self._table_of(value, equation)
        auto, own = self._auto_dims(value, what), atom.aval.dtype
        dtype = self._sent_dtype(what, value, atom, equation)
        if dtype is not None:
            atom = self._cast(atom, dtype, equation)
        steps = redistribute(source, target)
        if steps and not is_on_device(value.var):
            raise CannotPartition(equation, 'it exchanges blocks of a value in the memory of the host')
        for step in steps:
            exchange = self.shared.exchange
            shape = exchange.shape(step, shape_of(atom))
            if 0 in shape:  # no device has an element
                atom = self.emit_of(_reshaped(shape), ('empty', shape), equation, [atom])
                continue
            if step.kind == 'all_to_all':
                # XLA for CPUs may lay out the blocks that it sends differently, which it then refuses.
                atom = self.emit_of(jax.lax.optimization_barrier, 'barrier', equation, [atom])
            result = self.code.var(atom, shape)
            in_turn = self.shared.in_turn in step.axes
            if in_turn and step.kind in SENDING:
                raise CannotPartition(equation, NOT_ALONE)
            numbers = [self.number] if in_turn else []
            written = exchange.equation(step, equation, [atom, *numbers], result, auto)
            if step.kind in SENDING:
                written, number = exchange.numbered(written, what)
                facts = self.is_backward(equation), number
                self._list(exchange.collective(step, equation, (atom, result), origin, what, facts))
            self.eqns.append(written)
            if step.kind == 'all_gather':
                self._note_gathered(value)
            atom = result
        if what == 'gradient' and not self.is_step:
            # XLA for GPUs would move the reduction to the next round of a loop, and hold the unreduced
            # gradients of a layer until then.
            atom = self._barrier(atom, equation)
        return atom if dtype is None else self._cast(atom, own, equation)

    def _table_of(self, value: Value, equation: Any) -> Origin:
        """Returns the state to whose blocks, or to those of its gradient, an equation brings examples.

        As a table whose rows, or the indices of which, an equation takes of other devices.
        """
        name = primitive_name(equation)
        if name in _PRODUCTS:
            others = [self.values.get(id(x)) for x in equation.invars]
            if states := [x for x in others if x is not None and x.is_state and x is not value]:
                return states[0].origin
        if name == 'gather':
            table = self.values.get(id(equation.invars[0]))
            return table.origin if table is not None and table.is_state and table is not value else None
        makes_gradient = name == 'scatter-add' or name in _PRODUCTS
        layout = self.shared.wanted.of(equation.outvars[0]) if makes_gradient else None
        return None if layout is None else layout.path

    def _sent_dtype(self, what: What, value: Value, atom: Any, equation: Any) -> Any:
        """Returns the dtype in which a value is sent, as users choose; None if it keeps its own."""
        options = self.shared.options
        if what == 'gradient':
            return options.reduce_dtype_for(atom.aval.dtype)
        if what != 'weight' or options.param_dtype is None:
            return None
        if any(x is value.var for x in equation.outvars):  # a result of the step, which meets no examples
            return None
        # An optimizer that needs all of a moment takes it as it is.
        operands = [self.values.get(id(x)) for x in equation.invars]
        meets_examples = any(x is not None and x.has_examples for x in operands)
        return options.param_dtype_for(atom.aval.dtype) if meets_examples else None

    def _cast(self, atom: Any, dtype: Any, equation: Any) -> Any:
        """Returns a value in another dtype."""
        function = functools.partial(jax.lax.convert_element_type, new_dtype=dtype)
        return self.emit_of(function, ('cast', str(dtype)), equation, [atom])

    def _auto_dims(self, value: Value, what: str) -> AutoDims:
        """Returns the Auto axes that shard each dimension of a value."""
        if not self.shared.auto.sizes:
            return NO_AXES
        layout = self.shared.wanted.of(value.var) if what == 'gradient' else None
        if layout is None:
            return self.shared.auto.of(value.var)
        sharded = dict(layout.auto)
        return tuple([sharded.get(dim, ()) for dim in range(len(value.shape))])

    def constrain_auto(self, spec: PartitionSpec, atom: Any, equation: Any) -> Any:
        """Returns a block that is constrained along other mesh axes than those of the batch."""
        if all(entry is PartitionSpec.UNCONSTRAINED for entry in spec):
            return atom
        written = self.code.constraint(spec, equation, atom)
        self.eqns.append(written)
        return written.outvars[0]

    def _part(self, value: Value, target: Placements, equation: Any) -> Any:
        """Returns each device's block of a replicated value, computed alone if that is possible."""
        if value.maker is None or has_partial(target):
            whole = value.versions.get((self.shared.replicated, False), value.atom)
            atom = self._exchange(value, whole, self.shared.replicated, target, equation)
            if value.argument is not None and not has_partial(target):
                first, slices = self._sliced.setdefault(value.argument, (target, []))
                if first == target:
                    slices += self.eqns[-1:]
            return atom
        made_by, operands = value.maker
        blocks: dict[int, list[int]] = {}
        for axis, placement in enumerate(target):
            if isinstance(placement, Shard):
                blocks.setdefault(placement.dim, []).append(axis)
        targets = [[*self.shared.replicated] for _ in operands]
        for dim, axes in blocks.items():
            for i, source in part_operands(made_by, dim).items():
                for axis in axes:
                    targets[i][axis] = Shard(source)
        atoms = [
            self.convert(operand, tuple(each), equation)
            for operand, each in zip(operands, targets, strict=True)
        ]
        sizes = self.shared.sizes
        exchange = self.shared.exchange
        block_of = [
            (dim, exchange.block(axes), math.prod(sizes[i] for i in axes)) for dim, axes in blocks.items()
        ]
        if (found := part_function(made_by, block_of)) is not None:
            function, key = found
            if any(self.shared.in_turn in axes for axes in blocks.values()):
                atoms.append(self.number)
            return self.emit_of(function, key, made_by, atoms)
        shape = local_shape(value.shape, target, sizes)
        result = self.code.var(value.var, shape)
        params = local_params(made_by, [*map(shape_of, atoms)], [shape])
        self.eqns.append(self.code.local(made_by, atoms, [result], **params))
        return result

    def reduce(self, value: Value, equation: Any) -> None:
        """Reduces a sum, for all equations behind: to the layout in which it is wanted, or to all devices."""
        self.move(value, self.reduced_placements(value.var, value.placements), equation)

    def reduced_placements(self, var: Any, placements: Placements) -> Placements:
        """Returns the placements of a variable whose sums are reduced.

        They are those of its state, or of the batch if it has a dimension of the batch; else the sums are
        reduced to all devices.
        """
        layout = self.shared.wanted.of(var)
        found = self.shared.reduced(placements, layout)
        if layout is not None or SUM not in placements:
            return found
        of_batch = self.shared.batch_dims.placements(var, found)
        return tuple(
            [
                after if before == SUM and i != self.shared.in_turn else x
                for i, (before, x, after) in enumerate(zip(placements, found, of_batch, strict=True))
            ]
        )

    def rounds_of(self, value: Value) -> int:
        """Returns how often loops around it take state that they do not change."""
        return self._rounds[value.origin] if isinstance(value.origin, int) else 1

    def move(self, value: Value, target: Placements, equation: Any, what: What | None = None) -> None:
        """Converts a value for all equations behind; *what* it is, if that is not known of the value."""
        atom = self.convert(value, target, equation, what)
        value.atom = atom
        value.place(target)
        value.forget()

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

    def settle(self, values: Sequence[Value], equation: Any) -> None:
        """Reduces the sums among values that are used more than once: one reduction serves all uses."""
        for value in values:
            if value.has_sum and self.uses.count(value.var) > 1 and not self._is_contracted(value):
                self.reduce(value, equation)

    def _is_contracted(self, value: Value) -> bool:
        """Whether products alone take a sum, and make less of it: those are reduced instead.

        As of the gradient of a product of two small weights, of which either has a gradient.
        """
        users = self.uses.equations(value.var)
        others = (True for equation in users if primitive_name(equation) != 'dot_general')
        if self.uses.is_result(value.var) or any(others) or self.shared.wanted.of(value.var) is not None:
            return False
        sizes = {id(equation): size_of(equation.outvars[0]) for equation in users}
        return 2 * sum(sizes.values()) <= size_of(value.var)

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


def _reshaped(shape: tuple[int, ...]) -> Callable[[Any], Any]:
    """The function of one operation that gives a value without elements another shape."""
    return jax.jit(lambda x: x.reshape(shape))


NOT_ALONE = 'it needs more than one microbatch'
"""Why an equation of a layer cannot run on microbatches."""


def has_partial(placements: Sequence[Placement]) -> bool:
    return any(isinstance(x, Partial) for x in placements)
