"""Operations with a partitioning of their own: ``jax.experimental.custom_partitioning``, `sharded_op`.

Such an operation has a function of all of its operands, and one of blocks. The partitioner partitions the
first, like any call. If examples are gathered in there, as for a kernel or a call of foreign code, the second
one runs in its place, as if the user had written a ``jax.shard_map``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from scalax._core.pytree.partition_specs import canonical_entry, entry_axes
from scalax._jax.custom_partitioning import as_shard_map
from scalax._jax.equations import annotated_call_jaxpr, shape_of
from scalax._spmd.conversions import JaxprEditor
from scalax._spmd.loops.control_flow import argument_of, partition_call
from scalax._spmd.operations.user_shard_maps import partition_shard_map
from scalax._spmd.placements.placement import REPLICATE, Shard, spec_of
from scalax._spmd.values import Value


def partition_custom(editor: JaxprEditor, equation: Any, values: Sequence[Value]) -> None:
    """Writes an operation with a partitioning of its own."""
    backward = editor.is_backward(equation)
    arguments = [argument_of(editor, value) for value in values]
    inner = editor.context.partition(
        annotated_call_jaxpr(equation), arguments, backward=backward, at=equation
    )
    mapped = None
    if editor.context.microbatch_axis is None and any(each.what == 'examples' for each in inner.collectives):
        specs = [_spec(editor, value) for value in values]
        mapped = as_shard_map(equation, specs, editor.context.mesh)
    if mapped is None:
        partition_call(editor, equation, values)
    else:
        partition_shard_map(editor, mapped, values)


def _spec(editor: JaxprEditor, value: Value) -> PartitionSpec:
    """The spec of an operand along all mesh axes; state comes replicated along those of the batch."""
    context = editor.context
    examples = [x if isinstance(x, Shard) and not x.is_state else REPLICATE for x in value.placements]
    along_batch = spec_of(tuple(examples), context.axes)
    pairs = itertools.zip_longest(along_batch, context.auto.of(value.var), fillvalue=())
    entries = [canonical_entry((*entry_axes(entry), *others)) for entry, others in pairs]
    return PartitionSpec(*entries[: len(shape_of(value.var))])
