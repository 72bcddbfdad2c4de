"""Partitioning of `while` loops, including those with one test for each example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scalax._jax.equations import loop_of, open_jaxpr, shape_of
from scalax._spmd.conversions import JaxprEditor
from scalax._spmd.loops.carry_placements import carry_fixpoint
from scalax._spmd.placements.placement import Placements, Replicate, Shard, without_state_mark
from scalax._spmd.values import Argument, PartitionedJaxpr, Value, is_replicated, without_state


def partition_while(editor: JaxprEditor, equation: Any, values: Sequence[Value]) -> None:
    """Writes a `while` whose body runs on local shards.

    Its test is replicated, so that all devices run equally many iterations. If ``jax.vmap`` made a test for
    each example, each device runs until its own examples have finished, if it exchanges nothing meanwhile.
    """
    loop, backward = loop_of(equation), editor.is_backward(equation)
    body_consts, init, _ = map(list, loop.split(values))
    test_consts = [*values[: loop.num_cond_consts]]
    editor.reduce_all([*test_consts, *body_consts, *init], equation)
    carried, context = [value.placements for value in init], editor.context
    tests_each_example = bool(shape_of(open_jaxpr(loop.cond).outvars[0]))

    def gathered(value: Value) -> Value:
        return editor.converted(value, context.replicated, equation)

    def partition_body(results: Sequence[Placements | None] | None = None) -> PartitionedJaxpr:
        arguments = [*[x.as_argument() for x in body_consts], *map(Argument, carried)]
        return context.partition(loop.body, arguments, results, backward=backward, caller=equation)

    def partition_test() -> PartitionedJaxpr:
        arguments = [*[x.as_argument() for x in test_consts], *map(Argument, carried)]
        results = None if tests_each_example else [context.replicated]
        return context.partition(loop.cond, arguments, results, backward=backward, caller=equation)

    if tests_each_example:
        # Devices that run different numbers of iterations cannot exchange anything, so gather state before.
        test_consts = [x if not x.is_state else gathered(x) for x in test_consts]
        body_consts = [x if not x.is_state else gathered(x) for x in body_consts]
    for _ in range(
        2 if tests_each_example else 1
    ):  # the test may depend on examples after one iteration only
        if tests_each_example:
            carried[:] = _shard_replicated(carried, partition_test().placements[0])
        body = carry_fixpoint(partition_body, carried, equation)
    gathered_consts = [i for i in body.gathered_arguments if i < loop.num_consts]
    if gathered_consts:
        for i in gathered_consts:
            body_consts[i] = gathered(body_consts[i])
        carry_fixpoint(partition_body, carried, equation)
    body, test = partition_body(carried), partition_test()
    if tests_each_example and not _may_end_independently(editor, test, body, carried):
        # All devices run all iterations, on all examples.
        test_consts, body_consts = [*map(gathered, test_consts)], [*map(gathered, body_consts)]
        carried[:], context = [context.replicated] * len(carried), context.keeping_replicated()
        body, test = partition_body(carried), partition_test()
    outputs = [editor.define(var, x) for var, x in zip(equation.outvars, carried, strict=True)]
    init_atoms = [editor.convert(value, x, equation) for value, x in zip(init, carried, strict=True)]
    test_atoms = [*editor.microbatch_index_of(test), *[x.atom for x in test_consts]]
    body_atoms = [*editor.microbatch_index_of(body), *[x.atom for x in body_consts]]
    new_equation = editor.code.localize(
        *(equation, [*test_atoms, *body_atoms, *init_atoms], [output.atom for output in outputs]),
        body_jaxpr=body.jaxpr,
        cond_jaxpr=test.jaxpr,
        body_nconsts=len(body_atoms),
        cond_nconsts=len(test_atoms),
    )
    editor.eqns.append(new_equation)
    editor.include(body, [*body_consts, *init], None)
    editor.include(test, [*test_consts, *init], None)


def _shard_replicated(carried: Sequence[Placements], test: Placements) -> list[Placements]:
    """Shards replicated carried values, such as counters, like the examples.

    Args:
        carried: the placements of the carried values.
        test: the placements of the test for each example. Its dimensions are the first dimensions of all
            carried values.
    """
    return [
        tuple(
            [
                without_state_mark(example_placement)
                if isinstance(placement, Replicate) and isinstance(example_placement, Shard)
                else placement
                for placement, example_placement in zip(placements, test, strict=True)
            ]
        )
        for placements in carried
    ]


def _may_end_independently(
    editor: JaxprEditor, test: PartitionedJaxpr, body: PartitionedJaxpr, carried: Sequence[Placements]
) -> bool:
    """Whether each device may run until its own examples have finished, because it exchanges nothing.

    The compiler may exchange data along Auto axes, which is not known here.
    """
    [test_placements] = test.placements
    if not all(without_state(x) == without_state(test_placements) for x in carried):
        return False
    if is_replicated(test_placements):
        return True
    return not (test.collectives or body.collectives or editor.context.auto.sizes)
