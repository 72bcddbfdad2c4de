"""A loop over layers as a pipeline: each stage runs the layers that it holds on one microbatch at a time.

In a tick a stage runs a group of its layers on a microbatch, and sends the result to the next stage. What is
carried with rows travels so, and what is carried without; constants with rows travel along. Sums over rows
stay: each stage adds up what its layers add, and the stages are added up after the last tick.

A stage holds one group of layers, or several: then microbatches pass through all stages in as many rounds, as
many at a time as there are stages, so that the first stage takes up what the last one sent in the tick
before. Before its first microbatch a stage computes with rows that it has, and after its last one with the
same once more: so what it writes in these ticks is written over, or is right. (Of zeros layers may give nan.)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from scalax._jax.equations import loop_of, opened, scan_options
from scalax._jaxprs.interpreter import LoopFacts
from scalax._jaxprs.other_rows import Known, OnOtherRows
from scalax._jaxprs.rows import SUM, Fact, Rows, RowsOf
from scalax._jaxprs.source_lines import line_of
from scalax._spmd.pipelined import at_turn, sending
from scalax._stages.deal import Deal, placed
from scalax.errors import StagesError


class _Turn(NamedTuple):
    """What a stage does in a tick: a microbatch, which round of it, and whether it is idle, as it is done."""

    microbatch: Any
    round: Any
    is_idle: Any
    is_done: Any


class Pipeline:
    """A loop over layers as a function of its operands.

    Stacks whose elements have rows are in microbatches, those that it takes and those that it gives.

    Args:
        equation: the `scan`.
        facts: what is known of its values.
        rows: where rows are.
        deal: how rows are dealt.
        rounds: how many groups of layers a stage holds.
    """

    def __init__(self, equation: Any, facts: LoopFacts[Fact], rows: RowsOf, deal: Deal, rounds: int) -> None:
        self._loop, self._options = loop_of(equation), scan_options(equation)
        self._line = line_of(equation)
        self._facts, self._rows, self._deal, self._rounds = facts, rows, deal, rounds
        # What goes from stage to stage: constants with rows, and what is carried but for sums.
        self._travelling = [
            *filter(has_rows, facts.constants),
            *[fact for fact in facts.carried if fact != SUM],
        ]
        self._types = [var.aval for var in opened(self._loop.body).outvars]
        self._layers = (self._loop.length or 0) // (deal.stages * rounds)
        self._options['unroll'] = max(1, min(int(self._options['unroll']), self._layers))
        self._way = -1 if self._options['reverse'] else 1
        self._first, self._last = (0, deal.stages - 1)[:: self._way]

    @property
    def ticks(self) -> int:
        """How many ticks there are."""
        return self._rounds * self._deal.microbatches + self._deal.stages - 1

    def __call__(self, *operands: Any) -> list[Any]:
        facts, deal, count = self._facts, self._deal, self._loop.carried
        constants, begun, stacks = self._loop.parts(operands)
        pairs = [*zip(constants, facts.constants, strict=True)]
        replicated = [x for x, fact in pairs if not has_rows(fact)]
        travelling = [x for x, fact in pairs if has_rows(fact)]
        travelling += [x for x, fact in zip(begun, facts.carried, strict=True) if fact != SUM]
        owner = deal.axis if deal.owners > 1 else None
        doors = [
            placed(deal.of(x, fact), {1: owner, fact.dim + 2: deal.inside}) if isinstance(fact, Rows) else x
            for x, fact in zip(travelling, self._travelling, strict=True)
        ]
        enter = [
            self._spec(fact, None, owner) if has_rows(fact) else PartitionSpec() for fact in self._travelling
        ]
        leave: dict[Fact, PartitionSpec] = {SUM: PartitionSpec(), None: PartitionSpec(deal.axis)}
        run = jax.shard_map(
            self._on_stage,
            in_specs=(
                enter,
                [PartitionSpec()] * len(replicated),
                [*map(self._spec_of_stack, facts.elements)],
            ),
            out_specs=[
                *[
                    leave[fact] if fact in leave else self._spec(fact, None, deal.axis)
                    for fact in facts.carried
                ],
                *[self._spec_of_stack(fact, sums=self._batch_axes) for fact in facts.results],
            ],
            axis_names={deal.axis, *(deal.inside if deal.is_manual else ())},
            check_vma=False,
        )
        # Rules of gradients that users write, and jax.checkpoint, are for the gradient of the user's step.
        run = jax.custom_jvp(run)
        run.defjvp(_no_gradient)
        found = run(doors, replicated, [*stacks])
        carried = [self._carried(*each) for each in zip(found, facts.carried, begun, strict=False)]
        given = zip(found[count:], facts.results, self._types[count:], strict=True)
        return [
            *carried,
            *[
                (x.sum(0) if self._batch_axes and fact == SUM else x).astype(kind.dtype)
                for x, fact, kind in given
            ],
        ]

    @property
    def _batch_axes(self) -> tuple[str, ...]:
        """The mesh axes along which devices sum over rows of their own."""
        return self._deal.inside if self._deal.is_manual else ()

    def _spec(self, fact: Fact, *leading: Any) -> PartitionSpec:
        """How devices hold a value with rows: what comes before, and the rows, if each device has its own."""
        if not isinstance(fact, Rows) or not self._batch_axes:
            return PartitionSpec(*leading)
        return PartitionSpec(*leading, *[None] * fact.dim, self._batch_axes)

    def _spec_of_stack(self, fact: Fact, sums: tuple[str, ...] = ()) -> PartitionSpec:
        if has_rows(fact):
            return self._spec(fact, None, self._deal.axis)
        axis = self._deal.axis
        return PartitionSpec(sums, axis) if fact == SUM and sums else PartitionSpec(axis)

    def _carried(self, found: Any, fact: Fact, begun: Any) -> Any:
        """What the loop carries after its last layer."""
        deal = self._deal
        if isinstance(fact, Rows):
            owned = found if deal.owners > 1 else found[:, self._last : self._last + 1]
            return placed(deal.back(owned, fact), {fact.dim: deal.outside})
        return (found + begun.astype(found.dtype)).astype(begun.dtype) if fact == SUM else found[self._last]

    def _on_stage(self, doors: Sequence[Any], replicated: Sequence[Any], stacks: Sequence[Any]) -> list[Any]:
        """All ticks of one stage."""
        facts, deal, count = self._facts, self._deal, self._loop.carried
        stage = jax.lax.axis_index(deal.axis)
        place = self._way * (stage - self._first)
        along = sum(map(has_rows, facts.constants))
        pairs = [*zip(doors, self._travelling, strict=True)]
        pairs = [(self._entering(x) if has_rows(fact) else x, fact) for x, fact in pairs]

        def taken(t: Any, arrived: Sequence[Any], before: Sequence[Any]) -> list[Any]:
            """What a stage takes in a tick."""
            turn, first = self._turn(t - place), self._turn(t)
            enters = (place == 0) & (turn.round == 0)
            entering = [x[first.microbatch] if has_rows(fact) else x for x, fact in pairs]
            found = [jnp.where(enters, *each) for each in zip(entering, arrived, strict=True)]
            return [jnp.where(turn.is_done, *each) for each in zip(before, found, strict=True)]

        def tick(state: tuple[list[Any], list[Any]], t: Any) -> tuple[tuple[list[Any], list[Any]], None]:
            current, kept = state
            turn, last = self._turn(t - place), self._turn(t - deal.stages + 1)
            carried, given = self._run_layers(current, replicated, stacks, turn)
            kept = [
                *[
                    jax.lax.dynamic_update_index_in_dim(before, x, last.microbatch, 0)
                    if has_rows(fact)
                    else _kept(before, x, fact, turn)
                    for before, x, fact in zip(kept, carried, facts.carried, strict=False)
                ],
                *[
                    self._kept_in_stack(before, x, fact, turn)
                    for before, x, fact in zip(kept[count:], given, facts.results, strict=True)
                ],
            ]
            sent = [
                *current[:along],
                *[x for x, fact in zip(carried, facts.carried, strict=True) if fact != SUM],
            ]
            return (taken(t + 1, [*map(self._sent, sent)], current), kept), None

        nothing = [x[0] if has_rows(fact) else x for x, fact in pairs]
        start = taken(jnp.int32(0), nothing, nothing), self._nothing_kept(nothing[along:])
        (_, kept), _ = jax.lax.scan(tick, start, jnp.arange(self.ticks))
        axes = deal.axis, *self._batch_axes
        carried = [
            self._leaving(x, stage) if has_rows(fact) else jax.lax.psum(x, axes) if fact == SUM else x[None]
            for x, fact in zip(kept, facts.carried, strict=False)
        ]
        pairs = [*zip(kept[count:], facts.results, strict=True)]
        return [*carried, *[x[None] if self._batch_axes and fact == SUM else x for x, fact in pairs]]

    def _turn(self, done: Any) -> _Turn:
        """What a stage does that has run so many groups before."""
        count = self._rounds * self._deal.microbatches
        at = at_turn(jnp.clip(done, 0, count - 1), self._deal.stages, self._rounds)
        return _Turn(*at, (done < 0) | (done >= count), done >= count)

    def _run_layers(
        self, current: Sequence[Any], replicated: Sequence[Any], stacks: Sequence[Any], turn: _Turn
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """What a group of layers gives for a microbatch: what it carries, and stacks."""
        facts, body, travelling, others = self._facts, self._loop.body, iter(current), iter(replicated)
        constants = [next(travelling if has_rows(fact) else others) for fact in facts.constants]
        begun = [
            jnp.zeros(kind.shape, kind.dtype) if fact == SUM else next(travelling)
            for kind, fact in zip(self._types, facts.carried, strict=False)
        ]
        elements = [
            self._group(
                jax.lax.dynamic_index_in_dim(x, turn.microbatch, keepdims=False) if has_rows(fact) else x,
                turn,
            )
            for x, fact in zip(stacks, facts.elements, strict=True)
        ]
        share = functools.partial(self._deal.share, number=turn.microbatch)
        on_microbatch = OnOtherRows(self._rows, self._deal.size(Rows(0)), share)
        known = [*facts.constants, *facts.carried, *facts.elements]

        def layer(carried: Sequence[Any], elements: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            operands = [*map(Known, [*constants, *carried, *elements], known)]
            values = on_microbatch.values(body, operands, [*facts.carried, *facts.results])
            return values[: self._loop.carried], values[self._loop.carried :]

        return jax.lax.scan(layer, begun, elements, self._layers, **self._options)

    def _group(self, stack: Any, turn: _Turn) -> Any:
        """The layers of a stack that a stage runs at once."""
        if self._rounds == 1:
            return stack
        return jax.lax.dynamic_slice_in_dim(stack, self._start(turn), self._layers)

    def _start(self, turn: _Turn) -> Any:
        """The first layer of the group, among those of the stage."""
        group = turn.round if self._way > 0 else self._rounds - 1 - turn.round
        return group * self._layers

    def _nothing_kept(self, begun: Sequence[Any]) -> list[Any]:
        """What is kept before the first tick; *begun* is what is carried first, without sums."""
        facts, deal, first, kept = self._facts, self._deal, iter(begun), []
        for i, (kind, fact) in enumerate(zip(self._types, [*facts.carried, *facts.results], strict=True)):
            is_carried = i < self._loop.carried
            before = next(first) if is_carried and fact != SUM else None
            if is_carried and fact is None:
                kept.append(before)
                continue
            shape, dtype = kind.shape, kind.dtype
            leading = () if is_carried else (self._layers * self._rounds,)
            if isinstance(fact, Rows):
                shape = (*shape[: fact.dim], deal.size(fact), *shape[fact.dim + 1 :])
                leading = (deal.microbatches, *leading)
            kept.append(jnp.zeros((*leading, *shape), _wide(dtype) if fact == SUM else dtype))
        return kept

    def _kept_in_stack(self, before: Any, x: Any, fact: Fact, turn: _Turn) -> Any:
        """A stack, with what a stage gave in a tick."""
        start = self._start(turn)
        if isinstance(fact, Rows):
            place = (turn.microbatch, start, *[0] * (x.ndim - 1))
            return jax.lax.dynamic_update_slice(before, x[None], place)
        if self._rounds == 1:
            return _kept(before, x, fact, turn)
        group = _kept(self._group(before, turn), x, fact, turn)
        return jax.lax.dynamic_update_slice_in_dim(before, group, start, 0)

    def _entering(self, door: Any) -> Any:
        """All microbatches that enter, at the first stage: each owner sends its own."""
        own, owners = door[:, 0], self._deal.owners
        if owners == 1:
            return own
        with sending('microbatches enter the pipeline', self._line):
            sent = [jax.lax.ppermute(own, self._deal.axis, [(owner, self._first)]) for owner in range(owners)]
        return jnp.stack(sent, 1).reshape(self._deal.microbatches, *door.shape[2:])

    def _leaving(self, left: Any, stage: Any) -> Any:
        """The microbatches that left the last stage, where their owners have them."""
        owners = self._deal.owners
        if owners == 1:
            return left[:, None]
        apart, own = left.reshape(-1, owners, *left.shape[1:]), left[::owners]
        for owner in range(owners):
            with sending('microbatches leave the pipeline', self._line):
                sent = jax.lax.ppermute(apart[:, owner], self._deal.axis, [(self._last, owner)])
            own = jnp.where(stage == owner, sent, own)
        return own[:, None]

    def _sent(self, x: Any) -> Any:
        """What arrives from the stage before; a ring, if microbatches pass more than once."""
        stages = self._deal.stages
        way = [(stage, (stage + self._way) % stages) for stage in range(stages)]
        if self._rounds == 1:
            way.remove((self._last, self._first))
        with sending('to the next stage', self._line):
            return jax.lax.ppermute(x, self._deal.axis, way)


def _no_gradient(primals: Any, tangents: Any) -> Any:
    raise StagesError(
        'the gradient of a function with stages is taken outside of it, which would keep all that its ticks '
        'compute\nWhat to do: take it inside: helper.sjit(jax.value_and_grad(loss), stages=...).'
    )


def has_rows(fact: Fact) -> bool:
    """Whether a value has rows."""
    return isinstance(fact, Rows)


def _kept(before: Any, x: Any, fact: Fact, turn: _Turn) -> Any:
    """Sums over rows with those of a tick; or what is the same for all rows."""
    if fact != SUM:
        return x
    return before + jnp.where(turn.is_idle, 0, x).astype(before.dtype)


def _wide(dtype: Any) -> Any:
    """The dtype of sums over microbatches: that of sums over rows on one device."""
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if is_narrow else dtype
