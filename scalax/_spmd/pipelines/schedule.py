"""Pipelines: loops over layers that an axis of stages shards, run on one microbatch after the other.

Outside of a pipeline the batch is sharded along the axis of stages as along all batch axes. Inside of it, the
layer's jaxpr is partitioned with microbatches in place of stages: `Shard` is the block of a microbatch,
`Partial` a sum over microbatches, and `Replicate` what all of them have. A microbatch meets no other one in a
layer, so a layer that would exchange something along this axis is no layer of a pipeline.

In a tick a stage runs a group of its layers on a microbatch, and sends the result to the next stage. What is
carried travels so, but for sums; constants of each example travel along. Sums stay: each stage adds up what
its layers add, and remains with a term of the sum.

A stage holds one group of layers, or several: then microbatches pass through all stages in as many rounds, as
many at a time as there are stages, so that the first stage takes up what the last one sent in the tick
before. Before its first microbatch a stage computes with examples that it has, and after its last one with
the same once more: so what it writes in these ticks is written over, or is right. (Of zeros layers may give
nan.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from scalax._jax.equations import CALLS, loop_of, open_jaxpr, scan_options
from scalax._jax.primitives import primitive_name
from scalax._jax.rewriting import bind_as_jit, replace_jaxpr, without_prevent_cse
from scalax._jaxpr.abstract_interpreter import LoopValues
from scalax._spmd.conversions import JaxprEditor
from scalax._spmd.pipelines.layer_groups import reorder_layer_groups
from scalax._spmd.pipelines.summary import microbatch_at, pipeline_scope
from scalax._spmd.placements.layouts import Layout, ShiftedDims, remap_layout
from scalax._spmd.placements.placement import REPLICATE, SUM, Partial, Placement, Placements, Shard, join
from scalax._spmd.values import (
    REDUCE_TO_STATE,
    Argument,
    CannotPartition,
    PartitionedJaxpr,
    ReductionTarget,
    Value,
)

_MOST_ROUNDS = 12


class PipelinedScan(NamedTuple):
    """A loop over layers that runs as a pipeline.

    Attributes:
        equation: the `scan`.
        facts: the placements of the values of each round along the axis of microbatches.
        axis: the mesh axis of the stages.
        stages: how many stages there are.
        microbatches: how many microbatches there are.
        rounds: how many groups of layers a stage holds.
        gathers_once: whether weights are gathered once, and not in each tick.
        line: the line of the user's code.
    """

    equation: Any
    facts: LoopValues[Placement]
    axis: str
    stages: int
    microbatches: int
    rounds: int
    gathers_once: bool
    line: str

    @property
    def is_dealt(self) -> bool:
        """Whether each stage has a share of the batch outside of the pipeline."""
        return self.microbatches % self.stages == 0

    @property
    def ticks(self) -> int:
        """How many ticks there are."""
        return self.rounds * self.microbatches + self.stages - 1


def partition_pipeline(
    editor: JaxprEditor, equation: Any, values: Sequence[Value], pipeline: PipelinedScan
) -> None:
    """Writes a loop over layers as a pipeline."""
    loop, facts, context = loop_of(equation), pipeline.facts, editor.context
    constants, begun, stacks = map(list, loop.split(values))
    editor.reduce_all([x for x, fact in zip(begun, facts.carry, strict=True) if fact != SUM], equation)
    editor.reduce_all([*constants, *stacks], equation)

    def outside(placements: Placements, fact: Placement) -> Placements:
        """The placements of a value of a round outside of the pipeline."""
        if isinstance(fact, Shard):
            fact = fact if pipeline.is_dealt else REPLICATE
        return (*placements[:-1], fact)

    def inside(value: Value, fact: Placement) -> Placements:
        """The placements of a value in a round. Examples are sharded along all axes."""
        others = value.placements[:-1]
        if isinstance(fact, Shard):
            others = tuple([x if isinstance(x, Shard) else fact for x in others])
        return (*others, fact)

    def element(value: Value, fact: Placement) -> Placements:
        others: list[Placement] = []
        for x in value.placements[:-1]:
            kept = isinstance(x, Shard) and x.dim > 0 and not (pipeline.gathers_once and x.is_state)
            x = Shard(x.dim - 1, x.is_state) if kept and isinstance(x, Shard) else REPLICATE
            others.append(fact if isinstance(fact, Shard) and not isinstance(x, Shard) else x)
        return (*others, fact)

    of_constants = [*map(inside, constants, facts.consts)]
    of_elements = [*map(element, stacks, facts.xs)]
    carried = [
        (SUM,) * len(context.axes) if fact == SUM else inside(value, fact)
        for value, fact in zip(begun, facts.carry, strict=True)
    ]
    states = [value.origin is not None or value.is_state for value in stacks]
    layouts = [
        _layout(context.reduction_layouts.of(var), i < loop.num_carry)
        for i, var in enumerate(equation.outvars)
    ]

    def arguments() -> list[Argument]:
        return [
            *[Argument(x, y.origin is not None) for x, y in zip(of_constants, constants, strict=True)],
            *map(Argument, carried),
            *[Argument(x, is_state) for x, is_state in zip(of_elements, states, strict=True)],
        ]

    # What an outermost checkpoint computes again was computed in another loop.
    body = replace_jaxpr(loop.body, eqns=[*map(_in_another_loop, open_jaxpr(loop.body).eqns)])
    layer = context.for_microbatches(body, arguments(), layouts, pipeline.microbatches)

    def run(ends: Sequence[Placements | ReductionTarget | None]) -> PartitionedJaxpr:
        return layer.partition(body, arguments(), ends, backward=editor.is_backward(equation), at=equation)

    settled: ReductionTarget | None = None if pipeline.gathers_once else REDUCE_TO_STATE
    first: list[Placements | ReductionTarget | None] = [None] * loop.num_carry
    first += [settled] * len(facts.ys)
    for _ in range(_MOST_ROUNDS):
        inner = run(first)
        after = [
            (*map(_next, x[:-1], y[:-1]), SUM if x[-1] == SUM else join(x[-1], y[-1]))
            for x, y in zip(carried, inner.placements, strict=False)
        ]
        gathered = [i for i in inner.gathered_arguments if i < loop.num_consts]
        for i in gathered:
            of_constants[i] = (*(REPLICATE,) * (len(context.axes) - 1), of_constants[i][-1])
        if after == carried and not gathered:
            break
        carried[:] = after
    else:
        raise CannotPartition(equation, 'the placements of the values that it carries do not converge')
    if [*inner.placements[: loop.num_carry]] != carried:
        inner = run([*carried, *inner.placements[loop.num_carry :]])
    # What is the same for all examples may be computed for those of a microbatch alone.
    in_turn = [x[-1] for x in inner.placements]
    facts = facts._replace(carry=in_turn[: loop.num_carry], ys=in_turn[loop.num_carry :])
    pipeline = pipeline._replace(facts=facts)

    def stacked(placements: Placements, *, is_state: bool) -> Placements:
        """The placements of a stack of elements with these."""
        others = [Shard(x.dim + 1, x.is_state) if isinstance(x, Shard) else x for x in placements[:-1]]
        return (*others, Shard(0, is_state))

    operands: list[Any] = []
    for value, placements, fact in zip(constants, of_constants, facts.consts, strict=True):
        operands.append(editor.convert(value, outside(placements, fact), equation))
    terms = [fact == SUM and not value.is_zero for value, fact in zip(begun, facts.carry, strict=True)]
    for value, placements, fact, is_term in zip(begun, carried, facts.carry, terms, strict=True):
        if fact != SUM or is_term:
            operands.append(editor.convert(value, outside(placements, fact), equation))
    for value, placements, is_state in zip(stacks, of_elements, states, strict=True):
        target = stacked(placements, is_state=is_state)
        atom = editor.convert(value, target, equation, keeps_state=pipeline.gathers_once)
        operands.append(_exchanged(editor, equation, atom, pipeline))
    run_ticks = _Ticks(pipeline, inner, terms)
    written = editor.code.call_function(run_ticks, equation, operands)
    editor.eqns.append(written)
    placed = [outside(*pair) for pair in zip(carried, facts.carry, strict=True)]
    placed += [
        stacked(x, is_state=not isinstance(fact, Shard))
        for x, fact in zip(inner.placements[loop.num_carry :], facts.ys, strict=True)
    ]
    for i, (var, atom, placements) in enumerate(zip(equation.outvars, written.outvars, placed, strict=True)):
        if i >= loop.num_carry:
            atom = _exchanged(editor, equation, atom, pipeline, back=True)
        editor.define(var, placements, atom)
    editor.include(inner, [*constants, *begun, *stacks], pipeline.ticks * run_ticks.layers)


def _next(begin: Placement, end: Placement) -> Placement:
    """The placement of a carried value that begins and ends a round in these."""
    return end if isinstance(begin, Partial) and not isinstance(end, Partial) else join(begin, end)


def _in_another_loop(equation: Any) -> Any:
    return without_prevent_cse(equation) if primitive_name(equation) in CALLS else equation


def _layout(layout: Layout | None, is_carried: bool) -> Layout | None:
    """The layout of a result in a round, where microbatches take turns."""
    if layout is None:
        return None
    layout = layout._replace(placements=(*layout.placements[:-1], REPLICATE))
    return layout if is_carried else remap_layout(layout, ShiftedDims(-1))


def _exchanged(
    editor: JaxprEditor, equation: Any, atom: Any, pipeline: PipelinedScan, *, back: bool = False
) -> Any:
    """The variable of a stack whose layers are where they run, or are stored; each is exchanged once."""
    if pipeline.rounds == 1:
        return atom
    if not back and id(atom) in editor.reordered_stacks:
        return editor.reordered_stacks[id(atom)][1]
    how = pipeline.axis, pipeline.stages, pipeline.rounds, pipeline.line
    function = jax.jit(lambda x: reorder_layer_groups(x, *how, back=back))
    result = editor.emit(function, ('reorder_layer_groups', how, back), equation, [atom])
    pair = (result, atom) if back else (atom, result)
    editor.reordered_stacks[id(pair[0])] = pair
    return result


class _Turn(NamedTuple):
    """What a stage does in a tick: a microbatch, which round of it, and whether it is idle, as it is done."""

    microbatch: Any
    round: Any
    is_idle: Any
    is_done: Any


class _Ticks:
    """A pipeline as a function of the blocks that a device has of its operands, in code of one device.

    The operands are those of the loop, without the sums that begin as zero.

    Args:
        pipeline: the pipeline.
        inner: the jaxpr of a layer on the blocks that a device has of a microbatch.
        terms: which of the values that it carries are sums that do not begin as zero.
    """

    def __init__(self, pipeline: PipelinedScan, inner: PartitionedJaxpr, terms: Sequence[bool]) -> None:
        equation = pipeline.equation
        self._pipeline, self._inner, self._terms = pipeline, inner, terms
        self._loop, self._options = loop_of(equation), scan_options(equation)
        self._types = [var.aval for var in open_jaxpr(inner.jaxpr).outvars]
        self.layers = (self._loop.length or 0) // (pipeline.stages * pipeline.rounds)
        self._options['unroll'] = max(1, min(int(self._options['unroll']), self.layers))
        self._way = -1 if self._options['reverse'] else 1
        self._first, self._last = (0, pipeline.stages - 1)[:: self._way]
        # What goes from stage to stage: constants of each example, and what is carried but for sums.
        facts = pipeline.facts
        self._along = [fact for fact in facts.consts if isinstance(fact, Shard)]
        self._travelling = [*self._along, *[fact for fact in facts.carry if fact != SUM]]
        self.__name__ = 'pipeline'

    def __call__(self, *operands: Any) -> list[Any]:
        facts, count = self._pipeline.facts, self._loop.num_carry
        left = iter(operands)
        constants = [next(left) for _ in facts.consts]
        begun = [
            next(left) if fact != SUM or is_term else None
            for fact, is_term in zip(facts.carry, self._terms, strict=True)
        ]
        stacks = [*left]
        pairs = [*zip(constants, facts.consts, strict=True)]
        doors = [x for x, fact in pairs if isinstance(fact, Shard)]
        doors += [x for x, fact in zip(begun, facts.carry, strict=True) if fact != SUM]
        others = [x for x, fact in pairs if not isinstance(fact, Shard)]
        kept = self._all_ticks(doors, others, stacks)
        carried = [
            (x if first is None else x + first.astype(x.dtype)) if fact == SUM else self._leaving(x, fact)
            for x, first, fact in zip(kept, begun, facts.carry, strict=False)
        ]
        return [
            x.astype(kind.dtype) if x.dtype != kind.dtype else x
            for x, kind in zip([*carried, *kept[count:]], self._types, strict=True)
        ]

    def _all_ticks(self, doors: Sequence[Any], others: Sequence[Any], stacks: Sequence[Any]) -> list[Any]:
        """What a stage keeps of all ticks: what the last one carries, sums, and stacks."""
        facts, count, stages = self._pipeline.facts, self._loop.num_carry, self._pipeline.stages
        place = self._way * (jax.lax.axis_index(self._pipeline.axis) - self._first)
        pairs = [*zip(doors, self._travelling, strict=True)]
        pairs = [(self._entering(x, fact), fact) for x, fact in pairs]

        def taken(t: Any, arrived: Sequence[Any], before: Sequence[Any]) -> list[Any]:
            """What a stage takes in a tick."""
            turn, first = self._turn(t - place), self._turn(t)
            enters = (place == 0) & (turn.round == 0)
            entering = [self._part(x, fact, first.microbatch) for x, fact in pairs]
            found = [jnp.where(enters, *each) for each in zip(entering, arrived, strict=True)]
            return [jnp.where(turn.is_done, *each) for each in zip(before, found, strict=True)]

        def tick(state: tuple[list[Any], list[Any]], t: Any) -> tuple[tuple[list[Any], list[Any]], None]:
            current, kept = state
            turn, last = self._turn(t - place), self._turn(t - stages + 1)
            carried, given = self._run_layers(current, others, stacks, turn)
            kept = [
                *[
                    self._put(before, x, fact, last.microbatch)
                    if isinstance(fact, Shard)
                    else _added(before, x, fact, turn)
                    for before, x, fact in zip(kept, carried, facts.carry, strict=False)
                ],
                *[
                    self._put_in_stack(before, x, fact, turn)
                    for before, x, fact in zip(kept[count:], given, facts.ys, strict=True)
                ],
            ]
            sent = [
                *current[: len(self._along)],
                *[x for x, fact in zip(carried, facts.carry, strict=True) if fact != SUM],
            ]
            return (taken(t + 1, [*map(self._sent, sent)], current), kept), None

        nothing = [self._part(x, fact, 0) for x, fact in pairs]
        start = taken(jnp.int32(0), nothing, nothing), self._empty(nothing[len(self._along) :])
        (_, kept), _ = jax.lax.scan(tick, start, jnp.arange(self._pipeline.ticks))
        return kept

    def _turn(self, done: Any) -> _Turn:
        """What a stage does that has run so many groups before."""
        pipeline = self._pipeline
        count = pipeline.rounds * pipeline.microbatches
        at = microbatch_at(jnp.clip(done, 0, count - 1), pipeline.stages, pipeline.rounds)
        return _Turn(*at, (done < 0) | (done >= count), done >= count)

    def _run_layers(
        self, current: Sequence[Any], others: Sequence[Any], stacks: Sequence[Any], turn: _Turn
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """What a group of layers gives for a microbatch: what it carries, and stacks."""
        facts, travelling, rest = self._pipeline.facts, iter(current), iter(others)
        constants = [next(travelling if isinstance(fact, Shard) else rest) for fact in facts.consts]
        begun = [
            jnp.zeros(kind.shape, kind.dtype) if fact == SUM else next(travelling)
            for kind, fact in zip(self._types, facts.carry, strict=False)
        ]
        elements = [
            self._group(self._part(x, _in_stack(fact), turn.microbatch), turn)
            for x, fact in zip(stacks, facts.xs, strict=True)
        ]
        number = [turn.microbatch.astype('int32')] if self._inner.takes_microbatch_index else []

        def layer(carried: Sequence[Any], elements: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            values = [*bind_as_jit(self._inner.jaxpr, [*number, *constants, *carried, *elements], 'layer')]
            return values[: self._loop.num_carry], values[self._loop.num_carry :]

        return jax.lax.scan(layer, begun, elements, self.layers, **self._options)

    def _part(self, x: Any, fact: Placement, microbatch: Any) -> Any:
        """What a microbatch has of a value."""
        if not isinstance(fact, Shard):
            return x
        size = x.shape[fact.dim] // self._pipeline.microbatches
        return jax.lax.dynamic_slice_in_dim(x, microbatch * size, size, fact.dim)

    def _put(self, before: Any, x: Any, fact: Shard, microbatch: Any) -> Any:
        """A value with the part of a microbatch."""
        start = microbatch * x.shape[fact.dim]
        return jax.lax.dynamic_update_slice_in_dim(before, x, start, fact.dim)

    def _group(self, stack: Any, turn: _Turn) -> Any:
        """The layers of a stack that a stage runs at once."""
        if self._pipeline.rounds == 1:
            return stack
        return jax.lax.dynamic_slice_in_dim(stack, self._start(turn), self.layers)

    def _start(self, turn: _Turn) -> Any:
        """The first layer of the group, among those of the stage."""
        group = turn.round if self._way > 0 else self._pipeline.rounds - 1 - turn.round
        return group * self.layers

    def _empty(self, begun: Sequence[Any]) -> list[Any]:
        """What is kept before the first tick; *begun* is what is carried first, without sums."""
        facts, first, kept = self._pipeline.facts, iter(begun), []
        for i, (kind, fact) in enumerate(zip(self._types, [*facts.carry, *facts.ys], strict=True)):
            is_carried = i < self._loop.num_carry
            before = next(first) if is_carried and fact != SUM else None
            if is_carried and fact == REPLICATE:
                kept.append(before)
                continue
            shape, dtype = [*kind.shape], kind.dtype
            if isinstance(fact, Shard):
                shape[fact.dim] *= self._pipeline.microbatches
            leading = [] if is_carried else [self.layers * self._pipeline.rounds]
            kept.append(jnp.zeros((*leading, *shape), _wide(dtype) if fact == SUM else dtype))
        return kept

    def _put_in_stack(self, before: Any, x: Any, fact: Placement, turn: _Turn) -> Any:
        """A stack, with what a stage gave in a tick."""
        start = self._start(turn)
        if isinstance(fact, Shard):
            at: list[Any] = [start, *[0] * (x.ndim - 1)]
            at[fact.dim + 1] = turn.microbatch * x.shape[fact.dim + 1]
            return jax.lax.dynamic_update_slice(before, x, at)
        if self._pipeline.rounds == 1:
            return _added(before, x, fact, turn)
        group = _added(self._group(before, turn), x, fact, turn)
        return jax.lax.dynamic_update_slice_in_dim(before, group, start, 0)

    def _entering(self, x: Any, fact: Placement) -> Any:
        """All microbatches that enter, at the first stage: each stage sends its own."""
        if not isinstance(fact, Shard) or not self._pipeline.is_dealt:
            return x
        axis, stages = self._pipeline.axis, self._pipeline.stages
        with pipeline_scope('microbatches enter the pipeline', self._pipeline.line):
            parts = [jax.lax.ppermute(x, axis, [(stage, self._first)]) for stage in range(stages)]
        return jnp.concatenate(parts, fact.dim)

    def _leaving(self, x: Any, fact: Placement) -> Any:
        """What left the last stage, where it is outside of the pipeline."""
        pipeline, stage = self._pipeline, jax.lax.axis_index(self._pipeline.axis)
        if not isinstance(fact, Shard) or not pipeline.is_dealt:
            return _from(x, stage == self._last, pipeline)
        size, found = x.shape[fact.dim] // pipeline.stages, None
        for owner in range(pipeline.stages):
            part = jax.lax.slice_in_dim(x, owner * size, (owner + 1) * size, axis=fact.dim)
            with pipeline_scope('microbatches leave the pipeline', pipeline.line):
                sent = jax.lax.ppermute(part, pipeline.axis, [(self._last, owner)])
            found = sent if found is None else jnp.where(stage == owner, sent, found)
        return found

    def _sent(self, x: Any) -> Any:
        """What arrives from the stage before; a ring, if microbatches pass more than once."""
        stages = self._pipeline.stages
        way = [(stage, (stage + self._way) % stages) for stage in range(stages)]
        if self._pipeline.rounds == 1:
            way.remove((self._last, self._first))
        with pipeline_scope('to the next stage', self._pipeline.line):
            return jax.lax.ppermute(x, self._pipeline.axis, way)


def _in_stack(fact: Placement) -> Placement:
    return Shard(fact.dim + 1) if isinstance(fact, Shard) else fact


def _added(before: Any, x: Any, fact: Placement, turn: _Turn) -> Any:
    """Sums over examples with those of a tick; or what is the same for all of them."""
    if fact != SUM:
        return x
    return before + jnp.where(turn.is_idle, 0, x).astype(before.dtype)


def _from(x: Any, has_it: Any, pipeline: PipelinedScan) -> Any:
    """What one stage has, on all stages."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _from(jax.random.key_data(x), has_it, pipeline)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    number = x.astype('uint8') if x.dtype == jnp.bool_ else x
    with pipeline_scope('microbatches leave the pipeline', pipeline.line):
        found = jax.lax.psum(jnp.where(has_it, number, jnp.zeros_like(number)), pipeline.axis)
    return found.astype(x.dtype)


def _wide(dtype: Any) -> Any:
    """The dtype of sums over microbatches: that of sums over examples on one device."""
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if is_narrow else dtype
