"""Finds the loops over layers that are sharded over an axis of stages, and makes pipelines of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from scalax._follow.trail import Trail, along, merged, of_dims, put, spec_of, without
from scalax._follow.types import Arguments
from scalax._jax import equations, rewriting
from scalax._jax.equations import (
    DropVar,
    argument_names,
    is_on_device,
    loop_of,
    makers_of,
    opened,
    scan_options,
    shape_of,
)
from scalax._jax.primitives import primitive_name
from scalax._jax.tracing import trace_context
from scalax._jaxprs.carry_accumulation import added_by_round
from scalax._jaxprs.interpreter import LoopFacts
from scalax._jaxprs.rows import SUM, Fact, Refused, Rows, RowsOf
from scalax._jaxprs.source_lines import line_of
from scalax._spmd.pipelined import Loops, PipelinedLoop
from scalax._spmd.pipelines import Pipeline as Pipelined
from scalax._spmd.placement import REPLICATE, Placement, Shard
from scalax._spmd.placement import SUM as SUMMED
from scalax._stages.apart import apart
from scalax._stages.constants import with_own_constants
from scalax._stages.deal import Deal
from scalax._stages.layers import Stack
from scalax._stages.pipeline import Pipeline
from scalax._stages.places import LAYERS, ROWS, Places
from scalax._stages.stages import Stages
from scalax._tree.paths import array_bytes
from scalax._tree.specs import no_axis
from scalax.errors import StagesError, StagesWarning, plural, shown, warn

# More of the ticks idle than this are worth a warning.
_IDLE = 0.5


def with_stages(
    jaxpr: Any, arguments: Arguments, mesh: Mesh | AbstractMesh, stages: Stages
) -> tuple[Any, Arguments, Loops]:
    """The jaxpr with pipelines in place of loops over layers, what is known of its arguments, and the loops.

    Args:
        jaxpr: the closed jaxpr of a step.
        arguments: what is known of its arguments.
        mesh: the mesh, in force.
        stages: what the user says.

    Raises:
        StagesError: something has to be changed, in the model, the rules or the mesh.
    """
    sizes = dict(mesh.shape)
    if not has_stages(sizes, stages):
        return jaxpr, arguments, ()
    staged, deal, rows = _found(jaxpr, arguments, sizes, stages)
    jaxpr, arguments = _over_stages(staged.result, arguments, mesh, deal, rows)
    return jaxpr, arguments, staged.loops


def find_pipelines(
    jaxpr: Any, arguments: Arguments, sizes: Mapping[str, int], stages: Stages
) -> tuple[Any, Mapping[int, Pipelined], Loops]:
    """Returns a jaxpr with loops over layers that can run as pipelines, these, and what plans say of them.

    Args:
        jaxpr: the closed jaxpr of a step.
        arguments: what is known of its arguments.
        sizes: the sizes of the mesh axes.
        stages: what the user says.

    Raises:
        StagesError: something has to be changed, in the model, the rules or the mesh.
    """
    staged, _, _ = _found(jaxpr, arguments, sizes, stages, is_partitioned=True)
    return staged.result, staged.pipelines, staged.loops


def has_stages(sizes: Mapping[str, int], stages: Stages) -> bool:
    """Returns whether the axis of stages has several devices; warns if it has one.

    Raises:
        StagesError: the mesh has no such axis.
    """
    if stages.axis not in sizes:
        raise StagesError(f'{stages}: {no_axis(stages.axis, sizes)}')
    if sizes[stages.axis] > 1:
        return True
    warn(
        f'{stages}: {stages.axis!r} has one device, so loops over layers run as they are\nWhat to do: '
        'give it more devices, or leave stages out.',
        StagesWarning,
    )
    return False


def _found(
    jaxpr: Any,
    arguments: Arguments,
    sizes: Mapping[str, int],
    stages: Stages,
    *,
    is_partitioned: bool = False,
) -> tuple[_Staged, Deal, dict[int, int]]:
    """The loops over layers, how examples are dealt, and which dimension of arguments has them."""
    _check_rounds(stages, sizes[stages.axis])
    jaxpr = rewriting.flattened(jaxpr, (), around='scan')
    rows = _rows_of(arguments)
    deal = _deal_of(jaxpr, arguments, rows, sizes, stages)
    marks = [*_marks(jaxpr, arguments, rows, stages.axis)]
    places = Places(jaxpr, marks)
    if not places.loops:
        raise StagesError(
            f'no loop runs over layers that are sharded over {stages.axis!r}, so nothing is a pipeline. '
            f'{_sharded(marks, argument_names(jaxpr))}\n'
            'What to do: stack the parameters of layers (jax.tree.map(lambda *x: jnp.stack(x), *layers)), '
            f'run them by jax.lax.scan, and shard the first dimension of the stacks over {stages.axis!r} '
            'in in_shardings.'
        )
    _warn_idle(deal, stages)
    times = _times(opened(jaxpr), places.loops)
    staged = _Staged(places, deal, stages, argument_names(jaxpr), times, is_partitioned=is_partitioned)
    staged.result = staged.jaxpr(jaxpr)
    if not staged.loops:
        raise StagesError(
            'no loop over layers takes the batch, as far as is known: '
            f'{", ".join(sorted({*map(line_of, places.loops.values())}))}\n'
            'What to do: see step.followed(...) of the function without stages for where the batch is lost.'
        )
    return staged, deal, rows


def _times(jaxpr: Any, loops: Container[int], times: int = 1) -> Counter[int]:
    """How often some equations, by their id, run in one call of a jaxpr."""
    found = Counter[int]()
    for equation in jaxpr.eqns:
        if id(equation) in loops:
            found[id(equation)] += times
            continue
        rounds = loop_of(equation).length if primitive_name(equation) == 'scan' else None
        for inside in equations.jaxprs_in(equation):
            found += _times(inside, loops, times * (rounds or 1))
    return found


def _rows_of(arguments: Arguments) -> dict[int, int]:
    """Which dimension has the rows, of each argument that is a batch: the first one that is sharded."""
    over = [
        [dim for dim, axes in enumerate(trail) if not arguments.batch_axes.isdisjoint(axes)]
        for trail in arguments.trails
    ]
    return {i: dims[0] for i, dims in enumerate(over) if dims}


def _deal_of(
    jaxpr: Any, arguments: Arguments, rows: Mapping[int, int], sizes: Mapping[str, int], stages: Stages
) -> Deal:
    """How the rows of the batch are dealt."""
    invars, names = opened(jaxpr).invars, argument_names(jaxpr)
    found = {i: (shape_of(invars[i])[dim], arguments.trails[i][dim]) for i, dim in rows.items()}
    if len({*found.values()}) > 1:
        listed = '\n'.join(
            f'  {names[i] if names else i}: {count} examples over {", ".join(axes)}'
            for i, (count, axes) in found.items()
        )
        raise StagesError(
            f'{stages}: arrays of the batch have different numbers of examples, or are sharded over '
            f'different mesh axes:\n{listed}\n'
            'What to do: give all of them the same number of examples and the same axes.'
        )
    [(count, axes)] = {*found.values()}
    over = axes if stages.axis in axes else (*axes, stages.axis)
    return Deal(
        count,
        stages.microbatches,
        stages.axis,
        tuple([(name, sizes[name]) for name in over]),
        stages.gather == 'step',
    )


def _marks(jaxpr: Any, arguments: Arguments, rows: Mapping[int, int], axis: str) -> Iterator[Trail]:
    """What is known of the dimensions of the arguments, as for `Places`."""
    for i, var in enumerate(opened(jaxpr).invars):
        ndim = len(shape_of(var))
        if i in rows:
            yield of_dims({rows[i]: (ROWS,)}, ndim)
            continue
        known = arguments.trails[i], arguments.stored[i]
        over = {dim: (LAYERS,) for trail in known for dim, axes in enumerate(trail) if axis in axes}
        yield of_dims({**({0: (str(i),)} if ndim else {}), **over}, ndim)


def _sharded(marks: Sequence[Trail], names: Sequence[str]) -> str:
    """Which arguments are sharded over the axis, for a message: of one rule, or of one loop, is the fault."""
    found = [
        f'{names[i] if names else f"argument {i}"} in dimension {dim}'
        for i, known in enumerate(marks)
        for dim, each in enumerate(known)
        if LAYERS in each
    ]
    if not found:
        return 'No argument but the batch is sharded over it by in_shardings.'
    return f'Beside the batch, in_shardings shard over it:\n{shown(found)}'


def _over_stages(
    jaxpr: Any, arguments: Arguments, mesh: Mesh | AbstractMesh, deal: Deal, rows: Mapping[int, int]
) -> tuple[Any, Arguments]:
    """Shards the batch over the axis of stages too, outside of pipelines."""
    if deal.axis in arguments.batch_axes or deal.owners == 1:
        return jaxpr, arguments
    inner, context = opened(jaxpr), trace_context()
    trails, stored = [*arguments.trails], [*arguments.stored]
    names: dict[int, Any] = {}
    added = []
    for i, var in enumerate(inner.invars):
        if i in rows:
            trails[i] = put(trails[i], rows[i], deal.outside)
            added.append(
                rewriting.constraint(var, NamedSharding(mesh, spec_of(trails[i])), inner.eqns[0], context)
            )
            names[id(var)] = added[-1].outvars[0]
        else:
            over = along(trails[i], frozenset({deal.axis}))
            stored[i] = merged([over, stored[i]], len(shape_of(var)))
            trails[i] = without(trails[i], {deal.axis})
    others = [
        rewriting.with_operands(each, [names.get(id(x), x) for x in each.invars]) for each in inner.eqns
    ]
    axes = arguments.batch_axes | {deal.axis}
    known = dataclasses.replace(arguments, trails=trails, stored=stored, batch_axes=axes)
    return rewriting.replaced(jaxpr, eqns=[*added, *others]), known


def _check_layers(equation: Any, places: Places, names: Sequence[str], deal: Deal, stages: Stages) -> None:
    """Raises StagesError about stacks that are sharded otherwise, or layers that do not divide."""
    loop, line = loop_of(equation), line_of(equation)
    _, _, stacks = loop.parts(equation.invars)
    elsewhere = {int(mark) for stack in stacks for mark in (places.of(stack) or ((),))[0] if mark.isdigit()}
    if elsewhere:
        listed = ', '.join(names[i] if names else f'argument {i}' for i in sorted(elsewhere))
        raise StagesError(
            f'the loop over layers at {line} takes stacks that are sharded over {deal.axis!r} in their first '
            f'dimension, and others that are not: {listed}\n'
            f'What to do: shard the first dimension of all of them over {deal.axis!r}, or of none.'
        )
    groups = deal.stages * stages.rounds
    length = loop.length or 0
    if length % groups:
        raise StagesError(
            f'the loop at {line} has {plural(length, "layer")}, which do not divide by {deal.stages} stages'
            f'{f" x {stages.rounds} rounds" if stages.rounds > 1 else ""}\n'
            f'What to do: choose a size of {deal.axis!r} and rounds whose product divides {length}.'
        )


def _check_rounds(stages: Stages, count: int) -> None:
    """Raises StagesError about microbatches that cannot pass through stages in several rounds."""
    if stages.rounds > 1 and stages.microbatches % count:
        raise StagesError(
            f'{stages}: in several rounds, microbatches pass through {count} stages {count} at a time\n'
            f'What to do: choose a multiple of {count}, or leave rounds out.'
        )


def _warn_idle(deal: Deal, stages: Stages) -> None:
    """Warns about a pipeline that is idle most of the time, or that leaves its axis idle outside of it."""
    ticks, idle = stages.rounds * deal.microbatches + deal.stages - 1, deal.stages - 1
    faults = [f'each stage is idle in {idle} of {ticks} ticks'] if idle >= _IDLE * ticks else []
    if deal.owners == 1:
        faults.append(
            'outside of the pipeline, as in the embedding and the head, all stages compute the same'
        )
    if faults:
        warn(
            f'{stages}: {", and ".join(faults)}\nWhat to do: choose more microbatches, a multiple of the '
            f'{deal.stages} stages.',
            StagesWarning,
        )


class _Loop(NamedTuple):
    """A loop over layers that becomes a pipeline.

    Attributes:
        function: the pipeline.
        taken: the forms in which it takes stacks; None for other operands.
        given: the forms in which it gives stacks; None for other results.
    """

    function: Pipeline
    taken: Sequence[Stack | None]
    given: Sequence[Stack | None]


class _Staged(rewriting.Rewriter):
    """Jaxprs with pipelines in place of loops over layers.

    Attributes:
        loops: the loops so far.
        pipelines: of steps that are partitioned, the loops that run as pipelines, by the ids of their
            equations, which stay in the jaxpr.
        result: the jaxpr of the step.
    """

    def __init__(
        self,
        places: Places,
        deal: Deal,
        stages: Stages,
        names: Sequence[str],
        times: Counter[int],
        *,
        is_partitioned: bool = False,
    ) -> None:
        super().__init__(lambda equation: equation)
        self.loops: list[tuple[PipelinedLoop, Any]] = []
        self.pipelines: dict[int, Pipelined] = {}
        self.result: Any = None
        self._is_partitioned = is_partitioned
        self._places, self._deal, self._stages, self._names, self._times = places, deal, stages, names, times

    def jaxpr(self, jaxpr: Any) -> Any:
        inner, makers = opened(jaxpr), makers_of(opened(jaxpr))
        if not any(id(each) in self._places.loops for each in inner.eqns):
            return super().jaxpr(jaxpr)
        found: list[Any] = []
        loops: dict[int, _Loop] = {}
        for each in inner.eqns:
            if id(each) in self._places.loops:
                for made, loop in self._loops(with_own_constants(jaxpr, makers, each), each):
                    found.append(made)
                    loops.update({id(made): loop} if loop is not None else {})
            else:
                found.append(self._equation(each))
        if self._is_partitioned:
            return rewriting.replaced(jaxpr, eqns=found)
        # What only pipelines take, in their form, is not put back.
        needed = {*map(id, inner.outvars)}
        for each in found:
            taken = loops[id(each)].taken if id(each) in loops else [None] * len(each.invars)
            needed.update(id(x) for x, stack in zip(each.invars, taken, strict=True) if stack is None)
        forms: dict[Any, Any] = {}  # a variable and its form -> the variable in this form
        runs = [
            self._pipeline(each, loops[id(each)], forms, needed) if id(each) in loops else [each]
            for each in found
        ]
        return rewriting.replaced(jaxpr, eqns=[*itertools.chain.from_iterable(runs)])

    def _loops(self, equation: Any, before: Any) -> list[tuple[Any, _Loop | None]]:
        """The equations of a loop over layers: itself, or its parts; None of those without rows in layers.

        *before* is what it was in the user's step.
        """
        loop, line = loop_of(equation), line_of(equation)
        dims = [
            next((dim for dim, marks in enumerate(self._places.of(x)) if ROWS in marks), None)
            for x in equation.invars
        ]
        held = [shape_of(x)[dim] for x, dim in zip(equation.invars, dims, strict=True) if dim is not None]
        if not held:
            return [(equation, None)]
        _check_layers(equation, self._places, self._names, self._deal, self._stages)
        # In a microbatch there are fewer rows; rows and tokens in one dimension are more.
        count = self._deal.rows if all(size % self._deal.rows == 0 for size in held) else min(held)
        deal = dataclasses.replace(self._deal, rows=count)
        if count % (deal.microbatches * deal.devices) or any(size % count for size in held):
            each = deal.microbatches * deal.devices
            raise StagesError(
                f'{plural(count, "example")} of the batch at the loop over layers at {line} do not divide by '
                f'{deal.microbatches} microbatches x {deal.devices} devices of a stage that share it\n'
                f'What to do: choose a batch of a multiple of {each} examples, or fewer microbatches.'
            )
        operands = [
            None if dim is None else Rows(dim, shape_of(x)[dim] // count)
            for x, dim in zip(equation.invars, dims, strict=True)
        ]
        rows = RowsOf(count)
        try:
            _check_effects(loop.body)
            if not all(map(is_on_device, [*equation.invars, *equation.outvars])):
                why = 'layers keep values in the memory of the host'
                raise Refused(
                    equation, why, 'compute them again (jax.checkpoint) in place of offloading them'
                )
            try:
                facts = rows.rounds(equation, operands)
                _check_sums(equation, facts.carried)
            except Refused:
                parts = apart(equation, rows, operands)
                if not parts:
                    raise
                return [*itertools.chain.from_iterable(self._part(each, before) for each in parts)]
        except Refused as refused:
            raise StagesError(
                f'the loop over layers at {line} cannot run on microbatches: {refused}, at '
                f'{line_of(refused.equation, [*refused.calls, equation])}\n'
                f'What to do: {refused.instead}; or run without stages.'
            ) from None
        described = _described(equation, facts, deal, self._stages.rounds, self._times[id(before)])
        self.loops.append((described, before))
        if self._is_partitioned:
            stages = self._stages
            self.pipelines[id(equation)] = Pipelined(
                *(equation, _placements(facts), deal.axis, deal.stages, deal.microbatches),
                *(stages.rounds, stages.gather == 'step', line),
            )
            return [(equation, None)]
        function = Pipeline(equation, facts, rows, deal, self._stages.rounds)
        return [(equation, _Loop(function, *self._stacks(facts, deal, line)))]

    def _part(self, equation: Any, before: Any) -> list[tuple[Any, _Loop | None]]:
        """The same of a part of a loop, of whose operations plans know by itself."""
        if primitive_name(equation) != 'scan':
            return [(equation, None)]
        self._times[id(equation)] = self._times[id(before)]
        return self._loops(equation, equation)

    def _stacks(self, facts: LoopFacts[Fact], deal: Deal, line: str) -> Iterator[list[Stack | None]]:
        """How a pipeline takes its operands, and gives its results."""
        for others, elements in (
            ([*facts.constants, *facts.carried], facts.elements),
            (facts.carried, facts.results),
        ):
            rows = [Rows(fact.dim + 1, fact.each) if isinstance(fact, Rows) else None for fact in elements]
            forms = [Stack(deal, each, self._stages.rounds, line) for each in rows]
            yield [*[None] * len(others), *[None if form.is_plain else form for form in forms]]

    def _pipeline(self, equation: Any, loop: _Loop, forms: dict[Any, Any], needed: set[int]) -> Iterator[Any]:
        """The equation of a pipeline, and those of stacks that change their form before it or after it."""
        operands = []
        for x, form in zip(equation.invars, loop.taken, strict=True):
            if form is not None and (id(x), form) not in forms:
                changed = rewriting.added_equation(jax.jit(form.of), equation, [x])
                forms[id(x), form] = changed.outvars[0]
                yield changed
            operands.append(x if form is None else forms[id(x), form])
        made = rewriting.added_equation(jax.jit(loop.function.__call__), equation, operands)
        pairs = [*zip(equation.outvars, made.outvars, loop.given, strict=True)]
        yield rewriting.with_results(made, [var if form is None else own for var, own, form in pairs])
        for var, own, form in pairs:
            if form is not None and not isinstance(var, DropVar):
                forms[id(var), form] = own
                if id(var) in needed:
                    yield rewriting.with_results(
                        rewriting.added_equation(jax.jit(form.back), equation, [own]), [var]
                    )


def _placements(facts: LoopFacts[Fact]) -> LoopFacts[Placement]:
    """The placements along microbatches of the values of a round."""

    def placement(fact: Fact) -> Placement:
        return Shard(fact.dim) if isinstance(fact, Rows) else REPLICATE if fact is None else SUMMED

    return LoopFacts(*[[*map(placement, each)] for each in facts])


def _described(equation: Any, facts: LoopFacts[Fact], deal: Deal, rounds: int, times: int) -> PipelinedLoop:
    """What plans say of a loop over layers."""
    loop = loop_of(equation)
    constants, carried, stacks = loop.parts(equation.invars)

    def size(variables: Sequence[Any], known: Sequence[Fact], kind: Any) -> int:
        pairs = zip(variables, known, strict=False)
        return sum(array_bytes(var.aval) for var, fact in pairs if isinstance(fact, kind))

    along, moving = size(constants, facts.constants, Rows), size(carried, facts.carried, Rows)
    same = size(carried, facts.carried, type(None))
    return PipelinedLoop(
        line=line_of(equation),
        axis=deal.axis,
        stages=deal.stages,
        microbatches=deal.microbatches,
        rounds=rounds,
        layers=loop.length or 0,
        is_backward=bool(scan_options(equation)['reverse']),
        times=times,
        weights=size(stacks, facts.elements, type(None)),
        kept=size(equation.outvars[loop.carried :], facts.results, Rows),
        hop=(along + moving) // deal.microbatches + same,
        door=(along + 2 * moving) // deal.microbatches,
    )


def _check_effects(jaxpr: Any) -> None:
    """Raises `Refused` about a print, or another effect: it would happen in each tick, on each stage."""
    for each in opened(jaxpr).eqns:
        if not each.effects:  # those inside of a kernel stay there
            continue
        for inside in equations.jaxprs_in(each):
            _check_effects(inside)
        why = f'{primitive_name(each)} has an effect, which would happen more often'
        raise Refused(each, why, 'leave it out, or give its values to the loop as outputs of the layers')


def _check_sums(equation: Any, carried: Sequence[Fact]) -> None:
    """Raises `Refused` about a sum over rows to which a layer does more than to add something."""
    loop = loop_of(equation)
    body = opened(rewriting.with_inlined(loop.body, lambda call: True))
    _, state, _ = loop.parts(body.invars)
    for var, out, fact in zip(state, body.outvars, carried, strict=False):
        if fact == SUM and added_by_round(body, var, out) is None:
            why = 'layers read a sum over the batch that they carry'
            raise Refused(
                equation, why, 'carry a sum for each example, and add up over the batch after the loop'
            )
