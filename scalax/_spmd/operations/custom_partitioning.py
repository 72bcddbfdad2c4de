"""Operations with custom partitioning: ``jax.experimental.custom_partitioning`` and `sharded_op`.

Such an operation has a function of global arrays and a function of local shards. The partitioner partitions
the first one, like any call. If that gathers examples, as for a kernel or a foreign function, it uses the
second one, as if the user had written a ``jax.shard_map``.
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
from scalax._spmd.loops.control_flow import partition_call
from scalax._spmd.operations.user_shard_maps import partition_shard_map
from scalax._spmd.placements.placement import REPLICATE, shards_examples, spec_of
from scalax._spmd.values import Value


def partition_custom(editor: JaxprEditor, equation: Any, values: Sequence[Value]) -> None:
    """Writes an operation with custom partitioning."""
    backward = editor.is_backward(equation)
    arguments = [*map(editor.argument_info, values)]
    inner = editor.context.partition(
        annotated_call_jaxpr(equation), arguments, backward=backward, caller=equation
    )
    shard_map = None
    if editor.context.microbatch_axis is None and any(
        collective.what == 'examples' for collective in inner.collectives
    ):
        specs = [_spec(editor, value) for value in values]
        shard_map = as_shard_map(equation, specs, editor.context.mesh)
    if shard_map is None:
        partition_call(editor, equation, values)
    else:
        partition_shard_map(editor, shard_map, values)


def _spec(editor: JaxprEditor, value: Value) -> PartitionSpec:
    """Returns the spec of an operand along all mesh axes. State is replicated along the batch axes."""
    context = editor.context
    examples = [x if shards_examples(x) else REPLICATE for x in value.placements]
    along_batch = spec_of(tuple(examples), context.axes)
    pairs = itertools.zip_longest(along_batch, context.auto.of(value.var), fillvalue=())
    entries = [canonical_entry((*entry_axes(entry), *auto_axes)) for entry, auto_axes in pairs]
    return PartitionSpec(*entries[: len(shape_of(value.var))])
