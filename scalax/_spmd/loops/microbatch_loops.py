"""Loops over microbatches: ``(B, ...)`` that is reshaped to ``(M, B / M, ...)``, and a `scan` over M.

Where devices shard the first dimension, each has entire microbatches. If the loop carries something, such as
the sum of gradients, its purpose is to hold the activations of one microbatch at a time on all devices: they
exchange their blocks, and each has a share of every microbatch. A loop that carries nothing maps examples,
and devices run over their own (`example_loops`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scalax._jax.equations import Loop, open_jaxpr, producers_of
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.dim_rules import reshape_groups
from scalax._spmd.conversions import JaxprEditor
from scalax._spmd.placements.placement import Placements, Shard
from scalax._spmd.values import Value

# These keep the dimensions of their operand.
_KEEPING = frozenset(('convert_element_type', 'copy', 'name', 'optimization_barrier', 'sharding_constraint'))


def stack_placements(editor: JaxprEditor, loop: Loop, stacks: Sequence[Value]) -> list[Placements]:
    """Returns the placements in which a `scan` takes its stacks.

    Of microbatches each device has a share of every one.

    Args:
        editor: the jaxpr that it is in.
        loop: the `scan`.
        stacks: the stacks that it runs over.
    """
    before = [stack.placements for stack in stacks]
    sharded = [any(map(_shards_rounds, placements)) for placements in before]
    if not loop.num_carry or not any(sharded):
        return before
    makers = producers_of(open_jaxpr(editor.jaxpr))
    dims = [
        _examples_dim(makers, stack.var, editor.context.blocks) if is_sharded else None
        for stack, is_sharded in zip(stacks, sharded, strict=True)
    ]
    if any(is_sharded and dim is None for dim, is_sharded in zip(dims, sharded, strict=True)):
        return before
    return [
        tuple([x if dim is None or not _shards_rounds(x) else Shard(dim) for x in placements])
        for placements, dim in zip(before, dims, strict=True)
    ]


def _shards_rounds(placement: Any) -> bool:
    return isinstance(placement, Shard) and placement.dim == 0 and not placement.is_state


def _examples_dim(makers: Any, atom: Any, blocks: int) -> int | None:
    """Returns the dimension of the examples of a microbatch; None if a value is no stack of microbatches."""
    while (maker := makers.get(id(atom))) and primitive_name(maker) in _KEEPING:
        atom = maker.invars[[*map(id, maker.outvars)].index(id(atom)) if len(maker.outvars) > 1 else 0]
    if maker is None or primitive_name(maker) != 'reshape':
        return None
    shape = maker.outvars[0].aval.shape
    for old, new in reshape_groups(maker):
        if len(old) == 1 and len(new) > 1 and new[0] == 0:
            return next((dim for dim in new[1:] if shape[dim] % blocks == 0), None)
    return None
