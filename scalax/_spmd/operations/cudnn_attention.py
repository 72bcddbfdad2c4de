"""cuDNN attention (``jax.nn.dot_product_attention(..., implementation='cudnn')``) on local shards.

It is an opaque kernel, but its examples are independent unless sequences are packed or keys are paged. In
these cases, and with dropout, all examples are gathered. The gradient of a bias that all examples share is a
sum over the examples.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from scalax._core.pytree.partition_specs import canonical_entry
from scalax._jax import kernels
from scalax._jax.equations import shape_of, size_of
from scalax._jax.manual_axes import ManualEquations
from scalax._jax.rewriting import rebind
from scalax._spmd.operations.pallas_kernels import in_shard_map
from scalax._spmd.placements.auto_shardings import AutoShardings
from scalax._spmd.placements.placement import REPLICATE, SUM, Placement, Shard, shards_examples

ATTENTION = frozenset(('dot_product_attention_fwd_wrapper', 'dot_product_attention_bwd_wrapper'))

# The indices of the operands: queries, keys and values; a bias; lengths; offsets and page tables, which are
# empty without packing and paging; and, for the gradient, the residuals of the forward pass.
_VALUES, _BIAS, _LENGTHS, _PACKED, _FORWARD = slice(0, 3), 3, slice(4, 6), slice(6, 10), slice(10, 13)


def attention_placements(
    equation: Any, placements: Sequence[Placement]
) -> tuple[list[Placement], list[Placement]] | None:
    """Returns the placements of the operands and of the results; None if attention needs all examples.

    Args:
        equation: cuDNN attention, or its gradient.
        placements: the placements of its operands along one axis.
    """
    operands, is_gradient = equation.invars, kernels.is_attention_gradient(equation)
    if len(operands) != (_FORWARD.stop if is_gradient else _PACKED.stop) or any(
        map(size_of, operands[_PACKED])
    ):
        return None
    shards_other_dims = any(shards_examples(x) and x.dim for x in placements)  # in time or heads
    if shards_other_dims or kernels.has_attention_dropout(equation):
        return None
    examples = shape_of(operands[0])[0]
    operand_placements = list[Placement]()
    for i, atom in enumerate(operands):
        size = shape_of(atom)[0]
        if size not in (examples, 0) and (i != _BIAS or size != 1):
            return None
        operand_placements.append(Shard(0) if size == examples else REPLICATE)
    results: list[Placement] = [Shard(0)] * len(equation.outvars)
    if is_gradient and len(results) > len(operands[_VALUES]) and shape_of(operands[_BIAS])[0] != examples:
        results[-1] = SUM
    return operand_placements, results


def attention_along_auto_axes(
    code: ManualEquations, auto: AutoShardings, equation: Any, operands: Sequence[Any], results: Sequence[Any]
) -> Any:
    """Returns the equation of attention on local shards, where Auto axes may shard the heads.

    Args:
        code: makes equations.
        auto: the shardings along the Auto axes.
        equation: cuDNN attention, or its gradient.
        operands: the variables of its operands, of local shapes.
        results: the variables of its results, of local shapes.
    """
    dim, atoms = kernels.attention_heads_dim(equation), equation.invars
    value_dims = [auto.of(atom) for atom in atoms[_VALUES]]
    axes = {dims[dim] if dims else () for dims in value_dims}
    heads = shape_of(atoms[0])[dim]
    bias_heads = shape_of(atoms[_BIAS])[1] if size_of(atoms[_BIAS]) else heads
    names = axes.pop() if len(axes) == 1 and bias_heads == heads else ()
    entry = canonical_entry(names)
    value_spec = PartitionSpec(*[None] * dim, entry)
    head_spec = PartitionSpec(None, entry)  # of a bias, and of the softmax residuals
    specs = [PartitionSpec()] * len(operands)
    specs[_VALUES] = [value_spec] * 3
    if size_of(atoms[_BIAS]):
        specs[_BIAS] = head_spec
    if kernels.is_attention_gradient(equation):
        specs[_FORWARD] = [head_spec, value_spec, value_spec]
        result_specs = [*[value_spec] * 3, head_spec]
    else:
        result_specs = [value_spec, head_spec]
    specs += result_specs[: len(results)]
    run = functools.partial(rebind, equation)
    return in_shard_map(code, auto, equation, operands, results, specs, run)
