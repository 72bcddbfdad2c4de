"""What a forward pass leaves for later, finished before the first loop of the backward pass.

The loss and the gradient of the last weight are sums over the logits, and nothing in the loop over the layers
takes them. A compiler may compute them behind the loop, and hold the logits until then. So they are finished
before it: gradients are reduced to the layout of their weights, and the loop begins behind a barrier, which
all of them are before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scalax._jax.equations import Literal, is_on_device, open_jaxpr
from scalax._jax.primitives import primitive_name
from scalax._spmd.conversions import JaxprEditor
from scalax._spmd.values import Value

# What takes a term of a sum, and makes a term of it.
_KEEPING = frozenset(('convert_element_type', 'mul', 'neg', 'reshape', 'squeeze', 'transpose'))
_ADDS = frozenset(('add', 'add_any'))


def finish_forward_results(editor: JaxprEditor, loop: Any, operands: Sequence[Value]) -> None:
    """Finishes what is computed so far for equations behind the first loop of a backward pass.

    Args:
        editor: the jaxpr that is partitioned.
        loop: the equation of a loop of a backward pass.
        operands: its operands, of which one waits for what is finished.
    """
    if editor.context.microbatch_axis is not None:
        return
    inner = open_jaxpr(editor.jaxpr)
    number = next(i for i, equation in enumerate(inner.eqns) if equation is loop)
    if any(primitive_name(x) == 'scan' and editor.is_backward(x) for x in inner.eqns[:number]):
        return  # what a backward pass leaves is computed of cotangents, which take little memory
    behind = inner.eqns[number + 1 :]
    taken = {id(x) for equation in behind for x in equation.invars} | {*map(id, inner.outvars)}
    taken -= {*map(id, loop.invars)}
    first = next((x for x in operands if x.has_examples and not x.has_sum and is_on_device(x.var)), None)
    pending = [value for value in editor.values.values() if id(value.var) in taken and _is_pending(value)]
    if first is None or not pending:
        return
    wanted = editor.context.reduction_layouts
    for value in pending:
        if value.has_sum and wanted.is_sharded(value.var) and not _is_added(editor, value.var, behind):
            editor.reduce(value, editor.producer_of(value))
    editor.add_barrier([first, *pending], loop)


def _is_pending(value: Value) -> bool:
    """Whether a value may be a sum over examples, or be computed of one; others are cheap, or state."""
    is_computed = value.argument is None and value.producer is None and value.origin is None
    is_sum = value.has_sum or value.is_replicated or value.is_state
    return is_computed and is_sum and not isinstance(value.var, Literal) and is_on_device(value.var)


def _is_added(editor: JaxprEditor, var: Any, behind: Sequence[Any]) -> bool:
    """Whether a sum is added to another one, so that both are reduced at once."""
    users = [equation for equation in behind if any(x is var for x in equation.invars)]
    if len(users) != 1:  # a sum that is used more than once is reduced first
        return False
    [user] = users
    if primitive_name(user) in _ADDS:
        return any(editor.context.depends_on_examples(x) for x in user.invars if x is not var)
    return primitive_name(user) in _KEEPING and _is_added(editor, user.outvars[0], behind)
