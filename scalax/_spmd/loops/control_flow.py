"""Calls, loops and branches: their jaxprs are partitioned with the placements of their operands."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from scalax._jax.equations import (
    ANNOTATED_CALLS,
    Loop,
    annotated_call_jaxpr,
    branches,
    call_jaxpr,
    loop_of,
    open_jaxpr,
    shape_of,
    sharding_params,
    size_of,
    trip_count_param,
)
from scalax._jax.manual_axes import rebuild_jaxpr, scan_counts
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.carry_accumulation import carry_reductions
from scalax._spmd.context import PartitionContext
from scalax._spmd.conversions import JaxprEditor
from scalax._spmd.loops.example_loops import independent_axes
from scalax._spmd.loops.forward_results import finish_forward_results
from scalax._spmd.loops.microbatch_loops import stack_placements
from scalax._spmd.placements.placement import REPLICATE, SUM, Partial, Placements, Replicate, Shard, join
from scalax._spmd.placements.state_casts import gathering_uses
from scalax._spmd.placements.user_constraints import apply_sharding
from scalax._spmd.values import (
    REDUCE_TO_STATE,
    Argument,
    CannotPartition,
    PartitionedJaxpr,
    ReductionTarget,
    Value,
    is_replicated,
    without_state,
)

_MOST_ROUNDS = 12


def partition_call(editor: JaxprEditor, equation: Any, values: Sequence[Value]) -> None:
    """Writes a call whose jaxpr runs on blocks."""
    said = sharding_params(equation) if primitive_name(equation) == 'jit' else [{}, {}]
    for i, sharding in said[0].items():
        apply_sharding(editor, equation, values[i], sharding)
    is_annotated, backward = primitive_name(equation) in ANNOTATED_CALLS, editor.is_backward(equation)
    jaxpr = annotated_call_jaxpr(equation) if is_annotated else call_jaxpr(equation)
    inner = editor.context.partition(
        jaxpr, [argument_of(editor, x) for x in values], backward=backward, at=equation
    )
    if kept := [
        i
        for i in inner.gathered_arguments
        if _is_kept(editor, values[i]) or _is_used_again(editor, values[i], backward)
    ]:
        whole = {i: _converted(editor, values[i], editor.context.replicated, equation) for i in kept}
        values = [whole.get(i, value) for i, value in enumerate(values)]
        arguments = [argument_of(editor, x) for x in values]
        inner = editor.context.partition(jaxpr, arguments, backward=backward, at=equation)
    # What it takes blocks of is computed for these alone, outside of it. Zeros may also begin a sum in it.
    cut = {
        i: x
        for i, x in inner.sliced_arguments.items()
        if values[i].producer is not None and not values[i].is_zero
    }
    if cut:
        for i, placements in cut.items():
            values = [*values[:i], _converted(editor, values[i], placements, equation), *values[i + 1 :]]
        inner = editor.context.partition(
            jaxpr, [argument_of(editor, x) for x in values], backward=backward, at=equation
        )
    outputs = _define(editor, equation, inner, values)
    atoms, results = [value.atom for value in values], [output.atom for output in outputs]
    atoms = [*_numbers(editor, inner), *atoms]
    # What is said of all examples does not hold of blocks: then the function alone runs.
    call = editor.code.jit_call if is_annotated else editor.code.call
    editor.eqns.append(call(equation, inner.jaxpr, atoms, results))
    editor.include(inner, values)
    for i, sharding in said[1].items():
        apply_sharding(editor, equation, outputs[i], sharding)


def partition_cond(editor: JaxprEditor, equation: Any, values: Sequence[Value]) -> None:
    """Writes a `cond` whose branches run on blocks, with results in the same placements."""
    index, *operands = values
    _reduce(editor, operands, equation)
    chosen = editor.convert(index, editor.context.replicated, equation)
    arguments, backward = [argument_of(editor, x) for x in operands], editor.is_backward(equation)
    jaxprs = branches(equation)
    found = [editor.context.partition(branch, arguments, backward=backward, at=equation) for branch in jaxprs]
    results = [_joined(each) for each in zip(*[each.placements for each in found], strict=True)]
    results = [
        editor.context.reduced(placements, editor.context.reduction_layouts.of(var), held=True)
        for var, placements in zip(equation.outvars, results, strict=True)
    ]
    found = [
        editor.context.partition(branch, arguments, results, backward=backward, at=equation)
        for branch in jaxprs
    ]
    outputs = [editor.define(var, x) for var, x in zip(equation.outvars, results, strict=True)]
    for output, of_branches in zip(outputs, zip(*[each.origins for each in found], strict=True), strict=True):
        origins = [operands[i].origin for i in of_branches if isinstance(i, int)]
        if output.is_state and origins:
            output.origin = origins[0]
    numbers = next(filter(None, [_numbers(editor, each) for each in found]), [])
    atoms = [chosen, *numbers, *[value.atom for value in operands]]
    made = tuple([_taking_number(editor, each) if numbers else each.jaxpr for each in found])
    editor.eqns.append(
        editor.code.localize(equation, atoms, [output.atom for output in outputs], branches=made)
    )
    for each in found:
        editor.include(each, operands)


def partition_scan(editor: JaxprEditor, equation: Any, values: Sequence[Value]) -> None:
    """Writes a `scan` whose rounds run on blocks.

    A loop over a sharded dimension runs on each device's own block of it, if rounds do not depend on each
    other; else it takes all of it. State that each round takes as it is, is gathered before the loop.
    """
    if id(equation) in editor.context.pipelines:
        from scalax._spmd.pipelines.schedule import partition_pipeline  # here, because few steps have stages

        partition_pipeline(editor, equation, values, editor.context.pipelines[id(equation)])
        return
    loop, backward = loop_of(equation), editor.is_backward(equation)
    if backward:
        finish_forward_results(editor, equation, values)
    constants, begun, stacks = map(list, loop.split(values))
    _reduce(editor, [*constants, *stacks], equation)
    stacks = [
        _converted(editor, x, placements, equation)
        for x, placements in zip(stacks, stack_placements(editor, loop, stacks), strict=True)
    ]
    apart = independent_axes(editor, loop, begun, stacks)
    if apart.axes:
        constants = [_converted(editor, x, apart.replicated(x.placements), equation) for x in constants]
        stacks = [_converted(editor, x, apart.sharded(x.placements), equation) for x in stacks]
    stacks = [_converted(editor, x, apart.without_rounds(x.placements), equation) for x in stacks]
    context = editor.context.along(apart.others)
    arguments_before = [_constant(editor, apart.inside(_argument(x)), x, loop.length) for x in constants]
    elements = [apart.inside(_argument(x)) for x in stacks]
    elements = [x._replace(placements=_element(x.placements)) for x in elements]
    stacked = len(equation.outvars) - loop.num_carry
    carried = [*map(apart.within, _first(loop, begun))]

    def run(*, is_last: bool = False) -> PartitionedJaxpr:
        state = [Argument(x) for x in carried]
        arguments = [*arguments_before, *state, *elements]
        ends: list[Placements | ReductionTarget | None] = [*carried] if is_last else [None] * loop.num_carry
        ends += [REDUCE_TO_STATE] * stacked
        return context.partition(loop.body, arguments, ends, backward=backward, at=equation)

    def convert_constants(placements: Mapping[int, Placements]) -> None:
        for i, x in placements.items():
            constants[i] = _converted(
                editor, constants[i], apart.around(x, constants[i].placements), equation
            )
            arguments_before[i] = _constant(
                editor, apart.inside(_argument(constants[i])), constants[i], loop.length
            )

    inner, carried[:] = _fixed(run, carried, equation)
    carries_examples = any(map(_is_of_examples, carried))
    sums = _sharded_sums(context, equation, carried)
    reduces = context.options.reduce_per_microbatch
    if reduces is None:
        reduces = not _are_few(
            [x for x in equation.outvars[: loop.num_carry] if context.reduction_layouts.is_sharded(x)]
        )
    barred = set[tuple[int, int]]()
    if reduces and not carries_examples:
        barred = {(i, axis) for i, axes in sums.items() for axis in axes}
        inner, carried[:] = _fixed(run, carried, equation, barred)
    gathered = {i: constants[i] for i in inner.gathered_arguments if i < loop.num_consts}
    again = context.options.reshard_after_forward
    if again and not carries_examples and not _are_few([x.var for x in constants if x.is_state]):
        gathered = {i: x for i, x in gathered.items() if not x.is_state}
    if gathered:
        convert_constants(dict.fromkeys(gathered, context.replicated))
        inner, carried[:] = _fixed(run, carried, equation, barred)
    before = loop.num_consts + loop.num_carry
    if kept := [
        i - before for i in inner.gathered_arguments if i >= before and _is_kept(editor, stacks[i - before])
    ]:
        for i in kept:
            stacks[i] = _converted(editor, stacks[i], editor.context.replicated, equation)
            inside = apart.inside(_argument(stacks[i]))
            elements[i] = inside._replace(placements=_element(inside.placements))
        inner, carried[:] = _fixed(run, carried, equation, barred)
    if cut := {i: x for i, x in inner.sliced_arguments.items() if i < loop.num_consts}:
        convert_constants(cut)
        inner, carried[:] = _fixed(run, carried, equation, barred)
    if [*inner.placements[: loop.num_carry]] != carried:
        inner = run(is_last=True)
    ends = apart.results(carried, [_stack(x) for x in inner.placements[loop.num_carry :]])
    outputs = [editor.define(var, x) for var, x in zip(equation.outvars, ends, strict=True)]
    first = [editor.convert(value, x, equation) for value, x in zip(begun, ends, strict=False)]
    numbers = _numbers(editor, inner)
    atoms = [*numbers, *[x.atom for x in constants], *first, *[x.atom for x in stacks]]
    params = {'jaxpr': inner.jaxpr}
    rounds = (loop.length or 0) // apart.devices
    if apart.axes:
        params |= trip_count_param(rounds)
    if numbers:
        params |= scan_counts(len(constants) + 1, loop.num_carry, len(stacks), stacked)
    written = editor.code.localize(equation, atoms, [output.atom for output in outputs], **params)
    editor.eqns.append(written)
    operands = [*constants, *begun, *stacks]
    editor.include(inner, operands, rounds, range(before, len(operands)))


def partition_while(editor: JaxprEditor, equation: Any, values: Sequence[Value]) -> None:
    """Writes a `while` whose rounds run on blocks; all devices decide alike when it ends."""
    loop, backward = loop_of(equation), editor.is_backward(equation)
    constants, begun, _ = map(list, loop.split(values))
    tested = [*values[: loop.num_cond_consts]]
    _reduce(editor, [*tested, *constants, *begun], equation)
    carried, context = [value.placements for value in begun], editor.context

    def run(results: Sequence[Placements | None] | None = None) -> PartitionedJaxpr:
        arguments = [*map(_argument, constants), *[Argument(x) for x in carried]]
        return context.partition(loop.body, arguments, results, backward=backward, at=equation)

    of_each = bool(shape_of(open_jaxpr(loop.cond).outvars[0]))
    ends = None if of_each else [editor.context.replicated]
    if of_each:  # devices that end apart exchange nothing in a round, so state comes before the first one
        tested, constants = (
            [_converted(editor, x, context.replicated, equation) if x.is_state else x for x in each]
            for each in (tested, constants)
        )

    def run_test() -> PartitionedJaxpr:
        arguments = [*map(_argument, tested), *[Argument(x) for x in carried]]
        return context.partition(loop.cond, arguments, ends, backward=backward, at=equation)

    for _ in range(2 if of_each else 1):  # a test may be of examples after one round only
        if of_each:
            carried[:] = _sharded_like(run_test().placements[0], carried)
        inner, carried[:] = _fixed(run, carried, equation)
    if gathered := [i for i in inner.gathered_arguments if i < loop.num_consts]:
        for i in gathered:
            constants[i] = _converted(editor, constants[i], editor.context.replicated, equation)
        inner, carried[:] = _fixed(run, carried, equation)
    inner, test = run(carried), run_test()
    if of_each and not _ends_apart(editor, test, inner, carried):
        # All devices run all rounds, of all examples.
        tested = [_converted(editor, x, context.replicated, equation) for x in tested]
        constants = [_converted(editor, x, context.replicated, equation) for x in constants]
        carried[:], context = [context.replicated] * len(carried), context.keeping_replicated()
        inner, test = run(carried), run_test()
    outputs = [editor.define(var, x) for var, x in zip(equation.outvars, carried, strict=True)]
    first = [editor.convert(value, x, equation) for value, x in zip(begun, carried, strict=True)]
    of_test, of_body = _numbers(editor, test), _numbers(editor, inner)
    atoms = [*of_test, *[x.atom for x in tested], *of_body, *[x.atom for x in constants], *first]
    written = editor.code.localize(
        *(equation, atoms, [output.atom for output in outputs]),
        body_jaxpr=inner.jaxpr,
        cond_jaxpr=test.jaxpr,
        body_nconsts=len(of_body) + len(constants),
        cond_nconsts=len(of_test) + len(tested),
    )
    editor.eqns.append(written)
    editor.include(inner, [*constants, *begun], None)
    editor.include(test, [*tested, *begun], None)


def _sharded_like(decided: Placements, carried: Sequence[Placements]) -> list[Placements]:
    """Returns carried placements of which replicated ones, such as a counter's, are those of the examples.

    Args:
        decided: the placements of the test for each example, whose dimensions all carried values begin with.
        carried: the placements.
    """
    return [
        tuple(
            [
                Shard(b.dim) if isinstance(a, Replicate) and isinstance(b, Shard) else a
                for a, b in zip(placements, decided, strict=True)
            ]
        )
        for placements in carried
    ]


def _ends_apart(
    editor: JaxprEditor, test: PartitionedJaxpr, inner: PartitionedJaxpr, carried: Sequence[Placements]
) -> bool:
    """Returns whether devices may run a loop over examples apart, each until its own end.

    Such a loop has a test for each example, as ``jax.vmap`` makes it, and runs until all are at their end.
    What the compiler exchanges along other mesh axes is not known.
    """
    [decided] = test.placements
    if not all(without_state(x) == without_state(decided) for x in carried):
        return False
    if is_replicated(decided):
        return True
    return not (test.collectives or inner.collectives or editor.context.auto.sizes)


def _sharded_sums(
    context: PartitionContext, equation: Any, carried: Sequence[Placements]
) -> dict[int, list[int]]:
    """Returns the carried values that are sums of what is sharded behind the loop, and along which axes."""
    found = dict[int, list[int]]()
    for i, (var, placements) in enumerate(zip(equation.outvars, carried, strict=False)):
        layout = context.reduction_layouts.of(var)
        for axis, placement in enumerate(placements if layout is not None else ()):
            if placement == SUM and layout is not None and isinstance(layout.placements[axis], Shard):
                found.setdefault(i, []).append(axis)
    return found


def _is_of_examples(placements: Placements) -> bool:
    return any(isinstance(x, Shard) and not x.is_state for x in placements)


def _are_few(variables: Sequence[Any]) -> bool:
    """Whether weights take little memory on every device: at most twice what the largest of them takes."""
    sizes = [size_of(var) * var.aval.dtype.itemsize for var in variables]
    return sum(sizes) <= 2 * max(sizes, default=0)


def _fixed(
    run: Any, carried: list[Placements], equation: Any, barred: Collection[tuple[int, int]] = ()
) -> tuple[PartitionedJaxpr, list[Placements]]:
    """Runs a round until what is carried ends it as it begins it.

    Args:
        run: partitions the round.
        carried: the placements of what is carried; changed while the round runs.
        equation: the loop.
        barred: the carried values, and the axes, by number, along which they are no sums.
    """
    not_sums = set(barred)  # with what was a sum, and did not stay one
    for i, axis in barred:
        carried[i] = (*carried[i][:axis], REPLICATE, *carried[i][axis + 1 :])
    for _ in range(_MOST_ROUNDS):
        inner, after = run(), list[Placements]()
        for i, (begin, end) in enumerate(zip(carried, inner.placements, strict=False)):
            following = [*_next(begin, end)]
            for axis, placement in enumerate(following):
                if (i, axis) in not_sums and isinstance(placement, Partial):
                    following[axis] = REPLICATE
                elif isinstance(begin[axis], Partial) and not isinstance(placement, Partial):
                    not_sums.add((i, axis))
            after.append(tuple(following))
        if after == carried:
            return inner, after
        carried[:] = after
    raise CannotPartition(equation, 'the placements of what it carries do not settle')


def _next(begin: Placements, end: Placements) -> Placements:
    """The placements of a carried value that begins and ends a round in these.

    A sum that was only assumed, and does not end as one, becomes what it ends as.
    """
    return tuple(
        [
            b if isinstance(a, Partial) and not isinstance(b, Partial) else join(a, b)
            for a, b in zip(begin, end, strict=True)
        ]
    )


def _is_used_again(editor: JaxprEditor, value: Value, backward: bool) -> bool:
    """Returns whether state is gathered for several equations of the forward or of the backward pass."""
    equations = gathering_uses(value, editor.uses) if value.is_state else []
    return len([equation for equation in equations if editor.is_backward(equation) == backward]) > 1


def _is_kept(editor: JaxprEditor, value: Value) -> bool:
    """Whether state that is gathered inside of an equation is gathered before it, and kept."""
    return value.is_state and not editor.context.options.reshard_after_forward


def _first(loop: Loop, begun: Sequence[Value]) -> list[Placements]:
    """The first placements of what a loop carries: what is only added to may be a sum."""
    reductions, found = carry_reductions(loop), list[Placements]()
    for i, value in enumerate(begun):
        placements = value.placements
        if value.is_replicated and reductions.of(i) == 'sum':
            placements = (SUM,) * len(placements)
        found.append(placements)
    return found


def _argument(value: Value) -> Argument:
    return Argument(value.placements, value.origin is not None or value.is_state, value.is_zero)


def argument_of(editor: JaxprEditor, value: Value) -> Argument:
    """Returns what is known of the argument of a jaxpr inside, of a value."""
    return _argument(value)._replace(trip_count=editor.trip_count_of(value))


def _constant(editor: JaxprEditor, argument: Argument, value: Value, rounds: int | None) -> Argument:
    """What is known of an argument of a body that all rounds take as it is."""
    return argument._replace(trip_count=(rounds or 1) * editor.trip_count_of(value))


def _converted(editor: JaxprEditor, value: Value, placements: Placements, equation: Any) -> Value:
    """The value in other placements, for one equation."""
    if placements == value.placements:
        return value
    atom = editor.convert(value, placements, equation)
    return Value(value.var, placements, atom, value.origin, is_zero=value.is_zero)


def _define(
    editor: JaxprEditor, equation: Any, inner: PartitionedJaxpr, values: Sequence[Value]
) -> list[Value]:
    outputs = []
    for i, var in enumerate(equation.outvars):
        output = editor.define(var, inner.placements[i])
        origin = inner.origins[i]
        output.origin = values[origin].origin if isinstance(origin, int) else None
        output.is_zero = inner.zeros[i]
        outputs.append(output)
    return outputs


def _numbers(editor: JaxprEditor, inner: PartitionedJaxpr) -> list[Any]:
    """The number of the microbatch, if a jaxpr takes it before its other arguments."""
    return [editor.microbatch_index] if inner.takes_microbatch_index else []


def _taking_number(editor: JaxprEditor, inner: PartitionedJaxpr) -> Any:
    """A jaxpr that takes the number of the microbatch, used or not."""
    if inner.takes_microbatch_index:
        return inner.jaxpr
    jaxpr = open_jaxpr(inner.jaxpr)
    return rebuild_jaxpr(
        inner.jaxpr, [editor.code.scalar_var('int32'), *jaxpr.invars], jaxpr.eqns, jaxpr.outvars
    )


def _reduce(editor: JaxprEditor, values: Sequence[Value], equation: Any) -> None:
    for value in values:
        if value.has_sum:
            editor.reduce(value, equation)


def _joined(placements: Sequence[Placements]) -> Placements:
    first, *others = placements
    for other in others:
        first = tuple([join(a, b) for a, b in zip(first, other, strict=True)])
    return first


def _element(placements: Placements) -> Placements:
    return tuple([Shard(x.dim - 1, x.is_state) if isinstance(x, Shard) else x for x in placements])


def _stack(placements: Placements) -> Placements:
    return tuple([Shard(x.dim + 1, x.is_state) if isinstance(x, Shard) else x for x in placements])
