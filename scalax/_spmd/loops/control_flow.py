"""Partitioning of calls and of `cond`: their jaxprs are partitioned for the placements of the operands."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from scalax._jax.equations import (
    ANNOTATED_CALLS,
    annotated_call_jaxpr,
    branches,
    call_jaxpr,
    open_jaxpr,
    sharding_params,
)
from scalax._jax.manual_axes import rebuild_jaxpr
from scalax._jax.primitives import primitive_name
from scalax._spmd.conversions import JaxprEditor
from scalax._spmd.placements.placement import Placements, join
from scalax._spmd.placements.state_casts import gathering_uses
from scalax._spmd.placements.user_constraints import apply_sharding
from scalax._spmd.values import PartitionedJaxpr, Value


def partition_call(editor: JaxprEditor, equation: Any, values: Sequence[Value]) -> None:
    """Writes a call whose jaxpr runs on local shards."""
    context, backward = editor.context, editor.is_backward(equation)
    in_shardings, out_shardings = sharding_params(equation) if primitive_name(equation) == 'jit' else ({}, {})
    for i, sharding in in_shardings.items():
        apply_sharding(editor, equation, values[i], sharding)
    is_annotated = primitive_name(equation) in ANNOTATED_CALLS
    jaxpr = annotated_call_jaxpr(equation) if is_annotated else call_jaxpr(equation)

    def partition(values: Sequence[Value]) -> PartitionedJaxpr:
        arguments = [*map(editor.argument_info, values)]
        return context.partition(jaxpr, arguments, backward=backward, caller=equation)

    def convert(values: Sequence[Value], targets: Mapping[int, Placements]) -> list[Value]:
        return [
            editor.converted(value, targets[i], equation) if i in targets else value
            for i, value in enumerate(values)
        ]

    inner = partition(values)
    gathered = [
        i
        for i in inner.gathered_arguments
        if editor.is_gathered_once(values[i]) or _has_several_uses(editor, values[i], backward)
    ]
    if gathered:
        values = convert(values, dict.fromkeys(gathered, context.replicated))
        inner = partition(values)
    # If the call only uses a block of an operand, each device computes that block before the call. Zeros
    # stay replicated, since they may also be the initial value of a sum.
    sliced = {
        i: placements
        for i, placements in inner.sliced_arguments.items()
        if values[i].producer is not None and not values[i].is_zero
    }
    if sliced:
        values = convert(values, sliced)
        inner = partition(values)
    outputs = _define_results(editor, equation, inner, values)
    atoms = [*editor.microbatch_index_of(inner), *[value.atom for value in values]]
    # The annotations of a call hold for global arrays only, so the call is replaced by its function.
    call = editor.code.jit_call if is_annotated else editor.code.call
    editor.eqns.append(call(equation, inner.jaxpr, atoms, [output.atom for output in outputs]))
    editor.include(inner, values)
    for i, sharding in out_shardings.items():
        apply_sharding(editor, equation, outputs[i], sharding)


def partition_cond(editor: JaxprEditor, equation: Any, values: Sequence[Value]) -> None:
    """Writes a `cond` whose branches run on local shards, and return the same placements."""
    context, [index, *operands] = editor.context, values
    editor.reduce_all(operands, equation)
    index_atom = editor.convert(index, context.replicated, equation)
    arguments, backward = [*map(editor.argument_info, operands)], editor.is_backward(equation)

    def partition(results: Sequence[Placements] | None = None) -> list[PartitionedJaxpr]:
        return [
            context.partition(branch, arguments, results, backward=backward, caller=equation)
            for branch in branches(equation)
        ]

    joined = map(_join_placements, zip(*[branch.placements for branch in partition()], strict=True))
    results = [
        context.reduced(placements, context.reduction_layouts.of(var), held=True)
        for var, placements in zip(equation.outvars, joined, strict=True)
    ]
    partitioned = partition(results)
    outputs = [editor.define(var, x) for var, x in zip(equation.outvars, results, strict=True)]
    origins_by_result = zip(*[branch.origins for branch in partitioned], strict=True)
    for output, branch_origins in zip(outputs, origins_by_result, strict=True):
        origins = [operands[i].origin for i in branch_origins if isinstance(i, int)]
        if output.is_state and origins:
            output.origin = origins[0]
    microbatch_index = next(filter(None, map(editor.microbatch_index_of, partitioned)), [])
    atoms = [index_atom, *microbatch_index, *[value.atom for value in operands]]
    jaxprs = [
        _with_microbatch_index(editor, branch) if microbatch_index else branch.jaxpr for branch in partitioned
    ]
    editor.eqns.append(
        editor.code.localize(equation, atoms, [output.atom for output in outputs], branches=tuple(jaxprs))
    )
    for branch in partitioned:
        editor.include(branch, operands)


def _has_several_uses(editor: JaxprEditor, value: Value, backward: bool) -> bool:
    """Whether several equations of one pass, forward or backward, gather a state value."""
    equations = gathering_uses(value, editor.uses) if value.is_state else []
    return sum(editor.is_backward(equation) == backward for equation in equations) > 1


def _define_results(
    editor: JaxprEditor, equation: Any, inner: PartitionedJaxpr, values: Sequence[Value]
) -> list[Value]:
    """Defines the results of a call."""
    outputs = []
    for i, var in enumerate(equation.outvars):
        output = editor.define(var, inner.placements[i])
        origin = inner.origins[i]
        output.origin = values[origin].origin if isinstance(origin, int) else None
        output.is_zero = inner.zeros[i]
        outputs.append(output)
    return outputs


def _with_microbatch_index(editor: JaxprEditor, inner: PartitionedJaxpr) -> Any:
    """Returns a jaxpr whose first argument is the index of the microbatch, whether it is used or not."""
    if inner.takes_microbatch_index:
        return inner.jaxpr
    jaxpr = open_jaxpr(inner.jaxpr)
    return rebuild_jaxpr(
        inner.jaxpr, [editor.code.scalar_var('int32'), *jaxpr.invars], jaxpr.eqns, jaxpr.outvars
    )


def _join_placements(placements: Sequence[Placements]) -> Placements:
    """Returns the common placements of a result of several branches."""
    return functools.reduce(
        lambda first, second: tuple([join(a, b) for a, b in zip(first, second, strict=True)]), placements
    )
