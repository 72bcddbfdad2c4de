"""The inputs of loops over microbatches.

A batch ``(B, ...)`` is reshaped to ``(M, B / M, ...)``, and a `scan` runs over M.

After the reshape, the first dimension is sharded, so that each device holds entire microbatches. If the loop
carries something, such as a sum of gradients, its purpose is to limit the activations on all devices to one
microbatch at a time. So devices exchange their blocks, after which each holds a shard of every microbatch. A
loop that carries nothing maps examples, and each device runs over its own (`example_loops`). `scans` decides
where a carry, such as a sum of gradients, is reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scalax._jax.equations import Loop, open_jaxpr, producers_of
from scalax._jax.primitives import primitive_name
from scalax._jaxpr.dim_rules import reshape_groups
from scalax._spmd.conversions import JaxprEditor
from scalax._spmd.placements.placement import Placements, Shard, shards_examples
from scalax._spmd.values import Value

# These preserve the dimensions of their operand.
_PRESERVES_DIMS = frozenset(
    ('convert_element_type', 'copy', 'name', 'optimization_barrier', 'sharding_constraint')
)


def xs_placements(editor: JaxprEditor, loop: Loop, xs: Sequence[Value]) -> list[Placements]:
    """Returns the placements to which the xs of a `scan` are converted: microbatches are sharded themselves.

    Args:
        editor: the editor of the jaxpr.
        loop: the `scan`.
        xs: its xs.
    """
    before = [stack.placements for stack in xs]
    sharded = [any(map(_shards_iterations, placements)) for placements in before]
    if not loop.num_carry or not any(sharded):
        return before
    producers = producers_of(open_jaxpr(editor.jaxpr))
    dims = [
        _microbatch_dim(producers, stack.var, editor.context.blocks) if is_sharded else None
        for stack, is_sharded in zip(xs, sharded, strict=True)
    ]
    if any(is_sharded and dim is None for dim, is_sharded in zip(dims, sharded, strict=True)):
        return before
    return [
        tuple(
            [
                placement if dim is None or not _shards_iterations(placement) else Shard(dim)
                for placement in placements
            ]
        )
        for placements, dim in zip(before, dims, strict=True)
    ]


def _shards_iterations(placement: Any) -> bool:
    return shards_examples(placement) and placement.dim == 0


def _microbatch_dim(producers: Any, atom: Any, blocks: int) -> int | None:
    """Returns the batch dimension of a stack of microbatches; None if a value is not such a stack."""
    while (producer := producers.get(id(atom))) and primitive_name(producer) in _PRESERVES_DIMS:
        atom = producer.invars[
            [*map(id, producer.outvars)].index(id(atom)) if len(producer.outvars) > 1 else 0
        ]
    if producer is None or primitive_name(producer) != 'reshape':
        return None
    shape = producer.outvars[0].aval.shape
    for old_dims, new_dims in reshape_groups(producer):
        if len(old_dims) == 1 and len(new_dims) > 1 and new_dims[0] == 0:
            return next((dim for dim in new_dims[1:] if shape[dim] % blocks == 0), None)
    return None
