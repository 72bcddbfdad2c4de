"""Partitioning of `scan`: the placements of its carry, consts, xs and ys, and what is gathered before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scalax._jax.equations import Loop, loop_of, size_of, trip_count_param
from scalax._jax.manual_axes import scan_counts
from scalax._jaxpr.carry_accumulation import carry_reductions
from scalax._spmd.context import PartitionContext
from scalax._spmd.conversions import JaxprEditor
from scalax._spmd.loops.carry_placements import carry_fixpoint
from scalax._spmd.loops.example_loops import independent_axes
from scalax._spmd.loops.forward_results import finish_forward_results
from scalax._spmd.loops.microbatch_inputs import xs_placements
from scalax._spmd.placements.placement import SUM, Placements, Shard, shards_examples
from scalax._spmd.values import REDUCE_TO_STATE, Argument, PartitionedJaxpr, ReductionTarget, Value


def partition_scan(editor: JaxprEditor, equation: Any, values: Sequence[Value]) -> None:
    """Writes a `scan` whose body runs on local shards.

    A scan over a sharded dimension runs on the local shard if its iterations are independent; otherwise, its
    xs are gathered. Loop-invariant state is gathered before the scan.
    """
    if id(equation) in editor.context.pipelines:
        # Imported here, because few steps have pipelines.
        from scalax._spmd.pipelines.partition_pipeline import partition_pipeline

        partition_pipeline(editor, equation, values, editor.context.pipelines[id(equation)])
        return
    if editor.is_backward(equation):
        finish_forward_results(editor, equation, values)
    _ScanPartitioner(editor, equation, values).write()


class _ScanPartitioner:
    """Partitions one `scan`.

    The body is partitioned again after each change of the placements of its arguments.
    """

    def __init__(self, editor: JaxprEditor, equation: Any, values: Sequence[Value]) -> None:
        self._editor, self._equation = editor, equation
        self._loop = loop = loop_of(equation)
        consts, self._init, xs = map(list, loop.split(values))
        editor.reduce_all([*consts, *xs], equation)
        xs = [
            editor.converted(x, placements, equation)
            for x, placements in zip(xs, xs_placements(editor, loop, xs), strict=True)
        ]
        self._independent = independent = independent_axes(editor, loop, self._init, xs)
        if independent.axes:
            consts = [editor.converted(x, independent.replicated(x.placements), equation) for x in consts]
            xs = [editor.converted(x, independent.sharded(x.placements), equation) for x in xs]
        self._consts = consts
        self._xs = [editor.converted(x, independent.unsharded_stack(x.placements), equation) for x in xs]
        # Along independent axes, devices run their iterations without any exchange.
        self._context = editor.context.along(independent.others)
        self._const_arguments = [*map(self._const_argument, self._consts)]
        self._element_arguments = [*map(self._element_argument, self._xs)]
        self._carried = [*map(independent.along_others, _initial_carry_placements(loop, self._init))]
        self._reduced: set[tuple[int, int]] = set()
        self._body = self._partition_body()

    def write(self) -> None:
        """Writes the partitioned scan, and defines its results."""
        carries_examples = any(map(_have_examples, self._carried))
        if self._reduces_in_loop() and not carries_examples:
            self._reduced = {*_sums_of_sharded_state(self._context, self._equation, self._carried)}
            self._body = self._partition_body()
        self._gather_consts(carries_examples=carries_examples)
        self._gather_consts(carries_examples=carries_examples)
        self._gather_xs()
        sliced = {i: x for i, x in self._body.sliced_arguments.items() if i < self._loop.num_consts}
        if sliced:
            self._convert_consts(sliced)
        if [*self._body.placements[: self._loop.num_carry]] != self._carried:
            self._body = self._partition_body_for(self._carried)
        self._write_equation()

    def _const_argument(self, value: Value) -> Argument:
        argument = self._editor.argument_info(value, self._loop.length or 1)
        return self._independent.body_argument(argument)

    def _element_argument(self, value: Value) -> Argument:
        argument = self._independent.body_argument(value.as_argument())
        return argument._replace(placements=_element_placements(argument.placements))

    def _partition_body(self) -> PartitionedJaxpr:
        """Partitions the body with carry placements that are equal before and after it."""
        unspecified = [None] * self._loop.num_carry
        return carry_fixpoint(
            lambda: self._partition_body_for(unspecified), self._carried, self._equation, self._reduced
        )

    def _partition_body_for(self, carry_targets: Iterable[Placements | None]) -> PartitionedJaxpr:
        arguments = [*self._const_arguments, *map(Argument, self._carried), *self._element_arguments]
        num_ys = len(self._equation.outvars) - self._loop.num_carry
        targets: list[Placements | ReductionTarget | None] = [*carry_targets, *[REDUCE_TO_STATE] * num_ys]
        backward = self._editor.is_backward(self._equation)
        return self._context.partition(
            self._loop.body, arguments, targets, backward=backward, caller=self._equation
        )

    def _reduces_in_loop(self) -> bool:
        """Whether gradients of sharded weights are reduced in each iteration, and not once after the scan."""
        reduces = self._context.options.reduce_per_microbatch
        if reduces is not None:
            return reduces
        carry = self._equation.outvars[: self._loop.num_carry]
        return not _take_little_memory([x for x in carry if self._context.reduction_layouts.is_sharded(x)])

    def _gather_consts(self, *, carries_examples: bool) -> None:
        """Gathers, before the scan, the consts that the body gathers.

        If weights are gathered again in the backward pass, a loop over microbatches gathers weights in each
        iteration, since holding all of them would need too much memory.
        """
        gathered = [i for i in self._body.gathered_arguments if i < self._loop.num_consts]
        is_large = not _take_little_memory([x.var for x in self._consts if x.is_state])
        if self._context.options.reshard_after_forward and not carries_examples and is_large:
            gathered = [i for i in gathered if not self._consts[i].is_state]
        if gathered:
            self._convert_consts(dict.fromkeys(gathered, self._context.replicated))

    def _gather_xs(self) -> None:
        """Gathers, before the scan, the stacked weights that the options gather once."""
        num_invariant = self._loop.num_consts + self._loop.num_carry
        indices = [i - num_invariant for i in self._body.gathered_arguments if i >= num_invariant]
        gathered = [i for i in indices if self._editor.is_gathered_once(self._xs[i])]
        for i in gathered:
            self._xs[i] = self._editor.converted(self._xs[i], self._editor.context.replicated, self._equation)
            self._element_arguments[i] = self._element_argument(self._xs[i])
        if gathered:
            self._body = self._partition_body()

    def _convert_consts(self, placements: Mapping[int, Placements]) -> None:
        """Converts consts, before the scan, to placements along the axes that are not independent."""
        for i, target in placements.items():
            target = self._independent.with_others(target, self._consts[i].placements)
            self._consts[i] = self._editor.converted(self._consts[i], target, self._equation)
            self._const_arguments[i] = self._const_argument(self._consts[i])
        self._body = self._partition_body()

    def _write_equation(self) -> None:
        editor, equation, loop, body = self._editor, self._equation, self._loop, self._body
        ys_placements = [*map(_stacked_placements, body.placements[loop.num_carry :])]
        placements = self._independent.results(self._carried, ys_placements)
        outputs = [editor.define(var, x) for var, x in zip(equation.outvars, placements, strict=True)]
        init = [editor.convert(value, x, equation) for value, x in zip(self._init, placements, strict=False)]
        microbatch_index = editor.microbatch_index_of(body)
        consts = [*microbatch_index, *[x.atom for x in self._consts]]
        params = {'jaxpr': body.jaxpr}
        trip_count = (loop.length or 0) // self._independent.num_devices
        if self._independent.axes:
            params |= trip_count_param(trip_count)
        if microbatch_index:
            params |= scan_counts(len(consts), loop.num_carry, len(self._xs), len(ys_placements))
        atoms = [*consts, *init, *[x.atom for x in self._xs]]
        editor.eqns.append(
            editor.code.localize(equation, atoms, [output.atom for output in outputs], **params)
        )
        operands = [*self._consts, *self._init, *self._xs]
        editor.include(body, operands, trip_count, range(loop.num_consts + loop.num_carry, len(operands)))


def _initial_carry_placements(loop: Loop, init: Sequence[Value]) -> list[Placements]:
    """Returns initial placements of carried values. Replicated ones to which the loop adds start as sums."""
    reductions = carry_reductions(loop)
    return [
        (SUM,) * len(value.placements)
        if value.is_replicated and reductions.of(i) == 'sum'
        else value.placements
        for i, value in enumerate(init)
    ]


def _sums_of_sharded_state(
    context: PartitionContext, equation: Any, carried: Sequence[Placements]
) -> Iterable[tuple[int, int]]:
    """Yields carried partial sums that become sharded state after the loop, each with the axis."""
    for i, (var, placements) in enumerate(zip(equation.outvars, carried, strict=False)):
        layout = context.reduction_layouts.of(var)
        for axis, placement in enumerate(placements if layout is not None else ()):
            if placement == SUM and layout is not None and isinstance(layout.placements[axis], Shard):
                yield i, axis


def _have_examples(placements: Placements) -> bool:
    return any(shards_examples(x) for x in placements)


def _take_little_memory(variables: Sequence[Any]) -> bool:
    """Whether weights take little memory when gathered: at most twice the size of the largest one."""
    sizes = [size_of(var) * var.aval.dtype.itemsize for var in variables]
    return sum(sizes) <= 2 * max(sizes, default=0)


def _element_placements(placements: Placements) -> Placements:
    """Returns the placements of an element of a stack."""
    return tuple([x.at(x.dim - 1) if isinstance(x, Shard) else x for x in placements])


def _stacked_placements(placements: Placements) -> Placements:
    """Returns the placements of a stack of elements."""
    return tuple([x.at(x.dim + 1) if isinstance(x, Shard) else x for x in placements])
