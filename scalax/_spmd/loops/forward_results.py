"""Results of the forward pass that are finished before the first loop of the backward pass.

The loss and the gradient of the last weight are sums over the logits, and the loop over the layers does not
use them. XLA may compute them after the loop, and hold the logits until then. So the partitioner finishes
them first: it reduces such gradients to the layout of their weights, and puts a barrier before the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scalax._jax.equations import Literal, is_on_device, open_jaxpr
from scalax._jax.primitives import primitive_name
from scalax._spmd.conversions import JaxprEditor
from scalax._spmd.values import Value

# Linear operations, from a partial sum to a partial sum.
_LINEAR = frozenset(('convert_element_type', 'mul', 'neg', 'reshape', 'squeeze', 'transpose'))
_ADDS = frozenset(('add', 'add_any'))


def finish_forward_results(editor: JaxprEditor, loop: Any, operands: Sequence[Value]) -> None:
    """Finishes the values that are only used after the first loop of a backward pass, before that loop.

    Args:
        editor: the editor of the jaxpr.
        loop: the equation of a loop of a backward pass.
        operands: its operands, of which one waits for the finished values.
    """
    if editor.context.microbatch_axis is not None:
        return
    jaxpr = open_jaxpr(editor.jaxpr)
    loop_index = next(i for i, equation in enumerate(jaxpr.eqns) if equation is loop)
    if any(primitive_name(x) == 'scan' and editor.is_backward(x) for x in jaxpr.eqns[:loop_index]):
        return  # between backward loops, values depend on cotangents, which take little memory
    later_equations = jaxpr.eqns[loop_index + 1 :]
    used_later = {id(x) for equation in later_equations for x in equation.invars} | {*map(id, jaxpr.outvars)}
    used_later -= {*map(id, loop.invars)}
    delayed = next((x for x in operands if x.has_examples and not x.has_sum and is_on_device(x.var)), None)
    pending = [
        value for value in editor.values.values() if id(value.var) in used_later and _is_pending(value)
    ]
    if delayed is None or not pending:
        return
    layouts = editor.context.reduction_layouts
    for value in pending:
        if (
            value.has_sum
            and layouts.is_sharded(value.var)
            and not _is_added_to_sum(editor, value.var, later_equations)
        ):
            # A sum over replicas that a loop over microbatches accumulates stays partial.
            target = editor.context.reduced(value.placements, layouts.of(value.var), held=True)
            editor.convert_in_place(value, target, editor.producer_of(value))
    editor.add_barrier([delayed, *pending], loop)


def _is_pending(value: Value) -> bool:
    """Whether a value may be a sum over examples, or computed from one. Others are cheap, or state."""
    is_computed = value.argument is None and value.producer is None and value.origin is None
    is_sum = value.has_sum or value.is_replicated or value.is_state
    return is_computed and is_sum and not isinstance(value.var, Literal) and is_on_device(value.var)


def _is_added_to_sum(editor: JaxprEditor, var: Any, later_equations: Sequence[Any]) -> bool:
    """Whether a partial sum is later added to another one, so that both are reduced together."""
    users = [equation for equation in later_equations if any(x is var for x in equation.invars)]
    if len(users) != 1:  # a sum that is used more than once is reduced first
        return False
    [user] = users
    if primitive_name(user) in _ADDS:
        return any(editor.context.depends_on_examples(x) for x in user.invars if x is not var)
    return primitive_name(user) in _LINEAR and _is_added_to_sum(editor, user.outvars[0], later_equations)
